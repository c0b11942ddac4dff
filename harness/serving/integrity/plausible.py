"""Plausibility of one run: values that no engine reaches, and what a file should say and does not."""

from __future__ import annotations

from collections.abc import Iterator

from harness.serving.integrity.common import WAITS
from harness.serving.schema import Finding, ServingRun

# Bounds, not estimates: beyond any measurement known to this project by more than ten times.
FASTEST_STEP_MS = 0.1  # a decode step, or a first token, over a network stack in Python
LONGEST_MS = 86_400_000.0  # a day
PER_GPU = 1e6  # tok/s, of any kind, prefix cache or not
ALL = 1e8  # tok/s, of any cluster
EXPECTED = ("duration", "completed", "output_tokens")


def latencies(run: ServingRun) -> Iterator[Finding]:
    """Too short or too long to be what they are called, in ms."""
    for metric in run.metrics:
        if metric.unit != "ms" or metric.statistic == "std" or metric.name in WAITS:
            continue
        least = FASTEST_STEP_MS if metric.statistic in ("mean", "p99", "max") else 0.0
        if 0 < metric.value < least or metric.value > LONGEST_MS:
            yield Finding(
                rule="plausible",
                severity="suspect",
                message=f"{metric.name} {metric.statistic} {metric.value:g} ms is "
                + ("too short to be one" if metric.value < least else "longer than a day")
                + "; other units?",
                numbers={metric.name: metric.value},
            )


def rates(run: ServingRun) -> Iterator[Finding]:
    """Throughputs beyond any hardware."""
    for metric in run.metrics:
        if metric.unit != "tok/s":
            continue
        gpus = 1 if metric.scope == "gpu" else run.gpus
        limit = PER_GPU * gpus if gpus else ALL
        if metric.value > limit:
            yield Finding(
                rule="plausible",
                severity="suspect",
                message=f"{metric.tokens} throughput {metric.value:g} tok/s is beyond {gpus or 'all'} GPUs; "
                "other units?",
                numbers={"throughput": metric.value},
            )


def layout(run: ServingRun) -> Iterator[Finding]:
    """Parallelism that cannot be, and a range of lengths whose shortest is its longest's multiple."""
    degrees = run.parallelism.model_dump(include={"tp", "pp", "dp", "ep"}, exclude_none=True)
    for name, degree in degrees.items():
        if degree < 1 or (run.gpus and degree > run.gpus):
            yield _impossible(name, degree, f"over {run.gpus} GPUs" if degree else "of anything")
    tp = run.parallelism.tp
    if run.gpus and tp and tp < run.gpus and run.gpus % tp and not run.parallelism.disaggregated:
        yield _impossible("tp", tp, f"of {run.gpus} GPUs, which are no multiple of it")
    if (run.workload.range_ratio or 0) > 1:
        ratio = run.workload.range_ratio or 0.0
        yield _impossible("range_ratio", ratio, "as the shortest length over the longest")


def accepted(run: ServingRun) -> Iterator[Finding]:
    """Tokens a step: one at least, and one without speculation."""
    length, flags = run.value("accept_length", "mean"), " ".join(run.flags)
    if length is None:
        return
    if length < 1:
        yield _impossible("accept_length", length, "tokens a step")
    elif length > 1 and flags and "speculative" not in flags:
        yield Finding(
            rule="accept_length",
            severity="suspect",
            message=f"accept_length is {length:g}, though the server's flags name no speculation",
            numbers={"accept_length": length},
        )


def _impossible(name: str, value: float, what: str) -> Finding:
    message = f"{name} is {value:g}, which cannot be {what}"
    return Finding(rule="plausible", severity="wrong", message=message, numbers={name: value})


def unsaid(run: ServingRun) -> Iterator[Finding]:
    """What the tests above needed and the file does not say."""
    totals = run.totals
    values = (totals.duration_s, totals.completed, totals.output_tokens)
    lacking = [name for name, value in zip(EXPECTED, values, strict=True) if value is None]
    if lacking and any(metric.name.endswith("throughput") for metric in run.metrics):
        yield Finding(
            rule="unsaid",
            severity="note",
            message=f"the file has no {', '.join(lacking)}: its throughput cannot be checked",
        )


RULES = (latencies, rates, layout, accepted, unsaid)
