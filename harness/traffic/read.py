"""Any file that tells of traffic: a log, a trace, a client's results, FlashInfer's records of calls."""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import UnreadableError, UsageError
from harness.json_stream import JsonText
from harness.serving.clients import files
from harness.serving.clients.files import Document
from harness.serving.clients.load import load
from harness.serving.schema import ServingRun
from harness.serving.trace.profilers import read as read_recorded
from harness.traffic.log import read_log
from harness.traffic.steps import Step, Traffic
from harness.traffic.trace import read_trace
from shapes.scheduler import Phase, Workload, simulate

TRACE = re.compile(rb'"(traceEvents|schemaVersion|deviceProperties|ph|rocprofiler-sdk-tool)"\s*:')
"""Keys of which one stands at the beginning of every trace, and in no other file."""
MOST_STEPS = 2000  # the most decode steps that are taken of a client's requests, at equal distances
FLASHINFER_GEMM = re.compile(r"gemm_.*n(\d+)_k(\d+)")
FLASHINFER_MOE = re.compile(r"moe_fp8_block_scale_.*topk(\d+)(?:_ng\d+_kg\d+)?_e(\d+)_h(\d+)_i(\d+)")
FLASHINFER_MLA = re.compile(r"mla_paged_decode_h(\d+)_ckv512_kpe64_ps(\d+)")


def read_files(paths: Sequence[str], traffic: Traffic) -> None:
    """Adds what each file tells. Raises UsageError if one tells nothing, or only some have steps."""
    counts = Counter(Path(path).resolve() for path in paths)
    for file, count in counts.items():
        if count > 1:
            raise UsageError(f"{file} is given twice: its steps would count twice")
    without_steps = []
    for path in map(Path, paths):
        before = traffic.step_count()
        traffic.read.append(f"{path}: {_read(path, traffic)}")
        if traffic.step_count() == before:
            without_steps.append(path)
    if without_steps and len(without_steps) < len(paths):
        raise UsageError(f"{without_steps[0]} has shapes without steps, another file has steps: give them "
                         "apart, as their weights cannot be added")  # fmt: skip


def _read(path: Path, traffic: Traffic) -> str:
    """Adds what the file tells; returns what that is. Raises UsageError where it tells nothing."""
    with contextlib.closing(JsonText(path)) as text:
        is_trace = TRACE.search(text.head)
    if is_trace:
        if found := read_trace(read_recorded(path), traffic):
            return found
        raise UnreadableError(f"cannot use {path}: a trace without annotations of steps, `Input Dims` of "
                              "block-scale operators or names with shapes")  # fmt: skip
    document = files.read(path)
    if document.kind == "text" and (found := read_log(document.text.splitlines(), traffic)):
        return found
    if document.kind in ("json", "jsonl") and (found := _flashinfer(document, traffic)):
        return found
    try:
        runs = load(path)
    except UnreadableError as error:
        if document.kind != "text" or document.broken:
            raise error
        raise UnreadableError(
            f"cannot read {path}: no line of vLLM's, SGLang's or AITER's that tells a step or a shape; "
            "other files: a trace, a client's results, FlashInfer's workloads"
        ) from None
    return ", ".join(_client_run(run, traffic) for run in runs)


def _flashinfer(document: Document, traffic: Traffic) -> str:
    """Adds the calls of FlashInfer-Bench's workloads (flashinfer_bench/data/workload.py), which have the
    variable axes. Returns their number, as text; empty where the file has none. Raises UnreadableError for
    FlashInfer's own fi_trace, which has the constant axes alone."""
    rows = [row for row in document.rows() if isinstance(row, Mapping)]
    workloads = [row for row in rows if isinstance(row.get("workload"), Mapping) and "definition" in row]
    if not workloads:
        if not rows or not all("axes" in row and "name" in row for row in rows):
            return ""
        raise UnreadableError(
            f"cannot use {document.path}: FlashInfer's trace {rows[0]['name']} has the constant axes alone, "
            "no number of tokens; its workloads (JSONL) have them"
        )
    for row in workloads:
        name, axes = str(row["definition"]), row["workload"].get("axes")
        if call := _flashinfer_call(name, axes if isinstance(axes, Mapping) else {}):
            traffic.calls[call] += 1
        else:
            traffic.left_out[f"workloads of {name}"] += 1
    traffic.note("FlashInfer-Bench keeps few, different workloads: how often each occurs is unknown, so "
                 "equal ones count as often as they stand there")  # fmt: skip
    return f"{len(workloads)} workloads of FlashInfer"


def _flashinfer_call(name: str, axes: Mapping[str, Any]) -> tuple[str, str] | None:
    """The op and sizes of a workload; None for a kernel that is none of the ops.

    name: of its definition, which has the constant sizes; axes: the variable sizes
    """
    if (match := FLASHINFER_GEMM.match(name)) and axes.get("M") and "fp8" in name:  # the others are of bf16
        return "block_scale_gemm", f"m={axes['M']} n={match[1]} k={match[2]}"
    if (match := FLASHINFER_MOE.match(name)) and axes.get("seq_len"):
        topk, experts, hidden, inter = match.groups()
        sizes = f"tokens={axes['seq_len']} experts={experts} topk={topk} hidden={hidden} inter={inter}"
        return "fused_moe", f"{sizes} routing=uniform"
    if (match := FLASHINFER_MLA.match(name)) and axes.get("batch_size") and axes.get("num_kv_indices"):
        ctx = round(axes["num_kv_indices"] * int(match[2]) / axes["batch_size"])
        return "mla_decode", f"batch={axes['batch_size']} ctx={max(ctx, 1)} heads={match[1]} kv=bf16"
    return None


def _client_run(run: ServingRun, traffic: Traffic) -> str:
    """Adds the steps of a client's run, and returns a line on it. They come from the times of each request,
    else from a closed loop of its lengths and concurrency. Raises UsageError where it has neither."""
    q = 1
    if traffic.drafts or run.speculation not in ("", "none"):
        evidence = f"{run.source}: speculation {run.speculation or 'not said'}"
        drafts = 0 if run.speculation == "none" else run.drafts or None
        q = traffic.query_tokens(evidence, drafts, run.accept_length or 0.0)
    kept = run.samples
    columns = kept.starts_s, kept.input_lens, kept.output_lens, kept.ttfts_ms, kept.itls_ms
    if all(columns):
        of_group = list(zip(*columns, strict=True))[:: traffic.dp]  # requests of one group of ranks
        return _add_timed(run.client, of_group, q, traffic)
    asked, totals = run.workload, run.totals
    requests = totals.completed or asked.num_prompts or 0
    isl = asked.longest_input_len or asked.input_len or (totals.input_tokens or 0) / max(requests, 1)
    osl = asked.longest_output_len or asked.output_len or (totals.output_tokens or 0) / max(requests, 1)
    concurrency = asked.concurrency or run.value("concurrency", "mean")
    if not (isl and osl and concurrency):
        raise UnreadableError(
            f"cannot use {run.source}: it has no times of requests (--save-detailed), and no lengths with a "
            "concurrency"
        )
    ratio = asked.range_ratio if asked.range_ratio and asked.longest_input_len else 1.0
    in_flight = round(concurrency)
    workload = Workload(round(isl), round(osl), in_flight, max(requests, in_flight), range_ratio=ratio)
    for phase in simulate(workload.on_rank(traffic.dp)):
        # A request attends to its drafts, too: q - 1 tokens more than without them.
        drafted = phase._replace(lengths=tuple(length + q - 1 for length in phase.lengths))
        traffic.steps.append(Step(1, drafted, len(phase.lengths), len(phase.lengths) * q))
    traffic.load = {"isl": round(isl), "osl": round(osl), "concurrency": in_flight, "range_ratio": ratio}
    traffic.note("steps were simulated as a closed loop of these lengths and concurrency, prompts first")
    if q > 1:
        traffic.note("the simulation accepts no draft: it has too many steps that decode beside those that "
                     "prefill")  # fmt: skip
    return f"{run.client}, {isl:.0f} in, {osl:.0f} out at concurrency {in_flight}, no times of requests"


def _add_timed(client: str, requests: Sequence[tuple[Any, ...]], q: int, traffic: Traffic) -> str:
    """Adds a step for each prompt, and decode steps: where n requests decode at a time, each arrival of
    tokens is 1/n of a step. Contexts rise evenly from the first token of an answer to its last. Returns a
    line on the run. requests: start in s, tokens in, tokens out, TTFT in ms, and ITLs in ms of each"""
    decodes: list[tuple[float, float, int, int]] = []  # seconds of the first and last token, isl, osl
    arrivals_s: list[float] = []
    for start_s, isl, osl, ttft_ms, itls_ms in requests:
        traffic.add(1, chunks=((isl, 0),))
        now_s = first_s = start_s + ttft_ms / 1e3
        for itl_ms in itls_ms:
            now_s += itl_ms / 1e3
            arrivals_s.append(now_s)
        if itls_ms:
            decodes.append((first_s, now_s, isl, osl))
    begins_s = sorted(first_s for first_s, _, _, _ in decodes)
    ends_s = sorted(last_s for _, last_s, _, _ in decodes)
    step_parts = []
    for now_s in sorted(arrivals_s):
        running = bisect_left(begins_s, now_s) - bisect_left(ends_s, now_s)
        step_parts.append((now_s, 1 / max(running, 1)))
    steps = sum(part for _, part in step_parts)
    # Of each `stride` steps the one in the middle is taken, and stands for all of them.
    stride = max(1, round(steps / MOST_STEPS))
    steps_passed, next_taken = 0.0, 0.5 * stride
    for now_s, part in step_parts:
        steps_passed += part
        if steps_passed >= next_taken:
            next_taken += stride
            # A request attends to its prompt, the tokens that it has, at least one, and its q - 1 drafts.
            lengths = tuple(
                isl + max(1, round((now_s - first_s) / (last_s - first_s) * (osl - 1))) + q - 1
                for first_s, last_s, isl, osl in decodes if first_s < now_s <= last_s
            )  # fmt: skip
            traffic.steps.append(Step(stride, Phase(1, lengths, 0), len(lengths), len(lengths) * q))
    traffic.note("each prompt is taken as one step of its own, without a cached prefix or chunks")
    return f"{client}, {len(decodes)} requests with times, about {steps:.0f} decode steps"
