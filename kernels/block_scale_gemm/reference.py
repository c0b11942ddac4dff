"""Reference of a block-scale GEMM, and the error that rounding alone explains."""

from __future__ import annotations

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.formats import BLOCK, dequantise_activations, dequantise_weights, fp8_format, rounding_deviation
from kernels.lazy import torch
from kernels.op import Reference, affordable, spread

UNIT = 2.0**-9
"""The relative root mean square error of rounding to bf16: at most 2^-8, spread over the mantissas."""

REFERENCE_COLUMNS = 8 * BLOCK
"""Columns of the output that are computed at a time: their dequantised weights take 30 to 75 MB."""

REFERENCE_ROWS = 16384
"""Rows of the activations that are read at a time: 470 MB in fp32 at K = 7168, three times."""


def reference(
    operands: BlockScaleGemmOperands, max_flops: float = float("inf"), offset: float = 0.0
) -> Reference:
    """fp32 products of the operands, in `with_quant` of the bf16 activations. Powers of two first bring rows
    and columns near 1, so that no square overflows. A sum in fp32 errs by about sqrt(K) 2^-24 of the size of
    its products, which is a hundredth of a sigma at K = 18432.

    Above `max_flops` and MOST_ELEMENTS it computes the first row, the last row, and as many others as fit,
    spread evenly.

    sigma: a right kernel sums exact products in fp32 and rounds the output to bf16, which adds 2^-9 |out| per
    element. It may also round the dequantised weights to bf16 before the product, and the activations
    if it did not get them in bf16: each adds 2^-9 sqrt(sum_k (a b)^2). Tensor cores that keep 14 bits in
    sums of 128 products, and fp32 between these, stay far below that.

    sigma_fp8: where a call quantises the activations, their rounding (d of formats.rounding_deviation) adds
    sqrt(sum_k (d b)^2). d assumes power-of-two scales, which bounds every scheme in use.
    """
    core = operands.a is None
    row_flops = 2 * (2 if core else 3) * operands.b_q.numel()
    order = [0, operands.sizes.m - 1, *spread(operands.sizes.m, offset)]
    rows = affordable(order, lambda row: row_flops, max_flops, len(operands.b_q))
    fmt, n, blocks = fp8_format(operands.sizes.fp8), len(operands.b_q), REFERENCE_COLUMNS // BLOCK
    chosen = torch.arange(operands.sizes.m) if rows is None else torch.tensor(rows)
    shape, device = (len(chosen), n), operands.b_q.device
    value, sigma = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    sigma_fp8 = None if core else torch.empty_like(sigma)
    rounded_operands = 2 if core else 1
    for part in torch.arange(len(chosen)).split(REFERENCE_ROWS):
        at, into = chosen[part].to(device), slice(int(part[0]), int(part[-1]) + 1)
        a = dequantise_activations(operands.a_q[at], operands.a_scale[at]) if core else operands.a[at]
        a, a_exponent = _near_one(a.float())
        deviation = None if core else rounding_deviation(a, fmt).square_()
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
                # A kernel may also dequantise the activations to bf16 after it rounded them to FP8.
                variance += UNIT**2 * products + deviation @ b.T
                sigma_fp8[into, columns] = torch.ldexp(variance.sqrt(), exponent)
    return Reference(value, sigma, rows, sigma_fp8)


def _near_one(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides each row of x fp32 [rows, K], in place, by the power of two that brings its largest magnitude
    into [0.5, 1). Returns x and the exponents [rows, 1]."""
    largest = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
    exponent = torch.frexp(largest).exponent
    # In two steps, because 2^127 is the largest power that fp32 holds.
    half = exponent // 2
    for step in (half, exponent - half):
        x.mul_(torch.ldexp(torch.ones_like(largest), -step))
    return x, exponent
