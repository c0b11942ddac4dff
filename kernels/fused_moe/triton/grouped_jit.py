"""Triton sources of the grouped MoE's products. The up product computes gate and up, and if FUSE also h; else
SiLU with requantising is a kernel of its own. The down product computes the outputs of experts.

A pair is a token and one of its picks, with the number token * PICKS + pick. A tile has rows of one expert:
the pairs that align_jit placed in its slots, or one pair if not SORTED. Results are written in the order of
pairs, so that nothing has to be sorted back. All tensors are contiguous and in the layouts of
`FusedMoeOperands`. If FNUZ_BITS, FP8 tensors are uint8 with the bits of e4m3fnuz, because the interpreter
takes no e4m3fnuz tensor.

Equal inputs give equal bits: there are no atomics, and every sum has a fixed order. Blocks of K are added in
order within a split, splits in order, and picks in order or in a tree of fixed shape. The number of splits,
and with it the last bits, depends on the configuration and on the number of compute units.
"""

import triton
import triton.language as tl

from kernels.fp8_jit import widen


@triton.jit
def _place(tiles, COLUMN_BLOCKS: tl.constexpr, group, CHIPLETS: tl.constexpr):
    """The tile and the block of columns of a program whose number is below tiles * COLUMN_BLOCKS.

    A block of columns is computed for `group` tiles, about as many as an expert has, and then the next block
    is. So programs read the same weights at the same time, and soon afterwards the rows of a tile again.
    Programs go in turn to the chiplets of AMD's GPUs, each of which has a cache. The programs of a chiplet
    get adjacent places in this order.
    """
    place = tl.program_id(0)
    if CHIPLETS > 1:
        total = tiles * COLUMN_BLOCKS
        chiplet = place % CHIPLETS
        place = chiplet * (total // CHIPLETS) + tl.minimum(chiplet, total % CHIPLETS) + place // CHIPLETS
    first_tile = place // (group * COLUMN_BLOCKS) * group
    tiles_of_group = tl.minimum(tiles - first_tile, group)
    in_group = place - first_tile * COLUMN_BLOCKS
    return first_tile + in_group % tiles_of_group, in_group // tiles_of_group


@triton.jit
def _rows(tile, ids, slots, expert_of, pairs, SORTED: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile (-1 on another rank), the pairs of its rows, and which rows exist."""
    row = tl.arange(0, BLOCK_M)
    if SORTED:
        pair = tl.load(slots + tile.to(tl.int64) * BLOCK_M + row)
        return tl.load(expert_of + tile), pair, pair < pairs
    else:
        return tl.load(ids + tile), tile + row, row == 0


@triton.jit
def _product(total, rows, weights, scale, SWAP: tl.constexpr):
    """total + scale * rows @ weights^T. scale: [rows]. A block of 128 products is summed by itself and added
    in fp32, because tensor cores keep fewer bits in their own sums (DeepSeek-V3 technical report, section
    3.3.2). With SWAP the tile is transposed, so that rows of weights fill instructions of 64 rows."""
    if SWAP:
        return total + tl.dot(weights, tl.trans(rows)) * scale[None, :]
    else:
        return total + tl.dot(rows, tl.trans(weights)) * scale[:, None]


@triton.jit
def requantised(
    gate,  # fp32 [BLOCK_M, BLOCK]
    up,  # fp32 [BLOCK_M, BLOCK]
    LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """h = silu(gate) * up divided by its row's scale; the scales [BLOCK_M], bit by bit those of `formats`."""
    # silu(gate) = gate / (1 + exp(-gate)), written with an exponential that cannot overflow.
    exponential = tl.exp(-tl.abs(gate))
    h = gate * tl.where(gate < 0, exponential, 1.0) / (1.0 + exponential) * up
    amax = tl.max(tl.abs(h), axis=1)
    scale = tl.maximum(tl.div_rn(amax, tl.full([BLOCK_M], LARGEST, tl.float32)), SMALLEST_SCALE)
    if POWER_OF_TWO:
        # Any mantissa bit carries into the exponent, and the mantissa is cleared.
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.div_rn(h, tl.broadcast_to(scale[:, None], [BLOCK_M, BLOCK])), scale


@triton.jit
def silu_kernel(
    gate_up,  # [SPLITS, pairs, 2 * INTER], bf16 or fp32
    ids,  # int32 [pairs]; -1 on another rank: there the values of gate_up are undefined
    h_q,  # FP8 [pairs, INTER]; fp32 in the interpreter
    h_scale,  # fp32 [pairs, INTER / 128]
    pairs, INTER: tl.constexpr, SPLITS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Each program computes 128 columns of h for BLOCK_M pairs. Grid: (blocks of pairs, INTER / 128)."""
    pair, block = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    is_local = tl.load(ids + pair, mask=pair < pairs, other=-1) >= 0
    at = gate_up + pair.to(tl.int64)[:, None] * (2 * INTER) + column[None, :]
    gate = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    values_of_split = tl.full([], 2 * INTER, tl.int64) * pairs
    for _ in tl.static_range(SPLITS):
        gate += tl.load(at, mask=is_local[:, None], other=0.0).to(tl.float32)
        up += tl.load(at + INTER, mask=is_local[:, None], other=0.0).to(tl.float32)
        at += values_of_split
    quotient, scale = requantised(gate, up, LARGEST, SMALLEST_SCALE, POWER_OF_TWO, BLOCK_M, BLOCK)
    tl.store(h_scale + pair * (INTER // BLOCK) + block, scale, mask=is_local)
    at = h_q + pair.to(tl.int64)[:, None] * INTER + column[None, :]
    tl.store(at, quotient.to(h_q.dtype.element_ty), mask=is_local[:, None])


@triton.jit
def up_kernel(
    x_q,  # FP8 [tokens, HIDDEN]
    x_scale,  # fp32 [tokens, HIDDEN / 128]
    w13,  # FP8 [experts, 2 * INTER, HIDDEN]
    w13_scale,  # fp32 [experts, 2 * INTER / 128, HIDDEN / 128]
    ids,  # int32 [pairs]
    slots,  # int32 [tiles * BLOCK_M], if SORTED
    expert_of,  # int32 [tiles], if SORTED
    used_tiles,  # int32 [1], if SORTED
    gate_up,  # [splits, pairs, 2 * INTER], if not FUSE: bf16, or fp32 for several splits
    h_q,  # FP8 [pairs, INTER], if FUSE; fp32 in the interpreter, whose conversion to FP8 truncates
    h_scale,  # fp32 [pairs, INTER / 128], if FUSE
    pairs,
    group,  # tiles of a group, see _place
    per_split,  # blocks of K of a split; the last split may have fewer, but at least one
    HIDDEN: tl.constexpr, INTER: tl.constexpr, PICKS: tl.constexpr,
    LARGEST: tl.constexpr,  # the largest finite value of the FP8 format
    SMALLEST_SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,  # whether scales of h are rounded up to powers of two
    BLOCK: tl.constexpr,  # values that share a scale: 128
    BLOCK_M: tl.constexpr,  # rows of a tile
    BLOCK_N: tl.constexpr,  # divides 128, and is 128 if FUSE
    SORTED: tl.constexpr,
    FUSE: tl.constexpr,  # whether a program computes the same columns of gate and of up, and h from them
    SWAP: tl.constexpr, CHIPLETS: tl.constexpr,
    PRODUCT: tl.constexpr,  # the type that tl.dot takes: FP8, or fp32 in the interpreter
    FNUZ_BITS: tl.constexpr,
):  # fmt: skip
    """Each program computes, for one tile over one split of K, BLOCK_N of the 2 * INTER columns of gate and
    up; or if FUSE BLOCK_N columns of gate and the same of up. Grid: (tiles * blocks of columns, splits). The
    programs of tiles without an expert, which come last, do nothing."""
    STEPS: tl.constexpr = HIDDEN // BLOCK
    BLOCKS: tl.constexpr = INTER // BLOCK
    COLUMN_BLOCKS: tl.constexpr = (INTER if FUSE else 2 * INTER) // BLOCK_N
    tiles = pairs
    if SORTED:
        tiles = tl.load(used_tiles)
    if tl.program_id(0) >= tiles * COLUMN_BLOCKS:
        return
    tile, column_block = _place(tiles, COLUMN_BLOCKS, group, CHIPLETS)
    expert, pair, row_ok = _rows(tile, ids, slots, expert_of, pairs, SORTED, BLOCK_M)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    token = (pair // PICKS).to(tl.int64)
    column, k = column_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK)
    x_at = x_q + token[:, None] * HIDDEN + k[None, :]
    x_scale_at = x_scale + token * STEPS
    w_at = w13 + expert * (2 * INTER * HIDDEN) + (column[:, None] * HIDDEN + k[None, :])
    w_scale = w13_scale + (expert * (2 * BLOCKS) + column_block * BLOCK_N // BLOCK) * STEPS

    # gate: if not FUSE, columns of gate or of up
    gate = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    split = tl.program_id(1)
    first = split * per_split
    # Scales are loaded a step ahead, because Triton's pipeline holds only what products read.
    row_scale = tl.load(x_scale_at + first, mask=row_ok, other=0.0)
    gate_scale = tl.load(w_scale + first)
    up_scale = tl.load(w_scale + BLOCKS * STEPS + first) if FUSE else gate_scale
    for step in range(first, tl.minimum(first + per_split, STEPS)):
        x = widen(tl.load(x_at + step * BLOCK, mask=row_ok[:, None], other=0.0), PRODUCT, FNUZ_BITS)
        w = widen(tl.load(w_at + step * BLOCK), PRODUCT, FNUZ_BITS)
        gate = _product(gate, x, w, row_scale * gate_scale, SWAP)
        if FUSE:
            w = widen(tl.load(w_at + (INTER * HIDDEN + step * BLOCK)), PRODUCT, FNUZ_BITS)
            up = _product(up, x, w, row_scale * up_scale, SWAP)
            up_scale = tl.load(w_scale + BLOCKS * STEPS + tl.minimum(step + 1, STEPS - 1))
        row_scale = tl.load(x_scale_at + tl.minimum(step + 1, STEPS - 1), mask=row_ok, other=0.0)
        gate_scale = tl.load(w_scale + tl.minimum(step + 1, STEPS - 1))

    if SWAP:
        gate, up = tl.trans(gate), tl.trans(up)
    if FUSE:
        quotient, scale = requantised(gate, up, LARGEST, SMALLEST_SCALE, POWER_OF_TWO, BLOCK_M, BLOCK)
        tl.store(h_scale + pair * BLOCKS + column_block, scale, mask=row_ok)
        at = h_q + pair.to(tl.int64)[:, None] * INTER + column[None, :]
        tl.store(at, quotient.to(h_q.dtype.element_ty), mask=row_ok[:, None])
    else:
        at = (split.to(tl.int64) * pairs + pair)[:, None] * (2 * INTER) + column[None, :]
        tl.store(gate_up + at, gate.to(gate_up.dtype.element_ty), mask=row_ok[:, None])


@triton.jit
def down_kernel(
    h_q,  # FP8 [pairs, INTER]
    h_scale,  # fp32 [pairs, INTER / 128]
    w2,  # FP8 [experts, HIDDEN, INTER]
    w2_scale,  # fp32 [experts, HIDDEN / 128, INTER / 128]
    ids,  # int32 [pairs]
    slots,  # int32 [tiles * BLOCK_M], if SORTED
    expert_of,  # int32 [tiles], if SORTED
    used_tiles,  # int32 [1], if SORTED
    expert_out,  # bf16 [pairs, HIDDEN]; fp32 in the interpreter
    pairs,
    group,  # tiles of a group, see _place
    HIDDEN: tl.constexpr, INTER: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides HIDDEN
    SORTED: tl.constexpr, SWAP: tl.constexpr, CHIPLETS: tl.constexpr, PRODUCT: tl.constexpr,
    FNUZ_BITS: tl.constexpr,
):  # fmt: skip
    """Each program computes BLOCK_N columns of one tile. Grid: (tiles * blocks of columns,)."""
    STEPS: tl.constexpr = INTER // BLOCK
    COLUMN_BLOCKS: tl.constexpr = HIDDEN // BLOCK_N
    tiles = pairs
    if SORTED:
        tiles = tl.load(used_tiles)
    if tl.program_id(0) >= tiles * COLUMN_BLOCKS:
        return
    tile, column_block = _place(tiles, COLUMN_BLOCKS, group, CHIPLETS)
    expert, pair, row_ok = _rows(tile, ids, slots, expert_of, pairs, SORTED, BLOCK_M)
    if expert < 0:
        return
    expert, row = expert.to(tl.int64), pair.to(tl.int64)
    column, k = column_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK)
    h_at = h_q + row[:, None] * INTER + k[None, :]
    w_at = w2 + expert * (HIDDEN * INTER) + (column[:, None] * INTER + k[None, :])
    w_scale = w2_scale + expert * (HIDDEN // BLOCK * STEPS)
    # In the interpreter a program has columns of several scales, because the time depends on the number of
    # programs. w_scale then points to a scale for each column.
    ONE_SCALE: tl.constexpr = BLOCK_N <= BLOCK
    w_scale += (column_block * BLOCK_N if ONE_SCALE else column) // BLOCK * STEPS
    total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    row_scale = tl.load(h_scale + row * STEPS, mask=row_ok, other=0.0)
    scale = tl.load(w_scale)
    for step in range(STEPS):
        h = widen(tl.load(h_at + step * BLOCK, mask=row_ok[:, None], other=0.0), PRODUCT, FNUZ_BITS)
        w = widen(tl.load(w_at + step * BLOCK), PRODUCT, FNUZ_BITS)
        if ONE_SCALE:
            total = _product(total, h, w, row_scale * scale, SWAP)
        else:
            of_step = _product(tl.zeros_like(total), h, w, row_scale, SWAP)
            total += of_step * (scale[:, None] if SWAP else scale[None, :])
        row_scale = tl.load(h_scale + row * STEPS + tl.minimum(step + 1, STEPS - 1), mask=row_ok, other=0.0)
        scale = tl.load(w_scale + tl.minimum(step + 1, STEPS - 1))
    if SWAP:
        total = tl.trans(total)
    at = expert_out + row[:, None] * HIDDEN + column[None, :]
    tl.store(at, total.to(expert_out.dtype.element_ty), mask=row_ok[:, None])


@triton.jit
def _weighted_scale(
    step_of_token,  # pick * STEPS + step: all picks of a token have STEPS steps
    token, ids, weights, h_scale,
    w_scale,  # the scales of the block of columns in the first expert
    BLOCKS: tl.constexpr,  # blocks of columns of an expert
    STEPS: tl.constexpr, PICKS: tl.constexpr,
):  # fmt: skip
    """A step's factor: the scale of h, that of w2 and the pick's weight; 0 for an expert on another rank."""
    pair, step = token * PICKS + step_of_token // STEPS, step_of_token % STEPS
    expert = tl.load(ids + pair).to(tl.int64)
    scale = tl.load(h_scale + pair * STEPS + step, mask=expert >= 0, other=0.0) * tl.load(weights + pair)
    return scale * tl.load(w_scale + expert * (BLOCKS * STEPS) + step, mask=expert >= 0, other=0.0)


@triton.jit
def down_by_token_kernel(
    h_q,  # FP8 [pairs, INTER]
    h_scale,  # fp32 [pairs, INTER / 128]
    w2,  # FP8 [experts, HIDDEN, INTER]
    w2_scale,  # fp32 [experts, HIDDEN / 128, INTER / 128]
    ids,  # int32 [pairs]
    weights,  # fp32 [pairs]
    out,  # bf16 [tokens, HIDDEN]; fp32 in the interpreter
    HIDDEN: tl.constexpr, INTER: tl.constexpr, PICKS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of the product, as tl.dot needs them; only the first is used
    BLOCK_N: tl.constexpr,  # divides 128
    SWAP: tl.constexpr, PRODUCT: tl.constexpr, FNUZ_BITS: tl.constexpr,
):  # fmt: skip
    """Each program computes BLOCK_N columns of one token, one pick after the other. Grid: (HIDDEN / BLOCK_N,
    tokens). It is for few tokens, which share no experts. No weights are read for picks on other ranks."""
    STEPS: tl.constexpr = INTER // BLOCK
    block, token = tl.program_id(0), tl.program_id(1)
    column, k, row = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK), tl.arange(0, BLOCK_M)
    w_at = column[:, None] * INTER + k[None, :]
    block_scales = w2_scale + block * BLOCK_N // BLOCK * STEPS
    total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    BLOCKS: tl.constexpr = HIDDEN // BLOCK
    scale = _weighted_scale(0, token, ids, weights, h_scale, block_scales, BLOCKS, STEPS, PICKS)
    for step_of_token in range(PICKS * STEPS):
        pair, step = token * PICKS + step_of_token // STEPS, step_of_token % STEPS
        expert = tl.load(ids + pair).to(tl.int64)
        is_local = expert >= 0
        # All rows have the address of the pair's. Only the first is loaded.
        h_at = h_q + pair * INTER + step * BLOCK + row[:, None] * 0 + k[None, :]
        h = widen(tl.load(h_at, mask=(row == 0)[:, None] & is_local, other=0.0), PRODUCT, FNUZ_BITS)
        w = tl.load(w2 + expert * (HIDDEN * INTER) + step * BLOCK + w_at, mask=is_local, other=0.0)
        rows_scale = tl.zeros([BLOCK_M], tl.float32) + scale
        total = _product(total, h, widen(w, PRODUCT, FNUZ_BITS), rows_scale, SWAP)
        ahead = tl.minimum(step_of_token + 1, PICKS * STEPS - 1)
        scale = _weighted_scale(ahead, token, ids, weights, h_scale, block_scales, BLOCKS, STEPS, PICKS)
    value = tl.sum(total, 1 if SWAP else 0)  # of the first row; the others are zeros
    tl.store(out + token * HIDDEN + column, value.to(out.dtype.element_ty))
