"""The account: the expected and the observed saving, the causes of the difference, and what is not known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from harness.errors import FAILED, OK, NothingRan
from harness.explain import causes
from harness.explain.causes import CALLS, NOISE, OF_OP, SAME, STALLS, WORK, Cause, Steps, figure
from harness.explain.served import Log
from harness.explain.sides import DIFFERS, Sides
from harness.files import JsonObject
from harness.report.text import counted, ranged
from harness.serving.ab.result import MOST_LOOKED_AT, SPREAD, Effect, pairs_for
from harness.serving.ledger import Prediction
from harness.statistics.intervals import CONFIDENCE

UNEXPLAINED = 0.5
"""From this part of the difference on, what no cause has makes the exit code 1."""
MOSTLY = 0.75
"""From this part of the expected saving on, a cause has all of it in words."""
TPOT, STEP = "TPOT", "a decode step"
VANISHED_NOTHING = "nothing vanished"
BETWEEN = (0.7, 1.3)
"""The usual ratios of a step to TPOT; beyond them a step gives several tokens, or the loads differ."""
NOT_ITS_OWN = (CALLS, causes.UNREAD, SAME, causes.NO_EFFECT, causes.REFUSED, WORK)
"""Causes with which a saving that was seen cannot be that of the change."""


@dataclass(frozen=True)
class Saving:
    """Milliseconds that were saved, with an interval; text: where they are from."""

    ms: float
    low: float
    high: float
    text: str

    @property
    def unsure(self) -> bool:
        """Whether the interval holds no saving and no loss."""
        return self.low <= 0 <= self.high

    @property
    def shown(self) -> str:
        return ranged(self.ms, self.low, self.high, ".3g", " ms")

    def meets(self, other: Saving) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Account:
    """says:   what happened, in a sentence
    of:     what was to become shorter: TPOT, or a decode step
    causes: causes with evidence, the largest first; then those not seen, and those not known
    """

    says: str
    of: str
    expected: Saving | None
    observed: Saving | None
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    code: int = OK

    @property
    def missing(self) -> float | None:
        return self.expected.ms - self.observed.ms if self.expected and self.observed else None

    @property
    def state(self) -> str:
        """`noise`, `nothing vanished`, or empty: something did, or it cannot be told."""
        expected, observed = self.expected, self.observed
        if expected is None or observed is None:
            return ""
        if observed.meets(expected) and observed.unsure:
            return NOISE
        return VANISHED_NOTHING if observed.meets(expected) or observed.ms >= expected.ms > 0 else ""

    @property
    def named(self) -> list[Cause]:
        return [cause for cause in self.causes if cause.named]

    def share(self, ms: float | None) -> float | None:
        """The part of the expected saving that it is; None where that is not sure, or nothing vanished."""
        expected, observed = self.expected, self.observed
        if ms is None or expected is None or observed is None or expected.unsure:
            return None
        return None if self.state == VANISHED_NOTHING else ms / expected.ms

    @property
    def rest(self) -> float | None:
        """The part of the difference, in ms, that no cause explains."""
        return None if self.missing is None else self.missing - sum(cause.ms or 0.0 for cause in self.named)


def account(
    ops: Sequence[str], sides: Sides, steps: Steps | None, log: Log, modelled: Sequence[Prediction] = ()
) -> Account:
    """modelled: what the model of serving predicts of the change. Raises NothingRan where there is nothing to
    compare."""
    of = TPOT if sides.effect or steps is None else STEP
    per_token = sides.accepted[0] if of == TPOT else 1.0
    observed = _of_effect(sides.effect) if sides.effect else _of_steps(steps)
    predicted = _predicted((*sides.predictions, *modelled), of)
    in_step = _in_step(steps, per_token)
    expected = predicted or in_step
    if not (expected or observed or causes.not_in_effect(sides, log) or (ops and log.missed)):
        raise NothingRan(
            "nothing to compare: neither what was expected nor what serving did is known; give --ab, "
            "--before and --after, or --trace BEFORE AFTER, and --change or --run"
        )
    notes = [*sides.notes, *_notes(sides, steps, log, ops)]
    if expected and expected.unsure:
        notes.append(f"no gain was expected with certainty: {expected.shown}")
    made = Account("", of, expected, observed, (), tuple(notes))
    of_steps = causes.of_step(steps) if steps else ()
    found = [cause if cause.ms is None else replace(cause, ms=cause.ms / per_token) for cause in of_steps]
    if accepted := _of_accept(sides, steps):
        found.append(accepted)
    found += _of_sides(made, sides, steps, log, ops, found)
    if predicted and in_step:
        found.append(_prediction(predicted, in_step))
    if steps and observed and _compared(sides, steps):
        found += _beyond_steps(sides, steps, observed, per_token, accepted)
    if made.state == NOISE and made.missing is not None and observed:
        for number, cause in enumerate(found):
            sure = "likely" if cause.named and not _seen_not_called(cause, steps) else cause.sure
            found[number] = replace(cause, sure=sure, ms=cause.ms if steps else None)
        rest = made.missing - sum(cause.ms or 0.0 for cause in found if cause.named)
        if abs(rest) > causes.LEAST * abs(made.missing):
            found.append(Cause(NOISE, "likely", rest, _noise(made, sides.effect), (observed.text,)))
    named = [cause for cause in found if cause.named]
    unseen = {cause.name: cause for cause in found if cause.name not in {cause.name for cause in named}}
    found = [*named, *unseen.values()]
    found += _not_known(found, sides, steps)
    found = [replace(cause, record=_to_record(cause, sides, steps)) for cause in found]
    made = replace(made, causes=tuple(sorted(found, key=lambda cause: _rank(cause, made.missing))))
    return replace(made, says=_first(made, sides.effect, steps), code=_code(made, steps))


def _seen_not_called(cause: Cause, steps: Steps | None) -> bool:
    """What a trace shows, however much the clients scatter."""
    return steps is not None and cause.name == CALLS and cause.sure == "certain"


# What was expected and observed


def _of_effect(effect: Effect) -> Saving:
    """The saving of TPOT; of one pair it has the interval that launches of other servers give."""
    half = 2 * math.sqrt(2) * SPREAD["tpot"][1]
    low, high = effect.interval or (effect.percent - half, effect.percent + half)
    of_others = "" if effect.interval else ", its interval that of other servers"
    times = f"{figure(effect.base, 4)} -> {figure(effect.arm, 4)} ms"
    # The most percent of TPOT more are the least ms saved.
    ms, least, most = (-effect.base * percent / 100 for percent in (effect.percent, high, low))
    return Saving(ms, least, most, f"TPOT {times}, {counted(effect.pairs, 'pair')}{of_others}")


def _of_steps(steps: Steps | None) -> Saving | None:
    if steps is None or steps.before is None or steps.saved_ms is None:
        return None
    ms, half = steps.saved_ms, steps.half_ms
    sides = (
        f"{figure(step.ms, 4)} ms in {counted(step.steps, 'step')} of {step.file}"
        for step in (steps.before, steps.after)
    )
    return Saving(ms, ms - half, ms + half, " -> ".join(sides))


def _predicted(predictions: Sequence[Prediction], of: str) -> Saving | None:
    """What was predicted of TPOT or of a step: the first prediction of each change; a prediction of the whole
    only where there is no other."""
    quantity = "tpot" if of == TPOT else "decode_step"
    by_change: dict[str, Prediction] = {}
    for prediction in predictions:
        if prediction.quantity == quantity and prediction.change is not None:
            by_change.setdefault(prediction.of, prediction)
    if len(by_change) > 1:
        by_change.pop("", None)
    if not by_change:
        return None
    ms = low = high = 0.0
    for prediction in by_change.values():
        change = prediction.change or 0.0
        ms -= change
        low -= change if prediction.high is None else prediction.high
        high -= change if prediction.low is None else prediction.low
    methods = [prediction.method for prediction in by_change.values()]
    return Saving(ms, low, high, f"predicted of {of} ({methods[0]})")


def _in_step(steps: Steps | None, per_token: float) -> Saving | None:
    """The calls in the trace times what the op saves alone, with the usual error of that in a server."""
    if steps is None or steps.expected_ms is None:
        return None
    ms, calls = steps.expected_ms / per_token, steps.changed.calls
    half = causes.IN_STEP * abs(ms)
    if alone := steps.alone:
        half = math.hypot(half, calls * alone.mean("half_us") / 1e3 / per_token)
        times = f"{figure(calls)} calls x {figure(alone.saving_us())} us"
        text = f"{times}, {alone.before} -> {alone.after} in {alone.folder}"
    else:
        changes = []
        for change in steps.changes:
            gain = f"{change.factor:g}x" if change.factor else f"saved:{change.saved_us:g}us"
            changes.append(f"{change.op}={gain}")
        took = steps.before.of(steps.changed.before) if steps.before else 0.0
        text = f"{', '.join(changes)}, of {figure(took)} ms in the step before"
    return Saving(ms, ms - half, ms + half, text)


# Causes beside those of the steps


def _of_sides(
    made: Account, sides: Sides, steps: Steps | None, log: Log, ops: Sequence[str], seen: Sequence[Cause]
) -> Iterator[Cause]:
    """What names, settings, logs and the work show. Where no trace says how large a cause is, it is all that
    is missing. The size of other work is not known, except where the traces themselves are compared."""
    measured = steps is not None and steps.expected_ms is not None and steps.saved_ms is not None
    size = None
    if made.missing is not None and (not measured or (steps and steps.unlike)):
        size = made.missing - sum(cause.ms or 0.0 for cause in seen if cause.named)
    missed = causes.missed_table(log, ops)
    if missed and not missed.named:
        yield missed
    of_op = any(cause.named and cause.name in OF_OP for cause in seen)
    if not of_op and (steps is None or steps.expected_ms is None):
        of_traces = causes.same_kernels(steps) if steps else None
        cause = causes.not_in_effect(sides, log) or of_traces or missed
        if cause and cause.named:
            yield replace(cause, ms=size)
    if steps and steps.unlike and not sides.effect:
        line = f"the profiled steps: {steps.unlike}"
        yield Cause(WORK, "likely", size, f"The two sides did other work: {line}", (line,))
    elif sides.large_work and not (steps and _compared(sides, steps)):  # else see _beyond_steps
        yield _other_work(sides, None)
    elif sides.work is not None and not sides.work and not any(cause.name == WORK for cause in seen):
        yield Cause(WORK, "none seen")


def _other_work(sides: Sides, ms: float | None, *more: str) -> Cause:
    says = f"The two sides did other work: {sides.large_work[0]}"
    return Cause(WORK, "likely", ms, says, (*more, *sides.large_work))


def _compared(sides: Sides, steps: Steps) -> bool:
    """Whether what the steps saved can be compared with TPOT."""
    known = bool(sides.effect) and steps.saved_ms is not None
    return known and not steps.unlike and not _tokens(sides, steps)


def _tokens(sides: Sides, steps: Steps | None) -> float:
    """A step over TPOT, where a step cannot be what a token takes; 0: it can, or one is not known."""
    if not sides.effect or steps is None or steps.before is None:
        return 0.0
    ratio = steps.before.ms / sides.accepted[0] / sides.effect.base
    return 0.0 if BETWEEN[0] < ratio < BETWEEN[1] else ratio


def _prediction(predicted: Saving, in_step: Saving) -> Cause:
    """What the prediction has more than the calls of the trace allow."""
    more = predicted.ms - in_step.ms
    if predicted.meets(in_step) and abs(more) < UNEXPLAINED * abs(predicted.ms):
        return Cause(causes.PREDICTED, "none seen")
    larger = "larger" if more > 0 else "smaller"
    evidence = (f"{figure(saving.ms)} ms: {saving.text}" for saving in (predicted, in_step))
    says = f"The prediction took the op for a {larger} part of the step than it is"
    return Cause(causes.PREDICTED, "certain", more, says, tuple(evidence))


def _of_accept(sides: Sides, steps: Steps | None) -> Cause | None:
    """What a different accept length does to TPOT."""
    before, after = sides.accepted
    if sides.effect is None or abs(after / before - 1) <= DIFFERS:
        return None
    step_ms = steps.after.ms if steps else sides.effect.arm * after
    says = f"A step gives {figure(after)} tokens of a request instead of {figure(before)}"
    evidence = f"accept length: {figure(before)} -> {figure(after)}"
    return Cause(WORK, "certain", step_ms * (1 / after - 1 / before), says, (evidence,))


def _beyond_steps(
    sides: Sides, steps: Steps, observed: Saving, per_token: float, accepted: Cause | None
) -> Iterator[Cause]:
    """What the steps saved and TPOT does not show, but for the accept length: other work, or stalls."""
    saved = (steps.saved_ms or 0.0) / per_token
    rest = saved - (accepted.ms or 0.0 if accepted else 0.0) - observed.ms
    half = math.hypot(steps.half_ms / per_token, (observed.high - observed.low) / 2)
    if abs(rest) <= max(half, causes.IN_STEP * abs(saved)):
        yield Cause(STALLS, "none seen")
        yield Cause(WORK, "none seen")
        return
    evidence = f"a step is {_shorter(saved)} in the traces, {observed.text}"
    if sides.large_work:
        yield _other_work(sides, rest, evidence)
    else:
        both = f"The step is {_shorter(saved)}, TPOT {_shorter(observed.ms)}"
        yield Cause(STALLS, "likely", rest, f"{both}: something between steps changed", (evidence,))


def _not_known(found: Sequence[Cause], sides: Sides, steps: Steps | None) -> Iterator[Cause]:
    """The causes on which these inputs say nothing."""
    there = {cause.name for cause in found}
    of_op = any(cause.name in OF_OP and cause.name != causes.TABLE for cause in found)
    both = steps is not None and steps.before is not None
    known = {
        CALLS: of_op or (steps is not None and steps.changed.called is not None),
        causes.UNREAD: sides.looked,
        SAME: sides.looked,
        causes.NO_EFFECT: of_op or both,
        causes.SHAPES: steps is not None and steps.fit is not None,
        causes.LESS: both and of_op,
        causes.IDLE: both and steps is not None and steps.after.on_cpu,
        WORK: sides.work is not None,
        STALLS: WORK in there and steps is not None and _compared(sides, steps),
        NOISE: sides.effect is not None or steps is not None,
    }
    for name in causes.RECORD:
        if name not in there and not known.get(name):
            yield Cause(name, "not known")


def _rank(cause: Cause, missing: float | None) -> tuple[int, float, int]:
    """Causes with evidence come first, of these the largest one of the sign of what is missing; then come
    causes that were not seen, then those that are not known."""
    order = [*causes.RECORD, *OF_OP, causes.PREDICTED].index(cause.name)
    if cause.named:
        return 0, -_sign(missing) * (cause.ms or 0.0), order
    return 1 if cause.sure == "none seen" else 2, 0.0, order


def _sign(missing: float | None) -> int:
    return -1 if missing is not None and missing < 0 else 1


def _to_record(cause: Cause, sides: Sides, steps: Steps | None) -> str:
    """What would tell whether there is this cause, or make it sure, beyond what was given."""
    name = cause.name
    both = steps is not None and steps.before is not None
    if cause.sure == "likely":
        return "" if name == SAME and sides.looked else causes.SURER.get(name, "")
    if cause.sure != "not known":
        return ""
    if steps and name == causes.SHAPES:
        return causes.OF_SHAPES if steps.alone else "--run"
    if name == STALLS and both and sides.effect:
        return "the accept length, or traces of steps under the load of the clients"
    if not (steps and both and causes.RECORD[name].startswith(causes.TRACES)):
        return causes.RECORD[name]
    if steps.unlike:
        return "traces of steps with as many requests and tokens"
    if name in causes.OF_STEP:
        return "traces of more kernels"
    return "a run whose two rows have kernels of different names" if steps.alone else "--run"


def _notes(sides: Sides, steps: Steps | None, log: Log, ops: Sequence[str]) -> Iterator[str]:
    if sides.effect and steps and steps.before:
        yield from sides.work or ()
        token = steps.before.ms / sides.accepted[0]
        saved = _of_steps(steps)
        yield f"the step: {saved.text}" if saved else ""
        if steps.unlike:
            yield f"the traces cannot be compared: their steps are of {steps.unlike}"
        if ratio := _tokens(sides, steps):
            why = "several tokens a step?" if ratio > 1 else "stalls lie between, or the load was another"
            times = f"{figure(token)} ms a token, TPOT is {figure(sides.effect.base)} ms"
            yield f"a step of {steps.before.file} takes {times}: {why}"
    elif sides.work and not sides.large_work:
        yield from sides.work
    both = (steps.before, steps.after) if steps else ()
    for file in dict.fromkeys(step.file for step in both if step and step.steps == 1):
        yield f"{file} has one decode step: its scatter is not known, 3 % are taken"
    yield from log.unsure
    if not ops:
        for op, lines in log.missed.items():
            yield f"a log says that a table has no entry for {op}: {next(iter(lines))}"


# In words


def _noise(made: Account, effect: Effect | None) -> str:
    assert made.expected
    if made.expected.unsure:
        return f"No gain was expected with certainty, {made.expected.shown}, and {made.of} may be unchanged"
    wanted = f"{figure(made.expected.ms)} ms that were expected"
    text = f"The interval of {made.of} holds both no change and the {wanted}"
    if effect is None:
        return f"{text}; longer traces would tell"
    percent = 100 * abs(made.expected.ms) / effect.base
    spread = effect.launch_spread or SPREAD["tpot"][1]
    needed = pairs_for(percent, spread, CONFIDENCE, MOST_LOOKED_AT) if percent else None
    if needed is None:
        return f"{text}; no number of pairs up to {MOST_LOOKED_AT[-1]} would tell"
    return f"{text}; {max(1, needed - effect.pairs)} more pairs would tell"


def _first(made: Account, effect: Effect | None, steps: Steps | None) -> str:
    expected, observed, missing = made.expected, made.observed, made.missing
    others = (cause for cause in made.named if cause.name != NOISE)
    named = [cause for cause in others if cause.ms is None or _sign(missing) * cause.ms > 0]
    if made.state == VANISHED_NOTHING and expected and observed:
        return _as_expected(made, expected, observed)
    if made.state == NOISE:
        named = [cause for cause in named if _seen_not_called(cause, steps)] or named
        if not (named and _seen_not_called(named[0], steps)):
            of_op = (cause for cause in named if cause.name in NOT_ITS_OWN and cause.name != WORK)
            besides = next((f"; besides, {_lower(cause.says)}" for cause in of_op), "")
            return f"No finding: {_lower(_noise(made, effect))}{besides}."
    likely = "Likely: " if named and named[0].sure == "likely" else ""
    if missing is None or expected is None or observed is None:
        if named:
            return f"{likely}{named[0].says}."
        why = "what serving did is not known: give --ab or both traces"
        if expected is None:
            give = "give --trace BEFORE AFTER with --change or --run, or an A/B with --predict"
            why = f"what was expected is not known in ms: {give}"
        return f"It cannot be told what vanished, as {why}."
    of_sign = _of_sign(made.of, expected, observed)
    if not named:
        lost = f"{figure(missing)} of the {figure(expected.ms)} ms that were expected are missing"
        what = of_sign or f"It is not known where the gain went: {lost}"
        return f"{what}, and nothing in these inputs says why."
    if of_sign:
        return f"{of_sign}; {likely.lower()}{_lower(named[0].says)}."
    text, ms = f"{likely}{named[0].says}", named[0].ms
    if ms is None:
        return f"{text}."
    is_all = ms > (1 - causes.LEAST) * missing
    if is_all and missing > (1 - causes.LEAST) * expected.ms:
        return f"{text}; all of the {figure(expected.ms)} ms that were expected are missing."
    part = "all" if is_all else f"{figure(ms)} ms"
    return f"{text}; that is {part} of the {figure(missing)} ms that are missing of {figure(expected.ms)} ms."


def _of_sign(of: str, expected: Saving, observed: Saving) -> str:
    """What happened where no gain vanished: a gain that was larger than expected, or a loss; else empty."""
    longer = f"{of} became {figure(-observed.ms)} ms longer"
    what = f"a {'saving' if expected.ms > 0 else 'loss'} of {figure(abs(expected.ms))} ms was expected"
    if observed.ms > expected.ms:
        saved = f"{figure(observed.ms)} ms of {of} are saved" if observed.ms > 0 else longer
        return f"Serving did better than expected: {saved}, {what}"
    return "" if expected.ms > 0 else f"The loss is larger than expected: {longer}, {what}"


def _as_expected(made: Account, expected: Saving, observed: Saving) -> str:
    saved = f"{figure(observed.ms)} of {figure(expected.ms)} ms of {made.of} are saved"
    if expected.unsure:
        wanted = f"No gain was expected with certainty, {expected.shown}"
        return f"{wanted}; of {made.of} {observed.shown} are saved."
    if expected.ms < 0:
        longer = f"{made.of} became {figure(-observed.ms)} ms longer"
        return f"As predicted, it is a loss: {longer}, {figure(-expected.ms)} ms were expected."
    if other := _not_its_own(made):
        partly = other.ms is not None and abs(other.ms) < MOSTLY * expected.ms
        of_all = "all " if partly else ""
        return f"What was saved is not {of_all}the change's own, {saved}: {_lower(other.says)}."
    return f"Nothing vanished: {saved}."


def _not_its_own(made: Account) -> Cause | None:
    """The first cause with which what was saved cannot be what the change saved."""
    of_other = (cause for cause in made.named if cause.name in NOT_ITS_OWN)
    return next((cause for cause in of_other if cause.ms is None or cause.ms > 0), None)


def _shorter(saved: float) -> str:
    return f"{figure(abs(saved))} ms {'shorter' if saved >= 0 else 'longer'}"


def _lower(says: str) -> str:
    return says[0].lower() + says[1:]


def _code(made: Account, steps: Steps | None) -> int:
    if made.state == VANISHED_NOTHING:
        return FAILED if _not_its_own(made) else OK
    if made.state == NOISE and not any(_seen_not_called(cause, steps) for cause in made.named):
        return FAILED
    if made.missing is None:
        return OK if any(cause.sure == "certain" for cause in made.named) else FAILED
    return OK if made.named and abs(made.rest or 0.0) <= UNEXPLAINED * abs(made.missing) else FAILED


def facts(made: Account) -> JsonObject:
    rows = [asdict(cause) | {"share": made.share(cause.ms)} for cause in made.causes]
    return {**asdict(made), "causes": rows, "missing": made.missing, "rest": made.rest}
