"""`vllm bench throughput`, benchmarks/benchmark_throughput.py before it: a JSON object, all prompts at once.

Read in vllm/benchmarks/throughput.py of 0.32.0 (elapsed_time [s], num_requests, total_num_tokens,
requests_per_second, tokens_per_second; model_id is new there) and benchmarks/benchmark_throughput.py of
vllm-project/vllm at 018efffd. **tokens_per_second counts input and output tokens**; how many were output the
file does not say (the console does). Where the engine returned no outputs (the asynchronous
engine, --backend hf), the tokens are those asked for.
"""

from __future__ import annotations

from harness.serving.clients import common
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, keys_of, objects
from harness.serving.schema import OfferedLoad, ServingRun, Totals

NAME = "vllm.throughput"
KEYS = {"elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"}


def recognises(document: Document) -> bool:
    return any(len(KEYS & keys) >= 3 for keys in keys_of(document))


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _run(row: Fields) -> ServingRun:
    run = ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        model=row.text("model_id"),
        engine="vllm",
        mode="offline",
        workload=OfferedLoad(num_prompts=row.count("num_requests"), request_rate=0.0),
        totals=Totals(duration_s=row.number("elapsed_time"), completed=row.count("num_requests")),
        metrics=(
            *common.throughputs(row, {"tokens_per_second": "total"}),
            *common.single(row, "requests_per_second", "request_throughput", "req/s"),
            *common.single(row, "total_num_tokens", "tokens", "tokens", tokens="total"),
        ),
        notes=("engine taken to be vllm: --backend hf writes the same file",),
        extra=row.rest(),
        findings=tuple(row.findings),
    )
    return common.measured(run, row, sorted(KEYS))
