"""Triton sources of the grouped MoE: gate and up with SiLU and requantisation, down, weighted combine.

Rows stand in slots, as align_jit places them: a tile's rows belong to one expert. All tensors are
contiguous, in the layouts of `FusedMoeOperands`. FP8 tensors are uint8 with the bits of e4m3fnuz if FNUZ_BITS
(the interpreter takes no e4m3fnuz tensor).
"""

import triton
import triton.language as tl

from kernels.fp8_jit import widen


@triton.jit
def up_kernel(
    x_q,  # FP8 [tokens, HIDDEN]
    x_scale,  # fp32 [tokens, HIDDEN / 128]
    w13,  # FP8 [experts, 2 * INTER, HIDDEN]
    w13_scale,  # fp32 [experts, 2 * INTER / 128, HIDDEN / 128]
    slots,  # int32 [tiles * BLOCK_M]
    owners,  # int32 [tiles]
    used,  # int32 [1]
    h_q,  # FP8 [tiles * BLOCK_M, INTER]; fp32 in the interpreter, whose conversion to FP8 truncates
    h_scale,  # fp32 [tiles * BLOCK_M, INTER / 128]
    pairs,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    PICKS: tl.constexpr,
    LARGEST: tl.constexpr,  # finite value of the FP8 format
    SMALLEST_SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,  # whether scales of h are rounded up to one
    BLOCK: tl.constexpr,  # of scales: 128
    BLOCK_M: tl.constexpr,
    PRODUCT: tl.constexpr,  # what tl.dot takes: FP8, or fp32 in the interpreter
    FNUZ_BITS: tl.constexpr,
):
    """One program: 128 columns of h of one tile. Grid (tiles, INTER / 128): programs that read the same
    weights run side by side. Beyond `used` there is nothing to do."""
    tile, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tile >= tl.load(used):
        return
    expert = tl.load(owners + tile).to(tl.int64)
    slot = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(slots + slot)
    row_ok = pair < pairs
    token = (pair // PICKS).to(tl.int64)
    column, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK)

    STEPS: tl.constexpr = HIDDEN // BLOCK
    BLOCKS: tl.constexpr = INTER // BLOCK
    x_at = x_q + token[:, None] * HIDDEN + k[None, :]
    gate_row = expert * (2 * INTER) + block * BLOCK + column
    gate_at = w13 + gate_row[None, :] * HIDDEN + k[:, None]
    gate_scale = w13_scale + (expert * (2 * BLOCKS) + block) * STEPS
    gate = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    for step in range(STEPS):
        x = widen(tl.load(x_at, mask=row_ok[:, None], other=0.0), PRODUCT, FNUZ_BITS)
        row_scale = tl.load(x_scale + token * STEPS + step, mask=row_ok, other=0.0)
        part = tl.dot(x, widen(tl.load(gate_at), PRODUCT, FNUZ_BITS))
        gate += part * (row_scale * tl.load(gate_scale + step))[:, None]
        part = tl.dot(x, widen(tl.load(gate_at + INTER * HIDDEN), PRODUCT, FNUZ_BITS))
        up += part * (row_scale * tl.load(gate_scale + BLOCKS * STEPS + step))[:, None]
        x_at += BLOCK
        gate_at += BLOCK

    # silu(gate) by an exponential that cannot overflow.
    small = tl.exp(-tl.abs(gate))
    h = gate * tl.where(gate < 0, small, 1.0) / (1.0 + small) * up
    amax = tl.max(tl.abs(h), axis=1)
    scale = tl.maximum(tl.div_rn(amax, tl.full([BLOCK_M], LARGEST, tl.float32)), SMALLEST_SCALE)
    if POWER_OF_TWO:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    quotient = tl.div_rn(h, tl.broadcast_to(scale[:, None], [BLOCK_M, BLOCK]))
    tl.store(h_scale + slot * BLOCKS + block, scale)
    tl.store(
        h_q + slot[:, None] * INTER + (block * BLOCK + column)[None, :], quotient.to(h_q.dtype.element_ty)
    )


@triton.jit
def down_kernel(
    h_q,  # FP8 [tiles * BLOCK_M, INTER]
    h_scale,  # fp32 [tiles * BLOCK_M, INTER / 128]
    w2,  # FP8 [experts, HIDDEN, INTER]
    w2_scale,  # fp32 [experts, HIDDEN / 128, INTER / 128]
    slots,  # int32 [tiles * BLOCK_M]
    owners,  # int32 [tiles]
    used,  # int32 [1]
    given,  # bf16 [pairs, HIDDEN]: what the expert of each pair gives; fp32 in the interpreter
    pairs,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides HIDDEN
    PRODUCT: tl.constexpr,
    FNUZ_BITS: tl.constexpr,
):
    """One program: BLOCK_N columns of one tile. Grid (tiles, HIDDEN / BLOCK_N)."""
    tile, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tile >= tl.load(used):
        return
    expert = tl.load(owners + tile).to(tl.int64)
    slot = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(slots + slot)
    row_ok = pair < pairs
    column, k = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK)

    STEPS: tl.constexpr = INTER // BLOCK
    h_at = h_q + slot[:, None] * INTER + k[None, :]
    w_at = w2 + (expert * HIDDEN + column)[None, :] * INTER + k[:, None]
    # One scale for each column, though 128 share it: a program may take more columns than that.
    w_scale = w2_scale + (expert * (HIDDEN // BLOCK) + column // BLOCK) * STEPS
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        h = widen(tl.load(h_at, mask=row_ok[:, None], other=0.0), PRODUCT, FNUZ_BITS)
        part = tl.dot(h, widen(tl.load(w_at), PRODUCT, FNUZ_BITS))
        row_scale = tl.load(h_scale + slot * STEPS + step, mask=row_ok, other=0.0)
        total += part * row_scale[:, None] * tl.load(w_scale + step)[None, :]
        h_at += BLOCK
        w_at += BLOCK
    at = given + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(at, total, mask=row_ok[:, None])


@triton.jit
def combine_kernel(
    given,  # bf16 [tokens * PICKS, HIDDEN]; of a pair that no expert here has, anything
    ids,  # int32 [tokens, PICKS]
    weights,  # fp32 [tokens, PICKS]
    out,  # bf16 [tokens, HIDDEN]; fp32 in the interpreter
    HIDDEN: tl.constexpr,
    PICKS: tl.constexpr,
    PICKS_PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: BLOCK_D columns of one token. Grid (tokens, ceil(HIDDEN / BLOCK_D))."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    pick = tl.arange(0, PICKS_PADDED)
    here = tl.load(ids + token * PICKS + pick, mask=pick < PICKS, other=-1) >= 0
    weight = tl.load(weights + token * PICKS + pick, mask=here, other=0.0)
    at = given + (token * PICKS + pick)[:, None] * HIDDEN + column[None, :]
    value = tl.load(at, mask=here[:, None] & (column < HIDDEN)[None, :], other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, tl.sum(value * weight[:, None], 0), mask=column < HIDDEN)
