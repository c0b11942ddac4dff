"""`sglang.bench_offline_throughput`: all prompts handed to an engine in the same process.

Read in sglang/bench_offline_throughput.py of the wheels 0.4.3, 0.5.3 and 0.5.9, and
benchmark/offline_throughput.py of 0.5.23: one JSON object a run, appended to a JSONL file. Latency is in
seconds. total_throughput counts input and output tokens; that of output tokens stands beside it. `backend` is
the way in (engine, runtime), not the engine. last_gen_throughput (by 0.4.6) is the server's own, of its last
interval.
"""

from __future__ import annotations

from harness.serving.clients import common
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document, keys_of, objects
from harness.serving.schema import OfferedLoad, ServingRun, Tokens, Totals

NAME = "sglang.bench_offline_throughput"
KEYS = {"successful_requests", "total_latency", "total_throughput"}
THROUGHPUTS: dict[str, Tokens] = {
    "input_throughput": "input",
    "output_throughput": "output",
    "total_throughput": "total",
}


def recognises(document: Document) -> bool:
    return any(len(KEYS & keys) >= 2 for keys in keys_of(document))


def runs(document: Document) -> list[ServingRun]:
    return [_run(Fields(where, row)) for where, row in objects(document)]


def _run(row: Fields) -> ServingRun:
    sent = row.count("successful_requests")
    run = ServingRun(
        id=row.where,
        client=NAME,
        source=row.where,
        engine="sglang",
        mode="offline",
        workload=OfferedLoad(num_prompts=sent, request_rate=0.0),
        totals=Totals(
            duration_s=row.number("total_latency"),
            completed=sent,
            input_tokens=row.count("total_input_tokens"),
            output_tokens=row.count("total_output_tokens"),
        ),
        metrics=(
            *common.throughputs(row, THROUGHPUTS),
            *common.single(row, "request_throughput", "request_throughput", "req/s"),
            *common.single(row, "last_gen_throughput", "last_gen_throughput", "tok/s", tokens="output"),
        ),
        notes=("successful_requests is the number sent: this client counts no failures",),
        extra=row.rest(),
        findings=tuple(row.findings),
    )
    return common.measured(run, row, (*sorted(KEYS), *THROUGHPUTS))
