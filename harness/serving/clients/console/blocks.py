"""Blocks of results as serving clients print them, and as people paste them into issues and documents.

Read in vllm/benchmarks/serve.py (0.32.0) and its predecessor benchmark_serving.py; sglang/bench_serving.py
(0.4.0 to 0.5.6) and bench_offline_throughput.py; TensorRT-LLM's tensorrt_llm/serve/scripts/
benchmark_serving.py (1.3); and in the blocks of Moreh's article on MoAI ("DeepSeek R1 671B on AMD MI300X
GPUs: Maximum Throughput"), whose fork leaves out a warm-up and a cool-down. They print two decimals; which
client it was follows from its lines.

What a client sees is one `instance`; how many GPUs stand behind it, the block does not say. Nor does vLLM's
say which engine answered.
"""

from __future__ import annotations

import re

from harness.serving.clients import common
from harness.serving.clients.common import MILLISECONDS
from harness.serving.clients.console.commands import Command, command_of, contradicts
from harness.serving.clients.console.text import Block, blocks, has_blocks
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document
from harness.serving.clients.trtllm import bench
from harness.serving.schema import Finding, Metric, OfferedLoad, Scope, ServingRun, Tokens, Totals

NAME = "console"
TOKENS_PER_SECOND = {"tok/s": 1.0, "tokens/s": 1.0, "token/s": 1.0, "tokens/sec": 1.0}
REQUESTS_PER_SECOND = {"req/s": 1.0, "requests/s": 1.0}
SECONDS = {unit: scale / 1e3 for unit, scale in MILLISECONDS.items()}
RATES: dict[str, tuple[str, str, str, Scope, Tokens]] = {
    "input token throughput": ("throughput", "tok/s", "total", "instance", "input"),
    "output token throughput": ("throughput", "tok/s", "total", "instance", "output"),
    "total token throughput": ("throughput", "tok/s", "total", "instance", "total"),
    "peak output token throughput": ("peak_throughput", "tok/s", "max", "instance", "output"),
    "user throughput": ("throughput_per_user", "tok/s", "mean", "request", "output"),
    "request throughput": ("request_throughput", "req/s", "total", "instance", "none"),
    "request goodput": ("goodput", "req/s", "total", "instance", "none"),
}
UNITS = {"tok/s": TOKENS_PER_SECOND, "req/s": REQUESTS_PER_SECOND}
COUNTS = {"concurrency": ("concurrency", "mean"), "peak concurrent requests": ("peak_concurrency", "max")}
LATENCY = re.compile(r"(mean|median|std(?: dev)?|min|max|p\d+(?:\.\d+)?) (.+?) \(([^()]*)\)")
LATENCIES = {
    "ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e", "e2e latency": "e2e",
    "client queue time": "client_queue_time", "e2el incl. client queue": "e2e_with_client_queue",
}  # fmt: skip
WINDOW = (
    "of the window between warm-up and cool-down: `Successful requests` and input tokens count only the "
    "requests wholly inside it, output tokens all that came in it; so tokens a request and the total "
    "throughput mix two counts"
)


def recognises(document: Document) -> bool:
    return document.kind == "text" and (has_blocks(document.text) or bench.MARK in document.text)


def runs(document: Document) -> list[ServingRun]:
    """The runs of the blocks that say anything, and of trtllm-bench's reports, in the text's order."""
    printed_blocks = list(blocks(document.text))
    commands = [
        command_of(block.before, printed_blocks[i + 1].before if i + 1 < len(printed_blocks) else None)
        for i, block in enumerate(printed_blocks)
    ]
    made = [_run(document, block, command) for block, command in zip(printed_blocks, commands, strict=True)]
    made = [run for run in made if run.metrics or run.totals != Totals()]
    return sorted([*made, *bench.printed(document)], key=lambda run: int(run.id.rpartition(":")[2]))


def _client(row: Fields, offline: bool) -> str:
    labels = set(row.values)
    if offline:
        return "sglang.bench_offline_throughput"
    if labels & {"warm-up time", "cool-down time", "number of worker processes"}:
        return "moai.serve"
    if "user throughput (tok/s)" in labels or "total requests" in labels:
        return "tensorrt_llm.serve"
    if labels & {"backend", "traffic request rate", "concurrency", "mean e2e latency (ms)"}:
        return "sglang.bench_serving"
    return "vllm.serve"


def _run(document: Document, block: Block, command: Command | None) -> ServingRun:
    where = f"{document.path}:{block.line}"
    unsure = {*block.conflicts, block.cut}
    row = Fields(where, {k: v for k, v in block.values.items() if k not in unsure}, as_text=True)
    for label, (first, second) in block.conflicts.items():
        row.leave_out(label, f"stands there twice, as {first} and as {second}")
    if block.cut:
        row.leave_out(block.cut, "is where the text ends and may be cut through")
    if not block.closed:
        message = (
            f"{where}: the block is broken off: its last line is missing, and what came before it may be"
        )
        row.findings.append(Finding(rule="truncated", severity="suspect", message=message))
    client = _client(row, block.offline)
    workload, totals, metrics = printed(row)
    notes = [WINDOW] if client == "moai.serve" else []
    model = ""
    if command:
        workload, model, more = _with_command(row, workload, command, totals)
        notes += more
    protocol = row.text("backend")
    return ServingRun(
        id=where,
        client=f"{client}.console",
        source=where,
        model=model,
        engine=_engine(client, protocol),
        protocol="" if block.offline else protocol,
        mode="offline" if block.offline else "online",
        workload=workload,
        totals=totals,
        metrics=tuple(metrics),
        extra=row.rest(),
        notes=tuple(notes),
        findings=tuple(row.findings),
    )


def _engine(client: str, protocol: str) -> str:
    """That of a client which runs or serves one engine only; else what the protocol names."""
    own = {"tensorrt_llm.serve": "tensorrt-llm", "sglang.bench_offline_throughput": "sglang"}
    return own.get(client) or common.engine(protocol)


def printed(row: Fields) -> tuple[OfferedLoad, Totals, list[Metric]]:
    """What the lines of a block say, each by its label in small letters."""
    totals = Totals(
        duration_s=_with_unit(row, "benchmark duration", SECONDS),
        completed=row.count("successful requests"),
        failed=row.count("failed requests"),
        input_tokens=row.count("total input tokens"),
        output_tokens=row.count("total generated tokens"),
    )
    return _workload(row), totals, _metrics(row)


def _metrics(row: Fields) -> list[Metric]:
    metrics = []
    for label, (name, unit, statistic, scope, tokens) in RATES.items():
        value = _with_unit(row, label, UNITS[unit])
        if value is not None:
            metrics.append(
                Metric(name=name, value=value, unit=unit, scope=scope, tokens=tokens, statistic=statistic)
            )
    for label, (name, statistic) in COUNTS.items():
        if (value := row.number(label)) is not None:
            metrics.append(Metric(name=name, value=value, unit="1", scope="instance", statistic=statistic))
    for key in row.values:
        match = LATENCY.fullmatch(key)
        if not match or match[2] not in LATENCIES:
            continue
        value = _scaled(row, key, match[3], MILLISECONDS)
        if value is not None:
            statistic = "std" if match[1] == "std dev" else match[1]
            metrics.append(
                Metric(name=LATENCIES[match[2]], value=value, unit="ms", scope="request", statistic=statistic)
            )
    return metrics


def _with_unit(row: Fields, label: str, units: dict[str, float]) -> float | None:
    """The number of a label, whatever known unit stands behind it."""
    for key in row.values:
        name, _, unit = key.partition(" (")
        if name == label:
            return _scaled(row, key, unit.rstrip(")"), units)
    return None


def _scaled(row: Fields, key: str, unit: str, units: dict[str, float]) -> float | None:
    if unit not in units:
        row.take(key)
        row.leave_out(key, f"is in {unit or 'no unit'}, not in one of {', '.join(units)}")
        return None
    return row.number(key, scale=units[unit])


def _workload(row: Fields) -> OfferedLoad:
    labels = ("maximum request concurrency", "max request concurrency", "max reqeuest concurrency")
    limit = next((label for label in labels if label in row.values), "")
    unlimited = str(row.values.get(limit, "")).lower() in ("not set", "none")
    rates = ("request rate configured (RPS)", "request rate configured (rps)", "traffic request rate")
    rate = next((label for label in rates if label in row.values), "")
    if unlimited:
        row.take(limit)
    return OfferedLoad(
        concurrency=None if unlimited or not limit else row.number(limit),
        request_rate=row.number(rate, infinite=0.0) if rate else None,
        num_prompts=row.count("total requests"),
        warmup_s=row.number("warm-up time"),
        cooldown_s=row.number("cool-down time"),
    )


def _with_command(
    row: Fields, workload: OfferedLoad, command: Command, totals: Totals
) -> tuple[OfferedLoad, str, list[str]]:
    """The workload with what the command before the block asked for, unless the two disagree."""
    requested, note = command.workload()
    if contradiction := contradicts(requested, workload, totals.completed):
        message = f"{row.where}: the command before the block is not of it: {contradiction}"
        row.findings.append(Finding(rule="command", severity="suspect", message=message))
        return workload, "", []
    printed = {name: value for name, value in workload.model_dump().items() if value not in (None, "")}
    how = "the arguments printed" if command.printed else "the command"
    notes = [f"model and workload from {how} before the block", *([note] if note else [])]
    return requested.model_copy(update=printed), command.model, notes
