"""The mean decode step of a profiler's trace, kernel by kernel, and the changed op's kernels in two of them."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError
from harness.explain.alone import Alone
from harness.report.text import counted
from harness.serving.trace import decompose
from harness.serving.trace.result import TraceStep
from harness.statistics.intervals import CONFIDENCE, centre, students_t

OF_ONE_STEP = 0.03
"""Half the width of the interval of what a single step shows, as a part of it."""
MOST_STEPS = 200
"""The most steps of which the scatter is computed."""


@dataclass(frozen=True)
class Kernel:
    """A kernel in the mean step; exposed_ms: see harness.serving.trace.result.Times."""

    name: str
    op_class: str
    calls: float
    ms: float
    exposed_ms: float

    @property
    def us_per_call(self) -> float:
        return 1e3 * self.ms / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class DecodeStep:
    """half:        half the width of the 95 % interval of each class's ms, of `idle`, `overlapped` and `step`
    idle_ms:     from the start of a step to that of the next one, with nothing running
    by_operator: the part of the calls whose operator is known; kernels of a graph have none
    """

    path: str
    steps: int
    kernels: Mapping[str, Kernel]
    idle_ms: float
    half: Mapping[str, float]
    by_operator: float

    @property
    def sum_ms(self) -> float:
        return sum(kernel.ms for kernel in self.kernels.values())

    @property
    def busy_ms(self) -> float:
        return sum(kernel.exposed_ms for kernel in self.kernels.values())

    @property
    def ms(self) -> float:
        return self.busy_ms + self.idle_ms

    @property
    def file(self) -> str:
        return Path(self.path).name

    def of(self, names: Iterable[str]) -> float:
        """Milliseconds of these kernels."""
        return sum(self.kernels[name].ms for name in names if name in self.kernels)

    def calls(self, names: Iterable[str]) -> float:
        return sum(self.kernels[name].calls for name in names if name in self.kernels)


def decode_step(path: str) -> DecodeStep:
    """Raises UsageError where the file is no trace or has no decode steps."""
    trace = decompose(path)
    steps = trace.steps_of("decode")
    if not steps:
        there = ", ".join(trace.phases())
        raise UsageError(f"{path} has no decode steps; it has: {there}: profile the server while it decodes")
    sizes = [sum(times.calls for times in step.classes.values()) for step in steps]
    typical = statistics.median(sizes)
    count = sum(sizes) / typical  # a step that the profiler cut off counts in part
    kernels: dict[str, Kernel] = {}
    known = 0.0
    for row in (row for row in trace.kernels if row.phase == "decode"):
        old = kernels.get(row.name, Kernel(row.name, row.op_class, 0.0, 0.0, 0.0))
        kernels[row.name] = Kernel(
            row.name, old.op_class, old.calls + row.calls / count, old.ms + row.time_ns / 1e6 / count,
            old.exposed_ms + row.exposed_ns / 1e6 / count,
        )  # fmt: skip
        known += row.calls if row.op else 0
    whole = [step for step, size in zip(steps, sizes, strict=True) if 0.5 < size / typical < 2]
    whole = whole[:: max(1, len(whole) // MOST_STEPS)]
    decoding = {(step.device, step.start_ns) for step in steps}
    columns: dict[str, list[float]] = {name: [] for name in ("step", "idle", "overlapped")}
    for step in whole:
        busy = sum(times.exposed_ns for times in step.classes.values())
        length = _length(step, decoding)
        for name, ns in (("step", length), ("idle", length - busy), ("overlapped", step.time_ns - busy)):
            columns[name].append(ns / 1e6)
    for op_class in {kernel.op_class for kernel in kernels.values()}:
        columns[op_class] = [step.times(op_class).time_ns / 1e6 for step in whole]
    middle = {name: centre(tuple(values)) for name, values in columns.items()}
    half = {
        name: students_t(each.n - 1, CONFIDENCE) * each.error if each.n > 1 else OF_ONE_STEP * each.value
        for name, each in middle.items()
    }
    return DecodeStep(path, len(whole), kernels, middle["idle"].value, half, known / sum(sizes))


def _length(step: TraceStep, decoding: Collection[tuple[str, int]]) -> float:
    """To the start of the next step, where that decodes, too; else to its own end."""
    follows = step.period_ns is not None and (step.device, step.start_ns + step.period_ns) in decoding
    return max(step.period_ns or 0, step.span_ns) if follows else step.span_ns


@dataclass(frozen=True)
class Changed:
    """The kernels of the changed op in the steps without and with the change.

    before, after: all names of it in either step
    old, new:      those by which the two are told apart, the one with the most time first; empty: none are
    wanted:        the new kernels as the run names them, that of the most time first
    foreign:       the kernel of the most time in the step before, where that is none of the run's
    calls:         of the op in a step
    called:        the part of the calls that the new kernel took; None: names do not tell
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    old: tuple[str, ...]
    new: tuple[str, ...]
    wanted: tuple[str, ...]
    foreign: str
    calls: float
    called: float | None


def stem(name: str) -> str:
    """A kernel's name without its template's values and its parameters."""
    return name.removeprefix("void ").partition("<")[0].partition("(")[0]


def _there(wanted: Sequence[str], step: DecodeStep | None, ops: Collection[str]) -> list[str]:
    """The kernels of a step that a run calls so; without template values where no name is whole."""
    if step is None:
        return []
    if whole := [name for name in wanted if name in step.kernels]:
        return whole
    stems = [stem(name) for name in wanted]
    alike = [kernel for kernel in step.kernels.values() if stem(kernel.name) in stems]
    return [kernel.name for kernel in alike if kernel.op_class in {*ops, "unknown"}]


def changed(
    before: DecodeStep | None, after: DecodeStep, ops: Collection[str], alone: Alone | None
) -> Changed:
    """before: None where only the server with the change was profiled"""
    own_before = _of_ops(before, ops) if before else []
    own_after = _of_ops(after, ops)
    named = alone is not None and bool(alone.old and alone.new)
    wanted: tuple[str, ...] = ()
    foreign = ""
    if alone and named:
        wanted = alone.new
        old = _there(alone.old, before or after, ops)
        new = _there(alone.new, after, ops)
        if before and not old and own_before:
            foreign, old = own_before[0], own_before[:1]
    elif before:
        old = [name for name in own_before if after.calls([name]) < 0.98 * before.calls([name])]
        new = [name for name in own_after if name not in before.kernels]
        if old and not new:  # no rule knows the new kernel
            new = [k.name for k in after.kernels.values()
                   if k.op_class == "unknown" and k.name not in before.kernels]  # fmt: skip
    else:
        old, new = [], []
    launches = 1
    main = old[0] if old else next(iter(own_before or own_after), "")
    source = before or after
    if alone and alone.op == "fused_moe" and main and (kernel := source.kernels.get(main)):
        launches = max(1, round(alone.kernel_us.get(main, 0.0) / kernel.us_per_call))
    calls = source.calls([main]) / launches
    called: float | None = None
    if named and not before:
        there = after.calls(new[:1])
        calls = (there + after.calls(old[:1])) / launches
        called = there / (there + after.calls(old[:1])) if new or old else 0.0
    elif named and not new:
        called = 0.0
    elif before and old and (new or named):
        left = sum(before.kernels[name].ms * min(1.0, after.calls([name]) / before.calls([name]))
                   for name in (old if named else own_before))  # fmt: skip
        called = 1 - left / before.of(old if named else own_before)
    if called is not None and called > 0.98:
        called = 1.0
    return Changed(
        tuple(dict.fromkeys([*own_before, *(old if before else ())])),
        tuple(dict.fromkeys([*own_after, *new, *(name for name in old if name in after.kernels)])),
        tuple(old), tuple(new), wanted, foreign, calls, called,
    )  # fmt: skip


def _of_ops(step: DecodeStep, ops: Collection[str]) -> list[str]:
    """The kernels of these op classes, that with the most time first."""
    kernels = [kernel for kernel in step.kernels.values() if kernel.op_class in ops]
    return [kernel.name for kernel in sorted(kernels, key=lambda kernel: -kernel.ms)]


def described(step: DecodeStep) -> str:
    return f"{step.ms:.4g} ms in {step.file} ({counted(step.steps, 'step')})"
