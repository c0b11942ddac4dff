"""What rows of several libraries share: layouts of activations and scales, sizes, and a bound product."""

from __future__ import annotations

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.lazy import torch
from kernels.op import Call, Prepared
from kernels.support import Support, need


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


def padded(operands: BlockScaleGemmOperands, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a_q and a_scale with rows of zeros up to the multiple, the scales of all rows side by side."""
    rows, scales = (padded_rows(each, multiple) for each in (operands.a_q, operands.a_scale))
    return rows, column_major(scales)


def rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def padding_bytes(sizes: BlockScaleGemmSizes, multiple: int) -> int:
    """The bytes of padded activations with their scales, and of the further rows of a bf16 output."""
    m = rounded_up(sizes.m, multiple)
    return m * (sizes.k + 4 * sizes.k_blocks) + 2 * (m - sizes.m) * sizes.n


def multiples(sizes: BlockScaleGemmSizes, n: int = 1, k: int = BLOCK) -> Support:
    """Whether N and K of the case are multiples of these."""
    return Support.all_of(
        need(sizes.n % n == 0, f"needs n to be a multiple of {n}"),
        need(sizes.k % k == 0, f"needs k to be a multiple of {k}"),
    )


def product(
    operands: BlockScaleGemmOperands,
    out: torch.Tensor | None,
    multiply: Call,
    a_q: torch.Tensor | None = None,
    a_scale: torch.Tensor | None = None,
) -> Prepared:
    """A call that reads quantised activations elsewhere than in the operands, or returns more than M rows.

    a_q, a_scale: what the call reads, with padding beyond row M; None: the operands' own
    """
    m = operands.sizes.m
    read = {"a_q": a_q, "a_scale": a_scale}
    inputs = {name: operands.live_tensors()[name] if it is None else it[:m] for name, it in read.items()}
    result = None if out is not None else lambda returned: returned[:m]
    return Prepared(operands, out, multiply, inputs=inputs, result=result)
