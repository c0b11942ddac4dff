"""vLLM's Triton MoE on GPUs: what it serves FP8 experts with where nothing faster is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.engine_tuning import EngineCall, EngineConfig, EngineTuned
from kernels.formats import BLOCK
from kernels.fused_moe.engine_tables import MoeTables
from kernels.fused_moe.expert_ids import ExpertIds
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Prepared
from kernels.vendor import Vllm

if TYPE_CHECKING:
    import torch

MODULE = "vllm.model_executor.layers.fused_moe"

EXPERTS = Function(
    f"{MODULE}.fused_moe.fused_experts",
    needs="hidden_states w1 w2 topk_weights topk_ids global_num_experts expert_map quant_config",
)
QUANTISATION = Function(f"{MODULE}.config.fp8_w8a8_moe_quant_config", needs="w1_scale w2_scale block_shape")
TABLES = MoeTables(
    take=Function(
        f"{MODULE}.fused_moe.try_get_optimal_moe_config", needs="w1_shape w2_shape top_k dtype M block_shape"
    ),
    own=Function(f"{MODULE}.fused_moe.get_moe_configs", needs="E N dtype", wishes="block_n block_k"),
    name=Function(f"{MODULE}.fused_moe.get_config_file_name", needs="E N dtype block_shape"),
    override=Function(f"{MODULE}.override_config", positions=1),
)


def triton_workspace(sizes: FusedMoeSizes) -> int:
    """Bytes that vLLM's `fused_experts_impl` takes, and SGLang's, which began as that: for x quantised, for
    gate and up or what experts give, for h in bf16 and FP8, and for sorted pairs in blocks of up to 128."""
    pairs = sizes.tokens * sizes.picks
    wide = max(2 * sizes.inter, sizes.hidden) * 2
    of_pair = wide + 2 * sizes.inter * 2 + sizes.inter * 3 + sizes.inter // BLOCK * 4
    x = sizes.tokens * (sizes.hidden + sizes.hidden // BLOCK * 4)
    return pairs * of_pair + x + (pairs + (sizes.local_experts + 1) * 128) * 8


class VllmTritonMoe(Vllm, EngineTuned):
    """`fused_experts` of vLLM's GPU builds (fused_moe/fused_moe.py of 0.31 to 0.33): quantises, sorts, two
    launches of `fused_moe_kernel` with SiLU and requantising between, a sum over picks. With expert
    parallelism vLLM gives ids of all experts and a map of all; the row an id of its own to what lies on other
    ranks, in a launch more, so that fewer experts are sorted. Run on an H200 with vLLM 0.26."""

    name = "vllm.triton"
    requires = "vLLM 0.33, or older whose fused_experts takes a quant_config; a GPU build (CUDA or ROCm)"
    boundaries = ("with_quant",)
    activations = "fp8"
    allocates = True
    symbols = (EXPERTS, QUANTISATION, TABLES.own)
    tables = TABLES
    reads = "set VLLM_TUNED_CONFIG_FOLDER to its folder"

    def workspace(self, sizes: FusedMoeSizes) -> int:
        return triton_workspace(sizes)

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor | None) -> Prepared:
        return _VllmTritonMoe(operands, self.forced)


class _VllmTritonMoe(EngineCall):
    def __init__(self, operands: FusedMoeOperands, config: EngineConfig | None) -> None:
        super().__init__(operands, TABLES, config)
        o, sizes = operands, operands.sizes
        self.local = ExpertIds(o)
        scales = {"w1_scale": o.w13_scale, "w2_scale": o.w2_scale}
        self.experts = EXPERTS.bind(
            hidden_states=o.x,
            w1=o.w13,
            w2=o.w2,
            topk_weights=o.topk_weights,
            topk_ids=self.local.ids,
            global_num_experts=sizes.local_experts + self.local.apart,
            expert_map=self.local.per_expert([*range(sizes.local_experts), -1]),
            quant_config=QUANTISATION.bind(**scales, block_shape=[BLOCK, BLOCK])(),
        )

    def call(self) -> None:
        self.local.write()
        with self.overridden():
            self.out = self.experts()
