"""SGLang's Triton kernel for FP8 linear layers with block scales: its product where nothing faster takes the
sizes or the device.

Read in SGLang 0.5.10, 0.5.18 and 0.5.23, which keep it in three places, and at 008601f: the universal entry
point may take DeepGEMM instead, so this asks for the Triton one, and versions that lack it not to take
DeepGEMM.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.binding import Function
from kernels.block_scale_gemm.engine_tables import LOOK_UP, GemmTables
from kernels.block_scale_gemm.providers.vllm_triton import ARGUMENTS, TritonGemm
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.engine_tuning import EngineConfig
from kernels.formats import BLOCK
from kernels.tuning import Target
from kernels.vendor import Sglang

OLDER = "sglang.srt.layers.quantization.fp8_kernel"

MULTIPLY = Function(
    "sglang.kernels.ops.gemm.fp8_kernel.w8a8_block_fp8_matmul_triton",
    "sglang.kernels.ops.quantization.fp8_kernel.w8a8_block_fp8_matmul_triton",
    f"{OLDER}.w8a8_block_fp8_matmul_triton",
    f"{OLDER}.w8a8_block_fp8_matmul",
    needs=ARGUMENTS,
)
TABLES = GemmTables(
    "sglang",
    MULTIPLY,
    own=Function(
        *(f"{place.rpartition('.')[0]}.{LOOK_UP}" for place in dict.fromkeys(MULTIPLY.places)),
        needs="N K block_n block_k",
    ),
    device=Function("sglang.srt.utils.get_device_name"),
)


class SglangTritonGemm(Sglang, TritonGemm):
    name = "sglang.triton"
    requires = "SGLang with Triton, cuda or rocm (read to 0.5.23)"
    allocates = True
    symbols = (MULTIPLY,)
    tables = TABLES
    reads = "copy it to sglang/kernels/ops/gemm/configs (up to 0.5.18 srt/layers/quantization/configs)"

    def configurations(self, target: Target, sizes: BlockScaleGemmSizes) -> Iterator[EngineConfig]:
        """Off CUDA SGLang raises BLOCK_SIZE_K to that of a scale (get_w8a8_block_fp8_configs)."""
        every = super().configurations(target, sizes)
        return (each for each in every if target.kind == "cuda" or each.BLOCK_SIZE_K == BLOCK)
