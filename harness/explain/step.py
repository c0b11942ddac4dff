"""The mean decode step of a trace, kernel by kernel, and the kernels of the changed op in two of them."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.errors import UsageError
from harness.explain.alone import Alone
from harness.serving.trace.result import Trace, TraceStep
from harness.statistics.intervals import CONFIDENCE, centre, students_t

OF_ONE_STEP = 0.03
"""Half the width of the interval of what a single step shows, as a part of it."""
PAUSE = 1.5
"""A step that is so many times as long as the median is followed by a pause."""
KEPT, GONE = 0.98, 0.02
"""A kernel of fewer calls than this part lost some; one of fewer than that went."""
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
    """file:    its name, or path
    half:    half the width of the 95 % interval of each class's ms, of `idle`, `overlapped` and `step`
    idle_ms: time of a step with nothing running
    between: whether it has the time between steps, which few decode steps in a row do not show
    launch:  of most kernels; empty: the trace does not tell
    on_cpu:  its kernels are operators, between which Python runs
    """

    file: str
    steps: int
    kernels: Mapping[str, Kernel]
    idle_ms: float
    half: Mapping[str, float]
    between: bool
    launch: Literal["", "a graph", "single launches"]
    on_cpu: bool = False

    @property
    def sum_ms(self) -> float:
        return sum(kernel.ms for kernel in self.kernels.values())

    @property
    def busy_ms(self) -> float:
        return sum(kernel.exposed_ms for kernel in self.kernels.values())

    @property
    def ms(self) -> float:
        return self.busy_ms + self.idle_ms

    def exposed(self, classes: Collection[str]) -> float:
        return sum(each.exposed_ms for each in self.kernels.values() if each.op_class in classes)

    def op_class(self, name: str) -> str:
        """Empty where the step has no such kernel."""
        return self.kernels[name].op_class if name in self.kernels else ""

    def of(self, names: Iterable[str]) -> float:
        """Milliseconds of these kernels."""
        return sum(self.kernels[name].ms for name in names if name in self.kernels)

    def calls(self, names: Iterable[str]) -> float:
        return sum(self.kernels[name].calls for name in names if name in self.kernels)


def decode_step(trace: Trace, *, within: bool = False) -> DecodeStep:
    """within: without the time between steps. Raises UsageError where there are no decode steps."""
    steps, path = trace.steps_of("decode"), trace.path
    if not steps:
        there = ", ".join(trace.phases())
        raise UsageError(f"{path} has no decode steps; it has: {there}: profile the server while it decodes")
    sizes = [sum(times.calls for times in step.classes.values()) for step in steps]
    typical = statistics.median(sizes)
    count = sum(sizes) / typical  # a step that the profiler cut off counts in part
    kernels: dict[str, Kernel] = {}
    rows = [row for row in trace.kernels if row.phase == "decode"]
    for row in rows:
        old = kernels.get(row.name, Kernel(row.name, row.op_class, 0.0, 0.0, 0.0))
        kernels[row.name] = Kernel(
            row.name, old.op_class, old.calls + row.calls / count, old.ms + row.time_ns / 1e6 / count,
            old.exposed_ms + row.exposed_ns / 1e6 / count,
        )  # fmt: skip
    whole = [step for step, size in zip(steps, sizes, strict=True) if 0.5 < size / typical < 2]
    whole = whole[:: max(1, len(whole) // MOST_STEPS)]
    columns: dict[str, list[float]] = {name: [] for name in ("step", "idle", "overlapped")}
    to_next = _to_next(whole, {(step.device, step.start_ns) for step in steps})
    between = not within and 2 * len(to_next) >= len(whole)
    for step, length in to_next if between else [(step, step.span_ns) for step in whole]:
        busy = sum(times.exposed_ns for times in step.classes.values())
        for name, ns in (("step", length), ("idle", length - busy), ("overlapped", step.time_ns - busy)):
            columns[name].append(ns / 1e6)
    for op_class in {kernel.op_class for kernel in kernels.values()}:
        columns[op_class] = [step.times(op_class).time_ns / 1e6 for step in whole]
    middle = {name: centre(tuple(values)) for name, values in columns.items()}
    half = {
        name: students_t(each.n - 1, CONFIDENCE) * each.error if each.n > 1 else OF_ONE_STEP * each.value
        for name, each in middle.items()
    }
    launch: Literal["", "a graph", "single launches"] = ""
    if trace.categories.get("cpu_op"):  # kernels of a graph have no operator
        known = sum(row.calls for row in rows if row.op)
        launch = "single launches" if known > sum(sizes) / 2 else "a graph"
    return DecodeStep(
        Path(path).name, len(whole), kernels, middle["idle"].value, half, between, launch, trace.on == "cpu"
    )  # fmt: skip


def _to_next(steps: Sequence[TraceStep], starts: Collection[tuple[str, int]]) -> list[tuple[TraceStep, int]]:
    """The steps that another decode step follows, with the time up to that, but for pauses of the server.
    starts: of all decode steps"""
    lengths = [
        (step, max(step.period_ns, step.span_ns))
        for step in steps
        if step.period_ns is not None and (step.device, step.start_ns + step.period_ns) in starts
    ]
    typical = statistics.median(length for _, length in lengths) if lengths else 0
    return [(step, length) for step, length in lengths if length < PAUSE * typical]


@dataclass(frozen=True)
class Changed:
    """The kernels of the changed op in the steps without and with the change.

    before, after: all names of it in either step
    old, new:      those by which the two are told apart, the one with the most time first; empty: none are
    wanted:        the new kernels as the run names them, that of the most time first
    foreign:       the kernel of the most time in the step before, where that is none of the run's
    calls:         of the op in a step
    called:        the part of the calls that the new kernel took; None: names do not tell
    by_op:         that of each op of several
    guessed:       the new kernel is one of another name than the run's, as those before it went
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    old: tuple[str, ...]
    new: tuple[str, ...]
    wanted: tuple[str, ...]
    foreign: str
    calls: float
    called: float | None
    by_op: Mapping[str, float]
    guessed: bool


def changed(
    before: DecodeStep | None, after: DecodeStep, ops: Collection[str], alone: Alone | None
) -> Changed:
    """before: None where only the server with the change was profiled"""
    sides = [_of_ops(step, ops) if step else [] for step in (before, after)]
    named, foreign = alone is not None and bool(alone.old and alone.new), ""
    old: list[str] = []
    new: list[str] = []
    by_op: dict[str, float] = {}
    guessed = False
    if alone and named:
        old = _there(alone.old, before or after, ops, alone.new)
        new = _there(alone.new, after, ops, alone.old)
        if before and sides[0] and not old:
            foreign, old = sides[0][0], sides[0][:1]
        if before and old and not new and after.calls(old) < GONE * before.calls(old):
            new = _unknown(before, after)
            guessed = bool(new)
    elif before:
        for op in ops:
            went = [
                name for name in _of_ops(before, [op]) if after.calls([name]) < KEPT * before.calls([name])
            ]
            came = [name for name in _of_ops(after, [op]) if name not in before.kernels]
            came = came or (_unknown(before, after) if went else [])  # no rule knows the new kernel
            if went and came:
                by_op[op] = _called(before, after, went)
            old, new = [*old, *went], [*new, *(name for name in came if name not in new)]
        old, new = ([*sorted(each, key=lambda name: -step.of([name]))]
                    for each, step in ((old, before), (new, after)))  # fmt: skip
    source = before or after
    main = (old or sides[0] or sides[1] or [""])[:1]
    calls = source.calls(main) if before or not named else after.calls(old[:1]) + after.calls(new[:1])
    if alone and alone.op == "fused_moe" and calls:  # both products may be launches of one kernel
        us = alone.kernel_us.get(main[0], 0.0)
        calls /= max(1, round(us / source.kernels[main[0]].us_per_call))
    called: float | None = None
    if named and not new:
        called = 0.0
    elif named and not before:
        called = after.calls(new[:1]) / (after.calls(new[:1]) + after.calls(old[:1]))
    elif before and by_op:
        called = min(by_op.values())
    elif before and old and new:
        called = _called(before, after, old)
    return Changed(
        before=tuple(dict.fromkeys([*sides[0], *(old if before else ())])),
        after=tuple(dict.fromkeys([*sides[1], *new, *(name for name in old if name in after.kernels)])),
        old=tuple(old), new=tuple(new), wanted=alone.new if alone and named else (), foreign=foreign,
        calls=calls, called=called, by_op=by_op, guessed=guessed,
    )  # fmt: skip


def _called(before: DecodeStep, after: DecodeStep, old: Sequence[str]) -> float:
    """The part of the time of these kernels whose calls went."""
    left = sum(before.of([name]) * min(1.0, after.calls([name]) / before.calls([name])) for name in old)
    return 1 - left / before.of(old)


def _unknown(before: DecodeStep, after: DecodeStep) -> list[str]:
    """The kernels of no known class that only the step after has, that with the most time first."""
    return [name for name in _of_ops(after, ("unknown",)) if name not in before.kernels]


def _of_ops(step: DecodeStep, ops: Collection[str]) -> list[str]:
    """The kernels of these op classes, that with the most time first."""
    kernels = [kernel for kernel in step.kernels.values() if kernel.op_class in ops]
    return [kernel.name for kernel in sorted(kernels, key=lambda kernel: -kernel.ms)]


def _there(
    wanted: Sequence[str], step: DecodeStep, ops: Collection[str], others: Collection[str] = ()
) -> list[str]:
    """The kernels of the op in a step that a run calls so; without template values where no name is whole.
    Kernels of other classes may have these names, too, as torch's products have. others: of the other row"""
    own = [name for name in step.kernels if step.op_class(name) in {*ops, "unknown"}]
    stems = {_stem(name) for name in wanted}
    whole = [name for name in wanted if name in own]
    return whole or [name for name in own if _stem(name) in stems and name not in others]


def swapped(before: DecodeStep, after: DecodeStep, ops: Collection[str], alone: Alone) -> str:
    """The new kernel of a run, if the step before has it and that after has the old ones alone."""
    old = [_there(alone.old, step, ops, alone.new) for step in (before, after)]
    new = [_there(alone.new, step, ops, alone.old) for step in (before, after)]
    return new[0][0] if new[0] and not new[1] and old[1] and not old[0] else ""


def _stem(name: str) -> str:
    return name.removeprefix("void ").partition("<")[0].partition("(")[0]
