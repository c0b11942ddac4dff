"""Binding to libraries whose versions differ, and to packages that only share a library's name."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest

from kernels import binding, platform
from kernels.op import Unsupported
from kernels.platform import Platform, lookalike, version

HERE = Platform("rocm", "gfx942", "cuda:0")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Writes files of packages onto the path; what was imported and looked up is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    version.cache_clear()

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    yield write
    version.cache_clear()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in platform._MARKS or name.startswith("somelib"):
            del sys.modules[name]


def library(packages, text: str = "", **modules: str) -> None:
    packages(
        {
            "somelib/__init__.py": text,
            "somelib-0.1.4.dist-info/METADATA": "Metadata-Version: 2.1\nName: somelib\nVersion: 0.1.4\n",
        }
        | {f"somelib/{name}.py": body for name, body in modules.items()}
    )


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("aiter", "aiter/server.py"),
        ("deep_gemm", "deep_gemm/jit_kernels/gemm.py"),
        ("flash_mla", "flash_mla/nothing.py"),
        ("triton_kernels", "triton_kernels/add_vectors.py"),
    ],
)
def test_a_lookalike_is_named_as_such_and_never_imported(packages, name, file):
    folder = packages({f"{name}/__init__.py": "raise SystemExit('imported')", file: ""})
    support = HERE.library(name, install="ask your image")
    assert not support.ok
    assert f"the installed {name} is PyPI's" in support.reason
    assert str(folder / name) in support.reason
    assert support.reason.endswith("; ask your image")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("aiter", "aiter/ops/mha.py"),
        ("deep_gemm", "deep_gemm/_C.abi3.so"),
        ("deep_gemm", "deep_gemm/include/deep_gemm/common.cuh"),
        ("flash_mla", "flash_mla/flash_mla_interface.py"),
        ("triton_kernels", "triton_kernels/matmul_ogs.py"),
    ],
)
def test_the_real_one_is_taken(packages, name, file):
    packages({f"{name}/__init__.py": "", file: ""})
    assert lookalike(name) == ""
    assert HERE.library(name).ok


def test_the_doctor_names_lookalikes(packages, cli):
    texts = {"__init__.py": "raise SystemExit('imported')", "other.py": ""}
    folder = packages({f"{name}/{file}": text for name in platform._MARKS for file, text in texts.items()})
    done = cli("doctor", "--quick", "--json", "-", PYTHONPATH=folder)
    assert done.returncode == 0, done.stderr
    libraries = json.loads(done.stdout)["libraries"]
    said = cli("doctor", "--quick", PYTHONPATH=folder).stdout
    for name in platform._MARKS:
        assert libraries[name].startswith("PyPI's ")
        assert str(folder / name) in libraries[name]
        assert f"not {name} " in said


def test_elsewhere_nothing_is_looked_at(packages):
    packages({"aiter/__init__.py": ""})
    assert platform.named("rocm").library("aiter").ok


def test_a_submodule_of_what_is_not_there_has_no_version():
    assert version("no_such_package.cute") is None


def test_what_a_version_lacks_is_named(packages):
    library(packages)
    with pytest.raises(Unsupported, match=r"^somelib 0\.1\.4 has no ops\.mha\.attend or attend$"):
        binding.find("somelib.ops.mha.attend", "somelib.attend")


def test_a_function_is_found_where_this_version_has_it(packages):
    library(packages, "def attend(): pass")
    assert binding.find("somelib.ops.mha.attend", "somelib.attend").__name__ == "attend"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('rocminfo\\n not found')", "rocminfo not found"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("assert False", "AssertionError"),
    ],
)
def test_one_that_cannot_be_imported_says_why(packages, text, reason):
    library(packages, text)
    for bind in (lambda: binding.load("somelib"), lambda: binding.find("somelib.attend")):
        with pytest.raises(Unsupported) as raised:
            bind()
        assert str(raised.value) == f"somelib 0.1.4 cannot be imported: {reason}"


def test_a_broken_submodule_is_not_taken_for_a_missing_one(packages):
    library(packages, "def attend(): pass", ops="import no_such_thing")
    with pytest.raises(Unsupported, match="no_such_thing"):
        binding.find("somelib.ops.attend", "somelib.attend")


def test_arguments_are_those_that_the_signature_takes(packages):
    library(packages, "def attend(q, kv, *, scale=1.0): pass")
    attend = binding.find("somelib.attend")
    assert binding.keywords(attend, {"q": 1, "kv": 2}, {"scale": 3, "later": 4}) == {
        "q": 1,
        "kv": 2,
        "scale": 3,
    }
    assert binding.takes(attend, "scale")
    assert not binding.takes(attend, "later")
    with pytest.raises(Unsupported, match=r"^somelib 0\.1\.4's attend takes no page_size$"):
        binding.keywords(attend, {"q": 1, "kv": 2, "page_size": 1})
    with pytest.raises(Unsupported, match=r"^somelib 0\.1\.4's attend wants kv, which is not known here$"):
        binding.keywords(attend, {"q": 1})


def test_a_function_that_takes_anything_is_given_everything(packages):
    library(packages, "def attend(**arguments): pass")
    assert binding.keywords(binding.find("somelib.attend"), {"q": 1}, {"later": 4}) == {"q": 1, "later": 4}


def test_operators_of_torch_tell_by_their_schema():
    import torch

    add = torch.ops.aten.add.Tensor
    assert binding.keywords(add, {"self": 1, "other": 2}, {"alpha": 3, "later": 4}) == {
        "self": 1,
        "other": 2,
        "alpha": 3,
    }
    with pytest.raises(Unsupported, match=r"add takes no later"):
        binding.keywords(add, {"self": 1, "other": 2, "later": 3})


def test_functions_of_cpp_are_given_everything():
    import torch

    tell_nothing = torch._C._get_cpp_backtrace
    with pytest.raises(ValueError):
        inspect.signature(tell_nothing)
    assert binding.keywords(tell_nothing, {"q": 1}, {"later": 4}) == {"q": 1, "later": 4}
