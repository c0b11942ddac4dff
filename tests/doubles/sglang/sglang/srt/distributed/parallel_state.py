"""srt/distributed/parallel_state.py of SGLang 0.5.23: the groups of one process, without torch's."""

from types import SimpleNamespace

from ..runtime_context import get_exec, get_parallel

_groups = {}


def init_distributed_environment(
    world_size=-1,
    rank=-1,
    distributed_init_method="env://",
    local_rank=-1,
    backend="nccl",
    timeout=None,
    moe_a2a_backend=None,
    recovered_rank=False,
    max_world_size=None,
):
    """Line 2468."""
    if (world_size, rank) != (1, 0) or not distributed_init_method.startswith(("file://", "tcp://")):
        raise NotImplementedError("the double of SGLang has one process, which meets nobody")
    _groups["world"] = SimpleNamespace(world_size=1)


def initialize_model_parallel(
    backend=None,
    duplicate_tp_group=False,
    enable_symm_mem=False,
    recovered_rank=False,
    rank_offset=0,
    max_world_size=None,
):
    """Line 2566. The widths of the groups are those of the published settings."""
    assert "world" in _groups, "torch.distributed is initialised"
    get_exec()  # the widths, from settings that are published with these
    assert "tp" not in _groups, "tensor model parallel group is already initialized"
    _groups["tp"] = SimpleNamespace(world_size=1)
    get_parallel().override_permanently(tp_group=_groups["tp"])


def model_parallel_is_initialized():
    """Line 3079."""
    return "tp" in _groups
