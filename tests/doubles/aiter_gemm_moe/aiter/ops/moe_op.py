"""aiter/ops/moe_op.py: the kernels of an MoE layer in FP8 with 128x128 scales."""

import torch
from torch import Tensor

from ..jit.core import compile_ops
from . import _moe_kernels as kernels
from .enum import ActivationType, QuantType


@compile_ops("module_moe_fmoe_asm", ffi_type="ctypes")
def fmoe_fp8_blockscale_g1u1(
    out: Tensor,
    input: Tensor,
    gate: Tensor,
    down: Tensor,
    sorted_token_ids: Tensor,
    sorted_weights: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    topk: int,
    input_scale: Tensor,
    fc1_scale: Tensor,
    fc2_scale: Tensor,
    kernelName: str | None = "",
    fc_scale_blkn: int = 128,
    fc_scale_blkk: int = 128,
    fc2_smooth_scale: Tensor | None = None,
    activation: int | None = ActivationType.Silu.value,
    block_size_M: int = 32,
) -> None:
    """moe_op.py:225. kernelName is there since v0.1.5 and has a default since v0.1.13, as has
    block_size_M."""
    kernels.one_stage(
        out,
        input,
        gate,
        down,
        sorted_token_ids,
        sorted_weights,
        sorted_expert_ids,
        num_valid_ids,
        input_scale,
        fc1_scale,
        fc2_scale,
        kernelName,
        fc_scale_blkn,
        fc_scale_blkk,
        fc2_smooth_scale,
        activation,
        block_size_M,
    )


@compile_ops("module_moe_fmoe_asm", ffi_type="ctypes")
def moe_stage1_g1u1(
    input: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    inter_dim: int,
    kernelName: str | None,
    block_m: int,
    ksplit: int = 0,
    activation: int | None = ActivationType.Silu.value,
    quant_type: int | None = QuantType.No.value,
    a1_scale: Tensor | None = None,
    w1_scale: Tensor | None = None,
    sorted_weights: Tensor | None = None,
) -> None:
    """moe_op.py:248."""
    kernels.asm_stage1(
        input,
        w1,
        w2,
        sorted_token_ids,
        sorted_expert_ids,
        num_valid_ids,
        out,
        inter_dim,
        kernelName,
        block_m,
        ksplit,
        activation,
        quant_type,
        a1_scale,
        w1_scale,
        sorted_weights,
    )


@compile_ops("module_moe_ck2stages")
def ck_moe_stage1(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str | None = None,
    w1_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: int = 0,
    activation: int = 0,
    splitk: int | None = 1,
    use_non_temporal_load: bool = False,
    dst_type: str | None = None,
    is_shuffled: bool = True,
) -> None:
    """moe_op.py:349. use_non_temporal_load (of the weights) changes no result. is_shuffled only names the
    module that is built: the block-scaled kernels read shuffled weights either way (gen_instances.py:339)."""
    kernels.ck_stage1(
        hidden_states,
        w1,
        w2,
        sorted_token_ids,
        sorted_expert_ids,
        num_valid_ids,
        out,
        topk,
        kernelName,
        w1_scale,
        a1_scale,
        block_m,
        sorted_weights,
        quant_type,
        activation,
        int(splitk or 1),
    )


@compile_ops("module_moe_ck2stages")
def ck_moe_stage2(
    inter_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str | None = None,
    w2_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: int = 0,
    activation: int = 0,
    splitk: int = 1,
    use_non_temporal_load: bool = False,
    dst_type: str | None = None,
    is_shuffled: bool = True,
) -> None:
    """moe_op.py:373."""
    kernels.ck_stage2(
        inter_states,
        w1,
        w2,
        sorted_token_ids,
        sorted_expert_ids,
        num_valid_ids,
        out,
        topk,
        kernelName,
        w2_scale,
        a2_scale,
        block_m,
        sorted_weights,
        quant_type,
    )


def ck_moe_stage1_fwd(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str = "",
    w1_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: QuantType = QuantType.No,
    activation: ActivationType = ActivationType.Silu,
    splitk: int | None = 1,
    use_non_temporal_load: bool | None = False,
    dst_type: torch.dtype | None = None,
):
    """moe_op.py:587."""
    ck_moe_stage1(
        hidden_states,
        w1,
        w2,
        sorted_token_ids,
        sorted_expert_ids,
        num_valid_ids,
        out,
        topk,
        kernelName,
        w1_scale,
        a1_scale,
        block_m,
        sorted_weights,
        quant_type.value,
        activation.value,
        int(splitk) if splitk is not None else splitk,
        use_non_temporal_load,
        None if dst_type is None else str(dst_type),
        is_shuffled=getattr(w1, "is_shuffled", False),
    )
    return out


def ck_moe_stage2_fwd(
    inter_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    sorted_token_ids: Tensor,
    sorted_expert_ids: Tensor,
    num_valid_ids: Tensor,
    out: Tensor,
    topk: int,
    kernelName: str = "",
    w2_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_m: int | None = 32,
    sorted_weights: Tensor | None = None,
    quant_type: QuantType = QuantType.No,
    activation: ActivationType = ActivationType.Silu,
    use_non_temporal_load: bool | None = False,
):
    """moe_op.py:631."""
    ck_moe_stage2(
        inter_states,
        w1,
        w2,
        sorted_token_ids,
        sorted_expert_ids,
        num_valid_ids,
        out,
        topk,
        kernelName,
        w2_scale,
        a2_scale,
        block_m,
        sorted_weights,
        quant_type.value,
        activation.value,
        use_non_temporal_load=use_non_temporal_load,
        is_shuffled=getattr(w2, "is_shuffled", False),
    )
    return out
