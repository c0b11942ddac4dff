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

INTERVAL = 40  # the decode steps for which SGLang writes one line (--decode-log-interval)

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
GEMM = re.compile(r"shape is (?P<batch>B:\d+, )?M:(?P<m>\d+), N:(?P<n>\d+), K:(?P<k>\d+)(?P<outcome>.*)")
OUTCOME = re.compile(r"not found tuned config in (\S+)|is tuned on cu_num.* in (\S+)")
FMOE = re.compile(r"\[fused_moe\] using .*? for (\(.*\))")
FMOE_KEY = re.compile(r"((?:\d+, ){5})<ActivationType.*'QuantType\.(?:per_1x128|per_128x128)'")
"""The key of block-scale experts: tokens, hidden, inter, experts, topk."""

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
"""What a log has -> the note on it."""


def read_log(lines: Iterable[str], traffic: Traffic) -> str:
    """Adds what a log tells; returns how many lines do, by kind. Raises UsageError if --drafts is needed."""
    line_counts: Counter[str] = Counter()
    kv_capacity = 0  # tokens that the KV cache holds; 0: not known
    drafts = 0  # draft tokens of a step, by the log's acceptance rates
    has_prompts = False
    snapshots: list[tuple[int, float | None]] = []  # running requests, and the tokens that they have cached
    shapes: dict[tuple[str, str], None] = {}  # op and sizes, in order
    for line in lines:
        if match := KV_SIZE.search(line):
            kv_capacity = int(match[1].replace(",", ""))
        elif match := ITERATION.search(line):
            if "(dummy)" in line:
                traffic.left_out["idle steps of a DP rank (dummy)"] += 1
                continue
            line_counts["Iteration lines of vLLM"] += 1
            prompts, new, decoding, tokens = map(int, match.groups())
            cached, requests = _cached_tokens(line, kv_capacity), prompts + decoding
            context = cached / requests * decoding if cached and requests else None
            traffic.add(1, decoding, tokens, context, even_chunks(prompts, new, 0), prompt=new)
            has_prompts = has_prompts or new > 0
        elif match := RUNNING.search(line):
            snapshots.append((int(match[1]), _cached_tokens(line, kv_capacity)))
        elif match := ACCEPTED.search(line):
            drafts = match[1].count(",") + 1  # a rate for each draft
        elif match := PREFILL.search(line):
            line_counts["Prefill batch lines of SGLang"] += 1
            prompts, new, prefix = map(int, match.groups())
            if prompts and new:
                traffic.add(1, chunks=even_chunks(prompts, new, prefix), prompt=new)
        elif match := DECODE.search(line):
            line_counts["Decode batch lines of SGLang"] += 1
            decoding, cached_tokens = map(int, match.groups())
            q = 1
            if length := ACCEPT_LEN.search(line):
                q = traffic.query_tokens(f"SGLang's log has `{length[0]}`", accepted=float(length[1]))
            traffic.add(INTERVAL, decoding, q * decoding, cached_tokens)
        elif match := GEMM.search(line):
            line_counts["GEMM lines of AITER"] += 1
            if sizes := _gemm(match, traffic):
                shapes["block_scale_gemm", sizes] = None
        elif match := FMOE.search(line):
            line_counts["fused_moe lines of AITER"] += 1
            if sizes := _fmoe(match[1], traffic):
                shapes["fused_moe", sizes] = None
    if line_counts["Iteration lines of vLLM"] and snapshots:
        traffic.left_out["lines of vLLM's statistics, as each step has a line"] += len(snapshots)
    elif snapshots:
        line_counts["lines of vLLM's statistics"] = len(snapshots)
        # A server that speculates may log no SpecDecoding lines. Then what --drafts says is taken.
        is_silent = drafts == 0 and bool(traffic.drafts)
        q = traffic.query_tokens("vLLM's log has acceptance rates", said=None if is_silent else drafts)
        for decoding, cached in snapshots:
            traffic.add(1, decoding, q * decoding, cached)
    traffic.calls |= Counter([*shapes])  # the larger count, not the sum: logs of all ranks have the same
    has = {**line_counts, "shapes": bool(shapes), "prompts": has_prompts}
    for what, note in NOTES.items():
        if has.get(what):
            traffic.note(note)
    return ", ".join(f"{what}: {count}" for what, count in line_counts.items() if count)


def _cached_tokens(line: str, kv_capacity: int) -> float | None:
    """Tokens in the KV cache; None where the log does not tell."""
    use = KV_USE.search(line)
    return float(use[1]) / 100 * kv_capacity if use and kv_capacity else None


def _gemm(match: re.Match[str], traffic: Traffic) -> str:
    """The sizes of a block-scale GEMM; empty without rows, or for another GEMM, noted as left out."""
    outcome = OUTCOME.search(match["outcome"])
    file = (outcome[1] or outcome[2]) if outcome else ""
    if match["batch"] or "blockscale" not in file:
        traffic.left_out["GEMM shapes of AITER whose file of tuned shapes is not one of block scales"] += 1
        return ""
    return f"m={match['m']} n={match['n']} k={match['k']}" if int(match["m"]) else ""


def _fmoe(text: str, traffic: Traffic) -> str:
    """The sizes of block-scale experts; empty for others, which are noted as left out."""
    match = FMOE_KEY.search(text)
    if not match:
        traffic.left_out["fused_moe shapes of AITER without block scales of FP8"] += 1
        return ""
    tokens, hidden, inter, experts, topk = map(int, re.findall(r"\d+", match[1]))
    shared = experts % 2  # an odd number, such as 257 with topk 9, counts the shared expert, as topk does
    return (
        f"tokens={tokens} experts={experts - shared} topk={topk - shared} hidden={hidden} inter={inter} "
        f"shared={shared} routing=uniform"
    )
