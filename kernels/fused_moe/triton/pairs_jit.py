"""Triton sources of the grouped MoE beside its products: SiLU with requantising, and the weighted combine.
Splits are added in order and picks in a tree of fixed shape, so that equal inputs give equal bits."""

import triton
import triton.language as tl


@triton.jit
def requantised(
    gate,
    up,  # fp32 [rows, BLOCK] both
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """silu(gate) * up divided by the scale of its row, and the scales, bit by bit as in kernels.formats."""
    # This exponential cannot overflow.
    small = tl.exp(-tl.abs(gate))
    h = gate * tl.where(gate < 0, small, 1.0) / (1.0 + small) * up
    amax = tl.max(tl.abs(h), axis=1)
    scale = tl.maximum(tl.div_rn(amax, tl.full([BLOCK_M], LARGEST, tl.float32)), SMALLEST_SCALE)
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.div_rn(h, tl.broadcast_to(scale[:, None], [BLOCK_M, BLOCK])), scale


@triton.jit
def silu_kernel(
    gate_up,  # [SPLITS, pairs, 2 * INTER], bf16 or fp32
    ids,  # int32 [pairs]; -1 on another rank, where gate_up holds anything
    h_q,  # FP8 [pairs, INTER]; fp32 in the interpreter
    h_scale,  # fp32 [pairs, INTER / 128]
    pairs,
    INTER: tl.constexpr,
    SPLITS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Each program computes 128 columns of h for BLOCK_M pairs. Grid: (blocks of pairs, INTER / 128)."""
    pair, block = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(ids + pair, mask=pair < pairs, other=-1) >= 0
    at = gate_up + pair.to(tl.int64)[:, None] * (2 * INTER) + column[None, :]
    gate = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    part = tl.full([], 2 * INTER, tl.int64) * pairs
    for _ in tl.static_range(SPLITS):
        gate += tl.load(at, mask=here[:, None], other=0.0).to(tl.float32)
        up += tl.load(at + INTER, mask=here[:, None], other=0.0).to(tl.float32)
        at += part
    quotient, scale = requantised(gate, up, LARGEST, SMALLEST_SCALE, POWER_OF_TWO, BLOCK_M, BLOCK)
    tl.store(h_scale + pair * (INTER // BLOCK) + block, scale, mask=here)
    at = h_q + pair.to(tl.int64)[:, None] * INTER + column[None, :]
    tl.store(at, quotient.to(h_q.dtype.element_ty), mask=here[:, None])


@triton.jit
def combine_kernel(
    given,  # bf16 [tokens * PICKS, HIDDEN]; holds anything for a pair on another rank
    ids,  # int32 [tokens, PICKS]
    weights,  # fp32 [tokens, PICKS]
    out,  # bf16 [tokens, HIDDEN]; fp32 in the interpreter
    HIDDEN: tl.constexpr,
    PICKS: tl.constexpr,
    PICKS_PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Each program computes BLOCK_D columns of one token. Grid: (tokens, ceil(HIDDEN / BLOCK_D))."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    pick = tl.arange(0, PICKS_PADDED)
    here = tl.load(ids + token * PICKS + pick, mask=pick < PICKS, other=-1) >= 0
    weight = tl.load(weights + token * PICKS + pick, mask=here, other=0.0)
    at = given + (token * PICKS + pick)[:, None] * HIDDEN + column[None, :]
    value = tl.load(at, mask=here[:, None] & (column < HIDDEN)[None, :], other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, tl.sum(value * weight[:, None], 0), mask=column < HIDDEN)
