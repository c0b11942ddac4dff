"""Steps and shapes in a trace of torch.profiler: annotations, dimensions of operators, names of kernels.

Annotations: vLLM v1/worker/gpu_worker.py, SGLang utils/step_span_utils.py and profile_utils.py (0.5.23; the
plain labels of 0.5.17), ATOM model_runner.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from itertools import pairwise

import numpy as np

from harness.serving.trace.profilers import NONE, RecordedTrace
from harness.traffic.steps import Calls, Traffic, even_chunks
from shapes.bins import span_of

VLLM = re.compile(
    r"execute_(?:\d+_)?context_(?P<prompts>\d+)"
    r"\((?:sq(?P<new>\d+)sk(?P<context>\d+)sqsq(?P<squares>\d+)sqsk\d+|(?P<only_new>\d+))\)"
    r"_generation_(?P<decoding>\d+)"
    r"\((?:sq(?P<tokens>\d+)sk(?P<decode_context>\d+)sqsq\d+sqsk\d+|(?P<only_tokens>\d+))\)"
)
"""Requests, and in brackets sums over them: of query tokens (sq), context tokens (sk) and squares of query
tokens (sqsq), or of query tokens alone. SGLang has the same sums of prompts (c_) and decoding ones (g_)."""
SGLANG = re.compile(r"step\[([A-Z_0-9]+) bs=(\d+)(.*)\]")
ATOM = re.compile(r"(prefill|decode)\[bs=(\d+)(?:/\d+)? tok=(\d+)(?:.* ctx=\[([\d, ]*)\])?")
VERIFIES = ("VERIFY", "TARGET_VERIFY")
DEEP_GEMM = re.compile(r"sm\d+_fp8_gemm_\w*impl<(?:[^<>,]*Major[^<>,]*, )?(\d+)u?, (\d+)u?, (\d+)u?,")
"""M, N and K of a product; M is 0 where it is not built into the kernel."""
EXPERTS = re.compile("moe", re.IGNORECASE)


def read_trace(recorded: RecordedTrace, traffic: Traffic) -> str:
    """Adds what a trace tells; returns what that is, or empty. Raises UsageError where --drafts is needed."""
    names = list(recorded.names)
    span_counts = Counter(names[number] for number in recorded.spans.name)
    steps_by_engine: dict[str, list[tuple[re.Match[str], int]]] = {}
    for engine, (pattern, _) in READERS.items():
        matches = [(pattern.match(name), count) for name, count in span_counts.items()]
        steps_by_engine[engine] = [(match, count) for match, count in matches if match]

    def detail(engine: str) -> tuple[bool, int]:
        steps = steps_by_engine[engine]
        has_contexts = any("sk" in match[0] for match, _ in steps)  # sk: the sum of context tokens
        return has_contexts, len(steps)

    # A tool may have annotated the same steps once more, so the annotations that say most are taken.
    engine = max(steps_by_engine, key=detail)
    before, (_, add_steps) = traffic.step_count(), READERS[engine]
    for match, count in steps_by_engine[engine]:
        add_steps(match, count, traffic)
    found = []
    if steps_by_engine[engine]:
        found.append(f"{traffic.step_count() - before} steps in annotations of {engine}")
    calls = _calls_by_dimensions(recorded, names, traffic) + _calls_by_kernel_names(recorded, names, traffic)
    traffic.calls.update(calls)
    if calls:
        found.append(f"{calls.total()} calls with shapes")
    return ", ".join(found)


def _vllm(match: re.Match[str], count: int, traffic: Traffic) -> None:
    sums = {name: int(text or 0) for name, text in match.groupdict().items()}
    new, tokens = sums["new"] or sums["only_new"], sums["tokens"] or sums["only_tokens"]
    chunks = _chunks(sums["prompts"], new, max(sums["context"] - sums["new"], 0), sums["squares"])
    traffic.add(count, sums["decoding"], tokens, sums["decode_context"], chunks, prompt=new)


def _sglang(match: re.Match[str], count: int, traffic: Traffic) -> None:
    mode, batch = match[1], int(match[2])
    sums = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", match[3])}
    new = sums.get("c_sq", sums.get("toks", 0))
    is_prefill = mode in ("EXTEND", "PREFILL", "SPLIT_PREFILL") or (mode == "MIXED" and "c" in sums)
    if mode.startswith("DRAFT"):
        traffic.left_out["steps of the model that drafts"] += count
    elif mode in ("DECODE", *VERIFIES):
        lacks_tokens = mode in VERIFIES and "g_sq" not in sums
        q = traffic.query_tokens(f"a trace of SGLang has {mode} steps") if lacks_tokens else 1
        traffic.add(count, batch, sums.get("g_sq", q * batch), sums.get("g_sk"))
    elif is_prefill and new:
        prefix = max(sums.get("c_sk", new) - new, 0)
        chunks = _chunks(sums.get("c", batch), new, prefix, sums.get("c_sqsq", 0))
        traffic.add(count, sums.get("g", 0), sums.get("g_sq", 0), sums.get("g_sk"), chunks, prompt=new)
    else:
        traffic.left_out[f"{mode} steps of SGLang without requests or tokens"] += count


def _atom(match: re.Match[str], count: int, traffic: Traffic) -> None:
    batch, tokens = int(match[2]), int(match[3])
    lengths = [int(word) for word in (match[4] or "").split(",") if word.strip()]
    if match[1] == "prefill":
        chunks = tuple((length, 0) for length in lengths)
        if lengths and sum(lengths) != tokens:  # of prompts with prefixes only the sum of new tokens is known
            chunks = even_chunks(batch, tokens, max(sum(lengths) - tokens, 0))
        traffic.add(count, chunks=chunks, prompt=tokens)
    else:
        traffic.add(count, batch, tokens, context=sum(lengths))


READERS = {"vLLM": (VLLM, _vllm), "SGLang": (SGLANG, _sglang), "ATOM": (ATOM, _atom)}
"""Engine -> the pattern of its annotations, and what adds the steps of one, which occurs `count` times."""


def _chunks(prompts: int, new: int, prefix: int, squares: int) -> tuple[tuple[int, int], ...]:
    """(new, prefix) of each prompt, from the sums of new tokens, of prefixes and of squares of new tokens (0:
    not said)."""
    span = ""
    if squares and prompts:
        mean = new / prompts
        span = span_of(mean, squares / prompts - mean**2, prompts, (1, new))
    return even_chunks(prompts, new, prefix, span)


def _calls_by_dimensions(recorded: RecordedTrace, names: list[str], traffic: Traffic) -> Calls:
    """The calls whose operators' `Input Dims` show block scales. None where graphs are replayed: they have no
    operators, so the others would stand for all."""
    shapes, ops = list(recorded.shapes), recorded.ops
    found: Calls = Counter()
    calls: Counter[tuple[int, int]] = Counter()  # of the number of a name and that of dimensions
    ends: dict[tuple[int, int], int] = {}  # an operator inside another repeats its dimensions
    columns = [column.tolist() for column in (ops.start, ops.length, ops.thread, ops.shapes, ops.name)]
    for start, length, thread, shape, name in sorted(zip(*columns, strict=True), key=lambda row: row[0]):
        key = thread, shape
        if shape != NONE and start >= ends.get(key, start):
            calls[name, shape] += 1
            ends[key] = start + length
    for (name, shape), count in calls.items():
        dims = ast.literal_eval(shapes[shape])
        call = _experts(dims) if EXPERTS.search(names[name]) else _gemm(dims)
        if call:
            found[call] += count
    if found and recorded.launches.graph.any():
        traffic.left_out["calls with dimensions beside replayed graphs, which have none"] += found.total()
        return Counter()
    return found


def _with_axes(dims: list[object], axes: int) -> list[list[int]]:
    """The shapes of the inputs that have so many axes."""
    lists = [shape for shape in dims if isinstance(shape, list) and len(shape) == axes]
    return [shape for shape in lists if all(isinstance(size, int) for size in shape)]


def _gemm(dims: list[object]) -> tuple[str, str] | None:
    """The call of inputs (M, K), (N, K) and then scales (M, K/128), (N/128, K/128), all but the first perhaps
    transposed; None of others."""
    matrices = _with_axes(dims, 2)
    for number, ((m, k), other) in enumerate(pairwise(matrices)):
        if k in other and m and k > 128:
            n = other[0] if other[1] == k else other[1]
            blocks_n, blocks_k = math.ceil(n / 128), math.ceil(k / 128)
            scales = matrices[number + 2 :]
            has_scales_a = [m, blocks_k] in scales or [blocks_k, m] in scales
            if has_scales_a and ([blocks_n, blocks_k] in scales or [blocks_k, blocks_n] in scales):
                return "block_scale_gemm", f"m={m} n={n} k={k}"
    return None


def _experts(dims: list[object]) -> tuple[str, str] | None:
    """The call of inputs with tokens (T, H), experts (E, 2 I, H) and (E, H, I), scales of 128 x 128 and picks
    (T, topk); None of others."""
    matrices, stacks = _with_axes(dims, 2), _with_axes(dims, 3)
    for (experts, gate_and_up, hidden), (_, down, inter) in pairwise(stacks):
        scales = [experts, math.ceil(gate_and_up / 128), math.ceil(hidden / 128)]
        if gate_and_up != 2 * inter or down != hidden or scales not in stacks:
            continue
        tokens = next((rows for rows, columns in matrices if columns == hidden), 0)
        topk = next((columns for rows, columns in matrices if rows == tokens and columns < 32), 0)
        if tokens and topk:
            sizes = f"tokens={tokens} experts={experts} topk={topk} hidden={hidden} inter={inter}"
            return "fused_moe", f"{sizes} routing=uniform"
    return None


def _calls_by_kernel_names(recorded: RecordedTrace, names: list[str], traffic: Traffic) -> Calls:
    """The calls of DeepGEMM whose kernels' names have M. Most names have N and K alone."""
    found: Calls = Counter()
    for number, count in zip(*np.unique(recorded.work.name, return_counts=True), strict=True):
        if match := DEEP_GEMM.search(names[number]):
            m, n, k = map(int, match.groups())
            if m:
                found["block_scale_gemm", f"m={m} n={n} k={k}"] += int(count)
            else:
                traffic.left_out[f"calls of DeepGEMM with n={n} k={k}, whose name has no M"] += int(count)
    return found
