"""`sglang.bench_serving`: one JSON object a run, appended to a JSONL file.

Read in sglang/bench_serving.py of 0.4.3 and 0.5.x.
"""

from __future__ import annotations

from harness.serving.reading import Document, Fields, objects
from harness.serving.schema import Metric, ServingRun, Totals, Workload

NAME = "sglang.bench_serving"
KEYS = {"random_range_ratio", "total_output_tokens_retokenized", "mean_e2e_latency_ms"}
LATENCIES = {"e2e_latency": "e2e", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}
STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
THROUGHPUTS = {"input_throughput": "input", "output_throughput": "output", "total_throughput": "total"}


def recognises(document: Document) -> bool:
    return document.kind in ("json", "jsonl") and all(
        len(KEYS & set(row)) >= 2 for _, row in objects(document)
    )


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _run(row: Fields) -> ServingRun:
    metrics = [
        Metric(name="throughput", value=value, unit="tok/s", scope="instance", tokens=tokens)
        for key, tokens in THROUGHPUTS.items()
        if (value := row.number(key)) is not None
    ]
    metrics += [
        Metric(name=name, value=value, unit="ms", scope="request", statistic=statistic)
        for key, name in LATENCIES.items()
        for statistic in STATISTICS
        if (value := row.number(f"{statistic}_{key}_ms")) is not None
    ]
    return ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        engine=row.text("backend"),
        mode="online",
        workload=Workload(
            dataset=row.text("dataset_name"),
            input_len=row.number("random_input_len"),
            output_len=row.number("random_output_len"),
            range_ratio=row.number("random_range_ratio"),
            concurrency=row.number("max_concurrency"),
            request_rate=row.number("request_rate", infinite=0.0),
        ),
        totals=Totals(
            duration_s=row.number("duration"),
            completed=row.count("completed"),
            input_tokens=row.count("total_input_tokens"),
            output_tokens=row.count("total_output_tokens"),
        ),
        metrics=tuple(metrics),
        extra=row.rest(),
        findings=tuple(row.findings),
    )
