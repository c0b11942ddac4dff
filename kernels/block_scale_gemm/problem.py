"""Block-scale GEMM: the linear layers of DeepSeek-V3 and R1, FP8 with block scales.

    out[M, N] = dequantised a [M, K] @ dequantised b [N, K]^T

a is scaled by 1x128 blocks, b by 128x128 blocks (DeepSeek-V3 technical report, arXiv:2412.19437, section
3.3.2; kernels/formats.py); N and K may end in a partial block. Boundaries: `core` takes a quantised,
`with_quant` takes bf16 activations, which a call may quantise (W8A8) or not (W8A16).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernels.block_scale_gemm import inputs
from kernels.formats import (
    BLOCK,
    SCALES,
    Fp8Format,
    Scales,
    dequantise_activations,
    dequantise_weights,
    fp8_format,
    native,
    rounding_deviation,
)
from kernels.op import Op, Reference, Tolerance, Work
from kernels.operands import Operands, Seeds
from kernels.quantise import quantiser
from shapes.case import Size

if TYPE_CHECKING:
    import torch

UNIT = 2.0**-9
"""Root mean square of rounding to bf16, relative: 2^-8 at most, spread over the mantissas."""

REFERENCE_COLUMNS = 8 * BLOCK
"""Of the output at a time: dequantised weights of 30 to 75 MB."""


@dataclass(frozen=True)
class Sizes:
    """m: tokens; n: output features; k: input features; fp8: format of a and b; scales: fp32, or ue8m0
    (powers of two, held as fp32)."""

    m: int
    n: int
    k: int
    fp8: str = "e4m3fn"
    scales: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            if getattr(self, name) < 1:
                raise ValueError(f"size {name}={getattr(self, name)} of block_scale_gemm must be at least 1")
        fp8_format(self.fp8)
        if self.scales not in SCALES:
            raise ValueError(f"size scales={self.scales!r} of block_scale_gemm must be {' or '.join(SCALES)}")

    @property
    def n_blocks(self) -> int:
        return -(-self.n // BLOCK)

    @property
    def k_blocks(self) -> int:
        return -(-self.k // BLOCK)

    @property
    def quantised_bytes(self) -> int:
        """Of a_q and a_scale: what composing `with_quant` out of a core call allocates."""
        return self.m * (self.k + 4 * self.k_blocks)


@dataclass
class BlockScaleGemmOperands(Operands):
    """b_q     FP8 [N, K]
    b_scale fp32 [ceil(N/128), ceil(K/128)]
    scales  how a is to be scaled where a call quantises: fp32 or ue8m0
    a_q     FP8 [M, K], core only
    a_scale fp32 [M, ceil(K/128)], core only
    a       bf16 [M, K], with_quant only
    """

    b_q: torch.Tensor
    b_scale: torch.Tensor
    scales: Scales
    sizes: Sizes
    a_q: torch.Tensor | None = None
    a_scale: torch.Tensor | None = None
    a: torch.Tensor | None = None
    boundary: str = "core"

    live: ClassVar = ("a_q", "a_scale", "a")
    streamed: ClassVar = ("b_q", "b_scale")

    @property
    def m(self) -> int:
        return (self.a_q if self.a is None else self.a).shape[0]

    def narrowed(self) -> BlockScaleGemmOperands:
        import torch

        if self.a is None:
            return super().narrowed()
        blocks = self.b_scale.shape[1]
        a_q = torch.empty_like(self.a, dtype=self.b_q.dtype)
        a_scale = torch.empty(self.m, blocks, dtype=torch.float32, device=self.a.device)
        return self.replaced(a=None, a_q=a_q, a_scale=a_scale, boundary="core")


class BlockScaleGemm(Op):
    name = "block_scale_gemm"
    Sizes = Sizes
    boundaries = ("core", "with_quant")
    baseline: ClassVar = dict.fromkeys(("cpu", "cuda", "rocm"), "torch.bf16")
    engine_like = "triton.split_k"  # dequantised weights of a whole rank fit no device

    def defaults(self, arch: str) -> Mapping[str, Size]:
        return {"fp8": native(arch)} | ({"scales": "ue8m0"} if arch == "sm_100" else {})

    def work(self, sizes: Sizes, boundary: str = "core") -> Work:
        """2 * m * n * k flops; activations, weights with their scales, and the output moved once. Products
        take FP8 operands by definition, with_quant too: the call may quantise its activations itself."""
        activations = sizes.quantised_bytes if boundary == "core" else 2 * sizes.m * sizes.k
        return Work(
            2.0 * sizes.m * sizes.n * sizes.k,
            float(activations + self.streamed_bytes(sizes) + self.output_bytes(sizes)),
            "fp8",
        )

    def operand_bytes(self, sizes: Sizes) -> int:
        return 2 * sizes.m * sizes.k + sizes.quantised_bytes + self.streamed_bytes(sizes)

    def output_bytes(self, sizes: Sizes) -> int:
        return 2 * sizes.m * sizes.n

    def streamed_bytes(self, sizes: Sizes, turns: int = 1) -> int:
        return turns * (sizes.n * sizes.k + 4 * sizes.n_blocks * sizes.k_blocks)

    def empty_output(self, sizes: Sizes, device: str) -> torch.Tensor:
        import torch

        return torch.empty(sizes.m, sizes.n, dtype=torch.bfloat16, device=device)

    def operands(
        self, sizes: Sizes, seeds: Seeds, device: str, boundary: str = "core"
    ) -> BlockScaleGemmOperands:
        """See inputs.py for what makes the usual mistakes visible in them."""
        fmt = fp8_format(sizes.fp8)
        b_q, b_scale = inputs.weights(sizes.n, sizes.k, fmt, sizes.scales, seeds.stationary, device)
        a = inputs.activations(sizes.m, sizes.k, 1_000_003 * seeds.stationary + seeds.live, device)
        wide = BlockScaleGemmOperands(b_q, b_scale, sizes.scales, sizes, a=a, boundary="with_quant")
        if boundary == "with_quant":
            return wide
        core = wide.narrowed()
        inputs.quantise(a, core.a_q, core.a_scale, fmt, sizes.scales)
        return core

    def empty_operands(self, sizes: Sizes, device: str) -> BlockScaleGemmOperands:
        import torch

        return BlockScaleGemmOperands(
            b_q=torch.empty(sizes.n, sizes.k, dtype=fp8_format(sizes.fp8).dtype, device=device),
            b_scale=torch.empty(sizes.n_blocks, sizes.k_blocks, device=device),
            scales=sizes.scales,
            sizes=sizes,
            a=torch.empty(sizes.m, sizes.k, dtype=torch.bfloat16, device=device),
            boundary="with_quant",
        )

    def step(self, operands: BlockScaleGemmOperands, into: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        if operands.a is None:
            return super().step(operands, into)
        return quantiser(operands.a, into["a_q"], into["a_scale"], operands.scales)

    def reference(self, operands: BlockScaleGemmOperands, max_flops: float = float("inf")) -> Reference:
        """fp32 products of the operands as they are, `with_quant` of the bf16 activations; rows and columns
        brought near 1 by powers of two first, so that no square overflows. Sums of fp32 err by about
        sqrt(K) 2^-24 of the products' size: a hundredth of a sigma at K = 18432.

        Above `max_flops` it takes the first row, the last, and others spread evenly, as many as fit.

        sigma: a right kernel sums exact products in fp32 and rounds the output to bf16, which adds
        2^-9 |out| per element. It may also have rounded the dequantised weights to bf16 before, and those
        of the activations that it did not get in bf16: 2^-9 sqrt(sum_k (a b)^2) each. Tensor cores that
        keep 14 bits in the sums of 128 products and fp32 between them stay far below that.

        sigma_fp8: where activations are quantised, their rounding (formats.rounding_deviation d) adds
        sqrt(sum_k (d b)^2). d takes power-of-two scales, a bound for every scheme in use.
        """
        import torch

        rows = _sampled_rows(operands, max_flops)
        core = operands.a is None

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if rows is None else tensor[rows]

        a = (
            dequantise_activations(chosen(operands.a_q), chosen(operands.a_scale))
            if core
            else chosen(operands.a)
        )
        a, a_exponent = _near_one(a.float())
        deviation = None if core else rounding_deviation(a, _format_of(operands.b_q)).square_()
        squares = a.square()
        rounded_operands = 2 if core else 1

        n, blocks = operands.b_q.shape[0], REFERENCE_COLUMNS // BLOCK
        shape = (a.shape[0], n)
        value, sigma = (torch.empty(shape, dtype=torch.float32, device=a.device) for _ in range(2))
        sigma_fp8 = None if core else torch.empty_like(sigma)
        for first in range(0, n, REFERENCE_COLUMNS):
            columns = slice(first, first + REFERENCE_COLUMNS)
            scale = operands.b_scale[first // BLOCK :][:blocks]
            b, b_exponent = _near_one(dequantise_weights(operands.b_q[columns], scale))
            exponent = a_exponent + b_exponent.T
            out = a @ b.T
            b.square_()
            products = squares @ b.T
            variance = UNIT**2 * (out.square() + rounded_operands * products)
            value[:, columns] = torch.ldexp(out, exponent)
            sigma[:, columns] = torch.ldexp(variance.sqrt(), exponent)
            if sigma_fp8 is not None:
                # The activations rounded to FP8 may be dequantised to bf16 as well.
                variance += UNIT**2 * products + deviation @ b.T
                sigma_fp8[:, columns] = torch.ldexp(variance.sqrt(), exponent)
        return Reference(value, sigma, rows, sigma_fp8)

    def tolerance(self, sizes: Sizes) -> Tolerance:
        """By segments of 128 columns, which is what one block of weights can spoil, or a little fewer so that
        the last is no sliver of less than 32.

        A kernel with exactly the roundings of `reference` has a row error of 1 sigma or less. The worst
        segments of 60 random cases: 0.9 for exact operands, 1.2 for both rounded to bf16, 1.7 where one
        product makes a whole row, whose rounding all its columns share; the fewer columns, the more varies
        their root mean square, hence 8/sqrt(columns) below 16 (tests/test_check_block_scale_gemm.py). 2
        passes those and little more: one lost of 56 blocks of K reaches 3 times the limit at least, one of
        144 (k = 18432) 1.9 times, sums in bf16 over 2048 products 6 times.

        Where activations may be rounded to FP8, sigma is about 10 times as large: wrong scales of a tile
        reach 6 times the limit, those of one block of 56 do not reach it. `core` judges them.
        """
        columns = BLOCK
        if sizes.n < BLOCK or 0 < sizes.n % BLOCK < 32:
            columns = math.ceil(sizes.n / sizes.n_blocks)
        return Tolerance(row=max(2.0, 8.0 / columns**0.5), element=10.0, segment=columns)


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


def _sampled_rows(operands: BlockScaleGemmOperands, max_flops: float) -> list[int] | None:
    n, k = operands.b_q.shape
    products = 2 if operands.a is None else 3
    count, fitting = operands.m, int(max_flops / (2 * products * n * k)) if max_flops < math.inf else math.inf
    if count <= fitting:
        return None
    # A stride near the golden section that has no divisor in common with the count spreads them evenly.
    stride = next(s for s in range(int(0.618 * count), 2 * count) if math.gcd(s, count) == 1)
    order = dict.fromkeys([0, count - 1, *(i * stride % count for i in range(min(count, max(fitting, 2))))])
    return sorted(list(order)[: max(2, fitting)])
