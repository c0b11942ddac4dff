"""The rows behind a claim: which run it prints, of which tokens, over how many GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TypeGuard

from harness.serving.audit.corpus import Corpus, claimed_metric, same_engine, same_hardware, step_of
from harness.serving.compare.quantity import Quantity, quantity_of_claim, quantity_of_run
from harness.serving.published.documents import Claim, Configuration
from harness.serving.schema import Metric, ServingRun

MATCH = 1e-3  # relative: 4574 is printed so closely, 2200 is not
RATIO = re.compile(r"ratio|speedup|gain|reduction")
RESULT = re.compile(rf"{RATIO.pattern}|throughput|latency|ttft|tpot|itl|e2e|share_of|concurrency")
"""Names of metrics that are a result, not a setting."""


def is_throughput(metric: Metric | None) -> TypeGuard[Metric]:
    return metric is not None and metric.unit == "tok/s"


def row_of(claim: Claim, corpus: Corpus) -> tuple[ServingRun, str] | None:
    """The run whose throughput a claim prints, and of which tokens: one that it names, or of its hardware and
    engine. None where none fits, or several do."""
    if not is_throughput(claim.metric) or claim.upper is not None:
        return None
    named = corpus.runs_of(claim)
    alike = [
        run
        for run in corpus.all_rows
        if same_hardware(claim.hardware, run.hardware) and same_engine(claim.engine, run.engine)
    ]
    for runs in (named, alike):
        fits = [
            (run, kind)
            for run in runs
            for kind, value in by_kind(run).items()
            if _same(claim.metric.value, value)
        ]
        if fits:
            return fits[0] if len(fits) == 1 else None
    return None


def _same(stated: float, value: float) -> bool:
    """Near enough, and printed with digits enough, that it is no chance."""
    return step_of(stated) <= MATCH * stated and abs(stated - value) <= max(
        step_of(stated), MATCH / 10 * stated
    )


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


def share_of(scope: str, run: ServingRun) -> tuple[float, str] | None:
    if scope == "gpu":
        return (1 / run.gpus, f" / {run.gpus}") if run.gpus else None
    if scope == "decode_node":
        decode = run.parallelism.decode_gpus
        nodes = decode * run.nodes / run.gpus if decode and run.nodes and run.gpus else None
        return (1 / nodes, f" / {nodes:g}") if nodes else None
    return 1.0, ""


def sourced(claim: Claim, corpus: Corpus, about: Configuration | None) -> Quantity:
    """A claim's number with what its row says it is, or its source, where the claim leaves that open."""
    metric = claimed_metric(claim)
    if claim.meant and "unknown" in (metric.scope, metric.tokens):
        opened = [key for key in ("scope", "tokens") if getattr(metric, key) == "unknown"]
        metric = metric.model_copy(update={key: getattr(claim.meant, key) for key in opened})
    runs = corpus.runs_of(claim)
    match = row_of(claim, corpus) or ((runs[0], "") if len(runs) == 1 and is_throughput(metric) else None)
    if match is None:
        return quantity_of_claim(claim, metric, about)
    run, kind = match
    whole = run.metric("throughput")
    update = {"tokens": kind if kind in ("output", "total") else metric.tokens}
    if metric.scope == "unknown" and whole:
        update["scope"] = whole.scope
    return replace(quantity_of_run(run, metric.model_copy(update=update)), id=claim.id, bound=claim.bound)
