"""Layers of the tree: which package may import which, and no import circles."""

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from harness.__main__ import DRAWING
from tests.support.paths import ROOT

ARROWS = (ROOT / "docs/architecture.md").read_text("utf-8").partition("## Arrows")[2].split("```")[1]
LAYERS = [layer.replace(",", " ").split() for layer in ARROWS.split("<")] + [["__main__"]]
"""A package may import those of earlier layers. Those of the third layer, BASE, may import each other."""
BASE = LAYERS[2]
REPORT_USES = {"shapes", "kernels", *BASE, "catalogue", "statistics", "plan", "engine", "results", "compile"}
REPORT_USES.add("report")
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
NAMED = re.compile(r"((harness|kernels|shapes)(\.\w+)*)(:[\w.]+)?")


@functools.cache
def modules() -> dict[str, Path]:
    """The files of all modules by dotted name."""
    files = (file for top in ("harness", "kernels", "shapes") for file in (ROOT / top).rglob("*.py"))
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }


def layer(module: str) -> str:
    """The layer of a module: `run` of `harness.run.case`, `kernels` of `kernels.op`; empty for `harness`."""
    parts = module.split(".")
    return "".join(parts[1:2]) if parts[0] == "harness" else parts[0]


def references(module: str, file: Path) -> Iterator[tuple[bool, str]]:
    """Names in a file that may be modules, each with whether an import has it (True) or a string (False)."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from ((True, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            yield from ((True, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and (name := NAMED.fullmatch(str(node.value))):
            yield False, name[1]


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    kinds = (ast.Import, ast.ImportFrom, ast.Constant)
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]


def arrows(strings: bool) -> dict[str, set[str]]:
    """Each module with the modules that it imports, and with `strings` those that its strings name."""
    known = modules()
    graph: dict[str, set[str]] = {module: set() for module in known}
    for module, file in known.items():
        for imported, name in references(module, file):
            target = name if name in known else name.rpartition(".")[0]
            if (imported or strings) and target in known and target != module:
                graph[module].add(target)
    return graph


def may_use(user: str, used: str) -> bool:
    if user == "report":
        return used in REPORT_USES
    return user == used or RANKS[used] < RANKS[user] or (user in BASE and used in BASE)


def test_imports_go_one_way() -> None:
    """No package imports one of a later layer, or of its own layer."""
    assert not [
        f"{module} -> {target}"
        for module, targets in arrows(strings=True).items()
        for target in targets
        if layer(target) and layer(module) and not may_use(layer(module), layer(target))
    ]


def test_imports_have_no_circle() -> None:
    TopologicalSorter(arrows(strings=False)).prepare()


def test_only_pages_draw() -> None:
    """A node without the libraries that draw can measure all the same."""
    users = {
        module
        for module, file in modules().items()
        for imported, name in references(module, file)
        if imported and name.split(".")[0] in DRAWING
    }
    assert users and {layer(module) for module in users} == {"page"}
