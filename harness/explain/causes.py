"""Causes that take a gain away, each with its size and its evidence: what both steps and the logs show of them.

The parts of a step add up. What the op itself did not save (not called, other shapes, less in the step) and
what went elsewhere (clocks, neighbours, waiting, overlap, idle time) sum to the expected saving less the
observed one, but for what lies below the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.explain.alone import Alone
from harness.explain.served import Fit, Log
from harness.explain.sides import Sides
from harness.explain.step import Changed, DecodeStep, Kernel
from harness.serving.ledger import KernelChange
from harness.serving.link.calibration import T90
from harness.serving.link.predictions import IN_SERVER
from harness.serving.names import COMMUNICATION

Sure = Literal["certain", "likely", "none seen", "not known"]

CALLS, UNREAD, SAME, TABLE = "not called", "not read", "the same servers", "table missed"
REFUSED, BASE, SHAPES, LESS = "refused", "another kernel before", "other shapes", "less in the step"
CLOCKS, SLOWER, BESIDE, WAITS = "clocks", "slower neighbours", "kernels beside it", "waits for ranks"
OVERLAP, IDLE, WORK, STALLS = "overlapped", "idle device", "other work", "stalls, scheduling"
PREDICTED, NOISE = "the prediction", "noise"
OF_OP = (CALLS, UNREAD, SAME, REFUSED, TABLE, BASE, SHAPES, LESS)
OF_STEP = (CLOCKS, SLOWER, BESIDE, WAITS, OVERLAP, IDLE)

TRACES = "traces of decode steps of both servers, for --trace BEFORE AFTER"
RECORD = {
    CALLS: TRACES, TABLE: "the log of the server with the change, for --log; AITER logs what it found in a table "
    "only with AITER_LOG_TUNED_CONFIG=1", SAME: "`serving ab`, which asks both servers for their settings",
    UNREAD: "`serving ab`, which looks the names up", SHAPES: "a trace with shapes (record_shapes) of an eager "
    "launch, or with the engine's annotations of steps, and --run", LESS: f"{TRACES}, and --run",
    WORK: "results of both, for --ab, or --before and --after", NOISE: "results of several pairs, for --ab",
    STALLS: "results and traces of both", **dict.fromkeys(OF_STEP, TRACES),
}  # fmt: skip
"""What to record to know a cause."""

IN_STEP = IN_SERVER * T90
"""The part of a saving by which one in a server usually differs from one alone."""
BETWEEN_LAUNCHES = 0.01
"""The part of a kernel's time by which two launches of a server differ without a cause."""
LEAST = 0.1
"""Causes below this part of the expected saving are not named."""
SAME_CALLS = 0.02
"""The part by which the calls of a kernel in two traces may differ."""
FEW_CLOCKS = 3
"""Kernels that have to be slower alike before that is called a clock."""


@dataclass(frozen=True)
class Cause:
    """ms:     what it took of the gain; negative: it added to it; None: its size is not known
    says:   a sentence for the first line; evidence: what shows it; record: what would tell
    """

    name: str
    sure: Sure
    ms: float | None = None
    says: str = ""
    evidence: tuple[str, ...] = ()
    record: str = ""


@dataclass(frozen=True)
class Steps:
    """Both mean steps, or only that with the change, and what else is known of the op.

    changes: as the user gave them; fit: how the served shapes fit the run's; None: they are not known
    """

    before: DecodeStep | None
    after: DecodeStep
    ops: tuple[str, ...]
    alone: Alone | None
    fit: Fit | None
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
        return sum(self._expected_of(self.before, change) for change in self.changes)

    def _expected_of(self, before: DecodeStep, change: KernelChange) -> float:
        if change.saved_us is not None:
            return (change.calls or self.changed.calls) * change.saved_us / 1e3
        took = sum(kernel.ms for kernel in before.kernels.values() if kernel.op_class == change.op)
        return took * (1 - 1 / (change.factor or 1.0))

    @property
    def saved_ms(self) -> float | None:
        return self.before.ms - self.after.ms if self.before else None

    @property
    def half_ms(self) -> float:
        """Half the width of the interval of saved_ms."""
        if not self.before:
            return math.inf
        launches = BETWEEN_LAUNCHES / 2 * self.before.ms
        return math.hypot(self.before.half["step"], self.after.half["step"], launches)


@dataclass
class _Clock:
    """Kernels that the change should not touch: name -> the time of a call after over before."""

    ratios: Mapping[str, float]
    factor: float = 1.0
    spread: float = 0.0
    evidence: tuple[str, ...] = field(default=())


def of_step(steps: Steps) -> Iterator[Cause]:
    """The causes that traces show; `none seen` where they would show one and do not."""
    expected, before, after, found = steps.expected_ms, steps.before, steps.after, steps.changed
    floor = LEAST * abs(expected) if expected else BETWEEN_LAUNCHES / 2 * after.ms
    if before is None:
        yield from _of_one(steps, floor)
        return
    clock = _clock(before, after, found)
    yield from _of_op(steps, clock, floor)
    yield from _of_clock(before, after, found, clock, floor)
    yield from _of_neighbours(before, after, found, clock, floor)
    rows = (
        (OVERLAP, "overlapped", before.sum_ms - before.busy_ms, after.sum_ms - after.busy_ms),
        (IDLE, "idle", before.idle_ms, after.idle_ms),
    )
    for name, key, was, now in rows:
        more = was - now if name == OVERLAP else now - was
        half = math.hypot(before.half[key], after.half[key])
        if abs(more) <= max(half, floor):
            yield Cause(name, "none seen")
        elif name == OVERLAP:
            yield _overlapped(before, after, more)
        else:
            yield _idle(before, after, more)


def _of_one(steps: Steps, floor: float) -> Iterator[Cause]:
    """Of the trace with the change alone: whether the kernel is called, and how long it takes there."""
    alone, found, after, expected = steps.alone, steps.changed, steps.after, steps.expected_ms
    if alone is None or found.called is None or expected is None:
        return
    lost = (1 - found.called) * expected
    if lost > floor:
        yield _not_called(steps, lost)
    else:
        yield Cause(CALLS, "none seen")
    if found.new and found.called:
        slower = after.of(found.new) - found.called * found.calls * sum(map(alone.kernel_us.__getitem__,
                                                                             alone.new)) / 1e3  # fmt: skip
        if abs(slower) > max(IN_STEP * found.called * expected, floor):
            yield _less(steps, slower)


def _of_op(steps: Steps, clock: _Clock, floor: float) -> Iterator[Cause]:
    """What the op itself did not save."""
    before, after, found, expected = steps.before, steps.after, steps.changed, steps.expected_ms
    if before is None or expected is None:
        return
    was, now = before.of(found.before), after.of(found.after) / clock.factor
    classes = {step.kernels[name].op_class for step, names in ((before, found.before), (after, found.after))
               for name in names}  # fmt: skip
    half = BETWEEN_LAUNCHES * was + math.hypot(
        *(s.half.get(c, 0.0) for s in (before, after) for c in classes)
    )
    lost = expected - (was - now)
    if found.called is None:
        if was - now < max(LEAST * 3 * expected, half) and lost > floor:
            yield _not_in_effect(steps, lost)
            return
    else:
        of_calls = (1 - found.called) * expected
        if found.called == 0:  # what ran instead may save or cost something
            of_calls = lost
        if of_calls > floor:
            yield _not_called(steps, of_calls)
            lost -= of_calls
        else:
            yield Cause(CALLS, "none seen")
    if found.called == 0:
        return
    part = found.called or 1.0
    if found.foreign and steps.alone:
        own = (found.calls * steps.alone.mean("before_us") / 1e3 - was) * part
        if own > max(half, floor):
            yield _foreign(steps, own)
            lost -= own
    if steps.alone and steps.fit and steps.fit.part < 1:
        of_shapes = lost
        if steps.fit.part > 0.5 and steps.fit.cases:
            of_shapes = part * (expected - found.calls * steps.alone.saving_us(steps.fit.cases) / 1e3)
        if abs(of_shapes) > max(half, floor):
            yield _shapes(steps, of_shapes)
            lost -= of_shapes
    elif steps.alone and steps.fit:
        fitting = found.calls * steps.alone.saving_us(steps.fit.cases) / 1e3
        if abs(of_shapes := part * (expected - fitting)) > max(half, floor):
            yield _shapes(steps, of_shapes)
            lost -= of_shapes
        else:
            yield Cause(SHAPES, "none seen")
    if abs(lost) <= max(half, floor, IN_STEP * abs(part * expected)):
        yield Cause(LESS, "none seen")
    elif lost > 0 and (missed := _missed(steps)):
        yield _table(steps, lost, missed)
    else:
        yield _less(steps, lost)


def _clock(before: DecodeStep, after: DecodeStep, found: Changed) -> _Clock:
    """One factor by which kernels that did not change became slower, where there is one."""
    own = {*found.before, *found.after}
    common = [(kernel, after.kernels[name]) for name, kernel in before.kernels.items()
              if name in after.kernels and name not in own and kernel.op_class not in COMMUNICATION]  # fmt: skip
    same = [(a, b) for a, b in common if abs(b.calls - a.calls) <= SAME_CALLS * a.calls and a.ms > 0]
    ratios = {a.name: b.us_per_call / a.us_per_call for a, b in same}
    total = sum(a.ms for a, _ in same)
    heavy = {a.name: ratios[a.name] for a, _ in same if a.ms > 0.005 * total}
    if len(heavy) < FEW_CLOCKS:
        return _Clock(ratios)
    factor = statistics.median(heavy.values())
    spread = 1.48 * statistics.median(abs(ratio - factor) for ratio in heavy.values())
    alike = sum(a.ms for a, _ in same if abs(ratios[a.name] - factor) < 0.5 * abs(factor - 1))
    if abs(factor - 1) < 1.5 * BETWEEN_LAUNCHES or spread > abs(factor - 1) / 3 or alike < 0.7 * total:
        return _Clock(ratios)
    evidence = (
        f"{len(heavy)} kernels that did not change take {factor:.3f} times as long a call, +-{spread:.3f} "
        f"({after.file} over {before.file})",
    )
    return _Clock(ratios, factor, spread, evidence)


def _of_clock(
    before: DecodeStep, after: DecodeStep, found: Changed, clock: _Clock, floor: float
) -> Iterator[Cause]:
    of_others = (clock.factor - 1) * before.of(clock.ratios)
    taken = of_others + after.of(found.after) * (1 - 1 / clock.factor)
    if clock.factor == 1.0 or abs(taken) <= floor:
        known: Sure = "none seen" if len(clock.ratios) >= FEW_CLOCKS else "not known"
        yield Cause(CLOCKS, known, record=RECORD[CLOCKS] if known == "not known" else "")
        return
    slower = "slower" if taken > 0 else "faster"
    yield Cause(
        CLOCKS, "likely", taken, f"All kernels became {100 * abs(clock.factor - 1):.2g} % {slower} alike, as by "
        "another clock", clock.evidence, "clocks and power of both servers at 1 Hz",
    )  # fmt: skip


def _of_neighbours(
    before: DecodeStep, after: DecodeStep, found: Changed, clock: _Clock, floor: float
) -> Iterator[Cause]:
    """Other kernels: slower ones, new and gone ones, and communication, which waits for the slowest rank."""
    own = {*found.before, *found.after}
    deltas: dict[str, dict[str, float]] = {SLOWER: {}, BESIDE: {}, WAITS: {}}
    for name in {**before.kernels, **after.kernels}:
        if name in own:
            continue
        nothing = Kernel(name, "", 0.0, 0.0, 0.0)
        was, now = before.kernels.get(name, nothing), after.kernels.get(name, nothing)
        if (was.op_class or now.op_class) in COMMUNICATION:
            deltas[WAITS][name] = now.ms - was.ms
        elif name in clock.ratios:
            delta = now.ms - clock.factor * was.ms
            scatter = math.hypot(before.half.get(was.op_class, 0.0), after.half.get(now.op_class, 0.0))
            if abs(delta) > max(2 * BETWEEN_LAUNCHES * was.ms, scatter):
                deltas[SLOWER][name] = delta
        else:
            deltas[BESIDE][name] = now.ms - clock.factor * was.ms
    _pair_variants(before, after, deltas)
    classes = {kernel.op_class for kernel in before.kernels.values() if kernel.op_class in COMMUNICATION}
    of_waits = math.hypot(
        *(step.half[name] for step in (before, after) for name in classes if name in step.half)
    )
    waits = max(of_waits, 2 * BETWEEN_LAUNCHES * sum(before.of([name]) for name in deltas[WAITS]))
    for cause, rows in deltas.items():
        total = sum(rows.values())
        if abs(total) <= max(floor, waits if cause == WAITS else 0.0):
            yield Cause(cause, "none seen")
            continue
        largest = sorted(rows, key=lambda name: -abs(rows[name]))[:3]
        evidence = [
            f"{_call_text(name, before)} -> {_call_text(name, after)} a step: {name}" for name in largest
        ]
        yield _neighbour(cause, total, tuple(evidence), largest[0])


def _pair_variants(before: DecodeStep, after: DecodeStep, deltas: dict[str, dict[str, float]]) -> None:
    """A library may take another kernel of the same class and as many calls: that is no new work, so what it
    costs counts among slower neighbours, if it is more than launches differ by."""
    beside = deltas[BESIDE]
    gone = [before.kernels[name] for name in beside if name not in after.kernels]
    new = [after.kernels[name] for name in beside if name not in before.kernels]
    for old in gone:
        other = next((k for k in new if k.op_class == old.op_class and k.name in beside
                      and abs(k.calls - old.calls) <= SAME_CALLS * old.calls), None)  # fmt: skip
        if other:
            delta = beside.pop(old.name) + beside.pop(other.name)
            if abs(delta) > 2 * BETWEEN_LAUNCHES * old.ms:
                deltas[SLOWER][other.name] = delta


def _call_text(name: str, step: DecodeStep) -> str:
    kernel = step.kernels.get(name)
    return f"{kernel.calls:.3g} x {kernel.us_per_call:.3g} us" if kernel else "none"


def _neighbour(cause: str, ms: float, evidence: tuple[str, ...], name: str) -> Cause:
    if cause == SLOWER:
        how = "slower" if ms > 0 else "faster"
        return Cause(cause, "likely", ms, f"Kernels beside the changed one became {how}, most of all {short(name)}",
                     evidence, "`serving replay --swap`, which measures the step with both")  # fmt: skip
    if cause == BESIDE:
        what = "The change brought kernels with it" if ms > 0 else "The change took kernels away"
        return Cause(cause, "certain", ms, f"{what}, most of all {short(name)}", evidence)
    how = "longer" if ms > 0 else "shorter"
    return Cause(cause, "likely", ms, f"Communication takes {how}: this rank waits for the slowest one", evidence,
                 "traces of all ranks")  # fmt: skip


def _overlapped(before: DecodeStep, after: DecodeStep, ms: float) -> Cause:
    saved, busy = before.sum_ms - after.sum_ms, before.busy_ms - after.busy_ms
    exposed = [sum(k.exposed_ms for k in step.kernels.values() if k.op_class in COMMUNICATION)
               for step in (before, after)]  # fmt: skip
    under = exposed[1] - exposed[0] > abs(ms) / 2
    where = "under communication" if under else "beside other kernels"
    says = f"The kernel runs {where}, so its time is not the step's"
    if ms < 0:
        says = "More of the kernels' time runs beside other kernels than before"
    evidence = f"kernels saved {saved:.3g} ms in sum, but the busy time fell by {busy:.3g} ms"
    more = f"exposed communication: {exposed[0]:.3g} -> {exposed[1]:.3g} ms" if under else ""
    return Cause(OVERLAP, "likely", ms, says, tuple(filter(None, (evidence, more))), "traces of all ranks")


def _idle(before: DecodeStep, after: DecodeStep, ms: float) -> Cause:
    modes = before.by_operator, after.by_operator
    evidence = [f"nothing runs for {before.idle_ms:.3g} ms of a step before, {after.idle_ms:.3g} ms after"]
    says = "The device waits for the host" if ms > 0 else "The device waits less for the host"
    if min(modes) < 0.05 and max(modes) > 0.5:
        words = (
            "graphs" if modes[0] < 0.05 else "single launches",
            "graphs" if modes[1] < 0.05 else "single launches",
        )
        evidence.append(f"kernels come from {words[0]} before, from {words[1]} after")
        says = f"{says}: it launches from {words[1]} now, not from {words[0]}"
    return Cause(
        IDLE, "likely", ms, f"{says}", tuple(evidence), "a trace of the host's threads (CPU activities)"
    )


def _not_called(steps: Steps, ms: float) -> Cause:
    found, after = steps.changed, steps.after
    names = found.wanted or found.new
    kernel = short(names[0]) if names else "the new kernel"
    left = after.calls(found.old[:1])
    evidence = []
    if found.old and left:
        evidence.append(f"{after.file} still has {left:.3g} calls of {short(found.old[0])} a step")
    there = after.calls(found.new[:1])
    if there:
        evidence.insert(0, f"{after.file} has {there:.3g} calls of {kernel} a step")
        says = f"The new kernel is called for {100 * (found.called or 0):.0f} % of the calls only: {kernel}"
    else:
        evidence.insert(0, f"{after.file} has no call of {kernel} in {after.steps} decode steps")
        says = f"The new kernel was not called: {kernel} is in no step of {after.file}"
        if name := next((name for name in found.after if name not in found.old), ""):
            evidence.append(f"{short(name)} ran {after.calls([name]):.3g} times a step")
    because = _because(steps.sides, steps.log)
    if because and not there:
        return Cause(because.name, "certain", ms, because.says, (*because.evidence, *evidence))
    more = because.evidence if because else ()
    return Cause(CALLS, "certain", ms, says, (*evidence, *more, *_backends(steps.log)))


def _not_in_effect(steps: Steps, ms: float) -> Cause:
    """The same kernels ran as fast as before."""
    before, after, found = steps.before, steps.after, steps.changed
    assert before
    names = [name for name in found.before if name in after.kernels][:2]
    evidence = tuple(
        f"{_call_text(name, before)} -> {_call_text(name, after)} a step: {name}" for name in names
    )
    if because := _because(steps.sides, steps.log):
        return Cause(because.name, "certain", ms, because.says, (*because.evidence, *evidence))
    if missed := _missed(steps):
        return _table(steps, ms, missed, evidence)
    says = (
        f"The same kernels run at the same speed with and without the change: {short(names[0])}"
        if names
        else ""
    )
    return Cause(SAME, "likely", ms, says or "The op has no kernel in either trace", evidence, RECORD[SAME])


def _because(sides: Sides, log: Log) -> Cause | None:
    """Why the change cannot be in effect, where names, settings or a log say so."""
    if sides.unread and sides.all_unread:
        return Cause(UNREAD, "likely", says=capital(sides.unread[0]), evidence=sides.unread)
    if log.refused:
        lines = tuple(f"{count} lines of the log: {line}" for line, count in log.refused.most_common(2))
        return Cause(REFUSED, "likely", says=f"The server refused the change: {next(iter(log.refused))}",
                     evidence=lines)  # fmt: skip
    if sides.same:
        return Cause(SAME, "likely", says=capital(sides.same), evidence=(sides.same,))
    return None


def without_steps(sides: Sides, log: Log, ops: Sequence[str], missing: float | None) -> Cause | None:
    """What says without a trace that the change is not in effect."""
    because = _because(sides, log)
    if because:
        sure: Sure = "certain" if because.name == UNREAD or sides.same_surely else "likely"
        return Cause(because.name, sure, missing, because.says, because.evidence)
    for op in ops or log.missed:
        if missed := log.missed.get(op):
            lines = tuple(f"{count} lines of the log: {text}" for text, count in missed.most_common(3))
            return Cause(TABLE, "likely", missing, f"No entry of a tuned table was found for {op}", lines)
    return None


def _missed(steps: Steps) -> tuple[str, ...]:
    """Lines on shapes of the op that its table lacks."""
    return tuple(
        f"{count} lines of the log: {text}"
        for op in steps.ops for text, count in steps.log.missed.get(op, {}).items()
    )[:3]  # fmt: skip


def _table(steps: Steps, ms: float, missed: tuple[str, ...], more: tuple[str, ...] = ()) -> Cause:
    op = next(op for op in steps.ops if steps.log.missed.get(op))
    tokens = {word for text in steps.log.missed[op] for word in text.split() if word.startswith("m=")}
    served = steps.fit.served.split() if steps.fit else []
    sure: Sure = "certain" if tokens & {word.strip(",") for word in served} else "likely"
    says = f"The tuned table has no entry for the shapes of {op}: a default runs"
    return Cause(TABLE, sure, ms, says, (*missed, *more))


def _foreign(steps: Steps, ms: float) -> Cause:
    alone, found = steps.alone, steps.changed
    assert alone and steps.before
    ran = short(found.foreign)
    says = f"The server ran another kernel before than the run: {ran}, which was faster than {alone.before}"
    evidence = f"{steps.before.file} has {_call_text(found.foreign, steps.before)} of {ran} a step; in the run " \
               f"{alone.before} takes {alone.mean('before_us'):.3g} us"  # fmt: skip
    return Cause(BASE, "certain", ms, says, (evidence,))


def _shapes(steps: Steps, ms: float) -> Cause:
    assert steps.alone and steps.fit
    cases = "; ".join(_sizes(case.text) for case in steps.alone.cases[:3])
    says = f"The server calls the op at other shapes than the run: {steps.fit.served}"
    evidence = (f"served: {steps.fit.served} ({steps.fit.source})", f"timed: {cases} ({steps.alone.folder})")
    return Cause(SHAPES, "certain" if steps.fit.part < 0.5 else "likely", ms, says, evidence)


def _less(steps: Steps, ms: float) -> Cause:
    found, after, alone = steps.changed, steps.after, steps.alone
    kernel = found.new[0] if found.new else next(iter(found.after), "")
    evidence = [f"{_call_text(kernel, after)} a step in {after.file}: {kernel}"] if kernel else []
    if alone and kernel in alone.kernel_us:
        evidence.append(f"alone it takes {alone.kernel_us[kernel]:.3g} us ({alone.after}, {alone.folder})")
    if steps.before and found.before:
        was, now = steps.before.of(found.before), after.of(found.after)
        evidence.append(f"the op takes {was:.3g} ms of a step before, {now:.3g} ms after")
    how = "less" if ms > 0 else "more"
    known = "" if steps.fit else "; whether it is called at other shapes is not known"
    says = f"The new kernel runs and saves {how} in the step than it does alone{known}"
    return Cause(
        LESS, "likely", ms, says, tuple(evidence), "`serving replay --swap`; the run with --cache cold"
    )


def _backends(log: Log) -> tuple[str, ...]:
    return tuple(f"the log says: {line}" for line, _ in log.chosen.most_common(3))


def _sizes(case: str) -> str:
    """A case's sizes without its op."""
    return " ".join(word for word in case.split() if "=" in word)


def short(name: str) -> str:
    """A kernel's name with the middle of a long one left out."""
    name = name.removeprefix("void ")
    return name if len(name) <= 50 else f"{name[:30]}...{name[-15:]}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
