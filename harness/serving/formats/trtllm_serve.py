"""TensorRT-LLM's serving client: the JSON of `--save-result`, one object a run.

Read in NVIDIA/TensorRT-LLM, tensorrt_llm/serve/scripts/benchmark_serving.py (0228a712, of 1.3). It is vLLM's
old script with `user_throughput` (mean over requests of output tokens / latency), `e2els` and
`avg_decoded_tokens_per_iter` added; it kept the literal key "request_goodput:". Times of single requests
are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.serving.fields import Fields
from harness.serving.formats.metrics import of_keys, single
from harness.serving.reading import Document, objects
from harness.serving.schema import Samples, ServingRun, Totals, Workload

NAME = "tensorrt_llm.serve"
OWN = {"user_throughput", "avg_decoded_tokens_per_iter"}
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e"}


def recognises(document: Document) -> bool:
    rows = document.kind in ("json", "jsonl") and document.rows()
    return bool(rows) and all(isinstance(row, Mapping) and OWN & set(row) for row in rows)


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _run(row: Fields) -> ServingRun:
    metrics = [
        *single(row, "output_throughput", "throughput", "tok/s", tokens="output"),
        *single(row, "total_token_throughput", "throughput", "tok/s", tokens="total"),
        *single(row, "request_throughput", "request_throughput", "req/s"),
        *single(row, "request_goodput:", "goodput", "req/s"),
        *single(row, "request_goodput", "goodput", "req/s"),
        *of_keys(row, LATENCIES),
    ]
    user = single(row, "user_throughput", "throughput_per_user", "tok/s", "request", "output")
    metrics += [one.model_copy(update={"statistic": "mean"}) for one in user]
    completed, asked = row.count("completed"), row.count("num_prompts")
    row.take("generated_texts")
    return ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        date=row.text("date"),
        model=row.text("model_id"),
        engine="tensorrt_llm",
        mode="online",
        workload=Workload(
            concurrency=row.number("max_concurrency"),
            request_rate=row.number("request_rate", infinite=0.0),
            num_prompts=asked,
        ),
        totals=Totals(
            duration_s=row.number("duration"),
            completed=completed,
            failed=_failed(asked, completed),
            input_tokens=row.count("total_input_tokens"),
            output_tokens=row.count("total_output_tokens"),
        ),
        metrics=tuple(metrics),
        samples=Samples(
            input_lens=row.counts("input_lens"),
            output_lens=row.counts("output_lens"),
            ttfts_ms=row.numbers("ttfts", scale=1e3),
            e2es_ms=row.numbers("e2els", scale=1e3),
            itls_ms=row.lists("itls", scale=1e3),
        ),
        extra=row.rest(),
        findings=tuple(row.findings),
    )


def _failed(asked: int | None, completed: int | None) -> int | None:
    """The script counts no failures: those asked for that did not complete."""
    if asked is None or completed is None or completed > asked:
        return None
    return asked - completed
