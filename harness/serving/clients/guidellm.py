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
METRICS: dict[str, tuple[str, str, Scope, Tokens, str]] = {
    "time_to_first_token_ms": ("ttft", "ms", "request", "none", "Time to First Token / Successful ms"),
    "inter_token_latency_ms": ("tpot", "ms", "request", "none", "Inter Token Latency / Successful ms"),
    "request_latency": ("e2e", "ms", "request", "none", "Request Latency / Successful Sec"),
    "time_per_output_token_ms":
        ("time_per_output_token", "ms", "request", "none", "Time per Output Token / Successful ms"),
    "requests_per_second":
        ("requests_per_second", "req/s", "instance", "none", "Server Throughput / Successful Requests/Sec"),
    "request_concurrency": ("concurrency", "1", "instance", "none", "Server Throughput / Successful Concurrency"),
    "output_tokens_per_second":
        ("output_tokens_per_second", "tok/s", "instance", "output",
         "Token Throughput / Successful Output Tokens/Sec"),
    "prompt_tokens_per_second":
        ("prompt_tokens_per_second", "tok/s", "instance", "input",
         "Token Throughput / Successful Input Tokens/Sec"),
    "tokens_per_second":
        ("tokens_per_second", "tok/s", "instance", "total", "Token Throughput / Successful Total Tokens/Sec"),
    "prompt_token_count": ("input_len", "tokens", "request", "input", "Token Metrics / Successful Input Tokens"),
    "output_token_count": ("output_len", "tokens", "request", "output", "Token Metrics / Successful Output Tokens"),
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
    metrics = (
        [one.get("metrics") for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    )
    return any(isinstance(one, Mapping) and len(OWN & set(one)) >= 2 for one in metrics)


def benchmarks(document: Document) -> list[Fields]:
    if document.kind == "csv":
        return [_of_csv(row) for row in objects(document)]
    rows, path = document.content["benchmarks"], document.path
    bad = next((i for i, row in enumerate(rows) if not isinstance(row, Mapping)), None)
    if bad is not None:
        raise UnreadableError(f"cannot read {path}: benchmarks[{bad}] is no object")
    metadata = document.content.get("metadata")
    version = metadata.get("guidellm_version") if isinstance(metadata, Mapping) else None
    more = {"guidellm_version": version} if isinstance(version, str) else {}
    return [Fields(f"{path}: benchmarks[{i}]", {**row, "more": more}) for i, row in enumerate(rows)]


def _of_csv(row: Fields) -> Fields:
    """The row as the object that the JSON has; what has no place in it stays in `rest`."""
    counts = {status: row.number(f"Request Counts / {status.capitalize()}")
              for status in (STATUS, "incomplete", "errored")}  # fmt: skip
    strategy, _, asked = row.text("Benchmark / Strategy").partition("@")
    level = Fields(row.where, {"Benchmark / Strategy": asked}, as_text=True, findings=row.findings)
    number = None if asked == "unlimited" else level.number("Benchmark / Strategy")
    backend = _parsed(row, "Run Info / Backend", dict) or {}
    content: dict[str, Any] = {own: row.number(f"Timings / {name} / Sec") for own, name in CSV_TIMES.items()}
    content["config"] = {
        "strategy": {"type_": strategy, "streams" if strategy in LIMITED else "rate": number},
        "backend": {"model": backend.get("model")},
    }
    groups = {key: group for key, (*_, group) in METRICS.items()}
    content["metrics"] = {"request_totals": counts} | {
        key: {STATUS: _csv_distribution(row, group, counts[STATUS])} for key, group in groups.items()
    }
    return Fields(row.where, content | {"more": row.rest()}, findings=row.findings)


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
    if count and statistics["mean"] is not None and group.startswith("Token Metrics"):
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


def distributions_and_config(draft: Draft) -> None:
    row, load = draft.row, draft.load
    numbers = row.inside("metrics")
    numbers.take("text")  # the same again by words and characters
    counted = (numbers if "request_totals" in numbers.values else row).inside("request_totals")
    errored, incomplete = counted.count("errored"), counted.count("incomplete")
    totals = {
        "duration_s": row.number("duration"), "completed": counted.count(STATUS), "failed": errored,
        "input_tokens": numbers.inside("prompt_token_count").inside(STATUS).count("total_sum"),
        "output_tokens": numbers.inside("output_token_count").inside(STATUS).count("total_sum"),
    }  # fmt: skip
    draft.totals = totals
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
    draft.samples = _samples(row)
    draft.extra = row.take("more")
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
    mean, total = (real(fields.values.get(key)) for key in ("mean", "total_sum"))
    # Of all requests, or of all their tokens: what a mean is of.
    if of.scope == "request" and count and mean is not None and total is not None:
        if abs(mean * count - total) > EXACT * abs(total) + 0.5:
            draft.row.find("samples", "wrong", f"{fields.where}: {count:g} of a mean of {mean:g} are no "
                           f"{total:g}, which total_sum is")  # fmt: skip
    draft.metrics += several(fields.inside("percentiles"), PERCENTILES, of, scale)


def _derived_rates(draft: Draft) -> None:
    duration, completed, into, out = (
        draft.totals[name] for name in ("duration_s", "completed", "input_tokens", "output_tokens")
    )
    if not duration:
        return
    both = None if into is None or out is None else into + out
    for kind, count in (("output", out), ("input", into), ("total", both)):
        how = f"{kind} tokens of successful requests / duration"
        draft.add(
            "throughput", None if count is None else count / duration, "tok/s", tokens=kind, derived=how
        )
    rate = None if completed is None else completed / duration
    draft.add("request_throughput", rate, "req/s", derived="successful requests / duration")


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
        odd=distributions_and_config, wanted=("metrics",),
    ),
)  # fmt: skip
