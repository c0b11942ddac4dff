"""Comparability of two quantities: whether they may be set side by side, and what has to be done first.

What differs between two quantities is either what is compared (the hardware), or mended (the number of GPUs,
the kind of tokens), or a reason to refuse. What is not known is not alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from harness.catalogue.flags import catalogue
from harness.serving.compare.normalise import Reason, Side, normalised, unit_of
from harness.serving.compare.quantity import LENGTH_TOLERANCE, SNAPSHOT, UP_TO, Quantity, matters
from harness.serving.names import model_name
from harness.serving.schema import Metric

ComparisonVerdict = Literal["alike", "normalised", "refused"]


@dataclass(frozen=True)
class QuantityComparison:
    """Two quantities.

    reasons:     why it is refused, each of them; empty where it is not
    a, b:        the numbers as far as they could be normalised, also where it is refused
    ratio:       a over b; None where it is refused
    confounders: what else differs beside the hardware
    uncertain:   what remains open
    """

    verdict: ComparisonVerdict
    reasons: tuple[Reason, ...]
    a: Side
    b: Side
    confounders: tuple[str, ...]
    uncertain: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        return self.a.value / self.b.value if self.verdict != "refused" and self.b.value else None


def compare(a: Quantity, b: Quantity, assumed: Collection[str] = ()) -> QuantityComparison:
    """Compares a quantity with another, on the metric that each holds. assumed: which of IDENTITY are taken
    to be alike where they are not known; `all`: each."""
    reasons = [*_metric_reasons(a.metric, b.metric), *_identity_reasons(a, b, assumed)]
    reasons += _condition_reasons(a, b)
    (side_a, side_b), unmended = normalised(a, b)
    reasons += unmended
    steps = side_a.steps or side_b.steps
    verdict: ComparisonVerdict = "refused" if reasons else "normalised" if steps else "alike"
    return QuantityComparison(
        verdict,
        tuple(reasons),
        side_a,
        side_b,
        tuple(_confounders(a, b)),
        tuple(_uncertain(a, b, {reason.aspect for reason in reasons})),
    )


def _metric_reasons(a: Metric, b: Metric) -> Iterator[Reason]:
    if a.name != b.name:
        yield Reason("metric", a.name, b.name, "they are different quantities")
    if a.statistic != b.statistic:
        yield Reason("statistic", a.statistic, b.statistic, "one does not give the other")
    if unit_of(a)[1] != unit_of(b)[1]:
        yield Reason("unit", a.unit, b.unit, "there is no factor between them")
    if not a.value or not b.value:
        yield Reason("value", f"{a.value:g}", f"{b.value:g}", "0 is nothing that was measured")


CONDITIONS = {
    "model": "another model is another work",
    "mode": "a batch of which all is known from the start, and requests as they come, are different jobs",
    "input length": "prefill's share of the time differs; no factor mends that",
    "output length": "the share of decode and the length of the cache differ; no factor mends that",
    "load": "the batch that the engine decodes differs",
    "dataset": "prompts decide routing of experts, hits of the prefix cache, and where answers end",
    "prefix caching": "cached prompts are not computed",
    "precision": "other products, of another accuracy",
    "accounting window": "one leaves its ramp-up and its tail out, the other counts them",
}
UNKNOWN = "unknown"
IDENTITY = ("hardware", "engine", "model")
"""What a result is of. Many clients' files do not say it; the hardware may differ, and so may the engine."""

MAY_BE_UNKNOWN = ("model", "dataset", "prefix caching", "precision", "accounting window")
"""What most clients' files do not say: open on either side it is named as uncertain, and does not refuse."""


def conditions(quantity: Quantity) -> dict[str, str]:
    """What a quantity was measured under, by the names of CONDITIONS."""
    load = quantity.workload
    cached = load.prefix_cached
    if cached is None and "--no-enable-prefix-caching" in quantity.flags:
        cached = False
    window = UNKNOWN
    if quantity.trimmed:
        window = f"without the first {load.warmup_s or 0:g} s and the last {load.cooldown_s or 0:g} s"
    elif quantity.client:
        window = "the whole run"
    return {
        "model": SNAPSHOT.sub("", model_name(quantity.model)) or UNKNOWN,
        "mode": quantity.mode,
        "input length": quantity.input_length or UNKNOWN,
        "output length": quantity.output_length or UNKNOWN,
        "load": _load(quantity),
        "dataset": load.dataset or UNKNOWN,
        "prefix caching": UNKNOWN if cached is None else "on" if cached else "off",
        "precision": quantity.weights or UNKNOWN,
        "accounting window": window,
    }


def _load(quantity: Quantity) -> str:
    load = quantity.workload
    if quantity.mode == "offline":
        return UNKNOWN if load.num_prompts is None else f"{load.num_prompts} prompts at once"
    rate = f"{load.request_rate:g} requests a second" if load.request_rate else ""
    if rate and load.burstiness not in (None, 1):
        rate += f" of burstiness {load.burstiness:g}"
    if load.ramp_up:
        rate = f"{load.ramp_up} at the start"
    flight = f"{load.concurrency:g} in flight" if load.concurrency else ""
    if not rate and not flight and load.request_rate == 0:
        return "all requests at once"
    return ", ".join(filter(None, (flight, rate))) or UNKNOWN


def _identity_reasons(a: Quantity, b: Quantity, assumed: Collection[str]) -> Iterator[Reason]:
    for what in IDENTITY:
        of_a, of_b = getattr(a, what), getattr(b, what)
        if not (of_a and of_b) and not {what, "all"} & {*assumed}:
            yield Reason(
                what, of_a or UNKNOWN, of_b or UNKNOWN, f"what is not known is not alike, or --assume {what}"
            )


def _condition_reasons(a: Quantity, b: Quantity) -> Iterator[Reason]:
    left, right = conditions(a), conditions(b)
    for aspect, why in CONDITIONS.items():
        of_a, of_b = left[aspect], right[aspect]
        if UNKNOWN in (of_a, of_b):
            if aspect not in MAY_BE_UNKNOWN:
                yield Reason(aspect, of_a, of_b, "what is not known is not alike")
        elif aspect.endswith("length") and UP_TO not in of_a + of_b:
            if abs(float(of_a) - float(of_b)) > LENGTH_TOLERANCE * max(float(of_a), float(of_b)):
                yield Reason(aspect, of_a, of_b, why)
        elif aspect == "precision" and min(of_a, of_b, key=len) == "fp8" and of_a[:3] == of_b[:3]:
            continue  # of unknown scales: uncertain
        elif aspect == "accounting window":
            if a.trimmed != b.trimmed:
                yield Reason(aspect, of_a, of_b, why)
        elif of_a != of_b:
            yield Reason(aspect, of_a, of_b, why)


def _confounders(a: Quantity, b: Quantity) -> Iterator[str]:
    for what in ("engine", "version", "image", "client"):
        of_a, of_b = getattr(a, what), getattr(b, what)
        if of_a and of_b and of_a.lower() != of_b.lower():
            yield f"{what}: {of_a} against {of_b}"
    models = model_name(a.model), model_name(b.model)
    if all(models) and models[0] != models[1]:
        yield f"weights: {models[0]} against {models[1]}"
    if a.parallelism != b.parallelism:
        yield f"parallelism: {_layout(a) or UNKNOWN} against {_layout(b) or UNKNOWN}"
    if a.all_gpus and b.all_gpus and a.all_gpus != b.all_gpus:
        yield f"GPUs: {a.all_gpus} against {b.all_gpus}; a GPU of more of them is not worth the same"
    if a.flags and b.flags:
        for names, whose in ((options(a) - options(b), "A"), (options(b) - options(a), "B")):
            if names:
                yield f"flags of {whose} alone: {' '.join(sorted(names))}"
    keys = sorted({*a.environment, *b.environment}) if a.environment and b.environment else ()
    differ = [k for k in keys if a.environment.get(k) != b.environment.get(k) and k not in _unread()]
    if differ:
        shown = (f"{k} {a.environment.get(k, 'unset')}/{b.environment.get(k, 'unset')}" for k in differ)
        yield f"environment: {', '.join(shown)}"


def options(quantity: Quantity) -> set[str]:
    """A server's flags, without those that say where things are."""
    return {flag for flag in quantity.flags if matters(flag)}


def _unread() -> set[str]:
    """Variables that nothing reads."""
    return {name for name, flag in catalogue().items() if flag.read == "never"}


def _layout(quantity: Quantity) -> str:
    return " ".join(f"{k}={v}" for k, v in quantity.parallelism.model_dump(exclude_none=True).items())


def _uncertain(a: Quantity, b: Quantity, refused: Collection[str]) -> Iterator[str]:
    """refused: aspects that are reasons already, which are not said again."""
    left, right = conditions(a), conditions(b)
    for aspect in (aspect for aspect in MAY_BE_UNKNOWN if aspect not in refused):
        of_a, of_b = left[aspect], right[aspect]
        if UNKNOWN in (of_a, of_b) or (aspect == "precision" and of_a != of_b):
            yield f"{aspect}: {of_a} against {of_b}"
    for quantity in (a, b):
        if quantity.bound not in ("exactly", "about"):
            yield f"{quantity.id} says {quantity.bound!r}: its largest, not its mean"
        for what in ("hardware", "engine", "version"):
            if not getattr(quantity, what):
                yield f"{quantity.id} does not say its {what}"
        if quantity.trimmed:
            yield f"{quantity.id} counts a trimmed window, which is the steady state at its best"
    if a.workload.concurrency == b.workload.concurrency and a.all_gpus and b.all_gpus:
        each = a.workload.concurrency or 0
        per = [f"{each / gpus:g}" for gpus in (a.all_gpus, b.all_gpus)]
        if per[0] != per[1]:
            yield f"the same requests in flight are {per[0]} a GPU against {per[1]}"
