"""`vllm bench serve`, and benchmarks/benchmark_serving.py before it: one JSON object a run, or one a line.

Read in vllm/benchmarks/serve.py of 0.32.0 and benchmarks/benchmark_serving.py of vllm-project/vllm at
0049e29c (0.8.x). Times in the lists are seconds, `*_ms` milliseconds. What changed between them:

- 0.8.x: the literal key `request_goodput:`, no `failed`, the lists always there. Later: endpoint_type (at
  first alone, then with the same value as backend), label, max_output_tokens_per_s, max_concurrent_requests,
  rtfx; lists with --save-detailed only, but for latencies and queue_times, which 0.32 always writes.
- e2el and every percentile but p99 only where --percentile-metrics and --metric-percentiles ask for them.
- --append-result: objects one a line.
- InferenceX's copy of it writes latencies in seconds, under keys without `_ms`.
- 0.8.x counts a request that returned nothing as completed, with a TTFT of 0 in its mean.
- --metadata KEY=VALUE: more keys at the top, their values texts. Those of vLLM's own arguments for
  parallelism are taken as such; all others stay in `extra` as they are.
- max_concurrent_requests counts all that touched one second, more than were ever in flight at once, and
  max_output_tokens_per_s counts pieces of a stream: they are kept under the client's names.
- total_token_throughput counts input and output tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.serving.clients import common
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, keys_of, objects
from harness.serving.schema import (
    Finding,
    Metric,
    OfferedLoad,
    Parallelism,
    RequestSamples,
    ServingRun,
    Tokens,
    Totals,
)

NAME = "vllm.serve"
KEYS = {
    "model_id",
    "tokenizer_id",
    "burstiness",
    "endpoint_type",
    "best_of",
    "total_token_throughput",
    "request_goodput",
    "request_goodput:",
}
OTHERS = {"total_output_tokens_retokenized"}
LATENCIES = {
    "e2el": "e2e",
    "ttft": "ttft",
    "tpot": "tpot",
    "itl": "itl",
    "client_queue_time": "client_queue_time",
    "e2el_including_client_queue": "e2e_including_client_queue",
}
THROUGHPUTS: dict[str, Tokens] = {
    "input_throughput": "input",
    "output_throughput": "output",
    "total_token_throughput": "total",
}
DEGREES = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp"}
WANTED = ("duration", "completed", "output_throughput", "mean_ttft_ms", "mean_tpot_ms")


def recognises(document: Document) -> bool:
    return any(len(KEYS & keys) >= 3 and not OTHERS & keys for keys in keys_of(document))


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _run(row: Fields) -> ServingRun:
    samples, failed = common.requests(row)
    metrics = [
        *common.throughputs(row, THROUGHPUTS),
        *common.single(row, "request_throughput", "request_throughput", "req/s"),
        *common.goodput(row),
        *common.peaks(row),
        *common.single(row, "spec_decode_acceptance_length", "accept_length", "1", statistic="mean"),
        *(common.of_keys(row, LATENCIES) or common.of_keys(row, LATENCIES, suffix="", scale=1e3)),
    ]
    _zeros_in_mean(row, samples, metrics)
    metrics += _means(row, samples, failed, {metric.name for metric in metrics if metric.statistic == "mean"})
    totals = Totals(
        duration_s=row.number("duration"),
        completed=row.count("completed"),
        failed=row.count("failed") if row.values.get("failed") is not None else failed,
        input_tokens=row.count("total_input_tokens"),
        output_tokens=row.count("total_output_tokens"),
    )
    workload = OfferedLoad(
        concurrency=row.number("max_concurrency"),
        request_rate=common.request_rate(row),
        burstiness=row.number("burstiness"),
        ramp_up=common.ramp_up(row),
        num_prompts=row.count("num_prompts"),
    )
    date, label, model = row.text("date"), row.text("label"), row.text("model_id")
    parallelism, of_metadata = _parallelism(row)
    notes = common.without_bulk(row) + of_metadata
    run = ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        label=label,
        date=date,
        model=model,
        engine=common.engine(common.protocol(row)),
        protocol=common.protocol(row),
        parallelism=parallelism,
        mode="online",
        workload=workload,
        totals=totals,
        metrics=tuple(metrics),
        samples=samples,
        extra=row.rest(),
        notes=notes,
        findings=tuple(row.findings),
    )
    return common.measured(run, row, WANTED)


def _zeros_in_mean(row: Fields, samples: RequestSamples, metrics: Sequence[Metric]) -> None:
    """A finding where the client's mean TTFT is that of all requests, those that returned nothing as 0."""
    every, answered = row.values.get("ttfts"), samples.ttfts_ms
    mean = next((m.value for m in metrics if (m.name, m.statistic) == ("ttft", "mean")), None)
    if not isinstance(every, list) or not mean or not 0 < len(answered) < len(every):
        return
    of_answered, of_every = sum(answered) / len(answered), sum(answered) / len(every)
    if math.isclose(mean, of_every, rel_tol=0.01) and not math.isclose(mean, of_answered, rel_tol=0.01):
        message = (
            f"mean ttft {mean:g} ms counts {len(every) - len(answered)} of {len(every)} requests that "
            f"returned nothing as 0: of those that answered it is {of_answered:g} ms"
        )
        numbers = {"mean": mean, "of_answered": of_answered}
        row.findings.append(Finding(rule="samples", severity="wrong", message=message, numbers=numbers))


def _means(
    row: Fields, samples: RequestSamples, failed: int | None, reported_already: set[str]
) -> list[Metric]:
    """Those that the client left to the lists: of end-to-end times, and of the wait for --max-concurrency,
    which has an entry for requests that failed and is left out where there are any."""
    queued = row.numbers("queue_times", scale=1e3, least=0)
    lists = {
        "e2e": ("latencies", samples.e2es_ms),
        "client_queue_time": ("queue_times", () if failed else queued),
    }
    return [
        Metric(
            name=name,
            value=sum(values) / len(values),
            unit="ms",
            scope="request",
            statistic="mean",
            derived=f"mean of {key}",
        )
        for name, (key, values) in lists.items()
        if values and name not in reported_already
    ]


def _parallelism(row: Fields) -> tuple[Parallelism, tuple[str, ...]]:
    given = {key: str(row.values[key]) for key in DEGREES if str(row.values.get(key)).isdecimal()}
    degrees = {DEGREES[key]: int(row.take(key)) for key in given}
    note = "from --metadata: " + ", ".join(f"{key} {value}" for key, value in given.items())
    return Parallelism.model_validate(degrees), (note,) if given else ()
