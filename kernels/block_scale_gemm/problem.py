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

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes, generate
from kernels.block_scale_gemm.reference import REFERENCE_COLUMNS, REFERENCE_ROWS, reference
from kernels.formats import BLOCK, fp8_format, known_scales
from kernels.lazy import torch
from kernels.op import Op, Tolerance, Work, rows_kept
from kernels.quantise import quantiser


class BlockScaleGemm(Op):
    name = "block_scale_gemm"
    Sizes = BlockScaleGemmSizes
    boundaries = ("core", "with_quant")
    baseline: ClassVar = dict.fromkeys(("cpu", "cuda", "rocm"), "torch.bf16")
    engine_like = "triton.split_k"  # not torch.bf16: a whole rank's weights in bf16 fit on no device
    axes = ("row", "column")
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
        """Those of `core`, with a in bf16, from which its a_q is made."""
        return 2 * sizes.m * sizes.k + sizes.quantised_bytes + self.streamed_bytes(sizes)

    def narrowed_bytes(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.quantised_bytes

    def output_shape(self, sizes: BlockScaleGemmSizes) -> tuple[int, ...]:
        return sizes.m, sizes.n

    def streamed_bytes(self, sizes: BlockScaleGemmSizes, turns: int = 1) -> int:
        return turns * (sizes.n * sizes.k + 4 * sizes.n_blocks * sizes.k_blocks)

    def reference_bytes(self, sizes: BlockScaleGemmSizes) -> int:
        """In fp32: three results; the activations of REFERENCE_ROWS rows with their squares and deviations;
        REFERENCE_COLUMNS columns of weights, three times; and six intermediate results of this size."""
        rows = rows_kept(sizes.m, sizes.n)
        rows_at_once, columns_at_once = min(rows, REFERENCE_ROWS), min(sizes.n, REFERENCE_COLUMNS)
        activations, weights = 3 * rows_at_once * sizes.k, 3 * columns_at_once * sizes.k
        return 4 * (3 * rows * sizes.n + activations + weights + 6 * rows_at_once * columns_at_once)

    def empty_operands(self, sizes: BlockScaleGemmSizes, device: str) -> BlockScaleGemmOperands:
        return BlockScaleGemmOperands(
            b_q=torch.empty(sizes.n, sizes.k, dtype=fp8_format(sizes.fp8).dtype, device=device),
            b_scale=torch.empty(sizes.n_blocks, sizes.k_blocks, device=device),
            sizes=sizes,
            a=torch.empty(sizes.m, sizes.k, dtype=torch.bfloat16, device=device),
            boundary="with_quant",
        )

    def step(self, operands: BlockScaleGemmOperands, into: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        if operands.a is None:
            return super().step(operands, into)
        return quantiser(operands.a, into["a_q"], into["a_scale"], known_scales(operands.sizes.scales))

    def tolerance(self, sizes: BlockScaleGemmSizes) -> Tolerance:
        """A segment has the 128 columns that one block of weights can spoil. Where the last segment would be
        narrower than 32, segments are a little narrower, so that all are equally wide.

        A kernel with exactly the roundings of `reference` has a row error of at most 1 sigma. The worst
        segments of 60 random cases (tests/kernels/block_scale_gemm/right_arithmetic.py) had errors of 0.9
        sigma with exact operands; of 1.2 with both rounded to bf16; and of 1.7 where one product dominates a
        row, because then all columns share its rounding. The limit is 2, and 8/sqrt(columns) below 16
        columns, because the root mean square of fewer columns varies more.

        A kernel that loses one block of K has an error of 3 times the limit at 56 blocks, and of 1.9 times at
        144 (k = 18432). Sums in bf16 over 2048 products have an error of 6 times the limit.

        Where activations may be rounded to FP8, sigma is about 10 times as large. Wrong scales of a tile then
        give 6 times the limit. Those of one block of 56 stay below it, so that only `core` finds them. The
        root mean square over whole outputs is 0.55 to 0.73 sigma in right calls, and 1.12 to 1.58 in calls
        that round to e5m2 (mistakes.py).
        """
        columns = BLOCK
        if sizes.n < BLOCK or 0 < sizes.n % BLOCK < 32:
            columns = math.ceil(sizes.n / sizes.n_blocks)
        return Tolerance(row=max(2.0, 8.0 / columns**0.5), element=10.0, segment=columns, noise=0.95)
