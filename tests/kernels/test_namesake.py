"""Our `kernels` beside Hugging Face's public package of that name, which transformers imports from.

The public one is played by a few small files, written as the real one is (0.17).
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT

# Path below the site folder -> text. `kernels/op.py` has a name that is ours too.
NAMESAKE = {
    "kernels/__init__.py": """
        import importlib.metadata

        __version__ = importlib.metadata.version("kernels")

        from kernels._loader import get_kernel
        from kernels.layer import Device, Mode, kernelize

        def __getattr__(name):
            if name.startswith("_") or name == "nonsense":
                raise AttributeError(f"no {name} here")
            return object()
    """,
    "kernels/_loader.py": """
        LOADED = []

        def get_kernel(name):
            LOADED.append(name)
            return f"kernel {name}"
    """,
    "kernels/op.py": """
        raise AssertionError("ours comes first")
    """,
    "kernels/layer/__init__.py": """
        from kernels._loader import get_kernel
        from .device import Device
        from .mode import Mode

        def kernelize(model):
            from kernels import get_kernel as again

            assert again is get_kernel
            return model
    """,
    "kernels/layer/device.py": """
        class Device:
            def __init__(self, type=None, **kwargs): self.type = type
            def __hash__(self): return 1
    """,
    "kernels/layer/mode.py": """
        import enum

        Mode = enum.Flag("Mode", "FALLBACK INFERENCE TRAINING TORCH_COMPILE")
    """,
    "kernels-VERSION.dist-info/METADATA": """
        Metadata-Version: 2.1
        Name: kernels
        Version: VERSION
    """,
}


def wanted_version() -> str:
    """The oldest that the installed transformers takes."""
    spec = importlib.util.find_spec("transformers")
    text = (Path(spec.origin).parent / "utils" / "import_utils.py").read_text() if spec else ""
    found = re.search(r'^KERNELS_MIN_VERSION = "([\d.]+)"', text, re.MULTILINE)
    return found[1] if found else "0.17.0"


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        version = wanted_version()
        path = folder / name.replace("VERSION", version)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line.removeprefix("        ") for line in text.strip("\n").splitlines()]
        path.write_text("\n".join(lines).replace("VERSION", version) + "\n")
    return folder


@pytest.fixture(scope="module")
def namesake(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("site"), NAMESAKE)


def python(code: str, *path: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs code with the project, then `path`, at the head of the module path."""
    search = os.pathsep.join(map(str, (ROOT, *path)))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd or ROOT,
        env=os.environ | {"PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def run(code: str, *path: Path, cwd: Path | None = None) -> None:
    done = python(code, *path, cwd=cwd)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [
    "from kernels import get_kernel; assert get_kernel('x') == 'kernel x'",
    "import kernels; assert kernels.get_kernel('x') == 'kernel x'",
    "import importlib; assert importlib.import_module('kernels.layer').Mode.INFERENCE; "
    "from kernels.layer.mode import Mode; from kernels import Mode as again; assert again is Mode",
    "import kernels._loader as a; from kernels import Device, get_kernel, kernelize, ThatItMakesUp; "
    "get_kernel('x'); assert a.LOADED == ['x'] and kernelize(3) == 3",
])  # fmt: skip
@pytest.mark.parametrize("first", ["", "import kernels; kernels.OPS; "], ids=["theirs first", "ours first"])
def test_what_is_theirs_comes_from_them(namesake, first, code):
    run(first + code, namesake)


def test_what_is_ours_stays_ours(namesake, tmp_path):
    """Also from another folder."""
    code = f"""
import kernels, kernels.layer
from kernels import get_kernel
from kernels.op import Implementation
from kernels.mla_decode import OP

assert kernels.OPS["mla_decode"] is OP
assert "layer" not in kernels.OPS
assert kernels.__file__.startswith({str(ROOT)!r})
"""
    run(code, namesake, cwd=tmp_path)
    names = "*(i.name for op in kernels.OPS for i in kernels.implementations(op))"
    listing = f"import kernels, sys; print({names})"
    beside = python(f"{listing}; print(*sys.modules, file=sys.stderr)", namesake)
    assert beside.stdout == python(listing).stdout != ""
    loaded = set(beside.stderr.split())
    assert "kernels.op" in loaded
    assert not {"kernels.layer", "kernels._loader", "kernels._namesake"} & loaded, "none of theirs is needed"


@pytest.mark.parametrize("name", ["nonsense", "__version__"])
def test_a_name_that_neither_has(namesake, name):
    stderr = python(f"from kernels import {name}", namesake).stderr
    assert f"ImportError: cannot import name {name!r} from 'kernels'" in stderr


INSTALLED = any(d.metadata["Name"] == "kernels" for d in importlib.metadata.distributions(name="kernels"))
without_it = pytest.mark.skipif(INSTALLED, reason="Hugging Face's kernels is installed")


@without_it
@pytest.mark.parametrize(("code", "error"), [
    ("import kernels; kernels.get_kernel", "AttributeError: module 'kernels' has no attribute 'get_kernel'"),
    ("from kernels import get_kernel", "ImportError: cannot import name 'get_kernel' from 'kernels'"),
    ("import kernels.layer", "ModuleNotFoundError: No module named 'kernels.layer'"),
])  # fmt: skip
def test_without_it_or_with_another_package_of_its_name(tmp_path, code, error):
    assert error in python(code).stderr
    write(tmp_path, {"kernels/__init__.py": "get_kernel = 1", "kernels/layer.py": ""})
    assert error in python(code, tmp_path).stderr


def test_one_that_cannot_be_imported_says_so_each_time(tmp_path):
    broken = {
        "kernels/__init__.py": "get_kernel = 1\nimport kernels\nraise OSError('no such library')",
        "kernels/layer/__init__.py": "",
    }
    write(tmp_path, broken)
    code = """
import kernels

for _ in range(2):
    try:
        from kernels import get_kernel
    except OSError as error:
        assert "no such library" in str(error), error
    else:
        raise AssertionError("a half of it was given out")
"""
    run(code, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.slow
def test_transformers_works_with_it(namesake):
    """Without it vLLM's rows show it, which import transformers."""
    code = """
import kernels
import transformers.integrations.hub_kernels as hub
assert hub.is_kernels_available()
assert kernels.OPS and kernels.implementations("mla_decode")
"""
    run(code, namesake)
