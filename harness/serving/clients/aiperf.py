"""What the table of formats/aiperf.toml cannot say."""

from __future__ import annotations

from collections.abc import Mapping

from harness.serving.clients.fields import Fields
from harness.serving.clients.format import Draft, scale_inside

APART = 0.02  # between the client's and the server's count of tokens; beyond it a number is not comparable
EXACT = 1e-3  # between a mean and the same mean elsewhere


def counts_and_config(draft: Draft) -> None:
    row = draft.row
    duration = row.inside("benchmark_duration")
    scale = scale_inside(duration, "s")
    draft.totals = {
        "duration_s": None if scale is None else duration.number("avg", scale=scale),
        "completed": _count(row, "request_count", "1"),
        "failed": _count(row, "error_request_count", "1"),
        "input_tokens": _count(row, "total_isl", "tokens"),
        "output_tokens": _count(row, "total_osl", "tokens"),
    }
    _examine_counts(draft)
    config, version = row.inside("input_config"), row.text("aiperf_version")
    if version:
        draft.extra["aiperf_version"] = version
    elif not any(key in config.values for key in ("loadgen", "phases", "endpoint")):
        draft.about["client"] = "genai-perf"
    draft.notes.append("`inter_token_latency` is each request's mean after its first token: here `tpot`")
    if row.values.get("was_cancelled") is True:
        draft.notes.append("the run was cancelled before its end")
    _asked(draft, config)


def _count(row: Fields, key: str, unit: str) -> int | None:
    fields = row.inside(key)
    return None if scale_inside(fields, unit) is None else fields.count("avg")


def _examine_counts(draft: Draft) -> None:
    """Tokens beside their mean, and beside what the server counted. If the file has no total, it follows
    from the mean of the lengths."""
    row, totals, completed = draft.row, draft.totals, draft.totals["completed"]
    for kind in ("output", "input"):
        mean, counted = draft.value(f"{kind}_len", tokens=kind), totals[f"{kind}_tokens"]
        if counted is None and mean is not None and completed:
            totals[f"{kind}_tokens"] = round(mean * completed)
        elif mean is not None and counted and completed and abs(mean * completed / counted - 1) > EXACT:
            draft.find(f"{kind}_length", "wrong", f"{kind} tokens are {counted} of {completed} requests, "
                       f"{counted / completed:g} each, but their mean is said to be {mean:g}")  # fmt: skip
    for kind, key in (("output", "completion"), ("input", "prompt")):
        counted, by_server = totals[f"{kind}_tokens"], _count(row, f"total_usage_{key}_tokens", "tokens")
        if counted and by_server and abs(counted - by_server) > APART * max(counted, by_server):
            draft.find(
                "tokens_counted", "suspect", f"the client's tokenizer counted {counted} {kind} tokens, the "
                f"server {by_server}; throughput and latencies per token are by the client's",
                client=counted, server=by_server,
            )  # fmt: skip


def _asked(draft: Draft, config: Fields) -> None:
    """Model and workload: from 0.13's `models`, `datasets` and `phases`, from 0.1's `endpoint`, `input` and
    `loadgen`, or from genai-perf's flat keys."""
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
