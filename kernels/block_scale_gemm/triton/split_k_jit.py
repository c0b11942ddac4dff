"""Triton sources of block-scale GEMM: tiles of the output, with K split between programs where tiles are few.

Equal inputs give equal bits. A program adds up its blocks of K in order, and the parts of split sums are
added in the order of K, whichever program is last. The number of parts depends on the configuration and on
the number of compute units.
"""

import triton
import triton.language as tl

from kernels import formats
from kernels.fp8_jit import widen

BLOCK = tl.constexpr(formats.BLOCK)  # a scale of a has so many values of K; one of b so many of K and of N
GROUP_M = tl.constexpr(8)  # tiles along M that are computed before the next tile along N


@triton.jit
def gemm_kernel(
    a,  # FP8 [M, K], or a descriptor of it; with FNUZ_BITS uint8 that holds the bits of e4m3fnuz
    a_scale,  # fp32 [ceil(K / BLOCK), M]: the scales that a program loads at once are adjacent
    b,  # [N, K], in the form of a
    b_scale,  # fp32 [ceil(N / BLOCK), ceil(K / BLOCK)]
    out,  # bf16 [M, N]
    parts,  # fp32 [splits, M, N], unless SUMS is "whole"
    arrived,  # int32 [tiles], used where SUMS is "last"; zeros before a call and after it
    M, N, K, splits,
    per_split,  # blocks of K of a split; the last split may have fewer, but at least one
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides BLOCK
    DIES: tl.constexpr,  # the dies of the GPU, each with an L2 cache of its own; programs go to them in turn
    SUMS: tl.constexpr,  # "whole": K is not split; else what adds up parts, as SplitKConfig.sums
    HALVES: tl.constexpr,  # whether a step is two products of half the rows, one after the other
    PERSISTENT: tl.constexpr,  # whether a program computes several tiles, one after the other
    TMA: tl.constexpr,  # whether a and b are descriptors
    EVEN_K: tl.constexpr,  # whether loads need no mask: BLOCK divides K, or descriptors end at K
    SWAP: tl.constexpr,  # whether the transposed tile is computed: rows of b fill instructions of 64 rows
    PRODUCT: tl.constexpr,  # the type that tl.dot takes: the FP8 format, or fp32 in the interpreter
    FNUZ_BITS: tl.constexpr,  # whether a and b are uint8
):  # fmt: skip
    """Grid: one program for each tile and split, or fewer if PERSISTENT.

    The splits of a tile follow each other. GROUP_M tiles along M come before the next tile along N, so that
    tiles that run at the same time share rows of a and b. The tiles of one die are neighbours.
    """
    units = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N) * splits
    if PERSISTENT:
        for number in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=True):
            _unit(
                number, units, a, a_scale, b, b_scale, out, parts, arrived, M, N, K, splits, per_split,
                BLOCK_M, BLOCK_N, DIES, SUMS, HALVES, TMA, EVEN_K, SWAP, PRODUCT, FNUZ_BITS,
            )  # fmt: skip
    else:
        _unit(
            tl.program_id(0), units, a, a_scale, b, b_scale, out, parts, arrived, M, N, K, splits, per_split,
            BLOCK_M, BLOCK_N, DIES, SUMS, HALVES, TMA, EVEN_K, SWAP, PRODUCT, FNUZ_BITS,
        )  # fmt: skip


@triton.jit
def _unit(
    number, units, a, a_scale, b, b_scale, out, parts, arrived, M, N, K, splits, per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIES: tl.constexpr, SUMS: tl.constexpr,
    HALVES: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    PRODUCT: tl.constexpr, FNUZ_BITS: tl.constexpr,
):  # fmt: skip
    """Computes a unit of work, one of `units`: BLOCK_M x BLOCK_N of the output over one split of K.

    Each block of 128 products is summed by itself, and then scaled and added in fp32, because tensor cores
    keep fewer bits in their own sums (DeepSeek-V3 technical report, section 3.3.2).

    number: counts units in the order in which they start; `unit` counts them in the order of tiles and splits
    """
    ROWS: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    tiles_m, tiles_n, blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK)
    # Every DIES-th program is of the same die. These get units that follow each other.
    die = number % DIES
    unit = die * (units // DIES) + tl.minimum(die, units % DIES) + number // DIES
    tile, split = unit // splits, unit % splits
    first_tile_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_tile_m, GROUP_M)
    in_group = tile % (GROUP_M * tiles_n)
    at_m, at_n = (first_tile_m + in_group % group_m) * BLOCK_M, in_group // group_m * BLOCK_N
    low_m = at_m + ROWS  # the first row of the second half, if HALVES

    first = split * per_split
    end = tl.minimum(first + per_split, blocks)
    # Scales are loaded a step ahead, because Triton's pipeline holds only what products read.
    # Rows past the end read the last row again and are not stored.
    a_scale_at = a_scale + tl.minimum(at_m + tl.arange(0, ROWS), M - 1)
    b_scale_at = b_scale + at_n // BLOCK * blocks
    next_a_scale, next_b_scale = tl.load(a_scale_at + first.to(tl.int64) * M), tl.load(b_scale_at + first)
    total = tl.zeros([BLOCK_N, ROWS] if SWAP else [ROWS, BLOCK_N], tl.float32)
    if HALVES:
        low_scale_at = a_scale + tl.minimum(low_m + tl.arange(0, ROWS), M - 1)
        next_low_scale = tl.load(low_scale_at + first.to(tl.int64) * M)
        low_total = tl.zeros([ROWS, BLOCK_N], tl.float32)

    for block in range(first, end):
        rows_scale, block_scale = next_a_scale, next_b_scale
        ahead = tl.minimum(block + 1, end - 1)
        next_a_scale, next_b_scale = tl.load(a_scale_at + ahead.to(tl.int64) * M), tl.load(b_scale_at + ahead)
        a_values = _codes(a, at_m, M, block, K, ROWS, TMA, EVEN_K, PRODUCT, FNUZ_BITS)
        b_values = _codes(b, at_n, N, block, K, BLOCK_N, TMA, EVEN_K, PRODUCT, FNUZ_BITS)
        if SWAP:
            total += tl.dot(b_values, tl.trans(a_values)) * (rows_scale * block_scale)[None, :]
        else:
            total += tl.dot(a_values, tl.trans(b_values)) * (rows_scale * block_scale)[:, None]
        if HALVES:
            if PRODUCT != tl.float32:
                # Volatile assembly without instructions makes the compiler finish `total` here. Otherwise it
                # might start the second product before, and need registers for both.
                total = tl.inline_asm_elementwise("", "=r,0", [total], tl.float32, is_pure=False, pack=1)
            a_values = _codes(a, low_m, M, block, K, ROWS, TMA, EVEN_K, PRODUCT, FNUZ_BITS)
            low_total += tl.dot(a_values, tl.trans(b_values)) * (next_low_scale * block_scale)[:, None]
            next_low_scale = tl.load(low_scale_at + ahead.to(tl.int64) * M)

    if SWAP:
        total = tl.trans(total)
    _store(total, at_m, at_n, split, out, parts, M, N, SUMS)
    if HALVES:
        _store(low_total, low_m, at_n, split, out, parts, M, N, SUMS)
    if SUMS == "last":
        # All stores of a program end before it is counted.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            _add_up(at_m, at_n, splits, out, parts, M, N, BLOCK_M, BLOCK_N)
            tl.store(arrived + tile, 0)


@triton.jit
def _codes(
    x,  # a or b: [rows, K]
    at,  # the first row to load
    rows,  # M or N
    block,  # the block of K to load
    K, ROWS: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, PRODUCT: tl.constexpr,
    FNUZ_BITS: tl.constexpr,
):  # fmt: skip
    """A tile [ROWS, BLOCK] of x in the type that tl.dot takes; zeros past K. Without descriptors, rows past
    the end are the last row again."""
    if TMA:
        codes = x.load([at, block * BLOCK])
    else:
        # The offset of the tile may exceed 2^31; the offsets in the tile do not.
        at = tl.minimum(at, rows - 1)
        row, k = tl.minimum(tl.arange(0, ROWS), rows - 1 - at), tl.arange(0, BLOCK)
        start, in_tile = x + at.to(tl.int64) * K + block * BLOCK, row[:, None] * K + k[None, :]
        if EVEN_K:
            codes = tl.load(start + in_tile)
        else:
            codes = tl.load(start + in_tile, mask=k[None, :] < K - block * BLOCK, other=0.0)
    return widen(codes, PRODUCT, FNUZ_BITS)


@triton.jit
def _store(total, at_m, at_n, split, out, parts, M, N, SUMS: tl.constexpr):
    """Stores a tile from row at_m and column at_n, as output, or where K is split as the part of a split."""
    m, n = tl.arange(0, total.shape[0]), tl.arange(0, total.shape[1])
    inside = (m < M - at_m)[:, None] & (n < N - at_n)[None, :]
    start, in_tile = at_m.to(tl.int64) * N + at_n, m[:, None] * N + n[None, :]
    if SUMS == "whole":
        tl.store(out + start + in_tile, total.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(parts + split.to(tl.int64) * M * N + start + in_tile, total, mask=inside)


@triton.jit
def _add_up(at_m, at_n, splits, out, parts, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Adds up the parts of a tile in order. Loads skip the L1 cache, which does not see others' stores."""
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (m < M - at_m)[:, None] & (n < N - at_n)[None, :]
    start, in_tile = at_m.to(tl.int64) * N + at_n, m[:, None] * N + n[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    parts += start
    for _ in tl.range(0, splits, loop_unroll_factor=4):
        total += tl.load(parts + in_tile, mask=inside, other=0.0, cache_modifier=".cg")
        parts += tl.cast(M, tl.int64) * N
    tl.store(out + start + in_tile, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(
    parts,  # fp32 [splits, values]
    out,  # bf16 [values]
    values, splits, VALUES: tl.constexpr,
):  # fmt: skip
    """Each program computes VALUES values and adds their parts in order."""
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    inside = at < values
    total = tl.zeros([VALUES], tl.float32)
    for _ in tl.range(0, splits, loop_unroll_factor=4):
        total += tl.load(parts + at, mask=inside, other=0.0)
        parts += values
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
