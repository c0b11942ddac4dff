"""vLLM's Triton MoE on GPUs: what it serves FP8 experts with where nothing faster is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import BindingError, Function
from kernels.formats import BLOCK
from kernels.fused_moe.expert_ids import ExpertIds
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Prepared, Unsupported
from kernels.vendor import Vllm

if TYPE_CHECKING:
    import torch

MODULE = "vllm.model_executor.layers.fused_moe"

EXPERTS = Function(
    f"{MODULE}.fused_moe.fused_experts",
    needs="hidden_states w1 w2 topk_weights topk_ids global_num_experts expert_map quant_config",
)
QUANTISATION = Function(f"{MODULE}.config.fp8_w8a8_moe_quant_config", needs="w1_scale w2_scale block_shape")
CONFIGURATIONS = Function(f"{MODULE}.fused_moe.get_moe_configs", needs="E N dtype", wishes="block_n block_k")


def triton_workspace(sizes: FusedMoeSizes) -> int:
    """Of vLLM's `fused_experts_impl`, and of SGLang's, which began as that: x quantised; gate and up or what
    experts give, h in bf16 and FP8; sorted pairs in blocks of up to 128."""
    pairs = sizes.tokens * sizes.picks
    wide = max(2 * sizes.inter, sizes.hidden) * 2
    of_pair = wide + 2 * sizes.inter * 2 + sizes.inter * 3 + sizes.inter // BLOCK * 4
    x = sizes.tokens * (sizes.hidden + sizes.hidden // BLOCK * 4)
    return pairs * of_pair + x + (pairs + (sizes.local_experts + 1) * 128) * 8


class VllmTritonMoe(Vllm):
    """`fused_experts` of vLLM's GPU builds (fused_moe/fused_moe.py of 0.31 to 0.33): quantises, sorts, two
    launches of `fused_moe_kernel` with SiLU and requantising between, a sum over picks. With expert
    parallelism vLLM gives ids of all experts and a map of all; the row an id of its own to what lies on other
    ranks, in a launch more, so that fewer experts are sorted. Untested on hardware."""

    name = "vllm.triton"
    requires = "vLLM 0.33, or older whose fused_experts takes a quant_config; a GPU build (CUDA or ROCm)"
    boundaries = ("with_quant",)
    activations = "fp8"
    allocates = True
    symbols = (EXPERTS, QUANTISATION, CONFIGURATIONS)

    def workspace(self, sizes: FusedMoeSizes) -> int:
        return triton_workspace(sizes)

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor | None) -> Prepared:
        return _VllmTritonMoe(operands)


class _VllmTritonMoe(Prepared):
    operands: FusedMoeOperands

    def __init__(self, operands: FusedMoeOperands) -> None:
        super().__init__(operands)
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
        self.out = self.experts()

    def picked(self) -> str:
        """Whether vLLM ships a tuned configuration for experts of this size on this device."""
        sizes = self.operands.sizes
        try:
            tuned = CONFIGURATIONS.bind(
                E=sizes.local_experts, N=sizes.inter, dtype="fp8_w8a8", block_n=BLOCK, block_k=BLOCK
            )()
        except (BindingError, Unsupported):
            return ""
        return "tuned configuration" if tuned else "default configuration"
