"""What stored choices know of the kernels that they were made of, and which are in the repository."""

import ast
from pathlib import Path

import kernels
from harness.catalogue.architectures import architectures
from harness.compile.launches import implementations
from harness.tune import store
from harness.workers.child.profile import bare
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
    monkeypatch.syspath_prepend(str(tmp_path))

    def source(folder: str, jit: str, text: str) -> str:
        """The hash for a module that imports a kernel from a file with this text."""
        (tmp_path / "suite" / folder).mkdir(parents=True, exist_ok=True)
        module = f"suite.{folder.replace('/', '.')}"
        (tmp_path / "suite" / folder / f"{jit}.py").write_text(text)
        (tmp_path / "suite" / folder / "tile.py").write_text(f"from {module}.{jit} import f\n")
        return store.source(type("Tile", (), {"__module__": f"{module}.tile"})())

    text = "from kernels.fp8_jit import widen\n\n\ndef f(x):\n    return widen(x)\n"
    flat = source("flat", "tile_jit", text)
    assert flat == source("nested/triton", "moved_jit", text.replace("\n    return", " return"))
    assert flat != source("nested/triton", "moved_jit", "def f(x): return x\n")


def test_each_kernel_has_stored_choices_for_each_architecture():
    there = {(path.parent.name, path.stem) for path in TUNED.glob("*/*.json")}
    of = {(arch, row.name) for op in kernels.OPS for row in implementations(op) for arch in architectures()}
    assert of <= there
