"""The Triton MoE of vLLM and of SGLang, which began as one.

Read in vLLM 0.31 to 0.33 (fused_moe/fused_moe.py) and in SGLang to 0.5.23 (fused_moe_triton/fused_moe.py to
0.5.18, moe_runner/triton_utils from 0.5.19). vLLM's ran on an H200 (0.26); SGLang's is untested on hardware.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kernels.binding import Function
from kernels.engine_tuning import (
    EngineConfig,
    EngineEntry,
    EngineLookUp,
    EngineTable,
    EngineTuned,
    EntryAt,
    nearest_of,
)
from kernels.formats import BLOCK
from kernels.fused_moe.layouts import expert_ids
from kernels.fused_moe.operands import FusedMoeOperands, FusedMoeSizes
from kernels.lazy import torch
from kernels.op import Prepared, sequence
from kernels.platform import version
from kernels.tuning import values
from kernels.vendor import Sglang, Vllm

DTYPE = "fp8_w8a8"


@dataclass(frozen=True)
class MoeTables(EngineLookUp):
    """The engine's functions that look up a configuration, and the one that forces one. Only SGLang's take
    down_moe, which asks for the table of the second product."""

    find_entry: Function  # returns the configuration of a call: that of its table, or its default
    find_table: Function  # returns its table by M, or None
    find_name: Function  # returns the name of the table's file
    override: Function  # makes a context in which the engine uses a given configuration

    def overridden(self, config: EngineConfig | None) -> Callable[[], AbstractContextManager[Any]]:
        return contextlib.nullcontext if config is None else self.override.bind(values(config))

    def m_of(self, sizes: FusedMoeSizes) -> int:
        return sizes.tokens

    def entry(self, sizes: FusedMoeSizes, m: int) -> EngineEntry:
        entry: EngineEntry = self.find_entry.bind(
            w1_shape=(sizes.local_experts, 2 * sizes.inter, sizes.hidden),
            w2_shape=(sizes.local_experts, sizes.hidden, sizes.inter),
            top_k=sizes.picks, dtype=DTYPE, M=m, block_shape=[BLOCK, BLOCK],
        )()  # fmt: skip
        return entry

    def table(self, sizes: FusedMoeSizes, **product: bool) -> Mapping[int, EngineEntry] | None:
        table: Mapping[int, EngineEntry] | None = self.find_table.bind(
            E=sizes.local_experts, N=sizes.inter, dtype=DTYPE, block_n=BLOCK, block_k=BLOCK, **product
        )()
        return table or None  # engines treat an empty table as none

    def file_name(self, sizes: FusedMoeSizes, **product: bool) -> str:
        name: str = self.find_name.bind(
            E=sizes.local_experts, N=sizes.inter, dtype=DTYPE, block_shape=[BLOCK, BLOCK], **product
        )()
        return name

    def other_files(self, sizes: FusedMoeSizes) -> Mapping[str, EntryAt]:
        """The table of the second product, if the engine has one that differs from that of the first. An
        engine without one uses the table of the first product for both."""
        if "down_moe" not in self.find_table.wishes:
            return {}
        down = self.table(sizes, down_moe=True)
        if down is None or down == self.table(sizes):
            return {}
        return {self.file_name(sizes, down_moe=True): lambda m: down[nearest_of(down, m)]}


class SglangMoeTables(MoeTables):
    def file_name(self, sizes: FusedMoeSizes, **product: bool) -> str:
        """Each version of Triton has a folder of its own."""
        triton = (version("triton") or "").replace(".", "_")
        return f"configs/triton_{triton}/{super().file_name(sizes, **product)}"


ENTRY_ARGUMENTS = "w1_shape w2_shape top_k dtype M block_shape"
NAME_ARGUMENTS = "E N dtype block_shape"

VLLM = "vllm.model_executor.layers.fused_moe"
EXPERTS_OF_VLLM = Function(
    f"{VLLM}.fused_moe.fused_experts",
    needs="hidden_states w1 w2 topk_weights topk_ids global_num_experts expert_map quant_config",
)
QUANTISATION = Function(f"{VLLM}.config.fp8_w8a8_moe_quant_config", needs="w1_scale w2_scale block_shape")
TABLES_OF_VLLM = MoeTables(
    find_entry=Function(f"{VLLM}.fused_moe.try_get_optimal_moe_config", needs=ENTRY_ARGUMENTS),
    find_table=Function(f"{VLLM}.fused_moe.get_moe_configs", needs="E N dtype", wishes="block_n block_k"),
    find_name=Function(f"{VLLM}.fused_moe.get_config_file_name", needs=NAME_ARGUMENTS),
    override=Function(f"{VLLM}.override_config", positions=1),
)

MOE = "sglang.srt.layers.moe"
# Where SGLang's Triton MoE is now, and where it was before.
TRITON_MOE = (f"{MOE}.moe_runner.triton_utils", f"{MOE}.fused_moe_triton")
GROUPS = "sglang.srt.distributed.parallel_state"
EXPERTS_OF_SGLANG = Function(
    *(f"{place}.fused_moe.fused_experts" for place in TRITON_MOE),
    needs="hidden_states w1 w2 topk_output moe_runner_config use_fp8_w8a8 w1_scale w2_scale block_shape",
)
CONFIGURATION = Function(
    f"{MOE}.moe_runner.MoeRunnerConfig",
    f"{MOE}.moe_runner.base.MoeRunnerConfig",
    needs="num_experts num_local_experts inplace",
)
PICKS = Function(f"{MOE}.topk.StandardTopKOutput", needs="topk_weights topk_ids router_logits")
HAS_RANKS = Function(f"{GROUPS}.model_parallel_is_initialized")
INIT_DISTRIBUTED = Function(
    f"{GROUPS}.init_distributed_environment", needs="world_size rank local_rank distributed_init_method"
)
# It takes the size up to 0.5.20. Later versions read the size from the server's arguments.
INIT_RANKS = Function(f"{GROUPS}.initialize_model_parallel", wishes="tensor_model_parallel_size")
SET_SERVER_ARGS = Function("sglang.srt.server_args.set_global_server_args_for_scheduler", positions=1)
SERVER_ARGS = Function("sglang.srt.server_args.ServerArgs", needs="model_path")


def look_up(name: str, needs: str, wishes: str = "") -> Function:
    """A function of SGLang's fused_moe_triton_config."""
    places = (f"{place}.fused_moe_triton_config.{name}" for place in TRITON_MOE)
    return Function(*places, needs=needs, wishes=wishes)


TABLES_OF_SGLANG = SglangMoeTables(
    find_entry=look_up("try_get_optimal_moe_config", ENTRY_ARGUMENTS),
    find_table=look_up("get_moe_configs", "E N dtype block_n block_k", "down_moe"),
    find_name=look_up("get_config_file_name", NAME_ARGUMENTS, "down_moe"),
    override=Function(*(f"{place}.override_config" for place in TRITON_MOE), positions=1),
)


class TritonMoe(EngineTuned):
    """What the rows of both engines share."""

    boundaries = ("with_quant",)
    activations = "fp8"
    allocates = True

    def workspace(self, sizes: FusedMoeSizes) -> int:
        """What `fused_experts_impl` of both engines allocates: x in FP8; for each pair, in bf16, gate and up,
        and a buffer for these or the expert's output; h in bf16, and in FP8 with fp32 scales; sorted pairs in
        blocks of up to 128: for each place a pair, and at most one expert, both int32."""
        gate_up, h = 2 * 2 * sizes.inter, sizes.inter * (2 + 1) + sizes.inter // BLOCK * 4
        of_pair = max(gate_up, 2 * sizes.hidden) + gate_up + h
        sorted_pairs = (sizes.pairs + (sizes.local_experts + 1) * 128) * (4 + 4)
        return sizes.pairs * of_pair + sizes.quantised_bytes + sorted_pairs


class VllmTritonMoe(Vllm, TritonMoe):
    """`fused_experts` of vLLM's GPU builds: it quantises, sorts, launches `fused_moe_kernel` twice with SiLU
    and requantising between, and sums over picks. With expert parallelism vLLM gives ids and a map of all
    experts. Here one more launch gives experts on other ranks one further id, so that fewer are sorted."""

    name = "vllm.triton"
    requires = "vLLM 0.33, or older whose fused_experts takes a quant_config; a GPU build (CUDA or ROCm)"
    symbols = (EXPERTS_OF_VLLM, QUANTISATION, TABLES_OF_VLLM.find_table)
    tables = TABLES_OF_VLLM
    how_to_use = "set VLLM_TUNED_CONFIG_FOLDER to its folder"

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor | None) -> Prepared:
        local_experts = operands.sizes.local_experts
        ids, write_ids, expert_map = expert_ids(operands, [*range(local_experts), -1])
        scales = {"w1_scale": operands.w13_scale, "w2_scale": operands.w2_scale}
        layer = EXPERTS_OF_VLLM.bind(
            hidden_states=operands.x, w1=operands.w13, w2=operands.w2,
            topk_weights=operands.topk_weights, topk_ids=ids, expert_map=expert_map,
            global_num_experts=local_experts if expert_map is None else len(expert_map),
            quant_config=QUANTISATION.bind(**scales, block_shape=[BLOCK, BLOCK])(),
        )  # fmt: skip
        return self.prepared(operands, sequence(write_ids, layer))


class SglangTritonMoe(Sglang, TritonMoe):
    """SGLang's `fused_experts`, which skips ids of -1 itself where the rank holds fewer experts than the
    layer. The engine lets it write its output into x. Here it does not, because calls are repeated."""

    name = "sglang.triton"
    requires = "SGLang 0.5.23, or older whose fused_experts takes a moe_runner_config (CUDA or ROCm)"
    symbols = (
        *(EXPERTS_OF_SGLANG, CONFIGURATION, PICKS, HAS_RANKS, INIT_DISTRIBUTED, INIT_RANKS),
        *(SET_SERVER_ARGS, SERVER_ARGS),
    )
    tables = TABLES_OF_SGLANG
    how_to_use = "set SGLANG_MOE_CONFIG_DIR to the folder that holds its folder configs"

    def engine_table(self, sizes: FusedMoeSizes) -> EngineTable:
        set_up_one_rank()
        return super().engine_table(sizes)

    def prepare(self, operands: FusedMoeOperands, out: torch.Tensor | None) -> Prepared:
        set_up_one_rank()
        sizes = operands.sizes
        picks = {"topk_weights": operands.topk_weights, "topk_ids": operands.topk_ids}
        of_all_ranks = sizes.local_experts * sizes.ep
        experts = {"num_experts": of_all_ranks, "num_local_experts": sizes.local_experts}
        layer = EXPERTS_OF_SGLANG.bind(
            hidden_states=operands.x, topk_output=PICKS.bind(**picks, router_logits=None)(),
            moe_runner_config=CONFIGURATION.bind(**experts, inplace=False)(),
            w1=operands.w13, w2=operands.w2, w1_scale=operands.w13_scale, w2_scale=operands.w2_scale,
            use_fp8_w8a8=True, block_shape=[BLOCK, BLOCK],
        )  # fmt: skip
        return self.prepared(operands, layer)


def set_up_one_rank() -> None:
    """Sets up SGLang's state of a server of one process, as SGLang's own tests do. Where the kernels write to
    a new tensor, they ask for the server's arguments and the group of tensor-parallel ranks."""
    if HAS_RANKS.bind()():
        return
    SET_SERVER_ARGS.bind(SERVER_ARGS.bind(model_path="dummy")())()
    rendezvous = f"file://{tempfile.mkdtemp()}/ranks"
    INIT_DISTRIBUTED.bind(world_size=1, rank=0, local_rank=0, distributed_init_method=rendezvous)()
    INIT_RANKS.bind(tensor_model_parallel_size=1)()
