"""guidellm's `benchmarks.json` and, as 0.8.1 writes it, `benchmarks.csv`: one report with a benchmark for
each rate or concurrency, each one run.

Read in vllm-project/guidellm, src/guidellm/benchmark/schemas and schemas/request_stats.py of 0.7.3,
benchmark/outputs/csv.py of 0.8.1, and benchmark/benchmark.py of 0.3.1, and in files made by all three. Each
metric is a distribution for each status; read here: of successful requests. What the words mean there:

- `request_latency` is in seconds, the others in ms;
- `inter_token_latency_ms` is (last - first token) / (tokens - 1) of each request, what others call TPOT, its
  statistics weighted by tokens;
- `time_per_output_token_ms` is no TPOT: to 0.3.1 (last - first token) / tokens, from 0.4 on (last token -
  request's start) / tokens, so with the time to the first;
- `*_per_second` are statistics of a rate over time, not tokens / time (off by a quarter in a short run). Kept
  under their own names; `throughput` is derived from tokens and duration.

The CSV has the same numbers under group, name and statistic, without sums: those are mean x count. Its rows
are read as the objects that the JSON has for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness.serving.clients.fields import Fields, real
from harness.serving.clients.files import Document, UnreadableError, objects
from harness.serving.clients.format import Draft, Format, Several, several
from harness.serving.schema import RequestSamples, Scope, Tokens

OWN = {"requests_per_second", "request_concurrency", "time_per_output_token_ms", "inter_token_latency_ms"}
STATUS = "successful"
LIMITED = ("concurrent", "throughput")  # strategies whose number is of requests in flight, and not a rate
EXACT = 1e-3
TOKEN, SERVER = "Token Throughput / Successful", "Server Throughput / Successful"
METRICS: dict[str, tuple[str, str, Scope, Tokens, str]] = {
    "time_to_first_token_ms": ("ttft", "ms", "request", "none", "Time to First Token / Successful ms"),
    "inter_token_latency_ms": ("tpot", "ms", "request", "none", "Inter Token Latency / Successful ms"),
    "request_latency": ("e2e", "ms", "request", "none", "Request Latency / Successful Sec"),
    "time_per_output_token_ms": ("time_per_output_token", "ms", "request", "none",
                                 "Time per Output Token / Successful ms"),
    "requests_per_second": ("requests_per_second", "req/s", "instance", "none", f"{SERVER} Requests/Sec"),
    "request_concurrency": ("concurrency", "1", "instance", "none", f"{SERVER} Concurrency"),
    "output_tokens_per_second": ("output_tokens_per_second", "tok/s", "instance", "output",
                                 f"{TOKEN} Output Tokens/Sec"),
    "prompt_tokens_per_second": ("prompt_tokens_per_second", "tok/s", "instance", "input",
                                 f"{TOKEN} Input Tokens/Sec"),
    "tokens_per_second": ("tokens_per_second", "tok/s", "instance", "total", f"{TOKEN} Total Tokens/Sec"),
    "prompt_token_count": ("input_len", "tokens", "request", "input",
                           "Token Metrics / Successful Input Tokens"),
    "output_token_count": ("output_len", "tokens", "request", "output",
                           "Token Metrics / Successful Output Tokens"),
}  # fmt: skip
"""Each metric with its name, unit, scope and tokens here, and its group in the CSV."""

STATISTICS = {"mean": "mean", "median": "median", "std_dev": "std", "min": "min", "max": "max"}
PERCENTILES = {
    "p001": "p0.1", "p01": "p1", "p05": "p5", "p10": "p10", "p25": "p25", "p75": "p75", "p90": "p90",
    "p95": "p95", "p99": "p99", "p999": "p99.9",
}  # fmt: skip
CSV_STATISTICS = {"Mean": "mean", "Median": "median", "Std Dev": "std_dev"}
IN_ORDER = ("min", "p001", "p01", "p05", "p10", "p25", "p75", "p90", "p95", "p99", "max")  # of `Percentiles`
CSV_TIMES = {"duration": "Duration", "warmup_duration": "Warmup", "cooldown_duration": "Cooldown"}
SAMPLED = ("prompt_tokens", "output_tokens", "time_to_first_token_ms", "request_latency")


def has_benchmarks(row: Mapping[str, Any]) -> bool:
    if {"Benchmark / Strategy", "Request Counts / Successful"} <= set(row):
        return True
    listed = row.get("benchmarks")
    objects = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    metrics = [one.get("metrics") for one in objects]
    return any(isinstance(one, Mapping) and len(OWN & set(one)) >= 2 for one in metrics)


def benchmarks(document: Document) -> list[Fields]:
    if document.kind == "csv":
        return [_of_csv(row) for row in objects(document)]
    metadata = document.content.get("metadata")
    version = metadata.get("guidellm_version") if isinstance(metadata, Mapping) else None
    more = {"guidellm_version": version} if isinstance(version, str) else {}
    rows = []
    for i, row in enumerate(document.content["benchmarks"]):
        if not isinstance(row, Mapping):
            raise UnreadableError(f"cannot read {document.path}: benchmarks[{i}] is no object")
        rows.append(Fields(f"{document.path}: benchmarks[{i}]", {**row, "more": more}))
    return rows


def _of_csv(row: Fields) -> Fields:
    """The row as the object that the JSON has; what has no place in it is under `more`."""
    statuses = (STATUS, "incomplete", "errored")
    counts = {status: row.number(f"Request Counts / {status.capitalize()}") for status in statuses}
    strategy, _, asked = row.text("Benchmark / Strategy").partition("@")
    level = Fields(row.where, {"Benchmark / Strategy": asked}, as_text=True, findings=row.findings)
    number = None if asked == "unlimited" else level.number("Benchmark / Strategy")
    backend = _parsed(row, "Run Info / Backend", dict) or {}
    metrics = {key: {STATUS: _of_group(row, key, group, counts[STATUS])}
               for key, (*_, group) in METRICS.items()}  # fmt: skip
    content = {own: row.number(f"Timings / {name} / Sec") for own, name in CSV_TIMES.items()} | {
        "config": {
            "strategy": {"type_": strategy, "streams" if strategy in LIMITED else "rate": number},
            "backend": {"model": backend.get("model")},
        },
        "metrics": {"request_totals": counts, **metrics},
    }
    return Fields(row.where, content | {"more": row.rest()}, findings=row.findings)


def _of_group(row: Fields, key: str, group: str, count: float | None) -> dict[str, Any]:
    known: dict[str, Any] = {own: row.number(f"{group} / {name}") for name, own in CSV_STATISTICS.items()}
    percentiles = _parsed(row, f"{group} / Percentiles", list) or []
    if percentiles and len(percentiles) != len(IN_ORDER):
        row.leave_out(f"{group} / Percentiles", f"has {len(percentiles)} entries, not {len(IN_ORDER)}")
        percentiles = []
    ranked = dict(zip(IN_ORDER, percentiles, strict=False))
    known |= {name: ranked.pop(name, None) for name in ("min", "max")} | {"percentiles": ranked}
    if count and known["mean"] is not None and key.endswith("_count"):
        known["total_sum"] = round(count * known["mean"])
    return known


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


def distributions_and_config(draft: Draft) -> None:
    row, load = draft.row, draft.load
    numbers = row.inside("metrics")
    numbers.take("text")  # the same again by words and characters
    counted = (numbers if "request_totals" in numbers.values else row).inside("request_totals")
    errored, incomplete = counted.count("errored"), counted.count("incomplete")
    draft.totals |= {"completed": counted.count(STATUS), "failed": errored}
    for side, key in (("input", "prompt_token_count"), ("output", "output_token_count")):
        draft.totals[f"{side}_tokens"] = numbers.inside(key).inside(STATUS).count("total_sum")
    _derived_rates(draft)
    for key, (name, unit, scope, tokens, _) in METRICS.items():
        _distribution(draft, numbers.inside(key).inside(STATUS), Several(key, name, unit, tokens, scope))
    # `config` is of 0.4 and later; before it there were `args`, `worker` and `request_loader`.
    config = row.inside("config" if "config" in row.values else "args")
    strategy = config.inside("strategy")
    kind = strategy.text("type_")
    backend = config.inside("backend") if "backend" in config.values else row.inside("worker")
    draft.about["model"] = backend.text("model") or backend.text("backend_model")
    streams = strategy.number("streams" if "streams" in strategy.values else "max_concurrency")
    load["concurrency"] = 1.0 if kind == "synchronous" else streams
    load["request_rate"] = 0.0 if kind == "throughput" else None
    if "rate" in strategy.values:
        load["request_rate"] = strategy.number("rate")
    draft.samples, draft.extra = _samples(row), row.take("more")
    draft.notes += [
        "`inter_token_latency_ms` is each request's mean after its first token: here `tpot`; "
        "`time_per_output_token` divides by all tokens and is another quantity",
        "of successful requests only",
    ]
    if errored or incomplete:
        draft.notes[1] += f"; {incomplete or 0} incomplete and {errored or 0} errored are in no number"


def _distribution(draft: Draft, fields: Fields, of: Several) -> None:
    count = fields.number("count")
    if count == 0:
        return  # statistics of no request are written as zeros
    scale = 1e3 if of.path == "request_latency" else 1.0
    draft.metrics += several(fields, STATISTICS, of, scale)
    draft.metrics += several(fields.inside("percentiles"), PERCENTILES, of, scale)
    mean, total = (real(fields.values.get(key)) for key in ("mean", "total_sum"))
    if of.scope != "request" or not count or mean is None or total is None:
        return
    if abs(mean * count - total) > EXACT * abs(total) + 0.5:  # of all requests, or of all their tokens
        message = f"{fields.where}: {count:g} of a mean of {mean:g} are no {total:g}, which total_sum is"
        draft.row.find("samples", "wrong", message)


def _derived_rates(draft: Draft) -> None:
    totals, duration = draft.totals, draft.totals["duration_s"]
    into, out = totals["input_tokens"], totals["output_tokens"]
    both = None if into is None or out is None else into + out
    for kind, count in (("output", out), ("input", into), ("total", both)) if duration else ():
        how = f"{kind} tokens of successful requests / duration"
        draft.add(
            "throughput", None if count is None else count / duration, "tok/s", tokens=kind, derived=how
        )
    if duration and totals["completed"] is not None:
        how = "successful requests / duration"
        draft.add("request_throughput", totals["completed"] / duration, "req/s", derived=how)


def _samples(row: Fields) -> RequestSamples:
    """Of the successful requests that the report kept; empty lists where one of them lacks the number."""
    kept = row.take("requests")
    requests = kept.get(STATUS) if isinstance(kept, Mapping) else None
    if not isinstance(requests, list) or not all(isinstance(request, Mapping) for request in requests):
        return RequestSamples()
    whole = [key for key in SAMPLED if all(key in request for request in requests)]
    lists = {key: [request[key] for request in requests] for key in whole}
    columns = Fields(f"{row.where}: requests", lists, findings=row.findings)
    return RequestSamples(
        input_lens=columns.counts("prompt_tokens"),
        output_lens=columns.counts("output_tokens"),
        ttfts_ms=columns.numbers("time_to_first_token_ms"),
        e2es_ms=columns.numbers("request_latency", scale=1e3),
    )


FORMATS = (
    Format(
        name="guidellm", is_one=has_benchmarks, rows=benchmarks, fixed={"mode": "online"},
        load={"warmup_s": "warmup_duration", "cooldown_s": "cooldown_duration"},
        totals={"duration_s": "duration"}, odd=distributions_and_config, wanted=("metrics",),
    ),
)  # fmt: skip
