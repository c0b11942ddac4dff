"""`vllm bench latency`, benchmarks/benchmark_latency.py before it: one JSON object, a batch again and again.

Read in vllm/benchmarks/latency.py of 0.32.0: avg_latency, latencies (one for each pass) and percentiles, all
in seconds; model_id is new there. Batch size and lengths are not in the file, so that the time of a pass says
nothing of tokens: it is `batch_latency` of the whole engine, from the prompts to the last token.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.serving.clients import common
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, keys_of, objects
from harness.serving.schema import Metric, OfferedLoad, RequestSamples, ServingRun

NAME = "vllm.latency"
KEYS = {"avg_latency", "latencies", "percentiles"}


def recognises(document: Document) -> bool:
    return any(len(KEYS & keys) >= 2 and "duration" not in keys for keys in keys_of(document))


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _run(row: Fields) -> ServingRun:
    passes = row.numbers("latencies", scale=1e3, least=0)
    seconds = {"mean": row.number("avg_latency", scale=1e3)}
    percentiles = row.take("percentiles")
    if isinstance(percentiles, Mapping):
        inner = Fields(f"{row.where}: percentiles", percentiles, findings=row.findings)
        seconds |= {f"p{key}": inner.number(key, scale=1e3) for key in percentiles}
    elif percentiles is not None:
        row.leave_out("percentiles", "is not an object")
    if passes:
        seconds |= {"min": min(passes), "max": max(passes)}
    run = ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        model=row.text("model_id"),
        engine="vllm",
        mode="offline",
        workload=OfferedLoad(request_rate=0.0),
        samples=RequestSamples(e2es_ms=tuple(passes)),
        metrics=tuple(_metric(statistic, value) for statistic, value in seconds.items() if value is not None),
        extra={**row.rest(), "latencies_ms": list(passes)},
        notes=("batch size and lengths are not in the file",),
        findings=tuple(row.findings),
    )
    return common.measured(run, row, sorted(KEYS))


def _metric(statistic: str, value: float) -> Metric:
    derived = f"{statistic} of latencies" if statistic in ("min", "max") else ""
    return Metric(
        name="batch_latency", value=value, unit="ms", scope="instance", statistic=statistic, derived=derived
    )
