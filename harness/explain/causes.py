"""Causes that take a gain away, each with its size and its evidence in steps, logs and servers.

The parts of a step add up: what the op itself did not save (not called, other shapes, less in the step) and
what went elsewhere (clocks, neighbours, waits, overlap, idle time) are the expected less the observed saving.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.explain.alone import Alone
from harness.explain.served import Fit, Log
from harness.explain.sides import Sides
from harness.explain.step import ChangedOp, DecodeStep
from harness.serving.ledger import KernelChange
from harness.serving.link.calibration import T90
from harness.serving.link.predictions import IN_SERVER
from harness.serving.names import COMMUNICATION

Sure = Literal["certain", "likely", "none seen", "not known"]

# The names of causes.
NOT_CALLED, NOT_READ, SAME_SERVER, TABLE_MISSED = "not called", "not read", "the same server", "table missed"
REFUSED, OTHER_BASE, NO_EFFECT = "refused", "another kernel before", "without effect"
OTHER_SHAPES, LESS_IN_STEP = "other shapes", "less in the step"
CLOCKS, OTHER_KERNELS, KERNELS_BESIDE = "clocks", "other kernels", "kernels beside it"
RANK_WAITS, OVERLAP, IDLE = "waits for ranks", "overlapped", "idle device"
OTHER_WORK, STALLS, PREDICTION, NOISE = "other work", "stalls, scheduling", "the prediction", "noise"
WITHOUT_TIMES = (NOT_CALLED, NOT_READ, SAME_SERVER, REFUSED)  # they show in names, settings and calls
OF_OP = (*WITHOUT_TIMES, NO_EFFECT, TABLE_MISSED, OTHER_BASE, OTHER_SHAPES, LESS_IN_STEP)
"""The causes for which the op itself does not save what was expected."""
OF_STEP = (CLOCKS, OTHER_KERNELS, KERNELS_BESIDE, RANK_WAITS, OVERLAP, IDLE)
"""The causes that take the op's saving away elsewhere in the step."""

TRACES = "traces of decode steps of both servers: --trace BEFORE AFTER"
OF_SHAPES = "a trace with the engine's annotations of steps, or an eager one with record_shapes"
RECORD = {
    NOT_CALLED: TRACES,
    NOT_READ: "`serving ab`, which looks names up",
    SAME_SERVER: "`serving ab`, which asks servers for their settings",
    NO_EFFECT: TRACES,
    TABLE_MISSED: "the log of the server with the change: --log; of AITER with AITER_LOG_TUNED_CONFIG=1",
    OTHER_SHAPES: f"{OF_SHAPES}; and --run",
    LESS_IN_STEP: f"{TRACES}, and --run",
    **dict.fromkeys(OF_STEP, TRACES),
    OTHER_WORK: "results of both: --ab, or --before and --after",
    STALLS: "results and traces of both",
    NOISE: "results of several pairs: --ab",
}
"""What to record to know whether there is a cause."""
SURER = {
    SAME_SERVER: RECORD[SAME_SERVER],
    LESS_IN_STEP: "`serving replay --swap` of the op; its run with --cache cold",
    CLOCKS: "clocks and power of both servers at 1 Hz",
    OTHER_KERNELS: "`serving replay --swap` of the op",
    RANK_WAITS: "traces of all ranks",
    OVERLAP: "traces of all ranks",
    IDLE: "a trace with the host's threads (CPU activities)",
    OTHER_WORK: "results of the same prompts and lengths (seed, --ignore-eos)",
    STALLS: "running and waiting requests, prefills and preemptions of both servers over time (their logs)",
}
"""What to record to be sure of a cause that is likely."""

# A difference is a part (0..1) of the time or number that differs, if nothing else is said.
SERVER_ERROR = IN_SERVER * T90  # the usual difference of a saving in a server from that of the op alone
LAUNCH_SCATTER = 0.01  # by which steps of two launches of one server differ, if no A/B shows another figure
KERNEL_SCATTER = 3  # the difference of a kernel's times in two launches, as a multiple of the steps'
LEAST = 0.1  # smaller causes, as parts of the expected saving or of what is missing, count as not seen
SAME_CALLS = 0.02  # the largest difference of a kernel's calls in two traces that count as equal
FITS = 0.5  # where more than this part of the calls has shapes of the run, the served shapes are the run's

FEWEST_KERNELS = 3  # the fewest kernels that can show another clock by becoming slower alike
HEAVY = 0.005  # kernels with less than this part of the time scatter too much to show a clock
CLOCK_LAUNCHES = 1.5  # the factor of a clock differs from 1 by more than so many times LAUNCH_SCATTER
CLOCK_SCATTER = 1 / 3  # the standard deviation of the factors of kernels, as a part of (factor - 1)
CLOCK_ALIKE = 0.5
"""A kernel is slower by the clock if its factor is off the median by less than this part of (median - 1)."""
CLOCK_MOST = 0.7  # it is a clock if kernels with more than this part of the time are slower by it
OF_MEDIAN = 1.48  # the standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class Cause:
    """A cause for which less is saved than was expected, or more."""

    name: str
    sure: Sure
    ms: float | None = None  # what it took of the gain; negative: it added to it; None: not known
    says: str = ""  # a sentence for the first line
    evidence: tuple[str, ...] = ()  # lines that show it
    record: str = ""  # what would tell whether there is this cause, or make it sure; empty: nothing is needed

    @property
    def is_seen(self) -> bool:
        """Whether there is evidence of it."""
        return self.sure in ("certain", "likely")

    def sized(self, ms: float, evidence: Iterable[str]) -> Cause:
        """The cause with a size, and with more evidence; empty lines are left out."""
        return replace(self, ms=ms, evidence=(*self.evidence, *filter(None, evidence)))


def _if_large(
    name: str, ms: float, least_ms: float, says: str, evidence: Iterable[str], sure: Sure = "likely"
) -> Cause:
    """The cause if its size is above the least one; else that it was not seen."""
    if abs(ms) <= least_ms:
        return Cause(name, "none seen")
    return Cause(name, sure, says=says).sized(ms, evidence)


@dataclass(frozen=True)
class Steps:
    """The mean step of both servers, or only of that with the change, and what else is known of the op."""

    before: DecodeStep | None
    after: DecodeStep
    ops: tuple[str, ...]
    alone: Alone | None  # the op timed alone in a run, if there is one
    fit: Fit | None  # how the served shapes fit the run's cases; None: they are not known
    unlike: str  # how the work of the profiled steps differs, in requests or contexts; empty: it does not
    log: Log
    sides: Sides
    changed: ChangedOp
    changes: tuple[KernelChange, ...] = ()  # what the user expects of each op

    @property
    def expected_ms(self) -> float | None:
        """The saving of a step that was expected: by a run, the calls times the saving alone; by the user's
        changes, what they take off the op's time. None for a part of an op, which no trace tells apart."""
        if self.alone:
            return self.changed.calls * self.alone.saving_us() / 1e3
        if not self.changes or self.before is None or any(change.part for change in self.changes):
            return None
        return sum(self._expected_of(self.before, change) for change in self.changes)

    def _expected_of(self, before: DecodeStep, change: KernelChange) -> float:
        if change.saved_us is not None:
            return (change.calls or self.changed.calls) * change.saved_us / 1e3
        op_ms = sum(kernel.ms for kernel in before.kernels.values() if kernel.op_class == change.op)
        return op_ms * (1 - 1 / (change.factor or 1.0))

    @property
    def saved_ms(self) -> float | None:
        return self.before.ms - self.after.ms if self.before else None

    @property
    def launch_scatter(self) -> float:
        """See LAUNCH_SCATTER; that of the A/B where it is larger."""
        effect = self.sides.effect
        return max(LAUNCH_SCATTER, (effect.launch_spread or 0.0) / 100 if effect else 0.0)

    @property
    def uncalled_ms(self) -> float:
        """What the calls that the new kernel did not take would have saved."""
        # For each op, if two steps were compared, as no run names the kernels; else for all ops together.
        part_by_op = self.changed.swap.new_part_by_op
        if part_by_op and self.before and self.changes and self.alone is None:
            left = [(1 - part_by_op.get(change.op, 1.0), change) for change in self.changes]
            return sum(part * self._expected_of(self.before, change) for part, change in left)
        return (1 - (self.changed.new_part or 0.0)) * (self.expected_ms or 0.0)

    @property
    def half_ms(self) -> float:
        """Half the width of the interval of saved_ms."""
        return math.hypot(self.half_ms_of("step"), self.launch_scatter * self.after.ms)

    def half_ms_of(self, *keys: str) -> float:
        """Half the width of the interval of the difference of both steps in these keys of `half_width_ms`."""
        steps = [step for step in (self.before, self.after) if step]
        return math.hypot(*(step.half_width_ms.get(key, 0.0) for step in steps for key in keys))

    @property
    def least_ms(self) -> float:
        """The size up to which a cause counts as not seen."""
        expected, saved = self.expected_ms, self.saved_ms or 0.0
        if not expected:
            return max(self.launch_scatter * self.after.ms, LEAST * abs(saved))
        return LEAST * max(abs(expected), abs(expected - saved) if self.before else 0.0)


def step_causes(steps: Steps) -> Iterator[Cause]:
    """The causes that traces show; `none seen` where they would show one and do not."""
    before, after = steps.before, steps.after
    if before is None:
        yield from _causes_of_one_step(steps)
        return
    clock, ratios = (1.0, {}) if steps.unlike else _clock(before, after, steps.changed)
    of_op = list(_op_causes(steps, clock))
    if steps.unlike:
        yield from (cause for cause in of_op if cause.name in WITHOUT_TIMES)
        return
    yield from of_op
    yield _clock_cause(steps, before, clock, ratios)
    yield from _neighbour_causes(steps, before, clock, ratios)
    saved_sum_ms, saved_busy_ms = before.sum_ms - after.sum_ms, before.busy_ms - after.busy_ms
    overlapped_ms = saved_sum_ms - saved_busy_ms
    exposed_before, exposed_after = before.exposed_ms(COMMUNICATION), after.exposed_ms(COMMUNICATION)
    says, exposed = "What the kernel saves runs beside other kernels", ""
    if exposed_after - exposed_before > abs(overlapped_ms) / 2:
        says = "What the kernel saves runs under communication"
        exposed = f"exposed communication: {figure(exposed_before)} -> {figure(exposed_after)} ms"
    saved = f"kernels take {figure(saved_sum_ms)} ms less in sum"
    saved += f", the device is busy for {figure(saved_busy_ms)} ms less"
    least_ms = max(steps.half_ms_of("overlapped"), steps.least_ms)
    yield _if_large(OVERLAP, overlapped_ms, least_ms, says, (saved, exposed))
    if after.on_cpu:  # Python runs between operators, and nothing waits for a host
        return
    more_idle_ms = after.idle_ms - before.idle_ms
    says = f"The device waits {'longer' if more_idle_ms > 0 else 'less'} for the host"
    if before.launch and after.launch and before.launch != after.launch:
        says += f": {after.launch} instead of {before.launch}"
    least_ms = max(steps.half_ms_of("idle"), steps.least_ms, steps.launch_scatter * after.ms)
    idle = f"nothing runs for {figure(before.idle_ms)} -> {figure(after.idle_ms)} ms of a step"
    yield _if_large(IDLE, more_idle_ms, least_ms, says, (idle,))


def _causes_of_one_step(steps: Steps) -> Iterator[Cause]:
    """From the trace with the change alone: whether the kernel is called, and how long it takes there."""
    alone, changed, expected_ms = steps.alone, steps.changed, steps.expected_ms
    if alone is None or changed.new_part is None or expected_ms is None:
        return
    yield _not_called(steps, steps.uncalled_ms)
    if changed.swap.new and changed.new_part:
        alone_ms = sum(alone.kernel_us[name] for name in alone.new) / 1e3
        longer_ms = steps.after.ms_of(changed.swap.new) - changed.new_part * changed.calls * alone_ms
        yield _saves_less(steps, longer_ms, SERVER_ERROR * changed.new_part * expected_ms)


def _op_causes(steps: Steps, clock: float) -> Iterator[Cause]:
    """What the op itself did not save, at the clock of the step before: the expected saving less its own,
    split into causes, each of which takes its size off what is left for the next."""
    before, changed, expected_ms = steps.before, steps.changed, steps.expected_ms
    if before is None or expected_ms is None:
        return
    before_ms, after_ms = before.ms_of(changed.before), steps.after.ms_of(changed.after) / clock
    least_ms = max(steps.launch_scatter * before_ms + steps.half_ms_of(*steps.ops), steps.least_ms)
    saved_ms = before_ms - after_ms
    lost_ms = expected_ms - saved_ms
    new_part = changed.new_part
    if new_part is None:  # names do not tell; if the op became faster, the new kernel took all calls
        saves_nothing = abs(saved_ms) < max(1.5 * LEAST * abs(expected_ms), least_ms)
        if saves_nothing and not steps.unlike:
            yield _same_speed(steps, lost_ms)
            return
        new_part = 1.0
    else:  # if no call is of the new kernel, this has all that is lost: what ran instead may save something
        cause = _not_called(steps, steps.uncalled_ms if new_part or steps.unlike else lost_ms)
        yield cause
        lost_ms -= cause.ms or 0.0
    if not new_part:
        return
    for cause in _base_and_shapes(steps, before_ms, new_part, least_ms):
        yield cause
        if cause.name == OTHER_SHAPES and cause.sure == "certain":
            return
        lost_ms -= cause.ms or 0.0
    yield _saves_less(steps, lost_ms, max(least_ms, SERVER_ERROR * abs(new_part * expected_ms)))


def _base_and_shapes(steps: Steps, before_ms: float, new_part: float, least_ms: float) -> Iterator[Cause]:
    """Whether the kernel before, and the shapes, are those of the run. before_ms: of the op in the step
    before; new_part: the part of the calls that the new kernel took"""
    alone, changed, fit = steps.alone, steps.changed, steps.fit
    if alone is None or steps.before is None:
        return
    if foreign := changed.swap.foreign:
        alone_us = alone.mean(lambda case: case.before_us)
        shorter_ms = new_part * (changed.calls * alone_us / 1e3 - before_ms)
        says = f"Without the change the server ran {short(foreign)}, which is faster than the run's"
        evidence = f"{_calls(foreign, steps.before)} a step in {steps.before.file}: {short(foreign)}"
        in_run = f"{alone.before} takes {figure(alone_us)} us in {alone.folder}"
        says += f" {alone.before}"
        yield _if_large(OTHER_BASE, shorter_ms, least_ms, says, (evidence, in_run), "certain")
    if fit is None:
        return
    expected_ms = changed.calls * alone.saving_us() / 1e3
    if fit.part > FITS:
        sure: Sure = "likely"
        lost_ms = new_part * (expected_ms - changed.calls * alone.saving_us(fit.cases) / 1e3)
    else:  # what a call saves at these shapes was not timed
        sure = "certain"
        lost_ms = new_part * expected_ms - (before_ms - steps.after.ms_of(changed.after))
    cases = "; ".join(case.shown for case in alone.cases[:3])
    says = f"The server calls the op at other shapes than the run: {fit.served}"
    evidence = f"served: {fit.served} ({fit.source})"
    in_run = f"timed: {cases} ({alone.folder})"
    yield _if_large(OTHER_SHAPES, lost_ms, least_ms, says, (evidence, in_run), sure)


def _not_called(steps: Steps, ms: float) -> Cause:
    """That calls of the new kernel are missing. ms: what they would have saved"""
    changed, swap, after = steps.changed, steps.changed.swap, steps.after
    names = changed.run_names or swap.new
    kernel = short(names[0]) if names else "the new kernel"
    new_calls, old_calls = after.calls_of(swap.new[:1]), after.calls_of(swap.old[:1])
    instead = next((name for name in changed.after if name not in swap.old), "")
    evidence = [
        f"{figure(new_calls)} calls of {kernel} a step in {after.file}, {after.steps} decode steps",
        f"{figure(old_calls)} calls of {short(swap.old[0])} are left" if swap.old and old_calls else "",
        f"{_calls(instead, after)} of {short(instead)} instead" if instead and not new_calls else "",
        *(f"the log says: {line}" for line, _ in steps.log.chosen.most_common(3)),
    ]
    # A kernel of another name may be the same one, or a variant for other shapes.
    is_told_by_name = changed.run_names and not swap.guessed and (new_calls or old_calls)
    sure: Sure = "certain" if is_told_by_name else "likely"
    if new_calls:
        says = f"The new kernel takes {100 * (changed.new_part or 0):.0f} % of the calls only: {kernel}"
        return _if_large(NOT_CALLED, ms, steps.least_ms, says, evidence, sure)
    says = f"The new kernel was not called: {kernel} is in no step of {after.file}"
    if steps.fit and steps.fit.part <= FITS:
        says, sure = f"{says}; the run timed other shapes than are served ({steps.fit.served})", "likely"
    reason = not_in_effect(steps.sides, steps.log)
    if reason and reason.sure == "certain" and abs(ms) > steps.least_ms:
        return reason.sized(ms, evidence)
    if reason:
        evidence += reason.evidence
    return _if_large(NOT_CALLED, ms, steps.least_ms, says, evidence, sure)


def _same_speed(steps: Steps, ms: float) -> Cause:
    """That the same kernels run as fast as before, with the reason if one is known. ms: what is missing"""
    assert steps.before
    before, after = steps.before, steps.after
    names = [name for name in steps.changed.before if name in after.kernels][:2]
    evidence = [f"{_calls(name, before)} -> {_calls(name, after)} a step: {name}" for name in names]
    if reason := not_in_effect(steps.sides, steps.log) or _table_cause(steps, ms):
        return reason.sized(ms, evidence)
    says = f"The same kernels run as fast as without the change: {', '.join(map(short, names)) or 'none'}"
    return _if_large(NO_EFFECT, ms, steps.least_ms, says, evidence)


def not_in_effect(sides: Sides, log: Log) -> Cause | None:
    """Why the change cannot be in effect, where names, settings or a log say so."""
    if says := sides.unread:
        evidence = f"looked up in what is installed ({sides.title})"
        return Cause(NOT_READ, "certain", None, says[0].upper() + says[1:], (evidence,))
    if log.refused:
        says = f"The server refused it: {next(iter(log.refused))}"
        return Cause(REFUSED, "likely", None, says, _log_lines(log.refused, 2))
    if sides.same:
        says = f"Both servers are the same: {sides.same}"
        return Cause(SAME_SERVER, "certain" if sides.launched_alike else "likely", None, says, (sides.title,))
    return None


def _log_lines(counts: Counter[str], most: int) -> tuple[str, ...]:
    return tuple(f"{count} lines of the log: {line}" for line, count in counts.most_common(most))


def same_kernels(steps: Steps) -> Cause | None:
    """That both steps are the same, where they are; for steps of which nothing says which op was changed."""
    before, after = steps.before, steps.after
    if before is None or {*before.kernels} != {*after.kernels} or abs(before.ms - after.ms) > steps.half_ms:
        return None
    times = f"{figure(before.ms)} ms in {before.file}, {figure(after.ms)} ms in {after.file}"
    evidence = f"{len(after.kernels)} kernels: {times}"
    return Cause(NO_EFFECT, "likely", None, "The same kernels run in both traces, for as long", (evidence,))


def missed_table(log: Log, ops: Sequence[str], served: str = "") -> Cause | None:
    """What a log says of tables of these ops; certain for a shape that was served. None: it says nothing."""
    if op := next((op for op in ops if op in log.missed), None):
        missed_sizes = {word for text in log.missed[op] for word in text.split()}
        is_served = not missed_sizes.isdisjoint(word.strip(",") for word in served.split())
        sure: Sure = "certain" if is_served else "likely"
        says = f"The tuned table has no entry for {op} as it is called, and a default runs"
        return Cause(TABLE_MISSED, sure, None, says, _log_lines(log.missed[op], 3))
    # AITER may log nothing of its tables: where it runs, a log without a hit says nothing of misses either.
    if log.files and (log.hits or not log.has_aiter) and (ops or not log.missed):
        return Cause(TABLE_MISSED, "none seen")
    return None


def _table_cause(steps: Steps, ms: float) -> Cause | None:
    """That a table was missed, where a log says so and enough is missing for it."""
    cause = missed_table(steps.log, steps.ops, steps.fit.served if steps.fit else "")
    return cause if cause and cause.is_seen and ms > steps.least_ms else None


def _saves_less(steps: Steps, ms: float, least_ms: float) -> Cause:
    """That the op saves less in the step than alone, or more."""
    changed, after, alone = steps.changed, steps.after, steps.alone
    kernel = next(iter([*changed.swap.new, *changed.after]), "")
    evidence = [f"{_calls(kernel, after)} a step in {after.file}: {kernel}"]
    if alone and (us := alone.kernel_us.get(kernel)) is not None:
        evidence.append(f"alone it takes {figure(us)} us ({alone.after}, {alone.folder})")
    if steps.before:
        times = f"{figure(steps.before.ms_of(changed.before))} -> {figure(after.ms_of(changed.after))}"
        evidence.append(f"the op takes {times} ms of a step")
    if ms > least_ms and (missed := _table_cause(steps, ms)):
        return missed.sized(ms, evidence)
    unknown = "" if steps.fit else "; whether it is called at other shapes is not known"
    what = "The new kernel runs, and" if changed.swap.new else "The op"
    how = f"saves {'less' if ms > 0 else 'more'}"
    if (steps.expected_ms or 0.0) < 0:
        how = f"loses {'more' if ms > 0 else 'less'}"
    says = f"{what} {how} in the step than alone{unknown}"
    return _if_large(LESS_IN_STEP, ms, max(least_ms, steps.least_ms), says, evidence)


def _clock(before: DecodeStep, after: DecodeStep, changed: ChangedOp) -> tuple[float, dict[str, float]]:
    """The factor by which another clock makes kernels slower, 1 where none shows; and of each kernel that the
    change leaves alone the time of a call after over that before."""
    ratios: dict[str, float] = {}
    for name, kernel in before.kernels.items():
        is_other = name not in {*changed.before, *changed.after} and kernel.op_class not in COMMUNICATION
        if not is_other or kernel.calls == 0 or kernel.ms <= 0:
            continue
        if abs(after.calls_of([name]) / kernel.calls - 1) <= SAME_CALLS:
            ratios[name] = after.kernels[name].us_per_call / kernel.us_per_call
    total_ms = before.ms_of(ratios)
    heavy = [ratio for name, ratio in ratios.items() if before.kernels[name].ms > HEAVY * total_ms]
    if len(heavy) < FEWEST_KERNELS:
        return 1.0, ratios
    factor = statistics.median(heavy)
    change = abs(factor - 1)
    scatter = OF_MEDIAN * statistics.median(abs(ratio - factor) for ratio in heavy)
    alike = [name for name, ratio in ratios.items() if abs(ratio - factor) < CLOCK_ALIKE * change]
    is_one_factor = scatter < CLOCK_SCATTER * change and before.ms_of(alike) > CLOCK_MOST * total_ms
    return factor if is_one_factor and change > CLOCK_LAUNCHES * LAUNCH_SCATTER else 1.0, ratios


def _clock_cause(steps: Steps, before: DecodeStep, clock: float, ratios: Mapping[str, float]) -> Cause:
    if len(ratios) < FEWEST_KERNELS:
        return Cause(CLOCKS, "not known")
    # What the clock adds to the kernels that the change leaves alone, and to the changed op.
    ms = (clock - 1) * before.ms_of(ratios) + steps.after.ms_of(steps.changed.after) * (1 - 1 / clock)
    percent = f"{100 * abs(clock - 1):.2g} % {'slower' if ms > 0 else 'faster'}"
    span = f"from {min(ratios.values()):.3f} to {max(ratios.values()):.3f}"
    others = f"{len(ratios)} kernels that the change leaves alone"
    return _if_large(
        CLOCKS, ms, steps.least_ms, f"All kernels became {percent} alike, as by another clock",
        (f"{others} take {clock:.3f} times as long a call, {span} ({steps.after.file} over {before.file})",),
    )  # fmt: skip


def _neighbour_causes(
    steps: Steps, before: DecodeStep, clock: float, ratios: Mapping[str, float]
) -> Iterator[Cause]:
    """Other kernels: slower ones, new and gone ones, and communication, which waits for the slowest rank."""
    after = steps.after
    for cause, added_ms in _added_ms(steps, before, clock, ratios).items():
        ms = sum(added_ms.values())
        classes = {before.op_class(kernel) or after.op_class(kernel) for kernel in added_ms}
        noise_ms = KERNEL_SCATTER * steps.launch_scatter * before.ms_of(added_ms)
        largest = sorted(added_ms, key=lambda kernel: -abs(added_ms[kernel]))[:3]
        first = short(largest[0]) if largest else ""
        slower, brings = ("slower", "brings other kernels") if ms > 0 else ("faster", "takes kernels away")
        longer = "longer" if ms > 0 else "less"
        says = {
            OTHER_KERNELS: f"Other kernels became {slower}, most of all {first}",
            KERNELS_BESIDE: f"The change {brings}: {first}",
            RANK_WAITS: f"Communication takes {longer}: a rank waits for the slowest one",
        }[cause]
        evidence = [f"{_calls(each, before)} -> {_calls(each, after)} a step: {each}" for each in largest]
        least_ms = max(steps.least_ms, steps.half_ms_of(*classes), noise_ms)
        sure: Sure = "certain" if cause == KERNELS_BESIDE else "likely"
        yield _if_large(cause, ms, least_ms, says, evidence, sure)


def _added_ms(
    steps: Steps, before: DecodeStep, clock: float, ratios: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Cause -> kernel -> the ms by which it takes longer than before, at the clock of the step after."""
    after, changed = steps.after, steps.changed
    added: dict[str, dict[str, float]] = {OTHER_KERNELS: {}, KERNELS_BESIDE: {}, RANK_WAITS: {}}
    for name in (before.kernels.keys() | after.kernels.keys()) - {*changed.before, *changed.after}:
        before_ms, after_ms = before.ms_of([name]), after.ms_of([name])
        op_class = before.op_class(name) or after.op_class(name)
        noise_ms = max(KERNEL_SCATTER * steps.launch_scatter * before_ms, steps.half_ms_of(op_class))
        if op_class in COMMUNICATION:  # the clock may slow it or not: only what lies beyond both counts
            low, high = sorted((before_ms, clock * before_ms))
            added[RANK_WAITS][name] = max(0.0, after_ms - high) + min(0.0, after_ms - low)
        elif name not in ratios:
            added[KERNELS_BESIDE][name] = after_ms - clock * before_ms
        elif abs(after_ms - clock * before_ms) > noise_ms:
            added[OTHER_KERNELS][name] = after_ms - clock * before_ms
    return added


def _calls(name: str, step: DecodeStep) -> str:
    """A kernel's calls in a step and the time of each."""
    kernel = step.kernels.get(name)
    return f"{figure(kernel.calls)} x {figure(kernel.us_per_call)} us" if kernel else "none"


def figure(value: float, digits: int = 3) -> str:
    """A number in so many significant digits; a larger one in all digits before the point."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:.0f}"


def short(name: str) -> str:
    """A kernel's name with the middle of a long one left out."""
    name = name.removeprefix("void ")
    return name if len(name) <= 50 else f"{name[:30]}...{name[-15:]}"
