"""Numbers as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from harness.results.schema import Cell, Verdict

WIDTH = 150


def unsupported(cells: Iterable[Cell]) -> Iterator[str]:
    """Each reason once, with those that it keeps away."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.status == "unsupported":
            reasons.setdefault(cell.reason, []).append(cell.name)
    for reason, names in reasons.items():
        yield textwrap.fill(f"unsupported, {reason}: {', '.join(names)}", WIDTH, subsequent_indent="  ")


def interval_of(cell: Cell) -> str:
    return f"{micro(cell.low_us)}..{micro(cell.high_us)}" if cell.low_us and cell.high_us else ""


def micro(value: float | None) -> str:
    """Microseconds in three or four figures: `48.1 ms`, `312 us`."""
    if value is None:
        return ""
    number, unit = (
        (value / 1e6, "s") if value >= 1e6 else (value / 1e3, "ms") if value >= 1e3 else (value, "us")
    )
    return f"{number:.4g} {unit}"


def ratio_of(verdict: Verdict) -> str:
    if verdict.ratio is None:
        return "?"
    if verdict.low is None or verdict.high is None:
        return f"{verdict.ratio:.3f}x"
    return f"{verdict.ratio:.3f}x ({verdict.low:.3f}..{verdict.high:.3f})"
