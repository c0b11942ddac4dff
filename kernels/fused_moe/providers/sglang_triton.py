"""SGLang's Triton MoE: what it serves FP8 experts with where nothing faster is chosen."""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING

from kernels.binding import find, keywords, takes
from kernels.formats import BLOCK
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.providers.vllm_triton import triton_workspace
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Prepared, Unsupported
from kernels.vendor import Sglang

if TYPE_CHECKING:
    import torch

MOE = "sglang.srt.layers.moe"


class SglangTritonMoe(Sglang):
    """`fused_experts` of SGLang (fused_moe_triton/fused_moe.py to 0.5.18, moe_runner/triton_utils from
    0.5.19), which skips ids of -1 by itself where the rank holds fewer experts than there are. Not in place,
    as engines have it: x would hold the output."""

    name = "sglang.triton"
    requires = "SGLang 0.5.19, or older whose fused_experts takes a moe_runner_config (CUDA or ROCm)"
    boundaries = ("with_quant",)
    activations = "fp8"
    allocates = True

    def workspace(self, sizes: FusedMoeSizes) -> int:
        return triton_workspace(sizes)

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor | None) -> Prepared:
        alone()
        return _SglangTritonMoe(operands)


def alone() -> None:
    """A server of one process, as SGLang's own tests set it up: where the kernels write to a new tensor they
    ask for the server's arguments and the group of tensor-parallel ranks."""
    groups = "sglang.srt.distributed.parallel_state"
    if find(f"{groups}.model_parallel_is_initialized")():
        return
    with contextlib.suppress(Unsupported):  # older versions ask for no arguments
        publish = find("sglang.srt.server_args.set_global_server_args_for_scheduler")
        publish(find("sglang.srt.server_args.ServerArgs")(model_path="dummy"))
    start, form = find(f"{groups}.init_distributed_environment"), find(f"{groups}.initialize_model_parallel")
    meeting = f"file://{tempfile.mkdtemp()}/ranks"
    group = {"world_size": 1, "rank": 0, "local_rank": 0, "distributed_init_method": meeting}
    start(**keywords(start, group))
    # From 0.5.23 the published arguments hold the size.
    form(**keywords(form, {}, {"tensor_model_parallel_size": 1}))


class _SglangTritonMoe(Prepared):
    def __init__(self, operands: FusedMoeOperands) -> None:
        super().__init__(operands)
        o, sizes = operands, operands.sizes
        self.fused_experts = find(
            f"{MOE}.moe_runner.triton_utils.fused_moe.fused_experts",
            f"{MOE}.fused_moe_triton.fused_moe.fused_experts",
        )
        if not takes(self.fused_experts, "moe_runner_config"):
            raise Unsupported("this sglang's fused_experts takes no moe_runner_config")
        config = find(f"{MOE}.moe_runner.MoeRunnerConfig", f"{MOE}.moe_runner.base.MoeRunnerConfig")
        picks = find(f"{MOE}.topk.StandardTopKOutput")
        arguments: dict[str, object] = {
            "hidden_states": o.x,
            "w1": o.w13,
            "w2": o.w2,
            "topk_output": picks(topk_weights=o.topk_weights, topk_ids=o.topk_ids, router_logits=None),
            "moe_runner_config": config(
                num_experts=sizes.local_experts * sizes.ep,
                num_local_experts=sizes.local_experts,
                inplace=False,
            ),
            "use_fp8_w8a8": True,
            "w1_scale": o.w13_scale,
            "w2_scale": o.w2_scale,
            "block_shape": [BLOCK, BLOCK],
        }
        self.arguments = keywords(self.fused_experts, arguments)

    def call(self) -> None:
        self.out = self.fused_experts(**self.arguments)
