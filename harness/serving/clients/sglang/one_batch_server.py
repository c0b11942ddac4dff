"""`sglang.bench_one_batch_server`: one batch sent to a server as one request.

Read in sglang/bench_one_batch_server.py of the wheels 0.4.3, 0.4.6.post5, 0.4.9.post2 and 0.5.3,
test/bench_one_batch_server_internal.py of 0.5.9 and benchmark/one_batch_server.py of 0.5.23: one JSON object
a batch, appended to a JSONL file, or a list of them (--output-path, --pydantic-result-filename). Latencies
are seconds. **`output_throughput` changed its meaning**: in 0.4.3 output tokens over the whole time; by
0.4.6 (with last_gen_throughput beside it) all output tokens, the first ones too, over the time after the last
request's first token. That one is `decode_throughput` here, and the throughput over the whole time derived.
A -1 in last_gen_throughput or acc_length stands for `not known` (0.5.9 and later).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.serving.clients import common
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, keys_of, objects
from harness.serving.clients.sglang.one_batch import batch, counted
from harness.serving.schema import Metric, ServingRun, Totals

NAME = "sglang.bench_one_batch_server"
KEYS = {
    "run_name",
    "batch_size",
    "latency",
    "overall_throughput",
    "last_gen_throughput",
    "last_ttft",
    "acc_length",
}
SINCE_DECODE_ONLY = {"last_gen_throughput", "last_ttft", "ttft", "acc_length"}
OTHERS = {"prefill_latency", "total_latency"}
UNKNOWN = -1


def recognises(document: Document) -> bool:
    return any(len(KEYS & keys) >= 3 and not OTHERS & keys for keys in keys_of(document))


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, _known(row))) for where, row in objects(document)]


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    maybe = ("last_gen_throughput", "acc_length")
    return {key: None if key in maybe and value == UNKNOWN else value for key, value in row.items()}


def _run(row: Fields) -> ServingRun:
    load = batch(row)
    totals = counted(load, row.number("latency"))
    actual = row.count("total_output_tokens")
    if actual is not None:
        totals = totals.model_copy(update={"output_tokens": actual})
    hits = row.number("cache_hit_rate")
    run = ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        label=row.text("run_name"),
        model=row.text("model_path"),
        mode="online",
        workload=load.model_copy(update={"prefix_cached": None if hits is None else hits > 0}),
        totals=totals,
        metrics=(*_throughputs(row, totals), *_others(row, hits)),
        flags=_flags(row),
        extra=row.rest(),
        findings=tuple(row.findings),
    )
    return common.measured(run, row, ("latency", "output_throughput", "overall_throughput"))


def _throughputs(row: Fields, totals: Totals) -> list[Metric]:
    overall = common.throughputs(row, {"overall_throughput": "total"})
    if not SINCE_DECODE_ONLY & set(row.values):
        return [*common.throughputs(row, {"output_throughput": "output"}), *overall]
    derived = []
    if totals.output_tokens is not None and totals.duration_s:
        value, how = totals.output_tokens / totals.duration_s, "output tokens / latency"
        metric = Metric(
            name="throughput", value=value, unit="tok/s", scope="instance", tokens="output", derived=how
        )
        derived = [metric]
    return [
        *derived,
        *overall,
        *common.single(row, "input_throughput", "prefill_throughput", "tok/s", tokens="input"),
        *common.single(row, "output_throughput", "decode_throughput", "tok/s", tokens="output"),
    ]


def _others(row: Fields, hits: float | None) -> list[Metric]:
    last = "steady_state_output_throughput"
    metrics = [
        *common.single(row, "last_gen_throughput", "last_gen_throughput", "tok/s", tokens="output"),
        *common.single(row, last, last, "tok/s", tokens="output"),
        *common.single(row, "acc_length", "accept_length", "1", statistic="mean"),
    ]
    for key in ("ttft", "last_ttft"):
        value = row.number(key, scale=1e3)
        if value is not None:
            metrics.append(Metric(name="ttft", value=value, unit="ms", scope="request", statistic="max"))
    if hits is not None:
        metrics.append(Metric(name="cache_hit_rate", value=hits, unit="1", scope="instance"))
    return metrics


def _flags(row: Fields) -> tuple[str, ...]:
    given = row.values.get("server_args")
    if not isinstance(given, list) or not all(isinstance(flag, str) for flag in given):
        return ()
    row.take("server_args")
    return tuple(given)
