"""Right MLA decodes in the arithmetic of libraries, in plain torch, those nearest to the limit first.

Before each stands the file whose arithmetic it follows; "assumed" where that is closed or unread."""

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.attention_mistakes import EXACT, IN_BF16, Arithmetic, Attended, Wrong, attend, combine, evenly
from kernels.mistakes import Round, bf16, exact, fp8
from kernels.mla_decode.mistakes import ATTENTION
from tests.support.library_roundings import (
    away,
    exp2_cubic,
    exp2_fast,
    flushed,
    fourteen_bits,
    right,
    truncated,
)


def normalised_first(a: Attended) -> torch.Tensor:
    return bf16(a.scores.softmax(-1)) @ a.v


def split(
    a: Attended, how: Arithmetic = IN_BF16, parts: int = 1, unit: int = 1, results: Round = exact
) -> torch.Tensor:
    """In so many parts of whole units of tokens."""
    scores, places = a.scores, evenly(len(a.v), parts, unit)
    return combine([attend(scores[:, b:e], a.v[b:e], how) for b, e in places], results)


def one_part_after_the_other(a: Attended, how: Arithmetic, parts: int) -> torch.Tensor:
    """Combined with a running maximum, in natural exponentials."""
    scores = a.scores
    peak = scores.new_full((len(scores), 1), -math.inf)
    total = result = torch.zeros_like(peak)
    for begin, end in evenly(len(a.v), parts):
        log, value = attend(scores[:, begin:end], a.v[begin:end], how)
        highest = peak.maximum(log * math.log(2))
        old, new = (peak - highest).exp(), (log * math.log(2) - highest).exp()
        peak, total, result = highest, total * old + new, result * old + new * value
    return result / total


def uneven(a: Attended, how: Arithmetic = IN_BF16, output: Round = exact) -> torch.Tensor:
    """Parts as a schedule over all sequences leaves them."""
    scores, n = a.scores, len(a.v)
    bounds = sorted({0, max(1, n // 16), max(1, n // 3), max(1, n - 1), n})
    places = itertools.pairwise(bounds)
    return output(combine([attend(scores[:, b:e], a.v[b:e], how) for b, e in places]))


def fp8_call(
    a: Attended, how: Arithmetic = IN_BF16, q_scale: str = "one", summed: bool = False, **parts: Any
) -> torch.Tensor:
    """q and the weights in the cache's format. q_scale: one; or of the tensor's or the head's largest.
    summed: whether weights are summed as they are rounded"""
    q, most = a.q, torch.finfo(a.fp8).max
    largest = {
        "one": q.new_full((), most),
        "tensor": a.operands.q.float().abs().amax(),
        "head": q.abs().amax(-1, keepdim=True),
    }
    scale, rounded = largest[q_scale] / most, partial(fp8, a.fp8)
    how = replace(how, round_weights=rounded, round_summed=rounded if summed else exact)
    return split(replace(a, q=rounded(q / scale) * scale), how, **parts)


A = Arithmetic
BF16: dict[str, Wrong] = {
    # flash_attn.fa4: flash_attn/cute/flash_fwd_mla_sm100.py (rescale_threshold), 4.0.0b36; others: 2^4
    "correction skipped below 2^8": partial(split, how=A(block=128, lazy=8.0)),
    # flashmla: csrc/sm90/decode/dense/splitkv_mla.cuh (wg0_scale_rP0), FlashMLA 9241ae3
    "pairs of blocks, the first one's weights rescaled": partial(split, how=A(pairs=True, exp2=exp2_fast)),
    # torch.sdpa's math path: aten/src/ATen/native/transformers/attention.cpp, torch 2.13
    "weights normalised, then rounded": normalised_first,
    # tilelang's own example: examples/deepseek_mla/example_mla_decode.py, 0.1.15
    "4 parts in bf16": partial(split, parts=4, results=bf16),
    # triton.split_kv: kernels/mla_decode/triton/split_kv_jit.py
    "rounded weights summed, blocks of 64": partial(split, how=A(round_summed=bf16)),
    # triton.split_kv: kernels/mla_decode/triton/split_kv_plan.py
    "rounded weights summed, a part for each block of 16": partial(
        split, how=A(round_summed=bf16, block=16), parts=1 << 10, unit=16
    ),
    # torch.sdpa on CPUs: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, torch 2.13
    "blocks of 512": partial(split, how=A(block=512)),
    # vllm.amx: csrc/cpu/sgl-kernels/decode.cpp, vLLM 0.33 (assumed; the row itself is checked)
    "8 parts in blocks of 256": partial(split, how=A(block=256), parts=8),
    # flashmla: csrc/smxx/decode/combine/combine.cu, FlashMLA 9241ae3
    "5 parts of pairs of blocks": partial(split, how=A(pairs=True), parts=5, unit=64),
    # flash_attn.fa3: hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp, FlashAttention 0251105
    "the last block first": partial(split, how=A(block=128, backwards=True)),
    # flash_attn.fa3@vllm: hopper/flash_fwd_combine_kernel.h, FlashAttention 0251105
    "11 parts, the last block first": partial(split, how=A(block=80, backwards=True), parts=11),
    # flash_attn.fa4: flash_attn/cute/utils.py, 4.0.0b36
    "3 parts, correction skipped below 2^8, cubic exp2, the last block first": partial(
        split, how=A(block=128, lazy=8.0, exp2=exp2_cubic, backwards=True), parts=3, unit=128
    ),
    # flashinfer.fa2: m16k16_row_sum_f16f16f32 in include/flashinfer/attention/mla.cuh, flashinfer 0.6.18
    "4 parts, rounded weights summed by the tensor cores": partial(
        split, how=A(round_summed=bf16, exp2=exp2_fast, backwards=True), parts=4, unit=64
    ),
    # flashinfer.cutlass, vllm.cutlass: csrc/attention/mla/cutlass_sm100_mla, vLLM 0.33
    "16 parts in blocks of 128": partial(split, how=A(block=128, exp2=exp2_fast), parts=16, unit=128),
    # tilelang: kernels/mla_decode/providers/tilelang_jit.py
    "5 parts in blocks of 32": partial(split, how=A(block=32), parts=5),
    # vllm.triton: v1/attention/ops/triton_decode_attention.py, vLLM 0.33; sglang.triton in blocks of 32
    "4 parts in blocks of 16, one after the other": partial(
        one_part_after_the_other, how=A(block=16), parts=4
    ),
    # aiter.asm: aiter/mla.py (_fwd_kernel_stage2_asm), AITER e404860
    "16 parts one after the other, ties away from zero": partial(
        one_part_after_the_other, how=A(round_weights=away, block=32), parts=16
    ),
    # aiter.gluon: aiter/ops/triton/gluon/mla_gluon.py, AITER e404860
    "64 parts": partial(split, how=A(exp2=exp2_fast), parts=64),
    # aiter.asm_persistent: csrc/kernels/mla/metadata/v1_2_device.cuh, AITER e404860
    "parts of very different lengths": uneven,
    # aiter: -fgpu-flush-denormals-to-zero in aiter/jit/core.py, AITER e404860
    "subnormal numbers flushed": partial(
        split, how=A(round_weights=lambda x: bf16(flushed(x)), round_result=flushed), parts=3
    ),
    # torch.naive: kernels/mla_decode/providers/torch_eager.py
    "softmax in fp32": Attended.out,
}
TRUNCATED: dict[str, Wrong] = {
    # as a build of OPUS for older architectures would: csrc/include/opus/opus.hpp, AITER e404860
    "weights and output truncated": partial(uneven, how=A(round_weights=truncated), output=truncated),
    # aiter.asm_persistent on gfx942: csrc/kernels/mla/reduce.cu by csrc/include/opus/opus.hpp, AITER e404860
    "output truncated": partial(uneven, output=truncated),
}
FP8: dict[str, Wrong] = {
    # assumed: an engine that scales each head
    "q by the head's largest": partial(fp8_call, q_scale="head", parts=4),
    # assumed: an engine with a calibrated scale
    "q by the tensor's largest": partial(fp8_call, q_scale="tensor"),
    # flashmla on Hopper: DeepSeek-V3 technical report, section 3.5.2
    "sums of 14 bits": partial(fp8_call, how=A(round_result=fourteen_bits)),
    # flashmla@vllm: vllm/v1/attention/ops/flashmla.py (flash_mla_with_kvcache_fp8), vLLM 0.33
    "sums of 14 bits, 4 parts of pairs of blocks": partial(
        fp8_call, how=A(round_result=fourteen_bits, pairs=True), parts=4, unit=64
    ),
    # aiter.asm: op_tests/test_mla_persistent.py, AITER e404860
    "blocks of 64": fp8_call,
    # flashinfer.cute_dsl: mla_decode_fp8.py (skip_correction_threshold), flashinfer 0.7.2.post1
    "correction skipped below 2^7": partial(fp8_call, how=A(block=128, lazy=7.0)),
    # the reference of flashmla's FP8 tests: tests/test_flash_mla_dense_decoding.py, FlashMLA 9241ae3
    "one block, rounded weights summed": partial(fp8_call, how=EXACT, summed=True),
    # assumed: flashinfer.trtllm comes compiled
    "3 parts, weights up to 2^7, rounded ones summed": partial(
        fp8_call, how=A(headroom=7.0), summed=True, parts=3
    ),
    # assumed: flashinfer.trtllm comes compiled
    "4 parts in bf16": partial(fp8_call, parts=4, results=bf16),
    # aiter.asm_persistent@sglang: aiter/mla.py (intra_batch_mode), AITER e404860
    "64 parts in blocks of 32": partial(fp8_call, how=A(block=32), parts=64),
}
FP8_TRUNCATED: dict[str, Wrong] = {
    # aiter.asm_persistent on gfx942: csrc/kernels/mla/reduce.cu, AITER e404860
    "5 parts, output truncated": lambda a: truncated(fp8_call(a, parts=5))
}


RIGHT = right(ATTENTION, BF16, TRUNCATED, FP8, FP8_TRUNCATED)
