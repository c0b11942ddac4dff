"""What rows of several libraries share: layouts of activations and scales, and conditions on sizes."""

from __future__ import annotations

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes
from kernels.formats import BLOCK
from kernels.lazy import torch
from kernels.op import Call, Prepared
from kernels.support import Support, need


def column_major(a_scale: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """A copy of [M, blocks] with strides (1, M rounded up to the multiple): scales of all rows lie side by
    side, block after block. With a multiple of 4, fp32 blocks start at multiples of 16 bytes, for TMA."""
    m, blocks = a_scale.shape
    columns = a_scale.new_zeros(blocks, rounded_up(m, multiple)).t()[:m]
    return columns.copy_(a_scale)


def padded_rows(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """A copy with rows of zeros up to the multiple, or the tensor itself where M is a multiple already."""
    m, columns = tensor.shape
    if m % multiple == 0:
        return tensor
    padded = tensor.new_zeros(rounded_up(m, multiple), columns)
    padded[:m] = tensor
    return padded


def padded(operands: BlockScaleGemmOperands, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a_q and a_scale with rows of zeros up to the multiple. The scales are column-major."""
    return padded_rows(operands.a_q, multiple), column_major(padded_rows(operands.a_scale, multiple))


def rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def padding_bytes(sizes: BlockScaleGemmSizes, multiple: int) -> int:
    """The bytes of padded activations with their scales, and of the rows that padding adds to the output."""
    m = rounded_up(sizes.m, multiple)
    return m * (sizes.k + 4 * sizes.k_blocks) + 2 * (m - sizes.m) * sizes.n


def multiples(sizes: BlockScaleGemmSizes, n: int = 1, k: int = BLOCK) -> Support:
    """Whether N is a multiple of n, and K of k."""
    return Support.all_of(
        need(sizes.n % n == 0, f"needs n to be a multiple of {n}"),
        need(sizes.k % k == 0, f"needs k to be a multiple of {k}"),
    )


def prepared(
    operands: BlockScaleGemmOperands,
    out: torch.Tensor | None,
    multiply: Call,
    a_q: torch.Tensor | None = None,
    a_scale: torch.Tensor | None = None,
) -> Prepared:
    """`multiply` as a Prepared. It reads a_q and a_scale; None stands for that of the operands. Where out is
    None, it returns its output. These three may have rows of padding after row M."""
    m = operands.sizes.m
    inputs = operands.live_tensors()
    if a_q is not None:
        inputs["a_q"] = a_q[:m]
    if a_scale is not None:
        inputs["a_scale"] = a_scale[:m]
    result = (lambda returned: returned[:m]) if out is None else None
    return Prepared(operands, out, multiply, inputs=inputs, result=result)
