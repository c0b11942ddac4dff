"""SGLang's Triton kernel for FP8 linear layers with block scales.

Read in SGLang 0.5.23 (sglang/kernels/ops/gemm/fp8_kernel.py) and at 008601f, where it was still in
srt/layers/quantization: the universal entry point may take DeepGEMM instead, so this asks for the Triton one,
and versions that lack it not to take DeepGEMM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import find
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.providers.vllm_triton import TritonProduct
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.op import Prepared
from kernels.vendor import Sglang

if TYPE_CHECKING:
    import torch


class SglangTritonGemm(Sglang):
    name = "sglang.triton"
    requires = "SGLang with Triton, cuda or rocm (read in 0.5.23)"
    allocates = True

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return sizes.quantised_bytes

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        older = "sglang.srt.layers.quantization.fp8_kernel"
        multiply = find(
            "sglang.kernels.ops.gemm.fp8_kernel.w8a8_block_fp8_matmul_triton",
            f"{older}.w8a8_block_fp8_matmul_triton",
            f"{older}.w8a8_block_fp8_matmul",
        )
        return TritonProduct(operands, multiply)
