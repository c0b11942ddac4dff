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
from harness.explain.step import Changed, DecodeStep
from harness.serving.ledger import KernelChange
from harness.serving.link.calibration import T90
from harness.serving.link.predictions import IN_SERVER
from harness.serving.names import COMMUNICATION

Sure = Literal["certain", "likely", "none seen", "not known"]

CALLS, UNREAD, SAME, TABLE = "not called", "not read", "the same server", "table missed"
REFUSED, BASE, SHAPES, LESS = "refused", "another kernel before", "other shapes", "less in the step"
NO_EFFECT = "without effect"
CLOCKS, SLOWER, BESIDE, WAITS = "clocks", "other kernels", "kernels beside it", "waits for ranks"
OVERLAP, IDLE, WORK, STALLS = "overlapped", "idle device", "other work", "stalls, scheduling"
PREDICTED, NOISE = "the prediction", "noise"
OF_OP = (CALLS, UNREAD, SAME, NO_EFFECT, REFUSED, TABLE, BASE, SHAPES, LESS)
OF_STEP = (CLOCKS, SLOWER, BESIDE, WAITS, OVERLAP, IDLE)

TRACES = "traces of decode steps of both servers: --trace BEFORE AFTER"
OF_SHAPES = "a trace with the engine's annotations of steps, or an eager one with record_shapes"
RECORD = {
    CALLS: TRACES,
    UNREAD: "`serving ab`, which looks names up",
    SAME: "`serving ab`, which asks servers for their settings",
    NO_EFFECT: TRACES,
    TABLE: "the log of the server with the change: --log; of AITER with AITER_LOG_TUNED_CONFIG=1",
    SHAPES: f"{OF_SHAPES}; and --run",
    LESS: f"{TRACES}, and --run",
    **dict.fromkeys(OF_STEP, TRACES),
    WORK: "results of both: --ab, or --before and --after",
    STALLS: "results and traces of both",
    NOISE: "results of several pairs: --ab",
}
"""What to record to know whether there is a cause."""
SURER = {
    SAME: RECORD[SAME],
    LESS: "`serving replay --swap` of the op; its run with --cache cold",
    CLOCKS: "clocks and power of both servers at 1 Hz",
    SLOWER: "`serving replay --swap` of the op",
    WAITS: "traces of all ranks",
    OVERLAP: "traces of all ranks",
    IDLE: "a trace with the host's threads (CPU activities)",
    WORK: "results of the same prompts and lengths (seed, --ignore-eos)",
    STALLS: "running and waiting requests, prefills and preemptions of both servers over time (their logs)",
}
"""What to record to be sure of a cause that is likely."""

IN_STEP = IN_SERVER * T90
"""The part of a saving by which one in a server usually differs from one alone."""
OF_LAUNCH = 0.01
"""The part of a step by which two launches of a server differ without a cause, where no A/B knows it."""
OF_KERNEL = 3
"""The part of one kernel's time is so many times as large."""
LEAST = 0.1
"""Causes below this part of the expected saving, or of what is missing, are not named."""
SAME_CALLS = 0.02
"""The part by which the calls of a kernel in two traces may differ."""
FITS = 0.5
"""From more than this part of the calls on, the served shapes are those of the run."""
FEW = 3
"""Fewer kernels than these that are slower alike do not show a clock."""

HEAVY, MOST = 0.005, 0.7
"""Kernels of a smaller part of the time scatter too much to show a clock; it slows most of the time alike."""
A_CLOCK, SCATTER, ALIKE = 1.5, 1 / 3, 0.5
"""A clock is so many launches' noise away from none; its kernels scatter by less than the one, and each is
off by less than the other part of that: else single kernels became slower."""
OF_MEDIAN = 1.48
"""A standard deviation over the median deviation, of normal scatter."""


@dataclass(frozen=True)
class Cause:
    """ms:   what it took of the gain; negative: it added to it; None: its size is not known
    says: a sentence for the first line; evidence: what shows it
    record: what would tell whether there is this cause, or make it sure; empty: nothing is needed
    """

    name: str
    sure: Sure
    ms: float | None = None
    says: str = ""
    evidence: tuple[str, ...] = ()
    record: str = ""

    @property
    def named(self) -> bool:
        return self.sure in ("certain", "likely")

    def of(self, ms: float, evidence: Iterable[str]) -> Cause:
        """With a size, and with more evidence."""
        return replace(self, ms=ms, evidence=(*self.evidence, *filter(None, evidence)))


def _if_seen(
    name: str, ms: float, least: float, says: str, evidence: Iterable[str], sure: Sure = "likely"
) -> Cause:
    return Cause(name, "none seen") if abs(ms) <= least else Cause(name, sure, says=says).of(ms, evidence)


@dataclass(frozen=True)
class Steps:
    """The mean step of both servers, or only of that with the change, and what else is known of the op.

    fit:     how the served shapes fit the run's cases; None: they are not known
    unlike:  in what the profiled steps differ besides, as requests or contexts; empty: they do not
    changes: as the user gave them
    """

    before: DecodeStep | None
    after: DecodeStep
    ops: tuple[str, ...]
    alone: Alone | None
    fit: Fit | None
    unlike: str
    log: Log
    sides: Sides
    changed: Changed
    changes: tuple[KernelChange, ...] = ()

    @property
    def expected_ms(self) -> float | None:
        """Calls times the saving alone, or the part of the op's time that factors take off; a trace does not
        tell the parts of an op apart."""
        if self.alone:
            return self.changed.calls * self.alone.saving_us() / 1e3
        if not self.changes or self.before is None or any(change.part for change in self.changes):
            return None
        return sum(self._of_change(self.before, change) for change in self.changes)

    def _of_change(self, before: DecodeStep, change: KernelChange) -> float:
        if change.saved_us is not None:
            return (change.calls or self.changed.calls) * change.saved_us / 1e3
        took = sum(kernel.ms for kernel in before.kernels.values() if kernel.op_class == change.op)
        return took * (1 - 1 / (change.factor or 1.0))

    @property
    def saved_ms(self) -> float | None:
        return self.before.ms - self.after.ms if self.before else None

    @property
    def of_launch(self) -> float:
        """The part by which two launches differ: that of the A/B where it is known to be larger."""
        effect = self.sides.effect
        return max(OF_LAUNCH, (effect.launch_spread or 0.0) / 100 if effect else 0.0)

    @property
    def uncalled_ms(self) -> float:
        """What the calls that the new kernel did not take would have saved."""
        found = self.changed
        if found.by_op and self.before and self.changes and self.alone is None:
            parts = [(1 - found.by_op.get(change.op, 1.0), change) for change in self.changes]
            return sum(part * self._of_change(self.before, change) for part, change in parts)
        return (1 - (found.called or 0.0)) * (self.expected_ms or 0.0)

    @property
    def half_ms(self) -> float:
        """Half the width of the interval of saved_ms."""
        return math.hypot(self.half("step"), self.of_launch * self.after.ms)

    def half(self, *keys: str) -> float:
        """Half the width of the interval of a difference of both steps in these parts."""
        sides = (step for step in (self.before, self.after) if step)
        return math.hypot(*(step.half.get(key, 0.0) for step in sides for key in keys))

    @property
    def floor(self) -> float:
        """Below it no cause is named."""
        expected, saved = self.expected_ms, self.saved_ms or 0.0
        if not expected:
            return max(self.of_launch * self.after.ms, LEAST * abs(saved))
        return LEAST * max(abs(expected), abs(expected - saved) if self.before else 0.0)


def of_step(steps: Steps) -> Iterator[Cause]:
    """The causes that traces show; `none seen` where they would show one and do not."""
    before, after = steps.before, steps.after
    if before is None:
        yield from _of_one(steps)
        return
    clock, ratios = (1.0, {}) if steps.unlike else _clock(before, after, steps.changed)
    of_op = list(_of_op(steps, clock))
    if steps.unlike:
        yield from (cause for cause in of_op if cause.name in (CALLS, UNREAD, SAME, REFUSED))
        return
    yield from of_op
    yield _of_clock(steps, before, clock, ratios)
    yield from _of_neighbours(steps, before, clock, ratios)
    saved, busy = before.sum_ms - after.sum_ms, before.busy_ms - after.busy_ms
    exposed = [step.exposed(COMMUNICATION) for step in (before, after)]
    under = exposed[1] - exposed[0] > abs(saved - busy) / 2
    yield _if_seen(
        OVERLAP, saved - busy, max(steps.half("overlapped"), steps.floor),
        f"What the kernel saves runs {'under communication' if under else 'beside other kernels'}",
        (f"kernels take {figure(saved)} ms less in sum, the device is busy for {figure(busy)} ms less",
         f"exposed communication: {figure(exposed[0])} -> {figure(exposed[1])} ms" if under else ""),
    )  # fmt: skip
    if after.on_cpu:  # Python runs between operators, and nothing waits for a host
        return
    modes = [step.launch for step in (before, after)]
    how = f": {modes[1]} instead of {modes[0]}" if "" not in modes and modes[0] != modes[1] else ""
    more = after.idle_ms - before.idle_ms
    yield _if_seen(
        IDLE, more, max(steps.half("idle"), steps.floor, steps.of_launch * after.ms),
        f"The device waits {'longer' if more > 0 else 'less'} for the host{how}",
        (f"nothing runs for {figure(before.idle_ms)} -> {figure(after.idle_ms)} ms of a step",),
    )  # fmt: skip


# The op itself


def _of_one(steps: Steps) -> Iterator[Cause]:
    """Of the trace with the change alone: whether the kernel is called, and how long it takes there."""
    alone, found, expected = steps.alone, steps.changed, steps.expected_ms
    if alone is None or found.called is None or expected is None:
        return
    yield _not_called(steps, steps.uncalled_ms)
    if found.new and found.called:
        own_us = sum(alone.kernel_us[name] for name in alone.new)
        slower = steps.after.of(found.new) - found.called * found.calls * own_us / 1e3
        yield _less(steps, slower, IN_STEP * found.called * expected)


def _of_op(steps: Steps, clock: float) -> Iterator[Cause]:
    """What the op itself did not save, at the clock of the step before."""
    before, after, found, expected = steps.before, steps.after, steps.changed, steps.expected_ms
    if before is None or expected is None:
        return
    was, now = before.of(found.before), after.of(found.after) / clock
    half = max(steps.of_launch * was + steps.half(*steps.ops), steps.floor)
    lost = expected - (was - now)
    part = 1.0 if found.called is None else found.called
    if found.called is None and abs(was - now) < max(1.5 * LEAST * abs(expected), half) and not steps.unlike:
        yield _not_in_effect(steps, lost)
        return
    if found.called is not None:  # what ran instead may save something, too
        cause = _not_called(steps, steps.uncalled_ms if part or steps.unlike else lost)
        yield cause
        lost -= cause.ms or 0.0
    if not part:
        return
    for cause in _apart(steps, was, part, half):
        yield cause
        if cause.name == SHAPES and cause.sure == "certain":
            return
        lost -= cause.ms or 0.0
    yield _less(steps, lost, max(half, IN_STEP * abs(part * expected)))


def _apart(steps: Steps, was: float, part: float, least: float) -> Iterator[Cause]:
    """Whether the kernel before, and the shapes, are those of the run."""
    alone, found, fit = steps.alone, steps.changed, steps.fit
    if alone is None or steps.before is None:
        return
    before_us = alone.mean("before_us")
    if found.foreign:
        own = part * (found.calls * before_us / 1e3 - was)
        ran = short(found.foreign)
        says = f"Without the change the server ran {ran}, which is faster than the run's {alone.before}"
        evidence = f"{_calls(found.foreign, steps.before)} a step in {steps.before.file}: {ran}"
        in_run = f"{alone.before} takes {figure(before_us)} us in {alone.folder}"
        yield _if_seen(BASE, own, least, says, (evidence, in_run), "certain")
    if fit is None:
        return
    saved = found.calls * alone.saving_us() / 1e3
    if fit.part > FITS:
        of_shapes = part * (saved - found.calls * alone.saving_us(fit.cases) / 1e3)
    else:  # what a call saves at these shapes was not timed
        of_shapes = part * saved - (was - steps.after.of(found.after))
    cases = "; ".join(case.shown for case in alone.cases[:3])
    yield _if_seen(
        SHAPES, of_shapes, least, f"The server calls the op at other shapes than the run: {fit.served}",
        (f"served: {fit.served} ({fit.source})", f"timed: {cases} ({alone.folder})"),
        "likely" if fit.part > FITS else "certain",
    )  # fmt: skip


def _not_called(steps: Steps, ms: float) -> Cause:
    found, after = steps.changed, steps.after
    names = found.wanted or found.new
    kernel = short(names[0]) if names else "the new kernel"
    there, left = after.calls(found.new[:1]), after.calls(found.old[:1])
    instead = next((name for name in found.after if name not in found.old), "")
    evidence = [
        f"{figure(there)} calls of {kernel} a step in {after.file}, {after.steps} decode steps",
        f"{figure(left)} calls of {short(found.old[0])} are left" if found.old and left else "",
        f"{_calls(instead, after)} of {short(instead)} instead" if instead and not there else "",
        *(f"the log says: {line}" for line, _ in steps.log.chosen.most_common(3)),
    ]
    says = f"The new kernel was not called: {kernel} is in no step of {after.file}"
    # A kernel of another name may be the same one, or a variant for other shapes.
    sure: Sure = "certain" if found.wanted and not found.guessed and (there or left) else "likely"
    if there:
        says = f"The new kernel takes {100 * (found.called or 0):.0f} % of the calls only: {kernel}"
        return _if_seen(CALLS, ms, steps.floor, says, evidence, sure)
    if steps.fit and steps.fit.part <= FITS:
        says, sure = f"{says}; the run timed other shapes than are served ({steps.fit.served})", "likely"
    because = not_in_effect(steps.sides, steps.log)
    if because and because.sure == "certain" and abs(ms) > steps.floor:
        return because.of(ms, evidence)
    return _if_seen(CALLS, ms, steps.floor, says, [*evidence, *(because.evidence if because else ())], sure)


def _not_in_effect(steps: Steps, ms: float) -> Cause:
    """The same kernels run as fast as before."""
    found = steps.changed
    assert steps.before
    names = [name for name in found.before if name in steps.after.kernels][:2]
    evidence = [
        f"{_calls(name, steps.before)} -> {_calls(name, steps.after)} a step: {name}" for name in names
    ]
    if because := not_in_effect(steps.sides, steps.log) or _table(steps, ms):
        return because.of(ms, evidence)
    says = f"The same kernels run as fast as without the change: {', '.join(map(short, names)) or 'none'}"
    return _if_seen(NO_EFFECT, ms, steps.floor, says, evidence)


def not_in_effect(sides: Sides, log: Log) -> Cause | None:
    """Why the change cannot be in effect, where names, settings or a log say so."""
    if says := sides.unread:
        evidence = f"looked up in what is installed ({sides.what})"
        return Cause(UNREAD, "certain", None, says[0].upper() + says[1:], (evidence,))
    if log.refused:
        says = f"The server refused it: {next(iter(log.refused))}"
        return Cause(REFUSED, "likely", None, says, _lines(log.refused, 2))
    if sides.same:
        says = f"Both servers are the same: {sides.same}"
        return Cause(SAME, "certain" if sides.alike else "likely", None, says, (sides.what,))
    return None


def _lines(counts: Counter[str], most: int) -> tuple[str, ...]:
    return tuple(f"{count} lines of the log: {line}" for line, count in counts.most_common(most))


def same_kernels(steps: Steps) -> Cause | None:
    """Where nothing says which op was changed: whether both steps are the same."""
    before, after = steps.before, steps.after
    if before is None or {*before.kernels} != {*after.kernels} or abs(before.ms - after.ms) > steps.half_ms:
        return None
    times = f"{figure(before.ms)} ms in {before.file}, {figure(after.ms)} ms in {after.file}"
    evidence = f"{len(after.kernels)} kernels: {times}"
    return Cause(NO_EFFECT, "likely", None, "The same kernels run in both traces, for as long", (evidence,))


def missed_table(log: Log, ops: Sequence[str], served: str = "") -> Cause | None:
    """What a log says of tables of these ops; certain for a shape that was served."""
    if op := next((op for op in ops if op in log.missed), None):
        words = {word for text in log.missed[op] for word in text.split()}
        is_served = words & {word.strip(",") for word in served.split()}
        says = f"The tuned table has no entry for {op} as it is called, and a default runs"
        return Cause(TABLE, "certain" if is_served else "likely", None, says, _lines(log.missed[op], 3))
    if (ops or not log.missed) and log.files and (log.hits or not log.has_aiter):
        return Cause(TABLE, "none seen")
    return None


def _table(steps: Steps, ms: float) -> Cause | None:
    cause = missed_table(steps.log, steps.ops, steps.fit.served if steps.fit else "")
    return cause if cause and cause.named and ms > steps.floor else None


def _less(steps: Steps, ms: float, least: float) -> Cause:
    found, after, alone = steps.changed, steps.after, steps.alone
    kernel = found.new[0] if found.new else next(iter(found.after), "")
    evidence = [f"{_calls(kernel, after)} a step in {after.file}: {kernel}"]
    if alone and kernel in alone.kernel_us:
        evidence.append(
            f"alone it takes {figure(alone.kernel_us[kernel])} us ({alone.after}, {alone.folder})"
        )
    if steps.before:
        took = f"{figure(steps.before.of(found.before))} -> {figure(after.of(found.after))}"
        evidence.append(f"the op takes {took} ms of a step")
    if ms > least and (missed := _table(steps, ms)):
        return missed.of(ms, evidence)
    known = "" if steps.fit else "; whether it is called at other shapes is not known"
    what = "The new kernel runs, and" if found.new else "The op"
    how = f"saves {'less' if ms > 0 else 'more'}"
    if (steps.expected_ms or 0.0) < 0:
        how = f"loses {'more' if ms > 0 else 'less'}"
    says = f"{what} {how} in the step than alone{known}"
    return _if_seen(LESS, ms, max(least, steps.floor), says, evidence)


# What surrounds it


def _clock(before: DecodeStep, after: DecodeStep, found: Changed) -> tuple[float, Mapping[str, float]]:
    """(factor, ratios): what a call takes over what it took, of the kernels that the change leaves alone, and
    the one factor that they share; 1: they share none."""
    own = {*found.before, *found.after}
    same = [
        (kernel, after.kernels[name])
        for name, kernel in before.kernels.items()
        if name in after.kernels and name not in own and kernel.op_class not in COMMUNICATION
        and abs(after.calls([name]) / kernel.calls - 1) <= SAME_CALLS and kernel.ms > 0
    ]  # fmt: skip
    ratios = {was.name: now.us_per_call / was.us_per_call for was, now in same}
    total = sum(was.ms for was, _ in same)
    heavy = [ratios[was.name] for was, _ in same if was.ms > HEAVY * total]
    factor = statistics.median(heavy) if len(heavy) >= FEW else 1.0
    away = abs(factor - 1)
    alike = sum(was.ms for was, _ in same if abs(ratios[was.name] - factor) < ALIKE * away)
    spread = OF_MEDIAN * statistics.median(abs(each - factor) for each in heavy) if heavy else 0.0
    shared = away > A_CLOCK * OF_LAUNCH and spread < SCATTER * away and alike > MOST * total
    return factor if shared else 1.0, ratios


def _of_clock(steps: Steps, before: DecodeStep, clock: float, ratios: Mapping[str, float]) -> Cause:
    if len(ratios) < FEW:
        return Cause(CLOCKS, "not known")
    taken = (clock - 1) * before.of(ratios) + steps.after.of(steps.changed.after) * (1 - 1 / clock)
    low, *_, high = sorted(ratios.values())
    return _if_seen(
        CLOCKS, taken, steps.floor,
        f"All kernels became {100 * abs(clock - 1):.2g} % {'slower' if taken > 0 else 'faster'} alike, as by "
        "another clock",
        (f"{len(ratios)} kernels that the change leaves alone take {clock:.3f} times as long a call, from "
         f"{low:.3f} to {high:.3f} ({steps.after.file} over {before.file})",),
    )  # fmt: skip


def _of_neighbours(
    steps: Steps, before: DecodeStep, clock: float, ratios: Mapping[str, float]
) -> Iterator[Cause]:
    """Other kernels: slower ones, new and gone ones, and communication, which waits for the slowest rank."""
    after, deltas = steps.after, _deltas(steps, before, clock, ratios)
    for name, rows in deltas.items():
        ms, classes = sum(rows.values()), {before.op_class(row) or after.op_class(row) for row in rows}
        least = max(steps.floor, steps.half(*classes), OF_KERNEL * steps.of_launch * before.of(rows))
        largest = sorted(rows, key=lambda row: -abs(rows[row]))[:3]
        first, more = short(largest[0]) if rows else "", ms > 0
        says = {
            SLOWER: f"Other kernels became {'slower' if more else 'faster'}, most of all {first}",
            BESIDE: f"The change {'brings other kernels' if more else 'takes kernels away'}: {first}",
            WAITS: f"Communication takes {'longer' if more else 'less'}: a rank waits for the slowest one",
        }[name]
        evidence = [f"{_calls(row, before)} -> {_calls(row, after)} a step: {row}" for row in largest]
        yield _if_seen(name, ms, least, says, evidence, "certain" if name == BESIDE else "likely")


def _deltas(
    steps: Steps, before: DecodeStep, clock: float, ratios: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """By cause and kernel, what it takes more than before at the clock of after."""
    after, own = steps.after, {*steps.changed.before, *steps.changed.after}
    found: dict[str, dict[str, float]] = {SLOWER: {}, BESIDE: {}, WAITS: {}}
    for name in {**before.kernels, **after.kernels}.keys() - own:
        delta = after.of([name]) - clock * before.of([name])
        op_class = before.op_class(name) or after.op_class(name)
        noise = max(OF_KERNEL * steps.of_launch * before.of([name]), steps.half(op_class))
        if op_class in COMMUNICATION:  # the clock may slow it or not
            low, high = sorted((before.of([name]), clock * before.of([name])))
            found[WAITS][name] = after.of([name]) - min(max(after.of([name]), low), high)
        elif name not in ratios:
            found[BESIDE][name] = delta
        elif abs(delta) > noise:
            found[SLOWER][name] = delta
    return found


def _calls(name: str, step: DecodeStep) -> str:
    kernel = step.kernels.get(name)
    return f"{figure(kernel.calls)} x {figure(kernel.us_per_call)} us" if kernel else "none"


def figure(value: float, digits: int = 3) -> str:
    """In so many digits, or in all before the point."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:.0f}"


def short(name: str) -> str:
    """A kernel's name with the middle of a long one left out."""
    name = name.removeprefix("void ")
    return name if len(name) <= 50 else f"{name[:30]}...{name[-15:]}"
