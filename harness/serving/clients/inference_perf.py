"""inference-perf's `stage_N_lifecycle_metrics.json` (one load) and `summary_lifecycle_metrics.json` (all
stages together): one run each.

Read in kubernetes-sigs/inference-perf, inference_perf/reportgen/base.py of 0.7.0, and in files of 2025. Times
are in s, of successful requests. What the words mean there:

- `time_per_output_token` is (last - first token) / (tokens - 1) of each request, and `inter_token_latency`
  each time between two tokens; tokens of one piece of a stream share its time;
- `normalized_time_per_output_token` is request_latency / tokens. Kept under its own name;
- tokens are the client's count of the answer's text, special tokens included, unless it was told to take the
  server's (`use_server_output_tokens`, which the file does not say). From 0.6 on the file has both;
- before 0.6 each piece of a stream was tokenised with the special tokens that open a text (issue 564): with
  one token a piece two were counted, ITL is half of what it was, and in the files of 2025 TPOT too;
- rates are over the time from the first request sent to the last one ended, failed ones too. Files before
  0.5 do not state it: it is taken from the rate of requests;
- `requested_rate` of a stage with a concurrency is its number of requests, and no rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness.serving.clients.common import STATISTIC, goodput, measured, of_object, single, throughputs
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document
from harness.serving.schema import Metric, OfferedLoad, Scope, ServingRun, Tokens, Totals

NAME = "inference-perf"
KEYS = ("load_summary", "successes", "failures", "schedule_delay", "normalized_time_per_output_token")
LATENCIES = {
    "request_latency": "e2e",
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "itl",
    "normalized_time_per_output_token": "normalized_time_per_output_token",
}
EARLIEST_S = -0.1  # a request is sent no earlier, whatever its timer's grain
RATES: dict[str, Tokens] = {
    "input_tokens_per_sec": "input", "output_tokens_per_sec": "output", "total_tokens_per_sec": "total",
}  # fmt: skip


def recognises(document: Document) -> bool:
    content = document.content
    if document.kind != "json" or not isinstance(content, Mapping) or "load_summary" not in content:
        return False
    successes = content.get("successes")
    return isinstance(successes, Mapping) and bool({"latency", "throughput"} & set(successes))


def runs(document: Document) -> list[ServingRun]:
    row = Fields(str(document.path), document.content)
    successes, load = row.inside("successes"), row.inside("load_summary")
    rates = successes.inside("throughput")
    metrics = throughputs(rates, RATES)
    metrics += single(rates, "requests_per_sec", "request_throughput", "req/s")
    metrics += single(load, "achieved_rate", "sent_rate", "req/s")
    metrics += goodput(successes.inside("goodput_metrics"))
    for key, name in LATENCIES.items():
        metrics += _distribution(successes.inside("latency"), key, name, "ms", "request", scale=1e3)
    metrics += _delays(load.inside("schedule_delay"))
    # In 0.6 and before `prompt_len`; `output_len` is the client's count, `output_tokens` the server's.
    into = "prompt_tokens" if "prompt_tokens" in successes.values else "prompt_len"
    metrics += _distribution(successes, into, "input_len", "tokens", "request", tokens="input")
    metrics += _distribution(successes, "output_len", "output_len", "tokens", "request", tokens="output")
    completed, stated = successes.count("count"), row.number("benchmark_time_seconds")
    per_second, output_rate = _value(metrics, "request_throughput"), _value(metrics, "throughput", "output")
    duration = completed / per_second if stated is None and completed and per_second else stated
    counted = _count(completed, _value(metrics, "output_len", "output", "mean"))
    by_server = successes.inside("output_tokens").count("total")
    counts = [count for count in (counted, by_server) if count is not None]
    by_rate = (output_rate or 0.0) * (duration or 0.0)
    totals = Totals(
        duration_s=duration,
        completed=completed,
        failed=row.inside("failures").count("count"),
        input_tokens=_count(completed, _value(metrics, "input_len", "input", "mean")),
        output_tokens=min(counts, key=lambda count: abs(count - by_rate)) if counts else None,
    )
    concurrency, requested = load.number("concurrency"), load.number("requested_rate")
    run = ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        mode="online",
        workload=OfferedLoad(
            concurrency=concurrency,
            request_rate=None if concurrency else requested,
            num_prompts=load.count("count"),
        ),
        totals=totals,
        metrics=tuple(metrics),
        extra=row.rest(),
        notes=tuple(_notes(stated, counted, by_server)),
        findings=tuple(row.findings),
    )
    return [measured(run, successes, ("latency", "throughput"))]


def _distribution(
    fields: Fields,
    key: str,
    name: str,
    unit: str,
    scope: Scope,
    *,
    scale: float = 1.0,
    tokens: Tokens = "none",
) -> list[Metric]:
    of = fields.inside(key)
    return of_object(of, _statistics(of.values), name, unit, scale=scale, scope=scope, tokens=tokens)


def _delays(fields: Fields) -> list[Metric]:
    """From when a request was due to when it was sent; a little below 0 where it was early."""
    return [
        Metric(name="schedule_delay", value=value, unit="ms", scope="request", statistic=key)
        for key in _statistics(fields.values)
        if (value := fields.number(key, scale=1e3, least=EARLIEST_S)) is not None
    ]


def _statistics(values: Mapping[str, Any]) -> dict[str, str]:
    """Which percentiles there are is an option of the client's."""
    return {key: key for key in values if re.fullmatch(STATISTIC, key)}


def _value(metrics: list[Metric], name: str, tokens: str = "none", statistic: str = "total") -> float | None:
    wanted = (name, tokens, statistic)
    return next((m.value for m in metrics if (m.name, m.tokens, m.statistic) == wanted), None)


def _count(completed: int | None, mean: float | None) -> int | None:
    return None if completed is None or mean is None else round(completed * mean)


def _notes(stated: float | None, counted: int | None, by_server: int | None) -> list[str]:
    notes = ["`itl`: tokens of one piece of a stream share its time, so its median may be next to nothing"]
    if by_server is None:
        notes.append(
            "of a version before 0.6, which may have counted a token too many in each piece of a stream: "
            "then ITL, and in 2025 TPOT, are too short"
        )
    if stated is None:
        notes.append("the duration is not in the file: taken as successful requests / requests_per_sec")
    if counted and by_server and counted != by_server:
        notes.append(
            f"output tokens: {counted} by the client's count, {by_server} by the server's; which of them "
            "TPOT and throughput rest on the file does not say; taken: the one that its throughput fits"
        )
    return notes
