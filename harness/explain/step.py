"""The mean decode step of a trace, kernel by kernel, and the kernels of the changed op in two of them."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """file:    the name or path of the trace
    half:    half the width of the 95 % interval of each class's ms, of `idle`, `overlapped` and `step`
    idle_ms: the time of a step in which nothing runs
    between: whether a step has the time up to the next step, which few decode steps in a row do not show
    launch:  how most kernels were launched; empty: the trace does not tell
    on_cpu:  whether its kernels are operators, between which Python runs
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
        return sum(kernel.exposed_ms for kernel in self.kernels.values() if kernel.op_class in classes)

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
    steps = trace.steps_of("decode")
    if not steps:
        phases = ", ".join(trace.phases())
        why = f"it has: {phases}: profile the server while it decodes"
        raise UsageError(f"{trace.path} has no decode steps; {why}")
    sizes = [sum(times.calls for times in step.classes.values()) for step in steps]
    typical = statistics.median(sizes)
    kernels = _kernels(trace, sum(sizes) / typical)  # a step that the profiler cut off counts in part
    whole = [step for step, size in zip(steps, sizes, strict=True) if 0.5 < size / typical < 2]
    whole = whole[:: max(1, len(whole) // MOST_STEPS)]
    columns: dict[str, list[float]] = {"step": [], "idle": [], "overlapped": []}
    to_next = _to_next(whole, {(step.device, step.start_ns) for step in steps})
    between = not within and 2 * len(to_next) >= len(whole)
    for step, length in to_next if between else [(step, step.span_ns) for step in whole]:
        busy = sum(times.exposed_ns for times in step.classes.values())
        columns["step"].append(length / 1e6)
        columns["idle"].append((length - busy) / 1e6)
        columns["overlapped"].append((step.time_ns - busy) / 1e6)
    for op_class in {kernel.op_class for kernel in kernels.values()}:
        columns[op_class] = [step.times(op_class).time_ns / 1e6 for step in whole]
    centres = {name: centre(tuple(values)) for name, values in columns.items()}
    half = {
        name: students_t(mean.n - 1, CONFIDENCE) * mean.error if mean.n > 1 else OF_ONE_STEP * mean.value
        for name, mean in centres.items()
    }
    launch: Literal["", "a graph", "single launches"] = ""
    if trace.categories.get("cpu_op"):  # kernels of a graph have no operator
        of_operators = sum(row.calls for row in trace.kernels if row.phase == "decode" and row.op)
        launch = "single launches" if of_operators > sum(sizes) / 2 else "a graph"
    return DecodeStep(
        Path(trace.path).name, len(whole), kernels, centres["idle"].value, half, between,
        launch, trace.on == "cpu",
    )  # fmt: skip


def _kernels(trace: Trace, steps: float) -> dict[str, Kernel]:
    kernels: dict[str, Kernel] = {}
    for row in trace.kernels:
        if row.phase == "decode":
            old = kernels.get(row.name, Kernel(row.name, row.op_class, 0.0, 0.0, 0.0))
            kernels[row.name] = Kernel(
                row.name, old.op_class, old.calls + row.calls / steps, old.ms + row.time_ns / 1e6 / steps,
                old.exposed_ms + row.exposed_ns / 1e6 / steps,
            )  # fmt: skip
    return kernels


def _to_next(steps: Sequence[TraceStep], starts: Collection[tuple[str, int]]) -> list[tuple[TraceStep, int]]:
    """The steps that another decode step follows, each with the time up to that in ns, but for pauses of the
    server. starts: of all decode steps"""
    lengths = [
        (step, max(step.period_ns, step.span_ns))
        for step in steps
        if step.period_ns is not None and (step.device, step.start_ns + step.period_ns) in starts
    ]
    typical = statistics.median(length for _, length in lengths) if lengths else 0
    return [(step, length) for step, length in lengths if length < PAUSE * typical]


@dataclass(frozen=True)
class Told:
    """How two steps are told apart.

    old, new: the kernels that only one of them has, those with most time first; may be empty
    foreign:  the kernel with most time in the step before, where the run does not name it
    guessed:  whether the new kernel has another name than in the run, and is taken for it as the old kernels
              are gone
    by_op:    where no run names kernels: the part of the calls of each op that the new kernel took
    """

    old: Sequence[str] = ()
    new: Sequence[str] = ()
    foreign: str = ""
    guessed: bool = False
    by_op: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Changed(Told):
    """The kernels of the changed op in the steps without and with the change.

    before, after: all kernels of the op in either step
    wanted:        the new kernels as the run names them, those with most time first
    calls:         of the op in a step
    called:        the part of the calls that the new kernel took; None: names do not tell
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    wanted: tuple[str, ...]
    calls: float
    called: float | None


def changed(
    before: DecodeStep | None, after: DecodeStep, ops: Collection[str], alone: Alone | None
) -> Changed:
    """before: None where only the server with the change was profiled"""
    names_before = _of_ops(before, ops) if before else []
    names_after = _of_ops(after, ops)
    told = Told()
    is_named = bool(alone and alone.old and alone.new)
    if alone and is_named:
        told = _told_by_run(before, after, ops, alone)
    elif before:
        told = _told_by_comparison(before, after, ops)
    main = next(iter([*told.old, *names_before, *names_after]), "")
    calls = (before or after).calls([main])
    new_calls = after.calls(told.new[:1])
    if is_named and before is None:
        calls = after.calls(told.old[:1]) + new_calls
    called = None
    if is_named and not told.new:
        called = 0.0
    elif is_named and before is None:
        called = new_calls / calls
    elif told.by_op:
        called = min(told.by_op.values())
    elif before and told.old and told.new:
        called = _called(before, after, told.old)
    if alone and alone.op == "fused_moe" and calls:  # both products may be launches of one kernel
        us = alone.kernel_us.get(main, 0.0)
        calls /= max(1, round(us / (before or after).kernels[main].us_per_call))
    if before:
        names_before += told.old
    names_after += [*told.new, *(name for name in told.old if name in after.kernels)]
    return Changed(
        before=tuple(dict.fromkeys(names_before)), after=tuple(dict.fromkeys(names_after)),
        wanted=alone.new if alone and is_named else (), calls=calls, called=called, **vars(told),
    )  # fmt: skip


def _told_by_run(before: DecodeStep | None, after: DecodeStep, ops: Collection[str], alone: Alone) -> Told:
    old = _there(alone.old, before or after, ops, alone.new)
    new = _there(alone.new, after, ops, alone.old)
    if before is None:
        return Told(old, new)
    foreign = ""
    guessed = False
    if not old:
        old = _of_ops(before, ops)[:1]
        foreign = "".join(old)
    if old and not new and after.calls(old) < GONE * before.calls(old):
        new = _unknown(before, after)
        guessed = bool(new)
    return Told(old, new, foreign, guessed)


def _told_by_comparison(before: DecodeStep, after: DecodeStep, ops: Collection[str]) -> Told:
    old: list[str] = []
    new: dict[str, None] = {}
    by_op: dict[str, float] = {}
    for op in ops:
        went = [name for name in _of_ops(before, [op]) if after.calls([name]) < KEPT * before.calls([name])]
        came = [name for name in _of_ops(after, [op]) if name not in before.kernels]
        if went and not came:
            came = _unknown(before, after)  # no rule knows the new kernel
        if went and came:
            by_op[op] = _called(before, after, went)
        old += went
        new |= dict.fromkeys(came)
    old.sort(key=lambda name: -before.of([name]))
    return Told(old, sorted(new, key=lambda name: -after.of([name])), by_op=by_op)


def _called(before: DecodeStep, after: DecodeStep, old: Sequence[str]) -> float:
    """The part of the time of these kernels whose calls went."""
    left = sum(before.of([name]) * min(1.0, after.calls([name]) / before.calls([name])) for name in old)
    return 1 - left / before.of(old)


def _unknown(before: DecodeStep, after: DecodeStep) -> list[str]:
    """The kernels of no known class that only the step after has, those with most time first."""
    return [name for name in _of_ops(after, ("unknown",)) if name not in before.kernels]


def _of_ops(step: DecodeStep, ops: Collection[str]) -> list[str]:
    """The kernels of these op classes, those with most time first."""
    kernels = [kernel for kernel in step.kernels.values() if kernel.op_class in ops]
    return [kernel.name for kernel in sorted(kernels, key=lambda kernel: -kernel.ms)]


def _there(
    wanted: Sequence[str], step: DecodeStep, ops: Collection[str], others: Collection[str] = ()
) -> list[str]:
    """The kernels of the op in a step that have one of the names in a run; where none has, those whose names
    are the same without template values. Kernels of other classes may have these names, too, as torch's
    products have. others: the kernels of the other row"""
    of_op = [name for name in step.kernels if step.op_class(name) in {*ops, "unknown"}]
    stems = {_stem(name) for name in wanted}
    whole = [name for name in wanted if name in of_op]
    return whole or [name for name in of_op if _stem(name) in stems and name not in others]


def swapped(before: DecodeStep, after: DecodeStep, ops: Collection[str], alone: Alone) -> str:
    """The new kernel of a run, if only the step before has it, and only the step after has the old ones."""
    old_before, old_after = (_there(alone.old, step, ops, alone.new) for step in (before, after))
    new_before, new_after = (_there(alone.new, step, ops, alone.old) for step in (before, after))
    is_swapped = new_before and old_after and not (new_after or old_before)
    return new_before[0] if is_swapped else ""


def _stem(name: str) -> str:
    return name.removeprefix("void ").partition("<")[0].partition("(")[0]
