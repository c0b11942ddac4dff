"""Plausibility of one run: values that no engine reaches, and what a file should say and does not."""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.serving.integrity.common import FASTEST_STEP_MS, WAITS, broken, found, stated
from harness.serving.schema import Finding, ServingRun

# Bounds, not estimates: beyond any measurement known to this project by more than ten times.
LONGEST_MS = 86_400_000.0  # a day
PER_GPU = 1e6  # tok/s, of any kind, prefix cache or not
ALL = 1e8  # tok/s, of any cluster
# tok/s: more FP8 products a second than any GPU, by DeepSeek-V3's per token
PREFILL_PER_GPU = 5e15 / (2 * 37e9)
PREFILL = 5e5  # tok/s of one request, if the model or the GPUs are not known: about eight of those
GPUS = 8
LONG = 256  # tokens of a prompt from which on its prefill is no shorter than a decode step
OF_A_STEP = 0.95  # of a decode step: no prefill is shorter than that, since it reads the same weights
MOST_ACCEPTED = 64  # tokens a step of speculative decoding
LARGEST_NODE = 72  # GPUs, of GB200 NVL72


def latencies(run: ServingRun) -> Iterator[Finding]:
    """Too short or too long to be what they are called, in ms."""
    for metric in run.metrics:
        if metric.unit != "ms" or metric.statistic == "std" or metric.name in WAITS:
            continue
        least = FASTEST_STEP_MS if metric.statistic in ("mean", "p99", "max") else 0.0
        if 0 < metric.value < least or metric.value > LONGEST_MS:
            what = "too short to be one" if metric.value < least else "longer than a day"
            values = {"name": metric.name, "statistic": metric.statistic, "value": metric.value, "what": what}
            yield found("plausible", "suspect", "latency", **values)


def rates(run: ServingRun) -> Iterator[Finding]:
    """Throughputs beyond any hardware."""
    for metric in run.metrics:
        if metric.unit != "tok/s":
            continue
        gpus = 1 if metric.scope == "gpu" else run.gpus
        if metric.value > (PER_GPU * gpus if gpus else ALL):
            values = {"kind": metric.tokens, "throughput": metric.value, "gpus": gpus or "all"}
            yield found("plausible", "suspect", "of_gpus", **values)
        if metric.scope == "request" and metric.value > 1e3 / FASTEST_STEP_MS:
            values = {"name": metric.name, "statistic": metric.statistic, "value": metric.value}
            yield found("plausible", "suspect", "of_request", **values)


def prefill(run: ServingRun) -> Iterator[Finding]:
    """A prompt is computed before its first token comes, unless it stands in the prefix cache."""
    totals, tokens, tpot = run.totals, run.workload.input_len, stated(run, "tpot", "mean")
    if totals.input_tokens and totals.completed:
        tokens = totals.input_tokens / totals.completed
    ttft = min((t for t in (stated(run, "ttft", s) for s in ("mean", "median")) if t), default=0.0)
    if not tokens or not ttft or run.mode == "offline":
        return
    deepseek = re.search(r"deepseek|kimi-k2", run.model, re.IGNORECASE)
    limit = (run.gpus or GPUS) * PREFILL_PER_GPU if deepseek else PREFILL
    values = {"tokens": tokens, "ttft": ttft, "rate": tokens / ttft * 1e3}
    if values["rate"] > limit:
        yield broken(run, "prefix_cache", "suspect", "compute", **values)
    elif tpot and tokens >= LONG and ttft < OF_A_STEP * tpot and not run.parallelism.disaggregated:
        yield broken(run, "prefix_cache", "suspect", "step", steps=ttft / tpot, tpot=tpot, **values)


def layout(run: ServingRun) -> Iterator[Finding]:
    """Parallelism that cannot be, and a range of lengths whose shortest is its longest's multiple."""
    degrees = run.parallelism.model_dump(include={"tp", "pp", "dp", "ep"}, exclude_none=True)
    for name, degree in degrees.items():
        if degree < 1 or (run.gpus and degree > run.gpus):
            yield _impossible(name, degree, f"over {run.gpus} GPUs" if degree else "of anything")
    if run.gpus and run.nodes and run.gpus > LARGEST_NODE * run.nodes:
        yield _impossible("gpus", run.gpus, f"of {run.nodes} nodes")
    tp, ratio = run.parallelism.tp, run.workload.range_ratio
    if run.gpus and tp and tp < run.gpus and run.gpus % tp and not run.parallelism.disaggregated:
        yield _impossible("tp", tp, f"of {run.gpus} GPUs, which are no multiple of it")
    if ratio and ratio > 1:
        yield _impossible("range_ratio", ratio, "as the shortest length over the longest")


def accepted(run: ServingRun) -> Iterator[Finding]:
    """Tokens a step: one at least, and one without speculation."""
    length, flags = run.value("accept_length", "mean"), " ".join(run.flags)
    if length is not None and not 1 <= length <= MOST_ACCEPTED:
        yield _impossible("accept_length", length, "tokens a step")
    elif length is not None and length > 1 and flags and "speculative" not in flags:
        yield found("accept_length", "suspect", "no_speculation", accept_length=length)


def _impossible(name: str, value: float, what: str) -> Finding:
    return found("plausible", "wrong", "impossible", name=name, value=value, what=what)


RULES = (latencies, rates, prefill, layout, accepted)
