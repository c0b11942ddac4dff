"""vLLM's load generators: `bench serve`, `bench throughput` and `bench latency`, and the scripts before them.

Read in vllm/benchmarks of 0.32.0 and benchmarks/benchmark_serving.py of vllm-project/vllm at 0049e29c
(0.8.x).

bench serve: one JSON object a run, or one a line (--append-result); `bench sweep serve` writes them as rows
of a summary.csv. Times in lists are seconds, `*_ms` milliseconds. 0.8.x has the literal key
`request_goodput:`, no `failed`, and counts a request that returned nothing as completed, with a TTFT of 0 in
its mean. Lists come with --save-detailed, but for latencies and queue_times, which 0.32 always writes; e2el
and every percentile but p99 only where they are asked for. --metadata KEY=VALUE adds keys whose values are
texts. max_concurrent_requests counts all that touched one second, more than were ever in flight at once.
`backend: vllm` is OpenAI's protocol: which engine answered the file does not say.

bench throughput: **tokens_per_second counts input and output tokens**; how many were output the file does not
say. bench latency: one batch again and again, in seconds; its size and lengths are not in the file, so the
time of a pass says nothing of tokens: it is `batch_latency` of the whole engine."""

from __future__ import annotations

import math
from typing import Any

from harness.serving.clients.fields import Fields
from harness.serving.clients.format import (
    BURSTS,
    COUNTS,
    GOODPUT,
    LOAD,
    PEAKS,
    REQUESTS,
    Draft,
    Format,
    Latencies,
    One,
    keys,
    rates,
)
from harness.serving.schema import RequestSamples

DEGREES = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp"}


def lists_and_metadata(draft: Draft) -> None:
    """What the client left to its lists, and the parallelism among --metadata."""
    row = draft.row
    _zeros_in_mean(draft)
    queued = row.numbers("queue_times", scale=1e3, least=0)  # has an entry for requests that failed
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
    """A finding where the client's mean TTFT is that of all requests, those that returned nothing as 0."""
    every, answered, mean = draft.row.values.get("ttfts"), draft.samples.ttfts_ms, draft.value("ttft")
    if not isinstance(every, list) or not mean or not 0 < len(answered) < len(every):
        return
    of_answered, of_every = sum(answered) / len(answered), sum(answered) / len(every)
    if math.isclose(mean, of_every, rel_tol=0.01) and not math.isclose(mean, of_answered, rel_tol=0.01):
        draft.row.find(
            "samples", "wrong", f"mean ttft {mean:g} ms counts {len(every) - len(answered)} of {len(every)} "
            f"requests that returned nothing as 0: of those that answered it is {of_answered:g} ms",
            mean=mean, of_answered=of_answered,
        )  # fmt: skip


def passes(draft: Draft) -> None:
    row = draft.row
    times = row.numbers("latencies", scale=1e3, least=0)
    percentiles: Fields = row.inside("percentiles")
    for key in percentiles.values:
        value = percentiles.number(key, scale=1e3)
        draft.add("batch_latency", value, "ms", statistic=f"p{key}")
    more: dict[str, Any] = {"min": min, "max": max}
    for statistic, of in more.items() if times else ():
        how = f"{statistic} of latencies"
        draft.add("batch_latency", of(times), "ms", statistic=statistic, derived=how)
    draft.samples = RequestSamples(e2es_ms=times)
    draft.extra = {"latencies_ms": list(times)}


LATENCIES = {
    "e2el": "e2e", "ttft": "ttft", "tpot": "tpot", "itl": "itl", "client_queue_time": "client_queue_time",
    "e2el_including_client_queue": "e2e_including_client_queue",
}  # fmt: skip
FORMATS = (
    Format(
        name="vllm.throughput",
        own=keys("elapsed_time num_requests total_num_tokens requests_per_second tokens_per_second"),
        not_with=keys("GPU"),
        metrics=(
            *rates(tokens_per_second="total"),
            One("requests_per_second", "request_throughput", "req/s"),
            One("total_num_tokens", "tokens", "tokens", "total"),
        ),
        about={"model": "model_id"}, fixed={"engine": "vllm", "mode": "offline"},
        load={"num_prompts": "num_requests"}, fixed_load={"request_rate": 0.0},
        totals={"duration_s": "elapsed_time", "completed": "num_requests"},
        notes=("engine taken to be vllm: --backend hf writes the same file",),
        wanted=("elapsed_time", "requests_per_second", "tokens_per_second"),
    ),
    Format(
        name="vllm.latency",
        own=keys("avg_latency latencies percentiles"), at_least=2,
        not_with=keys("duration"),
        metrics=(One("avg_latency", "batch_latency", "ms", statistic="mean", scale=1e3),),
        about={"model": "model_id"}, fixed={"engine": "vllm", "mode": "offline"},
        fixed_load={"request_rate": 0.0}, odd=passes, wanted=("avg_latency", "latencies", "percentiles"),
        notes=("batch size and lengths are not in the file",),
    ),
    Format(
        name="vllm.serve",
        own=keys(
            "model_id tokenizer_id burstiness endpoint_type best_of total_token_throughput "
            "request_goodput request_goodput:"
        ),
        not_with=keys("total_output_tokens_retokenized"),
        metrics=(
            *rates(input_throughput="input", output_throughput="output", total_token_throughput="total"),
            REQUESTS, *GOODPUT, *PEAKS,
            One("spec_decode_acceptance_length", "accept_length", "1", statistic="mean"),
            Latencies(LATENCIES),
        ),
        about={"date": "date", "label": "label", "model": "model_id"}, fixed={"mode": "online"}, spoken=True,
        requests="latencies", load=LOAD | BURSTS, totals=COUNTS, odd=lists_and_metadata,
    ),
)  # fmt: skip
