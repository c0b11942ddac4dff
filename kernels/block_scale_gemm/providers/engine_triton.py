"""The Triton kernel for FP8 linear layers with block scales that vLLM and SGLang have: their product where
nothing faster takes the sizes or the device.

Read in vLLM 0.32 and 0.33: model_executor/layers/quantization/utils/fp8_utils.py, triton_utils/importing.py.
Read in SGLang 0.5.10, 0.5.18 and 0.5.23, which keep it in three places, and at 008601f. SGLang's universal
entry point may take DeepGEMM instead. So the row calls the Triton one, and versions without that are told not
to take DeepGEMM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.block_scale_gemm.engine_tables import LOOK_UP, GemmTables
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.block_scale_gemm.triton.split_k import interpreted_s
from kernels.engine_tuning import EngineCall, EngineConfig, EngineTuned
from kernels.formats import BLOCK
from kernels.op import Prepared
from kernels.triton_runtime import TritonImplementation, require_interpreter
from kernels.tuning import Target
from kernels.vendor import Sglang, Vllm

if TYPE_CHECKING:
    import torch

TILE_M = 64  # of vLLM's default configuration, which it takes on a CPU

ARGUMENTS = "A B As Bs block_size output_dtype"
LOOK_UP_ARGUMENTS = "N K block_n block_k"

VLLM = "vllm.model_executor.layers.quantization.utils.fp8_utils"
OF_VLLM = Function(f"{VLLM}.w8a8_triton_block_scaled_mm", needs=ARGUMENTS)
TABLES_OF_VLLM = GemmTables(
    "vllm",
    OF_VLLM,
    own=Function(f"{VLLM}.{LOOK_UP}", needs=LOOK_UP_ARGUMENTS),
    device=Function(f"{VLLM}.get_device_name_as_file_name"),
)

SGLANG = (
    "sglang.kernels.ops.gemm.fp8_kernel",
    "sglang.kernels.ops.quantization.fp8_kernel",
    "sglang.srt.layers.quantization.fp8_kernel",
)
OF_SGLANG = Function(
    *(f"{place}.w8a8_block_fp8_matmul_triton" for place in SGLANG),
    f"{SGLANG[-1]}.w8a8_block_fp8_matmul",
    needs=ARGUMENTS,
)
TABLES_OF_SGLANG = GemmTables(
    "sglang",
    OF_SGLANG,
    own=Function(*(f"{place}.{LOOK_UP}" for place in SGLANG), needs=LOOK_UP_ARGUMENTS),
    device=Function("sglang.srt.utils.get_device_name"),
)


class TritonGemm(EngineTuned):
    """The row of either engine."""

    allocates = True
    depths = (128, 64)
    tables: GemmTables

    def configurations(self, target: Target, sizes: BlockScaleGemmSizes) -> Iterator[EngineConfig]:
        """Where one tile has all rows, there are no groups of tiles."""
        every = super().configurations(target, sizes)
        yield from dict.fromkeys(
            replace(each, GROUP_SIZE_M=1) if sizes.m <= each.BLOCK_SIZE_M else each for each in every
        )

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        return _TritonProduct(operands, self.tables, self.forced)


class VllmTritonGemm(Vllm, TritonImplementation, TritonGemm):
    """It has tuned configurations for some sizes and devices, and reads every layout as it is."""

    name = "vllm.triton"
    requires = "vLLM with Triton, read in 0.32 (on cpu through its interpreter: checked, never timed)"
    runtime = "vllm_triton"
    kinds = ("cuda", "rocm", "cpu")
    symbols = (OF_VLLM,)
    tables = TABLES_OF_VLLM
    reads = f"copy it to {VLLM.rpartition('.')[0].replace('.', '/')}/configs"

    def interpreted_s(self, sizes: BlockScaleGemmSizes) -> float:
        return interpreted_s(sizes, TILE_M, BLOCK)

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return 4 * sizes.m * sizes.n

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        require_interpreter(operands.b_q.device)
        with _triton_let_in(operands.b_q.device):
            return super().prepare(operands, out)


class SglangTritonGemm(Sglang, TritonGemm):
    name = "sglang.triton"
    requires = "SGLang with Triton, cuda or rocm (read to 0.5.23)"
    symbols = (OF_SGLANG,)
    tables = TABLES_OF_SGLANG
    reads = "copy it to sglang/kernels/ops/gemm/configs (up to 0.5.18 srt/layers/quantization/configs)"

    def configurations(self, target: Target, sizes: BlockScaleGemmSizes) -> Iterator[EngineConfig]:
        """On AMD's GPUs SGLang raises BLOCK_SIZE_K to that of a scale (get_w8a8_block_fp8_configs)."""
        every = super().configurations(target, sizes)
        return (each for each in every if target.kind == "cuda" or each.BLOCK_SIZE_K == BLOCK)


@contextlib.contextmanager
def _triton_let_in(device: torch.device) -> Iterator[None]:
    """vLLM takes Triton for missing where Triton finds no device. On a CPU this shows vLLM a device until
    vLLM is imported. The interpreter needs none."""
    from triton.backends import backends

    if device.type != "cpu" or "cpu" in backends:
        yield
        return
    backends["cpu"] = next(iter(backends.values()))
    try:
        import vllm.triton_utils  # noqa: F401

        yield
    finally:
        del backends["cpu"]


class _TritonProduct(EngineCall):
    def __init__(
        self, operands: BlockScaleGemmOperands, tables: GemmTables, config: EngineConfig | None
    ) -> None:
        import torch

        super().__init__(operands, tables, config)
        # The interpreter truncates to bf16 where it should round. There torch rounds the output.
        self.interpreted = operands.b_q.device.type == "cpu"
        self.multiply = tables.multiply.bind(
            A=operands.a_q,
            B=operands.b_q,
            As=operands.a_scale,
            Bs=operands.b_scale,
            block_size=[BLOCK, BLOCK],
            output_dtype=torch.float32 if self.interpreted else torch.bfloat16,
        )

    def call(self) -> None:
        with self.overridden():
            result = self.multiply()
        self.out = result.bfloat16() if self.interpreted else result
