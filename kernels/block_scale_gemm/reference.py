"""Reference of a block-scale GEMM, and the error that rounding alone explains."""

from __future__ import annotations

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.formats import BLOCK, dequantise_activations, dequantise_weights, fp8_format, rounding_deviation
from kernels.lazy import torch
from kernels.op import Reference, affordable, spread

UNIT = 2.0**-9
"""The relative error of rounding to bf16 as a root mean square over many values; the largest is 2^-8."""

REFERENCE_COLUMNS = 8 * BLOCK
"""Columns of the output that are computed at a time: their dequantised weights take 30 to 75 MB."""

REFERENCE_ROWS = 16384
"""Rows of the activations that are read at a time: 470 MB in fp32 at K = 7168, three times."""


def reference(
    operands: BlockScaleGemmOperands, max_flops: float = float("inf"), offset: float = 0.0
) -> Reference:
    """The reference from fp32 products of the operands, which in `with_quant` are the bf16 activations.

    Rows of a and of b are divided by powers of two that bring them near 1, so that no square overflows. A sum
    in fp32 errs by about sqrt(K) 2^-24 of the size of its products, which is a hundredth of a sigma at
    K = 18432. Above `max_flops` or MOST_ELEMENTS it computes the first row, the last row, and as many others
    as fit, spread evenly.

    sigma: a right kernel sums exact products in fp32 and rounds the output to bf16, which adds 2^-9 |out| per
    element. It may also round the dequantised weights to bf16 before the product, and the activations
    if it did not get them in bf16: each adds 2^-9 sqrt(sum_k (a b)^2). The error of tensor cores that keep 14
    bits in sums of 128 products, and fp32 between these sums, is far smaller than that.

    sigma_fp8: where a call quantises the activations, their rounding (d of formats.rounding_deviation) adds
    sqrt(sum_k (d b)^2). d is for power-of-two scales, with which it is the largest of all schemes in use.
    """
    is_core = operands.a is None
    m, n, device = operands.sizes.m, operands.sizes.n, operands.b_q.device
    products = 2 if is_core else 3  # of values, of their squares, and in with_quant of deviations
    row_flops = 2 * products * operands.b_q.numel()
    rows = affordable([0, m - 1, *spread(m, offset)], lambda row: row_flops, max_flops, n)
    row_numbers = torch.arange(m) if rows is None else torch.tensor(rows)
    value = torch.empty(len(row_numbers), n, dtype=torch.float32, device=device)
    sigma = torch.empty_like(value)
    sigma_fp8 = None if is_core else torch.empty_like(value)
    rounded_operands = 2 if is_core else 1
    for first_row in range(0, len(row_numbers), REFERENCE_ROWS):
        result_rows = slice(first_row, first_row + REFERENCE_ROWS)
        a_rows = row_numbers[result_rows].to(device)
        if is_core:
            a = dequantise_activations(operands.a_q[a_rows], operands.a_scale[a_rows])
        else:
            a = operands.a[a_rows].float()
        a, a_exponent = _near_one(a)
        a_variance = None if is_core else rounding_deviation(a, fp8_format(operands.sizes.fp8)).square_()
        a_squared = a.square()
        for first in range(0, n, REFERENCE_COLUMNS):
            columns = slice(first, first + REFERENCE_COLUMNS)
            scale = operands.b_scale[first // BLOCK : (first + REFERENCE_COLUMNS) // BLOCK]
            b, b_exponent = _near_one(dequantise_weights(operands.b_q[columns], scale))
            exponent = a_exponent + b_exponent.T
            out = a @ b.T
            b_squared = b.square_()
            squared_products = a_squared @ b_squared.T
            variance = UNIT**2 * (out.square() + rounded_operands * squared_products)
            value[result_rows, columns] = torch.ldexp(out, exponent)
            sigma[result_rows, columns] = torch.ldexp(variance.sqrt(), exponent)
            if sigma_fp8 is not None and a_variance is not None:
                # A kernel may also dequantise the activations to bf16 after it rounded them to FP8.
                variance += UNIT**2 * squared_products + a_variance @ b_squared.T
                sigma_fp8[result_rows, columns] = torch.ldexp(variance.sqrt(), exponent)
    return Reference(value, sigma, rows, sigma_fp8)


def _near_one(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides each row of x fp32 [rows, K], in place, by the power of two that brings its largest magnitude
    into [0.5, 1). Returns x and the exponents [rows, 1]."""
    largest = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
    exponent = torch.frexp(largest).exponent
    # In two steps, because 2^127 is the largest power that fp32 holds.
    first_exponent = exponent // 2
    for step_exponent in (first_exponent, exponent - first_exponent):
        x.mul_(torch.ldexp(torch.ones_like(largest), -step_exponent))
    return x, exponent
