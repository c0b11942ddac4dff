"""Triton source of the kernel that quantises activations in 1x128 blocks."""

import triton
import triton.language as tl


@triton.jit
def quantise_kernel(
    x,  # bf16 [rows, columns]; fp32 in the interpreter, whose conversions are not exact
    q,  # FP8 [rows, columns]; fp32 in the interpreter
    scale,  # fp32 [rows, ceil(columns / BLOCK)]
    rows,
    columns,
    x_row,  # strides in elements, here and below
    x_column,
    q_row,
    q_column,
    scale_row,
    scale_column,
    LARGEST: tl.constexpr,  # the largest finite value of the format
    SMALLEST_SCALE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,  # whether scales are rounded up to powers of two
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A program quantises one block of columns of BLOCK_M rows. Grid: (row blocks, column blocks).

    The result has the bits of kernels.formats. So both divisions must round correctly, which `div_rn` does
    and `/` need not do.
    """
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    block = tl.program_id(1)
    column = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]

    x_at = x + row[:, None] * x_row + column[None, :] * x_column
    value = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(value), axis=1)
    block_scale = tl.maximum(tl.div_rn(amax, tl.full([BLOCK_M], LARGEST, tl.float32)), SMALLEST_SCALE)
    if POWER_OF_TWO:  # rounds up, as block_scale of kernels.formats does
        bits = (block_scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        block_scale = bits.to(tl.float32, bitcast=True)
    quotient = tl.div_rn(value, tl.broadcast_to(block_scale[:, None], [BLOCK_M, BLOCK]))

    tl.store(scale + row * scale_row + block * scale_column, block_scale, mask=row < rows)
    q_at = q + row[:, None] * q_row + column[None, :] * q_column
    tl.store(q_at, quotient.to(q.dtype.element_ty), mask=inside)
