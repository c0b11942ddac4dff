"""Steps and shapes in a trace of torch.profiler: annotations, dimensions of operators, names of kernels.

Annotations: vLLM v1/worker/gpu_worker.py, SGLang utils/step_span_utils.py and profile_utils.py (0.5.23; the
plain labels of 0.5.17), ATOM model_runner.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

from harness.serving.trace.profilers import NONE, RecordedTrace, read
from harness.traffic.steps import Traffic, even_chunks
from shapes.bins import span_of

VLLM = re.compile(
    r"execute_(?:\d+_)?context_(\d+)\((?:sq(\d+)sk(\d+)sqsq(\d+)sqsk\d+|(\d+))\)"
    r"_generation_(\d+)\((?:sq(\d+)sk(\d+)sqsq\d+sqsk\d+|(\d+))\)"
)
SGLANG = re.compile(r"step\[([A-Z_0-9]+) bs=(\d+)(.*)\]")
ATOM = re.compile(r"(prefill|decode)\[bs=(\d+)(?:/\d+)? tok=(\d+)(?:.* ctx=\[([\d, ]*)\])?")
VERIFIES = ("VERIFY", "TARGET_VERIFY")
DEEP_GEMM = re.compile(r"sm\d+_fp8_gemm_\w*impl<(?:[^<>,]*Major[^<>,]*, )?(\d+)u?, (\d+)u?, (\d+)u?,")
EXPERTS = re.compile("moe", re.IGNORECASE)


def read_trace(path: Path, traffic: Traffic) -> str:
    """Adds what a trace tells; returns what that is, empty where it tells nothing. Raises UsageError."""
    recorded = read(path)
    names = list(recorded.names)
    spans = Counter(names[number] for number in recorded.spans.name)
    kinds = {
        kind: [(match, count) for name, count in spans.items() if (match := pattern.match(name))]
        for kind, (pattern, _) in READERS.items()
    }
    # A tool may have annotated the same steps once more: the annotations with sums of lengths say most.
    kind = max(kinds, key=lambda each: (any("sk" in match[0] for match, _ in kinds[each]), len(kinds[each])))
    before = traffic.count()
    for match, count in kinds[kind]:
        READERS[kind][1](match, count, traffic)
    found = [f"{traffic.count() - before} steps in annotations of {kind}"] if kinds[kind] else []
    calls = _dimensions(recorded, names, traffic) + _kernel_names(recorded, names, traffic)
    traffic.calls.update(calls)
    if calls:
        found.append(f"{calls.total()} calls with shapes")
    return ", ".join(found)


def _vllm(match: re.Match[str], count: int, traffic: Traffic) -> None:
    prompts, sq, sk, sqsq, plain_new, decoding, gq, gk, plain = (int(each or 0) for each in match.groups())
    tokens = gq or plain
    traffic.add(
        count, decoding, tokens / decoding if decoding else 1, gk / decoding if gk and decoding else None,
        _chunks(prompts, sq or plain_new, max(sk - sq, 0), sqsq), sq or plain_new,
    )  # fmt: skip


def _sglang(match: re.Match[str], count: int, traffic: Traffic) -> None:
    mode, batch, rest = match[1], int(match[2]), match[3]
    said = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", rest)}
    new = said.get("c_sq", said.get("toks", 0))
    if mode.startswith("DRAFT"):
        traffic.left_out["steps of the model that drafts"] += count
    elif mode in ("DECODE", *VERIFIES):
        is_open = mode in VERIFIES and "g_sq" not in said
        q = traffic.q(f"a trace of SGLang has {mode} steps") if is_open else 1
        tokens, ctx = said.get("g_sq", q * batch), said.get("g_sk")
        traffic.add(count, batch, tokens / max(batch, 1), ctx / batch if ctx and batch else None)
    elif mode in ("EXTEND", "PREFILL", "SPLIT_PREFILL", "MIXED") and new and (mode != "MIXED" or "c" in said):
        requests, tokens = said.get("g", 0), said.get("g_sq", 0)
        mean = said["g_sk"] / requests if requests and "g_sk" in said else None
        prefix = max(said.get("c_sk", new) - new, 0)
        chunks = _chunks(said.get("c", batch), new, prefix, said.get("c_sqsq", 0))
        traffic.add(count, requests, tokens / requests if requests else 1, mean, chunks, new)
    else:
        traffic.left_out[f"{mode} steps of SGLang without requests or tokens"] += count


def _atom(match: re.Match[str], count: int, traffic: Traffic) -> None:
    batch, tokens = int(match[2]), int(match[3])
    lengths = [int(word) for word in (match[4] or "").split(",") if word.strip()]
    if match[1] == "prefill":
        prefix = sum(lengths) - tokens if lengths else 0
        chunks = tuple((n, 0) for n in lengths) if not prefix else even_chunks(batch, tokens, max(prefix, 0))
        traffic.add(count, chunks=chunks, prompt=tokens)
    else:
        ctx = sum(lengths) / batch if lengths and batch else None
        traffic.add(count, batch, tokens / max(batch, 1), ctx)


READERS = {"vLLM": (VLLM, _vllm), "SGLang": (SGLANG, _sglang), "ATOM": (ATOM, _atom)}


def _chunks(prompts: int, new: int, prefix: int, squares: int) -> tuple[tuple[int, int], ...]:
    """The prompts of a step by the sums of their new tokens, prefixes and squares of new tokens (0: not
    said)."""
    if not (prompts and new):
        return ()
    mean = new / prompts
    span = span_of(mean, squares / prompts - mean**2, prompts, (1, new)) if squares else ""
    return even_chunks(prompts, new, prefix, span)


def _dimensions(recorded: RecordedTrace, names: list[str], traffic: Traffic) -> Counter[tuple[str, str]]:
    """The calls whose operators' `Input Dims` show block scales. A replayed graph has no operators."""
    shapes, ops = list(recorded.shapes), recorded.ops
    found: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[int, int]] = Counter()
    ends: dict[tuple[int, int], int] = {}  # an operator inside another repeats its dimensions
    columns = (each.tolist() for each in (ops.start, ops.length, ops.thread, ops.shapes, ops.name))
    for start, length, thread, shape, name in sorted(zip(*columns, strict=True), key=lambda row: row[0]):
        key = thread, shape
        if shape != NONE and start >= ends.get(key, start):
            calls[name, shape] += 1
            ends[key] = start + length
    for (name, number), count in calls.items():
        dims = ast.literal_eval(shapes[number])
        case = _experts(dims) if EXPERTS.search(names[name]) else _gemm(dims)
        if case:
            found[case] += count
    if found and recorded.launches.graph.any():
        traffic.left_out["calls with dimensions beside replayed graphs, which have none"] += found.total()
        return Counter()
    return found


def _matrices(dims: list[object], axes: int) -> list[list[int]]:
    lists = (each for each in dims if isinstance(each, list) and len(each) == axes)
    return [each for each in lists if all(isinstance(size, int) for size in each)]


def _gemm(dims: list[object]) -> tuple[str, str] | None:
    """Of (M, K), (N, K) or (K, N), and scales (M, K/128) and (N/128, K/128)."""
    two = _matrices(dims, 2)
    for at, ((m, k), other) in enumerate(pairwise(two)):
        if k in other and m:
            n = other[0] if other[1] == k else other[1]
            a, b = [m, -(-k // 128)], [-(-n // 128), -(-k // 128)]
            rest = two[at + 2 :]
            if k > 128 and any(s in (a, a[::-1]) for s in rest) and any(s in (b, b[::-1]) for s in rest):
                return "block_scale_gemm", f"m={m} n={n} k={k}"
    return None


def _experts(dims: list[object]) -> tuple[str, str] | None:
    """Of tokens (T, H), experts (E, 2 I, H) and (E, H, I), scales of 128 x 128 and picks (T, topk)."""
    two, three = _matrices(dims, 2), _matrices(dims, 3)
    for (experts, both, hidden), (_, second, inter) in pairwise(three):
        scales = [experts, -(-both // 128), -(-hidden // 128)]
        if both != 2 * inter or second != hidden or scales not in three:
            continue
        tokens = next((m for m, k in two if k == hidden), 0)
        topk = next((k for m, k in two if m == tokens and k < 32), 0)
        if tokens and topk:
            sizes = f"tokens={tokens} experts={experts} topk={topk} hidden={hidden} inter={inter}"
            return "fused_moe", f"{sizes} routing=uniform"
    return None


def _kernel_names(recorded: RecordedTrace, names: list[str], traffic: Traffic) -> Counter[tuple[str, str]]:
    """The calls of DeepGEMM whose names have M; most have N and K alone."""
    found: Counter[tuple[str, str]] = Counter()
    for number, count in zip(*np.unique(recorded.work.name, return_counts=True), strict=True):
        if match := DEEP_GEMM.search(names[number]):
            m, n, k = map(int, match.groups())
            if m:
                found["block_scale_gemm", f"m={m} n={n} k={k}"] += int(count)
            else:
                traffic.left_out[f"calls of DeepGEMM with n={n} k={k}, whose name has no M"] += int(count)
    return found
