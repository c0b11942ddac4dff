"""Writes the tables of docs/engines.md from kernels/engines; what stands above them stays.

PYTHONPATH=. python tools/engine_defaults.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kernels
from kernels import engines
from kernels.engines import EngineDefault

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "engines.md"
HEADERS = ("engine", "architecture", "case", "runs", "decided in")


def document(text: str) -> str:
    """A text with the tables of today after what stands above its first table's heading."""
    return text.partition("\n## `")[0].rstrip() + "\n" + "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    entries = [entry for engine in engines.engines() for entry in engines.defaults(engine)]
    for op in kernels.OPS:
        of_op = [entry for entry in entries if entry.op == op]
        if not of_op:
            continue
        yield from ("", f"## `{op}`", "", _row(HEADERS), _row(("---",) * len(HEADERS)))
        yield from (_row(_cells(entry)) for entry in of_op)


def _cells(entry: EngineDefault) -> tuple[str, ...]:
    flags = f", with `{entry.flags}`" if entry.flags else ""
    return (
        f"{entry.engine} {entry.version}",
        ", ".join(entry.archs),
        (" or ".join(entry.when) or "all") + flags,
        f"`{entry.row}`" if entry.row else f"no row: {entry.why}",
        f"`{entry.file}:{entry.line}` `{entry.function}`",
    )


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
