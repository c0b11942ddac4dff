"""What the tables of vLLM, inference-perf and AIPerf cannot express, one function for each format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from harness.serving.clients.fields import Fields
from harness.serving.clients.format import STATISTIC, Draft, Rule, scale_inside
from harness.serving.schema import RequestSamples, Tokens

DEGREES = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp"}
EXACT = 1e-3  # between a mean and the same mean elsewhere
EARLIEST_S = -0.1  # a request is sent no earlier than this before its time, whatever the grain of its timer
APART = 0.02  # between the client's and the server's count of tokens; beyond it a number is not comparable


def vllm_serve(draft: Draft) -> None:
    """Means that only the client's lists tell, and the parallelism among --metadata."""
    row = draft.row
    _zeros_in_mean(draft)
    lists = [("e2e", "latencies", draft.samples.e2es_ms)]
    queued = row.numbers("queue_times", scale=1e3)  # it has an entry for each failed request, too
    if not draft.totals.get("failed"):
        lists.append(("client_queue_time", "queue_times", queued))
    for name, key, values in lists:
        if values and draft.value(name) is None:
            mean = sum(values) / len(values)
            draft.add(name, mean, "ms", scope="request", statistic="mean", derived=f"mean of {key}")
    keys = [key for key in DEGREES if str(row.values.get(key)).isdecimal()]
    draft.parallelism = {DEGREES[key]: int(row.take(key)) for key in keys}
    if keys:
        draft.notes.append("from --metadata: " + ", ".join(f"{key} {row.values[key]}" for key in keys))


def _zeros_in_mean(draft: Draft) -> None:
    """Adds a finding if the client's mean TTFT counts requests that returned nothing as 0."""
    listed, answered, mean = draft.row.values.get("ttfts"), draft.samples.ttfts_ms, draft.value("ttft")
    if not isinstance(listed, list) or not mean or not 0 < len(answered) < len(listed):
        return
    of_answered, of_all = sum(answered) / len(answered), sum(answered) / len(listed)
    if math.isclose(mean, of_all, rel_tol=0.01) and not math.isclose(mean, of_answered, rel_tol=0.01):
        zeros = f"{len(listed) - len(answered)} of {len(listed)} requests that returned nothing as 0"
        why = f"of those that answered it is {of_answered:g} ms"
        draft.row.find("samples", "wrong", f"mean ttft {mean:g} ms counts {zeros}: {why}")


def vllm_latency(draft: Draft) -> None:
    """Quantiles, extremes and the list of the batch's latencies."""
    times = draft.row.numbers("latencies", scale=1e3)
    percentiles = draft.row.inside("percentiles")
    for key in percentiles.values:
        draft.add("batch_latency", percentiles.number(key, scale=1e3), "ms", statistic=f"p{key}")
    if times:
        draft.add("batch_latency", min(times), "ms", statistic="min", derived="min of latencies")
        draft.add("batch_latency", max(times), "ms", statistic="max", derived="max of latencies")
    draft.samples = RequestSamples(e2es_ms=times)
    draft.extra = {"latencies_ms": list(times)}


def inference_perf(draft: Draft) -> None:
    """Delays of requests, lengths, the duration, tokens and the cache."""
    row, totals, load = draft.row, draft.totals, draft.load
    successes, delays = row.inside("successes"), row.inside("load_summary").inside("schedule_delay")
    # From the time for which a request was due to when it was sent; slightly negative if it was early.
    for statistic in [key for key in delays.values if re.fullmatch(STATISTIC, key)]:
        value = delays.number(statistic, scale=1e3, least=EARLIEST_S)
        draft.add("schedule_delay", value, "ms", scope="request", statistic=statistic)
    # `prompt_len` is of 0.6 and before.
    prompts = "prompt_tokens" if "prompt_tokens" in successes.values else "prompt_len"
    lengths: tuple[tuple[str, Tokens], ...] = ((prompts, "input"), ("output_len", "output"))
    for key, side in lengths:
        rule = Rule(name=f"{side}_len", unit="tokens", tokens=side, scope="request", object=True)
        draft.metrics += rule.read(successes, key)
    completed, per_second = totals["completed"], draft.value("request_throughput", "total")
    if totals["duration_s"] is None and completed and per_second:
        totals["duration_s"] = completed / per_second
        draft.notes.append("the duration is not in the file: taken as successful requests / requests_per_sec")
    for side in ("input", "output"):
        mean = draft.value(f"{side}_len", tokens=side)
        totals[f"{side}_tokens"] = None if completed is None or mean is None else round(completed * mean)
    # `output_len` is the client's count, `output_tokens` the server's: the nearer to the rate is taken.
    by_client, by_server = totals["output_tokens"], successes.inside("output_tokens").count("total")
    by_rate = (draft.value("throughput", "total", "output") or 0.0) * (totals["duration_s"] or 0.0)
    counts = [count for count in (by_client, by_server) if count is not None]
    totals["output_tokens"] = min(counts, key=lambda count: abs(count - by_rate), default=None)
    if load["concurrency"]:
        load["request_rate"] = None
    cached = successes.inside("prompt_tokens").count("cached")
    load["prefix_cached"] = None if cached is None else cached > 0
    if by_server is None:
        note = "of a version before 0.6, which may have counted a token too many in each piece of a stream"
        draft.notes.insert(0, f"{note}: then ITL, and in 2025 TPOT, are too short")
    elif by_client and by_client != by_server:
        note = f"output tokens: {by_client} by the client's count, {by_server} by the server's"
        why = "which of them TPOT and throughput rest on the file does not say"
        draft.notes.append(f"{note}; {why}; taken: the one that its throughput fits")


def aiperf(draft: Draft) -> None:
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
    """A metric of AIPerf that is a count; None, with a finding, if it is in another unit."""
    fields = row.inside(key)
    return None if scale_inside(fields, unit) is None else fields.count("avg")


def _examine_counts(draft: Draft) -> None:
    """Compares tokens with their mean and the server's count; a missing total follows from the mean."""
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
