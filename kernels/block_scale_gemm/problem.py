"""Block-scale GEMM: the linear layers of DeepSeek-V3 and R1 in FP8 with block scales.

    out[M, N] = dequantised a [M, K] @ dequantised b [N, K]^T

a has a scale for each 1x128 block, b for each 128x128 block (DeepSeek-V3 technical report, arXiv:2412.19437,
section 3.3.2; kernels/formats.py). N and K may end in a partial block. In the boundary `core` a call gets a
quantised; in `with_quant` it gets bf16 activations, which it may quantise (W8A8) or not (W8A16).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

from kernels.block_scale_gemm.generate import generate
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes
from kernels.formats import (
    BLOCK,
    dequantise_activations,
    dequantise_weights,
    fp8_format,
    known_scales,
    rounding_deviation,
)
from kernels.lazy import torch
from kernels.op import Op, Reference, Tolerance, Work, affordable, rows_kept, spread
from kernels.quantise import quantiser

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
    order = [0, operands.m - 1, *spread(operands.m, offset)]
    rows = affordable(order, lambda row: row_flops, max_flops, len(operands.b_q))
    fmt = fp8_format(str(operands.b_q.dtype).removeprefix("torch.float8_"))

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


class BlockScaleGemm(Op):
    name = "block_scale_gemm"
    Sizes = BlockScaleGemmSizes
    boundaries = ("core", "with_quant")
    baseline: ClassVar = dict.fromkeys(("cpu", "cuda", "rocm"), "torch.bf16")
    engine_like = "triton.split_k"  # the dequantised weights of a whole rank fit on no device
    axes = ("row", "column")
    sums = True
    operands = staticmethod(generate)
    reference = staticmethod(reference)

    def work(self, sizes: BlockScaleGemmSizes, boundary: str = "core") -> Work:
        """2 * m * n * k flops. The activations, the weights with their scales, and the output are moved once.
        The dtype is FP8 in with_quant too, because the call may quantise the activations itself."""
        activations = sizes.quantised_bytes if boundary == "core" else 2 * sizes.m * sizes.k
        return Work(
            2.0 * sizes.m * sizes.n * sizes.k,
            float(activations + self.streamed_bytes(sizes) + self.output_bytes(sizes)),
            "fp8",
        )

    def operand_bytes(self, sizes: BlockScaleGemmSizes) -> int:
        return 2 * sizes.m * sizes.k + sizes.quantised_bytes + self.streamed_bytes(sizes)

    def narrowed_bytes(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.quantised_bytes

    def output_shape(self, sizes: BlockScaleGemmSizes) -> tuple[int, ...]:
        return sizes.m, sizes.n

    def streamed_bytes(self, sizes: BlockScaleGemmSizes, turns: int = 1) -> int:
        return turns * (sizes.n * sizes.k + 4 * sizes.n_blocks * sizes.k_blocks)

    def reference_bytes(self, sizes: BlockScaleGemmSizes) -> int:
        """In fp32: three results; the activations of REFERENCE_ROWS rows with their squares and deviations;
        the weights of REFERENCE_COLUMNS columns, and the intermediate results for these rows and columns."""
        rows = rows_kept(sizes.m, sizes.n)
        some, columns = min(rows, REFERENCE_ROWS), min(sizes.n, REFERENCE_COLUMNS)
        return 4 * (rows * 3 * sizes.n + some * (3 * sizes.k + 6 * columns) + 3 * columns * sizes.k)

    def empty_operands(self, sizes: BlockScaleGemmSizes, device: str) -> BlockScaleGemmOperands:
        return BlockScaleGemmOperands(
            b_q=torch.empty(sizes.n, sizes.k, dtype=fp8_format(sizes.fp8).dtype, device=device),
            b_scale=torch.empty(sizes.n_blocks, sizes.k_blocks, device=device),
            scales=known_scales(sizes.scales),
            sizes=sizes,
            a=torch.empty(sizes.m, sizes.k, dtype=torch.bfloat16, device=device),
            boundary="with_quant",
        )

    def step(self, operands: BlockScaleGemmOperands, into: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        if operands.a is None:
            return super().step(operands, into)
        return quantiser(operands.a, into["a_q"], into["a_scale"], operands.scales)

    def tolerance(self, sizes: BlockScaleGemmSizes) -> Tolerance:
        """A segment has 128 columns, because that is what one block of weights can spoil. It has a few less
        where the last one would otherwise be narrower than 32.

        A kernel with exactly the roundings of `reference` has a row error of at most 1 sigma. The worst
        segments of 60 random cases (its right_arithmetic.py) were: 0.9 with exact operands; 1.2 with both
        rounded to bf16; 1.7 where one product makes a whole row, because then all columns share its rounding.
        The root mean square of fewer columns varies more, hence 8/sqrt(columns) below 16. The limit 2 passes
        those and little more: one lost block of K reaches 3 times the limit of 56 blocks, and 1.9 times of
        144 (k = 18432); sums in bf16 over 2048 products reach 6 times.

        Where activations may be rounded to FP8, sigma is about 10 times as large. Wrong scales of a tile then
        reach 6 times the limit, and those of one block of 56 do not reach it: `core` finds them. Over the
        whole output right calls err by 0.55 to 0.73 sigma, and calls in e5m2 by 1.12 to 1.58 (mistakes.py).
        """
        columns = BLOCK
        if sizes.n < BLOCK or 0 < sizes.n % BLOCK < 32:
            columns = math.ceil(sizes.n / sizes.n_blocks)
        return Tolerance(row=max(2.0, 8.0 / columns**0.5), element=10.0, segment=columns, noise=0.95)
