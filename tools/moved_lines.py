"""Says which lines of an engine's source that kernels/engines records moved in another release.

    python -m tools.moved_lines vllm NEW --from OLD [--write]

NEW and OLD are a wheel, a checkout or a site-packages. OLD is the release in which the lines were read.
Without it the tool only says which lines lie outside their function. --write updates the entries whose
function did not change; run tools.write_tables afterwards. The exit code is 1 if a line is not in its place.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.paths import ROOT
from kernels.tables.files import Files, TableError

ENTRY = re.compile(r'^file = "(.+)"\nline = (\d+)\nfunction = "(.+)"$', re.MULTILINE)
MOVED = "moved to line "
parsed = functools.cache(ast.parse)


@dataclass(frozen=True)
class Recorded:
    """A line of an engine's source that is recorded here."""

    where: str
    file: str
    line: int
    function: str
    """The function or constant that contains the line."""


def entries(text: str, where: str) -> Iterator[Recorded]:
    for entry in ENTRY.finditer(text):
        number = text.count("\n", 0, entry.start(2)) + 1
        yield Recorded(f"{where}:{number}", entry[1], int(entry[2]), entry[3])


def part_of(text: str, function: str) -> tuple[int, tuple[str, ...]]:
    """The line at which a function begins, and its lines. A function that is gone has no lines. Raises
    SyntaxError."""
    lines = text.splitlines()
    node: ast.AST | None = parsed(text)
    for name in function.split("."):
        node = next((each for each in ast.walk(node) if name in _names(each)), None) if node else None
    if not isinstance(node, ast.stmt):
        return 1, ()
    return node.lineno, tuple(lines[node.lineno - 1 : node.end_lineno])


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def verdict(recorded: Recorded, old: Files | None, new: Files) -> str:
    """What became of a recorded line: `moved to line 12`; empty if it is in its place. Raises TableError.

    old: the release in which it was read; None if it is not given
    """
    text = new.text(recorded.file) if new.has(recorded.file) else ""
    try:
        first, lines = part_of(text, recorded.function)
        before, were = part_of(old.text(recorded.file), recorded.function) if old else (first, lines)
    except SyntaxError as error:
        return f"its file cannot be parsed by this Python, line {error.lineno}"
    if not lines:
        return "its function is gone" if text else "its file is gone"
    at = recorded.line - before
    if not 0 <= at < len(were):
        return "it is not there in the old release" if old else f"its function begins at line {first}"
    now = first + _kept(were, lines)[at] if at in _kept(were, lines) else 0
    if were != lines:
        return f"its function changed, and the line {f'is now {now}' if now else 'too'}"
    return "" if now == recorded.line else f"{MOVED}{now}"


@functools.cache
def _kept(were: tuple[str, ...], lines: tuple[str, ...]) -> dict[int, int]:
    """Old index -> new index of each line that did not change."""
    blocks = difflib.SequenceMatcher(None, were, lines, autojunk=False).get_matching_blocks()
    return {block.a + at: block.b + at for block in blocks for at in range(block.size)}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("new", type=Path)
    parser.add_argument("--from", dest="old", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    toml = f"kernels/engines/{given.engine}.toml"
    text = (root / toml).read_text()
    try:
        new, old = Files(given.engine, given.new), Files(given.engine, given.old) if given.old else None
        is_read_in_old = old is not None and f'version = "{old.version}"' in text
        if (given.write or old) and not is_read_in_old:
            parser.error(f"--from takes the release that {toml} names, and --write needs it")
        found = [(each, verdict(each, old, new)) for each in entries(text, toml)]
    except TableError as error:
        parser.error(str(error))
    if given.write:
        lines = text.splitlines(keepends=True)
        for each, said in found:
            if said.startswith(MOVED):
                lines[int(each.where.rpartition(":")[2]) - 1] = f"line = {said.removeprefix(MOVED)}\n"
        (root / toml).write_text("".join(lines))
    moved = [(each, said) for each, said in found if said]
    for each, said in moved:
        print(f"{each.where}: {each.file}:{each.line} {each.function}: {said}")
    print(f"{given.engine} {new.version}: {len(found) - len(moved)} of {len(found)} lines in their place")
    return 1 if moved else 0


if __name__ == "__main__":
    raise SystemExit(main())
