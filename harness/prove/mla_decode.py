"""MLA decode in plain torch: right in the ways of its libraries, wrong in many.

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
    Arithmetic,
    Round,
    attend,
    away,
    bf16,
    combine,
    evenly,
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
    split,
    truncated,
)
from harness.prove.planted import Compute, Planted
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, ROPE, WIDTH

Sequence = Callable[[MlaDecodeOperands, int], torch.Tensor]
"""(operands, a sequence) -> its output, fp32 [heads, 512]."""

LOG2 = math.log(2)

SIZES = {
    "small": "batch=3 ctx=1..201 heads=16 page=16",
    "small fp8": "batch=3 ctx=1..201 heads=16 page=16 kv=fp8",
    "small e4m3fnuz": "batch=3 ctx=1..201 heads=16 page=16 kv=fp8 fp8=e4m3fnuz",
    "small page 1": "batch=3 ctx=40..300 heads=16 page=1",
    "production": "batch=2 ctx=3201..3999 heads=16 page=64",
    "production 128 heads": "batch=2 ctx=1501..2047 heads=128 page=64",
    "production fp8": "batch=2 ctx=3201..3999 heads=16 page=64 kv=fp8",
}


# The steps


def rows(o: MlaDecodeOperands, slots: torch.Tensor) -> torch.Tensor:
    return o.kv.view(-1, WIDTH)[slots].float() * o.kv_scale


def slots_of(o: MlaDecodeOperands, i: int, token: torch.Tensor) -> torch.Tensor:
    """Where tokens lie by the page table; they may go past the sequence's end."""
    return o.page_table[i, token // o.page].long() * o.page + token % o.page


def scores_of(o: MlaDecodeOperands, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return q @ kv.T * o.scale


def decode(
    o: MlaDecodeOperands,
    i: int,
    how: Arithmetic = Arithmetic(),  # noqa: B008
    *,
    slots: torch.Tensor | None = None,
    kv: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    parts: int = 1,
    unit: int = 1,
    partial_results: Round = exact,
    log_sums: Round = exact,
    scale: float = 1.0,
) -> torch.Tensor:
    """The right answer, unless it is given other slots, rows, queries, or a factor on the softmax scale."""
    kv = rows(o, o.token_slots(i) if slots is None else slots) if kv is None else kv
    q = o.q[i].float() if q is None else q
    bounds = evenly(len(kv), parts, unit)
    return split(scores_of(o, q, kv) * scale, kv[:, :LATENT], bounds, how, partial_results, log_sums)


def plain(o: MlaDecodeOperands, i: int, **changed: Any) -> torch.Tensor:
    """Without rounding of weights, in one block."""
    return decode(o, i, Arithmetic(block=1 << 30, weights=exact), **changed)


def in_fp8(
    o: MlaDecodeOperands,
    i: int,
    how: Arithmetic = Arithmetic(),  # noqa: B008
    *,
    q_scale: str = "one",
    summed: bool = False,
    weights: torch.dtype | None = None,
    query: torch.dtype | None = None,
    **changed: Any,
) -> torch.Tensor:
    """q and the weights in the cache's format. q_scale: one; or of the tensor's or the head's largest."""
    dtype = o.kv.dtype
    q = (changed.pop("q") if "q" in changed else o.q[i]).float()
    scale = torch.ones(())
    if q_scale == "tensor":
        scale = o.q.float().abs().amax() / torch.finfo(dtype).max
    elif q_scale == "head":
        scale = q.abs().amax(-1, keepdim=True) / torch.finfo(dtype).max
    rounding = partial(fp8, weights or dtype)
    if how.weights is bf16:
        how = replace(how, weights=rounding)
    how = replace(how, sums=rounding if summed else exact)
    return decode(o, i, how, q=fp8(query or dtype, q / scale) * scale, **changed)


def every(sequence: Sequence, output: Round = bf16) -> Compute:
    def compute(o: MlaDecodeOperands, right: torch.Tensor) -> torch.Tensor:
        return torch.stack([output(sequence(o, i)).bfloat16() for i in range(len(o.host_lengths))])

    return compute


def victim(o: MlaDecodeOperands) -> int:
    """The longest sequence behind the first."""
    return max(range(1, len(o.host_lengths)), key=o.host_lengths.__getitem__)


def in_one_place(sequence: Sequence) -> Compute:
    """An output that is wrong in one sequence."""

    def compute(o: MlaDecodeOperands, right: torch.Tensor) -> torch.Tensor:
        out, i = right.clone(), victim(o)
        out[i] = sequence(o, i).bfloat16()
        return out

    return compute


# Right


def normalised_first(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    kv = rows(o, o.token_slots(i))
    return bf16(scores_of(o, o.q[i].float(), kv).softmax(-1)) @ kv[:, :LATENT]


def sequential_combine(o: MlaDecodeOperands, i: int, how: Arithmetic, parts: int) -> torch.Tensor:
    """Part after part with a running maximum, in natural exponentials."""
    kv = rows(o, o.token_slots(i))
    scores = scores_of(o, o.q[i].float(), kv)
    peak = torch.full((len(scores), 1), -math.inf)
    total, result = torch.zeros_like(peak), torch.zeros(len(scores), LATENT)
    start = 0
    for end in evenly(len(kv), parts):
        log, value = attend(scores[:, start:end], kv[start:end, :LATENT], how)
        log, start = log * math.log(2), end
        highest = peak.maximum(log)
        old, new = (peak - highest).exp(), (log - highest).exp()
        peak, total, result = highest, total * old + new, result * old + new * value
    return result / total


A = Arithmetic
FAST = A(exp2=exp2_fast)
SUMMED = A(sums=bf16)
AITER = "AITER e404860"

RIGHT_BF16: tuple[tuple[str, Sequence, str], ...] = (
    ("softmax in fp32", plain, "torch.naive: kernels/mla_decode/providers/torch_eager.py"),
    (
        "weights normalised, then rounded",
        normalised_first,
        "torch.sdpa's math path: aten/src/ATen/native/transformers/attention.cpp, torch 2.13",
    ),
    (
        "blocks of 512",
        partial(decode, how=A(block=512)),
        "torch.sdpa on CPUs: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, torch 2.13",
    ),
    (
        "blocks of 32 in fp32",
        partial(decode, how=A(block=32, weights=exact)),
        "torch.sdpa, short sequences: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, torch 2.13",
    ),
    (
        "blocks of 16 in fp32",
        partial(decode, how=A(block=16, weights=exact)),
        "vllm.vec: csrc/cpu/mla_decode.cpp, vLLM 0.33 (assumed; the row itself is checked)",
    ),
    (
        "8 parts, blocks of 256",
        partial(decode, how=A(block=256), parts=8),
        "vllm.amx: csrc/cpu/sgl-kernels/decode.cpp, vLLM 0.33 (assumed; the row itself is checked)",
    ),
    ("rounded weights summed", partial(decode, how=SUMMED), "triton.split_kv: split_kv_jit.py"),
    (
        "rounded weights summed, 7 parts of whole blocks",
        partial(decode, how=SUMMED, parts=7, unit=64),
        "triton.split_kv: split_kv_jit.py",
    ),
    (
        "rounded weights summed, blocks of 16, a part per block",
        partial(decode, how=A(sums=bf16, block=16), parts=1 << 10, unit=16),
        "triton.split_kv: split_kv_plan.py",
    ),
    (
        "pairs of blocks, the first one's weights rescaled",
        partial(decode, how=A(pairs=True, exp2=exp2_fast)),
        "flashmla: csrc/sm90/decode/dense/splitkv_mla.cuh (wg0_scale_rP0), FlashMLA 9241ae3",
    ),
    (
        "pairs of blocks, 5 parts",
        partial(decode, how=A(pairs=True), parts=5, unit=64),
        "flashmla: csrc/smxx/decode/combine/combine.cu, FlashMLA 9241ae3",
    ),
    (
        "blocks of 64 and fast exp2, 2 parts of pages",
        partial(decode, how=FAST, parts=2, unit=64),
        "flashmla@vllm: third_party/flashmla, vLLM 0.33",
    ),
    (
        "the last block first",
        partial(decode, how=A(block=128, backwards=True)),
        "flash_attn.fa3: hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp, FlashAttention 0251105",
    ),
    (
        "the last block first, 11 parts",
        partial(decode, how=A(block=80, backwards=True), parts=11),
        "flash_attn.fa3@vllm: hopper/flash_fwd_combine_kernel.h, FlashAttention 0251105",
    ),
    (
        "a stale maximum, up to 2^8",
        partial(decode, how=A(block=128, lazy=8.0)),
        "flash_attn.fa4: flash_attn/cute/flash_fwd_mla_sm100.py (rescale_threshold), 4.0.0b36",
    ),
    (
        "a stale maximum, cubic exp2, backwards, 3 parts",
        partial(decode, how=A(block=128, lazy=8.0, exp2=exp2_cubic, backwards=True), parts=3, unit=128),
        "flash_attn.fa4: flash_attn/cute/utils.py, 4.0.0b36",
    ),
    (
        "blocks of 32, 6 parts",
        partial(decode, how=A(block=32, exp2=exp2_fast, backwards=True), parts=6, unit=32),
        "flashinfer.fa2: include/flashinfer/attention/mla.cuh, flashinfer 0.6.18",
    ),
    (
        "rounded weights summed by the tensor cores",
        partial(decode, how=A(sums=bf16, exp2=exp2_fast, backwards=True), parts=4, unit=64),
        "flashinfer.fa2: m16k16_row_sum_f16f16f32 in include/flashinfer/attention/mla.cuh, flashinfer 0.6.18",
    ),
    (
        "blocks of 64, backwards, fast exp2",
        partial(decode, how=A(backwards=True, exp2=exp2_fast), parts=2),
        "flashinfer.fa3: include/flashinfer/attention/mla_hopper.cuh, flashinfer 0.6.18",
    ),
    (
        "blocks of 128, 16 parts",
        partial(decode, how=A(block=128, exp2=exp2_fast), parts=16, unit=128),
        "flashinfer.cutlass, vllm.cutlass: csrc/attention/mla/cutlass_sm100_mla, vLLM 0.33",
    ),
    (
        "correction skipped below 2^4",
        partial(decode, how=A(block=128, lazy=4.0, exp2=exp2_fast)),
        "tokenspeed_mla: tokenspeed_mla/mla_decode.py (skip_correction_threshold), 2.0.4",
    ),
    (
        "correction skipped below 2^8, 32 parts",
        partial(decode, how=A(block=128, lazy=8.0, exp2=exp2_fast), parts=32, unit=128),
        "flashinfer.cute_dsl: mla_decode_fp16.py (skip_correction_threshold), flashinfer 0.7.2.post1",
    ),
    (
        "parts in bf16",
        partial(decode, parts=4, partial_results=bf16),
        "tilelang's own example: examples/deepseek_mla/example_mla_decode.py, 0.1.15",
    ),
    ("tilelang: 5 parts, blocks of 32", partial(decode, how=A(block=32), parts=5), "tilelang_jit.py"),
    (
        "4 parts in blocks of 16, combined one after the other",
        partial(sequential_combine, how=A(block=16), parts=4),
        "vllm.triton: v1/attention/ops/triton_decode_attention.py, vLLM 0.33",
    ),
    (
        "16 parts in blocks of 32, combined one after the other",
        partial(sequential_combine, how=A(block=32), parts=16),
        "sglang.triton: srt/layers/attention/triton_ops/decode_attention.py, SGLang 0.5.23",
    ),
    (
        "ties away from zero, 16 parts one after the other",
        partial(sequential_combine, how=A(weights=away, block=32), parts=16),
        f"aiter.asm: aiter/mla.py (_fwd_kernel_stage2_asm), {AITER}",
    ),
    (
        "segments of 64 in exp2",
        partial(decode, how=A(block=64), parts=8, unit=64),
        f"aiter.triton: aiter/ops/triton/_triton_kernels/attention/mla.py, {AITER}",
    ),
    (
        "gluon, 64 parts",
        partial(decode, how=A(block=64, exp2=exp2_fast), parts=64),
        f"aiter.gluon: aiter/ops/triton/gluon/mla_gluon.py, {AITER}",
    ),
    (
        "parts of very different lengths",
        lambda o, i: _uneven(o, i),
        f"aiter.asm_persistent: csrc/kernels/mla/metadata/v1_2_device.cuh, {AITER}",
    ),
    (
        "subnormal numbers flushed",
        partial(decode, how=A(weights=lambda x: bf16(flushed(x)), accumulator=flushed), parts=3),
        f"aiter: -fgpu-flush-denormals-to-zero in aiter/jit/core.py, {AITER}",
    ),
)


def _uneven(o: MlaDecodeOperands, i: int, output: Round = exact, **how: Any) -> torch.Tensor:
    """Ends of parts as a schedule over all sequences leaves them."""
    kv = rows(o, o.token_slots(i))
    n = len(kv)
    bounds = sorted({max(1, n // 16), max(1, n // 3), max(1, n - 1), n})
    return output(split(scores_of(o, o.q[i].float(), kv), kv[:, :LATENT], bounds, A(**how)))


RIGHT_TRUNCATED: tuple[tuple[str, Sequence, str], ...] = (
    (
        "the reduction's output truncated",
        lambda o, i: truncated(_uneven(o, i)),
        f"aiter.asm_persistent on gfx942: csrc/kernels/mla/reduce.cu by csrc/include/opus/opus.hpp, {AITER}",
    ),
    (
        "the reduction's output truncated, parts in blocks of 16",
        lambda o, i: truncated(_uneven(o, i, block=16, weights=away)),
        f"aiter.asm_persistent on gfx942: csrc/include/opus/opus.hpp, {AITER}",
    ),
    (
        "weights truncated too",
        lambda o, i: truncated(_uneven(o, i, weights=truncated)),
        "as a build of OPUS for older architectures would: csrc/include/opus/opus.hpp, AITER e404860",
    ),
)

RIGHT_FP8: tuple[tuple[str, Sequence, str], ...] = (
    ("q and weights in FP8", in_fp8, f"aiter.asm: op_tests/test_mla_persistent.py, {AITER}"),
    (
        "16 parts",
        partial(in_fp8, parts=16),
        f"aiter.asm: aiter/mla.py (get_meta_param), {AITER}",
    ),
    (
        "64 parts",
        partial(in_fp8, how=A(block=32), parts=64),
        f"aiter.asm_persistent@sglang: aiter/mla.py (intra_batch_mode), {AITER}",
    ),
    (
        "rounded weights summed",
        partial(in_fp8, summed=True),
        "flashmla: csrc/sm90/decode/dense/splitkv_mla.cuh with InputT of FP8, sgl-flash-mla 1.0.0",
    ),
    (
        "rounded weights summed, one block",
        partial(in_fp8, how=A(block=1 << 30), summed=True),
        "the reference of flashmla's FP8 tests: tests/test_flash_mla_dense_decoding.py, FlashMLA 9241ae3",
    ),
    ("one block", partial(in_fp8, how=A(block=1 << 30)), f"op_tests/test_mla.py, {AITER}"),
    (
        "sums of 14 bits",
        partial(in_fp8, how=A(accumulator=fourteen_bits)),
        "flashmla on Hopper: DeepSeek-V3 technical report, section 3.5.2",
    ),
    (
        "sums of 14 bits, 4 parts, pairs",
        partial(in_fp8, how=A(accumulator=fourteen_bits, pairs=True), parts=4, unit=64),
        "flashmla@vllm: vllm/v1/attention/ops/flashmla.py (flash_mla_with_kvcache_fp8), vLLM 0.33",
    ),
    (
        "q by the tensor's largest",
        partial(in_fp8, q_scale="tensor"),
        "assumed: an engine with a calibrated scale",
    ),
    (
        "q by the head's largest",
        partial(in_fp8, q_scale="head", parts=4),
        "assumed: an engine that scales each head",
    ),
    (
        "weights up to 2^7",
        partial(in_fp8, how=A(headroom=7.0)),
        "flash_attn/cute/flash_fwd_mla_1cta_sm100.py (max_offset), 4.0.0b36",
    ),
    (
        "weights up to 2^7, rounded ones summed, 3 parts",
        partial(in_fp8, how=A(headroom=7.0), summed=True, parts=3),
        "assumed: flashinfer.trtllm comes compiled",
    ),
    (
        "weights below 1, correction skipped below 2^4",
        partial(in_fp8, how=A(block=128, lazy=4.0), parts=2),
        "tokenspeed_mla/mla_decode.py (skip_correction_threshold), 2.0.4",
    ),
    (
        "correction skipped below 2^7, blocks of 128",
        partial(in_fp8, how=A(block=128, lazy=7.0)),
        "flashinfer.cute_dsl: mla_decode_fp8.py (skip_correction_threshold), flashinfer 0.7.2.post1",
    ),
    (
        "backwards, fast exp2",
        partial(in_fp8, how=A(backwards=True, exp2=exp2_fast), parts=8),
        "flashinfer.cute_dsl: mla_decode_fp8.py, flashinfer 0.7.2.post1",
    ),
    (
        "parts in bf16",
        partial(in_fp8, parts=4, partial_results=bf16),
        "assumed: flashinfer.trtllm comes compiled",
    ),
)


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
    planted.append(
        Planted(
            "right in FP8: the reduction's output truncated",
            every(partial(in_fp8, parts=5), truncated),
            right=True,
            activations="fp8",
            truncates=True,
            fits=has_fp8,
            source=f"aiter.asm_persistent on gfx942: csrc/kernels/mla/reduce.cu, {AITER}",
        )
    )
    return planted


def has_fp8(sizes: Any) -> bool:
    return sizes.kv == "fp8"


def has_bf16(sizes: Any) -> bool:
    return sizes.kv == "bf16"


# Wrong tokens, pages, and tables

BLOCK = 64


def tokens(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    return torch.arange(o.host_lengths[i])


def without(o: MlaDecodeOperands, i: int, start: int, stop: int) -> torch.Tensor:
    slots = o.token_slots(i)
    return torch.cat([slots[:start], slots[stop:]])


def middle_page(o: MlaDecodeOperands, i: int) -> int:
    """The first token of the page in the middle, which is not the first page if there are two."""
    return o.host_lengths[i] // 2 // o.page * o.page


def last_page(o: MlaDecodeOperands, i: int) -> int:
    return (o.host_lengths[i] - 1) // o.page * o.page


def moved(o: MlaDecodeOperands, i: int, start: int, stop: int, by: int) -> torch.Tensor:
    """Some tokens' slots replaced by those of tokens before or behind."""
    slots = o.token_slots(i).clone()
    slots[start:stop] = o.token_slots(i)[start + by : stop + by][: stop - start]
    return slots


Slots = Callable[[MlaDecodeOperands, int], torch.Tensor]


def by_table(change: Callable[[torch.Tensor], torch.Tensor]) -> Slots:
    """Slots by page numbers that are changed first."""

    def slots(o: MlaDecodeOperands, i: int) -> torch.Tensor:
        t = tokens(o, i)
        pages = change(o.page_table[i, t // o.page].long()) % len(o.kv)
        return pages * o.page + t % o.page

    return slots


def by_column(change: Callable[[MlaDecodeOperands, torch.Tensor], torch.Tensor]) -> Slots:
    """Slots by other columns of the table's row."""

    def slots(o: MlaDecodeOperands, i: int) -> torch.Tensor:
        t = tokens(o, i)
        columns = change(o, t // o.page) % o.page_table.shape[1]
        return o.page_table[i, columns].long() * o.page + t % o.page

    return slots


def flat_table(o: MlaDecodeOperands, i: int, stride: int, offset: int = 0) -> torch.Tensor:
    t = tokens(o, i)
    at = (i * stride + offset + t // o.page) % o.page_table.numel()
    return o.page_table.flatten()[at].long() * o.page + t % o.page


def as_long_as(o: MlaDecodeOperands, i: int, length: int) -> torch.Tensor:
    return slots_of(o, i, torch.arange(min(length, o.page_table.shape[1] * o.page)))


def paged_by(o: MlaDecodeOperands, i: int, page: int) -> torch.Tensor:
    """A page size that is built in, with the table of another."""
    t = tokens(o, i)
    slots = o.page_table[i, (t // page).clamp(max=o.page_table.shape[1] - 1)].long() * page + t % page
    return slots % (len(o.kv) * o.page)


def within_page(change: Callable[[MlaDecodeOperands, torch.Tensor], torch.Tensor]) -> Slots:
    def slots(o: MlaDecodeOperands, i: int) -> torch.Tensor:
        t = tokens(o, i)
        return o.page_table[i, t // o.page].long() * o.page + change(o, t % o.page)

    return slots


def stale_last_token(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """The new token is not in the cache yet: what it is taken for is the sequence's before last."""
    n = o.host_lengths[i]
    return moved(o, i, n - 1, n, -1)


def anything(sizes: Any) -> bool:
    return True


def several_pages(sizes: Any) -> bool:
    return max(sizes.lengths()) > 3 * sizes.page


def paged(sizes: Any) -> bool:
    return sizes.page > 1


def long(sizes: Any) -> bool:
    return min(sizes.lengths()) > 1024


WRONG_SLOTS: tuple[tuple[str, Slots, Callable[[Any], bool]], ...] = (
    ("the last page lost", lambda o, i: o.token_slots(i)[: last_page(o, i)], several_pages),
    ("the first page lost", lambda o, i: o.token_slots(i)[o.page :], several_pages),
    (
        "a page in the middle lost",
        lambda o, i: without(o, i, middle_page(o, i), middle_page(o, i) + o.page),
        several_pages,
    ),
    (
        "a page taken for the one before it",
        lambda o, i: moved(o, i, middle_page(o, i), middle_page(o, i) + o.page, -o.page),
        several_pages,
    ),
    (
        "the last page's tokens taken from the page before it",
        lambda o, i: moved(o, i, last_page(o, i), o.host_lengths[i], -o.page),
        several_pages,
    ),
    ("a token too few", lambda o, i: o.token_slots(i)[:-1], anything),
    ("two tokens too few", lambda o, i: o.token_slots(i)[:-2], anything),
    ("a token too many", lambda o, i: as_long_as(o, i, o.host_lengths[i] + 1), anything),
    ("a page too many", lambda o, i: as_long_as(o, i, o.host_lengths[i] + o.page), anything),
    ("the first token skipped", lambda o, i: o.token_slots(i)[1:], anything),
    (
        "the first token read twice",
        lambda o, i: torch.cat([o.token_slots(i)[:1], o.token_slots(i)]),
        anything,
    ),
    (
        "the last token read twice",
        lambda o, i: torch.cat([o.token_slots(i), o.token_slots(i)[-1:]]),
        anything,
    ),
    ("the new token not in the cache yet", stale_last_token, anything),
    ("only the first token", lambda o, i: o.token_slots(i)[:1], anything),
    ("only the last token", lambda o, i: o.token_slots(i)[-1:], anything),
    ("a window of 128 tokens", lambda o, i: o.token_slots(i)[-128:], anything),
    ("a window that lacks one token", lambda o, i: o.token_slots(i)[-(o.host_lengths[i] - 1) :], anything),
    ("no more than 1024 tokens", lambda o, i: o.token_slots(i)[:1024], long),
    ("no more than 2047 tokens", lambda o, i: o.token_slots(i)[:2047], lambda s: max(s.lengths()) > 2100),
    (
        "every other block skipped",
        lambda o, i: o.token_slots(i)[tokens(o, i) // BLOCK % 2 == 0],
        anything,
    ),
    ("every eighth token skipped", lambda o, i: o.token_slots(i)[tokens(o, i) % 8 != 7], anything),
    (
        "tokens beyond whole vectors of 8 lost",
        lambda o, i: o.token_slots(i)[: (o.host_lengths[i] - 1) // 8 * 8],
        anything,
    ),
    (
        "tokens beyond whole blocks lost",
        lambda o, i: o.token_slots(i)[: (o.host_lengths[i] - 1) // BLOCK * BLOCK],
        anything,
    ),
    (
        "the last block moved back to end with the sequence, unmasked",
        lambda o, i: torch.cat(
            [o.token_slots(i)[: (o.host_lengths[i] - 1) // BLOCK * BLOCK], o.token_slots(i)[-BLOCK:]]
        ),
        lambda sizes: max(sizes.lengths()) % BLOCK != 0,
    ),
    ("a block read twice", lambda o, i: torch.cat([o.token_slots(i), o.token_slots(i)[:BLOCK]]), long),
    ("the length of the first sequence", lambda o, i: as_long_as(o, i, o.host_lengths[0]), anything),
    ("the length of the sequence before", lambda o, i: as_long_as(o, i, o.host_lengths[i - 1]), anything),
    (
        "the longest sequence's length, and one",
        lambda o, i: as_long_as(o, i, max(o.host_lengths) + 1),
        anything,
    ),
    ("the mean length", lambda o, i: as_long_as(o, i, sum(o.host_lengths) // len(o.host_lengths)), anything),
    ("the table's stride one short", lambda o, i: flat_table(o, i, o.page_table.shape[1] - 1), anything),
    ("the table's stride one long", lambda o, i: flat_table(o, i, o.page_table.shape[1] + 1), anything),
    (
        "the table's row of the sequence before",
        lambda o, i: flat_table(o, i - 1, o.page_table.shape[1]),
        anything,
    ),
    ("the table's rows in reverse", lambda o, i: flat_table(o, -1 - i, o.page_table.shape[1]), anything),
    ("the table's row 0 for all", lambda o, i: flat_table(o, 0, o.page_table.shape[1]), anything),
    ("the table's columns one ahead", by_column(lambda o, c: c + 1), anything),
    ("the table's columns one behind", by_column(lambda o, c: c - 1), anything),
    ("the table's first column for all", by_column(lambda o, c: c * 0), several_pages),
    ("the table's columns beyond 8 from the start again", by_column(lambda o, c: c % 8), long),
    ("the table's columns of 16 each other swapped", by_column(lambda o, c: c ^ 16), long),
    (
        "page numbers in 16 bits with a sign",
        by_table(lambda p: p.to(torch.int16).long()),
        lambda s: s.page == 1,
    ),
    ("page numbers in 8 bits", by_table(lambda p: p & 255), lambda s: s.page == 1),
    ("page numbers one too large", by_table(lambda p: p + 1), anything),
    ("the lowest bit of page numbers lost", by_table(lambda p: p & ~1), anything),
    ("no table: pages in order", lambda o, i: tokens(o, i), anything),
    ("pages of 8 built in", partial(paged_by, page=8), lambda s: s.page != 8),
    ("pages of 128 built in", partial(paged_by, page=128), lambda s: s.page != 128),
    ("a page's first token for all of it", within_page(lambda o, t: t * 0), paged),
    ("tokens within a page in reverse", within_page(lambda o, t: o.page - 1 - t), paged),
    ("tokens within a page rotated by one", within_page(lambda o, t: (t + 1) % o.page), paged),
    (
        "tokens within a page in pairs swapped",
        within_page(lambda o, t: t ^ 1),
        lambda s: s.page % 2 == 0 and all(n % 2 for n in s.lengths()),
    ),
)
"""In FP8 calls too."""


# Wrong masks


def masked_as(score: float, fill: int = 1) -> Sequence:
    """Rows past the end are read as zeros, and their scores become this."""

    def sequence(o: MlaDecodeOperands, i: int) -> torch.Tensor:
        kv = rows(o, o.token_slots(i))
        missing = fill if fill == 1 else -len(kv) % fill or fill
        scores = torch.nn.functional.pad(scores_of(o, o.q[i].float(), kv), (0, missing), value=score)
        return scores.softmax(-1)[:, : len(kv)] @ kv[:, :LATENT]

    return sequence


def unused_slots_leak(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """Weights past the end are 0, values NaN."""
    most = last_page(o, i) + o.page + o.page
    kv = rows(o, as_long_as(o, i, most))
    scores = scores_of(o, o.q[i].float(), kv)
    scores[:, o.host_lengths[i] :] = -math.inf
    return scores.softmax(-1) @ kv[:, :LATENT]


# Wrong parts


def in_parts(
    change: Callable[[list[tuple[int, int]], int], list[tuple[int, int]]],
    count: int = 4,
    fp8_call: bool = False,
) -> Sequence:
    """Parts whose places are changed first."""

    def sequence(o: MlaDecodeOperands, i: int) -> torch.Tensor:
        kv = rows(o, o.token_slots(i))
        q = fp8(o.kv.dtype, o.q[i].float()) if fp8_call else o.q[i].float()
        how = A(weights=partial(fp8, o.kv.dtype)) if fp8_call else A()
        bounds = evenly(len(kv), count)
        places = change(list(zip([0, *bounds[:-1]], bounds, strict=True)), len(kv))
        scores = scores_of(o, q, kv)
        return combine([attend(scores[:, a:b], kv[a:b, :LATENT], how) for a, b in places if b > a])

    return sequence


def floored(places: list[tuple[int, int]], n: int) -> list[tuple[int, int]]:
    each = max(1, (n - 1) // 4)
    return [(k * each, (k + 1) * each) for k in range(4)]


WRONG_PARTS = (
    ("the last token of every part lost", lambda places, n: [(a, max(a + 1, b - 1)) for a, b in places]),
    (
        "the first token of every part but the first lost",
        lambda p, n: [p[0], *((a + 1, b) for a, b in p[1:])],
    ),
    (
        "the first token of a part counted in the one before too",
        lambda p, n: [(a, min(n, b + 1)) for a, b in p],
    ),
    ("the last part lost", lambda places, n: places[:-1] or places),
    ("the first part lost", lambda places, n: places[1:]),
    ("a part counted twice", lambda places, n: [*places, places[-1]]),
    ("the second part in place of the third", lambda places, n: [*places[:2], places[1], *places[3:]]),
    ("tokens beyond equal parts lost", floored),
)


def with_partials(
    change: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], torch.Tensor],
    parts: int = 4,
    how: Arithmetic = Arithmetic(),  # noqa: B008
) -> Sequence:
    """Another combine of (log2 of sum, result)."""

    def sequence(o: MlaDecodeOperands, i: int) -> torch.Tensor:
        kv = rows(o, o.token_slots(i))
        scores, bounds = scores_of(o, o.q[i].float(), kv), evenly(len(kv), parts)
        places = zip([0, *bounds[:-1]], bounds, strict=True)
        return change([attend(scores[:, a:b], kv[a:b, :LATENT], how or A()) for a, b in places])

    return sequence


Partials = list[tuple[torch.Tensor, torch.Tensor]]


def logs_by(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Partials], torch.Tensor]:
    """Log-sums [parts, heads, 1] changed before they are combined."""

    def combined(partials: Partials) -> torch.Tensor:
        logs = change(torch.stack([log for log, _ in partials]))
        return combine([(log, result) for log, (_, result) in zip(logs, partials, strict=True)])

    return combined


def results_by(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Partials], torch.Tensor]:
    def combined(partials: Partials) -> torch.Tensor:
        results = change(torch.stack([result for _, result in partials]))
        return combine([(log, result) for (log, _), result in zip(partials, results, strict=True)])

    return combined


def summed_without_rescaling(partials: Partials) -> torch.Tensor:
    logs = torch.stack([log for log, _ in partials])
    return (logs.exp2() * torch.stack([r for _, r in partials])).sum(0) / logs.exp2().sum(0).clamp(max=3e38)


def not_normalised(partials: Partials) -> torch.Tensor:
    logs = torch.stack([log for log, _ in partials])
    return ((logs - logs.amax(0)).exp2() * torch.stack([r for _, r in partials])).sum(0)


def an_empty_part(partials: Partials) -> torch.Tensor:
    """One that nothing was assigned to counts with a log-sum of 0."""
    log, result = partials[0]
    return combine([*partials, (torch.zeros_like(log), torch.zeros_like(result))])


def mixed(partials: Partials) -> torch.Tensor:
    """The weights of parts are those of the head before."""
    return logs_by(lambda logs: logs.roll(1, 1))(partials)


WRONG_COMBINES: tuple[tuple[str, Callable[[Partials], torch.Tensor]], ...] = (
    ("partial results averaged", lambda partials: torch.stack([r for _, r in partials]).mean(0)),
    ("partial results summed", lambda partials: torch.stack([r for _, r in partials]).sum(0)),
    ("only the first partial result", lambda partials: partials[0][1]),
    ("only the last partial result", lambda partials: partials[-1][1]),
    ("shares not normalised", not_normalised),
    ("shares without the maximum", summed_without_rescaling),
    ("a log-sum of 0 for an empty part", an_empty_part),
    ("log-sums of base 2 taken to base e", logs_by(lambda logs: logs * LOG2)),
    ("log-sums of base e taken to base 2", logs_by(lambda logs: logs / LOG2)),
    ("log-sums of the head before", mixed),
    ("log-sums of the part before", logs_by(lambda logs: logs.roll(1, 0))),
    ("log-sums in bf16", logs_by(bf16)),
    ("log-sums negated", logs_by(lambda logs: -logs)),
    ("the first head's log-sums for all", logs_by(lambda logs: logs[:, :1].expand_as(logs))),
    ("results of the head before", results_by(lambda results: results.roll(1, 1))),
    ("results of the part before", results_by(lambda results: results.roll(1, 0))),
    ("results in FP8", results_by(partial(fp8, torch.float8_e4m3fn))),
    ("a stale partial result", results_by(lambda r: torch.cat([r[:-1], r[:1]]))),
    ("a partial result never written", results_by(lambda r: torch.cat([r[:-1], r[-1:] * 0]))),
)


def part_maxima_only(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """Parts are weighed by their highest scores, not by their sums."""
    kv = rows(o, o.token_slots(i))
    scores, bounds = scores_of(o, o.q[i].float(), kv), evenly(len(kv), 4)
    partials = []
    for a, b in zip([0, *bounds[:-1]], bounds, strict=True):
        _, result = attend(scores[:, a:b], kv[a:b, :LATENT])
        partials.append((scores[:, a:b].amax(-1, keepdim=True) / LOG2, result))
    return combine(partials)


# Wrong arithmetic

WRONG_ARITHMETIC: tuple[tuple[str, Arithmetic], ...] = (
    ("no maximum", A(has_maximum=False)),
    ("a maximum that starts at 0", A(first_peak=0.0)),
    ("a maximum that starts at the largest score of another", A(first_peak=60.0)),
    ("a result that is not rescaled", A(of_result=False)),
    ("a sum that is not rescaled", A(of_total=False)),
    ("neither result nor sum rescaled", A(of_result=False, of_total=False)),
    ("scores in bf16", A(scores=bf16)),
    ("scores in fp16", A(scores=fp16)),
    ("weights in FP8", A(weights=partial(fp8, torch.float8_e4m3fn))),
    ("weights of 5 bits", A(weights=partial(kept, 5))),
    ("a result in bf16 after every block", A(accumulator=bf16, block=16)),
    ("a sum in bf16", A(total=bf16, block=16)),
    ("exp2 by straight lines", A(exp2=exp2_linear)),
    ("values of the next block", A(delayed=True)),
    ("exp in place of exp2", A(exp2=torch.exp)),
    ("weights up to 2^20 in fp16", A(headroom=20.0, weights=fp16)),
)


def scaled(factor: float) -> Sequence:
    return lambda o, i: plain(o, i, scale=factor)


def with_query(change: Callable[[torch.Tensor], torch.Tensor]) -> Sequence:
    """q [heads, 576] changed first."""
    return lambda o, i: plain(o, i, q=change(o.q[i].float().clone()))


def columns(q: torch.Tensor, start: int, stop: int, factor: float) -> torch.Tensor:
    q[:, start:stop] *= factor
    return q


def interleaved(q: torch.Tensor) -> torch.Tensor:
    """The rope part in the other of its two orders."""
    rope = q[:, LATENT:].clone()
    q[:, LATENT:] = torch.stack([rope[:, : ROPE // 2], rope[:, ROPE // 2 :]], -1).flatten(1)
    return q


def in_fp16(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    return plain(o, i, kv=fp16(rows(o, o.token_slots(i))))


def values_from(change: Callable[[torch.Tensor], torch.Tensor]) -> Sequence:
    """The weighted sum of all 576 columns, changed."""

    def sequence(o: MlaDecodeOperands, i: int) -> torch.Tensor:
        kv = rows(o, o.token_slots(i))
        return change(scores_of(o, o.q[i].float(), kv).softmax(-1) @ kv)

    return sequence


def torn_block(o: MlaDecodeOperands, i: int, *, keys: bool, values: bool) -> torch.Tensor:
    """A block in the middle is still that before it: its keys, its values, or both."""
    start = max(0, o.host_lengths[i] // 2 // BLOCK * BLOCK)
    start = start or min(BLOCK, o.host_lengths[i] - 1)
    stop = min(start + BLOCK, o.host_lengths[i])
    kv = rows(o, o.token_slots(i))
    stale = kv.clone()
    stale[start:stop] = kv[max(0, start - BLOCK) :][: stop - start]
    return (
        scores_of(o, o.q[i].float(), stale if keys else kv).softmax(-1)
        @ (stale if values else kv)[:, :LATENT]
    )


def zeros_in_a_block(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """16 of the last block's values have not arrived yet."""
    kv = rows(o, o.token_slots(i))
    late = kv.clone()
    late[-min(16, max(1, len(kv) // 4)) :] = 0.0
    return scores_of(o, o.q[i].float(), kv).softmax(-1) @ late[:, :LATENT]


def sum_lacks_the_last_block(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    kv = rows(o, o.token_slots(i))
    weights = scores_of(o, o.q[i].float(), kv).softmax(-1)
    counted = max(1, (len(kv) - 1) // 16 * 16)
    return weights @ kv[:, :LATENT] / weights[:, :counted].sum(-1, keepdim=True)


def causal(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """Heads stand as query rows, and a causal mask hides the last tokens from the first of them."""
    kv, heads = rows(o, o.token_slots(i)), o.q.shape[1]
    hidden = torch.ones(heads, len(kv), dtype=torch.bool).triu(max(1, len(kv) - heads + 1))
    scores = scores_of(o, o.q[i].float(), kv).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ kv[:, :LATENT]


def same_maximum(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """The maximum is that of 16 heads together: the flat ones' weights vanish in fp16."""
    kv = rows(o, o.token_slots(i))
    scores = scores_of(o, o.q[i].float(), kv)
    weights = (scores - scores.amax()).exp().half().float()
    return weights @ kv[:, :LATENT] / weights.sum(-1, keepdim=True)


def no_maximum_by_exp(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """The same, in natural exponentials and with a clamp: no NaN."""
    kv = rows(o, o.token_slots(i))
    weights = scores_of(o, o.q[i].float(), kv).clamp(-80, 80).exp()
    return weights @ kv[:, :LATENT] / weights.sum(-1, keepdim=True)


# Wrong places


def given(change: Callable[[MlaDecodeOperands, torch.Tensor], torch.Tensor]) -> Compute:
    """What becomes of the right output [batch, heads, 512], a copy of it."""
    return lambda o, right: change(o, right.clone())


def at_victim(change: Callable[[torch.Tensor], torch.Tensor]) -> Compute:
    """What becomes of one sequence's right output [heads, 512]."""

    def compute(o: MlaDecodeOperands, right: torch.Tensor) -> torch.Tensor:
        out, i = right.clone(), victim(o)
        out[i] = change(right[i].clone())
        return out

    return compute


def put(out: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    out[at] = value
    return out


def narrower_places(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """Rows are written 576 apart and read 512 apart."""
    kv = rows(o, o.token_slots(i))
    product = scores_of(o, o.q[i].float(), kv).softmax(-1) @ kv
    return product.flatten()[: len(product) * LATENT].view(-1, LATENT)


def swapped_tiles(out: torch.Tensor, width: int) -> torch.Tensor:
    out[:, :width], out[:, width : 2 * width] = out[:, width : 2 * width].clone(), out[:, :width].clone()
    return out


def of_another_step(o: MlaDecodeOperands, right: torch.Tensor) -> torch.Tensor:
    """The answer to queries of a step before."""
    queries = o.q.roll(1, 0)
    return every(lambda o, i: plain(o, i, q=queries[i].float()))(o, right)


WRONG_PLACES: tuple[tuple[str, Compute], ...] = (
    ("a head given to the next", at_victim(lambda out: put(out, 1, out[0].clone()))),
    ("heads in reverse", at_victim(lambda out: out.flip(0))),
    ("heads shifted by one", at_victim(lambda out: out.roll(1, 0))),
    ("heads in pairs swapped", at_victim(lambda out: out.view(-1, 2, LATENT).flip(1).flatten(0, 1))),
    (
        "the second half of heads as the first",
        at_victim(lambda out: put(out, slice(len(out) // 2, None), out[: len(out) // 2].clone())),
    ),
    ("the last head zero", at_victim(lambda out: put(out, -1, 0.0))),
    ("the last head never written", at_victim(lambda out: put(out, -1, math.nan))),
    ("one element infinite", at_victim(lambda out: put(out, (2, 3), math.inf))),
    ("a column zero", at_victim(lambda out: put(out, (slice(None), 511), 0.0))),
    ("the last 16 columns zero", at_victim(lambda out: put(out, (slice(None), slice(-16, None)), 0.0))),
    ("16 columns of one head zero", at_victim(lambda out: put(out, (5, slice(64, 80)), 0.0))),
    (
        "the second half of columns never written",
        at_victim(lambda out: put(out, (slice(None), slice(256, None)), math.nan)),
    ),
    ("halves of columns swapped", at_victim(lambda out: swapped_tiles(out, 256))),
    ("tiles of 64 columns swapped", at_victim(lambda out: swapped_tiles(out, 64))),
    ("columns in pairs swapped", at_victim(lambda out: out.view(-1, 256, 2).flip(-1).flatten(1))),
    ("columns shifted by 8", at_victim(lambda out: out.roll(8, -1))),
    (
        "heads and columns transposed in tiles of 16",
        at_victim(lambda out: put(out, (slice(0, 16), slice(0, 16)), out[:16, :16].T.clone())),
    ),
    ("added to what was there", at_victim(lambda out: out * 2)),
    ("a head added twice", at_victim(lambda out: put(out, 3, out[3] * 2))),
    ("the sequence before's output", given(lambda o, out: put(out, victim(o), out[victim(o) - 1].clone()))),
    ("sequences in reverse", given(lambda o, out: out.flip(0))),
    ("the last sequence never computed", given(lambda o, out: put(out, -1, 0.0))),
    (
        "rows of one sequence half of another's",
        given(lambda o, out: put(out, (victim(o), slice(0, None, 2)), out[victim(o) - 1, ::2].clone())),
    ),
    ("batch and heads transposed", given(lambda o, out: out.transpose(0, 1).reshape(out.shape))),
    ("queries of another sequence", of_another_step),
    ("all zero", given(lambda o, out: out * 0)),
    ("2 percent too large", at_victim(lambda out: out.float().mul(1.02).bfloat16())),
    ("5 percent too small", at_victim(lambda out: out.float().mul(0.95).bfloat16())),
    (
        "the output through FP8",
        at_victim(lambda out: fp8(torch.float8_e4m3fn, out.float() / 64).mul(64).bfloat16()),
    ),
    ("the output of 5 bits", at_victim(lambda out: kept(5, out.float()).bfloat16())),
    ("the wrong sign", at_victim(lambda out: -out)),
)


# Wrong in FP8


def scales_of(
    o: MlaDecodeOperands, i: int, scores: float = 1.0, values: float = 1.0, **how: Any
) -> torch.Tensor:
    return in_fp8(o, i, scale=scores, **how) * values


def other_format(o: MlaDecodeOperands) -> torch.dtype:
    formats = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}
    return formats[o.kv.dtype]


def read_as(o: MlaDecodeOperands, i: int, dtype: torch.dtype) -> torch.Tensor:
    return plain(o.replaced(kv=o.kv.view(dtype)), i)


def query_read_as(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    q = o.q[i].float().to(o.kv.dtype).view(other_format(o)).float()
    return in_fp8(o, i, q=q)


def fp8_of(o: MlaDecodeOperands, how: Callable[[torch.dtype, torch.Tensor], torch.Tensor]) -> Round:
    return partial(how, o.kv.dtype)


def truncated_weights(o: MlaDecodeOperands, i: int, headroom: float = 0.0) -> torch.Tensor:
    return in_fp8(o, i, A(weights=fp8_of(o, fp8_truncated), headroom=headroom))


def sum_and_product_disagree(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    """Weights are scaled up by 2^7, their sum is not, or by less."""
    return in_fp8(o, i, A(headroom=7.0)) * 2.0


def saturated(o: MlaDecodeOperands, i: int) -> torch.Tensor:
    return in_fp8(o, i, A(headroom=10.0))


def query_in(dtype: torch.dtype) -> Sequence:
    return partial(in_fp8, query=dtype)


WRONG_FP8: tuple[tuple[str, Compute], ...] = (
    ("outputs 2 percent too large", every(partial(scales_of, values=1.02))),
    ("outputs 3 percent too large", every(partial(scales_of, values=1.03))),
    ("outputs 5 percent too large", every(partial(scales_of, values=1.05))),
    ("outputs 5 percent too small", every(partial(scales_of, values=0.95))),
    ("weights truncated", every(truncated_weights)),
    ("weights truncated, up to 2^7", every(partial(truncated_weights, headroom=7.0))),
    ("weights in e5m2", every(partial(in_fp8, weights=torch.float8_e5m2))),
    ("weights and q in e5m2", every(partial(in_fp8, weights=torch.float8_e5m2, query=torch.float8_e5m2))),
    ("q in e5m2", every(query_in(torch.float8_e5m2))),
    ("weights saturated", every(saturated)),
    ("the sum of weights half of theirs", every(sum_and_product_disagree)),
    ("q's scale missing", in_one_place(partial(scales_of, scores=2.0))),
    ("q's scale 5 times too large", in_one_place(partial(scales_of, scores=0.2))),
    ("the softmax scale 10 percent high", in_one_place(partial(scales_of, scores=1.1))),
    ("the scale of 128 alone", in_one_place(partial(scales_of, scores=(192 / 128) ** 0.5))),
    ("q read in the other format", in_one_place(query_read_as)),
    ("the cache's scale missing", in_one_place(lambda o, i: in_fp8(o.replaced(kv_scale=1.0), i))),
    (
        "the cache's scale missing in scores",
        in_one_place(lambda o, i: scales_of(o, i, scores=1 / o.kv_scale)),
    ),
    (
        "the cache's scale missing in values",
        in_one_place(lambda o, i: scales_of(o, i, values=1 / o.kv_scale)),
    ),
    ("the cache's scale twice in values", in_one_place(lambda o, i: scales_of(o, i, values=o.kv_scale))),
    (
        "the cache's scale inverted in scores",
        in_one_place(lambda o, i: scales_of(o, i, scores=o.kv_scale**-2)),
    ),
    (
        "the rope part forgotten",
        in_one_place(lambda o, i: in_fp8(o, i, q=columns(o.q[i].float().clone(), LATENT, WIDTH, 0.0))),
    ),
    ("no maximum", in_one_place(lambda o, i: in_fp8(o, i, A(has_maximum=False)))),
    ("a maximum that starts at 0", in_one_place(lambda o, i: in_fp8(o, i, A(first_peak=0.0)))),
    ("a result that is not rescaled", in_one_place(lambda o, i: in_fp8(o, i, A(of_result=False)))),
    ("values of the next block", in_one_place(lambda o, i: in_fp8(o, i, A(delayed=True)))),
    ("scores in FP8", in_one_place(lambda o, i: in_fp8(o, i, A(scores=fp8_of(o, fp8))))),
    ("a maximum kept for 2^20", in_one_place(lambda o, i: in_fp8(o, i, A(block=16, lazy=20.0)))),
    (
        "accumulated in fp16 of 8 bits",
        in_one_place(lambda o, i: in_fp8(o, i, A(accumulator=partial(kept, 5)))),
    ),
)


def with_slots(slots: Slots, of: Callable[..., torch.Tensor]) -> Sequence:
    return lambda o, i: of(o, i, slots=slots(o, i))


def fp8_and(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda sizes: has_fp8(sizes) and fits(sizes)


def bugs() -> list[Planted]:
    planted = [Planted(name, in_one_place(with_slots(s, plain)), fits=f) for name, s, f in WRONG_SLOTS]
    planted += [
        Planted(
            f"{name}, in FP8",
            in_one_place(with_slots(s, in_fp8)),
            activations="fp8",
            fits=fp8_and(f),
        )
        for name, s, f in WRONG_SLOTS
        if name in IN_FP8_TOO
    ]
    planted += [Planted(name, in_one_place(in_parts(change))) for name, change in WRONG_PARTS]
    planted += [
        Planted(
            f"{name}, in FP8", in_one_place(in_parts(change, fp8_call=True)), activations="fp8", fits=has_fp8
        )
        for name, change in WRONG_PARTS
        if name in IN_FP8_TOO
    ]
    planted += [Planted(name, in_one_place(with_partials(change))) for name, change in WRONG_COMBINES]
    planted += [
        Planted(
            name, in_one_place(partial(decode, how=how)), fits=long if name in OF_MANY_STEPS else anything
        )
        for name, how in WRONG_ARITHMETIC
    ]
    planted += [Planted(name, in_one_place(sequence)) for name, sequence in WRONG_SEQUENCES]
    planted += [Planted(name, in_one_place(s), fits=has_bf16) for name, s in ONLY_BF16]
    planted += [Planted(name, in_one_place(s), fits=has_fp8) for name, s in ONLY_FP8_CACHE]
    planted += [Planted(name, compute) for name, compute in WRONG_PLACES]
    planted += [
        Planted(
            f"{name}, in FP8",
            compute,
            activations="fp8",
            fits=fp8_and(long if name in OF_MANY_STEPS else anything),
        )
        for name, compute in WRONG_FP8
    ]
    return planted


OF_MANY_STEPS = {"a result in bf16 after every block", "a sum in bf16", "a maximum kept for 2^20"}
"""What few steps round no worse than the output is rounded."""

IN_FP8_TOO = {
    "the last page lost",
    "a page in the middle lost",
    "a page taken for the one before it",
    "a token too many",
    "a window of 128 tokens",
    "every other block skipped",
    "the table's stride one short",
    "the table's row of the sequence before",
    "the table's columns one ahead",
    "page numbers one too large",
    "the length of the sequence before",
    "the last part lost",
    "the first part lost",
}
WRONG_SEQUENCES: tuple[tuple[str, Sequence], ...] = (
    ("a token behind the last read as zeros", masked_as(0.0)),
    ("the last block filled with zeros", masked_as(0.0, 64)),
    ("a token behind the last scored -20", masked_as(-20.0)),
    ("the last block's rest scored -10", masked_as(-10.0, 64)),
    ("unused slots weighed 0, and NaN", unused_slots_leak),
    ("parts weighed by their highest scores", part_maxima_only),
    ("the scale of 576", scaled((192 / 576) ** 0.5)),
    ("the scale of 512", scaled((192 / 512) ** 0.5)),
    ("the scale of 128", scaled((192 / 128) ** 0.5)),
    ("the scale 5 percent high", scaled(1.05)),
    ("the scale 2 percent low", scaled(0.98)),
    ("log2(e) missing", scaled(LOG2)),
    ("log2(e) twice", scaled(1 / LOG2)),
    ("no scale", scaled(192**0.5)),
    ("the scale twice", scaled(192**-0.5)),
    ("the rope part forgotten", with_query(lambda q: columns(q, LATENT, WIDTH, 0.0))),
    ("the rope part twice", with_query(lambda q: columns(q, LATENT, WIDTH, 2.0))),
    ("half of the rope part forgotten", with_query(lambda q: columns(q, LATENT + 32, WIDTH, 0.0))),
    ("the latent's last 64 forgotten", with_query(lambda q: columns(q, LATENT - 64, LATENT, 0.0))),
    ("the last channel forgotten", with_query(lambda q: columns(q, WIDTH - 1, WIDTH, 0.0))),
    ("the rope part before the latent in q", with_query(lambda q: q.roll(ROPE, 1))),
    ("the rope part in the other order", with_query(interleaved)),
    (
        "the first head's rope part for all",
        with_query(lambda q: put(q, (slice(None), slice(LATENT, None)), q[:1, LATENT:].clone())),
    ),
    ("q in FP8", with_query(partial(fp8, torch.float8_e4m3fn))),
    ("queries of the head before", with_query(lambda q: q.roll(1, 0))),
    ("values from the last 512 columns", values_from(lambda out: out[:, WIDTH - LATENT :])),
    (
        "the rope part among the values",
        values_from(lambda out: torch.cat([out[:, : LATENT - ROPE], out[:, LATENT:]], 1)),
    ),
    ("rows written 576 apart", narrower_places),
    ("a block's keys still those before", partial(torn_block, keys=True, values=False)),
    ("a block's values still those before", partial(torn_block, keys=False, values=True)),
    ("a block still the one before", partial(torn_block, keys=True, values=True)),
    ("values not arrived yet", zeros_in_a_block),
    ("a sum without the last block", sum_lacks_the_last_block),
    ("a causal mask over heads", causal),
    ("one maximum for all heads", same_maximum),
    ("scores clamped, no maximum", no_maximum_by_exp),
)
ONLY_BF16: tuple[tuple[str, Sequence], ...] = (
    ("the cache in fp16", in_fp16),
    ("a result in fp16", partial(decode, how=A(accumulator=fp16))),
    ("partial results in fp16", partial(decode, parts=4, partial_results=fp16)),
    ("the cache in FP8", lambda o, i: plain(o, i, kv=fp8(torch.float8_e4m3fn, rows(o, o.token_slots(i))))),
)
ONLY_FP8_CACHE: tuple[tuple[str, Sequence], ...] = (
    ("the cache's scale missing", lambda o, i: plain(o.replaced(kv_scale=1.0), i)),
    ("the cache's scale missing in scores", lambda o, i: plain(o, i, scale=1 / o.kv_scale)),
    ("the cache's scale missing in values", lambda o, i: plain(o, i) / o.kv_scale),
    ("the cache's scale twice as large", lambda o, i: plain(o.replaced(kv_scale=2 * o.kv_scale), i)),
    ("the cache read in the other format", lambda o, i: read_as(o, i, other_format(o))),
    ("the cache read as e5m2", lambda o, i: read_as(o, i, torch.float8_e5m2)),
    ("q in FP8, untold", in_fp8),
)

PLANTED: tuple[Planted, ...] = (*right(), *bugs())
