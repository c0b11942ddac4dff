"""Triton sources around libraries' grouped products: from tokens to the rows of experts, SiLU with
requantising, and from rows back to tokens.

Each pair of a token and a pick has one row, whose number is in `row_of`. Rows form groups of CAPACITY: one
group of all rows where experts follow each other (contiguous), or a group for each expert (masked). Scales
are MN-major in each group: fp32 [K / 128, CAPACITY], or if PACKED int32 [ceil(K / 512), CAPACITY], whose
words hold the exponents of four power-of-two scales, the first in the lowest byte (pack_ue8m0_to_int in
DeepGEMM's utils/math.py).
"""

import triton
import triton.language as tl

from kernels.fused_moe.triton.grouped_jit import requantised


@triton.jit
def masked_kernel(
    ids,  # int32 [pairs]; -1: of another rank
    counts,  # int32 [experts], written here
    row_of,  # int32 [pairs]
    pairs, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,  # pairs that are read at a time
):  # fmt: skip
    """Each program numbers the rows of one expert in the masked layout. Grid: (experts,)."""
    expert = tl.program_id(0)
    count = expert * 0  # a tensor, as the loop needs it
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        is_own = (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(row_of + at, expert * CAPACITY + count + tl.cumsum(is_own, 0) - 1, mask=is_own > 0)
        count += tl.sum(is_own, 0)
    tl.store(counts + expert, count)


@triton.jit
def gather_kernel(
    x_q,  # bytes [tokens, HIDDEN]
    x_scale,  # fp32 [tokens, HIDDEN / 128]
    ids,  # int32 [pairs]
    row_of,  # int32 [pairs]
    a,  # bytes [rows, HIDDEN]
    a_scale,  # scales as the module says
    PICKS: tl.constexpr, HIDDEN: tl.constexpr, CAPACITY: tl.constexpr, PACKED: tl.constexpr,
    BLOCK: tl.constexpr,  # values that share a scale: 128
    BLOCK_D: tl.constexpr,  # HIDDEN, rounded up to a power of two
    WORDS: tl.constexpr,  # words of a row's scales, rounded up to a power of two
):  # fmt: skip
    """Each program writes the row of one pair. Grid: (pairs,)."""
    pair = tl.program_id(0)
    if tl.load(ids + pair) < 0:
        return
    token, row = (pair // PICKS).to(tl.int64), tl.load(row_of + pair).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    value = tl.load(x_q + token * HIDDEN + column, mask=column < HIDDEN, other=0)
    tl.store(a + row * HIDDEN + column, value, mask=column < HIDDEN)
    BLOCKS: tl.constexpr = HIDDEN // BLOCK
    block = tl.arange(0, WORDS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    scale = tl.load(x_scale + token * BLOCKS + block, mask=block < BLOCKS, other=0.0)
    _store_scales(a_scale, scale, block, row, BLOCKS, CAPACITY, PACKED)


@triton.jit
def silu_kernel(
    gate_up,  # bf16 [rows, 2 * INTER]
    ids,  # int32 [pairs]
    row_of,  # int32 [pairs]
    h_q,  # FP8 [rows, INTER]; fp32 in the interpreter, whose conversion to FP8 truncates
    h_scale,  # scales as the module says
    INTER: tl.constexpr, CAPACITY: tl.constexpr, PACKED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,  # whether scales are rounded up to powers of two
    LARGEST: tl.constexpr,  # the largest finite value of the FP8 format
    SMALLEST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,  # values that share a scale: 128
):  # fmt: skip
    """Like `silu_kernel` of grouped_jit, for rows in groups. Each program computes four blocks of the row of
    one pair. Grid: (pairs, ceil(INTER / 512))."""
    pair, word = tl.program_id(0), tl.program_id(1)
    if tl.load(ids + pair) < 0:
        return
    row = tl.load(row_of + pair).to(tl.int64)
    BLOCKS: tl.constexpr = INTER // BLOCK
    block = word * 4 + tl.arange(0, 4)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at, ok = gate_up + row * (2 * INTER) + column, column < INTER
    gate = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(at + INTER, mask=ok, other=0.0).to(tl.float32)
    quotient, scale = requantised(gate, up, LARGEST, SMALLEST_SCALE, POWER_OF_TWO, 4, BLOCK)
    tl.store(h_q + row * INTER + column, quotient.to(h_q.dtype.element_ty), mask=ok)
    _store_scales(h_scale, scale[None, :], block[None, :], row, BLOCKS, CAPACITY, PACKED)


@triton.jit
def _store_scales(
    scales, scale, block, row, BLOCKS: tl.constexpr, CAPACITY: tl.constexpr, PACKED: tl.constexpr
):
    """Stores the scales of a row, MN-major in the row's group. scale, block: [words, 4], the scales and the
    numbers of their blocks; BLOCKS: the blocks of a row"""
    WORDS: tl.constexpr = (BLOCKS + 3) // 4 if PACKED else BLOCKS
    at = scales + row // CAPACITY * (CAPACITY * WORDS) + row % CAPACITY
    if PACKED:
        exponent = tl.where(block < BLOCKS, scale.to(tl.int32, bitcast=True) >> 23, 0)
        packed = tl.sum(exponent << (block % 4 * 8), axis=1)
        word = tl.min(block, axis=1) // 4
        tl.store(at + word * CAPACITY, packed, mask=word < WORDS)
    else:
        tl.store(at + block * CAPACITY, scale, mask=block < BLOCKS)


@triton.jit
def combine_kernel(
    expert_out,  # bf16 [rows, HIDDEN]; its values for a pair on another rank are undefined
    ids,  # int32 [tokens, PICKS]
    row_of,  # int32 [tokens, PICKS]; None where the row is the number of the pair
    weights,  # fp32 [tokens, PICKS]
    out,  # bf16 [tokens, HIDDEN]; fp32 in the interpreter
    HIDDEN: tl.constexpr, PICKS: tl.constexpr,
    PICKS_PADDED: tl.constexpr,  # PICKS, rounded up to a power of two
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each program computes BLOCK_D columns of one token. Picks are added in a tree of fixed shape, so that
    equal inputs give equal bits. Grid: (tokens, ceil(HIDDEN / BLOCK_D))."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    pick = tl.arange(0, PICKS_PADDED)
    is_local = tl.load(ids + token * PICKS + pick, mask=pick < PICKS, other=-1) >= 0
    row = token * PICKS + pick
    if row_of is not None:
        row = tl.load(row_of + row, mask=is_local, other=0).to(tl.int64)
    weight = tl.load(weights + token * PICKS + pick, mask=is_local, other=0.0)
    at = expert_out + row[:, None] * HIDDEN + column[None, :]
    value = tl.load(at, mask=is_local[:, None] & (column < HIDDEN)[None, :], other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, tl.sum(value * weight[:, None], 0), mask=column < HIDDEN)
