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
from typing import Any

from harness.serving.clients import format, trtllm
from harness.serving.clients.commands import Command, command_of, contradicts
from harness.serving.clients.console_text import Block, blocks, has_blocks
from harness.serving.clients.fields import Fields
from harness.serving.clients.files import Document
from harness.serving.clients.format import UNITS
from harness.serving.schema import Metric, OfferedLoad, Scope, ServingRun, Tokens, Totals

RATES: dict[str, tuple[str, str, str, Scope, Tokens]] = {
    "input token throughput": ("throughput", "tok/s", "total", "instance", "input"),
    "output token throughput": ("throughput", "tok/s", "total", "instance", "output"),
    "total token throughput": ("throughput", "tok/s", "total", "instance", "total"),
    "peak output token throughput": ("peak_throughput", "tok/s", "max", "instance", "output"),
    "user throughput": ("throughput_per_user", "tok/s", "mean", "request", "output"),
    "request throughput": ("request_throughput", "req/s", "total", "instance", "none"),
    "request goodput": ("goodput", "req/s", "total", "instance", "none"),
}
PLAIN = {
    "concurrency": ("concurrency", "mean"), "peak concurrent requests": ("peak_concurrency", "max"),
    "accept length": ("accept_length", "mean"), "acceptance length": ("accept_length", "mean"),
}  # fmt: skip
LATENCY = re.compile(r"(mean|median|std(?: dev)?|min|max|p\d+(?:\.\d+)?) (.+?) \(([^()]*)\)")
LATENCIES = {
    "ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e", "e2e latency": "e2e",
    "client queue time": "client_queue_time", "e2el incl. client queue": "e2e_with_client_queue",
}  # fmt: skip
LIMITS = ("maximum request concurrency", "max request concurrency", "max reqeuest concurrency")
SENT = ("request rate configured (RPS)", "request rate configured (rps)", "traffic request rate")
OWN_ENGINE = {"tensorrt_llm.serve": "tensorrt-llm", "sglang.bench_offline_throughput": "sglang"}
WINDOW = (
    "of the window between warm-up and cool-down: `Successful requests` and input tokens count only the "
    "requests wholly inside it, output tokens all that came in it; so tokens a request and the total "
    "throughput mix two counts"
)


class Console:
    """The format of a text with blocks of results, reports of trtllm-bench, or both."""

    name = "console"
    own = frozenset[str]()

    def recognises(self, document: Document) -> bool:
        is_text = document.kind == "text"
        return is_text and (has_blocks(document.text) or trtllm.MARK.search(document.text) is not None)

    def runs(self, document: Document) -> list[ServingRun]:
        """Of the blocks that say anything, and of trtllm-bench's reports, in the text's order."""
        printed = list(blocks(document.text))
        after = [*(block.before for block in printed[1:]), None]
        commands = map(command_of, (block.before for block in printed), after)
        made = [_run(document, block, command) for block, command in zip(printed, commands, strict=True)]
        made = [run for run in made if run.metrics or run.totals != Totals()]
        return sorted([*made, *trtllm.reports(document)], key=lambda run: int(run.id.rpartition(":")[2]))


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
        message = "the block is broken off: its last line is missing, and what came before it may be"
        row.find("truncated", "suspect", f"{where}: {message}")
    client = _client(row, block.offline)
    totals = Totals(
        duration_s=_with_unit(row, "benchmark duration", "s"),
        completed=row.count("successful requests"),
        failed=row.count("failed requests"),
        input_tokens=row.count("total input tokens"),
        output_tokens=row.count("total generated tokens"),
    )
    workload, metrics, about = _workload(row), _metrics(row), dict[str, Any]()
    notes = [WINDOW] if client == "moai.serve" else []
    if command:
        workload, about["model"], more = _with_command(row, workload, command, totals)
        notes += more
    spoken = row.text("backend")
    return ServingRun(
        **about,
        id=where,
        client=f"{client}.console",
        source=where,
        engine=OWN_ENGINE.get(client) or format.engine(spoken),
        protocol="" if block.offline else spoken,
        mode="offline" if block.offline else "online",
        workload=workload,
        totals=totals,
        metrics=tuple(metrics),
        extra=row.rest(),
        notes=tuple(notes),
        findings=tuple(row.findings),
    )


def _metrics(row: Fields) -> list[Metric]:
    metrics = []
    for label, (name, unit, statistic, scope, tokens) in RATES.items():
        if (value := _with_unit(row, label, unit)) is not None:
            metric = Metric(
                name=name, value=value, unit=unit, scope=scope, tokens=tokens, statistic=statistic
            )
            metrics.append(metric)
    for label, (name, statistic) in PLAIN.items():
        if (value := row.number(label)) is not None:
            metrics.append(Metric(name=name, value=value, unit="1", scope="instance", statistic=statistic))
    for key in row.values:
        match = LATENCY.fullmatch(key)
        if match and match[2] in LATENCIES and (value := _scaled(row, key, match[3], "ms")) is not None:
            name, statistic = LATENCIES[match[2]], match[1].removesuffix(" dev")
            metrics.append(Metric(name=name, value=value, unit="ms", scope="request", statistic=statistic))
    return metrics


def _with_unit(row: Fields, label: str, wanted: str) -> float | None:
    """The number of a label, whatever known unit stands behind it."""
    for key in row.values:
        name, _, unit = key.partition(" (")
        if name == label:
            return _scaled(row, key, unit.rstrip(")"), wanted)
    return None


def _scaled(row: Fields, key: str, unit: str, wanted: str) -> float | None:
    if unit in UNITS[wanted]:
        return row.number(key, scale=UNITS[wanted][unit])
    row.take(key)
    row.leave_out(key, f"is in {unit or 'no unit'}, not in one of {', '.join(UNITS[wanted])}")
    return None


def _workload(row: Fields) -> OfferedLoad:
    limit, rate = (next((label for label in labels if label in row.values), "") for labels in (LIMITS, SENT))
    unlimited = str(row.values.get(limit, "")).lower() in ("not set", "none")
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
        row.find("command", "suspect", message)
        return workload, "", []
    printed = {name: value for name, value in workload.model_dump().items() if value not in (None, "")}
    how = "the arguments printed" if command.printed else "the command"
    notes = [f"model and workload from {how} before the block", *([note] if note else [])]
    return requested.model_copy(update=printed), command.model, notes
