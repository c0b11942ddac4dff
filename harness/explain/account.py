"""The account: expected and observed saving, the causes of their difference, what is not known, and its text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Group, RenderableType

from harness.errors import FAILED, OK, NothingRan, UsageError
from harness.explain import causes
from harness.explain.alone import Alone
from harness.explain.causes import NOISE, RECORD, Cause, Steps
from harness.explain.served import Log
from harness.explain.sides import Sides
from harness.explain.step import described
from harness.files import JsonObject
from harness.report.fitting_table import table_of
from harness.report.text import grouped, ranged
from harness.serving.ab.result import MOST_LOOKED_AT, SPREAD, Effect, pairs_for
from harness.serving.ledger import KernelChange, Prediction
from harness.statistics.intervals import CONFIDENCE, students_t

UNEXPLAINED = 0.5
"""From this part of the difference on, what is not explained makes the exit code 1."""
ORDER = (*causes.OF_OP, *causes.OF_STEP, causes.WORK, causes.STALLS, causes.PREDICTED, NOISE)
HOW = (
    "SGLang: POST /start_profile with num_steps and record_shapes; vLLM: --profiler-config.profiler=torch, then "
    "POST /start_profile; in an extra launch, not in a measured one"
)
"""How engines record a trace."""


@dataclass(frozen=True)
class Saving:
    """Milliseconds that were saved, with an interval; text: where they are from."""

    ms: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Account:
    """of:     TPOT, or a decode step
    causes: those with evidence, the largest first; then those not seen, and those not known
    rest:   what of the difference no cause has
    """

    says: str
    of: str
    expected: Saving | None
    observed: Saving | None
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    code: int

    @property
    def missing(self) -> float | None:
        return self.expected.ms - self.observed.ms if self.expected and self.observed else None

    @property
    def named(self) -> list[Cause]:
        return [cause for cause in self.causes if cause.sure in ("certain", "likely")]

    @property
    def rest(self) -> float | None:
        if self.missing is None:
            return None
        return self.missing - sum(cause.ms or 0.0 for cause in self.named)


def account(
    changes: Sequence[KernelChange], alone: Alone | None, sides: Sides, steps: Steps | None, log: Log,
    modelled: Sequence[Prediction] = (),
) -> Account:  # fmt: skip
    """modelled: what the model of serving predicts of the change. Raises NothingRan where nothing is to be
    compared."""
    observed, of = _observed(sides.effect, steps)
    per_token = sides.accepted[0] if of == "TPOT" else 1.0
    said = _said((*sides.predictions, *modelled), of)
    in_step = _in_step(steps, alone, per_token)
    expected = said or in_step
    if expected is None and observed is None and not (sides.unread or sides.same or log.missed):
        raise NothingRan(
            "nothing to compare: neither what was expected nor what serving did is known; give --ab, or --before "
            "and --after, or --trace BEFORE AFTER, with --change or --run"
        )
    missing = expected.ms - observed.ms if expected and observed else None
    found = list(
        _causes(sides, steps, log, [c.op for c in changes] or ([alone.op] if alone else []), missing)
    )
    scaled = [
        replace(c, ms=c.ms / per_token) if c.ms is not None and c.name in OF_TRACE else c for c in found
    ]
    if said and in_step and missing is not None:
        scaled += _prediction(said, in_step)
    if steps and steps.saved_ms is not None and sides.effect and observed and missing is not None:
        scaled += _beyond_steps(sides, steps, observed, per_token, missing)
    state, pairs = _state(expected, observed)
    if state == "noise":
        scaled = [replace(c, sure="likely") if c.sure == "certain" else c for c in scaled]
        scaled = scaled if steps else [replace(c, ms=None) for c in scaled]
    whole = _ordered([*scaled, *_not_known(scaled, sides, steps, alone)])
    made = Account("", of, expected, observed, tuple(whole), tuple(_notes(sides, steps, of)), OK)
    return replace(made, says=_first(made, state, pairs, sides), code=_code(made, state))


OF_TRACE = (*causes.OF_OP, *causes.OF_STEP)


def _observed(effect: Effect | None, steps: Steps | None) -> tuple[Saving | None, str]:
    if effect:
        low, high = effect.interval or _of_launches(effect)
        saved = [-effect.base * percent / 100 for percent in (effect.percent, high, low)]
        pairs = (
            "1 pair, whose interval is from launches elsewhere"
            if effect.pairs == 1
            else f"{effect.pairs} pairs"
        )
        return Saving(*saved, f"TPOT {effect.base:.4g} -> {effect.arm:.4g} ms; {pairs}"), "TPOT"
    if steps and steps.before and steps.saved_ms is not None:
        ms, half = steps.saved_ms, steps.half_ms
        return Saving(
            ms, ms - half, ms + half, f"{described(steps.before)} -> {described(steps.after)}"
        ), "a decode step"
    return None, "a decode step" if steps else "TPOT"


def _of_launches(effect: Effect) -> tuple[float, float]:
    """The interval of one pair, in per cent, by what launches were seen to differ by."""
    half = 2 * math.sqrt(2) * SPREAD["tpot"][1]
    return effect.percent - half, effect.percent + half


def _said(predictions: Sequence[Prediction], of: str) -> Saving | None:
    """The saving that was predicted of TPOT or of a step; several changes of one record add up."""
    quantity = "tpot" if of == "TPOT" else "decode_step"
    chosen = [each for each in predictions if each.quantity == quantity and each.change is not None]
    if not chosen:
        return None
    change = sum(each.change or 0.0 for each in chosen)
    ends = [sum(each.change or 0.0 if (end := getattr(each, name)) is None else end for each in chosen)
            for name in ("high", "low")]  # fmt: skip
    return Saving(
        -change, -ends[0], -ends[1], f"predicted of {'TPOT' if of == 'TPOT' else of}, {chosen[0].method}"
    )


def _in_step(steps: Steps | None, alone: Alone | None, per_token: float) -> Saving | None:
    """What the calls in the trace times the saving alone give, with the usual error of that in a server."""
    if steps is None or steps.expected_ms is None:
        return None
    ms = steps.expected_ms / per_token
    half = causes.IN_STEP * abs(ms)
    if alone:
        half = math.hypot(half, steps.changed.calls * alone.mean("half_us") / 1e3)
        text = f"{steps.changed.calls:.3g} calls x {alone.saving_us():.3g} us: {alone.before} -> {alone.after}, {alone.folder}"
    else:
        assert steps.before
        took = steps.before.of(steps.changed.before)
        told = ", ".join(
            f"{c.op}={c.factor:g}x" if c.factor else f"{c.op}=saved:{c.saved_us:g}us" for c in steps.changes
        )
        text = f"{told}, which takes {took:.3g} ms of a step"
    return Saving(ms, ms - half, ms + half, text)


def _causes(
    sides: Sides, steps: Steps | None, log: Log, ops: Sequence[str], missing: float | None
) -> Iterator[Cause]:
    seen = list(causes.of_step(steps)) if steps else []
    named = [cause for cause in seen if cause.sure in ("certain", "likely")]
    yield from seen
    of_op = [cause for cause in named if cause.name in causes.OF_OP]
    measured = steps is not None and steps.expected_ms is not None and steps.saved_ms is not None
    size = missing
    if not measured and not of_op and (cause := causes.without_steps(sides, log, ops, missing)):
        yield cause
        size = None
    if sides.work:
        ms = None if measured else size
        yield Cause(causes.WORK, "likely", ms, f"The two sides did other work: {sides.work[0]}", sides.work,
                    "results with the same seed, and --ignore-eos or what the client calls it")  # fmt: skip
    elif sides.work_known:
        yield Cause(causes.WORK, "none seen")


def _prediction(said: Saving, in_step: Saving) -> Iterator[Cause]:
    """What the prediction has more than the calls of the trace allow."""
    more = said.ms - in_step.ms
    if said.low <= in_step.high and in_step.low <= said.high and abs(more) < UNEXPLAINED * abs(said.ms):
        yield Cause(causes.PREDICTED, "none seen")
        return
    evidence = (
        f"predicted: {said.ms:.3g} ms ({said.text})",
        f"in the trace: {in_step.ms:.3g} ms ({in_step.text})",
    )
    yield Cause(causes.PREDICTED, "certain", more, "The prediction took the op for a larger part of the step than "
                "it is" if more > 0 else "The prediction took the op for a smaller part of the step than it is",
                evidence)  # fmt: skip


def _beyond_steps(
    sides: Sides, steps: Steps, observed: Saving, per_token: float, missing: float
) -> Iterator[Cause]:
    """What the steps saved and TPOT does not show: the accept length, other work, or stalls."""
    saved = (steps.saved_ms or 0.0) / per_token
    before, after = sides.accepted
    of_accept = 0.0
    if abs(after / before - 1) > 0.01:
        of_accept = steps.after.ms * (1 / after - 1 / before)
        yield Cause(causes.WORK, "certain", of_accept,
                    f"A step gives {after:.3g} tokens instead of {before:.3g}: another accept length",
                    (f"accept length {before:.3g} -> {after:.3g}",))  # fmt: skip
    rest = saved - of_accept - observed.ms
    half = math.hypot(steps.half_ms / per_token, (observed.high - observed.low) / 2)
    expected = abs(missing + observed.ms)
    if abs(rest) <= max(half, causes.LEAST * expected, causes.IN_STEP * abs(saved)):
        yield Cause(causes.STALLS, "none seen")
        return
    evidence = [f"a step saves {saved:.3g} ms in the traces, TPOT {observed.ms:.3g} ms ({observed.text})"]
    if sides.work:
        says = f"The two sides did other work: {sides.work[0]}"
        yield Cause(causes.WORK, "likely", rest, says, (*sides.work, *evidence))
    else:
        yield Cause(causes.STALLS, "likely", rest, "The step became faster, TPOT did not: what is between decode "
                    "steps grew", tuple(evidence), "running and waiting requests, prefills and preemptions of both "
                    "servers over time (their logs)")  # fmt: skip


def _state(expected: Saving | None, observed: Saving | None) -> tuple[str, int]:
    """`noise`, `nothing vanished` or empty; and the pairs that would tell."""
    if expected is None or observed is None:
        return "", 0
    holds = observed.low <= expected.high and expected.low <= observed.high
    if holds and observed.low <= 0 <= observed.high:
        return "noise", 0
    if holds or observed.ms >= expected.ms > 0:
        return "nothing vanished", 0
    return "", 0


def pairs_needed(effect: Effect, expected_ms: float) -> int | None:
    """How many more pairs would tell the expected saving from none."""
    spread = effect.launch_spread or SPREAD["tpot"][1]
    percent = 100 * abs(expected_ms) / effect.base
    needed = pairs_for(percent, spread, CONFIDENCE, MOST_LOOKED_AT) if percent else None
    return None if needed is None else max(1, needed - effect.pairs)


def _not_known(
    found: Sequence[Cause], sides: Sides, steps: Steps | None, alone: Alone | None
) -> Iterator[Cause]:
    """The causes on which these inputs say nothing."""
    there = {cause.name for cause in found}
    effective = there & {causes.CALLS, causes.UNREAD, causes.SAME, causes.REFUSED}
    for name, known in (
        (causes.CALLS, bool(effective) or bool(there & {causes.TABLE, causes.LESS})),
        (causes.UNREAD, sides.looked_up or bool(effective)),
        (causes.SAME, sides.settings_known or bool(effective)),
        (causes.TABLE, causes.TABLE in there),
        (causes.SHAPES, bool(steps and steps.fit) or causes.CALLS in there and causes.SHAPES in there),
        (causes.LESS, bool(there & {causes.LESS, causes.TABLE, causes.CALLS} and steps and steps.before)),
        *((each, each in there) for each in causes.OF_STEP),
        (causes.WORK, sides.work_known),
        (causes.STALLS, causes.STALLS in there or causes.WORK in there and bool(steps)),
        (NOISE, sides.effect is not None or steps is not None),
    ):
        if not known and name not in there:
            yield Cause(name, "not known", record=RECORD[name])


def _ordered(found: Sequence[Cause]) -> list[Cause]:
    """Those with evidence first, the largest first; then the others."""

    def rank(cause: Cause) -> tuple[bool, float, int]:
        named = cause.sure in ("certain", "likely")
        return (not named, -(cause.ms or 0.0) if named else 0.0, ORDER.index(cause.name))

    return sorted(found, key=rank)


def _notes(sides: Sides, steps: Steps | None, of: str) -> Iterator[str]:
    if of == "TPOT" and steps and steps.before and sides.effect:
        step, tpot = steps.before.ms / sides.accepted[0], sides.effect.base
        if not 0.7 < step / tpot < 1.3:
            yield (f"a step of {steps.before.file} takes {step:.3g} ms a token, TPOT is {tpot:.3g} ms: stalls are "
                   "between, or the trace is of another load")  # fmt: skip
    if steps:
        for step in (steps.before, steps.after):
            if step and step.steps == 1:
                yield f"{step.file} has one decode step: its scatter is not known, 3 % are taken"


def _first(made: Account, state: str, pairs: int, sides: Sides) -> str:
    """The one sentence that says what happened."""
    expected, observed, missing = made.expected, made.observed, made.missing
    named = [cause for cause in made.named if cause.ms is None or cause.ms > 0]
    if state == "nothing vanished" and expected and observed:
        return (f"Nothing vanished: {observed.ms:.3g} ms of {made.of} were saved where {expected.ms:.3g} ms were "
                "expected.")  # fmt: skip
    if state == "noise" and expected and observed and not (named and named[0].ms):
        text = f"No finding: the interval of {made.of} holds both no change and the {expected.ms:.3g} ms that were expected"
        more = pairs_needed(sides.effect, expected.ms) if sides.effect else None
        if sides.effect and more is None:
            return f"{text}; so small a gain needs more than {MOST_LOOKED_AT[-1]} pairs."
        return f"{text}; {more} more pairs would tell." if more else f"{text}; longer traces would tell."
    if not named:
        if missing is None or expected is None:
            lacks = "what was expected" if expected is None else "what serving did"
            return f"It cannot be told how much vanished, because {lacks} is not known in ms."
        return (f"It is not known where the gain went: {missing:.3g} of the {expected.ms:.3g} ms that were expected "
                "are missing, and nothing in these inputs explains them.")  # fmt: skip
    first = named[0]
    likely = "Likely: " if first.sure == "likely" else ""
    if first.ms is None or missing is None or expected is None:
        return f"{likely}{first.says}."
    return f"{likely}{first.says}; {_part(first.ms, missing, expected.ms)}."


def _part(ms: float, missing: float, expected: float) -> str:
    if abs(missing - ms) < 0.1 * abs(missing) and missing > 0.9 * expected:
        return f"all of the {expected:.3g} ms that were expected are missing"
    part = "all" if abs(missing - ms) < 0.1 * abs(missing) else f"{ms:.3g} ms"
    return f"that is {part} of the {missing:.3g} ms that are missing of {expected:.3g} ms expected"


def _code(made: Account, state: str) -> int:
    if state == "nothing vanished":
        return OK
    if state == "noise":
        return FAILED
    if made.missing is None:
        return OK if any(cause.sure == "certain" for cause in made.named) else FAILED
    return OK if made.named and abs(made.rest or 0.0) <= UNEXPLAINED * abs(made.missing) else FAILED


def facts(made: Account) -> JsonObject:
    """All of it as plain values."""
    found = asdict(made)
    for row in found["causes"]:
        of = made.missing
        row["share"] = row["ms"] / of if row["ms"] is not None and of else None
    return {**found, "missing": made.missing, "rest": made.rest}


def shown(made: Account) -> RenderableType:
    """The sentence, the sums, the causes with their evidence, and what is not known."""
    parts: list[RenderableType] = [made.says, ""]
    for word, saving in (("expected", made.expected), ("observed", made.observed)):
        if saving:
            parts.append(
                f"{word:9} {ranged(saving.ms, saving.low, saving.high, '.3g', ' ms')} of {made.of} saved: {saving.text}"
            )
        else:
            parts.append(f"{word:9} not known in ms")
    if made.named:
        rows = [{"cause": c.name, "ms": "?" if c.ms is None else f"{c.ms:+.3g}", "of what is missing": _share(c.ms, made.missing),
                 "how sure": c.sure} for c in made.named]  # fmt: skip
        if made.rest is not None:
            rows.append(
                {
                    "cause": "rest, unexplained",
                    "ms": f"{made.rest:+.3g}",
                    "of what is missing": _share(made.rest, made.missing),
                }
            )
            rows.append({"cause": "missing", "ms": f"{made.missing:+.3g}"})
        parts += ["", table_of(rows), ""]
        for cause in made.named:
            parts.append(f"{cause.name}: {cause.says}")
            parts += [f"- {line}" for line in cause.evidence]
            parts += [f"- to be surer: {cause.record}"] if cause.record else []
    unseen = [cause.name for cause in made.causes if cause.sure == "none seen"]
    parts += ["", f"none seen: {', '.join(unseen)}"] if unseen else [""]
    unknown = [cause for cause in made.causes if cause.sure == "not known"]
    for record, group in grouped(unknown, lambda cause: cause.record).items():
        parts.append(f"not known: {', '.join(cause.name for cause in group)}: record {record}")
    if any(causes.TRACES in cause.record for cause in unknown):
        parts.append(f"traces: {HOW}")
    parts += [f"note: {note}" for note in made.notes]
    return Group(*parts)


def _share(ms: float | None, missing: float | None) -> str:
    return f"{100 * ms / missing:.0f} %" if ms is not None and missing else ""
