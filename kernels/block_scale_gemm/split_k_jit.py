"""Triton sources of split-K block-scale GEMM: sum a part of K per program, then add the parts up."""

import triton
import triton.language as tl

from kernels.fp8_jit import widen


@triton.jit
def gemm_kernel(
    a,  # FP8 [M, K]; with FNUZ_BITS, here and in b, uint8 that holds the bits of e4m3fnuz
    a_scale,  # fp32 [ceil(K / BLOCK_K), M]: the scales that a program takes at once lie side by side
    b,  # FP8 [N, K]
    b_scale,  # fp32 [ceil(N / SCALE_N), ceil(K / BLOCK_K)]
    out,  # bf16 [M, N]; with several splits fp32 [splits, M, N], the parts
    M,
    N,
    K,
    per_split,  # blocks of K; every split has at least one
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides SCALE_N
    BLOCK_K: tl.constexpr,  # that share a scale
    SCALE_N: tl.constexpr,  # rows of b that share a scale
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,  # whether BLOCK_K divides K
    SWAP: tl.constexpr,  # computes the transposed tile: matrix instructions that want 64 rows get those of b
    PRODUCT: tl.constexpr,  # what tl.dot takes: the FP8 format, or fp32 in the interpreter
    FNUZ_BITS: tl.constexpr,
):
    """One program: BLOCK_M x BLOCK_N of the output over one split of K. Grid (tiles, splits).

    Tiles go down GROUP_M of M before the next of N, so that those that run together share rows of both.
    Each block of 128 products is summed by itself, then scaled and added in fp32: tensor cores keep fewer
    bits in their own sums (DeepSeek-V3 technical report, section 3.3.2).
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    in_group = tile % (GROUP_M * tiles_n)
    tile_m, tile_n = first_m + in_group % group_m, in_group // group_m

    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last one again, which is never stored: no load but K's rest needs a mask.
    m_read, n_read = tl.minimum(m, M - 1), tl.minimum(n, N - 1)
    a_rows = a + m_read.to(tl.int64)[:, None] * K + k[None, :]
    b_rows = b + n_read.to(tl.int64)[:, None] * K + k[None, :]
    blocks = tl.cdiv(K, BLOCK_K)
    b_scales = b_scale + tile_n * BLOCK_N // SCALE_N * blocks

    total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    first = split * per_split
    for block in range(first, tl.minimum(first + per_split, blocks)):
        if EVEN_K:
            a_codes = tl.load(a_rows + block * BLOCK_K)
            b_codes = tl.load(b_rows + block * BLOCK_K)
        else:
            inside = k[None, :] < K - block * BLOCK_K
            a_codes = tl.load(a_rows + block * BLOCK_K, mask=inside, other=0.0)
            b_codes = tl.load(b_rows + block * BLOCK_K, mask=inside, other=0.0)
        scale = tl.load(a_scale + block * M + m_read) * tl.load(b_scales + block)
        a_values = widen(a_codes, PRODUCT, FNUZ_BITS)
        b_values = widen(b_codes, PRODUCT, FNUZ_BITS)
        if SWAP:
            total += tl.dot(b_values, tl.trans(a_values)) * scale[None, :]
        else:
            total += tl.dot(a_values, tl.trans(b_values)) * scale[:, None]

    if SWAP:
        total = tl.trans(total)
    stored = (m < M)[:, None] & (n < N)[None, :]
    at = (split.to(tl.int64) * M + m)[:, None] * N + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def sum_kernel(
    parts,  # fp32 [SPLITS, values]
    out,  # bf16 [values]
    values,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK values. The parts are added in order, so that equal inputs give equal bits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < values
    total = tl.load(parts + at, mask=inside, other=0.0)
    for _ in tl.static_range(1, SPLITS):
        parts += values
        total += tl.load(parts + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
