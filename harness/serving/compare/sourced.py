"""The run behind a published claim: which one its number prints, of which tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from harness.serving.compare.quantity import Quantity, quantity_of_claim, quantity_of_run
from harness.serving.published.documents import Claim, Configuration
from harness.serving.schema import Metric, ServingRun

MATCH = 1e-3  # relative: 4574 is printed so closely, 2200 is not

Known = Mapping[str, ServingRun | Claim]
"""Runs and claims by the ids that `refers_to` writes."""


def sourced(claim: Claim, metric: Metric, known: Known, about: Configuration | None) -> Quantity:
    """A claim's metric with what its row says it is, or its source, where the claim leaves that open."""
    if claim.meant and "unknown" in (metric.scope, metric.tokens):
        opened = [key for key in ("scope", "tokens") if getattr(metric, key) == "unknown"]
        metric = metric.model_copy(update={key: getattr(claim.meant, key) for key in opened})
    runs = runs_of(claim, known)
    is_throughput = metric.unit == "tok/s"
    match = row_of(claim, metric, known) if is_throughput else None
    if match is None and is_throughput and len(runs) == 1:
        match = runs[0], ""
    if match is None:
        return quantity_of_claim(claim, metric, about)
    run, kind = match
    whole = run.metric("throughput")
    update = {"tokens": kind if kind in ("output", "total") else metric.tokens}
    if metric.scope == "unknown" and whole:
        update["scope"] = whole.scope
    return replace(quantity_of_run(run, metric.model_copy(update=update)), id=claim.id, bound=claim.bound)


def runs_of(claim: Claim, known: Known, seen: frozenset[str] = frozenset()) -> list[ServingRun]:
    """The runs that a claim rests on, through other claims too, in its order."""
    runs: list[ServingRun] = []
    for reference in claim.refers_to:
        about = known.get(reference)
        if isinstance(about, ServingRun):
            runs.append(about)
        elif about is not None and reference not in seen:
            runs += runs_of(about, known, seen | {reference})
    return list({run.id: run for run in runs}.values())


def row_of(claim: Claim, metric: Metric, known: Known) -> tuple[ServingRun, str] | None:
    """The run whose throughput a claim prints, and of which tokens: one that it names, or of its hardware and
    engine. None where none fits, or several do."""
    if claim.upper is not None:
        return None
    alike = [
        run
        for run in known.values()
        if isinstance(run, ServingRun)
        and same_hardware(claim.hardware, run.hardware)
        and same_engine(claim.engine, run.engine)
    ]
    for runs in (runs_of(claim, known), alike):
        fits = [
            (run, kind) for run in runs for kind, value in by_kind(run).items() if prints(metric.value, value)
        ]
        if fits:
            return fits[0] if len(fits) == 1 else None
    return None


def prints(stated: float, value: float) -> bool:
    """Near enough, and printed with digits enough, that it is no chance."""
    last = last_digit(stated)
    return last <= MATCH * stated and abs(stated - value) <= max(last, MATCH / 10 * stated)


def last_digit(value: float) -> float:
    """What the last digit of a printed number counts: 1 of 2656, 0.01 of 22.05, 1000 of 17000."""
    text = f"{value:.10f}".rstrip("0").rstrip(".")
    if "." in text:
        return 10.0 ** -len(text.split(".")[1])
    return 10.0 ** (len(text) - len(text.rstrip("0"))) if value else 1.0


def by_kind(run: ServingRun) -> dict[str, float]:
    """Its tokens per second by kind; total and output follow from each other and the input's, or from what
    was counted, where the client gives one alone."""
    rates = [m for m in run.metrics if m.name == "throughput" and m.unit == "tok/s"]
    kinds: dict[str, float] = {m.tokens: m.value for m in reversed(rates) if m.scope == rates[0].scope}
    counted = run.totals
    if counted.duration_s:
        for kind, tokens in (("output", counted.output_tokens), ("input", counted.input_tokens)):
            if tokens:
                kinds.setdefault(kind, tokens / counted.duration_s)
    if "input" in kinds and "output" in kinds:
        kinds.setdefault("total", kinds["input"] + kinds["output"])
    return {kind: value for kind, value in kinds.items() if kind in ("output", "total", "unknown")}


def same_hardware(a: str, b: str) -> bool:
    """Whether two names are of one GPU: `mi300` and `8x AMD Instinct MI300X` are."""
    models = [set(re.findall(r"\b(?:mi|gh|gb|h|b)\d{2,3}", name.lower())) for name in (a, b)]
    return bool(models[0] & models[1])


def same_engine(a: str, b: str) -> bool:
    plain = [re.sub(r"[^a-z]", "", name.lower()).replace("tensorrt", "trt") for name in (a, b)]
    return bool(plain[0] and plain[1]) and (plain[0] in plain[1] or plain[1] in plain[0])
