"""A hash of the suite's own code that a row consists of, so that a comparison of two revisions can tell which
rows' code changed."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import kernels
from kernels.op import Implementation

PACKAGE = Path(kernels.__file__).parent
CONTRACTS = {"op", "operands", "platform", "sizes", "support", "visibility"}
"""Modules of kernels/ whose code surrounds a call and is not part of it."""


def source_of(implementation: Implementation) -> str:
    """A hash, 12 hexadecimal digits, of the provider's file and of all files of kernels/ that it imports,
    directly or not. Comments, docstrings, layout and the place of a file do not count. The library's own
    code does not
    either: `version` stands for it."""
    return _hash(Path(inspect.getfile(type(implementation))))


@functools.cache
def _hash(provider: Path) -> str:
    todo, seen = [provider], set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += _imported(path)
    texts = sorted(bare(ast.parse(path.read_text())) for path in seen)
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:12]


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package, *rest = name.split(".")
            if package == "kernels" and rest and not (len(rest) == 1 and rest[0] in CONTRACTS):
                file = _folder(rest).joinpath(*rest[1:]).with_suffix(".py")
                if file.is_file():
                    yield file


def _folder(names: Sequence[str]) -> Path:
    """The folder of the subpackage of kernels/ that is named first; an op may lie outside of kernels/."""
    op = sys.modules.get(f"kernels.{names[0]}")
    folders = getattr(op, "__path__", None)
    return Path(folders[0]) if folders else PACKAGE / names[0]


def bare(tree: ast.Module) -> str:
    """The code of a module without comments, docstrings and layout, and without imports from kernels/,
    which only say where other code lies."""
    tree = _WithoutOwnImports().visit(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return repr(_fields(tree))


def _fields(node: object) -> object:
    """A syntax tree as lists, without empty fields. `ast.unparse` and `ast.dump` are of no use here: what
    they write of a tree depends on the version of Python."""
    if isinstance(node, ast.AST):
        filled = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return [type(node).__name__, *((name, _fields(value)) for name, value in filled)]
    return [_fields(each) for each in node] if isinstance(node, list) else repr(node)


class _WithoutOwnImports(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        return None if (node.module or "").partition(".")[0] == "kernels" else node
