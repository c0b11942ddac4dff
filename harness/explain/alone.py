"""What a recorded run of the suite says of the change: the op timed alone, before and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import UsageError
from harness.results.read import RecordedRun, read
from harness.results.schema import Cell
from harness.serving.ledger import KernelChange
from shapes.case import Size
from shapes.names import unknown


@dataclass(frozen=True)
class CaseTimes:
    """Microseconds of a call at a case."""

    text: str  # the case's key
    sizes: Mapping[str, Size]
    before_us: float
    after_us: float
    half_us: float  # half the width of the interval of the difference of the two
    weight: float  # how much the case counts in means

    @property
    def shown(self) -> str:
        """The sizes alone."""
        return " ".join(word for word in self.text.split() if "=" in word)


@dataclass(frozen=True)
class Alone:
    """An op timed alone, before and after a change."""

    folder: str
    op: str
    before: str  # the name of the entry without the change
    after: str
    cases: tuple[CaseTimes, ...]
    old: tuple[str, ...]  # kernels that only the entry before runs, those with most time first
    new: tuple[str, ...]  # kernels that only the entry after runs
    kernel_us: Mapping[str, float]  # kernel -> microseconds in a call, for the kernels of both

    def mean(self, us: Callable[[CaseTimes], float], keys: Collection[str] | None = None) -> float:
        """The weighted mean over the cases with these keys, by default over all."""
        cases = [case for case in self.cases if keys is None or case.text in keys]
        return _weighted_mean([us(case) for case in cases], [case.weight for case in cases])

    def saving_us(self, keys: Collection[str] | None = None) -> float:
        """What a call saves, the weighted mean over the cases with these keys, by default over all."""
        return self.mean(lambda case: case.before_us, keys) - self.mean(lambda case: case.after_us, keys)

    @property
    def change(self) -> KernelChange:
        factor = self.mean(lambda case: case.before_us) / self.mean(lambda case: case.after_us)
        return KernelChange(op=self.op, factor=factor, source=self.folder)


CellsByCase = Mapping[str, Cell]  # of one entry, by the key of the case


def timed_alone(path: str, rows: tuple[str, str] | None) -> Alone:
    """rows: names of two implementations or settings, before and after; None: the baseline and the fastest of
    the others. Raises UsageError if there is no such run, row or common case, or if nothing is faster."""
    recorded = read(path)
    entries: dict[str, dict[str, Cell]] = {}
    for (key, name), cell in recorded.cells.items():
        if cell.status == "ok" and cell.time_us:
            entries.setdefault(name, {})[key] = cell
    baseline = recorded.run.baseline
    if baseline not in entries:
        baseline = next(iter(entries), "")
    before = _entry(recorded, entries, baseline, rows[0] if rows else baseline)
    after = _entry(recorded, entries, baseline, rows[1]) if rows else _fastest(recorded, entries, before)
    pairs = {key: (old, entries[after][key]) for key, old in entries[before].items() if key in entries[after]}
    if not pairs or before == after:
        raise UsageError(f"{path} has no case that both {before} and {after} were timed at; --rows names two")
    sizes = {case.key: case.sizes for case in recorded.run.cases}
    cases = []
    for key, (old, new) in pairs.items():
        half_us = math.hypot(*(((cell.high_us or 0.0) - (cell.low_us or 0.0)) / 2 for cell in (old, new)))
        cases.append(CaseTimes(key, sizes[key], old.time_us or 0.0, new.time_us or 0.0, half_us, old.weight))
    old_us = _kernel_us([old for old, _ in pairs.values()])
    new_us = _kernel_us([new for _, new in pairs.values()])
    return Alone(
        str(recorded.folder), recorded.run.op, before, after, tuple(cases),
        old=_only_in(old_us, new_us), new=_only_in(new_us, old_us), kernel_us=new_us | old_us,
    )  # fmt: skip


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean; the plain one where no value has a weight."""
    return float(np.average(values, weights=weights if any(weights) else None))


def _kernel_us(cells: Sequence[Cell]) -> dict[str, float]:
    """Kernel -> microseconds in a call, the weighted mean over the cells. A cell without it counts as 0."""
    us_by_cell = [dict(zip(cell.kernels, cell.kernel_us, strict=False)) for cell in cells]
    weights = [cell.weight for cell in cells]
    kernels = dict.fromkeys(kernel for us in us_by_cell for kernel in us)
    return {kernel: _weighted_mean([us.get(kernel, 0.0) for us in us_by_cell], weights) for kernel in kernels}


def _only_in(kernel_us: Mapping[str, float], other: Collection[str]) -> tuple[str, ...]:
    """The kernels that the other entry does not run, those with most time first."""
    names = [name for name in kernel_us if name not in other]
    return tuple(sorted(names, key=lambda name: -kernel_us[name]))


def _entry(recorded: RecordedRun, entries: Mapping[str, CellsByCase], baseline: str, label: str) -> str:
    """The entry that a label names: by its own name, by an implementation (under the run's first setting), or
    by a setting (with the baseline's implementation). Raises UsageError where there is none."""
    if label in entries:
        return label
    first_setting = next(iter(recorded.run.settings), "")
    base_cell = next(iter(entries.get(baseline, {}).values()), None)
    for name, cells in entries.items():
        cell = next(iter(cells.values()))  # an entry has one implementation and one setting in all cases
        is_setting = cell.setting == label and base_cell is not None and cell.impl == base_cell.impl
        if is_setting or (cell.impl == label and cell.setting == first_setting):
            return name
    known = [*entries, *recorded.run.settings]
    raise UsageError(unknown("row", label, known, of=str(recorded.folder)))


def _fastest(recorded: RecordedRun, entries: Mapping[str, CellsByCase], before: str) -> str:
    """The entry that is fastest over the cases that it has in common with the entry before; in a run of
    settings, of the same implementation. Raises UsageError where none is faster than the entry before."""
    base = entries[before]
    impl = next(iter(base.values())).impl
    speedups: dict[str, float] = {}
    for name, cells in entries.items():
        common = [key for key in cells if key in base]
        is_other = recorded.run.contrast == "settings" and next(iter(cells.values())).impl != impl
        if name == before or not common or is_other:
            continue
        weights = [base[key].weight for key in common]
        base_us = _weighted_mean([base[key].time_us or 0.0 for key in common], weights)
        speedups[name] = base_us / _weighted_mean([cells[key].time_us or 0.0 for key in common], weights)
    if not speedups or max(speedups.values()) <= 1:
        raise UsageError(f"{recorded.folder} has nothing faster than {before}: name two rows with --rows")
    return max(speedups, key=lambda name: speedups[name])
