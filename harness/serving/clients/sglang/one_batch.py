"""`sglang.bench_one_batch`: one static batch through the model runner, with no server and no scheduler.

Read in sglang/bench_one_batch.py of the wheels 0.4.3, 0.5.3 and 0.5.9, and benchmark/one_batch.py of 0.5.23:
one JSON object a batch, appended to a JSONL file, the same keys in all. Latencies are seconds. The throughput
of prefill is of input tokens in the prefill's time, that of decode is the batch over the median step, and the
overall one counts input and output tokens over all steps. No request's TTFT or TPOT: nothing arrives here.
"""

from __future__ import annotations

from harness.serving.clients import common
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, keys_of, objects
from harness.serving.schema import Metric, OfferedLoad, ServingRun, Totals

NAME = "sglang.bench_one_batch"
KEYS = {
    "prefill_latency",
    "prefill_throughput",
    "median_decode_latency",
    "median_decode_throughput",
    "total_latency",
    "overall_throughput",
}
STEPS = {"prefill_latency": ("prefill", "total"), "median_decode_latency": ("decode_step", "median")}


def recognises(document: Document) -> bool:
    return any(len(KEYS & keys) >= 3 for keys in keys_of(document))


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _run(row: Fields) -> ServingRun:
    load = batch(row)
    metrics = (
        *common.throughputs(row, {"overall_throughput": "total"}),
        *common.single(row, "prefill_throughput", "prefill_throughput", "tok/s", tokens="input"),
        *common.single(
            row,
            "median_decode_throughput",
            "decode_throughput",
            "tok/s",
            tokens="output",
            statistic="median",
        ),
        *(
            Metric(name=name, value=value, unit="ms", scope="instance", statistic=statistic)
            for key, (name, statistic) in STEPS.items()
            if (value := row.number(key, scale=1e3)) is not None
        ),
    )
    run = ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        label=row.text("run_name"),
        engine="sglang",
        mode="offline",
        workload=load,
        totals=counted(load, row.number("total_latency")),
        metrics=metrics,
        notes=("a static batch in lockstep: prefill, then decode steps; no server, no scheduler",),
        extra=row.rest(),
        findings=tuple(row.findings),
    )
    return common.measured(run, row, sorted(KEYS))


def batch(row: Fields) -> OfferedLoad:
    """batch_size requests of input_len and output_len tokens, all at once."""
    size = row.count("batch_size")
    return OfferedLoad(
        input_len=row.number("input_len"),
        output_len=row.number("output_len"),
        num_prompts=size,
        concurrency=size,
        request_rate=0.0,
    )


def counted(load: OfferedLoad, duration_s: float | None) -> Totals:
    """As the client counts, which stops where a request fails: every request whole."""
    size, lengths = load.num_prompts, (load.input_len, load.output_len)
    tokens = [None if size is None or length is None else round(size * length) for length in lengths]
    return Totals(duration_s=duration_s, completed=size, input_tokens=tokens[0], output_tokens=tokens[1])
