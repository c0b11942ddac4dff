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

from collections.abc import Mapping
from typing import Any

from harness.serving.clients.fields import Fields
from harness.serving.clients.format import Draft, Format, Several, scale_inside
from harness.serving.schema import Scope, Tokens

STATISTICS = {"avg": "mean", "p50": "median", "std": "std", "min": "min", "max": "max"} | {
    f"p{n}": f"p{n}" for n in (1, 5, 10, 25, 75, 90, 95, 99)
}
METRICS: dict[str, tuple[str, str, Scope, Tokens]] = {
    "time_to_first_token": ("ttft", "ms", "request", "none"),
    "request_latency": ("e2e", "ms", "request", "none"),
    "inter_token_latency": ("tpot", "ms", "request", "none"),
    "inter_chunk_latency": ("itl", "ms", "request", "none"),
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
APART = 0.02  # between the client's and the server's count of tokens; further and a number is not comparable
EXACT = 1e-3  # between a mean and the same mean elsewhere


def has_metrics(row: Mapping[str, Any]) -> bool:
    objects = [row[key] for key in METRICS if isinstance(row.get(key), Mapping)]
    return sum(1 for one in objects if {"unit", "avg"} & set(one)) >= 2


def counts_and_config(draft: Draft) -> None:
    row = draft.row
    draft.totals = {
        "duration_s": _single(row, "benchmark_duration", "s"),
        "completed": _whole(row, "request_count", "1"),
        "failed": _whole(row, "error_request_count", "1"),
        "input_tokens": _whole(row, "total_isl", "tokens"),
        "output_tokens": _whole(row, "total_osl", "tokens"),
    }
    _examine_counts(draft)
    config = row.inside("input_config")
    version = row.text("aiperf_version")
    if version:
        draft.extra["aiperf_version"] = version
    elif not any(key in config.values for key in ("loadgen", "phases", "endpoint")):
        draft.about["client"] = "genai-perf"
    draft.notes.append("`inter_token_latency` is each request's mean after its first token: here `tpot`")
    if row.values.get("was_cancelled") is True:
        draft.notes.append("the run was cancelled before its end")
    _asked(draft, config)


def _single(row: Fields, key: str, unit: str) -> float | None:
    fields = row.inside(key)
    scale = scale_inside(fields, unit)
    return None if scale is None else fields.number("avg", scale=scale)


def _whole(row: Fields, key: str, unit: str) -> int | None:
    fields = row.inside(key)
    return None if scale_inside(fields, unit) is None else fields.count("avg")


def _examine_counts(draft: Draft) -> None:
    """Tokens beside their mean, and beside what the server counted. Where the file has no total, it is in the
    sum or the mean of the lengths."""
    row, totals, completed = draft.row, draft.totals, draft.totals["completed"]
    for kind in ("output", "input"):
        mean, counted = draft.value(f"{kind}_len", tokens=kind), totals[f"{kind}_tokens"]
        if counted is None and mean is not None and completed:
            totals[f"{kind}_tokens"] = round(mean * completed)
        elif mean is not None and counted and completed and abs(mean * completed / counted - 1) > EXACT:
            draft.find(f"{kind}_length", "wrong", f"{kind} tokens are {counted} of {completed} requests, "
                       f"{counted / completed:g} each, but their mean is said to be {mean:g}")  # fmt: skip
    for kind, key in (("output", "completion"), ("input", "prompt")):
        counted, by_server = totals[f"{kind}_tokens"], _whole(row, f"total_usage_{key}_tokens", "tokens")
        if counted and by_server and abs(counted - by_server) > APART * max(counted, by_server):
            draft.find(
                "tokens_counted", "suspect", f"the client's tokenizer counted {counted} {kind} tokens, the "
                f"server {by_server}; throughput and latencies per token are by the client's",
                client=counted, server=by_server,
            )  # fmt: skip


def _asked(draft: Draft, config: Fields) -> None:
    """Model and workload: of 0.13's `models`, `datasets` and `phases`, of 0.1's `endpoint`, `input` and
    `loadgen`, of genai-perf's flat keys. What is not there is not said."""
    dataset, phase = _entry(config, "datasets", 0), _entry(config, "phases", -1)
    prompts = dataset.inside("prompts") if dataset else config.inside("input").inside("prompt")
    load = phase or (config.inside("loadgen") if "loadgen" in config.values else config)
    into, out = ("isl", "osl") if dataset else ("input_tokens", "output_tokens")
    models = isinstance(config.values.get("models"), Mapping)
    first = _entry(config.inside("models"), "items", 0) if models else None
    names = config.inside("endpoint").values.get("model_names") or config.values.get("model")
    model = first.text("name") if first else names[0] if isinstance(names, list) and names else names
    draft.about["model"] = model if isinstance(model, str) else ""
    draft.load = {
        "dataset": dataset.text("type") if dataset else "",
        "input_len": prompts.inside(into).number("mean"),
        "output_len": prompts.inside(out).number("mean"),
        "concurrency": load.number("concurrency"),
        "request_rate": load.number("rate" if "rate" in load.values else "request_rate"),
        "num_prompts": load.count("requests" if "requests" in load.values else "request_count"),
    }


def _entry(config: Fields, key: str, index: int) -> Fields | None:
    entries = config.values.get(key)
    if not isinstance(entries, list) or not entries or not isinstance(entries[index], Mapping):
        return None
    return Fields(f"{config.where}: {key}", entries[index], findings=config.findings)


FORMATS = (
    Format(
        name="aiperf", is_one=has_metrics, fixed={"mode": "online"}, about={"date": "start_time"},
        metrics=tuple(
            Several(key, name, unit, tokens, scope, statistics=STATISTICS, unit_inside=True,
                    lone="total" if unit in ("tok/s", "req/s") and scope == "instance" else "")
            for key, (name, unit, scope, tokens) in METRICS.items()
        ),
        odd=counts_and_config, wanted=tuple(METRICS),
    ),
)  # fmt: skip
