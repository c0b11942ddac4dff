"""What a recorded run of the suite says of the change: the op timed alone, before and after."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.results.read import RecordedRun, read
from harness.results.schema import Cell
from harness.serving.ledger import KernelChange
from shapes.case import Size
from shapes.names import unknown


@dataclass(frozen=True)
class CaseTimes:
    """Microseconds of a call at a case; half: half the width of the interval of their difference."""

    text: str
    sizes: Mapping[str, Size]
    before_us: float
    after_us: float
    half_us: float
    weight: float

    @property
    def shown(self) -> str:
        return " ".join(word for word in self.text.split() if "=" in word)


@dataclass(frozen=True)
class Alone:
    """before, after: the names of the two entries
    old, new:  the kernels that only one of the two runs, that of the most time first
    kernel_us: of all kernels of both
    """

    folder: str
    op: str
    before: str
    after: str
    cases: tuple[CaseTimes, ...]
    old: tuple[str, ...]
    new: tuple[str, ...]
    kernel_us: Mapping[str, float]

    def mean(self, what: str, texts: Collection[str] | None = None) -> float:
        """`before_us`, `after_us` or `half_us`, weighted; texts: of these cases only."""
        cases = [case for case in self.cases if texts is None or case.text in texts]
        return _weighted([getattr(case, what) for case in cases], [case.weight for case in cases])

    def saving_us(self, texts: Collection[str] | None = None) -> float:
        """Of a call, the weighted mean over the cases."""
        return self.mean("before_us", texts) - self.mean("after_us", texts)

    @property
    def change(self) -> KernelChange:
        factor = self.mean("before_us") / self.mean("after_us")
        return KernelChange(op=self.op, factor=factor, source=self.folder)


Cells = Mapping[str, Cell]
"""Of one entry, by case."""


def timed_alone(path: str, rows: tuple[str, str] | None) -> Alone:
    """rows: the names of two implementations or settings; None: the baseline, and the fastest of the others.

    Raises UsageError where there is no such run, row or common case, or nothing is faster.
    """
    run = read(path)
    names: dict[str, dict[str, Cell]] = {}
    for (case, name), cell in run.cells.items():
        if cell.status == "ok" and cell.time_us:
            names.setdefault(name, {})[case] = cell
    baseline = run.run.baseline if run.run.baseline in names else next(iter(names), "")
    before = _resolved(run, names, baseline, rows[0] if rows else baseline)
    after = _resolved(run, names, baseline, rows[1]) if rows else _fastest(run, names, before)
    common = [case for case in names[before] if case in names[after]]
    if not common or before == after:
        raise UsageError(f"{path} has no case that both {before} and {after} were timed at; --rows names two")
    sizes = {case.key: case.sizes for case in run.run.cases}
    cases = []
    for key in common:
        old, new = names[before][key], names[after][key]
        half = math.hypot(*((each.high_us or 0.0) / 2 - (each.low_us or 0.0) / 2 for each in (old, new)))
        cases.append(CaseTimes(key, sizes[key], old.time_us or 0.0, new.time_us or 0.0, half, old.weight))
    old_us, new_us = (_kernels([names[name][key] for key in common]) for name in (before, after))
    old_only = sorted((name for name in old_us if name not in new_us), key=lambda name: -old_us[name])
    new_only = sorted((name for name in new_us if name not in old_us), key=lambda name: -new_us[name])
    return Alone(
        str(run.folder), run.run.op, before, after, tuple(cases), tuple(old_only), tuple(new_only),
        kernel_us=new_us | old_us,
    )  # fmt: skip


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean; the plain one where no value has a weight."""
    weights = weights if any(weights) else [1.0] * len(weights)
    return sum(map(operator.mul, weights, values)) / sum(weights)


def _kernels(cells: Sequence[Cell]) -> dict[str, float]:
    """Microseconds of each kernel in a call, the mean over cases."""
    of_case = [dict(zip(cell.kernels, cell.kernel_us, strict=False)) for cell in cells]
    weights = [cell.weight for cell in cells]
    kernels = dict.fromkeys(kernel for us in of_case for kernel in us)
    return {kernel: _weighted([us.get(kernel, 0.0) for us in of_case], weights) for kernel in kernels}


def _resolved(run: RecordedRun, names: Mapping[str, Cells], baseline: str, label: str) -> str:
    """The entry that is called so, is of that implementation, or is the baseline's under that setting."""
    if label in names:
        return label
    first = next(iter(run.run.settings), "")
    base = next(iter(names.get(baseline, {}).values()), None)
    for name, cells in names.items():
        cell = next(iter(cells.values()))
        of_setting = cell.setting == label and base is not None and cell.impl == base.impl
        if of_setting or (cell.impl == label and cell.setting == first):
            return name
    raise UsageError(unknown("row", label, [*names, *run.run.settings], of=str(run.folder)))


def _fastest(run: RecordedRun, names: Mapping[str, Cells], before: str) -> str:
    """Of all other entries; in a run of settings, of the same implementation."""
    base = names[before]
    impl = next(iter(base.values())).impl
    faster: dict[str, float] = {}
    for name, cells in names.items():
        common = [case for case in cells if case in base]
        is_other = run.run.contrast == "settings" and next(iter(cells.values())).impl != impl
        if name == before or not common or is_other:
            continue
        weights = [base[case].weight for case in common]
        times = [_weighted([of[case].time_us or 0.0 for case in common], weights) for of in (base, cells)]
        faster[name] = times[0] / times[1]
    if not faster or max(faster.values()) <= 1:
        raise UsageError(f"{run.folder} has nothing faster than {before}: name two rows with --rows")
    return max(faster, key=lambda name: faster[name])
