"""MHA prefill in plain torch: right in the ways of its libraries, wrong in many.

A right kernel's `source` is the file whose arithmetic it follows; "assumed" where that is closed or unread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from harness.prove.arithmetic import (
    LOG2E,
    Arithmetic,
    Round,
    attend,
    away,
    bf16,
    combine,
    exact,
    exp2_cubic,
    exp2_fast,
    exp2_linear,
    flushed,
    fourteen_bits,
    fp8,
    fp8_truncated,
    fp16,
    kept,
    truncated,
)
from harness.prove.planted import Compute, Planted
from kernels.mha_prefill.operands import GUARD, MhaPrefillOperands, Sequence, beyond
from kernels.mha_prefill.sizes import NOPE, VALUE, WIDTH

Attend = Callable[[MhaPrefillOperands, Sequence], torch.Tensor]
"""(operands, a sequence) -> its output, fp32 [new, heads, 128]."""

SIZES = {
    "small": "batch=3 new=100..150 heads=4",
    "small cached": "batch=3 new=40..90 prefix=1..60 heads=4",
    "small fp8": "batch=3 new=40..90 prefix=0..60 heads=4 dtype=fp8",
    "small e4m3fnuz": "batch=3 new=40..90 prefix=0..60 heads=4 dtype=fp8 fp8=e4m3fnuz",
    "production": "batch=2 new=610..650 heads=4",
    "production cached": "batch=2 new=64..100 prefix=1500..2048 heads=4",
    "production 64 heads": "batch=2 new=70..80 heads=64",
    "production fp8": "batch=2 new=130..200 prefix=500..700 heads=4 dtype=fp8",
}
BLOCK = 64


# The steps


def taken(o: MhaPrefillOperands, s: Sequence, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v [heads, n, ...] of these keys of the sequence, int64 [n]; may go past its ends."""
    at = GUARD + s.keys.start + index
    k, v = (beyond(t)[at].float().transpose(0, 1) for t in (o.k, o.v))
    return k, v * o.value_scale


def last_seen(s: Sequence) -> torch.Tensor:
    """The last key that each query sees, [new, 1]."""
    return s.prefix + torch.arange(s.new)[:, None]


def scored(
    o: MhaPrefillOperands,
    s: Sequence,
    index: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked scores [heads, new, keys] and values [heads, keys, 128]: the right ones, unless other keys are
    given, which of them each query sees, other queries [heads, new, 192], or a factor on the scale."""
    index = torch.arange(s.length) if index is None else index
    k, v = taken(o, s, index)
    q = o.q[s.queries].float().transpose(0, 1) if q is None else q
    seen = index <= last_seen(s) if seen is None else seen
    return (q @ k.transpose(1, 2) * (o.score_scale * scale)).masked_fill_(~seen, -math.inf), v


def flash(
    o: MhaPrefillOperands,
    s: Sequence,
    how: Arithmetic = Arithmetic(),  # noqa: B008
    ends: Callable[[Sequence], list[int]] | None = None,
    partial_results: Round = exact,
    **changed: Any,
) -> torch.Tensor:
    """ends: where parts of the keys end that are attended to by themselves and then combined."""
    scores, v = scored(o, s, **changed)
    bounds = sorted({e for e in (ends(s) if ends else []) if 0 < e < s.length} | {s.length})
    partials = []
    for a, b in zip([0, *bounds[:-1]], bounds, strict=True):
        log, result = attend(scores[..., a:b], v[:, a:b], how)
        # A query that sees none of these keys.
        partials.append(
            (log.nan_to_num(nan=-math.inf), result.nan_to_num(nan=0.0)) if len(bounds) > 1 else (log, result)
        )
    return combine(partials, partial_results).transpose(0, 1)


def plain(o: MhaPrefillOperands, s: Sequence, **changed: Any) -> torch.Tensor:
    scores, v = scored(o, s, **changed)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def in_fp8(
    o: MhaPrefillOperands,
    s: Sequence,
    how: Arithmetic = Arithmetic(),  # noqa: B008
    summed: bool = False,
    weights: torch.dtype | None = None,
    **changed: Any,
) -> torch.Tensor:
    """The weights in the operands' format."""
    rounding = partial(fp8, weights or o.q.dtype)
    if how.weights is bf16:
        how = replace(how, weights=rounding)
    return flash(o, s, replace(how, sums=rounding if summed else exact), **changed)


def every(of: Attend, output: Round = bf16) -> Compute:
    def compute(o: MhaPrefillOperands, right: torch.Tensor) -> torch.Tensor:
        return torch.cat([output(of(o, s)).bfloat16() for s in o.sequences])

    return compute


def victim(o: MhaPrefillOperands) -> Sequence:
    """With cached tokens if there are any, and behind another sequence."""
    return max(o.sequences[1:], key=lambda s: (s.prefix > 0, s.new))


def in_one_place(of: Attend) -> Compute:
    """An output that is wrong in one sequence."""

    def compute(o: MhaPrefillOperands, right: torch.Tensor) -> torch.Tensor:
        out, s = right.clone(), victim(o)
        out[s.queries] = of(o, s).bfloat16()
        return out

    return compute


def has_fp8(sizes: Any) -> bool:
    return sizes.dtype == "fp8"


def has_bf16(sizes: Any) -> bool:
    return sizes.dtype == "bf16"


def anything(sizes: Any) -> bool:
    return True


def cached(sizes: Any) -> bool:
    return max(prefix for prefix, _ in sizes.lengths()) > 1


def long(sizes: Any) -> bool:
    """The victim, and all others, have many blocks."""
    return min(prefix + new for prefix, new in sizes.lengths()) > 600


# Right


def normalised_first(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    scores, v = scored(o, s)
    return (bf16(scores.softmax(-1)) @ v).transpose(0, 1)


def at_prefix(s: Sequence) -> list[int]:
    return [s.prefix]


def chunks(s: Sequence) -> list[int]:
    return [s.prefix // 3, 2 * s.prefix // 3, s.prefix]


def every_fifth(s: Sequence) -> list[int]:
    return [s.length * i // 5 // 128 * 128 for i in range(1, 5)]


A = Arithmetic
AITER = "AITER e404860"
RIGHT_BF16: tuple[tuple[str, Attend, str], ...] = (
    ("softmax in fp32", plain, "torch.naive: kernels/mha_prefill/providers/torch_eager.py"),
    (
        "weights normalised, then rounded",
        normalised_first,
        "torch.sdpa's math path: aten/src/ATen/native/transformers/attention.cpp, torch 2.13",
    ),
    (
        "blocks of 512",
        partial(flash, how=A(block=512)),
        "torch.sdpa on CPUs: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, torch 2.13",
    ),
    (
        "blocks of 128",
        partial(flash, how=A(block=128)),
        "torch.flex: torch/_inductor/kernel/flex, torch 2.13",
    ),
    ("blocks of 64", flash, "triton.flash: kernels/mha_prefill/triton/flash_jit.py"),
    (
        "blocks of 32",
        partial(flash, how=A(block=32)),
        "triton.flash: kernels/mha_prefill/triton/flash_jit.py",
    ),
    (
        "cached and new keys by themselves, merged",
        partial(flash, ends=at_prefix),
        "vllm.extend: csrc/cpu/sgl-kernels/extend.cpp, vLLM 0.33 (assumed; the row itself is checked)",
    ),
    (
        "chunks of cached keys, each result in bf16, then merged",
        partial(flash, ends=chunks, partial_results=bf16),
        "model_executor/layers/attention/mla_attention.py (merge_attn_states), vLLM 0.33",
    ),
    (
        "chunks of cached keys, rounded weights summed, in bf16",
        partial(flash, how=A(sums=bf16), ends=chunks, partial_results=bf16),
        "v1/attention/backends/mla/prefill/aiter_flash_attn.py (run_prefill_context_chunk), vLLM 0.33",
    ),
    (
        "blocks of 32 to the prefix, then of 32",
        partial(flash, how=A(block=32, exp2=exp2_fast), ends=at_prefix),
        "sglang.triton: srt/layers/attention/triton_ops/extend_attention.py, SGLang 0.5.23",
    ),
    ("rounded weights summed", partial(flash, how=A(sums=bf16)), "flash_attn.fa2's earlier rows: assumed"),
    (
        "the last block first",
        partial(flash, how=A(block=128, backwards=True)),
        "flash_attn.fa3: hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp, FlashAttention 0251105",
    ),
    (
        "the last block first, of 112",
        partial(flash, how=A(block=112, backwards=True, exp2=exp2_fast)),
        "flash_attn.fa3: hopper/tile_size.h, FlashAttention 0251105",
    ),
    (
        "the last block first, of 64",
        partial(flash, how=A(backwards=True, exp2=exp2_fast)),
        "flash_attn.fa2: csrc/flash_attn/src/flash_fwd_kernel.h, FlashAttention 2.8.3",
    ),
    (
        "a stale maximum, up to 2^8",
        partial(flash, how=A(block=128, lazy=8.0)),
        "flash_attn.fa4: flash_attn/cute/softmax.py (rescale_threshold), 4.0.0b36",
    ),
    (
        "a stale maximum, up to 2^8, in blocks of 16",
        partial(flash, how=A(block=16, lazy=8.0)),
        "flash_attn.fa4@vllm: flash_attn/cute/softmax.py (rescale_threshold), 4.0.0b36",
    ),
    (
        "a stale maximum, cubic exp2, backwards",
        partial(flash, how=A(block=128, lazy=8.0, exp2=exp2_cubic, backwards=True)),
        "flash_attn.fa4: flash_attn/cute/utils.py, 4.0.0b36",
    ),
    (
        "cubic exp2",
        partial(flash, how=A(block=128, exp2=exp2_cubic)),
        "flash_attn.fa4: flash_attn/cute/utils.py, 4.0.0b36",
    ),
    (
        "blocks of 96, fast exp2",
        partial(flash, how=A(block=96, exp2=exp2_fast, backwards=True)),
        "flashinfer.fa3: include/flashinfer/attention/hopper/mainloop_mma.cuh, flashinfer 0.6.18",
    ),
    (
        "rounded weights summed by the tensor cores",
        partial(flash, how=A(sums=bf16, exp2=exp2_fast)),
        "flashinfer.fa2: include/flashinfer/attention/prefill.cuh, flashinfer 0.6.18",
    ),
    (
        "five parts of tiles, in bf16",
        partial(flash, ends=every_fifth, partial_results=bf16),
        "flashinfer's split prefill: include/flashinfer/attention/cascade.cuh, flashinfer 0.6.18",
    ),
    (
        "five parts of tiles",
        partial(flash, ends=every_fifth),
        "flash_attn with splits: hopper/flash_fwd_combine_kernel.h, FlashAttention 0251105",
    ),
    (
        "blocks of 128, correction skipped below 2^4",
        partial(flash, how=A(block=128, lazy=4.0, exp2=exp2_fast)),
        "assumed: flashinfer.trtllm comes compiled",
    ),
    ("pairs of blocks", partial(flash, how=A(pairs=True, block=128)), "assumed: cudnn comes compiled"),
    (
        "blocks of 128 in fp32",
        partial(flash, how=A(block=128, weights=exact)),
        "assumed: cudnn comes compiled",
    ),
    (
        "ties away from zero",
        partial(flash, how=A(weights=away)),
        f"aiter.asm on gfx942, how_v3_bf16_cvt=1: aiter/ops/mha.py, {AITER}",
    ),
    (
        "OPUS on gfx950",
        partial(flash, how=A(block=64, lazy=8.0, exp2=exp2_fast)),
        f"aiter.opus: assumed, {AITER}",
    ),
    (
        "exp2 with the scale before",
        partial(flash, how=A(block=32, scores=lambda x: x * (1.0 + 2.0**-23))),
        f"aiter.triton: aiter/ops/triton/_triton_kernels/attention/mha.py, {AITER}",
    ),
    (
        "subnormal numbers flushed",
        partial(flash, how=A(weights=lambda x: bf16(flushed(x)), accumulator=flushed)),
        f"aiter: -fgpu-flush-denormals-to-zero in aiter/jit/core.py, {AITER}",
    ),
    (
        "weights in fp32, rescaled at the end only",
        partial(flash, how=A(block=1 << 20, weights=bf16)),
        "the reference of FlashAttention's own tests: tests/test_util.py, FlashAttention 2.8.3",
    ),
)

RIGHT_TRUNCATED: tuple[tuple[str, Attend, str], ...] = (
    (
        "weights and output truncated",
        partial(flash, how=A(weights=truncated)),
        f"aiter.ck: module_mha_varlen_fwd in aiter/jit/optCompilerConfig.json, {AITER}",
    ),
    (
        "weights and output truncated, blocks of 128",
        partial(flash, how=A(weights=truncated, block=128, exp2=exp2_fast)),
        f"aiter.dispatch: module_mha_varlen_fwd in aiter/jit/optCompilerConfig.json, {AITER}",
    ),
    ("the output truncated", flash, f"aiter.ck, weights by its asm: assumed, {AITER}"),
    (
        "truncated, cached keys apart",
        lambda o, s: truncated(flash(o, s, A(weights=truncated), ends=at_prefix, partial_results=truncated)),
        f"aiter.ck under vLLM's chunks: aiter/jit/optCompilerConfig.json, {AITER}",
    ),
)

RIGHT_FP8: tuple[tuple[str, Attend, str], ...] = (
    ("weights in FP8", in_fp8, "flash_attn.fa3 before max_offset: hopper/softmax.h, FlashAttention 2.7.4"),
    (
        "weights up to 2^8",
        partial(in_fp8, how=A(headroom=7.0, block=128, backwards=True)),
        "flash_attn.fa3: hopper/softmax.h (Max_offset), FlashAttention 0251105; 7 for e4m3fnuz's sake",
    ),
    (
        "weights up to 2^7, rounded ones summed",
        partial(in_fp8, how=A(headroom=7.0), summed=True),
        "triton.flash: kernels/mha_prefill/triton/flash_jit.py (HEADROOM)",
    ),
    ("rounded weights summed", partial(in_fp8, summed=True), "assumed: flashinfer.trtllm comes compiled"),
    (
        "sums of 14 bits",
        partial(in_fp8, how=A(accumulator=fourteen_bits)),
        "on Hopper: DeepSeek-V3 technical report, section 3.5.2",
    ),
    (
        "sums of 14 bits, scores too",
        partial(in_fp8, how=A(accumulator=fourteen_bits, scores=fourteen_bits, headroom=7.0)),
        "on Hopper: DeepSeek-V3 technical report, section 3.5.2",
    ),
    ("blocks of 128", partial(in_fp8, how=A(block=128)), f"aiter.fp8: module_mha_varlen_fwd, {AITER}"),
    (
        "correction skipped below 2^4",
        partial(in_fp8, how=A(block=128, lazy=4.0)),
        "flash_attn.fa4: flash_attn/cute/softmax.py, 4.0.0b36",
    ),
    (
        "five parts of tiles",
        partial(in_fp8, ends=every_fifth),
        f"aiter.fp8_ps: csrc/kernels/mla/reduce.cu, {AITER}",
    ),
    ("one block", partial(in_fp8, how=A(block=1 << 20)), "op_tests/test_mla_prefill_ps.py, AITER e404860"),
    (
        "cubic exp2",
        partial(in_fp8, how=A(block=128, exp2=exp2_cubic, headroom=4.0)),
        "flash_attn.fa4: flash_attn/cute/utils.py (max_offset 4), 4.0.0b36",
    ),
)


def widened(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    """v times its descale in bf16."""
    scores, v = scored(o, s)
    _, result = attend(scores, bf16(v))
    return result.transpose(0, 1)


def right() -> list[Planted]:
    planted = [Planted(f"right: {name}", every(f), right=True, source=src) for name, f, src in RIGHT_BF16]
    planted += [
        Planted(f"right: {name}", every(f, truncated), right=True, truncates=True, source=src)
        for name, f, src in RIGHT_TRUNCATED
    ]
    planted += [
        Planted(f"right in FP8: {name}", every(f), True, activations="fp8", fits=has_fp8, source=src)
        for name, f, src in RIGHT_FP8
    ]
    planted += [
        Planted(
            "right: FP8 operands made bf16",
            every(widened),
            right=True,
            fits=has_fp8,
            source="torch.sdpa: kernels/mha_prefill/providers/torch_sdpa.py (_Widened)",
        ),
        Planted(
            "right in FP8: output truncated",
            every(partial(in_fp8, how=A(block=128)), truncated),
            right=True,
            activations="fp8",
            truncates=True,
            fits=has_fp8,
            source=f"aiter.fp8: module_mha_varlen_fwd in aiter/jit/optCompilerConfig.json, {AITER}",
        ),
    ]
    return planted


# Wrong keys: which are taken (int64 [n]), and which of them each query sees ([new, n]; None: by their index)

Keys = Callable[[MhaPrefillOperands, Sequence], tuple[torch.Tensor, torch.Tensor | None]]


def masked(seen: Callable[[Sequence, torch.Tensor, torch.Tensor], torch.Tensor], beyond_end: int = 0) -> Keys:
    """(sequence, key [n], query's row [new, 1]) -> who is seen."""

    def keys(o: MhaPrefillOperands, s: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        key = torch.arange(s.length + beyond_end)
        return key, seen(s, key, torch.arange(s.new)[:, None]).expand(s.new, len(key))

    return keys


def lacking(lost: Callable[[Sequence, torch.Tensor], torch.Tensor]) -> Keys:
    """Keys that nobody sees, but that a row which would see none keeps its own."""

    def keys(o: MhaPrefillOperands, s: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        key, last = torch.arange(s.length), last_seen(s)
        return key, (key <= last) & (~lost(s, key) | (key == last))

    return keys


def replaced(other: Callable[[MhaPrefillOperands, Sequence, torch.Tensor], torch.Tensor]) -> Keys:
    """Other keys in these ones' places, seen as these ones."""

    def keys(o: MhaPrefillOperands, s: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        key = torch.arange(s.length)
        return other(o, s, key), key <= last_seen(s)

    return keys


def middle_block(s: Sequence, key: torch.Tensor) -> torch.Tensor:
    return key // BLOCK == max(1, s.length // BLOCK // 2)


def before(o: MhaPrefillOperands, s: Sequence) -> Sequence:
    return o.sequences[o.sequences.index(s) - 1]


def within(o: MhaPrefillOperands, s: Sequence, key: torch.Tensor) -> torch.Tensor:
    """Kept inside the tensor and its guards."""
    return key.clamp(-GUARD - s.keys.start, len(o.k) + GUARD - 1 - s.keys.start)


def mirrored(o: MhaPrefillOperands, s: Sequence, key: torch.Tensor) -> torch.Tensor:
    return s.length - 1 - key


ALL_KEYS: tuple[tuple[str, Keys, Callable[[Any], bool]], ...] = (
    ("the mask one short", masked(lambda s, k, i: (k < s.prefix + i) | (k == 0)), anything),
    ("the mask one long", masked(lambda s, k, i: k <= s.prefix + i + 1, 1), anything),
    (
        "the mask one long within tiles",
        masked(lambda s, k, i: (k <= s.prefix + i) | ((k == s.prefix + i + 1) & (i % 64 != 63))),
        anything,
    ),
    ("no mask", masked(lambda s, k, i: k >= 0), anything),
    ("a mask by tiles of 64", masked(lambda s, k, i: k < (s.prefix + i) // 64 * 64 + 64), anything),
    ("a mask by rows in pairs", masked(lambda s, k, i: k <= s.prefix + i // 2 * 2), anything),
    ("a mask by rows in pairs, upward", masked(lambda s, k, i: k <= s.prefix + i // 2 * 2 + 1), anything),
    ("a window of 32 keys", masked(lambda s, k, i: (k <= s.prefix + i) & (k > s.prefix + i - 32)), anything),
    (
        "a window of all keys but one",
        masked(
            lambda s, k, i: (k <= s.prefix + i) & (k >= min(1, s.prefix + s.new - 1)) | (k == s.prefix + i)
        ),
        anything,
    ),
    ("only its own key", masked(lambda s, k, i: k == s.prefix + i), anything),
    ("only keys before 64", masked(lambda s, k, i: (k <= s.prefix + i) & (k < 64)), anything),
    ("the mask in reverse", masked(lambda s, k, i: k >= s.prefix + i), anything),
    ("its own key lost", masked(lambda s, k, i: (k < s.prefix + i) | (k + s.prefix + i == 0)), anything),
    ("the first key lost", lacking(lambda s, k: k == 0), anything),
    ("the first key of each block lost", lacking(lambda s, k: k % BLOCK == 0), anything),
    ("the last key of each block lost", lacking(lambda s, k: k % BLOCK == BLOCK - 1), anything),
    ("the first block lost", lacking(lambda s, k: k < BLOCK), anything),
    ("a block in the middle lost", lacking(middle_block), anything),
    ("every other block lost", lacking(lambda s, k: k // BLOCK % 2 == 1), anything),
    ("every eighth key lost", lacking(lambda s, k: k % 8 == 7), anything),
    ("keys beyond whole blocks lost", lacking(lambda s, k: k >= (s.length - 1) // BLOCK * BLOCK), anything),
    ("keys beyond 512 lost", lacking(lambda s, k: k >= 512), long),
    (
        "blocks on the diagonal lost",
        masked(lambda s, k, i: (k < (s.prefix + i) // BLOCK * BLOCK) | (k == s.prefix + i)),
        anything,
    ),
    (
        "the first key twice",
        lambda o, s: (torch.cat([torch.tensor([0]), torch.arange(s.length)]), None),
        anything,
    ),
    (
        "a block for the one before it",
        replaced(lambda o, s, k: torch.where(middle_block(s, k), k - BLOCK, k)),
        anything,
    ),
    ("keys one behind", replaced(lambda o, s, k: k - 1), anything),
    ("keys one ahead", replaced(lambda o, s, k: k + 1), anything),
    ("keys in reverse", replaced(mirrored), anything),
    ("keys in pairs swapped", replaced(lambda o, s, k: (k ^ 1).clamp(max=s.length - 1)), anything),
    ("the sequence before's keys", replaced(lambda o, s, k: k - before(o, s).length), anything),
    ("the first sequence's keys", replaced(lambda o, s, k: within(o, s, k - s.keys.start)), anything),
    ("keys of all sequences before", lambda o, s: (torch.arange(-s.keys.start, s.length), None), anything),
    ("the last key of the sequence before", lambda o, s: (torch.arange(-1, s.length), None), anything),
    (
        "keys where its queries start",
        replaced(lambda o, s, k: within(o, s, k - s.keys.start + s.queries.start)),
        cached,
    ),
    ("cached keys ignored", lacking(lambda s, k: k < s.prefix), cached),
    ("new keys ignored", lacking(lambda s, k: k >= s.prefix), cached),
    ("the mask aligned to the first key", masked(lambda s, k, i: k <= i), cached),
    ("the last cached key lost", lacking(lambda s, k: k == s.prefix - 1), cached),
    ("the first new key lost", lacking(lambda s, k: k == s.prefix), cached),
    (
        "the first new key seen twice",
        lambda o, s: (torch.cat([torch.arange(s.prefix + 1), torch.arange(s.prefix, s.length)]), None),
        cached,
    ),
    ("a prefix one short", masked(lambda s, k, i: k <= max(0, s.prefix - 1) + i), cached),
    (
        "a prefix rounded down to 16",
        masked(lambda s, k, i: k <= s.prefix // 16 * 16 + i),
        lambda z: cached(z) and all(p % 16 for p, _ in z.lengths()),
    ),
    ("the prefix of the sequence before", lambda o, s: _other_prefix(o, s), cached),
    (
        "cached keys seen by all, new ones without a mask",
        masked(lambda s, k, i: (k < s.prefix) | (k >= s.prefix)),
        cached,
    ),
    (
        "cached keys in place of new ones",
        replaced(lambda o, s, k: torch.where(k >= s.prefix, k % max(1, s.prefix), k)),
        cached,
    ),
)
"""In FP8 calls too, where IN_FP8_TOO names them."""


def _other_prefix(o: MhaPrefillOperands, s: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    key = torch.arange(s.length)
    other = before(o, s).prefix
    other = other if other != s.prefix else other + 1
    return key, key <= other + torch.arange(s.new)[:, None]


IN_FP8_TOO = {
    "the mask one long",
    "no mask",
    "a window of 32 keys",
    "only its own key",
    "the first block lost",
    "a block in the middle lost",
    "every other block lost",
    "a block for the one before it",
    "keys one behind",
    "keys in reverse",
    "the sequence before's keys",
    "cached keys ignored",
    "the mask aligned to the first key",
}


def with_keys(keys: Keys, of: Callable[..., torch.Tensor]) -> Attend:
    def wrong(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
        index, seen = keys(o, s)
        return of(o, s, index=index, seen=seen)

    return wrong


def zeros_leak(count: int | None, score: float = 0.0) -> Attend:
    """Rows of zeros behind the last key count with this score; as many as fill the last block."""

    def wrong(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
        scores, v = scored(o, s)
        missing = count or (-s.length % BLOCK or BLOCK)
        weights = torch.nn.functional.pad(scores, (0, missing), value=score).softmax(-1)
        return (weights[..., : s.length] @ v).transpose(0, 1)

    return wrong


def masked_by(score: float) -> Attend:
    """Keys that a query must not see keep a score."""

    def wrong(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
        scores, v = scored(o, s)
        return (scores.masked_fill(scores == -math.inf, score).softmax(-1) @ v).transpose(0, 1)

    return wrong


# Wrong arithmetic

WRONG_ARITHMETIC: tuple[tuple[str, Arithmetic, Callable[[Any], bool]], ...] = (
    ("no maximum", A(has_maximum=False), anything),
    ("a maximum that starts at 0", A(first_peak=0.0), anything),
    ("a maximum that starts at 60", A(first_peak=60.0), anything),
    ("a result that is not rescaled", A(of_result=False, block=32), anything),
    ("a sum that is not rescaled", A(of_total=False, block=32), anything),
    ("neither result nor sum rescaled", A(of_result=False, of_total=False, block=32), anything),
    ("scores in bf16", A(scores=bf16), anything),
    ("scores in fp16", A(scores=fp16), anything),
    ("weights in FP8, untold", A(weights=partial(fp8, torch.float8_e4m3fn)), anything),
    ("weights of 5 bits", A(weights=partial(kept, 5)), anything),
    ("a result in fp16", A(accumulator=fp16), has_bf16),
    ("a result in bf16 after every block", A(accumulator=bf16, block=16), long),
    ("a sum in bf16", A(total=bf16, block=16), long),
    ("exp2 by straight lines", A(exp2=exp2_linear), anything),
    ("exp in place of exp2", A(exp2=torch.exp), anything),
    ("values of the next block", A(delayed=True, block=32), anything),
    ("weights up to 2^20 in fp16", A(headroom=20.0, weights=fp16), anything),
)


def scaled(factor: float) -> Attend:
    return partial(plain, scale=factor)


def with_query(change: Callable[[torch.Tensor], torch.Tensor]) -> Attend:
    """q [heads, new, 192] changed first."""
    return lambda o, s: plain(o, s, q=change(o.q[s.queries].float().transpose(0, 1).clone()))


def part(q: torch.Tensor, start: int, stop: int, factor: float) -> torch.Tensor:
    q[..., start:stop] *= factor
    return q


def interleaved(q: torch.Tensor) -> torch.Tensor:
    rope = q[..., NOPE:].clone()
    q[..., NOPE:] = torch.stack([rope[..., :32], rope[..., 32:]], -1).flatten(-2)
    return q


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Attend:
    """k or v [tokens, heads, width], with its guards, changed first."""

    def wrong(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
        changed = change(beyond(getattr(o, name)).float())
        return plain(o.replaced(**{name: changed[GUARD:-GUARD]}), s)

    return wrong


def values_of_k(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    scores, _ = scored(o, s)
    k, _ = taken(o, s, torch.arange(s.length))
    return (scores.softmax(-1) @ k[..., :VALUE]).transpose(0, 1)


def stale(o: MhaPrefillOperands, s: Sequence, keys: bool, values: bool) -> torch.Tensor:
    """A block in the middle is still the one before it: its keys, or its values."""
    index = torch.arange(s.length)
    old = torch.where(middle_block(s, index), index - BLOCK, index)
    scores, _ = scored(o, s, index=old if keys else index, seen=index <= last_seen(s))
    _, v = taken(o, s, old if values else index)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def late_values(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    scores, v = scored(o, s)
    v[:, -16:] = 0.0
    return (scores.softmax(-1) @ v).transpose(0, 1)


def merged(change: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], torch.Tensor]) -> Attend:
    """Halves of what is cached (or of all keys) and the rest, put together wrongly."""

    def wrong(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
        scores, v = scored(o, s)
        middle = s.prefix or s.length // 2
        partials = []
        for a, b in ((0, middle), (middle, s.length)):
            log, result = attend(scores[..., a:b], v[:, a:b])
            partials.append((log.nan_to_num(nan=-math.inf), result.nan_to_num(nan=0.0)))
        return change(partials).transpose(0, 1)

    return wrong


Partials = list[tuple[torch.Tensor, torch.Tensor]]


def logs_by(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Partials], torch.Tensor]:
    def combined(partials: Partials) -> torch.Tensor:
        logs = change(torch.stack([log for log, _ in partials]))
        return combine([(log, result) for log, (_, result) in zip(logs, partials, strict=True)])

    return combined


def one_maximum(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    """The maximum is that of all rows of a tile."""
    scores, v = scored(o, s)
    weights = fp16((scores - scores.amax((0, 1, 2), keepdim=True)).exp())
    return (weights @ v / weights.sum(-1, keepdim=True)).transpose(0, 1)


def clamped(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    scores, v = scored(o, s)
    weights = torch.where(scores == -math.inf, 0.0, scores.clamp(-80, 80).exp())
    return (weights @ v / weights.sum(-1, keepdim=True)).transpose(0, 1)


WRONG_ATTEND: tuple[tuple[str, Attend, Callable[[Any], bool]], ...] = (
    ("a row of zeros counted", zeros_leak(1), anything),
    ("the last block filled with zeros", zeros_leak(None), anything),
    ("the last block's rest scored -10", zeros_leak(None, -10.0), anything),
    ("hidden keys scored 0", masked_by(0.0), anything),
    ("hidden keys scored -10", masked_by(-10.0), anything),
    ("hidden keys scored -100", masked_by(-100.0), anything),
    ("the scale of 128", scaled((192 / 128) ** 0.5), anything),
    ("the scale of 576", scaled((192 / 576) ** 0.5), anything),
    ("the scale 5 percent high", scaled(1.05), anything),
    ("the scale 2 percent low", scaled(0.98), anything),
    ("log2(e) missing", scaled(1 / LOG2E), anything),
    ("log2(e) twice", scaled(LOG2E), anything),
    ("no scale", scaled(192**0.5), anything),
    ("the scale twice", scaled(192**-0.5), anything),
    ("the rope part forgotten", with_query(lambda q: part(q, NOPE, WIDTH, 0.0)), anything),
    ("half of the rope part forgotten", with_query(lambda q: part(q, NOPE + 32, WIDTH, 0.0)), anything),
    ("the rope part twice", with_query(lambda q: part(q, NOPE, WIDTH, 2.0)), anything),
    ("the first 64 channels forgotten", with_query(lambda q: part(q, 0, 64, 0.0)), anything),
    ("the last channel forgotten", with_query(lambda q: part(q, WIDTH - 1, WIDTH, 0.0)), anything),
    ("the rope part in the other order", with_query(interleaved), anything),
    ("the rope part before the rest in q", with_query(lambda q: q.roll(WIDTH - NOPE, -1)), anything),
    ("queries of the head before", with_query(lambda q: q.roll(1, 0)), anything),
    ("queries of the row before", with_query(lambda q: q.roll(1, 1)), anything),
    ("q in FP8, untold", with_query(partial(fp8, torch.float8_e4m3fn)), has_bf16),
    ("k of the head before", with_tensor("k", lambda t: t.roll(1, 1)), anything),
    ("v of the head before", with_tensor("v", lambda t: t.roll(1, 1)), anything),
    ("the first head's k for all", with_tensor("k", lambda t: t[:, :1].expand_as(t).contiguous()), anything),
    ("the first head's v for all", with_tensor("v", lambda t: t[:, :1].expand_as(t).contiguous()), anything),
    (
        "heads in groups of 2 share k and v",
        with_tensor("v", lambda t: t[:, ::2].repeat_interleave(2, 1)),
        anything,
    ),
    ("k in fp16", with_tensor("k", fp16), has_bf16),
    ("v in fp16", with_tensor("v", fp16), has_bf16),
    ("v in FP8, untold", with_tensor("v", partial(fp8, torch.float8_e4m3fn)), has_bf16),
    ("values one token behind", with_tensor("v", lambda t: t.roll(1, 0)), anything),
    ("values of 192 apart", with_tensor("v", lambda t: t.roll(64, -1)), anything),
    ("values from k", values_of_k, anything),
    ("a block's keys still those before", partial(stale, keys=True, values=False), anything),
    ("a block's values still those before", partial(stale, keys=False, values=True), anything),
    ("a block still the one before", partial(stale, keys=True, values=True), anything),
    ("values not arrived yet", late_values, anything),
    ("parts averaged", merged(lambda f: (f[0][1] + f[1][1]) / 2), anything),
    ("parts summed", merged(lambda f: f[0][1] + f[1][1]), anything),
    ("only the first part", merged(lambda f: f[0][1]), anything),
    ("only the second part", merged(lambda f: f[1][1]), anything),
    ("log-sums of base e taken to base 2", merged(logs_by(lambda x: x * LOG2E)), anything),
    ("log-sums of base 2 taken to base e", merged(logs_by(lambda x: x / LOG2E)), anything),
    ("log-sums swapped", merged(logs_by(lambda x: x.flip(0))), anything),
    ("log-sums of the head before", merged(logs_by(lambda x: x.roll(1, 1))), anything),
    ("log-sums of the row before", merged(logs_by(lambda x: x.roll(1, 2))), anything),
    ("log-sums in bf16", merged(logs_by(bf16)), anything),
    ("one maximum for all rows", one_maximum, anything),
    ("scores clamped, no maximum", clamped, anything),
)


# Wrong places


def at_victim(change: Callable[[torch.Tensor], torch.Tensor]) -> Compute:
    """What becomes of one sequence's right output [new, heads, 128]."""

    def compute(o: MhaPrefillOperands, right: torch.Tensor) -> torch.Tensor:
        out, rows = right.clone(), victim(o).queries
        out[rows] = change(right[rows].clone())
        return out

    return compute


def given(change: Callable[[MhaPrefillOperands, torch.Tensor], torch.Tensor]) -> Compute:
    return lambda o, right: change(o, right.clone())


def put(out: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    out[at] = value
    return out


def halves_swapped(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[..., 64:], out[..., :64]], -1)


def past_the_end(o: MhaPrefillOperands, out: torch.Tensor) -> torch.Tensor:
    """A sequence's last tile is stored whole, over the next one's first rows."""
    s = o.sequences[0]
    rows = min(len(out) - s.queries.stop, 16)
    return put(out, slice(s.queries.stop, s.queries.stop + rows), out[s.queries.stop - 1].clone())


WRONG_PLACES: tuple[tuple[str, Compute], ...] = (
    ("a head given to the next", at_victim(lambda out: put(out, (slice(None), 1), out[:, 0].clone()))),
    ("heads in reverse", at_victim(lambda out: out.flip(1))),
    ("heads shifted by one", at_victim(lambda out: out.roll(1, 1))),
    ("rows shifted by one", at_victim(lambda out: out.roll(1, 0))),
    ("rows in reverse", at_victim(lambda out: out.flip(0))),
    (
        "rows in pairs swapped",
        at_victim(lambda out: out[(torch.arange(len(out)) ^ 1).clamp(max=len(out) - 1)]),
    ),
    ("the last row zero", at_victim(lambda out: put(out, -1, 0.0))),
    ("the last row never written", at_victim(lambda out: put(out, -1, math.nan))),
    ("the last row that of the one before", at_victim(lambda out: put(out, -1, out[-2].clone()))),
    (
        "rows beyond whole tiles never written",
        at_victim(lambda out: put(out, slice((len(out) - 1) // 16 * 16, None), math.nan)),
    ),
    ("the first row zero", at_victim(lambda out: put(out, 0, 0.0))),
    (
        "a tile of rows that of the one before",
        at_victim(lambda out: put(out, slice(16, 32), out[:16].clone())),
    ),
    (
        "rows and heads transposed in a tile",
        at_victim(
            lambda out: put(
                out,
                slice(0, 4),
                out[:4, :4].transpose(0, 1).clone() if out.shape[1] == 4 else out[:4].roll(1, 0),
            )
        ),
    ),
    ("halves of columns swapped", at_victim(halves_swapped)),
    ("columns in pairs swapped", at_victim(lambda out: out.unflatten(-1, (64, 2)).flip(-1).flatten(-2))),
    ("columns shifted by 8", at_victim(lambda out: out.roll(8, -1))),
    ("the last 8 columns zero", at_victim(lambda out: put(out, (..., slice(-8, None)), 0.0))),
    ("16 columns of a head zero", at_victim(lambda out: put(out, (5, 1, slice(64, 80)), 0.0))),
    ("one element infinite", at_victim(lambda out: put(out, (2, 1, 3), math.inf))),
    ("added to what was there", at_victim(lambda out: out * 2)),
    ("a row added twice", at_victim(lambda out: put(out, 3, out[3] * 2))),
    ("2 percent too large", at_victim(lambda out: out.float().mul(1.02).bfloat16())),
    ("5 percent too small", at_victim(lambda out: out.float().mul(0.95).bfloat16())),
    ("the output of 5 bits", at_victim(lambda out: kept(5, out.float()).bfloat16())),
    ("the wrong sign", at_victim(lambda out: -out)),
    ("all zero", given(lambda o, out: out * 0)),
    ("the last sequence never computed", given(lambda o, out: put(out, o.sequences[-1].queries, 0.0))),
    ("stored past the end of a sequence", given(past_the_end)),
    ("heads before rows", given(lambda o, out: out.transpose(0, 1).reshape(out.shape))),
    (
        "sequences in reverse order",
        given(lambda o, out: torch.cat([out[s.queries] for s in reversed(o.sequences)])),
    ),
)


# Wrong in FP8


def described(**factors: float) -> Attend:
    """Descales that are off by these factors."""

    def wrong(o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
        return in_fp8(
            o.replaced(**{f"{n}_descale": getattr(o, f"{n}_descale") * f for n, f in factors.items()}), s
        )

    return wrong


def descales(change: Callable[[MhaPrefillOperands], dict[str, torch.Tensor]]) -> Attend:
    return lambda o, s: in_fp8(o.replaced(**change(o)), s)


def other_format(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits, which mean half as much or twice; NaN stays NaN around the tokens."""
    dtypes = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}
    return tensor.view(dtypes[tensor.dtype])


def read_as(name: str, o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    meant = plain(o.replaced(**{name: other_format(getattr(o, name))}), s)
    return meant.nan_to_num(nan=0.0)


def coarser(name: str, o: MhaPrefillOperands, s: Sequence) -> torch.Tensor:
    """An operand taken through e5m2."""
    through = fp8(torch.float8_e5m2, beyond(getattr(o, name)).float())[GUARD:-GUARD]
    rounding = partial(fp8, o.q.dtype)
    return flash(o.replaced(**{name: through}), s, A(weights=rounding))


def ones() -> torch.Tensor:
    return torch.ones(1)


WRONG_FP8: tuple[tuple[str, Compute, Callable[[Any], bool]], ...] = (
    ("outputs 2 percent too large", every(lambda o, s: in_fp8(o, s) * 1.02), anything),
    ("outputs 3 percent too large", every(lambda o, s: in_fp8(o, s) * 1.03), anything),
    ("outputs 5 percent too large", every(lambda o, s: in_fp8(o, s) * 1.05), anything),
    ("outputs 5 percent too small", every(lambda o, s: in_fp8(o, s) * 0.95), anything),
    (
        "weights truncated",
        every(lambda o, s: in_fp8(o, s, A(weights=partial(fp8_truncated, o.q.dtype)))),
        anything,
    ),
    (
        "weights truncated, up to 2^7",
        every(lambda o, s: in_fp8(o, s, A(weights=partial(fp8_truncated, o.q.dtype), headroom=7.0))),
        anything,
    ),
    ("weights in e5m2", every(partial(in_fp8, weights=torch.float8_e5m2)), anything),
    ("q through e5m2", every(partial(coarser, "q")), anything),
    ("k through e5m2", every(partial(coarser, "k")), anything),
    ("v through e5m2", every(partial(coarser, "v")), anything),
    ("weights saturated", every(lambda o, s: in_fp8(o, s, A(headroom=11.0))), anything),
    ("a maximum kept for 2^20", every(lambda o, s: in_fp8(o, s, A(lazy=20.0, block=16))), long),
    ("the sum of weights half of theirs", every(lambda o, s: in_fp8(o, s) * 2), anything),
    ("no maximum", in_one_place(lambda o, s: in_fp8(o, s, A(has_maximum=False))), anything),
    ("a maximum that starts at 0", in_one_place(lambda o, s: in_fp8(o, s, A(first_peak=0.0))), anything),
    (
        "a result that is not rescaled",
        in_one_place(lambda o, s: in_fp8(o, s, A(of_result=False, block=32))),
        anything,
    ),
    (
        "values of the next block",
        in_one_place(lambda o, s: in_fp8(o, s, A(delayed=True, block=32))),
        anything,
    ),
    ("scores in FP8", in_one_place(lambda o, s: in_fp8(o, s, A(scores=partial(fp8, o.q.dtype)))), anything),
    ("q's descale missing", in_one_place(descales(lambda o: {"q_descale": ones()})), anything),
    ("k's descale missing", in_one_place(descales(lambda o: {"k_descale": ones()})), anything),
    ("v's descale missing", in_one_place(descales(lambda o: {"v_descale": ones()})), anything),
    ("q's descale twice", in_one_place(descales(lambda o: {"q_descale": o.q_descale**2})), anything),
    ("v's descale twice", in_one_place(descales(lambda o: {"v_descale": o.v_descale**2})), anything),
    (
        "descales of q and v swapped",
        in_one_place(descales(lambda o: {"q_descale": o.v_descale, "v_descale": o.q_descale})),
        anything,
    ),
    (
        "descales of k and v swapped",
        in_one_place(descales(lambda o: {"k_descale": o.v_descale, "v_descale": o.k_descale})),
        anything,
    ),
    ("k's descale for q", in_one_place(descales(lambda o: {"q_descale": o.k_descale})), anything),
    ("v's descale inverted", in_one_place(descales(lambda o: {"v_descale": 1 / o.v_descale})), anything),
    ("the scale of the 128", in_one_place(described(q=(192 / 128) ** 0.5)), anything),
    ("the scale 10 percent high", in_one_place(described(q=1.1)), anything),
    ("q read in the other format", in_one_place(partial(read_as, "q")), anything),
    ("k read in the other format", in_one_place(partial(read_as, "k")), anything),
    ("v read in the other format", in_one_place(partial(read_as, "v")), anything),
    (
        "the rope part forgotten",
        in_one_place(
            lambda o, s: in_fp8(
                o, s, q=part(o.q[s.queries].float().transpose(0, 1).clone(), NOPE, WIDTH, 0.0)
            )
        ),
        anything,
    ),
)


def fp8_and(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda sizes: has_fp8(sizes) and fits(sizes)


def bugs() -> list[Planted]:
    planted = [
        Planted(name, in_one_place(with_keys(keys, plain)), fits=fits) for name, keys, fits in ALL_KEYS
    ]
    planted += [
        Planted(
            f"{name}, in FP8",
            in_one_place(with_keys(keys, in_fp8)),
            activations="fp8",
            fits=fp8_and(fits),
        )
        for name, keys, fits in ALL_KEYS
        if name in IN_FP8_TOO
    ]
    planted += [
        Planted(name, in_one_place(partial(flash, how=how)), fits=fits)
        for name, how, fits in WRONG_ARITHMETIC
    ]
    planted += [Planted(name, in_one_place(of), fits=fits) for name, of, fits in WRONG_ATTEND]
    planted += [Planted(name, compute) for name, compute in WRONG_PLACES]
    planted += [
        Planted(
            f"{name}, in FP8",
            compute,
            activations="fp8",
            fits=fp8_and(fits),
        )
        for name, compute, fits in WRONG_FP8
    ]
    return planted


PLANTED: tuple[Planted, ...] = (*right(), *bugs())
