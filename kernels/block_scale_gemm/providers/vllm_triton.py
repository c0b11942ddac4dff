"""vLLM's Triton kernel for FP8 linear layers with block scales: what it serves DeepSeek with where nothing
faster takes the sizes.

Read in vLLM 0.32 and 0.33: model_executor/layers/quantization/utils/fp8_utils.py, triton_utils/importing.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.block_scale_gemm.engine_tables import LOOK_UP, GemmTables
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.block_scale_gemm.triton.split_k import CODE_S, FLOPS, STEP_S
from kernels.engine_tuning import EngineCall, EngineConfig, EngineTuned
from kernels.formats import BLOCK
from kernels.op import Prepared
from kernels.triton_runtime import TritonImplementation, require_interpreter
from kernels.tuning import Target
from kernels.vendor import Vllm

if TYPE_CHECKING:
    import torch

TILE_M = 64  # of its default configuration, which it takes on a CPU

ARGUMENTS = "A B As Bs block_size output_dtype"
"""What the product takes, in vLLM and in SGLang."""

MODULE = "vllm.model_executor.layers.quantization.utils.fp8_utils"

MULTIPLY = Function(f"{MODULE}.w8a8_triton_block_scaled_mm", needs=ARGUMENTS)
TABLES = GemmTables(
    "vllm",
    MULTIPLY,
    own=Function(f"{MODULE}.{LOOK_UP}", needs="N K block_n block_k"),
    device=Function(f"{MODULE}.get_device_name_as_file_name"),
)


class TritonGemm(EngineTuned):
    """A row of the product that vLLM and SGLang have."""

    depths = (128, 64)
    tables: GemmTables

    def configurations(self, target: Target, sizes: BlockScaleGemmSizes) -> Iterator[EngineConfig]:
        """Where one tile has all rows there are no groups of tiles."""
        every = super().configurations(target, sizes)
        yield from dict.fromkeys(
            replace(each, GROUP_SIZE_M=1) if sizes.m <= each.BLOCK_SIZE_M else each for each in every
        )

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        return TritonProduct(operands, self.tables, self.forced)


class VllmTritonGemm(Vllm, TritonImplementation, TritonGemm):
    """Keeps a tuned configuration for some sizes and devices; reads every layout as it is."""

    name = "vllm.triton"
    requires = "vLLM with Triton, read in 0.32 (on cpu through its interpreter: checked, never timed)"
    runtime = "vllm_triton"
    kinds = ("cuda", "rocm", "cpu")
    allocates = True
    symbols = (MULTIPLY,)
    tables = TABLES
    reads = f"copy it to {MODULE.rpartition('.')[0].replace('.', '/')}/configs"

    def interpreted_s(self, sizes: BlockScaleGemmSizes) -> float:
        steps = math.ceil(sizes.m / TILE_M) * sizes.n_blocks * sizes.k_blocks
        codes, flops = (TILE_M + BLOCK) * BLOCK, 2 * TILE_M * BLOCK * BLOCK
        return steps * (STEP_S + codes * CODE_S + flops / FLOPS)

    def workspace(self, sizes: BlockScaleGemmSizes) -> int:
        return 4 * sizes.m * sizes.n

    def prepare(self, operands: BlockScaleGemmOperands, out: torch.Tensor | None) -> Prepared:
        require_interpreter(operands.b_q.device)
        with _triton_let_in(operands.b_q.device):
            return super().prepare(operands, out)


@contextlib.contextmanager
def _triton_let_in(device: torch.device) -> Iterator[None]:
    """vLLM takes Triton for missing where no device of Triton's is there. On a CPU this shows it one, for as
    long as it takes to be imported; the interpreter needs none."""
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


class TritonProduct(EngineCall):
    """A call of the product that vLLM and SGLang have."""

    def __init__(
        self, operands: BlockScaleGemmOperands, tables: GemmTables, config: EngineConfig | None
    ) -> None:
        import torch

        super().__init__(operands, tables, config)
        # The interpreter truncates where it should round to bf16: there torch rounds the output.
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
