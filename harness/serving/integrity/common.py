"""Tolerances of the rules: how far apart numbers may be, and when an equation need not hold."""

from __future__ import annotations

import functools
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from harness.files import read_toml
from harness.serving.schema import Finding, Metric, ServingRun, Severity, first

EXACT = 1e-3  # relative: of numbers that one program computed from the same numbers
MARGIN = 0.01  # relative: by which two clocks of one run may differ
FASTEST_STEP_MS = 0.1  # a decode step, or a first token, with a client in Python: a bound, not an estimate
WAITS = ("client_queue_time", "schedule_delay")  # of the client: almost nothing, or long in bursts
LIKE = 0.02  # relative: how near a factor is to a round one that is named


def rounding(*values: float) -> float:
    """Half of the last decimal place with which any of the values was written."""
    places = (-int(Decimal(f"{value:.12g}").as_tuple().exponent) for value in values if value)
    return 0.5 * 10.0 ** -max(0, *places, 0)


def apart(stated: float, expected: float, *inputs: float) -> float:
    """How far they differ relative to `expected`, beyond what rounding of `stated` and `inputs` explains."""
    if expected == 0:
        return 0.0 if stated == 0 else float("inf")
    allowed = rounding(stated) / abs(expected) + sum(rounding(n) / abs(n) for n in inputs if n)
    return max(0.0, abs(stated / expected - 1) - allowed)


@functools.cache
def _texts() -> dict[str, dict[str, str]]:
    return read_toml(Path(__file__).with_name("texts.toml"))


def found(rule: str, severity: Severity, text: str, **values: Any) -> Finding:
    """A finding of a rule, with one of its texts (texts.toml) and these values."""
    message = _texts()[rule][text].format(**values)
    message = re.sub(r"\b\d(\.\d+)?e\+\d\d\b", lambda number: f"{float(number[0]):.0f}", message)
    return Finding(rule=rule, severity=severity, message=message)


def broken(run: ServingRun, rule: str, severity: Severity, text: str, **values: Any) -> Finding:
    """A finding about a sum over the run. If the client leaves out a warm-up or cool-down, its numbers are of
    a window, and the sum need not hold. Then the finding is only a note with that reason."""
    finding = found(rule, severity, text, **values)
    ends = ((run.workload.warmup_s, "warm-up"), (run.workload.cooldown_s, "cool-down"))
    cut = " and ".join(f"{seconds:g} s of {name}" for seconds, name in ends if seconds)
    if not cut:
        return finding
    message = f"{finding.message}; the client leaves {cut} out, so its numbers are of a window"
    return finding.model_copy(update={"severity": "note", "message": message})


def hint(run: ServingRun, ratio: float) -> str:
    """What a factor between two numbers that should be equal suggests."""
    either = max(ratio, 1 / ratio) if ratio > 0 else 0.0
    known = {
        1000.0: "a thousand: s for ms, or k for one?",
        1e6: "a million: s for us?",
        float(run.gpus or 0): "the number of GPUs: of one GPU for all?",
        float(run.nodes or 0): "the number of nodes: of one node for all?",
    }
    near = (text for factor, text in known.items() if factor > 1 and abs(either / factor - 1) < LIKE)
    return next((f" (off by {text})" for text in near), "")


def whole(run: ServingRun, metric: Metric | None) -> float | None:
    """A throughput of the whole engine; None if its scope does not tell by what it was divided."""
    parallel = run.parallelism
    counts = {
        "gpu": run.gpus, "node": run.nodes, "prefill_gpu": parallel.prefill_gpus,
        "decode_gpu": parallel.decode_gpus, "instance": 1, "cluster": 1,
    }  # fmt: skip
    count = counts.get(metric.scope) if metric is not None else None
    return metric.value * count if metric is not None and count else None


def output_length(run: ServingRun) -> float | None:
    """Mean output tokens of a request: as counted, else as asked for, else from the rates."""
    if run.totals.output_tokens and run.totals.completed:
        return run.totals.output_tokens / run.totals.completed
    if run.workload.output_len is not None:
        return run.workload.output_len
    requests = run.metric("request_throughput")
    tokens = requests and run.value("throughput", "total", "output", requests.scope)
    if requests is None or not isinstance(tokens, float) or requests.derived or not requests.value:
        return None
    return tokens / requests.value


def equal_lengths(run: ServingRun) -> bool:
    """Whether all requests had the same output length: by their list, or because the mean is exactly the
    whole number that was asked for, which different lengths give only by chance."""
    lengths, totals, asked = run.samples.output_lens, run.totals, run.workload.output_len or 0
    if lengths:
        return min(lengths) == max(lengths)
    if not totals.output_tokens or not totals.completed:
        return False
    whole_number = asked == int(asked)  # trtllm-bench reports the mean of its data set
    return totals.completed == 1 or (whole_number and totals.output_tokens == totals.completed * asked)


def stated(run: ServingRun, name: str, statistic: str) -> float | None:
    """A latency in ms as the client reported it, and not as it follows from others."""
    reported = (metric for metric in run.metrics if not metric.derived)
    metric = first(reported, name=name, statistic=statistic, unit="ms")
    return metric.value if metric else None
