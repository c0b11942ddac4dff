"""Comparison of two recorded runs of the same cases, cell by cell: who became faster or slower.

Machines are not the same from one session to the next, so a cell is compared by its ratio to an anchor, an
implementation that did not change between the runs and shared its rounds in both. What rows that did not
change either seem to have gained or lost is the floor between sessions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from harness.plan.arms import PLAIN
from harness.results.read import paired
from harness.results.recorded import RecordedRun, differences
from harness.results.schema import Cell
from harness.statistics.intervals import CONFIDENCE
from harness.statistics.paired import Comparison, verdict

MIN_FLOOR = 0.03
"""Between sessions, where too few unchanged rows are there to show what it is."""
ENOUGH = 3  # of those rows


@dataclass(frozen=True)
class Row:
    """A cell of both runs.

    comparison: time in A over time in B, both relative to the anchor; > 1: B is faster
    anchor:     whom both are relative to; empty where absolute times had to do
    changed:    whether its source, its library or what that picked is another; None where runs are too old
    drift:      it did not change, and its absolute time did
    """

    case: str
    name: str
    weight: float
    a_us: float
    b_us: float
    anchor: str
    changed: bool | None
    comparison: Comparison
    drift: bool = False


@dataclass
class Compared:
    """floor:   between the sessions, and what it rests on
    notes:   what differs and does not forbid comparing
    missing: cells with a time in one of the runs only, and why
    """

    rows: list[Row]
    floor: float
    floor_from: str
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[Row]:
        return [row for row in self.rows if row.comparison.verdict == "slower"]


def compared(a: RecordedRun, b: RecordedRun, confidence: float = CONFIDENCE) -> Compared:
    """Every cell that has a time in both; all verdicts together hold at the confidence (Bonferroni)."""
    shared = [key for key in a.cells if key in b.cells and _timed(a.cells[key]) and _timed(b.cells[key])]
    share = 1 - (1 - confidence) / max(1, len(shared))
    anchors = {case: _anchor(case, a, b) for case, _ in shared}
    raw = [_row(a, b, key, anchors[key[0]], share) for key in shared]
    floor, source = _between_sessions(raw)
    rows = [_judged(row, max(floor, a.floors.get(row.case, 0.0), b.floors.get(row.case, 0.0))) for row in raw]
    missing = [
        f"{name} at {case}: {_absence(a, b, (case, name))}"
        for case, name in _either(a, b)
        if (case, name) not in shared
    ]
    return Compared(rows, floor, source, differences(a, b), missing)


def _timed(cell: Cell) -> bool:
    return cell.status == "ok" and cell.time_us is not None


def _either(a: RecordedRun, b: RecordedRun) -> Iterator[tuple[str, str]]:
    """Cells that one of the runs gave a time."""
    for key in dict.fromkeys([*a.cells, *b.cells]):
        if any(key in s.cells and _timed(s.cells[key]) for s in (a, b)):
            yield key


def _absence(a: RecordedRun, b: RecordedRun, key: tuple[str, str]) -> str:
    where = "A" if key not in a.cells or not _timed(a.cells[key]) else "B"
    cell = (a if where == "A" else b).cells.get(key)
    return f"not in {where}" if cell is None else f"{cell.status} in {where}: {cell.reason}".rstrip(": ")


def _changed(a: Cell, b: Cell) -> bool | None:
    if (a.version, a.picked) != (b.version, b.picked):
        return True
    return a.source != b.source if a.source and b.source else None


def _anchor(case: str, a: RecordedRun, b: RecordedRun) -> str:
    """The baseline, if it did not change as far as is known, else the first who did not; or nobody."""
    names = [name for of, name in a.cells if of == case and (case, name) in b.cells]
    names.sort(key=lambda name: (name != a.run.baseline, name))
    for name in names:
        before, after = a.cells[case, name], b.cells[case, name]
        if _timed(before) and _timed(after) and before.arm == PLAIN and not _changed(before, after):
            return name
    return ""


def _row(a: RecordedRun, b: RecordedRun, key: tuple[str, str], anchor: str, confidence: float) -> Row:
    case, name = key
    before, after = a.cells[key], b.cells[key]
    assert before.time_us and after.time_us
    changed = _changed(before, after)
    if anchor and name != anchor:
        then = paired(before.samples, a.cells[case, anchor].samples, confidence=confidence)
        now = paired(after.samples, b.cells[case, anchor].samples, confidence=confidence)
        comparison = _quotient(now, then)
    else:
        comparison = _quotient(_absolute(after), _absolute(before))
    moved = _quotient(_absolute(after), _absolute(before))
    drift = changed is False and (moved.low > 1 + MIN_FLOOR or moved.high < 1 - MIN_FLOOR)
    return Row(
        case,
        name,
        before.weight,
        before.time_us,
        after.time_us,
        "" if name == anchor else anchor,
        changed,
        comparison,
        drift,
    )


def _absolute(cell: Cell) -> Comparison:
    """1 over its time, with its interval."""
    assert cell.time_us
    low, high = cell.low_us or 0.0, cell.high_us or math.inf
    return Comparison(1 / cell.time_us, 1 / high, 1 / low if low else math.inf, "unclear")


def _quotient(a: Comparison, b: Comparison) -> Comparison:
    """Of two independent ratios; their intervals' half widths add in quadrature, in logs."""
    ratio = a.ratio / b.ratio
    if not all(x > 0 and math.isfinite(x) for x in (a.low, a.high, b.low, b.high)):
        return Comparison(ratio, 0.0, math.inf, "unclear")
    half = math.hypot(math.log(a.high / a.low) / 2, math.log(b.high / b.low) / 2)
    return Comparison(ratio, ratio * math.exp(-half), ratio * math.exp(half), "unclear")


def _between_sessions(rows: Sequence[Row]) -> tuple[float, str]:
    """What unchanged rows moved by, against an anchor that did not change either: the most of them."""
    moves = [abs(math.log(row.comparison.ratio)) for row in rows if row.changed is False and row.anchor]
    if len(moves) < ENOUGH:
        return MIN_FLOOR, f"assumed, as {len(moves)} unchanged rows are too few to show it"
    return max(
        MIN_FLOOR, math.expm1(max(moves))
    ), f"the most that {len(moves)} unchanged rows moved by, at least 3 %"


def _judged(row: Row, floor: float) -> Row:
    """Absolute times of two sessions give no verdict."""
    word = verdict(row.comparison.low, row.comparison.high, floor=floor) if row.anchor else "unclear"
    return replace(row, comparison=replace(row.comparison, verdict=word))


def means(compared: Iterable[Row]) -> dict[str, float]:
    """By implementation, the geometric mean of its rows' ratios, weighted by their cases' weights."""
    by_name: dict[str, list[Row]] = {}
    for row in compared:
        if row.anchor:
            by_name.setdefault(row.name, []).append(row)
    return {
        name: math.exp(
            statistics.fmean([math.log(r.comparison.ratio) for r in rows], [r.weight or 1e-9 for r in rows])
        )
        for name, rows in by_name.items()
    }
