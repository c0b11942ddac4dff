"""Says which lines of an engine's source moved in another release. The lines are those that kernels/engines
records.

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
    """A line of an engine's source, as an entry of kernels/engines records it."""

    toml_line: int  # the line of the entry that has the number
    file: str
    line: int
    function: str
    """The function or constant that contains the line, with the classes around it: `Class.function`."""


def entries(text: str) -> Iterator[Recorded]:
    """All entries in the text of a TOML file of kernels/engines."""
    for entry in ENTRY.finditer(text):
        toml_line = text.count("\n", 0, entry.start(2)) + 1
        yield Recorded(toml_line, entry[1], int(entry[2]), entry[3])


def part_of(text: str, function: str) -> tuple[int, tuple[str, ...]]:
    """The number of a function's first line, and its lines, none if it is gone. Raises SyntaxError."""
    lines = text.splitlines()
    node: ast.AST = parsed(text)
    for name in function.split("."):
        named = [inner for inner in ast.walk(node) if name in _names(inner)]
        if not named:
            return 1, ()
        node = named[0]
    assert isinstance(node, ast.stmt)
    return node.lineno, tuple(lines[node.lineno - 1 : node.end_lineno])


def _names(node: ast.AST) -> list[str]:
    """The names that a node of a syntax tree defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []


def what_became(recorded: Recorded, old: Files | None, new: Files) -> str:
    """What became of a line that was recorded in the old release, if that is given: `moved to line 12`; empty
    if it is in its place. Raises TableError."""
    text = new.text(recorded.file) if new.has(recorded.file) else ""
    try:
        new_first, new_lines = part_of(text, recorded.function)
        old_first, old_lines = new_first, new_lines
        if old:
            old_first, old_lines = part_of(old.text(recorded.file), recorded.function)
    except SyntaxError as error:
        return f"its file cannot be parsed by this Python, line {error.lineno}"
    if not new_lines:
        return "its function is gone" if text else "its file is gone"
    index = recorded.line - old_first
    if not 0 <= index < len(old_lines):
        return "it is not there in the old release" if old else f"its function begins at line {new_first}"
    new_index = _unchanged(old_lines, new_lines).get(index)
    if new_index is None:
        return "its function changed, and the line too"
    now = new_first + new_index
    if old_lines != new_lines:
        return f"its function changed, and the line is now {now}"
    return "" if now == recorded.line else f"{MOVED}{now}"


@functools.cache
def _unchanged(old_lines: tuple[str, ...], new_lines: tuple[str, ...]) -> dict[int, int]:
    """Old index -> new index of each line that did not change."""
    blocks = difflib.SequenceMatcher(None, old_lines, new_lines, autojunk=False).get_matching_blocks()
    return {block.a + i: block.b + i for block in blocks for i in range(block.size)}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("engine", choices=("sglang", "vllm"))
    parser.add_argument("new", type=Path)
    parser.add_argument("--from", dest="old", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    toml = f"kernels/engines/{options.engine}.toml"
    text = (root / toml).read_text()
    try:
        new = Files(options.engine, options.new)
        old = Files(options.engine, options.old) if options.old else None
        is_read_in_old = old is not None and f'version = "{old.version}"' in text
        if (options.write or old) and not is_read_in_old:
            parser.error(f"--from takes the release that {toml} names, and --write needs it")
        changes = [(entry, what_became(entry, old, new)) for entry in entries(text)]
    except TableError as error:
        parser.error(str(error))
    if options.write:
        lines = text.splitlines(keepends=True)
        for entry, what in changes:
            if what.startswith(MOVED):
                lines[entry.toml_line - 1] = f"line = {what.removeprefix(MOVED)}\n"
        (root / toml).write_text("".join(lines))
    moved = [(entry, what) for entry, what in changes if what]
    for entry, what in moved:
        print(f"{toml}:{entry.toml_line}: {entry.file}:{entry.line} {entry.function}: {what}")
    in_place = len(changes) - len(moved)
    print(f"{options.engine} {new.version}: {in_place} of {len(changes)} lines in their place")
    return 1 if moved else 0


if __name__ == "__main__":
    raise SystemExit(main())
