"""Cases of block_scale_gemm: the FP8 linears of a rank; the fused qkv_a comes first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from shapes.attention import Parallel
from shapes.bins import token_bins
from shapes.case import Case
from shapes.cases import BATCHES, DP_BATCHES, DP_PROMPTS, ISL, PROMPTS, phase
from shapes.linears import block_scale_gemm_sizes, linears
from shapes.models import FP8, ModelConfig
from shapes.workloads import Documented


def _step(
    model: ModelConfig, parallel: Parallel, tokens: int, prompt: int = 0, weight: float = 1.0, drafts: int = 0
) -> list[Case]:
    """The FP8 linears of a step of `tokens` tokens, `prompt` of which are prompt tokens. A linear that
    decoding does not call gets only the prompt tokens."""
    cases = []
    for linear in linears(model, parallel):
        calls = linear.prefill_calls if prompt else linear.decode_calls
        if linear.kind == FP8 and calls:
            sizes = block_scale_gemm_sizes(linear, tokens if linear.decode_calls else prompt)
            place = f"{model.name} {parallel.text} {phase(tokens, prompt, drafts)} {linear.name}"
            cases.append(Case("block_scale_gemm", sizes, place=place, weight=weight * calls))
    return cases


def smoke() -> list[Case]:
    """Last blocks of 64 columns as in qkv_a, fewer and more rows than a tile has, several blocks of k."""
    all_sizes = [(16, 320, 384), (1, 576, 256), (33, 192, 512), (7, 256, 640), (32, 384, 128)]
    return [Case("block_scale_gemm", {"m": m, "n": n, "k": k}, place="smoke") for m, n, k in all_sizes]


def ragged() -> list[Case]:
    """Odd numbers of rows, fewer and more than tiles have; last blocks of 64 columns; odd numbers of blocks
    of k."""
    all_sizes = [(7, 320, 384), (33, 576, 512), (129, 192, 640)]
    return [Case("block_scale_gemm", {"m": m, "n": n, "k": k}) for m, n, k in all_sizes]


def _steps(
    model: ModelConfig, parallel: Parallel, drafts: int, batches: Iterable[int], prefills: Iterable[int]
) -> list[Case]:
    """Steps that decode these numbers of requests, then steps that prefill these numbers of tokens."""
    decoding = [_step(model, parallel, batch * (1 + drafts), drafts=drafts) for batch in batches]
    filling = [_step(model, parallel, tokens, tokens) for tokens in prefills]
    return list(itertools.chain(*decoding, *filling))


def sweep(model: ModelConfig, parallel: Parallel, drafts: int = 0) -> list[Case]:
    return _steps(model, parallel, drafts, BATCHES, [count * ISL for count in PROMPTS])


def production(model: ModelConfig, parallel: Parallel, drafts: int = 0) -> list[Case]:
    return _steps(model, parallel, drafts, DP_BATCHES, [count * isl for count, isl in DP_PROMPTS])


def served(model: ModelConfig, run: Documented) -> list[Case]:
    return [
        case
        for bin_ in token_bins(run.on_rank)
        for case in _step(model, run.parallel, bin_.tokens, bin_.prompt, bin_.weight)
    ]
