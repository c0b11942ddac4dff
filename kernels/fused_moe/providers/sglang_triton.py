"""SGLang's Triton MoE: what it serves FP8 experts with where nothing faster is chosen."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.engine_tuning import EngineCall, EngineConfig, EngineTable, EngineTuned
from kernels.formats import BLOCK
from kernels.fused_moe.engine_tables import MoeTables
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.providers.vllm_triton import triton_workspace
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Prepared
from kernels.platform import version
from kernels.vendor import Sglang

if TYPE_CHECKING:
    import torch

MOE = "sglang.srt.layers.moe"
GROUPS = "sglang.srt.distributed.parallel_state"

EXPERTS = Function(
    f"{MOE}.moe_runner.triton_utils.fused_moe.fused_experts",
    f"{MOE}.fused_moe_triton.fused_moe.fused_experts",
    needs="hidden_states w1 w2 topk_output moe_runner_config use_fp8_w8a8 w1_scale w2_scale block_shape",
)
CONFIGURATION = Function(
    f"{MOE}.moe_runner.MoeRunnerConfig",
    f"{MOE}.moe_runner.base.MoeRunnerConfig",
    needs="num_experts num_local_experts inplace",
)
PICKS = Function(f"{MOE}.topk.StandardTopKOutput", needs="topk_weights topk_ids router_logits")
IS_FORMED = Function(f"{GROUPS}.model_parallel_is_initialized")
START = Function(
    f"{GROUPS}.init_distributed_environment", needs="world_size rank local_rank distributed_init_method"
)
# It takes the size up to 0.5.20; later it finds that in the published arguments.
FORM = Function(f"{GROUPS}.initialize_model_parallel", wishes="tensor_model_parallel_size")
PUBLISH = Function("sglang.srt.server_args.set_global_server_args_for_scheduler", positions=1)
ARGUMENTS = Function("sglang.srt.server_args.ServerArgs", needs="model_path")


def _triton_folder() -> str:
    return f"configs/triton_{(version('triton') or '').replace('.', '_')}/"


HERE = (f"{MOE}.moe_runner.triton_utils", f"{MOE}.fused_moe_triton")
LOOK_UPS = tuple(f"{place}.fused_moe_triton_config" for place in HERE)
TABLES = MoeTables(
    take=Function(
        *(f"{place}.try_get_optimal_moe_config" for place in LOOK_UPS),
        needs="w1_shape w2_shape top_k dtype M block_shape",
    ),
    own=Function(
        *(f"{place}.get_moe_configs" for place in LOOK_UPS),
        needs="E N dtype block_n block_k",
        wishes="down_moe",
    ),
    name=Function(
        *(f"{place}.get_config_file_name" for place in LOOK_UPS),
        needs="E N dtype block_shape",
        wishes="down_moe",
    ),
    override=Function(*(f"{place}.override_config" for place in HERE), positions=1),
    folder=_triton_folder,
)


class SglangTritonMoe(Sglang, EngineTuned):
    """`fused_experts` of SGLang (fused_moe_triton/fused_moe.py to 0.5.18, moe_runner/triton_utils from
    0.5.19; read to 0.5.23), which skips ids of -1 by itself where the rank holds fewer experts than there
    are. Not in place, as engines have it: x would hold the output. Untested on hardware."""

    name = "sglang.triton"
    requires = "SGLang 0.5.23, or older whose fused_experts takes a moe_runner_config (CUDA or ROCm)"
    boundaries = ("with_quant",)
    activations = "fp8"
    allocates = True
    symbols = (EXPERTS, CONFIGURATION, PICKS, IS_FORMED, START, FORM, PUBLISH, ARGUMENTS)
    tables = TABLES
    reads = "set SGLANG_MOE_CONFIG_DIR to the folder that holds its folder configs"

    def workspace(self, sizes: FusedMoeSizes) -> int:
        return triton_workspace(sizes)

    def engine_table(self, sizes: FusedMoeSizes) -> EngineTable:
        alone()
        return super().engine_table(sizes)

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor | None) -> Prepared:
        alone()
        return _SglangTritonMoe(operands, self.forced)


def alone() -> None:
    """Sets up a server of one process, as SGLang's own tests do: where the kernels write to a new tensor they
    ask for the server's arguments and the group of tensor-parallel ranks."""
    if IS_FORMED.bind()():
        return
    PUBLISH.bind(ARGUMENTS.bind(model_path="dummy")())()
    meeting = f"file://{tempfile.mkdtemp()}/ranks"
    START.bind(world_size=1, rank=0, local_rank=0, distributed_init_method=meeting)()
    FORM.bind(tensor_model_parallel_size=1)()


class _SglangTritonMoe(EngineCall):
    def __init__(self, operands: FusedMoeOperands, config: EngineConfig | None) -> None:
        super().__init__(operands, TABLES, config)
        o, sizes = operands, operands.sizes
        self.experts = EXPERTS.bind(
            hidden_states=o.x,
            w1=o.w13,
            w2=o.w2,
            topk_output=PICKS.bind(topk_weights=o.topk_weights, topk_ids=o.topk_ids, router_logits=None)(),
            moe_runner_config=CONFIGURATION.bind(
                num_experts=sizes.local_experts * sizes.ep,
                num_local_experts=sizes.local_experts,
                inplace=False,
            )(),
            use_fp8_w8a8=True,
            w1_scale=o.w13_scale,
            w2_scale=o.w2_scale,
            block_shape=[BLOCK, BLOCK],
        )

    def call(self) -> None:
        with self.overridden():
            self.out = self.experts()
