"""Reference of a block-scale GEMM, and the error that rounding alone explains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.formats import (
    BLOCK,
    Fp8Format,
    dequantise_activations,
    dequantise_weights,
    fp8_format,
    rounding_deviation,
)
from kernels.op import MOST_ELEMENTS, Reference, affordable, spread

if TYPE_CHECKING:
    import torch


UNIT = 2.0**-9
"""Root mean square of rounding to bf16, relative: 2^-8 at most, spread over the mantissas."""


REFERENCE_COLUMNS = 8 * BLOCK
"""Of the output at a time: dequantised weights of 30 to 75 MB."""

REFERENCE_ROWS = 16384
"""Of the activations at a time: in fp32 470 MB at K = 7168, of which there are three."""


def reference(
    operands: BlockScaleGemmOperands, max_flops: float = float("inf"), offset: float = 0.0
) -> Reference:
    """fp32 products of the operands as they are, `with_quant` of the bf16 activations; rows and columns
    brought near 1 by powers of two first, so that no square overflows. Sums of fp32 err by about
    sqrt(K) 2^-24 of the products' size: a hundredth of a sigma at K = 18432.

    Above `max_flops` and MOST_ELEMENTS it takes the first row, the last, and others spread evenly, as many as
    fit.

    sigma: a right kernel sums exact products in fp32 and rounds the output to bf16, which adds
    2^-9 |out| per element. It may also have rounded the dequantised weights to bf16 before, and those
    of the activations that it did not get in bf16: 2^-9 sqrt(sum_k (a b)^2) each. Tensor cores that
    keep 14 bits in the sums of 128 products and fp32 between them stay far below that.

    sigma_fp8: where activations are quantised, their rounding (formats.rounding_deviation d) adds
    sqrt(sum_k (d b)^2). d takes power-of-two scales, a bound for every scheme in use.
    """
    import torch

    rows = _sampled_rows(operands, max_flops, offset)
    core = operands.a is None

    n, blocks = operands.b_q.shape[0], REFERENCE_COLUMNS // BLOCK
    chosen = torch.arange(operands.m) if rows is None else torch.tensor(rows)
    shape, device = (len(chosen), n), operands.b_q.device
    value, sigma = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    sigma_fp8 = None if core else torch.empty_like(sigma)
    rounded_operands = 2 if core else 1
    for part in torch.arange(len(chosen)).split(REFERENCE_ROWS):
        at, into = chosen[part].to(device), slice(int(part[0]), int(part[-1]) + 1)
        a = dequantise_activations(operands.a_q[at], operands.a_scale[at]) if core else operands.a[at]
        a, a_exponent = _near_one(a.float())
        deviation = None if core else rounding_deviation(a, _format_of(operands.b_q)).square_()
        squares = a.square()
        for first in range(0, n, REFERENCE_COLUMNS):
            columns = slice(first, first + REFERENCE_COLUMNS)
            scale = operands.b_scale[first // BLOCK :][:blocks]
            b, b_exponent = _near_one(dequantise_weights(operands.b_q[columns], scale))
            exponent = a_exponent + b_exponent.T
            out = a @ b.T
            b.square_()
            products = squares @ b.T
            variance = UNIT**2 * (out.square() + rounded_operands * products)
            value[into, columns] = torch.ldexp(out, exponent)
            sigma[into, columns] = torch.ldexp(variance.sqrt(), exponent)
            if sigma_fp8 is not None and deviation is not None:
                # The activations rounded to FP8 may be dequantised to bf16 as well.
                variance += UNIT**2 * products + deviation @ b.T
                sigma_fp8[into, columns] = torch.ldexp(variance.sqrt(), exponent)
    return Reference(value, sigma, rows, sigma_fp8)


def _format_of(q: torch.Tensor) -> Fp8Format:
    return fp8_format(str(q.dtype).removeprefix("torch.float8_"))


def _near_one(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, K] fp32 in place over 2^exponent, so that the largest of each row lies in [0.5, 1); and the
    exponents [rows, 1]."""
    import torch

    largest = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
    exponent = torch.frexp(largest).exponent
    # In two steps: 2^127 is the largest power that fp32 holds.
    half = exponent // 2
    return x.mul_(torch.ldexp(torch.ones_like(largest), -half)).mul_(
        torch.ldexp(torch.ones_like(largest), half - exponent)
    ), exponent


def _sampled_rows(operands: BlockScaleGemmOperands, max_flops: float, offset: float) -> list[int] | None:
    n, k = operands.b_q.shape
    products = 2 if operands.a is None else 3
    count, row_flops = operands.m, 2 * products * n * k
    if count * row_flops <= max_flops and count * n <= MOST_ELEMENTS:
        return None
    order = [0, count - 1, *spread(count, offset)]
    return affordable(order, lambda row: row_flops, max_flops, n)
