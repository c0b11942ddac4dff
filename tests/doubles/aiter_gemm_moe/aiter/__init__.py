"""A double of AITER's block-scaled FP8 GEMM and MoE entry points, written from its source at commit e404860
(46 commits after v0.1.20, 2026-08-22). File and line numbers in the modules are of that commit. Importing it
makes operators `torch.ops.aiter.NAME`, as the real one does."""

# ruff: noqa: F401, I001
from .jit import core as core
from .utility import dtypes as dtypes
from .ops.enum import ActivationType, QuantType
from .ops.quant import (
    dynamic_per_token_scaled_quant,
    get_hip_quant,
    partial_transpose,
    per_group_quant_hip,
)
from .ops.gemm_op_a8w8 import (
    gemm_a8w8_blockscale,
    gemm_a8w8_blockscale_bpreshuffle,
    gemm_a8w8_blockscale_bpreshuffle_asm,
    gemm_a8w8_blockscale_bpreshuffle_ck,
    gemm_a8w8_blockscale_bpreshuffle_cktile,
    gemm_a8w8_blockscale_ck,
    gemm_a8w8_blockscale_cktile,
    get_CKGEMM_config,
)
from .ops.moe_op import (
    ck_moe_stage1,
    ck_moe_stage1_fwd,
    ck_moe_stage2,
    ck_moe_stage2_fwd,
    fmoe_fp8_blockscale_g1u1,
    moe_stage1_g1u1,
)
from .ops.moe_sorting import moe_sorting_fwd, moe_sorting_opus_fwd, moe_sorting_opus_get_workspace_size
