"""Triton sources of block-scale GEMM: tiles of the output, with K split between programs where tiles are few.

Equal inputs give equal bits. A program adds up its blocks of K in order, and the parts of split sums are
added in the order of K, whichever program is last. The number of parts depends on the configuration and on
the number of compute units.
"""

import triton
import triton.language as tl

from kernels import formats
from kernels.fp8_jit import widen

BLOCK = tl.constexpr(formats.BLOCK)  # values of K that share a scale in a row of a; in b, for as many rows
GROUP_M = tl.constexpr(8)


@triton.jit
def gemm_kernel(
    a,  # FP8 [M, K], or a descriptor of it; with FNUZ_BITS uint8, the bits of e4m3fnuz; so is b
    a_scale,  # fp32 [ceil(K / BLOCK), M]: the scales that a program loads at once are adjacent
    b,  # FP8 [N, K], or a descriptor of it
    b_scale,  # fp32 [ceil(N / BLOCK), ceil(K / BLOCK)]
    out,  # bf16 [M, N]
    parts,  # fp32 [splits, M, N], unless SUMS is "whole"
    arrived,  # int32 [tiles], used where SUMS is "last"; zeros before a call and after it
    M,
    N,
    K,
    splits,
    per_split,  # blocks of K; every split has at least one
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides BLOCK
    DIES: tl.constexpr,  # each has an L2 cache of its own, and programs go to them in turn
    SUMS: tl.constexpr,  # "whole"; or parts that the "last" program of a tile adds up, or sum_kernel "later"
    HALVES: tl.constexpr,  # a step is two products of half the rows, one after the other
    PERSISTENT: tl.constexpr,  # whether a program computes several tiles, one after the other
    TMA: tl.constexpr,  # whether a and b are descriptors
    EVEN_K: tl.constexpr,  # whether loads need no mask: BLOCK divides K, or descriptors end at K
    SWAP: tl.constexpr,  # computes the transposed tile, where instructions need 64 rows: they get rows of b
    PRODUCT: tl.constexpr,  # the type that tl.dot takes: the FP8 format, or fp32 in the interpreter
    FNUZ_BITS: tl.constexpr,
):
    """Grid: one program for each tile and split, or fewer if PERSISTENT.

    The splits of a tile follow each other. Tiles go down GROUP_M steps of M before the next step of N, so
    that tiles that run at the same time share rows of a and b, and the tiles of one die are neighbours.
    """
    units = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N) * splits
    if PERSISTENT:
        for place in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=True):
            _unit(
                place, units, a, a_scale, b, b_scale, out, parts, arrived, M, N, K, splits, per_split,
                BLOCK_M, BLOCK_N, DIES, SUMS, HALVES, TMA, EVEN_K, SWAP, PRODUCT, FNUZ_BITS,
            )  # fmt: skip
    else:
        _unit(
            tl.program_id(0), units, a, a_scale, b, b_scale, out, parts, arrived, M, N, K, splits, per_split,
            BLOCK_M, BLOCK_N, DIES, SUMS, HALVES, TMA, EVEN_K, SWAP, PRODUCT, FNUZ_BITS,
        )  # fmt: skip


@triton.jit
def _unit(
    place, units, a, a_scale, b, b_scale, out, parts, arrived, M, N, K, splits, per_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIES: tl.constexpr, SUMS: tl.constexpr,
    HALVES: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    PRODUCT: tl.constexpr, FNUZ_BITS: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_M x BLOCK_N of the output over one split of K.

    Each block of 128 products is summed by itself, and then scaled and added in fp32, because tensor cores
    keep fewer bits in their own sums (DeepSeek-V3 technical report, section 3.3.2).
    """
    ROWS: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
    tiles_m, tiles_n, blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK)
    # The programs of a die, which are every DIES-th, get units that follow each other.
    die = place % DIES
    unit = die * (units // DIES) + tl.minimum(die, units % DIES) + place // DIES
    tile, split = unit // splits, unit % splits
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    in_group = tile % (GROUP_M * tiles_n)
    at_m, at_n = (first_m + in_group % group_m) * BLOCK_M, in_group // group_m * BLOCK_N
    low_m = at_m + ROWS

    first = split * per_split
    last = tl.minimum(first + per_split, blocks)
    # Scales are loaded a step ahead, because Triton's pipeline holds only what products read.
    # Rows past the end read the last row again and are not stored.
    a_scales = a_scale + tl.minimum(at_m + tl.arange(0, ROWS), M - 1)
    b_scales = b_scale + at_n // BLOCK * blocks
    next_rows, next_block = tl.load(a_scales + first.to(tl.int64) * M), tl.load(b_scales + first)
    total = tl.zeros([BLOCK_N, ROWS] if SWAP else [ROWS, BLOCK_N], tl.float32)
    if HALVES:
        low_scales = a_scale + tl.minimum(low_m + tl.arange(0, ROWS), M - 1)
        next_low = tl.load(low_scales + first.to(tl.int64) * M)
        low = tl.zeros([ROWS, BLOCK_N], tl.float32)

    for block in range(first, last):
        rows, scale = next_rows, next_block
        ahead = tl.minimum(block + 1, last - 1)
        next_rows, next_block = tl.load(a_scales + ahead.to(tl.int64) * M), tl.load(b_scales + ahead)
        a_values = _codes(a, at_m, M, block, K, ROWS, TMA, EVEN_K, PRODUCT, FNUZ_BITS)
        b_values = _codes(b, at_n, N, block, K, BLOCK_N, TMA, EVEN_K, PRODUCT, FNUZ_BITS)
        if SWAP:
            total += tl.dot(b_values, tl.trans(a_values)) * (rows * scale)[None, :]
        else:
            total += tl.dot(a_values, tl.trans(b_values)) * (rows * scale)[:, None]
        if HALVES:
            if PRODUCT != tl.float32:
                # Volatile, so that it is computed here: later it would need the registers of both products.
                total = tl.inline_asm_elementwise("", "=r,0", [total], tl.float32, is_pure=False, pack=1)
            a_values = _codes(a, low_m, M, block, K, ROWS, TMA, EVEN_K, PRODUCT, FNUZ_BITS)
            low += tl.dot(a_values, tl.trans(b_values)) * (next_low * scale)[:, None]
            next_low = tl.load(low_scales + ahead.to(tl.int64) * M)

    if SWAP:
        total = tl.trans(total)
    _store(total, at_m, at_n, split, out, parts, M, N, SUMS)
    if HALVES:
        _store(low, low_m, at_n, split, out, parts, M, N, SUMS)
    if SUMS == "last":
        # All stores of a program come before it is counted.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            _add_up(at_m, at_n, splits, out, parts, M, N, BLOCK_M, BLOCK_N)
            tl.store(arrived + tile, 0)


@triton.jit
def _codes(
    x,  # [rows, K]
    at,
    rows,
    block,
    K,
    ROWS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRODUCT: tl.constexpr,
    FNUZ_BITS: tl.constexpr,
):
    """[ROWS, BLOCK] of x from row `at`, in the type that tl.dot takes; zeros past K."""
    if TMA:
        codes = x.load([at, block * BLOCK])
    else:
        # The offset of the rows may exceed 2^31; the offsets within them do not.
        at = tl.minimum(at, rows - 1)
        row, k = tl.minimum(tl.arange(0, ROWS), rows - 1 - at), tl.arange(0, BLOCK)
        start, within = x + at.to(tl.int64) * K + block * BLOCK, row[:, None] * K + k[None, :]
        if EVEN_K:
            codes = tl.load(start + within)
        else:
            codes = tl.load(start + within, mask=k[None, :] < K - block * BLOCK, other=0.0)
    return widen(codes, PRODUCT, FNUZ_BITS)


@triton.jit
def _store(total, at_m, at_n, split, out, parts, M, N, SUMS: tl.constexpr):
    m, n = tl.arange(0, total.shape[0]), tl.arange(0, total.shape[1])
    inside = (m < M - at_m)[:, None] & (n < N - at_n)[None, :]
    start, within = at_m.to(tl.int64) * N + at_n, m[:, None] * N + n[None, :]
    if SUMS == "whole":
        tl.store(out + start + within, total.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(parts + split.to(tl.int64) * M * N + start + within, total, mask=inside)


@triton.jit
def _add_up(at_m, at_n, splits, out, parts, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Adds up the parts of a tile in order. The loads skip the first-level cache, which does not see the
    stores of other programs."""
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (m < M - at_m)[:, None] & (n < N - at_n)[None, :]
    start, within = at_m.to(tl.int64) * N + at_n, m[:, None] * N + n[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    parts += start
    for _ in tl.range(0, splits, loop_unroll_factor=4):
        total += tl.load(parts + within, mask=inside, other=0.0, cache_modifier=".cg")
        parts += tl.cast(M, tl.int64) * N
    tl.store(out + start + within, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(
    parts,  # fp32 [splits, values]
    out,  # bf16 [values]
    values,
    splits,
    VALUES: tl.constexpr,
):
    """Each program computes VALUES values and adds their parts in order."""
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    inside = at < values
    total = tl.zeros([VALUES], tl.float32)
    for _ in tl.range(0, splits, loop_unroll_factor=4):
        total += tl.load(parts + at, mask=inside, other=0.0)
        parts += values
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
