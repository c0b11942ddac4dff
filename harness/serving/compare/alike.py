"""Whether two numbers may be set side by side, and what has to be done to them first.

What differs between two figures is either what is compared (the hardware), or mended (the number of GPUs,
the kind of tokens), or a reason to refuse. What is not known is not alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from harness.catalogue.flags import catalogue
from harness.serving.compare.normalise import Reason, Side, normalised, unit_of
from harness.serving.compare.quantity import LENGTH_TOLERANCE, SNAPSHOT, Figure, matters
from harness.serving.schema import Metric

Verdict = Literal["alike", "normalised", "refused"]


@dataclass(frozen=True)
class Compared:
    """Two figures.

    reasons:     why it is refused, each of them; empty where it is not
    a, b:        the numbers as far as they could be normalised, also where it is refused
    ratio:       a over b; None where it is refused
    confounders: what else differs beside the hardware
    uncertain:   what remains open
    """

    verdict: Verdict
    reasons: tuple[Reason, ...]
    a: Side
    b: Side
    confounders: tuple[str, ...]
    uncertain: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        return self.a.value / self.b.value if self.verdict != "refused" and self.b.value else None


def compare(a: Figure, b: Figure) -> Compared:
    """Compares a figure with another, on the metric that each holds."""
    reasons = [*_metric_reasons(a.metric, b.metric), *_condition_reasons(a, b)]
    sides, unmended = normalised(a, b)
    reasons += unmended
    steps = any(side.steps for side in sides)
    verdict: Verdict = "refused" if reasons else "normalised" if steps else "alike"
    return Compared(verdict, tuple(reasons), *sides, tuple(_confounders(a, b)), tuple(_uncertain(a, b)))


def _metric_reasons(a: Metric, b: Metric) -> Iterator[Reason]:
    if a.name != b.name:
        yield Reason("metric", a.name, b.name, "they are different quantities")
    if a.statistic != b.statistic:
        yield Reason("statistic", a.statistic, b.statistic, "one does not give the other")
    if unit_of(a)[1] != unit_of(b)[1]:
        yield Reason("unit", a.unit, b.unit, "there is no factor between them")


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
MAY_BE_UNKNOWN = ("model", "dataset", "prefix caching", "precision", "accounting window")
"""What most clients' files do not say: open on either side it is named as uncertain, and does not refuse."""


def conditions(figure: Figure) -> dict[str, str]:
    """What a figure was measured under, by the names of CONDITIONS."""
    asked = figure.workload
    cached = asked.prefix_cached
    if cached is None and "--no-enable-prefix-caching" in figure.flags:
        cached = False
    window = UNKNOWN
    if figure.trimmed:
        window = f"without the first {asked.warmup_s or 0:g} s and the last {asked.cooldown_s or 0:g} s"
    elif figure.client:
        window = "the whole run"
    return {
        "model": SNAPSHOT.sub("", _name(figure)) or UNKNOWN,
        "mode": figure.mode,
        "input length": _number(figure.input_len),
        "output length": _number(figure.output_len),
        "load": _load(figure),
        "dataset": asked.dataset or UNKNOWN,
        "prefix caching": UNKNOWN if cached is None else "on" if cached else "off",
        "precision": figure.weights or UNKNOWN,
        "accounting window": window,
    }


def _name(figure: Figure) -> str:
    return figure.model.rstrip("/").rsplit("/")[-1].lower()


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:g}"


def _load(figure: Figure) -> str:
    asked = figure.workload
    if figure.mode == "offline":
        return UNKNOWN if asked.num_prompts is None else f"{asked.num_prompts} prompts at once"
    rate = f"{asked.request_rate:g} requests a second" if asked.request_rate else ""
    flight = f"{asked.concurrency:g} in flight" if asked.concurrency else ""
    if not rate and not flight and asked.request_rate == 0:
        return "all requests at once"
    return ", ".join(filter(None, (flight, rate))) or UNKNOWN


def _condition_reasons(a: Figure, b: Figure) -> Iterator[Reason]:
    left, right = conditions(a), conditions(b)
    for aspect, why in CONDITIONS.items():
        one, two = left[aspect], right[aspect]
        if UNKNOWN in (one, two):
            if aspect not in MAY_BE_UNKNOWN:
                yield Reason(aspect, one, two, "what is not known is not alike")
        elif aspect.endswith("length"):
            if abs(float(one) - float(two)) > LENGTH_TOLERANCE * max(float(one), float(two)):
                yield Reason(aspect, one, two, why)
        elif aspect == "precision" and min(one, two, key=len) == "fp8" and one[:3] == two[:3]:
            continue  # of unknown scales: uncertain
        elif aspect == "accounting window":
            if a.trimmed != b.trimmed:
                yield Reason(aspect, one, two, why)
        elif one != two:
            yield Reason(aspect, one, two, why)


def _confounders(a: Figure, b: Figure) -> Iterator[str]:
    for what in ("engine", "version", "image", "client"):
        one, two = getattr(a, what), getattr(b, what)
        if one and two and one.lower() != two.lower():
            yield f"{what}: {one} against {two}"
    if _name(a) and _name(b) and _name(a) != _name(b):
        yield f"weights: {_name(a)} against {_name(b)}"
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


def options(figure: Figure) -> set[str]:
    """A server's flags, without those that say where things are."""
    return {one for one in figure.flags if matters(one)}


def _unread() -> set[str]:
    """Variables that nothing reads."""
    return {name for name, flag in catalogue().items() if flag.read == "never"}


def _layout(figure: Figure) -> str:
    return " ".join(f"{k}={v}" for k, v in figure.parallelism.model_dump(exclude_none=True).items())


def _uncertain(a: Figure, b: Figure) -> Iterator[str]:
    left, right = conditions(a), conditions(b)
    for aspect in MAY_BE_UNKNOWN:
        one, two = left[aspect], right[aspect]
        if UNKNOWN in (one, two) or (aspect == "precision" and one != two):
            yield f"{aspect}: {one} against {two}"
    for one in (a, b):
        if one.bound not in ("exactly", "about"):
            yield f"{one.id} says {one.bound!r}: its largest, not its mean"
        for what in ("hardware", "engine", "version"):
            if not getattr(one, what):
                yield f"{one.id} does not say its {what}"
        if one.trimmed:
            yield f"{one.id} counts a trimmed window, which is the steady state at its best"
    if a.workload.concurrency == b.workload.concurrency and a.all_gpus and b.all_gpus:
        per = [f"{(f.workload.concurrency or 0) / f.all_gpus:g}" for f in (a, b)]
        if per[0] != per[1]:
            yield f"the same requests in flight are {per[0]} a GPU against {per[1]}"
