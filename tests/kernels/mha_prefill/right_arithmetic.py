"""Right MHA prefills in the arithmetic of libraries, in plain torch, those nearest to the limit first.

Before each stands the file whose arithmetic it follows; "assumed" where that is closed or unread."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels.attention_mistakes import IN_BF16, Arithmetic, Attended, Wrong, attend, combine
from kernels.mha_prefill.mistakes import ATTENTION
from kernels.mha_prefill.operands import Sequence
from kernels.mistakes import Round, bf16, exact, fp8
from tests.support.library_roundings import (
    away,
    exp2_cubic,
    exp2_fast,
    flushed,
    fourteen_bits,
    right,
    truncated,
)

Ends = Callable[[Sequence], list[int]]
"""Where parts of a sequence's keys end, but for the last."""


def at_prefix(s: Sequence) -> list[int]:
    return [s.prefix]


def chunks(s: Sequence) -> list[int]:
    return [s.prefix // 3, 2 * s.prefix // 3, s.prefix]


def every_fifth(s: Sequence) -> list[int]:
    return [s.length * i // 5 // 128 * 128 for i in range(1, 5)]


def flash(
    a: Attended, how: Arithmetic = IN_BF16, ends: Ends | None = None, results: Round = exact
) -> torch.Tensor:
    scores, length = a.scores, a.sequence.length
    bounds = {0, length, *(end for end in (ends(a.sequence) if ends else ()) if 0 < end < length)}
    places = [slice(*place) for place in itertools.pairwise(sorted(bounds))]
    partials = [attend(scores[..., part], a.v[:, part], how) for part in places]
    return combine(partials, results).transpose(0, 1)


def fp8_call(
    a: Attended, how: Arithmetic = IN_BF16, summed: bool = False, ends: Ends | None = None
) -> torch.Tensor:
    """The weights in the operands' format. summed: whether they are summed as they are rounded"""
    rounded = partial(fp8, a.fp8)
    return flash(a, replace(how, round_weights=rounded, round_summed=rounded if summed else exact), ends)


def normalised_first(a: Attended) -> torch.Tensor:
    return (bf16(a.scores.softmax(-1)) @ a.v).transpose(0, 1)


def widened(a: Attended) -> torch.Tensor:
    """v times its descale in bf16."""
    return a.out(IN_BF16, v=bf16(a.v))


def truncating(of: Wrong) -> Wrong:
    """The output too."""
    return lambda a: truncated(of(a))


A = Arithmetic
BF16: dict[str, Wrong] = {
    # torch.sdpa's math path: aten/src/ATen/native/transformers/attention.cpp, torch 2.13
    "weights normalised, then rounded": normalised_first,
    # flash_attn.fa4, in larger blocks: flash_attn/cute/softmax.py (rescale_threshold), 4.0.0b36
    "correction skipped below 2^8, blocks of 16": partial(flash, how=A(block=16, lazy=8.0)),
    # aiter.opus on gfx950: assumed, AITER e404860
    "correction skipped below 2^8, fast exp2": partial(flash, how=A(lazy=8.0, exp2=exp2_fast)),
    # model_executor/layers/attention/mla_attention.py (merge_attn_states), vLLM 0.33
    "chunks of cached keys in bf16, then merged": partial(flash, ends=chunks, results=bf16),
    # v1/attention/backends/mla/prefill/aiter_flash_attn.py (run_prefill_context_chunk), vLLM 0.33
    "chunks of cached keys in bf16, rounded weights summed": partial(
        flash, how=A(round_summed=bf16), ends=chunks, results=bf16
    ),
    # flash_attn.fa4: flash_attn/cute/utils.py, 4.0.0b36
    "correction skipped below 2^8, cubic exp2, the last block first": partial(
        flash, how=A(block=128, lazy=8.0, exp2=exp2_cubic, backwards=True)
    ),
    # triton.flash: kernels/mha_prefill/triton/flash_jit.py; in larger blocks aten/src/ATen/native/cpu/
    # FlashAttentionKernel.cpp (torch.sdpa) and torch/_inductor/kernel/flex, torch 2.13
    "blocks of 64": flash,
    # vllm.extend: csrc/cpu/sgl-kernels/extend.cpp, vLLM 0.33 (assumed; the row itself is checked)
    "cached and new keys by themselves, merged": partial(flash, ends=at_prefix),
    # sglang.triton: srt/layers/attention/triton_ops/extend_attention.py, SGLang 0.5.23
    "cached keys in blocks of 32, then new ones": partial(
        flash, how=A(block=32, exp2=exp2_fast), ends=at_prefix
    ),
    # flash_attn.fa3: hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp, hopper/tile_size.h, FlashAttention 0251105;
    # flash_attn.fa2 and flashinfer.fa3 in blocks of 64 and 96
    "the last block first, of 112": partial(flash, how=A(block=112, backwards=True, exp2=exp2_fast)),
    # flashinfer.fa2: include/flashinfer/attention/prefill.cuh, flashinfer 0.6.18
    "rounded weights summed by the tensor cores": partial(flash, how=A(round_summed=bf16, exp2=exp2_fast)),
    # flashinfer's split prefill: include/flashinfer/attention/cascade.cuh, flashinfer 0.6.18
    "five parts of tiles, in bf16": partial(flash, ends=every_fifth, results=bf16),
    # assumed: cudnn comes compiled
    "pairs of blocks": partial(flash, how=A(pairs=True, block=128)),
    # aiter.asm on gfx942, how_v3_bf16_cvt=1: aiter/ops/mha.py, AITER e404860
    "ties away from zero": partial(flash, how=A(round_weights=away)),
    # aiter.triton: aiter/ops/triton/_triton_kernels/attention/mha.py, AITER e404860
    "exp2 with the scale before": partial(
        flash, how=A(block=32, round_scores=lambda x: x * (1.0 + 2.0**-23))
    ),
    # aiter: -fgpu-flush-denormals-to-zero in aiter/jit/core.py, AITER e404860
    "subnormal numbers flushed": partial(
        flash, how=A(round_weights=lambda x: bf16(flushed(x)), round_result=flushed)
    ),
    # torch.naive: kernels/mha_prefill/providers/torch_eager.py
    "softmax in fp32": Attended.out,
    # torch.sdpa: kernels/mha_prefill/providers/torch_eager.py (Sdpa.prepare)
    "FP8 operands made bf16": widened,
}
TRUNCATED: dict[str, Wrong] = {
    # aiter.ck under vLLM's chunks: aiter/jit/optCompilerConfig.json, AITER e404860
    "weights and output truncated, cached keys apart": truncating(
        partial(flash, how=A(round_weights=truncated), ends=at_prefix, results=truncated)
    ),
    # aiter.ck: module_mha_varlen_fwd in aiter/jit/optCompilerConfig.json, AITER e404860
    "weights and output truncated": truncating(partial(flash, how=A(round_weights=truncated))),
    # aiter.dispatch: module_mha_varlen_fwd in aiter/jit/optCompilerConfig.json, AITER e404860
    "weights and output truncated, blocks of 128": truncating(
        partial(flash, how=A(round_weights=truncated, block=128, exp2=exp2_fast))
    ),
    # aiter.ck, weights by its asm: assumed, AITER e404860
    "output truncated": truncating(flash),
}
FP8: dict[str, Wrong] = {
    # flash_attn.fa3 before max_offset: hopper/softmax.h, FlashAttention 2.7.4
    "blocks of 64": fp8_call,
    # flash_attn.fa3: hopper/softmax.h (Max_offset), FlashAttention 0251105; 7 for e4m3fnuz's sake
    "weights up to 2^8, the last block first": partial(
        fp8_call, how=A(headroom=7.0, block=128, backwards=True)
    ),
    # triton.flash: kernels/mha_prefill/triton/flash_jit.py (HEADROOM)
    "weights up to 2^7, rounded ones summed": partial(fp8_call, how=A(headroom=7.0), summed=True),
    # assumed: flashinfer.trtllm comes compiled
    "rounded weights summed": partial(fp8_call, summed=True),
    # on Hopper: DeepSeek-V3 technical report, section 3.5.2
    "sums and scores of 14 bits": partial(
        fp8_call, how=A(round_result=fourteen_bits, round_scores=fourteen_bits, headroom=7.0)
    ),
    # flash_attn.fa4: flash_attn/cute/softmax.py, 4.0.0b36
    "correction skipped below 2^4": partial(fp8_call, how=A(block=128, lazy=4.0)),
    # aiter.fp8_ps: csrc/kernels/mla/reduce.cu, AITER e404860
    "five parts of tiles": partial(fp8_call, ends=every_fifth),
    # flash_attn.fa4: flash_attn/cute/utils.py (max_offset 4), 4.0.0b36
    "cubic exp2": partial(fp8_call, how=A(block=128, exp2=exp2_cubic, headroom=4.0)),
}
FP8_TRUNCATED: dict[str, Wrong] = {
    # aiter.fp8: module_mha_varlen_fwd in aiter/jit/optCompilerConfig.json, AITER e404860
    "output truncated": truncating(partial(fp8_call, how=A(block=128)))
}


RIGHT = right(ATTENTION, BF16, TRUNCATED, FP8, FP8_TRUNCATED)
