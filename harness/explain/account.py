"""The account: the expected and the observed saving, the causes of the difference, and what is not known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from harness.errors import FAILED, OK, NothingRan
from harness.explain import causes
from harness.explain.causes import Cause, Steps, figure
from harness.explain.served import Log
from harness.explain.sides import DIFFERS, Sides
from harness.files import JsonObject
from harness.report.text import counted, ranged
from harness.serving.ab.effect import MOST_PAIRS, Effect, pairs_for, usual_spread
from harness.serving.ledger import Prediction
from harness.statistics.intervals import CONFIDENCE

UNEXPLAINED = 0.5  # the exit code is 1 where no cause explains more than this part of the difference
MOSTLY = 0.75  # a cause of at least this part of the expected saving is said to have all of it
TPOT, STEP = "TPOT", "a decode step"
NOTHING_VANISHED = "nothing vanished"
USUAL_RATIO = (0.7, 1.3)
"""The usual ratios of a step to TPOT; beyond them a step gives several tokens, or the loads differ."""
WITHOUT_EFFECT = (*causes.WITHOUT_TIMES, causes.NO_EFFECT)
NOT_ITS_OWN = (*WITHOUT_EFFECT, causes.OTHER_WORK)  # with these a saving is not that of the change
QUIET_SPREAD = usual_spread("tpot", 1)  # of TPOT between launches at low concurrencies, in per cent


@dataclass(frozen=True)
class Saving:
    """Milliseconds that were saved, with an interval; text: where they are from."""

    ms: float
    low: float
    high: float
    text: str

    @property
    def unsure(self) -> bool:
        """Whether the interval holds 0, so that nothing may be saved."""
        return self.low <= 0 <= self.high

    @property
    def shown(self) -> str:
        return ranged(self.ms, self.low, self.high, ".3g", " ms")

    def meets(self, other: Saving) -> bool:
        """Whether the intervals overlap."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Account:
    """What became of an expected gain."""

    says: str  # what happened, in a sentence
    of: str  # what was to become shorter: TPOT, or a decode step
    expected: Saving | None
    observed: Saving | None
    causes: tuple[Cause, ...]  # those with evidence, the largest first; those not seen; those not known
    notes: tuple[str, ...]
    code: int = OK  # the exit code

    @property
    def missing(self) -> float | None:
        """Milliseconds that were expected and not observed."""
        return self.expected.ms - self.observed.ms if self.expected and self.observed else None

    @property
    def state(self) -> str:
        """causes.NOISE or NOTHING_VANISHED; empty where a part of the gain vanished, or it cannot be told."""
        expected, observed = self.expected, self.observed
        if expected is None or observed is None:
            return ""
        if observed.meets(expected) and observed.unsure:
            return causes.NOISE
        return NOTHING_VANISHED if observed.meets(expected) or observed.ms >= expected.ms > 0 else ""

    @property
    def seen(self) -> list[Cause]:
        return [cause for cause in self.causes if cause.is_seen]

    def share(self, ms: float | None) -> float | None:
        """Milliseconds as a part of the expected saving; None where that is not sure, or nothing vanished."""
        expected, observed = self.expected, self.observed
        if ms is None or expected is None or observed is None or expected.unsure:
            return None
        return None if self.state == NOTHING_VANISHED else ms / expected.ms

    @property
    def rest(self) -> float | None:
        """The part of `missing`, in ms, that no cause explains."""
        return None if self.missing is None else self.missing - _sum_ms(self.causes)


def account(
    ops: Sequence[str], sides: Sides, steps: Steps | None, log: Log, modelled: Sequence[Prediction] = ()
) -> Account:
    """The account of a change of these ops. Raises NothingRan where there is nothing to compare."""
    of = TPOT if sides.effect or steps is None else STEP
    # Where TPOT is explained, times of steps are divided by the tokens that a step gives a request.
    tokens_per_step = sides.accepted_before if of == TPOT else 1.0
    observed = _of_effect(sides.effect) if sides.effect else _of_steps(steps)
    predicted = _predicted((*sides.predictions, *modelled), of)
    in_step = _in_step(steps, tokens_per_step)
    expected = predicted or in_step
    if not (expected or observed or causes.not_in_effect(sides, log) or (ops and log.missed)):
        raise NothingRan(
            "nothing to compare: neither what was expected nor what serving did is known; give --ab, "
            "--before and --after, or --trace BEFORE AFTER, and --change or --run"
        )
    notes = [*sides.notes, *_notes(sides, steps, log, ops)]
    if expected and expected.unsure:
        notes.append(f"no gain was expected with certainty: {expected.shown}")
    sums = Account("", of, expected, observed, (), tuple(notes))
    found = _found(sums, sides, steps, log, ops, tokens_per_step)
    if predicted and in_step:
        found.append(_prediction(predicted, in_step))
    if sums.state == causes.NOISE and sums.missing is not None and observed:
        found = [_within_noise(cause, steps) for cause in found]
        rest = sums.missing - _sum_ms(found)
        if abs(rest) > causes.LEAST * abs(sums.missing):
            found.append(Cause(causes.NOISE, "likely", rest, _noise(sums, sides.effect), (observed.text,)))
    seen = [cause for cause in found if cause.is_seen]
    seen_names = {cause.name for cause in seen}
    unseen = {cause.name: cause for cause in found if cause.name not in seen_names}  # each once
    told = [*seen, *unseen.values()]
    told += _not_known(told, sides, steps)
    recorded = [replace(cause, record=_to_record(cause, sides, steps)) for cause in told]
    ranked = sorted(recorded, key=lambda cause: _rank(cause, sums.missing))
    result = replace(sums, causes=tuple(ranked))
    return replace(result, says=_sentence(result, sides.effect, steps), code=_code(result, steps))


def _found(
    result: Account, sides: Sides, steps: Steps | None, log: Log, ops: Sequence[str], tokens_per_step: float
) -> list[Cause]:
    """The causes that inputs show or exclude, beside prediction and noise. result: it has no causes yet"""
    shown = causes.step_causes(steps) if steps else ()
    found = [cause if cause.ms is None else replace(cause, ms=cause.ms / tokens_per_step) for cause in shown]
    if accept_length := _of_accept_length(sides, steps):
        found.append(accept_length)
    found += _of_sides(result, sides, steps, log, ops, found)
    if steps and result.observed and _is_comparable(sides, steps):
        found += _beyond_steps(sides, steps, result.observed, tokens_per_step, accept_length)
    return found


def _sum_ms(found: Sequence[Cause]) -> float:
    """What the causes with evidence took of the gain, as far as their sizes are known."""
    return sum(cause.ms or 0.0 for cause in found if cause.is_seen)


def _within_noise(cause: Cause, steps: Steps | None) -> Cause:
    """A cause where the observation is noise: at most likely, and of a size only where traces show one."""
    is_weaker = cause.is_seen and not _shows_missing_calls(cause, steps)
    return replace(cause, sure="likely" if is_weaker else cause.sure, ms=cause.ms if steps else None)


def _shows_missing_calls(cause: Cause, steps: Steps | None) -> bool:
    """Whether a trace shows that calls are missing, which holds however much the clients scatter."""
    return steps is not None and cause.name == causes.NOT_CALLED and cause.sure == "certain"


def _of_effect(effect: Effect) -> Saving:
    """The saving of TPOT. One pair has no interval: it gets the one that launches of other servers give."""
    half = 2 * math.sqrt(2) * QUIET_SPREAD  # two standard deviations of a difference of launches, in %
    low, high = effect.interval or (effect.percent - half, effect.percent + half)
    of_others = "" if effect.interval else ", its interval that of other servers"
    times = f"{figure(effect.base, 4)} -> {figure(effect.arm, 4)} ms"
    text = f"TPOT {times}, {counted(effect.pairs, 'pair')}{of_others}"
    # The percentages say how much longer TPOT became, so the highest one is the least saving.
    percent_ms = -effect.base / 100
    return Saving(effect.percent * percent_ms, high * percent_ms, low * percent_ms, text)


def _of_steps(steps: Steps | None) -> Saving | None:
    """The saving of a step; None without both steps."""
    if steps is None or steps.before is None or steps.saved_ms is None:
        return None
    ms, half = steps.saved_ms, steps.half_ms
    sides = (
        f"{figure(step.ms, 4)} ms in {counted(step.steps, 'step')} of {step.file}"
        for step in (steps.before, steps.after)
    )
    return Saving(ms, ms - half, ms + half, " -> ".join(sides))


def _predicted(predictions: Sequence[Prediction], of: str) -> Saving | None:
    """What was predicted of TPOT or of a step: the sum of the first prediction of each change."""
    quantity = "tpot" if of == TPOT else "decode_step"
    by_change: dict[str, Prediction] = {}  # by the name of the change; empty: all changes together
    for prediction in predictions:
        if prediction.quantity == quantity and prediction.change is not None:
            by_change.setdefault(prediction.of, prediction)
    if len(by_change) > 1:  # that of all changes would count them twice
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


def _in_step(steps: Steps | None, tokens_per_step: float) -> Saving | None:
    """The saving that the calls in the trace allow, with the usual error of a saving alone in a server."""
    if steps is None or steps.expected_ms is None:
        return None
    ms, calls = steps.expected_ms / tokens_per_step, steps.changed.calls
    half = causes.SERVER_ERROR * abs(ms)
    if alone := steps.alone:
        half = math.hypot(half, calls * alone.mean(lambda case: case.half_us) / 1e3 / tokens_per_step)
        times = f"{figure(calls)} calls x {figure(alone.saving_us())} us"
        text = f"{times}, {alone.before} -> {alone.after} in {alone.folder}"
    else:
        changes = []
        for change in steps.changes:
            gain = f"{change.factor:g}x" if change.factor else f"saved:{change.saved_us:g}us"
            changes.append(f"{change.op}={gain}")
        before_ms = steps.before.ms_of(steps.changed.before) if steps.before else 0.0
        text = f"{', '.join(changes)}, of {figure(before_ms)} ms in the step before"
    return Saving(ms, ms - half, ms + half, text)


def _of_sides(
    result: Account, sides: Sides, steps: Steps | None, log: Log, ops: Sequence[str], found: Sequence[Cause]
) -> Iterator[Cause]:
    """What names, settings, logs and the work show, beside the causes that were found. They do not tell the
    size of a cause. So it gets the rest that no other cause explains."""
    rest = None if result.missing is None else result.missing - _sum_ms(found)
    missed = causes.missed_table(log, ops)
    if missed and not missed.is_seen:
        yield missed
    of_op = any(cause.is_seen and cause.name in causes.OF_OP for cause in found)
    if not of_op and (steps is None or steps.expected_ms is None):
        of_traces = causes.same_kernels(steps) if steps else None
        cause = causes.not_in_effect(sides, log) or of_traces or missed
        if cause and cause.is_seen:
            yield replace(cause, ms=rest)
    if steps and steps.unlike and not sides.effect:
        line = f"the profiled steps: {steps.unlike}"
        yield Cause(causes.OTHER_WORK, "likely", rest, f"The two sides did other work: {line}", (line,))
    elif sides.large_work and not (steps and _is_comparable(sides, steps)):  # else see _beyond_steps
        yield _other_work(sides, None)
    elif sides.work == {} and all(cause.name != causes.OTHER_WORK for cause in found):
        yield Cause(causes.OTHER_WORK, "none seen")


def _other_work(sides: Sides, ms: float | None, *evidence: str) -> Cause:
    says = f"The two sides did other work: {sides.large_work[0]}"
    return Cause(causes.OTHER_WORK, "likely", ms, says, (*evidence, *sides.large_work))


def _is_comparable(sides: Sides, steps: Steps) -> bool:
    """Whether what the steps saved can be compared with TPOT."""
    is_known = sides.effect is not None and steps.saved_ms is not None
    return is_known and not steps.unlike and not _unusual_ratio(sides, steps)


def _unusual_ratio(sides: Sides, steps: Steps | None) -> float:
    """The ratio of a step to TPOT if it is beyond USUAL_RATIO; 0 if it is usual, or not known."""
    if not sides.effect or steps is None or steps.before is None:
        return 0.0
    ratio = steps.before.ms / sides.accepted_before / sides.effect.base
    return 0.0 if USUAL_RATIO[0] < ratio < USUAL_RATIO[1] else ratio


def _prediction(predicted: Saving, in_step: Saving) -> Cause:
    """What the prediction has more than the calls of the trace allow."""
    excess_ms = predicted.ms - in_step.ms
    if predicted.meets(in_step) and abs(excess_ms) < UNEXPLAINED * abs(predicted.ms):
        return Cause(causes.PREDICTION, "none seen")
    larger = "larger" if excess_ms > 0 else "smaller"
    evidence = (f"{figure(saving.ms)} ms: {saving.text}" for saving in (predicted, in_step))
    says = f"The prediction took the op for a {larger} part of the step than it is"
    return Cause(causes.PREDICTION, "certain", excess_ms, says, tuple(evidence))


def _of_accept_length(sides: Sides, steps: Steps | None) -> Cause | None:
    """What a different accept length does to TPOT; None where it differs too little."""
    before, after = sides.accepted_before, sides.accepted_after
    if sides.effect is None or abs(after / before - 1) <= DIFFERS:
        return None
    step_ms = steps.after.ms if steps else sides.effect.arm * after
    says = f"A step gives {figure(after)} tokens of a request instead of {figure(before)}"
    evidence = f"accept length: {figure(before)} -> {figure(after)}"
    return Cause(causes.OTHER_WORK, "certain", step_ms * (1 / after - 1 / before), says, (evidence,))


def _beyond_steps(
    sides: Sides, steps: Steps, observed: Saving, tokens_per_step: float, accept_length: Cause | None
) -> Iterator[Cause]:
    """What the steps saved and TPOT does not show, apart from the accept length: other work, or stalls."""
    saved_ms = (steps.saved_ms or 0.0) / tokens_per_step
    lost_ms = saved_ms - observed.ms
    if accept_length:
        lost_ms -= accept_length.ms or 0.0
    half_ms = math.hypot(steps.half_ms / tokens_per_step, (observed.high - observed.low) / 2)
    if abs(lost_ms) <= max(half_ms, causes.SERVER_ERROR * abs(saved_ms)):
        yield Cause(causes.STALLS, "none seen")
        yield Cause(causes.OTHER_WORK, "none seen")
        return
    evidence = f"a step is {_shorter(saved_ms)} in the traces, {observed.text}"
    if sides.large_work:
        yield _other_work(sides, lost_ms, evidence)
    else:
        both = f"The step is {_shorter(saved_ms)}, TPOT {_shorter(observed.ms)}"
        says = f"{both}: something between steps changed"
        yield Cause(causes.STALLS, "likely", lost_ms, says, (evidence,))


def _not_known(found: Sequence[Cause], sides: Sides, steps: Steps | None) -> Iterator[Cause]:
    """The causes on which these inputs say nothing."""
    names = {cause.name for cause in found}
    of_op = any(cause.name in causes.OF_OP and cause.name != causes.TABLE_MISSED for cause in found)
    has_both = steps is not None and steps.before is not None
    is_known = {
        causes.NOT_CALLED: of_op or (steps is not None and steps.changed.new_part is not None),
        causes.NOT_READ: sides.settings_known,
        causes.SAME_SERVER: sides.settings_known,
        causes.NO_EFFECT: of_op or has_both,
        causes.OTHER_SHAPES: steps is not None and steps.fit is not None,
        causes.LESS_IN_STEP: has_both and of_op,
        causes.IDLE: has_both and steps is not None and steps.after.on_cpu,
        causes.OTHER_WORK: sides.work is not None,
        causes.STALLS: causes.OTHER_WORK in names and steps is not None and _is_comparable(sides, steps),
        causes.NOISE: sides.effect is not None or steps is not None,
    }
    for name in causes.RECORD:
        if name not in names and not is_known.get(name):
            yield Cause(name, "not known")


def _rank(cause: Cause, missing: float | None) -> tuple[int, float, int]:
    """A key by which causes with evidence come first, among them the largest one of the sign of what is
    missing; then come causes that were not seen, then those that are not known."""
    order = [*causes.RECORD, *causes.OF_OP, causes.PREDICTION].index(cause.name)
    if cause.is_seen:
        return 0, -_sign(missing) * (cause.ms or 0.0), order
    return 1 if cause.sure == "none seen" else 2, 0.0, order


def _sign(missing: float | None) -> int:
    return -1 if missing is not None and missing < 0 else 1


def _to_record(cause: Cause, sides: Sides, steps: Steps | None) -> str:
    """What would tell whether there is this cause, or make it sure, beyond the inputs; empty: nothing."""
    name = cause.name
    if cause.sure == "likely":
        return "" if name == causes.SAME_SERVER and sides.settings_known else causes.SURER.get(name, "")
    if cause.sure != "not known":
        return ""
    if steps and name == causes.OTHER_SHAPES:
        return causes.OF_SHAPES if steps.alone else "--run"
    if steps is None or steps.before is None:
        return causes.RECORD[name]
    if name == causes.STALLS and sides.effect:
        return "the accept length, or traces of steps under the load of the clients"
    if not causes.RECORD[name].startswith(causes.TRACES):
        return causes.RECORD[name]
    # Both traces are there, and do not tell.
    if steps.unlike:
        return "traces of steps with as many requests and tokens"
    if name in causes.OF_STEP:
        return "traces of more kernels"
    return "a run whose two rows have kernels of different names" if steps.alone else "--run"


def _notes(sides: Sides, steps: Steps | None, log: Log, ops: Sequence[str]) -> Iterator[str]:
    """What to know beside the causes. Without both steps, work that differs much is a cause and no note."""
    if sides.effect and steps and steps.before:
        yield from sides.work or ()
        if saved := _of_steps(steps):
            yield f"the step: {saved.text}"
        if steps.unlike:
            yield f"the traces cannot be compared: their steps are of {steps.unlike}"
        if ratio := _unusual_ratio(sides, steps):
            why = "several tokens a step?" if ratio > 1 else "stalls lie between, or the load was another"
            token_ms = figure(steps.before.ms / sides.accepted_before)
            times = f"{token_ms} ms a token, TPOT is {figure(sides.effect.base)} ms"
            yield f"a step of {steps.before.file} takes {times}: {why}"
    elif sides.work and not sides.large_work:
        yield from sides.work
    both = (steps.before, steps.after) if steps else ()
    for file in dict.fromkeys(step.file for step in both if step and step.steps == 1):
        yield f"{file} has one decode step: its scatter is not known, 3 % are taken"
    yield from log.notes
    if not ops:
        for op, lines in log.missed.items():
            yield f"a log says that a table has no entry for {op}: {next(iter(lines))}"


def _noise(result: Account, effect: Effect | None) -> str:
    """That the observation is too noisy to tell, and what would tell."""
    assert result.expected
    if result.expected.unsure:
        no_gain = f"No gain was expected with certainty, {result.expected.shown}"
        return f"{no_gain}, and {result.of} may be unchanged"
    expected = f"{figure(result.expected.ms)} ms that were expected"
    text = f"The interval of {result.of} holds both no change and the {expected}"
    if effect is None:
        return f"{text}; longer traces would tell"
    percent = 100 * abs(result.expected.ms) / effect.base
    spread = effect.launch_spread or QUIET_SPREAD
    needed = pairs_for(percent, spread, CONFIDENCE) if percent else None
    if needed is None:
        return f"{text}; no number of pairs up to {MOST_PAIRS} would tell"
    return f"{text}; {max(1, needed - effect.pairs)} more pairs would tell"


def _sentence(result: Account, effect: Effect | None, steps: Steps | None) -> str:
    """What happened, with the first cause."""
    expected, observed, missing = result.expected, result.observed, result.missing
    if result.state == NOTHING_VANISHED and expected and observed:
        return _as_expected(result, expected, observed)
    # Causes of the other sign do not explain what is missing.
    named = [
        cause for cause in result.seen
        if cause.name != causes.NOISE and (cause.ms is None or _sign(missing) * cause.ms > 0)
    ]  # fmt: skip
    if result.state == causes.NOISE:
        missing_calls = [cause for cause in named if _shows_missing_calls(cause, steps)]
        if not missing_calls:
            without = [cause for cause in named if cause.name in WITHOUT_EFFECT]
            besides = f"; besides, {_lower(without[0].says)}" if without else ""
            return f"No finding: {_lower(_noise(result, effect))}{besides}."
        named = missing_calls
    likely = "Likely: " if named and named[0].sure == "likely" else ""
    if missing is None or expected is None or observed is None:
        if named:
            return f"{likely}{named[0].says}."
        what, give = "what serving did is not known", "--ab or both traces"
        if expected is None:
            what = "what was expected is not known in ms"
            give = "--trace BEFORE AFTER with --change or --run, or an A/B with --predict"
        return f"It cannot be told what vanished, as {what}: give {give}."
    other_outcome = _more_or_a_loss(result.of, expected, observed)
    if not named:
        lost = f"{figure(missing)} of the {figure(expected.ms)} ms that were expected are missing"
        outcome = other_outcome or f"It is not known where the gain went: {lost}"
        return f"{outcome}, and nothing in these inputs says why."
    if other_outcome:
        return f"{other_outcome}; {likely.lower()}{_lower(named[0].says)}."
    return _with_part(f"{likely}{named[0].says}", named[0].ms, missing, expected)


def _with_part(text: str, ms: float | None, missing: float, expected: Saving) -> str:
    """A cause's text, and how much of what is missing it explains. ms: its size; None: not known"""
    if ms is None:
        return f"{text}."
    is_all = ms > (1 - causes.LEAST) * missing
    if is_all and missing > (1 - causes.LEAST) * expected.ms:
        return f"{text}; all of the {figure(expected.ms)} ms that were expected are missing."
    part = "all" if is_all else f"{figure(ms)} ms"
    return f"{text}; that is {part} of the {figure(missing)} ms that are missing of {figure(expected.ms)} ms."


def _more_or_a_loss(of: str, expected: Saving, observed: Saving) -> str:
    """That more was saved than expected, or that an expected loss is larger; empty where a gain vanished."""
    longer = f"{of} became {figure(-observed.ms)} ms longer"
    what = f"a {'saving' if expected.ms > 0 else 'loss'} of {figure(abs(expected.ms))} ms was expected"
    if observed.ms > expected.ms:
        saved = f"{figure(observed.ms)} ms of {of} are saved" if observed.ms > 0 else longer
        return f"Serving did better than expected: {saved}, {what}"
    return "" if expected.ms > 0 else f"The loss is larger than expected: {longer}, {what}"


def _as_expected(result: Account, expected: Saving, observed: Saving) -> str:
    saved = f"{figure(observed.ms)} of {figure(expected.ms)} ms of {result.of} are saved"
    if expected.unsure:
        no_gain = f"No gain was expected with certainty, {expected.shown}"
        return f"{no_gain}; of {result.of} {observed.shown} are saved."
    if expected.ms < 0:
        longer = f"{result.of} became {figure(-observed.ms)} ms longer"
        return f"As predicted, it is a loss: {longer}, {figure(-expected.ms)} ms were expected."
    if other := _not_its_own(result):
        is_part = other.ms is not None and abs(other.ms) < MOSTLY * expected.ms
        all_of_it = "all " if is_part else ""
        return f"What was saved is not {all_of_it}the change's own, {saved}: {_lower(other.says)}."
    return f"Nothing vanished: {saved}."


def _not_its_own(result: Account) -> Cause | None:
    """The first cause with which what was saved cannot be what the change saved."""
    not_its_own = [cause for cause in result.seen if cause.name in NOT_ITS_OWN]
    return next((cause for cause in not_its_own if cause.ms is None or cause.ms > 0), None)


def _shorter(saved_ms: float) -> str:
    return f"{figure(abs(saved_ms))} ms {'shorter' if saved_ms >= 0 else 'longer'}"


def _lower(says: str) -> str:
    return says[0].lower() + says[1:]


def _code(result: Account, steps: Steps | None) -> int:
    """The exit code. FAILED: more than UNEXPLAINED of what is missing has no cause; or what is missing is not
    known and no cause is certain; or it may be noise; or what was saved is not the change's own."""
    if result.state == NOTHING_VANISHED:
        return FAILED if _not_its_own(result) else OK
    if result.state == causes.NOISE and not any(_shows_missing_calls(cause, steps) for cause in result.seen):
        return FAILED
    if result.missing is None:
        return OK if any(cause.sure == "certain" for cause in result.seen) else FAILED
    return OK if result.seen and abs(result.rest or 0.0) <= UNEXPLAINED * abs(result.missing) else FAILED


def facts(result: Account) -> JsonObject:
    """The account as the command's JSON has it."""
    rows = [asdict(cause) | {"share": result.share(cause.ms)} for cause in result.causes]
    return {**asdict(result), "causes": rows, "missing": result.missing, "rest": result.rest}
