"""The mean decode step of a trace, kernel by kernel, and the kernels of the changed op in two such steps."""

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

ONE_STEP_ERROR = 0.03  # half the width of the interval of a time that only one step shows, as a part of it
PAUSE_FACTOR = 1.5  # a step that lasts so many times as long as the median step is followed by a pause
Names = Collection[str]  # of kernels, or of ops
CALLS_STAYED, CALLS_GONE = 0.98, 0.02
"""Parts of a kernel's calls: with fewer than the first it lost some, with fewer than the second all."""
MOST_STEPS = 200  # the most steps from which intervals are computed


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


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The mean decode step of one trace."""

    file: str  # the name or path of the trace
    steps: int  # the number of steps over which the intervals are computed
    kernels: Mapping[str, Kernel]  # by name
    idle_ms: float  # the time of a step in which nothing runs
    half_width_ms: Mapping[str, float]
    """Half the width of the 95 % interval of the ms of each op class, of the whole `step`, of its `idle` ms,
    and of `overlapped`, the ms by which kernels' times exceed the busy time."""
    until_next: bool  # whether a step lasts until the next one starts, else until its last kernel ends
    launch: Literal["", "a graph", "single launches"]  # of most kernels; empty: the trace does not tell
    on_cpu: bool  # whether its kernels are operators on a CPU, between which Python runs

    @property
    def sum_ms(self) -> float:
        return sum(kernel.ms for kernel in self.kernels.values())

    @property
    def busy_ms(self) -> float:
        return sum(kernel.exposed_ms for kernel in self.kernels.values())

    @property
    def ms(self) -> float:
        return self.busy_ms + self.idle_ms

    def exposed_ms(self, classes: Collection[str]) -> float:
        return sum(kernel.exposed_ms for kernel in self.kernels.values() if kernel.op_class in classes)

    def op_class(self, name: str) -> str:
        """The class of a kernel; empty where the step does not have it."""
        return self.kernels[name].op_class if name in self.kernels else ""

    def ms_of(self, names: Iterable[str]) -> float:
        return sum(self.kernels[name].ms for name in names if name in self.kernels)

    def calls_of(self, names: Iterable[str]) -> float:
        return sum(self.kernels[name].calls for name in names if name in self.kernels)


def decode_step(trace: Trace, *, until_next: bool = True) -> DecodeStep:
    """The mean decode step. Raises UsageError where the trace has none. until_next: whether steps last until
    the next one starts, if most are followed by one; else they last until their last kernel ends"""
    steps = trace.steps_of("decode")
    if not steps:
        phases = ", ".join(trace.phases())
        advice = f"it has: {phases}: profile the server while it decodes"
        raise UsageError(f"{trace.path} has no decode steps; {advice}")
    call_counts = [sum(times.calls for times in step.classes.values()) for step in steps]
    typical = statistics.median(call_counts)  # a step that the trace cuts off has fewer calls
    kernels = _mean_kernels(trace, sum(call_counts) / typical)
    whole = [step for step, count in zip(steps, call_counts, strict=True) if 0.5 < count / typical < 2]
    whole = whole[:: max(1, len(whole) // MOST_STEPS)]
    lengths = _followed(whole, {(step.device, step.start_ns) for step in steps})
    if not until_next or 2 * len(lengths) < len(whole):
        until_next = False
        lengths = [(step, step.span_ns) for step in whole]
    samples_ms: dict[str, list[float]] = {"step": [], "idle": [], "overlapped": []}
    for step, length_ns in lengths:
        busy_ns = sum(times.exposed_ns for times in step.classes.values())
        samples_ms["step"].append(length_ns / 1e6)
        samples_ms["idle"].append((length_ns - busy_ns) / 1e6)
        samples_ms["overlapped"].append((step.time_ns - busy_ns) / 1e6)
    for op_class in {kernel.op_class for kernel in kernels.values()}:
        samples_ms[op_class] = [step.times(op_class).time_ns / 1e6 for step in whole]
    half_width_ms = {}
    for name, values in samples_ms.items():
        mean = centre(tuple(values))
        half_width_ms[name] = ONE_STEP_ERROR * mean.value
        if mean.n > 1:
            half_width_ms[name] = students_t(mean.n - 1, CONFIDENCE) * mean.error
    launch: Literal["", "a graph", "single launches"] = ""
    if trace.categories.get("cpu_op"):  # kernels of a graph have no operator
        of_operators = sum(row.calls for row in trace.kernels if row.phase == "decode" and row.op)
        launch = "single launches" if of_operators > sum(call_counts) / 2 else "a graph"
    return DecodeStep(
        file=Path(trace.path).name, steps=len(whole), kernels=kernels,
        idle_ms=centre(tuple(samples_ms["idle"])).value, half_width_ms=half_width_ms,
        until_next=until_next, launch=launch, on_cpu=trace.on == "cpu",
    )  # fmt: skip


def _mean_kernels(trace: Trace, steps: float) -> dict[str, Kernel]:
    """The kernels of the decode steps, by name, each with its calls and times over the number of steps."""
    kernels: dict[str, Kernel] = {}
    for row in trace.kernels:
        if row.phase == "decode":
            old = kernels.get(row.name, Kernel(row.name, row.op_class, 0.0, 0.0, 0.0))
            kernels[row.name] = Kernel(
                row.name, old.op_class, old.calls + row.calls / steps, old.ms + row.time_ns / 1e6 / steps,
                old.exposed_ms + row.exposed_ns / 1e6 / steps,
            )  # fmt: skip
    return kernels


def _followed(steps: Sequence[TraceStep], starts: Collection[tuple[str, int]]) -> list[tuple[TraceStep, int]]:
    """The steps that another decode step follows without a pause, each with the ns until that one starts.
    starts: device and start in ns of all decode steps of the trace"""
    lengths = [
        (step, max(step.period_ns, step.span_ns))
        for step in steps
        if step.period_ns is not None and (step.device, step.start_ns + step.period_ns) in starts
    ]
    typical_ns = statistics.median(ns for _, ns in lengths) if lengths else 0
    return [(step, ns) for step, ns in lengths if ns < PAUSE_FACTOR * typical_ns]


@dataclass(frozen=True)
class KernelSwap:
    """The kernels by which the steps without and with the change differ."""

    old: Sequence[str] = ()  # kernels that the change takes away, those with most time first
    new: Sequence[str] = ()  # kernels that it brings
    foreign: str = ""  # the op's kernel with most time before, where that step has none of the run's old ones
    guessed: bool = False  # whether `new` is taken for the run's only because the old ones are gone
    new_part_by_op: Mapping[str, float] = field(default_factory=dict)
    """Op -> the part of its time before whose calls went to new kernels; empty where a run names kernels."""


@dataclass(frozen=True, kw_only=True)
class ChangedOp:
    """The kernels of the changed op in the steps without and with the change."""

    swap: KernelSwap
    before: Sequence[str]  # the names of all kernels of the op in the step before
    after: Sequence[str]
    run_names: Sequence[str]  # the new kernels as a run names them, the most time first; empty: none does
    calls: float  # calls of the op in a step
    new_part: float | None  # the part of them that the new kernel took; None: kernels' names do not tell


def changed_op(before: DecodeStep | None, after: DecodeStep, ops: Names, alone: Alone | None) -> ChangedOp:
    """The kernels of the op, which are told apart by the names in a run that has them, else by comparing both
    steps. before: None where only the server with the change was profiled"""
    names_before = _kernels_of(before, ops) if before else []
    names_after = _kernels_of(after, ops)
    naming_run = alone if alone and alone.old and alone.new else None
    swap = KernelSwap()
    if naming_run:
        swap = _swap_by_run(before, after, ops, naming_run)
    elif before:
        swap = _swap_by_comparison(before, after, ops)
    # Calls of the op are those of its main kernel. In a trace with the change alone it has two: old and new.
    main = next(iter([*swap.old, *names_before, *names_after]), "")
    first = before or after
    calls = first.calls_of([main])
    if naming_run and before is None:
        calls = after.calls_of(swap.old[:1]) + after.calls_of(swap.new[:1])
    new_part = _new_part(before, after, swap, naming_run is not None, calls)
    if alone and alone.op == "fused_moe" and calls:
        # One kernel may compute both products of a call, in two launches. Then the run has the sum of these.
        calls /= max(1, round(alone.kernel_us.get(main, 0.0) / first.kernels[main].us_per_call))
    swapped_after = [*swap.new, *(name for name in swap.old if name in after.kernels)]
    return ChangedOp(
        swap=swap, before=[*dict.fromkeys([*names_before, *(swap.old if before else ())])],
        after=[*dict.fromkeys([*names_after, *swapped_after])],
        run_names=naming_run.new if naming_run else (), calls=calls, new_part=new_part,
    )  # fmt: skip


def _new_part(
    before: DecodeStep | None, after: DecodeStep, swap: KernelSwap, is_named: bool, calls: float
) -> float | None:
    """See ChangedOp.new_part. is_named: whether a run names the kernels"""
    if is_named and not swap.new:
        return 0.0
    if is_named and before is None:
        return after.calls_of(swap.new[:1]) / calls
    if swap.new_part_by_op:
        return min(swap.new_part_by_op.values())
    return _part_gone(before, after, swap.old) if before and swap.old and swap.new else None


def _swap_by_run(before: DecodeStep | None, after: DecodeStep, ops: Names, alone: Alone) -> KernelSwap:
    """The swapped kernels, by their names in a run."""
    old = _named_in(before or after, alone.old, ops, alone.new)
    new = _named_in(after, alone.new, ops, alone.old)
    if before is None:
        return KernelSwap(old, new)
    foreign = ""
    if not old and (of_op := _kernels_of(before, ops)):  # the server ran another kernel than the run before
        foreign = of_op[0]
        old = [foreign]
    guessed: list[str] = []
    if old and not new and after.calls_of(old) < CALLS_GONE * before.calls_of(old):
        guessed = _new_unknown(before, after)
    return KernelSwap(old, new or guessed, foreign, bool(guessed))


def _swap_by_comparison(before: DecodeStep, after: DecodeStep, ops: Collection[str]) -> KernelSwap:
    all_old: list[str] = []
    all_new: dict[str, None] = {}
    new_part_by_op: dict[str, float] = {}
    for op in ops:
        old = [
            name for name in _kernels_of(before, [op])
            if after.calls_of([name]) < CALLS_STAYED * before.calls_of([name])
        ]  # fmt: skip
        new = [name for name in _kernels_of(after, [op]) if name not in before.kernels]
        if old and not new:
            new = _new_unknown(before, after)  # no rule knows the class of the new kernel
        if old and new:
            new_part_by_op[op] = _part_gone(before, after, old)
        all_old += old
        all_new |= dict.fromkeys(new)
    all_old.sort(key=lambda name: -before.ms_of([name]))
    new = sorted(all_new, key=lambda name: -after.ms_of([name]))
    return KernelSwap(all_old, new, new_part_by_op=new_part_by_op)


def _part_gone(before: DecodeStep, after: DecodeStep, old: Sequence[str]) -> float:
    """The part of the time of these kernels in the step before whose calls the step after does not have."""
    left_ms = sum(
        before.ms_of([name]) * min(1.0, after.calls_of([name]) / before.calls_of([name])) for name in old
    )
    return 1 - left_ms / before.ms_of(old)


def _new_unknown(before: DecodeStep, after: DecodeStep) -> list[str]:
    """The kernels of no known class that only the step after has, those with most time first."""
    return [name for name in _kernels_of(after, ("unknown",)) if name not in before.kernels]


def _kernels_of(step: DecodeStep, ops: Collection[str]) -> list[str]:
    """The names of the kernels of these op classes, those with most time first."""
    kernels = [kernel for kernel in step.kernels.values() if kernel.op_class in ops]
    return [kernel.name for kernel in sorted(kernels, key=lambda kernel: -kernel.ms)]


def _named_in(step: DecodeStep, run_names: Names, ops: Names, other_row: Names) -> list[str]:
    """The kernels of the op in a step that have one of the names in a run. Where no kernel has, those that
    have one apart from template values. other_row: the names of the kernels of the run's other row"""
    # A kernel of another op may have the same name, as the products of torch have.
    of_op = [name for name in step.kernels if step.op_class(name) in {*ops, "unknown"}]
    stems = {_stem(name) for name in run_names}
    same_names = [name for name in run_names if name in of_op]
    return same_names or [name for name in of_op if _stem(name) in stems and name not in other_row]


def swapped_kernel(before: DecodeStep, after: DecodeStep, ops: Collection[str], alone: Alone) -> str:
    """The run's new kernel if the traces are swapped: only the first has it, only the second old ones."""
    old_before, old_after = (_named_in(step, alone.old, ops, alone.new) for step in (before, after))
    new_before, new_after = (_named_in(step, alone.new, ops, alone.old) for step in (before, after))
    is_swapped = new_before and old_after and not (new_after or old_before)
    return new_before[0] if is_swapped else ""


def _stem(name: str) -> str:
    """A kernel's name without its return type, template values and arguments."""
    return name.removeprefix("void ").partition("<")[0].partition("(")[0]
