"""Lines of logs that tell of steps: of vLLM, SGLang and AITER.

vLLM 0.33     v1/metrics/loggers.py (statistics, Iteration), spec_decode/metrics.py, core/kv_cache_utils.py
SGLang 0.5.23 observability/metrics_reporter.py (Prefill batch, Decode batch)
AITER e404860 ops/gemm_op_a8w8.py, fused_moe.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from harness.traffic.steps import Traffic, even_chunks

INTERVAL = 40
"""Decode steps for a line of SGLang (--decode-log-interval)."""

KV_SIZE = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
KV_USE = re.compile(r"GPU KV cache usage: ([\d.]+)%")
ITERATION = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens"
)
RUNNING = re.compile(r"Avg generation throughput: .*Running: (\d+) reqs")
ACCEPTED = re.compile(r"SpecDecoding metrics: .*Per-position acceptance rate: ([\d.]+(?:, [\d.]+)*)")
PREFILL = re.compile(r"Prefill batch.*?#new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)")
ACCEPT_LEN = re.compile(r"accept len: (\d+\.?\d*)")
DECODE = re.compile(r"Decode batch.*?#running-req: (\d+), #(?:full )?token: (\d+)")
GEMM = re.compile(r"shape is (?:B:(\d+), )?M:(\d+), N:(\d+), K:(\d+)(.*)")
OUTCOME = re.compile(r"not found tuned config in (\S+)|is tuned on cu_num.* in (\S+)")
FMOE = re.compile(r"\[fused_moe\] using .*? for (\(.*\))")
FMOE_KEY = re.compile(r"(\d+), (\d+), (\d+), (\d+), (\d+), <ActivationType.*'QuantType\.(\w+)'")

NOTES = {
    "shapes": "AITER logs each shape once a process, those of graph captures and of the profiling run too: "
    "weights are unknown, all are equal here; fused_moe's tokens are the next power of two",
    "Decode batch lines of SGLang": f"a Decode batch line stands for {INTERVAL} steps "
    "(--decode-log-interval), whose mean context is #token / #running-req, unread cached prefixes included",
    "Prefill batch lines of SGLang": "prompts of a step are taken as equally long; the earlier chunks of a "
    "prompt are not in #cached-token, so a later chunk has too short a prefix",
    "prompts": "vLLM's log has no prefixes: chunks of prompts are taken as first ones, and as equally long",
    "lines of vLLM's statistics": "vLLM's statistics are the requests at one moment in 10 s, some of which "
    "still prefill; chunks of prompts are not in them",
}
"""By what a log has."""


def read_log(lines: Iterable[str], traffic: Traffic) -> str:
    """Adds what the lines of one log tell; returns what they are, empty where none tells anything. Raises
    UsageError where --drafts is needed."""
    found: Counter[str] = Counter()
    kv_tokens, positions, has_prompts = 0, 0, False
    snapshots: list[tuple[int, float | None]] = []
    shapes: dict[tuple[str, str], None] = {}
    for line in lines:
        if match := KV_SIZE.search(line):
            kv_tokens = int(match[1].replace(",", ""))
        elif match := ITERATION.search(line):
            if "(dummy)" in line:
                traffic.left_out["idle steps of a DP rank (dummy)"] += 1
                continue
            found["Iteration lines of vLLM"] += 1
            prompts, new, decoding, tokens = map(int, match.groups())
            used, requests = _used(line, kv_tokens), prompts + decoding
            chunks = even_chunks(prompts, new, 0) if prompts and new else ()
            ctx = used / requests if used and requests else None
            traffic.add(1, decoding, tokens / decoding if decoding else 1, ctx, chunks, new)
            has_prompts = has_prompts or new > 0
        elif match := RUNNING.search(line):
            snapshots.append((int(match[1]), _used(line, kv_tokens)))
        elif match := ACCEPTED.search(line):
            positions = match[1].count(",") + 1
        elif match := PREFILL.search(line):
            found["Prefill batch lines of SGLang"] += 1
            batch, new, cached = map(int, match.groups())
            if batch and new:
                traffic.add(1, chunks=even_chunks(batch, new, cached), prompt=new)
        elif match := DECODE.search(line):
            found["Decode batch lines of SGLang"] += 1
            batch, tokens = map(int, match.groups())
            q = 1
            if length := ACCEPT_LEN.search(line):
                q = traffic.q(f"SGLang's log has `{length[0]}`", accepted=float(length[1]))
            traffic.add(INTERVAL, batch, q, tokens / batch if batch else None)
        elif match := GEMM.search(line):
            found["GEMM lines of AITER"] += 1
            if text := _gemm(match, traffic):
                shapes["block_scale_gemm", text] = None
        elif match := FMOE.search(line):
            found["fused_moe lines of AITER"] += 1
            if text := _fmoe(match[1], traffic):
                shapes["fused_moe", text] = None
    if found["Iteration lines of vLLM"] and snapshots:
        traffic.left_out["lines of vLLM's statistics, as each step has a line"] += len(snapshots)
    elif snapshots:
        found["lines of vLLM's statistics"] = len(snapshots)
        # A log without SpecDecoding lines may be of a server that speculates.
        said = positions if positions or not traffic.drafts else None
        q = traffic.q("vLLM's log has acceptance rates", said)
        for decoding, used in snapshots:
            traffic.add(1, decoding, q, used / decoding if used and decoding else None)
    traffic.calls |= Counter(dict.fromkeys(shapes, 1))  # all ranks log the same
    has = {**found, "shapes": len(shapes), "prompts": has_prompts}
    for what, note in NOTES.items():
        if has.get(what):
            traffic.note(note)
    return ", ".join(f"{what}: {count}" for what, count in found.items() if count)


def _used(line: str, kv_tokens: int) -> float | None:
    """Tokens in the KV cache."""
    use = KV_USE.search(line)
    return float(use[1]) / 100 * kv_tokens if use and kv_tokens else None


def _gemm(match: re.Match[str], traffic: Traffic) -> str:
    """The sizes of a block-scale GEMM; empty for another."""
    count, m, n, k, rest = match.groups()
    outcome = OUTCOME.search(rest)
    file = (outcome[1] or outcome[2]) if outcome else ""
    if count or "blockscale" not in file:
        traffic.left_out["GEMM shapes of AITER whose file of tuned shapes is not one of block scales"] += 1
        return ""
    return f"m={m} n={n} k={k}" if int(m) else ""


def _fmoe(text: str, traffic: Traffic) -> str:
    """The sizes of block-scale experts; empty for others."""
    match = FMOE_KEY.search(text)
    if not match or match[6] not in ("per_1x128", "per_128x128"):
        traffic.left_out["fused_moe shapes of AITER without block scales of FP8"] += 1
        return ""
    tokens, hidden, inter, experts, topk = map(int, match.groups()[:5])
    shared = experts % 2  # E = 257 and 9 picks: the shared expert is one of them
    return (
        f"tokens={tokens} experts={experts - shared} topk={topk - shared} hidden={hidden} inter={inter} "
        f"shared={shared} routing=uniform"
    )
