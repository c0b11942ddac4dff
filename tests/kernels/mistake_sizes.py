"""At which sizes a mistake can be seen: elsewhere it changes nothing, or less than the tolerance."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from kernels.conditions import holds
from kernels.formats import BLOCK
from kernels.mistakes import Mistake
from kernels.mla_decode.mistakes import QUERY_MISTAKES

Fits = str | Callable[[Any], bool]
"""At which sizes a mistake is to be refused: a condition (see kernels.conditions), "" for all sizes, or a
function of them."""


def several_pages(sizes: Any) -> bool:
    return max(sizes.lengths()) > 3 * sizes.page


def cached(sizes: Any) -> bool:
    return max(prefix for prefix, _ in sizes.lengths()) > 1


def many_keys(sizes: Any) -> bool:
    """With few steps, rounding after each is no worse than rounding the output."""
    lengths = sizes.lengths()
    return max(lengths if hasattr(sizes, "kv") else map(sum, lengths)) > 100


def of_free_scales(sizes: Any) -> bool:
    """Sizes with several rows and blocks of K, and scales that are not powers of two."""
    return sizes.m > 8 and sizes.k_blocks > 3 and sizes.scales == "fp32"


def limit_matters(sizes: Any) -> bool:
    """Whether the limit of groups leaves out experts that would be picked without it."""
    groups, limit = sizes.group_limit
    return groups > limit and limit * (sizes.experts // groups) > sizes.topk


def several_blocks(sizes: Any) -> bool:
    return min(sizes.hidden, sizes.inter) > BLOCK


def few_blocks(sizes: Any) -> bool:
    """Where an expert has few tokens, rounding to FP8 hides an error in one block of many."""
    return several_blocks(sizes) and sizes.hidden <= 16 * BLOCK


USUAL: Mapping[str, Fits] = {"block_scale_gemm": of_free_scales, "fused_moe": several_blocks}
"""By op, the sizes at which mistakes are seen that are not named below."""
IN_FP8: Mapping[str, Fits] = {"mha_prefill": "dtype = fp8", "mla_decode": "kv = fp8"}
"""By op, the sizes of calls that round to FP8, as the operands do."""

FITS: Mapping[str, Mapping[str, Fits]] = {
    "block_scale_gemm": {
        "a row truncated to 5 bits": "",
        "quantiser: up to 448 in e4m3fnuz": "fp8 = e4m3fnuz",
        "quantiser: stored scales 2 percent too large": "m > 32",
        "the sum in bf16 after each 16 products": "k >= 2048",
        "a's padded scales read unpadded": "m > 8 and m not-multiple-of 4",
    },
    "fused_moe": {
        "experts of other ranks taken for expert 0": "ep > 1",
        "shared expert left out": "shared = 1",
        "shared expert scaled too": "shared = 1",
        "groups ignored": limit_matters,
        "groups by their best score": limit_matters,
        "one group fewer": limit_matters,
        "w13's scale of the next block of N in one block": few_blocks,
        "w13's scale of the next block of K in one block": few_blocks,
        "w2's scale of the next block of N in one block": few_blocks,
        "w2's scale of the next block of K in one block": few_blocks,
    },
    "mha_prefill": {
        "causal mask aligned to the first key": cached,
        "cached keys left out": cached,
        "last cached key left out": cached,
        "first new key counted twice": cached,
        "last key of the previous sequence counted too": "batch > 1",
        "keys of the previous sequence": "batch > 1",
        "result in bf16 after each token": many_keys,
        "sum in bf16 after each token": many_keys,
        "result in fp16": "dtype = bf16",
        "values rounded to FP8": "dtype = bf16",
        "keys of the previous head": "heads > 1",
        "heads shifted by one": "heads > 1",
        "stored past the end of a sequence": "batch > 1",
        "FP8 operands made bf16": "dtype = fp8",
    },
    "mla_decode": {
        "last page left out": several_pages,
        "page in the middle left out": several_pages,
        "page read twice in place of the next": several_pages,
        "tokens of the previous sequence": "batch > 1",
        "page table of the first sequence": "batch > 1",
        "page numbers in 16 bits with a sign": "page = 1",
        "result in bf16 after each token": many_keys,
        "sum in bf16 after each token": many_keys,
        "cache's scale left out": "kv = fp8",
        "cache's scale left out in scores": "kv = fp8",
        "cache's scale left out in values": "kv = fp8",
        "cache read in the other FP8 format": "kv = fp8",
        "heads shifted by one": "heads > 1",
        **dict.fromkeys(QUERY_MISTAKES, "q > 1"),
    },
}


def holds_at(fits: Fits, sizes: Any) -> bool:
    if isinstance(fits, str):
        return holds([fits] if fits else [], asdict(sizes))
    return fits(sizes)


def fits(op: str, kernel: Mistake, sizes: Any, is_right: bool) -> bool:
    if kernel.activations == "fp8" and not holds_at(IN_FP8.get(op, ""), sizes):
        return False
    usual = "" if is_right else USUAL.get(op, "")
    return holds_at(FITS[op].get(kernel.name.removesuffix(", in FP8"), usual), sizes)
