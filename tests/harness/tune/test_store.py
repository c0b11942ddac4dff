"""What stored choices know of the kernels that they were made of, and which are in the repository."""

import ast
from pathlib import Path

import kernels
from harness.catalogue.architectures import architectures
from harness.compile.launches import implementations
from harness.workers.child import profile
from harness.workers.child.profile import bare, jit_source
from kernels.tuning import TUNED


def test_the_source_is_of_kernels_wherever_they_lie_and_not_of_their_comments(tmp_path: Path, monkeypatch):
    code = bare(ast.parse("def f(x):\n    '''Says.'''\n    return x  # why\n"))
    assert code == bare(ast.parse("def f(x):\n    return x\n"))
    assert code != bare(ast.parse("def f(x):\n    return x + 1\n"))
    returned = "['Return', ('value', ['Name', ('id', \"'x'\"), ('ctx', ['Load'])])]"
    assert code == (  # by every Python: one that adds fields leaves them empty here
        "['Module', ('body', [['FunctionDef', ('name', \"'f'\"), ('args', ['arguments', ('args', [['arg', "
        f"('arg', \"'x'\")]])]), ('body', [{returned}])]])]"
    )
    monkeypatch.setattr(profile, "PACKAGE", tmp_path)
    (tmp_path / "fp8_jit.py").write_text("def widen(x):\n    return x\n")

    def source(folder: str, jit: str, text: str) -> str:
        """The hash for a module that imports a kernel from a file with this text."""
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{jit}.py").write_text(text)
        (place / "tile.py").write_text(f"from kernels.{folder.replace('/', '.')}.{jit} import f\n")
        return jit_source(place / "tile.py")

    text = "from kernels.fp8_jit import widen\n\n\ndef f(x):\n    return widen(x)\n"
    flat = source("flat", "tile_jit", text)
    assert flat == source("nested/triton", "moved_jit", text.replace("\n    return", " return"))
    assert flat != source("nested/triton", "moved_jit", "def f(x): return x\n")
    (tmp_path / "fp8_jit.py").write_text("def widen(x):\n    return 2 * x\n")
    assert flat != jit_source(tmp_path / "flat" / "tile.py"), "a kernel of another folder counts"


def test_each_kernel_has_stored_choices_for_each_architecture():
    there = {(path.parent.name, path.stem) for path in TUNED.glob("*/*.json")}
    of = {(arch, row.name) for op in kernels.OPS for row in implementations(op) for arch in architectures()}
    assert of <= there
