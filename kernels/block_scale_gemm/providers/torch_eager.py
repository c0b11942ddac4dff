"""Block-scale GEMM in plain torch: the obvious code, what torch does best, what its compiler makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.formats import BLOCK, dequantise_activations, dequantise_weights
from kernels.fp8_to_fp32 import fp8_to_bf16
from kernels.op import Implementation, Prepared
from kernels.platform import Platform
from kernels.support import Support

if TYPE_CHECKING:
    import torch

CPU_ROWS = 128  # of activations dequantised at a time, so that they stay in cache from step to step


class _NaiveGemm(Prepared):
    """The obvious code: dequantise both, multiply, all in fp32."""

    operands: BlockScaleGemmOperands

    def call(self) -> None:
        o = self.operands
        self.out.copy_(dequantise_activations(o.a_q, o.a_scale) @ dequantise_weights(o.b_q, o.b_scale).T)


class NaiveGemm(Implementation):
    name = "torch.naive"
    requires = "torch"

    def available(self, platform: Platform) -> Support:
        return platform.library("torch")

    def scratch(self, sizes: BlockScaleGemmSizes) -> int:
        wide = 4 * (sizes.m + sizes.n) * sizes.k + 4 * sizes.n * sizes.k_blocks
        return wide + 4 * sizes.m * sizes.n

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        return _NaiveGemm(operands, out)


class Bf16Gemm(Implementation):
    """Weights dequantised to bf16 once; a call is cuBLAS's, hipBLASLt's or oneDNN's bf16 product, preceded by
    dequantising the activations where they come quantised. What serving without an FP8 kernel does: twice
    the bytes of weights."""

    name = "torch.bf16"
    requires = "torch"
    boundaries = ("core", "with_quant")

    def available(self, platform: Platform) -> Support:
        return platform.library("torch")

    def layout(self, sizes: BlockScaleGemmSizes) -> int:
        return 2 * sizes.n * sizes.k

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return (2 * sizes.m + 8 * CPU_ROWS) * sizes.k_blocks * BLOCK

    def scratch(self, sizes: BlockScaleGemmSizes) -> int:
        return 2 * sizes.m * sizes.n

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        return _Bf16Gemm(operands, out)


class _Bf16Gemm(Prepared):
    def __init__(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> None:
        import torch

        super().__init__(operands, out)
        b = fp8_to_bf16(operands.b_q, operands.b_scale)
        if out.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            # oneDNN's blocked layout, as torch.compile packs frozen weights: a third less time at few rows.
            linear = torch.ops.mkldnn._linear_pointwise
            b = torch.ops.mkldnn._reorder_linear_weight(b, operands.m)
            self.multiply = lambda a: out.copy_(linear(a, b, None, "none", [], ""))
        else:
            self.multiply = lambda a: torch.mm(a, b.t(), out=out)
        self.a, self.dequantise = operands.a, lambda: None
        if operands.a is None:
            self.a, self.dequantise = _dequantiser(operands.a_q, operands.a_scale)

    def call(self) -> None:
        self.dequantise()
        self.multiply(self.a)


def _dequantiser(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Where a call dequantises activations to bf16 [M, K], and what does it."""
    import torch

    (m, k), blocks = q.shape, scale.shape[1]
    result = torch.zeros(m, blocks, BLOCK, dtype=torch.bfloat16, device=q.device)

    def on_gpu() -> None:
        result.flatten(1)[:, :k].copy_(q)
        result.mul_(scale.unsqueeze(-1))

    if q.device.type != "cpu":
        return result.flatten(1)[:, :k], on_gpu

    # torch converts FP8 value by value there, at 3 ns each. A table of its 256 values takes a fifth of that.
    table = torch.arange(256, dtype=torch.uint8).view(q.dtype).float()
    rows = min(CPU_ROWS, m)
    index = torch.zeros(rows, blocks * BLOCK, dtype=torch.int32)  # zeros past K's end: the code of 0.0
    wide = torch.empty(rows, blocks, BLOCK)
    parts = [
        (q_part, scale_part.unsqueeze(-1), part, index[: len(part)], wide[: len(part)])
        for q_part, scale_part, part in zip(
            q.view(torch.uint8).split(rows), scale.split(rows), result.split(rows), strict=True
        )
    ]

    def on_cpu() -> None:
        for codes, step, part, at, values in parts:
            at[:, :k].copy_(codes)
            torch.index_select(table, 0, at.view(-1), out=values.view(-1))
            part.copy_(values.mul_(step))

    return result.flatten(1)[:, :k], on_cpu


def _w8a8(a_q: torch.Tensor, a_scale: torch.Tensor, b_q: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    a = (a_q.float() * a_scale[:, _block_of(a_q, 1)]).bfloat16()
    return _w8a16(a, b_q, b_scale)


def _w8a16(a: torch.Tensor, b_q: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    scale = b_scale[_block_of(b_q, 0)[:, None], _block_of(b_q, 1)]
    return a @ (b_q.float() * scale).bfloat16().T


def _block_of(q: torch.Tensor, dim: int) -> torch.Tensor:
    """The block that each row or column lies in. By index, because torch 2.13 compiles repeat_interleave with
    a slice behind it for a CPU into loads past the end of the scales."""
    import torch

    return torch.arange(q.shape[dim], device=q.device) // BLOCK


class CompiledGemm(Implementation):
    """Weights stay FP8 and are dequantised in the call: the compiler fuses that into one kernel, or into the
    product where it finds a template that takes it."""

    name = "torch.compile"
    per_size = True
    requires = "torch with its compiler (a C++ compiler on cpu, Triton on cuda and rocm)"
    boundaries = ("core", "with_quant")

    def available(self, platform: Platform) -> Support:
        return Support.all_of(platform.library("torch"), platform.compiler())

    def scratch(self, sizes: BlockScaleGemmSizes) -> int:
        return 2 * (sizes.m + sizes.n) * sizes.k + 2 * sizes.m * sizes.n

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> Prepared:
        return _CompiledGemm(operands, out)


class _CompiledGemm(Prepared):
    def __init__(self, operands: BlockScaleGemmOperands, out: torch.Tensor) -> None:
        import torch

        super().__init__(operands, out)
        self.function = torch.compile(_w8a8 if operands.a is None else _w8a16, dynamic=False)
        live = tuple(operands.live_tensors().values())
        self.arguments = (*live, operands.b_q, operands.b_scale)

    def call(self) -> None:
        self.out.copy_(self.function(*self.arguments))
