"""TensorRT-LLM's serving client: the JSON of `--save-result`, one object a run.

Read in NVIDIA/TensorRT-LLM, tensorrt_llm/serve/scripts/benchmark_serving.py (0228a712, of 1.3). It is vLLM's
old script with `user_throughput` (mean over requests of output tokens / latency), `e2els` and
`avg_decoded_tokens_per_iter` added; it kept the literal key "request_goodput:". Times of single requests
are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.serving.clients import common
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, objects
from harness.serving.schema import OfferedLoad, ServingRun, Tokens, Totals

NAME = "tensorrt_llm.serve"
OWN = {"user_throughput", "avg_decoded_tokens_per_iter"}
WANTED = ("duration", "completed", "output_throughput", "mean_ttft_ms", "mean_tpot_ms")
THROUGHPUTS: dict[str, Tokens] = {"output_throughput": "output", "total_token_throughput": "total"}
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}


def recognises(document: Document) -> bool:
    rows = document.rows() if document.kind in ("json", "jsonl") else []
    return bool(rows) and all(isinstance(row, Mapping) and OWN & set(row) for row in rows)


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _run(row: Fields) -> ServingRun:
    samples, failed = common.requests(row, e2es="e2els")
    metrics = (
        *common.throughputs(row, THROUGHPUTS),
        *common.single(row, "request_throughput", "request_throughput", "req/s"),
        *common.goodput(row),
        *common.of_keys(row, LATENCIES),
        *common.of_object(
            row.inside("avg_decoded_tokens_per_iter"),
            {"mean": "mean"},
            "accept_length",
            "1",
            scope="instance",
        ),
        *common.single(row, "user_throughput", "throughput_per_user", "tok/s", "request", "output", "mean"),
    )
    completed, requested = row.count("completed"), row.count("num_prompts")
    run = ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        date=row.text("date"),
        model=row.text("model_id"),
        engine="tensorrt-llm",
        protocol=common.protocol(row),
        mode="online",
        workload=OfferedLoad(
            concurrency=row.number("max_concurrency"),
            request_rate=common.request_rate(row),
            burstiness=row.number("burstiness"),
            ramp_up=common.ramp_up(row),
            num_prompts=requested,
        ),
        totals=Totals(
            duration_s=row.number("duration"),
            completed=completed,
            failed=_failed(requested, completed) if failed is None else failed,
            input_tokens=row.count("total_input_tokens"),
            output_tokens=row.count("total_output_tokens"),
        ),
        metrics=metrics,
        samples=samples,
        notes=common.without_bulk(row),
        extra=row.rest(),
        findings=tuple(row.findings),
    )
    return common.measured(run, row, WANTED)


def _failed(requested: int | None, completed: int | None) -> int | None:
    """Where it kept no list of requests: those asked for that did not complete."""
    if requested is None or completed is None or completed > requested:
        return None
    return requested - completed
