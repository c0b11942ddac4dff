"""At which sizes a mistake can be seen: elsewhere it changes nothing, or less than the tolerance."""

from collections.abc import Callable, Mapping
from typing import Any

from kernels.formats import BLOCK
from kernels.mistakes import Mistake
from kernels.mla_decode.mistakes import QUERY_MISTAKES

Fits = Callable[[Any], bool]
"""Sizes of a case -> whether a mistake is to be refused there."""


def any_size(sizes: Any) -> bool:
    return True


def several_sequences(sizes: Any) -> bool:
    return sizes.batch > 1


def several_heads(sizes: Any) -> bool:
    return sizes.heads > 1


def several_queries(sizes: Any) -> bool:
    return sizes.q > 1


def fp8_cache(sizes: Any) -> bool:
    return sizes.kv == "fp8"


def several_pages(sizes: Any) -> bool:
    return max(sizes.lengths()) > 3 * sizes.page


def cached(sizes: Any) -> bool:
    return max(prefix for prefix, _ in sizes.lengths()) > 1


def many_keys(sizes: Any) -> bool:
    """With few steps, rounding after each is no worse than rounding the output."""
    lengths = sizes.lengths()
    return max(lengths if hasattr(sizes, "kv") else map(sum, lengths)) > 100


def bf16_operands(sizes: Any) -> bool:
    return sizes.dtype == "bf16"


def fp8_operands(sizes: Any) -> bool:
    return sizes.dtype == "fp8"


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


def has_shared(sizes: Any) -> bool:
    return bool(sizes.shared)


USUAL: Mapping[str, Fits] = {"block_scale_gemm": of_free_scales, "fused_moe": several_blocks}
"""By op, the sizes at which mistakes are seen that are not named below."""
IN_FP8: Mapping[str, Fits] = {"mha_prefill": fp8_operands, "mla_decode": fp8_cache}
"""By op, the sizes of calls that round to FP8, as the operands do."""

FITS: Mapping[str, Mapping[str, Fits]] = {
    "block_scale_gemm": {
        "a row truncated to 5 bits": any_size,
        "quantiser: up to 448 in e4m3fnuz": lambda s: s.fp8 == "e4m3fnuz",
        "quantiser: stored scales 2 percent too large": lambda s: s.m > 32,
        "the sum in bf16 after each 16 products": lambda s: s.k >= 2048,
        "a's padded scales read unpadded": lambda s: s.m > 8 and s.m % 4 != 0,
    },
    "fused_moe": {
        "experts of other ranks taken for expert 0": lambda s: s.ep > 1,
        "shared expert left out": has_shared,
        "shared expert scaled too": has_shared,
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
        "last key of the previous sequence counted too": several_sequences,
        "keys of the previous sequence": several_sequences,
        "result in bf16 after each token": many_keys,
        "sum in bf16 after each token": many_keys,
        "result in fp16": bf16_operands,
        "values rounded to FP8": bf16_operands,
        "keys of the previous head": several_heads,
        "heads shifted by one": several_heads,
        "stored past the end of a sequence": several_sequences,
        "FP8 operands made bf16": fp8_operands,
    },
    "mla_decode": {
        "last page left out": several_pages,
        "page in the middle left out": several_pages,
        "page read twice in place of the next": several_pages,
        "tokens of the previous sequence": several_sequences,
        "page table of the first sequence": several_sequences,
        "page numbers in 16 bits with a sign": lambda s: s.page == 1,
        "result in bf16 after each token": many_keys,
        "sum in bf16 after each token": many_keys,
        "cache's scale left out": fp8_cache,
        "cache's scale left out in scores": fp8_cache,
        "cache's scale left out in values": fp8_cache,
        "cache read in the other FP8 format": fp8_cache,
        "heads shifted by one": several_heads,
        **dict.fromkeys(QUERY_MISTAKES, several_queries),
    },
}


def fits(op: str, kernel: Mistake, sizes: Any, is_right: bool) -> bool:
    usual = any_size if is_right else USUAL.get(op, any_size)
    if kernel.activations == "fp8" and op in IN_FP8 and not IN_FP8[op](sizes):
        return False
    return FITS[op].get(kernel.name.removesuffix(", in FP8"), usual)(sizes)
