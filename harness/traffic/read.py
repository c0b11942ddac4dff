"""Any file that tells of traffic: a log, a trace, a client's results, FlashInfer's records of calls."""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import UnreadableError, UsageError
from harness.json_stream import JsonText
from harness.serving.clients import files
from harness.serving.clients.files import Document
from harness.serving.clients.load import load
from harness.serving.schema import ServingRun
from harness.traffic.log import read_log
from harness.traffic.steps import Step, Traffic
from harness.traffic.trace import read_trace
from shapes.scheduler import Phase, Workload, simulate

TRACE = re.compile(rb'"(traceEvents|schemaVersion|deviceProperties|ph|rocprofiler-sdk-tool)"\s*:')
MOST = 2000
"""The most decode steps that are taken of a client's requests, at equal distances."""
FI_GEMM = re.compile(r"gemm_.*n(\d+)_k(\d+)")
FI_MOE = re.compile(r"moe_fp8_block_scale_.*topk(\d+)(?:_ng(\d+)_kg(\d+))?_e(\d+)_h(\d+)_i(\d+)")
FI_MLA = re.compile(r"mla_paged_decode_h(\d+)_ckv512_kpe64_ps(\d+)")


def read_files(paths: Sequence[str], traffic: Traffic) -> None:
    """Adds what each file tells. Raises UsageError for a file that tells nothing, and where one has steps and
    another none."""
    silent = []
    real = [Path(path).resolve() for path in paths]
    if twice := next((each for each in real if real.count(each) > 1), None):
        raise UsageError(f"{twice} is given twice: its steps would count twice")
    for path in map(Path, paths):
        before = traffic.count()
        traffic.read.append(f"{path}: {_read(path, traffic)}")
        if traffic.count() == before:
            silent.append(path)
    if silent and len(silent) < len(paths):
        raise UsageError(f"{silent[0]} has shapes without steps, another file has steps: give them apart, as "
                         "their weights cannot be added")  # fmt: skip


def _read(path: Path, traffic: Traffic) -> str:
    with contextlib.closing(JsonText(path)) as text:
        is_trace = TRACE.search(text.head)
    if is_trace:
        if found := read_trace(path, traffic):
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
    return ", ".join(_result(run, traffic) for run in runs)


def _flashinfer(document: Document, traffic: Traffic) -> str:
    """FlashInfer-Bench's workloads (flashinfer_bench/data/workload.py) have the variable axes; FlashInfer's
    own fi_trace has names with the constant ones alone."""
    rows = [row for row in document.rows() if isinstance(row, Mapping)]
    of_calls = [row for row in rows if isinstance(row.get("workload"), Mapping) and "definition" in row]
    if rows and not of_calls and all("axes" in row and "name" in row for row in rows):
        raise UnreadableError(
            f"cannot use {document.path}: FlashInfer's trace {rows[0]['name']} has the constant axes alone, "
            "no number of tokens; its workloads (JSONL) have them"
        )
    for row in of_calls:
        name, axes = str(row["definition"]), row["workload"].get("axes")
        if call := _workload(name, axes if isinstance(axes, Mapping) else {}):
            traffic.calls[call] += 1
        else:
            traffic.left_out[f"workloads of {name}"] += 1
    if of_calls:
        traffic.note("FlashInfer-Bench keeps few, different workloads: how often each occurs is unknown, so "
                     "equal ones count as often as they stand there")  # fmt: skip
    return f"{len(of_calls)} workloads of FlashInfer" if of_calls else ""


def _workload(name: str, axes: Mapping[str, Any]) -> tuple[str, str] | None:
    if (match := FI_GEMM.match(name)) and axes.get("M"):
        # Their definitions of this name are of bf16, but for those with fp8 in it.
        is_fp8 = "fp8" in name
        return ("block_scale_gemm", f"m={axes['M']} n={match[1]} k={match[2]}") if is_fp8 else None
    if (match := FI_MOE.match(name)) and axes.get("seq_len"):
        topk, _, _, experts, hidden, inter = match.groups()
        sizes = f"tokens={axes['seq_len']} experts={experts} topk={topk} hidden={hidden} inter={inter}"
        return "fused_moe", f"{sizes} routing=uniform"
    if (match := FI_MLA.match(name)) and axes.get("batch_size") and axes.get("num_kv_indices"):
        ctx = round(axes["num_kv_indices"] * int(match[2]) / axes["batch_size"])
        return "mla_decode", f"batch={axes['batch_size']} ctx={max(ctx, 1)} heads={match[1]} kv=bf16"
    return None


def _result(run: ServingRun, traffic: Traffic) -> str:
    """A client's run: by the times of each request where it kept them, else as a closed loop of its lengths
    and concurrency. Raises UsageError where it has neither."""
    asked, kept = run.workload, run.samples
    q = 1
    if traffic.drafts or run.speculation not in ("", "none"):
        said = 0 if run.speculation == "none" else run.drafts or None
        told = f"{run.source}: speculation {run.speculation or 'not said'}"
        q = traffic.q(told, said, run.accept_length or 0.0)
    if all((kept.starts_s, kept.input_lens, kept.output_lens, kept.ttfts_ms, kept.itls_ms)):
        return _timed(run, q, traffic)
    count = run.totals.completed or asked.num_prompts or 0
    isl = asked.longest_input_len or asked.input_len or (run.totals.input_tokens or 0) / max(count, 1)
    osl = asked.longest_output_len or asked.output_len or (run.totals.output_tokens or 0) / max(count, 1)
    concurrency = asked.concurrency or run.value("concurrency", "mean")
    if not (isl and osl and concurrency):
        raise UnreadableError(
            f"cannot use {run.source}: it has no times of requests (--save-detailed), and no lengths with a "
            "concurrency"
        )
    ratio = asked.range_ratio if asked.range_ratio and asked.longest_input_len else 1.0
    most = round(concurrency)
    workload = Workload(round(isl), round(osl), most, max(count, most), range_ratio=ratio)
    for phase in simulate(workload.on_rank(traffic.dp)):
        drafted = phase._replace(lengths=tuple(length + q - 1 for length in phase.lengths))
        traffic.steps.append(Step(1, drafted, len(phase.lengths), len(phase.lengths) * q))
    traffic.load = {"isl": round(isl), "osl": round(osl), "concurrency": most, "range_ratio": ratio}
    traffic.note("steps were simulated as a closed loop of these lengths and concurrency, prompts first")
    if q > 1:
        traffic.note("the simulation accepts no draft: it has too many steps that decode beside those that "
                     "prefill")  # fmt: skip
    return f"{run.client}, {isl:.0f} in, {osl:.0f} out at concurrency {most}, no times of requests"


def _timed(run: ServingRun, q: int, traffic: Traffic) -> str:
    """Decode steps by overlap: a moment when n requests decode has 1/n of a step for each arrival of tokens.
    Contexts rise evenly from the first token of an answer to its last."""
    kept, requests, arrivals = run.samples, [], []
    columns = kept.starts_s, kept.input_lens, kept.output_lens, kept.ttfts_ms, kept.itls_ms
    for start, isl, osl, ttft, itls in list(zip(*columns, strict=True))[:: traffic.dp]:
        now = start + ttft / 1e3
        times = [now := now + itl / 1e3 for itl in itls]
        traffic.add(1, chunks=((isl, 0),))
        if times:
            requests.append((start + ttft / 1e3, times[-1], isl, osl))
            arrivals += times
    begins, ends = sorted(r[0] for r in requests), sorted(r[1] for r in requests)
    parts = [(now, 1 / max(bisect_left(begins, now) - bisect_left(ends, now), 1)) for now in sorted(arrivals)]
    steps = sum(part for _, part in parts)
    stride = max(1, round(steps / MOST))
    passed, due = 0.0, 0.5 * stride
    for now, part in parts:
        passed += part
        if passed >= due:
            due += stride
            # A request attends to its prompt and the tokens that it has, at least one.
            lengths = tuple(
                isl + max(1, round((now - first) / (last - first) * (osl - 1))) + q - 1
                for first, last, isl, osl in requests if first < now <= last
            )  # fmt: skip
            traffic.steps.append(Step(stride, Phase(1, lengths, 0), len(lengths), len(lengths) * q))
    traffic.note("each prompt is taken as one step of its own, without a cached prefix or chunks")
    return f"{run.client}, {len(requests)} requests with times, about {steps:.0f} decode steps"
