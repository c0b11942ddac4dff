"""Comparison of two recorded runs of the same cases, cell by cell, and of the devices of one run.

Machines differ from one session to the next, so a cell is compared by its ratio to a baseline: an
implementation that did not change between the runs and shared its rounds in both. The changes that other
unchanged rows seem to have are the noise between sessions. Where different devices measured a case, the
spread of the devices is added to it.

Devices of one type are compared within a pass of calibration, first or last, because the devices of a pass
measured side by side; then the passes are pooled. Everything that is said of a type holds together at the
confidence level (Bonferroni), if the noise is normal.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.machine.device import differing
from harness.plan.settings import PLAIN
from harness.results.read import RecordedRun
from harness.results.schema import Calibration, Cell, DeviceUsed, Samples
from harness.statistics.intervals import CONFIDENCE, students_t
from harness.statistics.paired import Comparison, compare, measured, pooled, quotient, verdict, widened
from harness.statistics.totals import TINY

MACHINE = ("platform", "arch", "device", "threads", "driver")
TERMS = ("op", "cache", "seed")
CLOCKS_APART = 0.03  # clocks that differ by a larger share are different conditions
MIN_FLOOR = 0.03  # the noise between sessions, where too few unchanged rows are there to show it
ENOUGH = 3  # the number of unchanged rows that shows the noise between sessions
UNKNOWN_SPREAD = 0.08
"""The spread of devices that no run calibrated together: the average by which GPUs of one model in one
cluster differ, from more than 18,800 hours on five clusters (Sinha and others 2022, arXiv:2208.11035). Single
devices differ more, but the ratio to the baseline cancels what makes all rows of a device slower."""
LAG = 0.02  # a device lags, or has drifted, where its interval lies beyond this share
NOISY = 0.05
"""Devices that were not told apart but may differ by more than this were measured too noisily to tell."""


def paired(a: Samples, b: Samples, confidence: float = CONFIDENCE) -> Comparison:
    """`compare` over the rounds that both have, without noise; they must be of one case of one run."""
    times_a, times_b = a.by_round, b.by_round
    shared = sorted(times_a.keys() & times_b.keys())
    return compare(
        [times_a[place] for place in shared],
        [times_b[place] for place in shared],
        blocks=[block for block, _ in shared],
        confidence=confidence,
    )


# Two runs


@dataclass(frozen=True)
class Row:
    """A cell that has a time in both runs."""

    case: str
    name: str
    weight: float
    a_us: float
    b_us: float
    baseline: str  # the row that both cells are relative to; empty where absolute times were compared
    changed: bool | None  # whether its source, its library or what that picked changed; None: not known
    comparison: Comparison  # time in A over time in B, both relative to the baseline; > 1: B is faster
    drift: bool = False  # it did not change, but its absolute time did
    spread: float = 0.0  # what is added to the noise because different devices measured A and B


@dataclass
class Compared:
    rows: list[Row]
    noise: float  # between the sessions
    noise_from: str  # what the noise is derived from
    incompatible: list[str] = field(default_factory=list)  # differences that forbid the comparison
    notes: list[str] = field(default_factory=list)  # differences that may be why a row moved
    missing: list[str] = field(default_factory=list)  # cells with a time in one of the runs only, and why
    lost: dict[tuple[str, str], str] = field(default_factory=dict)
    """By case and name, the status in B of cells with a time in A alone, although B tried."""

    @property
    def regressions(self) -> list[Row]:
        return [row for row in self.rows if row.comparison.verdict == "slower"]


def compared(a: RecordedRun, b: RecordedRun, confidence: float = CONFIDENCE) -> Compared:
    """Every cell that has a time in both; all verdicts together hold at the confidence (Bonferroni)."""
    timed = [{k for k, c in run.cells.items() if c.status == "ok" and c.time_us} for run in (a, b)]
    in_both = timed[0] & timed[1]
    shared = [key for key in a.cells if key in in_both]
    share = 1 - (1 - confidence) / max(1, len(shared))
    baselines = {case: _baseline(case, a, b, shared) for case, _ in shared}
    raw = [_row(a, b, key, baselines[key[0]], share) for key in shared]
    noise, source = _between_sessions(raw)
    moved = {
        case: (a.devices[case], b.devices[case])
        for case in a.devices
        if case in b.devices and a.devices[case].identity != b.devices[case].identity
    }
    apart = {case: _apart(a, b, *devices) for case, devices in moved.items()}
    rows = []
    for row in raw:
        spread, _ = apart.get(row.case, (0.0, ""))
        within = max(noise, a.noises.get(row.case, 0.0), b.noises.get(row.case, 0.0)) + spread
        # Absolute times of two sessions give no verdict.
        word = verdict(row.comparison.low, row.comparison.high, noise=within) if row.baseline else "unclear"
        rows.append(replace(row, spread=spread, comparison=replace(row.comparison, verdict=word)))
    missing = [
        f"{key[1]} at {key[0]}: {_absence('B', b, key) if key in timed[0] else _absence('A', a, key)}"
        for key in dict.fromkeys([*a.cells, *b.cells])
        if key in timed[0] ^ timed[1]
    ]
    lost: dict[tuple[str, str], str] = {
        key: b.cells[key].status
        for key in a.cells
        if key in timed[0] - timed[1] and key in b.cells and b.cells[key].status not in ("ok", "checked")
    }
    incompatible, notes = _differences(a, b, moved)
    for (added, how), count in Counter(apart.values()).items():
        cases = f"{count} case" if count == 1 else f"{count} cases"
        notes.append(f"the noise of {cases} has {added:.1%} more: {how}")
    return Compared(rows, noise, source, incompatible, notes, missing, lost)


def _differences(
    a: RecordedRun, b: RecordedRun, moved: Mapping[str, tuple[DeviceUsed, DeviceUsed]]
) -> tuple[list[str], list[str]]:
    """Whether two runs are alike: differences that forbid comparing them, and others.

    moved: the devices of each case that different devices measured
    """
    then, now = a.run.provenance, b.run.provenance
    forbid = [_differ(*each) for each in differing(then, now, MACHINE, ())]
    forbid += [_differ(name, getattr(a.run, name), getattr(b.run, name)) for name in TERMS]
    if a.run.settings != b.run.settings:
        forbid.append(f"settings differs: {'; '.join(a.run.settings)} and {'; '.join(b.run.settings)}")
    for name in a.clocks.keys() & b.clocks.keys():
        if abs(math.log(a.clocks[name] / b.clocks[name])) > CLOCKS_APART:
            forbid.append(_differ(name, f"{a.clocks[name]:.0f}", f"{b.clocks[name]:.0f}"))
    notes = [_differ(*each) for each in differing(then, now, (), ("versions", "environment"))]
    notes.append(_differ("schema of the record", a.run.schema_version, b.run.schema_version))
    notes.append(_differ("suite", a.run.suite, b.run.suite))
    if moved:
        (case, devices), *others = moved.items()
        more = f" and {len(others)} more of the cases" if others else ""
        notes.append(f"{_differ('device', *(device.name for device in devices))} at {case}{more}")
    for run in (a, b):
        if run.run.provenance.get("git", {}).get("dirty"):
            notes.append(f"{run.folder} was measured from a checkout with changes that no commit holds")
    return list(filter(None, forbid)), list(filter(None, notes))


def _differ(name: str, a: object, b: object) -> str:
    """A sentence; empty where the two are equal."""
    if a == b:
        return ""
    of_a, of_b = ("unknown" if value in (None, "") else value for value in (a, b))
    return f"{name} differs: {of_a} and {of_b}"


def _apart(a: RecordedRun, b: RecordedRun, of_a: DeviceUsed, of_b: DeviceUsed) -> tuple[float, str]:
    """By which share two devices may differ at most, by runs that calibrated both, and how that is known."""
    known = [
        (spread.most, f"what devices of type {spread.type} may differ by, calibrated in {run.folder}")
        for run in (a, b)
        for spread in spreads(run.calibrations)
        if {of_a.identity, of_b.identity} <= {run.identities.get(name, name) for name in spread.devices}
    ]
    return max(known, default=(UNKNOWN_SPREAD, "assumed, as no run calibrated both devices"))


def _absence(where: str, run: RecordedRun, key: tuple[str, str]) -> str:
    """Why a cell has no time in a run, which is called `where`."""
    cell = run.cells.get(key)
    return f"not in {where}" if cell is None else f"{cell.status} in {where}: {cell.reason}".rstrip(": ")


def _changed(a: Cell, b: Cell) -> bool | None:
    if (a.version, a.picked) != (b.version, b.picked):
        return True
    return a.source != b.source if a.source and b.source else None


def _baseline(case: str, a: RecordedRun, b: RecordedRun, timed: Iterable[tuple[str, str]]) -> str:
    """The baseline of run A, or the first other row if the baseline changed: of rows that are not known to
    have changed. Empty where there is none.

    timed: the cells that have a time in both runs
    """
    plain = [name for of, name in timed if of == case and a.cells[of, name].setting == PLAIN]
    names = [name for name in plain if not _changed(a.cells[case, name], b.cells[case, name])]
    return min(names, key=lambda name: (name != a.run.baseline, name), default="")


def _row(a: RecordedRun, b: RecordedRun, key: tuple[str, str], baseline: str, confidence: float) -> Row:
    case, name = key
    before, after = a.cells[key], b.cells[key]
    assert before.time_us and after.time_us
    changed = _changed(before, after)
    moved = quotient(
        measured(before.time_us, before.low_us, before.high_us),
        measured(after.time_us, after.low_us, after.high_us),
    )
    comparison = moved
    if baseline and name != baseline:
        then = paired(before.samples, a.cells[case, baseline].samples, confidence=confidence)
        now = paired(after.samples, b.cells[case, baseline].samples, confidence=confidence)
        comparison = quotient(now, then)
    return Row(
        case=case,
        name=name,
        weight=before.weight,
        a_us=before.time_us,
        b_us=after.time_us,
        baseline="" if name == baseline else baseline,
        changed=changed,
        comparison=comparison,
        drift=changed is False and (moved.low > 1 + MIN_FLOOR or moved.high < 1 - MIN_FLOOR),
    )


def _between_sessions(rows: Sequence[Row]) -> tuple[float, str]:
    """The most that an unchanged row moved, against a baseline that did not change either."""
    moves = [abs(math.log(row.comparison.ratio)) for row in rows if row.changed is False and row.baseline]
    if len(moves) < ENOUGH:
        return MIN_FLOOR, f"assumed, as {len(moves)} unchanged rows are too few to show it"
    how = f"the most that {len(moves)} unchanged rows moved by, at least 3 %"
    return max(MIN_FLOOR, math.expm1(max(moves))), how


def totals(compared: Iterable[Row]) -> dict[str, float]:
    """For each implementation the time of its cases together in A over that in B, as far as the baseline
    tells it; each case counts with its weight."""
    of_a, of_b = defaultdict[str, float](float), defaultdict[str, float](float)
    for row in compared:
        if row.baseline:
            us = (row.weight or TINY) * row.a_us
            of_a[row.name] += us
            of_b[row.name] += us / row.comparison.ratio
    return {name: of_a[name] / of_b[name] for name in of_a}


# Devices of one run


@dataclass(frozen=True)
class DeviceRatio:
    """A ratio of a device's times of a calibrated case; > 1: slower."""

    device: str
    case: str
    comparison: Comparison


@dataclass(frozen=True)
class Spread:
    """How far the devices of a type differ."""

    type: str
    devices: Sequence[str]
    to_median: Sequence[DeviceRatio]  # for each device and case its time over the median device's
    drifts: Sequence[DeviceRatio]  # for each device and case its last time over its first
    widest: Comparison  # the largest ratio of the times that two devices took for one case

    @property
    def verdict(self) -> Literal["apart", "alike", "noisy"]:
        if self.widest.low > 1:
            return "apart"
        return "alike" if self.widest.high <= 1 + NOISY else "noisy"

    @property
    def most(self) -> float:
        """By which share two devices may differ: the interval's upper end, so that noise hides nothing."""
        return self.widest.high - 1

    @property
    def lagging(self) -> list[DeviceRatio]:
        return [ratio for ratio in self.to_median if ratio.comparison.low > 1 + LAG]

    @property
    def drifted(self) -> list[DeviceRatio]:
        beyond = 1 + LAG
        return [r for r in self.drifts if r.comparison.low > beyond or r.comparison.high < 1 / beyond]


def spreads(calibrations: Iterable[Calibration]) -> list[Spread]:
    """The spread of each type of which two or more devices measured the same case."""
    types = defaultdict[str, list[Calibration]](list)
    for calibration in calibrations:
        types[calibration.type].append(calibration)
    return [found for type, made in types.items() if (found := _spread(type, made))]


def _spread(type: str, calibrations: Sequence[Calibration]) -> Spread | None:
    devices = list(dict.fromkeys(c.device for c in calibrations))
    cases = list(dict.fromkeys(c.case for c in calibrations))
    # A resumed run has several first times of a device, which are pooled.
    repeated = defaultdict[tuple[str, str, str], list[Comparison]](list)
    for c in calibrations:
        repeated[c.case, c.device, c.when].append(measured(c.time_us, c.low_us, c.high_us))
    times = {key: pooled(of) for key, of in repeated.items()}

    pairs: dict[tuple[str, str, str], Comparison] = {}  # the time of a device over that of another, by case
    for case, (a, b) in itertools.product(cases, itertools.permutations(devices, 2)):
        passes = [
            quotient(times[case, a, when], times[case, b, when])
            for when in ("first", "last")
            if (case, a, when) in times and (case, b, when) in times
        ]
        if passes:
            pairs[case, a, b] = pooled(passes)
    if not pairs:
        return None
    each = 1 - (1 - CONFIDENCE) / (len(pairs) / 2)
    wider = students_t(math.inf, each) / students_t(math.inf, CONFIDENCE)
    pairs = {key: widened(ratio, wider) for key, ratio in pairs.items()}
    to_median, drifts = [], []
    for case in cases:
        of = {device: [t for key, t in times.items() if key[:2] == (case, device)] for device in devices}
        by_time = sorted((pooled(each).ratio, device) for device, each in of.items() if each)
        # The faster of the two in the middle of an even number.
        _, median = by_time[(len(by_time) - 1) // 2]
        for device in devices:
            if device == median:
                to_median.append(DeviceRatio(device, case, Comparison(1.0, 1.0, 1.0, "same")))
            elif (case, device, median) in pairs:
                to_median.append(DeviceRatio(device, case, pairs[case, device, median]))
            first, last = (times.get((case, device, when)) for when in ("first", "last"))
            if first and last:
                drifts.append(DeviceRatio(device, case, widened(quotient(last, first), wider)))
    # Each ratio is among the pairs in both directions, so the largest one is at least 1.
    largest, low, high = (max(getattr(of, end) for of in pairs.values()) for end in ("ratio", "low", "high"))
    widest = Comparison(largest, max(1.0, low), high, "unclear")
    return Spread(type, devices, to_median, drifts, widest)
