"""guidellm's `benchmarks.json` and, as 0.8.1 writes it, `benchmarks.csv`: one report with a benchmark for
each rate or concurrency, each one run.

Read in vllm-project/guidellm, src/guidellm/benchmark/schemas and schemas/request_stats.py of 0.7.3,
benchmark/outputs/csv.py of 0.8.1, and benchmark/benchmark.py of 0.3.1, and in files made by all three. Each
metric is a distribution for each status (successful, incomplete, errored, total); read here: of successful
requests. What the words mean there:

- `request_latency` is in seconds, the others in ms;
- `inter_token_latency_ms` is (last - first token) / (tokens - 1) of each request, what others call TPOT, its
  statistics weighted by tokens;
- `time_per_output_token_ms` is no TPOT: to 0.3.1 (last - first token) / tokens, from 0.4 on (last token -
  request's start) / tokens, so with the time to the first. Kept as `time_per_output_token`;
- `*_per_second` are statistics of a rate over time, not tokens / time (off by a quarter in a short run). Kept
  under their own names; `throughput` is derived from tokens and duration.

The CSV has the same numbers under group, name and statistic, without sums: those are mean x count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.serving.clients.common import of_object
from harness.serving.clients.fields import Fields, real
from harness.serving.clients.files import Document, UnreadableError
from harness.serving.integrity.common import EXACT
from harness.serving.schema import (
    Finding,
    Metric,
    OfferedLoad,
    RequestSamples,
    Scope,
    ServingRun,
    Tokens,
    Totals,
)

NAME = "guidellm"
OWN = {"requests_per_second", "request_concurrency", "time_per_output_token_ms", "inter_token_latency_ms"}
STATUS = "successful"
STATUSES = (STATUS, "incomplete", "errored")
LIMITED = ("concurrent", "throughput")  # strategies whose number is of requests in flight, and not a rate
LATENCIES = {
    "time_to_first_token_ms": ("ttft", 1.0),
    "inter_token_latency_ms": ("tpot", 1.0),
    "request_latency": ("e2e", 1e3),
    "time_per_output_token_ms": ("time_per_output_token", 1.0),
}
OTHERS: dict[str, tuple[str, str, Scope, Tokens]] = {
    "requests_per_second": ("requests_per_second", "req/s", "instance", "none"),
    "request_concurrency": ("concurrency", "1", "instance", "none"),
    "output_tokens_per_second": ("output_tokens_per_second", "tok/s", "instance", "output"),
    "prompt_tokens_per_second": ("prompt_tokens_per_second", "tok/s", "instance", "input"),
    "tokens_per_second": ("tokens_per_second", "tok/s", "instance", "total"),
    "prompt_token_count": ("input_len", "tokens", "request", "input"),
    "output_token_count": ("output_len", "tokens", "request", "output"),
}
STATISTICS = {"mean": "mean", "median": "median", "std_dev": "std", "min": "min", "max": "max"}
PERCENTILES = {
    "p001": "p0.1", "p01": "p1", "p05": "p5", "p10": "p10", "p25": "p25", "p75": "p75", "p90": "p90",
    "p95": "p95", "p99": "p99", "p999": "p99.9",
}  # fmt: skip


OF_CSV = {
    "Time to First Token / Successful ms": "time_to_first_token_ms",
    "Inter Token Latency / Successful ms": "inter_token_latency_ms",
    "Request Latency / Successful Sec": "request_latency",
    "Time per Output Token / Successful ms": "time_per_output_token_ms",
    "Server Throughput / Successful Requests/Sec": "requests_per_second",
    "Server Throughput / Successful Concurrency": "request_concurrency",
    "Token Throughput / Successful Output Tokens/Sec": "output_tokens_per_second",
    "Token Throughput / Successful Input Tokens/Sec": "prompt_tokens_per_second",
    "Token Throughput / Successful Total Tokens/Sec": "tokens_per_second",
    "Token Metrics / Successful Input Tokens": "prompt_token_count",
    "Token Metrics / Successful Output Tokens": "output_token_count",
}
CSV_STATISTICS = {"Mean": "mean", "Median": "median", "Std Dev": "std_dev"}
IN_ORDER = ("min", "p001", "p01", "p05", "p10", "p25", "p75", "p90", "p95", "p99", "max")  # of `Percentiles`
CSV_TIMES = {"Duration": "duration", "Warmup": "warmup_duration", "Cooldown": "cooldown_duration"}


def recognises(document: Document) -> bool:
    if document.kind == "csv":
        return {"Benchmark / Strategy", "Request Counts / Successful"} <= set(document.header)
    return document.kind == "json" and any(_is_one(row) for row in _benchmarks(document.content))


def runs(document: Document) -> list[ServingRun]:
    if document.kind == "csv":
        return [
            _of_csv(Fields(f"{document.path}:{line}", row, as_text=True)) for line, row in document.content
        ]
    rows = _benchmarks(document.content)
    bad = next((i for i, row in enumerate(rows) if not isinstance(row, Mapping)), None)
    if bad is not None:
        raise UnreadableError(f"cannot read {document.path}: benchmarks[{bad}] is no object")
    metadata = document.content.get("metadata")
    version = metadata.get("guidellm_version") if isinstance(metadata, Mapping) else None
    return [_run(Fields(f"{document.path}: benchmarks[{i}]", row), version) for i, row in enumerate(rows)]


def _benchmarks(content: Any) -> list[Any]:
    rows = content.get("benchmarks") if isinstance(content, Mapping) else None
    return rows if isinstance(rows, list) else []


def _is_one(row: Any) -> bool:
    metrics = row.get("metrics") if isinstance(row, Mapping) else None
    return isinstance(metrics, Mapping) and len(OWN & set(metrics)) >= 2


def _run(row: Fields, version: Any) -> ServingRun:
    numbers = row.inside("metrics")
    numbers.take("text")  # the same again by words and characters
    counted = (numbers if "request_totals" in numbers.values else row).inside("request_totals")
    errored, incomplete = counted.count("errored"), counted.count("incomplete")
    totals = Totals(
        duration_s=row.number("duration"),
        completed=counted.count(STATUS),
        failed=errored,
        input_tokens=_sum(numbers, "prompt_token_count"),
        output_tokens=_sum(numbers, "output_token_count"),
    )
    metrics = _derived(totals)
    for key, (name, scale) in LATENCIES.items():
        metrics += _distribution(numbers, key, name, "ms", "request", "none", scale)
    for key, (name, unit, scope, tokens) in OTHERS.items():
        metrics += _distribution(numbers, key, name, unit, scope, tokens)
    model, workload = _asked(row)
    samples = _samples(row)
    return ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        model=model,
        mode="online",
        workload=workload,
        totals=totals,
        metrics=tuple(metrics),
        samples=samples,
        extra=row.rest() | ({"guidellm_version": version} if isinstance(version, str) else {}),
        notes=tuple(_notes(errored, incomplete)),
        findings=tuple(row.findings),
    )


def _of_csv(row: Fields) -> ServingRun:
    """The run of a CSV's row, by way of the objects that the JSON has for it."""
    totals = {status: row.number(f"Request Counts / {status.capitalize()}") for status in STATUSES}
    strategy, _, asked = row.text("Benchmark / Strategy").partition("@")
    level = Fields(row.where, {"Benchmark / Strategy": asked}, as_text=True, findings=row.findings)
    backend = _parsed(row, "Run Info / Backend", dict) or {}
    content: dict[str, Any] = {own: row.number(f"Timings / {name} / Sec") for name, own in CSV_TIMES.items()}
    content["config"] = {
        "strategy": {
            "type_": strategy,
            "streams" if strategy in LIMITED else "rate": None
            if asked == "unlimited"
            else level.number("Benchmark / Strategy"),
        },
        "backend": {"model": backend.get("model")},
    }
    content["metrics"] = {"request_totals": totals} | {
        key: {STATUS: _csv_distribution(row, group, totals[STATUS])} for group, key in OF_CSV.items()
    }
    run = _run(Fields(row.where, content, findings=row.findings), None)
    return run.model_copy(update={"extra": row.rest()})


def _csv_distribution(row: Fields, group: str, count: float | None) -> dict[str, Any]:
    statistics: dict[str, Any] = {
        own: row.number(f"{group} / {name}") for name, own in CSV_STATISTICS.items()
    }
    percentiles = _parsed(row, f"{group} / Percentiles", list) or []
    if percentiles and len(percentiles) != len(IN_ORDER):
        row.leave_out(f"{group} / Percentiles", f"has {len(percentiles)} entries, not {len(IN_ORDER)}")
        percentiles = []
    statistics["percentiles"] = dict(zip(IN_ORDER, percentiles, strict=False))
    statistics |= {name: statistics["percentiles"].pop(name, None) for name in ("min", "max")}
    if count and statistics["mean"] is not None:
        statistics["total_sum"] = round(count * statistics["mean"])
    return statistics


def _parsed(row: Fields, key: str, kind: type) -> Any:
    """The JSON in a cell; None where it is empty, or no such value (then with a finding)."""
    raw = row.text(key)
    try:
        value = json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        value = raw
    if value is None or isinstance(value, kind):
        return value
    row.leave_out(key, f"is no {kind.__name__} in JSON")
    return None


def _distribution(
    numbers: Fields, key: str, name: str, unit: str, scope: Scope, tokens: Tokens, scale: float = 1.0
) -> list[Metric]:
    fields = numbers.inside(key).inside(STATUS)
    count = fields.number("count")
    if count == 0:
        return []  # statistics of no request are written as zeros
    metrics = of_object(fields, STATISTICS, name, unit, scale=scale, scope=scope, tokens=tokens)
    if scope == "request":
        _examine_sum(fields, count)
    percentiles = fields.inside("percentiles")
    return metrics + of_object(percentiles, PERCENTILES, name, unit, scale=scale, scope=scope, tokens=tokens)


def _examine_sum(fields: Fields, count: float | None) -> None:
    """Of all requests, or of all their tokens: what a mean is of."""
    mean, total = (real(fields.values.get(key)) for key in ("mean", "total_sum"))
    if not count or mean is None or total is None:
        return
    if abs(mean * count - total) > EXACT * abs(total) + 0.5:
        message = f"{fields.where}: {count:g} of a mean of {mean:g} are no {total:g}, which total_sum is"
        fields.findings.append(Finding(rule="samples", severity="wrong", message=message))


def _sum(numbers: Fields, key: str) -> int | None:
    return numbers.inside(key).inside(STATUS).count("total_sum")


def _derived(totals: Totals) -> list[Metric]:
    if not totals.duration_s:
        return []
    into, out = totals.input_tokens, totals.output_tokens
    tokens: dict[Tokens, int | None] = {"output": out, "input": into}
    if into is not None and out is not None:
        tokens["total"] = into + out
    metrics = [
        Metric(name="throughput", value=number / totals.duration_s, unit="tok/s", scope="instance",
               tokens=kind, derived=f"{kind} tokens of successful requests / duration")
        for kind, number in tokens.items()
        if number is not None
    ]  # fmt: skip
    if totals.completed is not None:
        value, how = totals.completed / totals.duration_s, "successful requests / duration"
        metrics.append(
            Metric(name="request_throughput", value=value, unit="req/s", scope="instance", derived=how)
        )
    return metrics


def _asked(row: Fields) -> tuple[str, OfferedLoad]:
    """Of `config` (0.4 and later) or `args`, `worker` and `request_loader` (to 0.3.1)."""
    config = row.inside("config") if "config" in row.values else row.inside("args")
    strategy = config.inside("strategy")
    kind = strategy.text("type_")
    streams = (
        strategy.number("streams") if "streams" in strategy.values else strategy.number("max_concurrency")
    )
    backend = config.inside("backend") if "backend" in config.values else row.inside("worker")
    model = backend.text("model") or backend.text("backend_model")
    return model, OfferedLoad(
        concurrency=1.0 if kind == "synchronous" else streams,
        request_rate=strategy.number("rate")
        if "rate" in strategy.values
        else 0.0
        if kind == "throughput"
        else None,
        warmup_s=row.number("warmup_duration"),
        cooldown_s=row.number("cooldown_duration"),
    )


def _samples(row: Fields) -> RequestSamples:
    """Of the successful requests that the report kept; empty lists where one of them lacks the number."""
    kept = row.take("requests")
    requests = kept.get(STATUS) if isinstance(kept, Mapping) else None
    if not isinstance(requests, list) or not all(isinstance(request, Mapping) for request in requests):
        return RequestSamples()
    columns = Fields(
        f"{row.where}: requests",
        {
            key: [request.get(key) for request in requests]
            for key in SAMPLED
            if all(key in request for request in requests)
        },
        findings=row.findings,
    )
    return RequestSamples(
        input_lens=columns.counts("prompt_tokens"),
        output_lens=columns.counts("output_tokens"),
        ttfts_ms=columns.numbers("time_to_first_token_ms"),
        e2es_ms=columns.numbers("request_latency", scale=1e3),
    )


SAMPLED = ("prompt_tokens", "output_tokens", "time_to_first_token_ms", "request_latency")


def _notes(errored: int | None, incomplete: int | None) -> list[str]:
    notes = [
        "`inter_token_latency_ms` is each request's mean after its first token: here `tpot`; "
        "`time_per_output_token` divides by all tokens and is another quantity",
        "of successful requests only",
    ]
    if errored or incomplete:
        notes[1] += f"; {incomplete or 0} incomplete and {errored or 0} errored are in no number"
    return notes
