"""Comparison of two recorded runs of the same cases, cell by cell: who became faster or slower.

Machines are not the same from one session to the next, so a cell is compared by its ratio to a baseline, an
implementation that did not change between the runs and shared its rounds in both. What rows that did not
change either seem to have gained or lost is the noise between sessions. Where another device measured a case
the spread of the devices is added to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from harness.plan.settings import PLAIN
from harness.results.read import paired
from harness.results.recorded import RecordedRun, differences, other_devices
from harness.results.schema import Cell, DeviceUsed
from harness.statistics.independent import measured, quotient
from harness.statistics.intervals import CONFIDENCE, weighted_mean
from harness.statistics.paired import Comparison, verdict

MIN_FLOOR = 0.03
"""Between sessions, where too few unchanged rows are there to show what it is."""
ENOUGH = 3  # of those rows
UNKNOWN_SPREAD = 0.08
"""Of devices that no run calibrated together: what GPUs of one model in one cluster lie apart on average, by
more than 18,800 hours on five clusters (Sinha and others 2022, arXiv:2208.11035). Not infinite, though single
devices lie further apart: the baseline cancels what makes all rows of a device slower."""


@dataclass(frozen=True)
class Row:
    """A cell of both runs.

    comparison: time in A over time in B, both relative to the baseline; > 1: B is faster
    baseline:     whom both are relative to; empty where absolute times had to do
    changed:    whether its source, its library or what that picked is another; None where runs are too old
    drift:      it did not change, and its absolute time did
    spread:     of the devices that measured A and B, which its noise has more; 0 where they are one
    """

    case: str
    name: str
    weight: float
    a_us: float
    b_us: float
    baseline: str
    changed: bool | None
    comparison: Comparison
    drift: bool = False
    spread: float = 0.0


@dataclass
class Compared:
    """noise:   between the sessions, and what it rests on
    notes:   what differs and does not forbid comparing
    missing: cells with a time in one of the runs only, and why
    """

    rows: list[Row]
    noise: float
    noise_from: str
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[Row]:
        return [row for row in self.rows if row.comparison.verdict == "slower"]


def compared(a: RecordedRun, b: RecordedRun, confidence: float = CONFIDENCE) -> Compared:
    """Every cell that has a time in both; all verdicts together hold at the confidence (Bonferroni)."""
    shared = [key for key in a.cells if key in b.cells and _timed(a.cells[key]) and _timed(b.cells[key])]
    share = 1 - (1 - confidence) / max(1, len(shared))
    baselines = {case: _baseline(case, a, b) for case, _ in shared}
    raw = [_row(a, b, key, baselines[key[0]], share) for key in shared]
    noise, source = _between_sessions(raw)
    apart = {case: _apart(a, b, *devices) for case, devices in other_devices(a, b).items()}
    rows = [
        _judged(
            replace(row, spread=apart[row.case][0] if row.case in apart else 0.0),
            max(noise, a.noises.get(row.case, 0.0), b.noises.get(row.case, 0.0)),
        )
        for row in raw
    ]
    missing = [
        f"{name} at {case}: {_absence(a, b, (case, name))}"
        for case, name in _either(a, b)
        if (case, name) not in shared
    ]
    return Compared(rows, noise, source, [*differences(a, b), *_added(apart.values())], missing)


def _apart(a: RecordedRun, b: RecordedRun, of_a: DeviceUsed, of_b: DeviceUsed) -> tuple[float, str]:
    """By how much two devices may differ, and how that is known: the most that a run which calibrated both
    recorded of their type."""
    known = [
        (spread.most, f"what devices of type {spread.type} may differ by, calibrated in {run.folder}")
        for run in (a, b)
        for spread in run.spreads
        if {of_a.identity, of_b.identity} <= {run.identities.get(name, name) for name in spread.devices}
    ]
    return max(known, default=(UNKNOWN_SPREAD, "assumed, as no run calibrated both devices"))


def _added(apart: Iterable[tuple[float, str]]) -> Iterator[str]:
    for (spread, source), cases in Counter(apart).items():
        yield f"the noise of {cases} case{'s' * (cases != 1)} has {spread:.1%} more: {source}"


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


def _baseline(case: str, a: RecordedRun, b: RecordedRun) -> str:
    """The baseline, if it did not change as far as is known, else the first who did not; or nobody."""
    names = [name for of, name in a.cells if of == case and (case, name) in b.cells]
    names.sort(key=lambda name: (name != a.run.baseline, name))
    for name in names:
        before, after = a.cells[case, name], b.cells[case, name]
        if _timed(before) and _timed(after) and before.setting == PLAIN and not _changed(before, after):
            return name
    return ""


def _row(a: RecordedRun, b: RecordedRun, key: tuple[str, str], baseline: str, confidence: float) -> Row:
    case, name = key
    before, after = a.cells[key], b.cells[key]
    assert before.time_us and after.time_us
    changed = _changed(before, after)
    if baseline and name != baseline:
        then = paired(before.samples, a.cells[case, baseline].samples, confidence=confidence)
        now = paired(after.samples, b.cells[case, baseline].samples, confidence=confidence)
        comparison = quotient(now, then)
    else:
        comparison = quotient(_time(before), _time(after))
    moved = quotient(_time(before), _time(after))
    drift = changed is False and (moved.low > 1 + MIN_FLOOR or moved.high < 1 - MIN_FLOOR)
    return Row(
        case,
        name,
        before.weight,
        before.time_us,
        after.time_us,
        "" if name == baseline else baseline,
        changed,
        comparison,
        drift,
    )


def _time(cell: Cell) -> Comparison:
    assert cell.time_us
    return measured(cell.time_us, cell.low_us, cell.high_us)


def _between_sessions(rows: Sequence[Row]) -> tuple[float, str]:
    """What unchanged rows moved by, against a baseline that did not change either: the most of them."""
    moves = [abs(math.log(row.comparison.ratio)) for row in rows if row.changed is False and row.baseline]
    if len(moves) < ENOUGH:
        return MIN_FLOOR, f"assumed, as {len(moves)} unchanged rows are too few to show it"
    return max(
        MIN_FLOOR, math.expm1(max(moves))
    ), f"the most that {len(moves)} unchanged rows moved by, at least 3 %"


def _judged(row: Row, noise: float) -> Row:
    """Absolute times of two sessions give no verdict."""
    low, high = row.comparison.low, row.comparison.high
    word = verdict(low, high, noise=noise + row.spread) if row.baseline else "unclear"
    return replace(row, comparison=replace(row.comparison, verdict=word))


def means(compared: Iterable[Row]) -> dict[str, float]:
    """By implementation, the geometric mean of its rows' ratios, weighted by their cases' weights."""
    by_name: dict[str, list[Row]] = {}
    for row in compared:
        if row.baseline:
            by_name.setdefault(row.name, []).append(row)
    return {
        name: math.exp(
            weighted_mean([math.log(r.comparison.ratio) for r in rows], [r.weight or 1e-9 for r in rows])
        )
        for name, rows in by_name.items()
    }
