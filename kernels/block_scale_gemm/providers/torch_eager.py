"""Block-scale GEMM in plain torch: the obvious code, torch's fastest product, and torch's compiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands, BlockScaleGemmSizes
from kernels.formats import BLOCK, dequantise_activations, dequantise_weights
from kernels.fp8_to_fp32 import fp8_to_bf16
from kernels.lazy import torch
from kernels.op import Call, implementation, sequence

CPU_ROWS = 128
"""Rows of activations that are dequantised at a time: so few stay in the cache from step to step."""


def naive_bytes(sizes: BlockScaleGemmSizes) -> int:
    """Both operands and the output in fp32, and the scales of every row of b."""
    operands = (sizes.m + sizes.n) * sizes.k
    return 4 * (operands + sizes.n * sizes.k_blocks + sizes.m * sizes.n)


@implementation("torch.naive", requires="torch", scratch=naive_bytes)
def naive(operands: BlockScaleGemmOperands, out: torch.Tensor) -> Call:
    """The obvious code: dequantise both operands and multiply them, all in fp32."""

    def call() -> None:
        a = dequantise_activations(operands.a_q, operands.a_scale)
        out.copy_(a @ dequantise_weights(operands.b_q, operands.b_scale).T)

    return call


DEQUANTISED: Mapping[str, Any] = {
    "boundaries": ("core", "with_quant"),
    "layout": lambda sizes: 2 * sizes.n * sizes.k,  # the weights in bf16
    # The activations in bf16; on a CPU also an int32 index and an fp32 value for each element of CPU_ROWS.
    "workspace": lambda sizes: (2 * sizes.m + (4 + 4) * CPU_ROWS) * sizes.k_blocks * BLOCK,
    "scratch": lambda sizes: 2 * sizes.m * sizes.n,  # the product in bf16
}
"""What implementations that call `bf16_product` declare."""


@implementation("torch.bf16", requires="torch", **DEQUANTISED)
def bf16(operands: BlockScaleGemmOperands, out: torch.Tensor) -> Call:
    """What serving without an FP8 kernel does: the weights are dequantised to bf16 once, which doubles their
    bytes. A call dequantises quantised activations, and is a bf16 product of cuBLAS, hipBLASLt or oneDNN."""
    return bf16_product(operands, out)


def bf16_product(operands: BlockScaleGemmOperands, out: torch.Tensor) -> Call:
    """The call of `torch.bf16`. It dequantises the weights before it returns."""
    import torch

    b = fp8_to_bf16(operands.b_q, operands.b_scale)
    if out.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # oneDNN's blocked layout, in which torch.compile packs frozen weights: a third less time at few rows.
        b = torch.ops.mkldnn._reorder_linear_weight(b, operands.sizes.m)
        no_bias = None

        def multiply(a: torch.Tensor) -> object:
            # The last three arguments are those of an activation, of which there is none.
            return out.copy_(torch.ops.mkldnn._linear_pointwise(a, b, no_bias, "none", [], ""))
    else:

        def multiply(a: torch.Tensor) -> object:
            return torch.mm(a, b.t(), out=out)

    if operands.a is not None:
        return lambda: multiply(operands.a)
    a, dequantise = dequantiser(operands.a_q, operands.a_scale)
    return sequence(dequantise, lambda: multiply(a))


def dequantiser(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, Call]:
    """A bf16 tensor [M, K], and the call that writes the dequantised activations there."""
    import torch

    m, k = q.shape
    blocks = scale.shape[1]
    result = torch.zeros(m, blocks, BLOCK, dtype=torch.bfloat16, device=q.device)

    def on_gpu() -> None:
        result.flatten(1)[:, :k].copy_(q)
        result.mul_(scale.unsqueeze(-1))

    if q.device.type != "cpu":
        return result.flatten(1)[:, :k], on_gpu

    # On a CPU torch converts FP8 value by value, at 3 ns each. A table of its 256 values takes a fifth.
    table = torch.arange(256, dtype=torch.uint8).view(q.dtype).float()
    step = min(CPU_ROWS, m)
    index_buffer = torch.zeros(step, blocks * BLOCK, dtype=torch.int32)  # zeros past K: the code of 0.0
    fp32_buffer = torch.empty(step, blocks, BLOCK)

    def dequantiser_of(rows: slice) -> Call:
        """The call that dequantises these rows. Its views are made here, before timing."""
        codes = q.view(torch.uint8)[rows]
        index = index_buffer[: len(codes)]
        values = fp32_buffer[: len(codes)]
        factors = scale[rows].unsqueeze(-1)
        target = result[rows]

        def dequantise() -> None:
            index[:, :k].copy_(codes)
            torch.index_select(table, 0, index.view(-1), out=values.view(-1))
            target.copy_(values.mul_(factors))

        return dequantise

    calls = [dequantiser_of(slice(start, start + step)) for start in range(0, m, step)]
    return result.flatten(1)[:, :k], sequence(*calls)


def _w8a8(a_q: torch.Tensor, a_scale: torch.Tensor, b_q: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    a = (a_q.float() * a_scale[:, _block_of(a_q, 1)]).bfloat16()
    return _w8a16(a, b_q, b_scale)


def _w8a16(a: torch.Tensor, b_q: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    scale = b_scale[_block_of(b_q, 0)[:, None], _block_of(b_q, 1)]
    return a @ (b_q.float() * scale).bfloat16().T


def _block_of(q: torch.Tensor, dim: int) -> torch.Tensor:
    """The block of each row or column, as an index into scales. repeat_interleave followed by a slice would
    be simpler, but for a CPU torch 2.13 compiles it into loads past the end of the scales."""
    import torch

    return torch.arange(q.shape[dim], device=q.device) // BLOCK


@implementation(
    "torch.compile",
    requires="torch with its compiler (a C++ compiler on cpu, Triton on cuda and rocm)",
    per_size=True,
    boundaries=("core", "with_quant"),
    available=lambda platform: platform.compiler(),
    scratch=lambda sizes: 2 * (sizes.m + sizes.n) * sizes.k + 2 * sizes.m * sizes.n,
)
def compiled(operands: BlockScaleGemmOperands, out: torch.Tensor) -> Call:
    """The weights stay FP8 and are dequantised in the call. The compiler makes one kernel of dequantising, or
    fuses it into the product where it has a template that allows this."""
    function = torch.compile(_w8a8 if operands.a is None else _w8a16, dynamic=False)
    arguments = (*operands.live_tensors().values(), operands.b_q, operands.b_scale)
    return lambda: out.copy_(function(*arguments))
