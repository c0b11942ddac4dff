"""SGLang's Triton kernel for FP8 linear layers with block scales: its product where nothing faster takes the
sizes or the device.

Read in SGLang 0.5.10, 0.5.18 and 0.5.23, which keep it in three places, and at 008601f: the universal entry
point may take DeepGEMM instead, so this asks for the Triton one, and versions that lack it not to take
DeepGEMM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.providers.vllm_triton import ARGUMENTS, TritonProduct
from kernels.op import Prepared
from kernels.vendor import Sglang

if TYPE_CHECKING:
    import torch

OLDER = "sglang.srt.layers.quantization.fp8_kernel"

MULTIPLY = Function(
    "sglang.kernels.ops.gemm.fp8_kernel.w8a8_block_fp8_matmul_triton",
    "sglang.kernels.ops.quantization.fp8_kernel.w8a8_block_fp8_matmul_triton",
    f"{OLDER}.w8a8_block_fp8_matmul_triton",
    f"{OLDER}.w8a8_block_fp8_matmul",
    needs=ARGUMENTS,
)


class SglangTritonGemm(Sglang):
    name = "sglang.triton"
    requires = "SGLang with Triton, cuda or rocm (read to 0.5.23)"
    allocates = True
    symbols = (MULTIPLY,)

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        return TritonProduct(operands, MULTIPLY)
