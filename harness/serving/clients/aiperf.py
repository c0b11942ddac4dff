"""What the table of formats/aiperf.toml cannot express."""

from __future__ import annotations

from collections.abc import Mapping

from harness.serving.clients.fields import Fields
from harness.serving.clients.format import Draft, scale_inside

EXACT = 1e-3  # between a mean and the same mean elsewhere
APART = 0.02  # between the client's and the server's count of tokens; beyond it a number is not comparable


def complete(draft: Draft) -> None:
    """Counts, which AIPerf writes as metrics, and the workload."""
    row = draft.row
    duration = row.inside("benchmark_duration")
    scale = scale_inside(duration, "s")
    draft.totals = {
        "duration_s": None if scale is None else duration.number("avg", scale=scale),
        "completed": _count(row, "request_count", "1"), "failed": _count(row, "error_request_count", "1"),
        "input_tokens": _count(row, "total_isl", "tokens"),
        "output_tokens": _count(row, "total_osl", "tokens"),
    }  # fmt: skip
    _complete_counts(draft)
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
    """A metric of AIPerf that is a count; None, with a finding, if it is in another unit."""
    fields = row.inside(key)
    return None if scale_inside(fields, unit) is None else fields.count("avg")


def _complete_counts(draft: Draft) -> None:
    """Takes missing totals of tokens from the means, and compares others with them and the server's count."""
    row, totals, completed = draft.row, draft.totals, draft.totals["completed"]
    for kind in ("output", "input"):
        mean, counted = draft.value(f"{kind}_len", tokens=kind), totals[f"{kind}_tokens"]
        if mean is None or not completed:
            continue
        if counted is None:
            totals[f"{kind}_tokens"] = round(mean * completed)
        elif counted and abs(mean * completed / counted - 1) > EXACT:
            count = f"{counted} of {completed} requests, {counted / completed:g} each"
            message = f"{kind} tokens are {count}, but their mean is said to be {mean:g}"
            row.find(f"{kind}_length", "wrong", message)
    for kind, key in (("output", "completion"), ("input", "prompt")):
        counted, by_server = totals[f"{kind}_tokens"], _count(row, f"total_usage_{key}_tokens", "tokens")
        if counted and by_server and abs(counted - by_server) > APART * max(counted, by_server):
            both = f"the client's tokenizer counted {counted} {kind} tokens, the server {by_server}"
            message = f"{both}; throughput and latencies per token are by the client's"
            row.find("tokens_counted", "suspect", message)


def _asked(draft: Draft, config: Fields) -> None:
    """Model and workload, as AIPerf 0.13, AIPerf 0.1 or genai-perf write them."""
    datasets, phases = config.entries("datasets"), config.entries("phases")
    if datasets:
        dataset, prompts, isl, osl = datasets[0].text("type"), datasets[0].inside("prompts"), "isl", "osl"
    else:
        dataset, prompts = "", config.inside("input").inside("prompt")
        isl, osl = "input_tokens", "output_tokens"
    load = phases[-1] if phases else config
    if not phases and "loadgen" in config.values:
        load = config.inside("loadgen")
    model = config.inside("endpoint").values.get("model_names") or config.values.get("model")
    if isinstance(model, list) and model:
        model = model[0]
    if isinstance(config.values.get("models"), Mapping):
        for listed in config.inside("models").entries("items")[:1]:
            model = listed.text("name")
    draft.about["model"] = model if isinstance(model, str) else ""
    draft.load = {
        "dataset": dataset,
        "input_len": prompts.inside(isl).number("mean"), "output_len": prompts.inside(osl).number("mean"),
        "concurrency": load.number("concurrency"),
        "request_rate": load.number("rate" if "rate" in load.values else "request_rate"),
        "num_prompts": load.count("requests" if "requests" in load.values else "request_count"),
    }  # fmt: skip
