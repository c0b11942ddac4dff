"""What rows of several libraries share: layouts of activations and scales, sizes, and a bound product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch


def column_major(a_scale: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """A copy of [M, blocks] with strides (1, M rounded up to the multiple), so that the scales of all rows
    lie side by side, block after block. With a multiple of 4 each block of fp32 scales starts at a multiple
    of 16 bytes, as TMA requires."""
    m, blocks = a_scale.shape
    columns = a_scale.new_zeros(blocks, rounded_up(m, multiple)).t()[:m]
    return columns.copy_(a_scale)


def padded_rows(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """A copy [M rounded up to the multiple, columns] whose further rows are zeros, or the tensor itself where
    M is a multiple already."""
    m, columns = tensor.shape
    if m % multiple == 0:
        return tensor
    padded = tensor.new_zeros(rounded_up(m, multiple), columns)
    padded[:m] = tensor
    return padded


def rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def padding_bytes(sizes: BlockScaleGemmSizes, multiple: int) -> int:
    """The bytes of padded activations with their scales, and of the further rows of a bf16 output."""
    m = rounded_up(sizes.m, multiple)
    return m * (sizes.k + 4 * sizes.k_blocks) + 2 * (m - sizes.m) * sizes.n


def multiples(sizes: BlockScaleGemmSizes, n: int, k: int) -> Support:
    """Whether N and K of the case are multiples of these."""
    return Support.all_of(
        need(sizes.n % n == 0, f"needs n to be a multiple of {n}"),
        need(sizes.k % k == 0, f"needs k to be a multiple of {k}"),
    )


class Product(Prepared):
    """A library's product, bound to operands and, where the library writes into one, to an output."""

    operands: BlockScaleGemmOperands

    def __init__(
        self,
        operands: BlockScaleGemmOperands,
        out: torch.Tensor | None,
        multiply: Callable[[], object],
        a_q: torch.Tensor | None = None,
        a_scale: torch.Tensor | None = None,
    ) -> None:
        super().__init__(operands, out)
        self.multiply = multiply
        self.returns = out is None  # the call returns the output, which may have rows beyond M
        # Where the call reads quantised activations; rows beyond M are padding.
        self.a_q = operands.a_q if a_q is None else a_q
        self.a_scale = operands.a_scale if a_scale is None else a_scale

    def inputs(self) -> Mapping[str, torch.Tensor]:
        if self.operands.a is not None:
            return super().inputs()
        m = self.operands.m
        return {"a_q": self.a_q[:m], "a_scale": self.a_scale[:m]}

    def call(self) -> None:
        result = self.multiply()
        if self.returns:
            self.out = result[: self.operands.m]
