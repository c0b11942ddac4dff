"""Binding to libraries whose versions differ, and to packages that only share a library's name."""

import inspect
import re
import sys
from pathlib import Path

import pytest

from kernels import binding, platform
from kernels.binding import BindingError, Function, Operator, Symbol, first_of
from kernels.op import Unsupported
from kernels.platform import Platform, lookalike, version
from kernels.vendor import Vendor

HERE = Platform("rocm", "gfx942", "cuda:0")


LOOKALIKES = [name for name, facts in platform.LIBRARIES.items() if "other" in facts]


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
        if name.partition(".")[0] in platform.LIBRARIES or name.startswith("somelib"):
            del sys.modules[name]


def library(packages, text: str = "", **modules: str) -> None:
    packages(
        {
            "somelib/__init__.py": text,
            "somelib-0.1.4.dist-info/METADATA": "Metadata-Version: 2.1\nName: somelib\nVersion: 0.1.4\n",
        }
        | {f"somelib/{name}.py": body for name, body in modules.items()}
    )


@pytest.mark.parametrize(("name", "other", "real"), [
    ("aiter", "server.py", ["ops/mha.py"]),
    ("deep_gemm", "jit_kernels/gemm.py", ["_C.abi3.so", "include/deep_gemm/common.cuh"]),
    ("flash_mla", "nothing.py", ["flash_mla_interface.py"]),
    ("triton_kernels", "add_vectors.py", ["matmul_ogs.py"]),
])  # fmt: skip
def test_a_lookalike_is_named_as_such_and_never_imported(packages, name, other, real):
    folder = packages({f"{name}/__init__.py": "raise SystemExit('imported')", f"{name}/{other}": ""})
    reason = HERE.library(name, install="ask your image").reason
    assert f"the installed {name} is PyPI's" in reason and str(folder / name) in reason
    assert reason.endswith("; ask your image")
    for file in real:
        packages({f"{name}/{file}": ""})
        version.cache_clear()
        assert lookalike(name) == "" and HERE.library(name).ok
        (folder / name / file).unlink()


def test_the_doctor_names_lookalikes(packages, here):
    folder = packages({f"{name}/__init__.py": "raise SystemExit('imported')" for name in LOOKALIKES})
    said = here("doctor", "--quick").stdout
    for name in LOOKALIKES:
        assert re.search(rf"not {name} .*{folder / name}", " ".join(said.split())), said


def test_elsewhere_nothing_is_looked_at(packages):
    packages({"aiter/__init__.py": ""})
    assert platform.named("rocm").library("aiter").ok


def test_a_submodule_of_what_is_not_there_has_no_version():
    assert version("no_such_package.cute") is None


ATTEND = Function("somelib.ops.mha.attend", "somelib.attend", needs="q kv", wishes="scale later")


def test_a_library_that_is_not_there_is_a_lack_of_the_machine():
    with pytest.raises(Unsupported, match=r"^somelib cannot be imported: No module named 'somelib'$"):
        ATTEND.find()
    with pytest.raises(Unsupported, match=r"^somelib cannot"):
        Symbol("somelib.attend", "somelib_of_others.attend").find()


WRAPPED = """
def wrap(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

@wrap
def attend(q, kv, scale=1.0):
    return q, kv, scale
"""
NO = " cannot be imported"
CAUSED = """
try:
    raise OSError('_C.so: undefined symbol: log')
except OSError as error:
    raise OSError('Could not load this library') from error
"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("def attend(q, kv): return q, kv", (1, 2)),
        # Of wishes a call gets those that the version takes.
        ("def attend(q, kv, *, scale=1.0): return q, kv, scale", (1, 2, 3)),
        ("def attend(**arguments): return arguments", {"q": 1, "kv": 2, "scale": 3, "later": 4}),
        # What a wrapper hides, as AITER's compile_ops does, is read from the source.
        (WRAPPED, (1, 2, 3)),
        # Another interface is an error of the row.
        ("", BindingError(" has no ops.mha.attend or attend")),
        ("def attend(q): ...", BindingError(": attend an unexpected keyword argument 'kv'")),
        ("def attend(q, kv, page): ...", BindingError(": attend missing a required argument: 'page'")),
        # One that cannot be imported is a lack of the machine.
        ("raise RuntimeError('rocminfo\\n not found')", Unsupported(f"{NO}: rocminfo not found")),
        ("import nothing", Unsupported(f"{NO}: No module named 'nothing'")),
        ("assert False", Unsupported(f"{NO}: AssertionError")),
        (CAUSED, Unsupported(f"{NO}: Could not load this library; caused by: "
                             "_C.so: undefined symbol: log")),
    ],
)  # fmt: skip
def test_a_function_is_bound_as_this_version_has_it(packages, text, wanted):
    library(packages, text)
    if not isinstance(wanted, Exception):
        assert ATTEND.bind(q=1, kv=2, scale=3, later=4)() == wanted
        assert ATTEND.at()[0] == "somelib.attend" and ATTEND.exists()
        assert ATTEND.takes("later") == isinstance(wanted, dict)
        return
    with pytest.raises(type(wanted)) as raised:
        ATTEND.bind(q=1, kv=2, scale=3, later=4)
    assert str(raised.value) == f"somelib 0.1.4{wanted}"
    if "cannot be imported" in str(wanted):
        with pytest.raises(Unsupported, match="cannot be imported"):
            binding.load("somelib")
    elif not text:
        assert not ATTEND.exists()


def test_of_several_unknown_arguments_the_first_declared_is_named():
    many = Function("somelib.attend", needs=" ".join(f"n{i}" for i in range(20)))
    assert many.complaint(inspect.signature(lambda q: q)) == "attend missing a required argument: 'q'"
    assert many.complaint(inspect.signature(lambda: 0)) == "attend an unexpected keyword argument 'n0'"


def test_a_broken_submodule_is_not_taken_for_a_missing_one(packages):
    library(packages, ops="import no_such_thing")
    with pytest.raises(Unsupported, match="no_such_thing"):
        Symbol("somelib.ops.attend").find()


def test_a_function_that_cannot_be_hashed_is_bound(packages):
    """As a compiled function is that is a dataclass."""
    library(
        packages,
        "from dataclasses import dataclass\n@dataclass\nclass Jit:\n    n: int\n"
        "    def __call__(self, q, kv): return q, kv, self.n\nattend = Jit(3)\n",
    )
    assert Function("somelib.attend", needs="q kv").bind(q=1, kv=2)() == (1, 2, 3)


def test_methods_are_bound_to_their_object(packages):
    library(packages, "class Wrapper:\n    def run(self, q, page=1): return q, page")
    run = Function("somelib.Wrapper.run", needs="q", wishes="page later")
    assert run.bind(method_of=Symbol("somelib.Wrapper").find()(), q=1, page=2, later=3)() == (1, 2)


def test_what_has_a_schema_tells_by_it_and_what_has_none_gets_what_is_needed_alone():
    linear = Function("torch.ops.aten.linear.default", needs="input weight", wishes="bias later")
    assert set(linear.bind(input=1, weight=2, bias=3, later=4).keywords) == {"input", "weight", "bias"}
    silent = Function("torch._C._get_cpp_backtrace", needs="q", wishes="later")
    with pytest.raises(ValueError):
        inspect.signature(silent.find())
    assert silent.bind(q=1, later=4).keywords == {"q": 1}


def test_a_row_gives_what_it_declares():
    for given in ({"q": 1}, {"q": 1, "kv": 2, "page": 3}):
        with pytest.raises(AssertionError, match="the declaration of"):
            ATTEND.bind(**given)


def test_needs_of_some_cases_may_be_wishes_of_others(packages):
    library(packages, "def attend(q, kv): ...")
    with pytest.raises(BindingError, match="unexpected keyword argument 'scale'"):
        ATTEND.needing("scale", when="kv=fp8").bind(q=1, kv=2, scale=3)


def test_the_first_alternative_that_exists_is_taken(packages):
    library(packages, "def older(a): ...")
    newer, older = Function("somelib.newer", needs="a"), Function("somelib.older", needs="a")
    assert first_of(newer, older) is older
    with pytest.raises(BindingError, match="has no newer"):
        first_of(newer, Function("somelib.oldest"))


def test_an_older_library_than_a_row_takes_is_said(packages):
    library(packages)

    class Row(Vendor):
        name, requires, kinds, library, since = "ours.row", "", ("rocm",), "somelib", "0.1.10"

        def prepare(self, operands, out): ...

    row = Row()
    assert row.recent(HERE).reason == "needs somelib 0.1.10 or later; this is 0.1.4"
    assert row.recent(platform.named("rocm")).ok


def test_an_operator_of_torch_is_bound_by_its_schema():
    """One that a library registers: `library._C.name` is torch.ops._C.name."""
    import torch

    library = torch.library.Library("_a_library", "DEF")
    library.define("scale(Tensor a, float by, bool twice=False) -> Tensor")
    library.impl("scale", lambda a, by, twice=False: a * by, "CPU")

    def operator(name: str, positions: int) -> Operator:
        return Operator(f"torch._a_library.{name}", positions, loader="torch")

    assert torch.equal(operator("scale", 2).bind(torch.ones(2), 3.0)(), torch.full((2,), 3.0))
    with pytest.raises(BindingError, match="missing a required argument: 'by'"):
        operator("scale", 1).bind(torch.ones(2))
    with pytest.raises(BindingError, match=r"torch .* has no operator shrink"):
        operator("shrink", 1).bind(torch.ones(2))
    assert not operator("shrink", 1).exists()
    with pytest.raises(Unsupported, match="cannot be imported"):
        Operator("torch._a_library.scale", 2, loader="torch.not_there").find()
