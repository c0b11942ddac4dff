"""Comparison of two recorded runs of the same cases, cell by cell, and of the devices of one run.

A machine is not equally fast in two sessions, so a cell is compared by its ratio to a baseline: an
implementation that did not change between the runs, and that was measured in the same rounds as the cell in
both. Other unchanged rows seem to have changed, too; by how much is the noise between the sessions. Where
different devices measured a case in the two runs, the spread of these devices is added to the noise.

A cluster calibrates its devices in two passes, before all other cases (`first`) and after them (`last`).
Devices of one type are compared within a pass, because the devices of a pass measured side by side; then the
ratios of the two passes are pooled. All statements on a type hold together (Bonferroni), if noise is normal.
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
from harness.results.read import CellKey, RecordedRun
from harness.results.schema import Calibration, Cell, DeviceUsed, Samples
from harness.statistics.intervals import CONFIDENCE, students_t
from harness.statistics.paired import Comparison, compare, measured, pooled, quotient, verdict, widened
from harness.statistics.totals import TINY

MACHINE = ("platform", "arch", "device", "threads", "driver")  # facts of the machine that must be equal
TERMS = ("op", "cache", "seed")  # attributes of `Run` that must be equal, too
CLOCKS_APART = 0.03  # clocks that differ by a larger share are different conditions
MIN_SESSION_NOISE = 0.03
"""The least noise between two sessions, as a share; it is also assumed where too few rows show the noise."""
MIN_UNCHANGED = 3  # fewer unchanged rows do not show the noise between two sessions
UNKNOWN_SPREAD = 0.08
"""The spread of devices that no run calibrated together: the average by which GPUs of one model in one
cluster differ, from more than 18,800 hours on five clusters (Sinha and others 2022, arXiv:2208.11035). Single
devices differ more, but the ratio to the baseline cancels what makes all rows of a device slower."""
LAG = 0.02
"""A device lags, or has drifted, where the interval of its ratio lies further than this share from 1."""
NOISY = 0.05
"""Devices that are not known to differ, but may differ by more than this share, were measured too noisily."""


def compare_samples(a: Samples, b: Samples, confidence: float = CONFIDENCE) -> Comparison:
    """`compare` over the rounds that both have, without noise. Both must be of one case of one run."""
    times_a, times_b = a.by_round, b.by_round
    shared = sorted(times_a.keys() & times_b.keys())
    blocks = [block for block, _ in shared]
    in_a, in_b = [times_a[place] for place in shared], [times_b[place] for place in shared]
    return compare(in_a, in_b, blocks=blocks, confidence=confidence)


# Two runs


@dataclass(frozen=True)
class ComparedRow:
    """A cell that has a time in both runs, A and B."""

    case: str
    name: str
    weight: float
    a_us: float
    b_us: float
    baseline: str  # the row that both cells are relative to; empty where absolute times were compared
    changed: bool | None
    """Whether its source, its library, or what the library picked changed; None where that is not known."""
    comparison: Comparison  # time in A over time in B, both relative to the baseline; > 1: B is faster
    drift: bool = False  # it did not change, but its absolute time did
    spread: float = 0.0  # what is added to the noise because different devices measured A and B


@dataclass
class RunComparison:
    rows: list[ComparedRow]
    noise: float  # between the sessions
    noise_from: str  # what the noise is derived from
    incompatible: list[str] = field(default_factory=list)  # differences that forbid the comparison
    notes: list[str] = field(default_factory=list)  # other differences, which may explain a changed ratio
    missing: list[str] = field(default_factory=list)
    """A sentence for each cell that has a time in only one of the runs: where it has none, and why."""
    lost: dict[CellKey, str] = field(default_factory=dict)
    """Cells that have a time in A, and that B tried without getting one, with their status in B."""

    @property
    def regressions(self) -> list[ComparedRow]:
        return [row for row in self.rows if row.comparison.verdict == "slower"]


def compare_runs(a: RecordedRun, b: RecordedRun, confidence: float = CONFIDENCE) -> RunComparison:
    """Compares every cell that has a time in both runs. All hold together at `confidence` (Bonferroni)."""
    timed_a, timed_b = _timed_cells(a), _timed_cells(b)
    shared = [key for key in timed_a if key in timed_b]
    row_confidence = 1 - (1 - confidence) / max(1, len(shared))
    baselines = {case: _baseline(case, a, b, shared) for case, _ in shared}
    unjudged = [_unjudged_row(a, b, key, baselines[key[0]], row_confidence) for key in shared]
    session_noise, noise_from = _noise_between_sessions(unjudged)
    # By case, where different devices measured it: the devices of A and B; their spread, and its source.
    moved: dict[str, tuple[DeviceUsed, DeviceUsed]] = {}
    spread_of: dict[str, tuple[float, str]] = {}
    for case, device_a in a.devices.items():
        device_b = b.devices.get(case)
        if device_b is not None and device_b.identity != device_a.identity:
            moved[case] = (device_a, device_b)
            spread_of[case] = _spread_of_two(a, b, device_a, device_b)
    rows = []
    for row in unjudged:
        spread, _ = spread_of.get(row.case, (0.0, ""))
        noise = max(session_noise, a.noises.get(row.case, 0.0), b.noises.get(row.case, 0.0)) + spread
        # Absolute times of two sessions give no verdict.
        ratio = row.comparison
        word = verdict(ratio.low, ratio.high, noise=noise) if row.baseline else "unclear"
        rows.append(replace(row, spread=spread, comparison=replace(ratio, verdict=word)))
    missing: list[str] = []
    lost: dict[CellKey, str] = {}
    for key in dict.fromkeys([*a.cells, *b.cells]):
        cell_a, cell_b = a.cells.get(key), b.cells.get(key)
        if key in timed_a and key not in timed_b:
            missing.append(_without_time(key, "B", cell_b))
            if cell_b and cell_b.status not in ("ok", "checked"):
                lost[key] = cell_b.status
        elif key in timed_b and key not in timed_a:
            missing.append(_without_time(key, "A", cell_a))
    incompatible, notes = _differences(a, b, moved)
    for (spread, source), count in Counter(spread_of.values()).items():
        notes.append(f"the noise of {count} case{'' if count == 1 else 's'} has {spread:.1%} more: {source}")
    return RunComparison(rows, session_noise, noise_from, incompatible, notes, missing, lost)


def _timed_cells(run: RecordedRun) -> list[CellKey]:
    """The keys of the cells that have a time, in recorded order."""
    return [key for key, cell in run.cells.items() if cell.status == "ok" and cell.time_us]


def _differences(
    a: RecordedRun, b: RecordedRun, moved: Mapping[str, tuple[DeviceUsed, DeviceUsed]]
) -> tuple[list[str], list[str]]:
    """The differences that forbid comparing two runs, and other differences.

    moved: by case the devices of A and of B, for the cases that different devices measured
    """
    facts_a, facts_b = a.run.provenance, b.run.provenance
    forbidding = [_difference(*fact) for fact in differing(facts_a, facts_b, machine=MACHINE, groups=())]
    forbidding += [_difference(name, getattr(a.run, name), getattr(b.run, name)) for name in TERMS]
    if a.run.settings != b.run.settings:
        forbidding.append(f"settings differs: {'; '.join(a.run.settings)} and {'; '.join(b.run.settings)}")
    for name in a.clocks.keys() & b.clocks.keys():
        if abs(math.log(a.clocks[name] / b.clocks[name])) > CLOCKS_APART:
            forbidding.append(_difference(name, f"{a.clocks[name]:.0f}", f"{b.clocks[name]:.0f}"))
    explaining = differing(facts_a, facts_b, machine=(), groups=("versions", "environment"))
    notes = [_difference(*fact) for fact in explaining]
    notes.append(_difference("schema of the record", a.run.schema_version, b.run.schema_version))
    notes.append(_difference("suite", a.run.suite, b.run.suite))
    if moved:
        (case, (device_a, device_b)), *others = moved.items()
        further = f" and {len(others)} more of the cases" if others else ""
        notes.append(f"{_difference('device', device_a.name, device_b.name)} at {case}{further}")
    for run in (a, b):
        if run.run.provenance.get("git", {}).get("dirty"):
            notes.append(f"{run.folder} was measured from a checkout with changes that no commit holds")
    return list(filter(None, forbidding)), list(filter(None, notes))


def _difference(name: str, a: object, b: object) -> str:
    """A sentence; empty where the two are equal."""
    if a == b:
        return ""
    known_a, known_b = ("unknown" if value in (None, "") else value for value in (a, b))
    return f"{name} differs: {known_a} and {known_b}"


def _spread_of_two(
    a: RecordedRun, b: RecordedRun, device_a: DeviceUsed, device_b: DeviceUsed
) -> tuple[float, str]:
    """The share by which two devices may differ at most, from runs that calibrated both, and its source."""
    both = {device_a.identity, device_b.identity}
    known = []
    for run in (a, b):
        for spread in spreads(run.calibrations):
            if both <= {run.identities.get(name, name) for name in spread.devices}:
                source = f"what devices of type {spread.type} may differ by, calibrated in {run.folder}"
                known.append((spread.max_difference, source))
    return max(known, default=(UNKNOWN_SPREAD, "assumed, as no run calibrated both devices"))


def _without_time(key: CellKey, run_name: str, cell: Cell | None) -> str:
    """Says where a cell has no time, and why."""
    case, name = key
    why = f"{cell.status} in {run_name}: {cell.reason}".rstrip(": ") if cell else f"not in {run_name}"
    return f"{name} at {case}: {why}"


def _changed(a: Cell, b: Cell) -> bool | None:
    """See ComparedRow.changed."""
    if (a.version, a.picked) != (b.version, b.picked):
        return True
    return a.source != b.source if a.source and b.source else None


def _baseline(case: str, a: RecordedRun, b: RecordedRun, timed_in_both: Iterable[CellKey]) -> str:
    """The row that the others of a case are compared with: the baseline of run A or, if it is known to have
    changed, the first by name of the other rows that are not known to have changed; empty without any."""
    in_both = [name for of_case, name in timed_in_both if of_case == case]
    plain = [name for name in in_both if a.cells[case, name].setting == PLAIN]
    unchanged = [name for name in plain if not _changed(a.cells[case, name], b.cells[case, name])]
    return a.run.baseline if a.run.baseline in unchanged else min(unchanged, default="")


def _unjudged_row(
    a: RecordedRun, b: RecordedRun, key: CellKey, baseline: str, confidence: float
) -> ComparedRow:
    """The row of a cell that has a time in both runs, before the noise between the sessions is known: its
    verdict does not count yet."""
    case, name = key
    cell_a, cell_b = a.cells[key], b.cells[key]
    assert cell_a.time_us and cell_b.time_us
    changed = _changed(cell_a, cell_b)
    absolute = quotient(
        measured(cell_a.time_us, cell_a.low_us, cell_a.high_us),
        measured(cell_b.time_us, cell_b.low_us, cell_b.high_us),
    )
    if baseline in ("", name):
        baseline, comparison = "", absolute
    else:
        in_a = compare_samples(cell_a.samples, a.cells[case, baseline].samples, confidence=confidence)
        in_b = compare_samples(cell_b.samples, b.cells[case, baseline].samples, confidence=confidence)
        comparison = quotient(in_b, in_a)
    time_moved = absolute.low > 1 + MIN_SESSION_NOISE or absolute.high < 1 - MIN_SESSION_NOISE
    return ComparedRow(
        case, name, cell_a.weight, a_us=cell_a.time_us, b_us=cell_b.time_us, baseline=baseline,
        changed=changed, comparison=comparison, drift=changed is False and time_moved,
    )  # fmt: skip


def _noise_between_sessions(rows: Sequence[ComparedRow]) -> tuple[float, str]:
    """The largest change, as a share, that an unchanged row seems to have; and how that is known."""
    changes = [abs(math.log(row.comparison.ratio)) for row in rows if row.changed is False and row.baseline]
    if len(changes) < MIN_UNCHANGED:
        return MIN_SESSION_NOISE, f"assumed, as {len(changes)} unchanged rows are too few to show it"
    source = f"the most that {len(changes)} unchanged rows moved by, at least 3 %"
    return max(MIN_SESSION_NOISE, math.expm1(max(changes))), source


def total_speedups(rows: Iterable[ComparedRow]) -> dict[str, float]:
    """By implementation the time of all its cases together in A over that in B; each case counts with its
    weight. The time in B is the time in A over the ratio relative to the baseline, so that a change of the
    machine does not count; rows without a baseline are left out."""
    total_a, total_b = defaultdict[str, float](float), defaultdict[str, float](float)
    for row in rows:
        if row.baseline:
            weighted_us = (row.weight or TINY) * row.a_us
            total_a[row.name] += weighted_us
            total_b[row.name] += weighted_us / row.comparison.ratio
    return {name: total_a[name] / total_b[name] for name in total_a}


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
    def max_difference(self) -> float:
        """By which share two devices may differ: the interval's upper end, so that noise hides nothing."""
        return self.widest.high - 1

    @property
    def lagging(self) -> list[DeviceRatio]:
        return [ratio for ratio in self.to_median if ratio.comparison.low > 1 + LAG]

    @property
    def drifted(self) -> list[DeviceRatio]:
        most, least = 1 + LAG, 1 / (1 + LAG)
        return [r for r in self.drifts if r.comparison.low > most or r.comparison.high < least]


CaseTimes = dict[tuple[str, str], Comparison]
"""The time that each device took for one case in each pass, in microseconds, by device and pass."""


def spreads(calibrations: Sequence[Calibration]) -> list[Spread]:
    """The spread of each type of which two or more devices measured the same case."""
    types = dict.fromkeys(c.type for c in calibrations)
    maybe_spreads = [_spread(type, [c for c in calibrations if c.type == type]) for type in types]
    return [spread for spread in maybe_spreads if spread]


def _spread(type: str, calibrations: Sequence[Calibration]) -> Spread | None:
    """The spread of the devices of one type; None where no two measured the same case in the same pass."""
    devices = list(dict.fromkeys(c.device for c in calibrations))
    times = {case: _times_of_case(case, calibrations) for case in dict.fromkeys(c.case for c in calibrations)}
    # The time of each device over that of each other one, by case: each pair is there in both directions.
    ratios = {case: _ratios_of_devices(devices, times[case]) for case in times}
    directed_pairs = [ratio for of_case in ratios.values() for ratio in of_case.values()]
    if not directed_pairs:
        return None
    # Each interval holds at CONFIDENCE. This factor widens it so that those of all pairs hold together.
    pair_confidence = 1 - (1 - CONFIDENCE) / (len(directed_pairs) / 2)
    factor = students_t(math.inf, pair_confidence) / students_t(math.inf, CONFIDENCE)
    to_median, drifts = [], []
    for case, case_times in times.items():
        median = _median_device(devices, case_times)
        for device in devices:
            if device == median:
                to_median.append(DeviceRatio(device, case, Comparison(1.0, 1.0, 1.0, "unclear")))
            elif (device, median) in ratios[case]:
                to_median.append(DeviceRatio(device, case, widened(ratios[case][device, median], factor)))
            if (device, "first") in case_times and (device, "last") in case_times:
                drift = quotient(case_times[device, "last"], case_times[device, "first"])
                drifts.append(DeviceRatio(device, case, widened(drift, factor)))
    # One of the two directions of each pair has a ratio of 1 or more, so the largest ratio is at least 1.
    wide_pairs = [widened(ratio, factor) for ratio in directed_pairs]
    widest = Comparison(
        ratio=max(pair.ratio for pair in wide_pairs), low=max(1.0, *(pair.low for pair in wide_pairs)),
        high=max(pair.high for pair in wide_pairs), verdict="unclear",
    )  # fmt: skip
    return Spread(type, devices, to_median, drifts, widest)


def _times_of_case(case: str, calibrations: Iterable[Calibration]) -> CaseTimes:
    # A resumed run has several first times of a device, which are pooled.
    repeated = defaultdict[tuple[str, str], list[Comparison]](list)
    for c in calibrations:
        if c.case == case:
            repeated[c.device, c.when].append(measured(c.time_us, c.low_us, c.high_us))
    return {device_and_pass: pooled(measurements) for device_and_pass, measurements in repeated.items()}


def _ratios_of_devices(devices: Sequence[str], times: CaseTimes) -> dict[tuple[str, str], Comparison]:
    """The time of device a over that of device b in one case, for all pairs (a, b) that share a pass."""
    ratios = {}
    for a, b in itertools.permutations(devices, 2):
        shared = [when for when in ("first", "last") if (a, when) in times and (b, when) in times]
        if shared:
            ratios[a, b] = pooled([quotient(times[a, when], times[b, when]) for when in shared])
    return ratios


def _median_device(devices: Sequence[str], times: CaseTimes) -> str:
    """The device with the median time of a case; of an even number the faster of the two in the middle."""
    by_device = {d: [time for (of, _), time in times.items() if of == d] for d in devices}
    by_time = sorted(
        (pooled(of_device).ratio, device) for device, of_device in by_device.items() if of_device
    )
    _, median = by_time[(len(by_time) - 1) // 2]
    return median
