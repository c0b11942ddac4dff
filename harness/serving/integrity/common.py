"""Tolerances of the rules: how far apart two numbers may be as written, when an equation need not hold."""

from __future__ import annotations

from decimal import Decimal

from harness.serving.schema import Finding, Metric, ServingRun, Severity

EXACT = 1e-3  # relative: what clients compute in one program from the same numbers
MARGIN = 0.01  # relative: what two clocks of one run may differ by
FASTEST_STEP_MS = 0.1  # a decode step, or a first token, over a network stack in Python: a bound, no estimate
WAITS = ("client_queue_time", "schedule_delay")  # of the client's: as short as nothing, or by turns long
LIKE = 0.02  # relative: near enough to a round factor to name it


def rounding(*values: float) -> float:
    """Half of the last decimal place that any of the values was written with."""
    places = (-int(Decimal(f"{value:.12g}").as_tuple().exponent) for value in values if value)
    return 0.5 * 10.0 ** -max(0, *places, 0)


def apart(stated: float, expected: float, *inputs: float) -> float:
    """By how much, relative to `expected`, the two differ beyond what rounding of `stated` and of each of
    `inputs` explains."""
    if expected == 0:
        return 0.0 if stated == 0 else float("inf")
    allowed = rounding(stated) / abs(expected) + sum(
        rounding(number) / abs(number) for number in inputs if number
    )
    return max(0.0, abs(stated / expected - 1) - allowed)


def window(run: ServingRun) -> str:
    """Why sums over the run need not be sums over its numbers; empty where the client kept all of it."""
    cut = [
        f"{seconds:g} s of {name}"
        for seconds, name in ((run.workload.warmup_s, "warm-up"), (run.workload.cooldown_s, "cool-down"))
        if seconds
    ]
    return f"the client leaves {' and '.join(cut)} out, so its numbers are of a window" if cut else ""


def found(rule: str, severity: Severity, message: str, **numbers: float) -> Finding:
    return Finding(rule=rule, severity=severity, message=message, numbers=numbers)


def broken(run: ServingRun, rule: str, severity: Severity, message: str, **numbers: float) -> Finding:
    """A finding; of a trimmed window it is only a note, with that reason."""
    if reason := window(run):
        return found(rule, "note", f"{message}; {reason}", **numbers)
    return found(rule, severity, message, **numbers)


def hint(run: ServingRun, ratio: float) -> str:
    """What a factor between two numbers that should be equal looks like."""
    either = max(ratio, 1 / ratio) if ratio > 0 else 0.0
    known = {
        1000.0: "a thousand: s for ms, or k for one?",
        1e6: "a million: s for us?",
        float(run.gpus or 0): "the number of GPUs: of one GPU for all?",
        float(run.nodes or 0): "the number of nodes: of one node for all?",
    }
    for factor, meaning in known.items():
        if factor > 1 and abs(either / factor - 1) < LIKE:
            return f" (off by {meaning})"
    return ""


def whole(run: ServingRun, metric: Metric) -> float | None:
    """A throughput of the whole engine; None where its scope does not say over what it was divided."""
    parallel = run.parallelism
    counts = {
        "gpu": run.gpus,
        "node": run.nodes,
        "prefill_gpu": parallel.prefill_gpus,
        "decode_gpu": parallel.decode_gpus,
        "instance": 1,
        "cluster": 1,
    }
    count = counts.get(metric.scope)
    return metric.value * count if count else None


def output_length(run: ServingRun) -> float | None:
    """Mean output tokens of a request: as counted, else as asked for, else as the rates have it."""
    if run.totals.output_tokens and run.totals.completed:
        return run.totals.output_tokens / run.totals.completed
    if run.workload.output_len is not None:
        return run.workload.output_len
    requests = run.metric("request_throughput")
    tokens = requests and run.metric("throughput", "total", "output", requests.scope)
    if requests is None or not tokens or requests.derived or not requests.value:
        return None
    return tokens.value / requests.value


def equal_lengths(run: ServingRun) -> bool:
    """Whether all requests had the same output length: by the list of them, or since their mean is exactly
    what was asked for, a whole number, which a mean of different ones would be by chance only."""
    lengths = run.samples.output_lens
    if lengths:
        return min(lengths) == max(lengths)
    totals, asked = run.totals, run.workload.output_len or 0
    if not totals.output_tokens or not totals.completed:
        return False
    whole_number = asked == int(asked)  # trtllm-bench tells the mean of its data set
    return totals.completed == 1 or (whole_number and totals.output_tokens == totals.completed * asked)


def stated(run: ServingRun, name: str, statistic: str) -> float | None:
    """A latency in ms as the client reported it, not as it follows from others."""
    for metric in run.metrics:
        if (
            metric.name == name
            and metric.statistic == statistic
            and metric.unit == "ms"
            and not metric.derived
        ):
            return metric.value
    return None
