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
    queued = row.numbers("queue_times", scale=1e3)  # it has an entry for each failed request, too
    complete = queued if not draft.totals.get("failed") else ()
    for name, key, values in (
        ("e2e", "latencies", draft.samples.e2es_ms), ("client_queue_time", "queue_times", complete),
    ):  # fmt: skip
        if values and draft.value(name) is None:
            mean = sum(values) / len(values)
            draft.add(name, mean, "ms", scope="request", statistic="mean", derived=f"mean of {key}")
    given = {key: str(row.values[key]) for key in DEGREES if str(row.values.get(key)).isdecimal()}
    draft.parallelism = {DEGREES[key]: int(row.take(key)) for key in given}
    if given:
        draft.notes.append("from --metadata: " + ", ".join(f"{key} {value}" for key, value in given.items()))


def _zeros_in_mean(draft: Draft) -> None:
    """Adds a finding if the client's mean TTFT counts requests that returned nothing as 0."""
    every, answered, mean = draft.row.values.get("ttfts"), draft.samples.ttfts_ms, draft.value("ttft")
    if not isinstance(every, list) or not mean or not 0 < len(answered) < len(every):
        return
    of_answered, of_every = sum(answered) / len(answered), sum(answered) / len(every)
    if math.isclose(mean, of_every, rel_tol=0.01) and not math.isclose(mean, of_answered, rel_tol=0.01):
        draft.row.find(
            "samples", "wrong", f"mean ttft {mean:g} ms counts {len(every) - len(answered)} of {len(every)} "
            f"requests that returned nothing as 0: of those that answered it is {of_answered:g} ms",
        )  # fmt: skip


def vllm_latency(draft: Draft) -> None:
    times = draft.row.numbers("latencies", scale=1e3)
    percentiles = draft.row.inside("percentiles")
    for key in percentiles.values:
        draft.add("batch_latency", percentiles.number(key, scale=1e3), "ms", statistic=f"p{key}")
    for statistic, value in (("min", min(times)), ("max", max(times))) if times else ():
        how = f"{statistic} of latencies"
        draft.add("batch_latency", value, "ms", statistic=statistic, derived=how)
    draft.samples = RequestSamples(e2es_ms=times)
    draft.extra = {"latencies_ms": list(times)}


def inference_perf(draft: Draft) -> None:
    row, totals, load = draft.row, draft.totals, draft.load
    successes, delays = row.inside("successes"), row.inside("load_summary").inside("schedule_delay")
    # From the time for which a request was due to when it was sent; slightly negative if it was early.
    for key in (key for key in delays.values if re.fullmatch(STATISTIC, key)):
        value = delays.number(key, scale=1e3, least=EARLIEST_S)
        draft.add("schedule_delay", value, "ms", scope="request", statistic=key)
    # Of 0.6 and before `prompt_len`; `output_len` is the client's count, `output_tokens` the server's.
    into = "prompt_tokens" if "prompt_tokens" in successes.values else "prompt_len"
    lengths: tuple[tuple[str, Tokens], ...] = ((into, "input"), ("output_len", "output"))
    for key, side in lengths:
        rule = Rule(name=f"{side}_len", unit="tokens", tokens=side, scope="request", object=True)
        draft.metrics += rule.read(successes, key)
    completed, per_second = totals["completed"], draft.value("request_throughput", "total")
    if totals["duration_s"] is None and completed and per_second:
        totals["duration_s"] = completed / per_second
        draft.notes.append("the duration is not in the file: taken as successful requests / requests_per_sec")
    counted: dict[str, int | None] = {}
    for side in ("input", "output"):
        mean = draft.value(f"{side}_len", tokens=side)
        counted[side] = None if completed is None or mean is None else round(completed * mean)
    by_client, by_server = counted["output"], successes.inside("output_tokens").count("total")
    by_rate = (draft.value("throughput", "total", "output") or 0.0) * (totals["duration_s"] or 0.0)
    counts = [count for count in (by_client, by_server) if count is not None]
    totals["output_tokens"] = min(counts, key=lambda count: abs(count - by_rate), default=None)
    totals["input_tokens"] = counted["input"]
    if load["concurrency"]:
        load["request_rate"] = None
    cached = successes.inside("prompt_tokens").count("cached")
    load["prefix_cached"] = None if cached is None else cached > 0
    if by_server is None:
        draft.notes.insert(
            0, "of a version before 0.6, which may have counted a token too many in each piece of a stream: "
            "then ITL, and in 2025 TPOT, are too short",
        )  # fmt: skip
    elif by_client and by_client != by_server:
        draft.notes.append(
            f"output tokens: {by_client} by the client's count, {by_server} by the server's; which of them "
            "TPOT and throughput rest on the file does not say; taken: the one that its throughput fits"
        )


def aiperf(draft: Draft) -> None:
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
    fields = row.inside(key)
    return None if scale_inside(fields, unit) is None else fields.count("avg")


def _examine_counts(draft: Draft) -> None:
    """Compares tokens with their mean and the server's count; a missing total follows from the mean."""
    row, totals, completed = draft.row, draft.totals, draft.totals["completed"]
    for kind in ("output", "input"):
        mean, counted = draft.value(f"{kind}_len", tokens=kind), totals[f"{kind}_tokens"]
        if counted is None and mean is not None and completed:
            totals[f"{kind}_tokens"] = round(mean * completed)
        elif mean is not None and counted and completed and abs(mean * completed / counted - 1) > EXACT:
            row.find(f"{kind}_length", "wrong", f"{kind} tokens are {counted} of {completed} requests, "
                     f"{counted / completed:g} each, but their mean is said to be {mean:g}")  # fmt: skip
    for kind, key in (("output", "completion"), ("input", "prompt")):
        counted, by_server = totals[f"{kind}_tokens"], _count(row, f"total_usage_{key}_tokens", "tokens")
        if counted and by_server and abs(counted - by_server) > APART * max(counted, by_server):
            row.find(
                "tokens_counted", "suspect", f"the client's tokenizer counted {counted} {kind} tokens, the "
                f"server {by_server}; throughput and latencies per token are by the client's",
            )  # fmt: skip


def _asked(draft: Draft, config: Fields) -> None:
    """Model and workload, as AIPerf 0.13, AIPerf 0.1 or genai-perf write them."""
    datasets, phases = config.entries("datasets"), config.entries("phases")
    prompts = datasets[0].inside("prompts") if datasets else config.inside("input").inside("prompt")
    load = phases[-1] if phases else config.inside("loadgen") if "loadgen" in config.values else config
    into, out = ("isl", "osl") if datasets else ("input_tokens", "output_tokens")
    listed = isinstance(config.values.get("models"), Mapping)
    models = config.inside("models").entries("items") if listed else []
    names = config.inside("endpoint").values.get("model_names") or config.values.get("model")
    model = models[0].text("name") if models else names[0] if isinstance(names, list) and names else names
    draft.about["model"] = model if isinstance(model, str) else ""
    draft.load = {
        "dataset": datasets[0].text("type") if datasets else "",
        "input_len": prompts.inside(into).number("mean"), "output_len": prompts.inside(out).number("mean"),
        "concurrency": load.number("concurrency"),
        "request_rate": load.number("rate" if "rate" in load.values else "request_rate"),
        "num_prompts": load.count("requests" if "requests" in load.values else "request_count"),
    }  # fmt: skip
