"""NVIDIA AIPerf's `profile_export_aiperf.json`, and that of its predecessor, genai-perf.

Read in ai-dynamo/aiperf, aiperf/exporters/json_exporter.py and aiperf/metrics/types (0.1.1 and 0.13.0, whose
schema is 1.4), and in a file made by 0.13.0. Each metric is an object with its `unit` and statistics; single
values are under `avg`. What the words mean there:

- `inter_token_latency` is (latency - TTFT) / (output length - 1) of each request: what others call TPOT;
- `inter_chunk_latency` is the gap between two chunks of a stream: what others call ITL;
- tokens are counted by the client's own tokenizer, which need not be the server's: `usage_*` is what the
  server counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.serving.clients.common import MILLISECONDS, of_object
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, objects
from harness.serving.integrity.common import EXACT
from harness.serving.schema import Finding, Metric, OfferedLoad, Scope, ServingRun, Tokens, Totals

NAME = "aiperf"
LATENCIES = {
    "time_to_first_token": "ttft",
    "request_latency": "e2e",
    "inter_token_latency": "tpot",
    "inter_chunk_latency": "itl",
}
RATES: dict[str, tuple[str, str, Scope, Tokens]] = {
    "output_token_throughput": ("throughput", "tok/s", "instance", "output"),
    "input_token_throughput": ("throughput", "tok/s", "instance", "input"),
    "total_token_throughput": ("throughput", "tok/s", "instance", "total"),
    "request_throughput": ("request_throughput", "req/s", "instance", "none"),
    "goodput": ("goodput", "req/s", "instance", "none"),
    "output_token_throughput_per_user": ("throughput_per_user", "tok/s", "request", "output"),
    "effective_concurrency": ("concurrency", "1", "instance", "none"),
    "input_sequence_length": ("input_len", "tokens", "request", "input"),
    "output_sequence_length": ("output_len", "tokens", "request", "output"),
}
UNITS = {
    "tok/s": {"tokens/sec": 1.0, "tokens/sec/user": 1.0, "tokens/s": 1.0},
    "req/s": {"requests/sec": 1.0, "requests/s": 1.0},
    "tokens": {"tokens": 1.0},
    "requests": {"requests": 1.0, "count": 1.0},
    "1": {"requests": 1.0, "count": 1.0},
    "ms": MILLISECONDS,
    "s": {unit: scale / 1e3 for unit, scale in MILLISECONDS.items()},
}
PERCENTILES = (1, 5, 10, 25, 75, 90, 95, 99)
STATISTICS = {"avg": "mean", "p50": "median", "std": "std", "min": "min", "max": "max"} | {
    f"p{n}": f"p{n}" for n in PERCENTILES
}
KNOWN = {*LATENCIES, *RATES}
APART = 0.02  # between the client's and the server's count of tokens; further and a number is not comparable


def recognises(document: Document) -> bool:
    rows = document.rows() if document.kind == "json" else []
    return bool(rows) and all(isinstance(row, Mapping) and len(_metrics_of(row)) >= 2 for row in rows)


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _metrics_of(row: Mapping[str, Any]) -> set[str]:
    return {k for k in KNOWN & set(row) if isinstance(row[k], Mapping) and {"unit", "avg"} & set(row[k])}


def _run(row: Fields) -> ServingRun:
    metrics = []
    for key, name in LATENCIES.items():
        metrics += _metric(row, key, name, "ms", "request", "none")
    for key, (name, unit, scope, tokens) in RATES.items():
        metrics += _metric(row, key, name, unit, scope, tokens)
    version = row.text("aiperf_version")
    config = row.inside("input_config")
    ours = bool(version) or any(key in config.values for key in ("loadgen", "phases", "endpoint"))
    totals = Totals(
        duration_s=_value(row, "benchmark_duration", "s"),
        completed=_whole(row, "request_count", "requests"),
        failed=_whole(row, "error_request_count", "requests"),
        input_tokens=_whole(row, "total_isl", "tokens"),
        output_tokens=_whole(row, "total_osl", "tokens"),
    )
    notes = ["`inter_token_latency` is each request's mean after its first token: here `tpot`"]
    if row.values.get("was_cancelled") is True:
        notes.append("the run was cancelled before its end")
    _examine_counts(row, totals, metrics)
    model, workload = _asked(config)
    return ServingRun(
        id=row.where,
        client=NAME if ours else "genai-perf",
        source=row.where,
        date=row.text("start_time"),
        model=model,
        mode="online",
        workload=workload,
        totals=totals,
        metrics=tuple(metrics),
        extra=row.rest() | ({"aiperf_version": version} if version else {}),
        notes=tuple(notes),
        findings=tuple(row.findings),
    )


def _scale(fields: Fields, unit: str) -> float | None:
    """Of the unit that stands in the object, to ours; None with a finding where it is another."""
    given = fields.text("unit")
    scale = UNITS[unit].get(given)
    if scale is None and fields.values:
        known = ", ".join(UNITS[unit])
        fields.leave_out("unit", f"is {given!r}, not one of {known}; its values")
    return scale


def _metric(row: Fields, key: str, name: str, unit: str, scope: Scope, tokens: Tokens) -> list[Metric]:
    fields = row.inside(key)
    if not fields.values or (scale := _scale(fields, unit)) is None:
        return []
    metrics = of_object(fields, STATISTICS, name, unit, scale=scale, scope=scope, tokens=tokens)
    if len(metrics) == 1 and unit in ("tok/s", "req/s") and scope == "instance":
        return [metrics[0].model_copy(update={"statistic": "total"})]  # `avg` there is the one value
    return metrics


def _value(row: Fields, key: str, unit: str) -> float | None:
    fields = row.inside(key)
    if not fields.values or (scale := _scale(fields, unit)) is None:
        return None
    return fields.number("avg", scale=scale)


def _whole(row: Fields, key: str, unit: str) -> int | None:
    fields = row.inside(key)
    return fields.count("avg") if fields.values and _scale(fields, unit) is not None else None


def _examine_counts(row: Fields, totals: Totals, metrics: Sequence[Metric]) -> None:
    for kind, counted in (("output", totals.output_tokens), ("input", totals.input_tokens)):
        mean = next((m.value for m in metrics if (m.name, m.statistic) == (f"{kind}_len", "mean")), None)
        if mean is None or not counted or not totals.completed:
            continue
        if abs(mean * totals.completed / counted - 1) > EXACT:
            message = (
                f"{row.where}: {kind} tokens are {counted} of {totals.completed} requests, "
                f"{counted / totals.completed:g} each, but their mean is said to be {mean:g}"
            )
            row.findings.append(Finding(rule=f"{kind}_length", severity="wrong", message=message))
    for kind, by_client, key in (
        ("output", totals.output_tokens, "total_usage_completion_tokens"),
        ("input", totals.input_tokens, "total_usage_prompt_tokens"),
    ):
        by_server = _whole(row, key, "tokens")
        if (
            by_client is None
            or by_server is None
            or abs(by_client - by_server) <= APART * max(by_client, by_server)
        ):
            continue
        message = (
            f"{row.where}: the client's tokenizer counted {by_client} {kind} tokens, the server {by_server}; "
            "throughput and latencies per token are by the client's"
        )
        numbers = {"client": float(by_client), "server": float(by_server)}
        row.findings.append(
            Finding(rule="tokens_counted", severity="suspect", message=message, numbers=numbers)
        )


def _asked(config: Fields) -> tuple[str, OfferedLoad]:
    """Model and workload: of 0.13's `models`, `datasets` and `phases`, of 0.1's `endpoint`, `input` and
    `loadgen`, of genai-perf's flat keys. What is not there is not said."""
    dataset = _first(config, "datasets")
    phase = _last(config, "phases")
    prompts = dataset.inside("prompts") if dataset else config.inside("input").inside("prompt")
    load = phase or (config.inside("loadgen") if "loadgen" in config.values else config)
    lengths = ("isl", "osl") if dataset else ("input_tokens", "output_tokens")
    first = (
        _first(config.inside("models"), "items") if isinstance(config.values.get("models"), Mapping) else None
    )
    names = config.inside("endpoint").values.get("model_names") or config.values.get("model")
    model = first.text("name") if first else names[0] if isinstance(names, list) and names else names
    rate = load.number("rate") if "rate" in load.values else load.number("request_rate")
    return model if isinstance(model, str) else "", OfferedLoad(
        dataset=dataset.text("type") if dataset else "",
        input_len=prompts.inside(lengths[0]).number("mean"),
        output_len=prompts.inside(lengths[1]).number("mean"),
        concurrency=load.number("concurrency"),
        request_rate=rate,
        num_prompts=load.count("requests") if "requests" in load.values else load.count("request_count"),
    )


def _first(config: Fields, key: str) -> Fields | None:
    return _nth(config, key, 0)


def _last(config: Fields, key: str) -> Fields | None:
    return _nth(config, key, -1)


def _nth(config: Fields, key: str, index: int) -> Fields | None:
    entries = config.values.get(key)
    if not isinstance(entries, list) or not entries or not isinstance(entries[index], Mapping):
        return None
    return Fields(f"{config.where}: {key}", entries[index], findings=config.findings)
