"""guidellm's `benchmarks.json`: one report with a benchmark for each rate or concurrency, each one run.

Read in vllm-project/guidellm, src/guidellm/benchmark/schemas and schemas/request_stats.py of 0.7.3, and
benchmark/benchmark.py of 0.3.1, and in files made by both. Each metric is a distribution for each status
(successful, incomplete, errored, total); read here: of successful requests. What the words mean there:

- `request_latency` is in seconds, the others in ms;
- `inter_token_latency_ms` is (last - first token) / (tokens - 1) of each request, what others call TPOT, its
  statistics weighted by tokens;
- `time_per_output_token_ms` is no TPOT: to 0.3.1 (last - first token) / tokens, from 0.4 on (last token -
  request's start) / tokens, so with the time to the first. Kept as `time_per_output_token`;
- `*_per_second` are statistics of a rate over time, not tokens / time (off by a quarter in a short run). Kept
  under their own names; `throughput` is derived from tokens and duration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.serving.clients.common import of_object
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, UnreadableError
from harness.serving.schema import Metric, OfferedLoad, RequestSamples, Scope, ServingRun, Tokens, Totals

NAME = "guidellm"
OWN = {"requests_per_second", "request_concurrency", "time_per_output_token_ms", "inter_token_latency_ms"}
STATUS = "successful"
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


def recognises(document: Document) -> bool:
    return document.kind == "json" and any(_is_one(row) for row in _benchmarks(document.content))


def runs(document: Document) -> list[ServingRun]:
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


def _distribution(
    numbers: Fields, key: str, name: str, unit: str, scope: Scope, tokens: Tokens, scale: float = 1.0
) -> list[Metric]:
    fields = numbers.inside(key).inside(STATUS)
    count = fields.number("count")
    if count == 0:
        return []  # statistics of no request are written as zeros
    metrics = of_object(fields, STATISTICS, name, unit, scale=scale, scope=scope, tokens=tokens)
    percentiles = fields.inside("percentiles")
    return metrics + of_object(percentiles, PERCENTILES, name, unit, scale=scale, scope=scope, tokens=tokens)


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
