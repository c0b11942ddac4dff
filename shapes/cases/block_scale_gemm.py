"""Cases of block_scale_gemm: the FP8 linears of a rank; the fused qkv_a comes first."""

from __future__ import annotations

from collections.abc import Iterable

from shapes.attention import Parallel
from shapes.bins import token_bins
from shapes.case import Case
from shapes.cases import BATCHES, DP_BATCHES, DP_PROMPTS, PROMPTS, step_text
from shapes.linears import fp8_calls
from shapes.models import ModelConfig
from shapes.workloads import Documented


def _step(
    model: ModelConfig, parallel: Parallel, tokens: int, prompt: int = 0, weight: float = 1.0, drafts: int = 0
) -> list[Case]:
    """The FP8 linears of a step of `tokens` tokens, `prompt` of which are prompt tokens."""
    step = f"{model.name} {parallel.text} {step_text(tokens, prompt, drafts)}"
    return [
        Case("block_scale_gemm", sizes, place=f"{step} {linear.name}", weight=weight * calls)
        for linear, sizes, calls in fp8_calls(model, parallel, tokens, prompt)
    ]


def smoke() -> list[Case]:
    """Last blocks of 64 columns as in qkv_a, fewer and more rows than a tile has, several blocks of k."""
    all_sizes = [(16, 320, 384), (1, 576, 256), (33, 192, 512), (7, 256, 640), (32, 384, 128)]
    return [Case("block_scale_gemm", {"m": m, "n": n, "k": k}, place="smoke") for m, n, k in all_sizes]


def ragged() -> list[Case]:
    """Odd numbers of rows, below and above those of tiles; 3 to 5 blocks of k; half of a last block of n."""
    all_sizes = [(7, 320, 384), (33, 576, 512), (129, 192, 640)]
    return [Case("block_scale_gemm", {"m": m, "n": n, "k": k}) for m, n, k in all_sizes]


def _steps(
    model: ModelConfig, parallel: Parallel, drafts: int, batches: Iterable[int],
    prompts: Iterable[tuple[int, int]],
) -> list[Case]:  # fmt: skip
    """Steps that decode batches of requests, then steps that prefill prompts, (prompts, tokens of each)."""
    cases = []
    for batch in batches:
        cases += _step(model, parallel, batch * (1 + drafts), drafts=drafts)
    for count, isl in prompts:
        cases += _step(model, parallel, count * isl, count * isl)
    return cases


def sweep(model: ModelConfig, parallel: Parallel, drafts: int = 0) -> list[Case]:
    return _steps(model, parallel, drafts, BATCHES, PROMPTS)


def production(model: ModelConfig, parallel: Parallel, drafts: int = 0) -> list[Case]:
    return _steps(model, parallel, drafts, DP_BATCHES, DP_PROMPTS)


def served(model: ModelConfig, run: Documented) -> list[Case]:
    cases = []
    for bin_ in token_bins(run.on_rank):
        cases += _step(model, run.parallel, bin_.tokens, bin_.prompt, bin_.weight)
    return cases
