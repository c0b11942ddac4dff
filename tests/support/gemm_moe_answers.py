"""What libraries' functions for products with block scales and for fused MoE return (see answers.py)."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from tests.support.stand_ins import Answer, Arguments, fp32, int32, numbered, write, writes

BLOCK = 128


def like(name: str) -> Answer:
    """As that argument in shape and dtype."""
    return lambda a: numbered(*a[name].shape, dtype=a[name].dtype)


def product(a: str, b: str) -> Answer:
    """[M, N] of [M, K] and [N, K]."""
    return lambda given: numbered(len(given[a]), len(given[b]))


def of_transposed(given: Arguments) -> torch.Tensor:
    """[M, N] of [M, K] and [K, N]: the first two arguments."""
    a, b, *_ = given.values()
    return numbered(a.shape[0], b.shape[1])


def columns(rows: int, count: int, *groups: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., rows, count], rows side by side, each column at a multiple of four elements."""
    return numbered(*groups, count, -(-rows // 4) * 4, dtype=dtype).mT[..., :rows, :]


def packed_scales(a: Arguments) -> torch.Tensor:
    """Of every row, four of K in an int32."""
    return columns(a["mn"], -(-a["k"] // (4 * BLOCK)), *a["sf"].shape[:-2], dtype=torch.int32)


def quantised(x: torch.Tensor, packed: bool = False, width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3fn as x, of which the last `width` columns are left, and scales, rows side by side."""
    *groups, rows, k = x.shape
    k = width or k
    blocks = k // BLOCK
    dtype, count = (torch.int32, -(-blocks // 4)) if packed else (torch.float32, blocks)
    values = numbered(*groups, rows, k, dtype=torch.float8_e4m3fn)
    return values, columns(rows, count, *groups, dtype=dtype)


def quantised_by_vllm(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantised(a["x"])
    return values, scales if a["column_major_scales"] else scales.contiguous()


def placed_by_vllm(a: Arguments) -> tuple[Any, ...]:
    """deepgemm_moe_permute: rows, their scales, experts' ends or rows' owners, rows of picks, alignment."""
    rows, hidden = a["aq_out"].shape
    packed = a["aq_scale"].dtype == torch.int32
    scales = (
        columns(rows, -(-hidden // (4 * BLOCK)), dtype=torch.int32) if packed else fp32(rows, hidden // BLOCK)
    )
    owners = a["local_num_experts"] if a.get("use_psum_layout") else rows
    return a["aq_out"], scales, int32(owners), int32(*a["topk_ids"].shape), 64


def placed_by_sglang(a: Arguments) -> tuple[Any, ...]:
    """moe_ep_deepgemm_preprocess: rows of experts, none, rows of picks, values and scales by expert."""
    experts, x = a["num_local_experts"], a["hidden_states"]
    rows = (len(x) // 256 + 1) * 256
    values = numbered(experts, rows, x.shape[1], dtype=a["output_dtype"])
    return (
        int32(experts),
        None,
        int32(a["topk_ids"].numel()),
        values,
        fp32(experts, rows, x.shape[1] // BLOCK),
    )


def sorted_by_aiter(a: Arguments) -> tuple[torch.Tensor, ...]:
    """moe_sorting: ids, weights, experts of blocks, how many ids are valid, and an output of zeros."""
    blocks = a["num_experts"] + 1
    out = torch.zeros(len(a["topk_ids"]), a["model_dim"], dtype=a["moebuf_dtype"])
    return int32(blocks * a["block_size"]), fp32(blocks * a["block_size"]), int32(blocks), int32(2), out


BLOCK_SCALE_GEMM: Mapping[str, Answer] = {
    "torch.scaled_mm": of_transposed,
    "deep_gemm.fp8_gemm_nt": writes("d"),
    "deep_gemm.gemm_fp8_fp8_bf16_nt": writes("out"),
    "deep_gemm.transform_sf_into_required_layout": packed_scales,
    "vllm.fp8_gemm_nt": writes("d"),
    "vllm.transform_sf_into_required_layout": packed_scales,
    "vllm.per_token_group_quant_fp8": quantised_by_vllm,
    "vllm.per_token_group_quant_fp8_packed_for_deepgemm": lambda a: quantised(a["x"], packed=True),
    "vllm.cutlass_scaled_mm": of_transposed,
    "vllm.w8a8_triton_block_scaled_mm": product("A", "B"),
    "sglang.sglang_per_token_group_quant_fp8": lambda a: quantised(a["x"], a["scale_ue8m0"]),
    "sglang.fp8_blockwise_scaled_mm": of_transposed,
    "sglang.w8a8_block_fp8_matmul_triton": product("A", "B"),
    "sglang.w8a8_block_fp8_matmul": product("A", "B"),
    "sglang.try_smallm_fp8_bs_linear": product("x", "WQ"),
    # CK's of that name allocates, Triton's writes y.
    "aiter.gemm_a8w8_blockscale": lambda a: write(a["y"]) if "y" in a else product("XQ", "WQ")(a),
    "aiter.gemm_a8w8_blockscale_preshuffle": writes("y"),
    "aiter.gemm_a8w8_blockscale_bpreshuffle": product("XQ", "WQ"),
    **{
        f"aiter.gemm_a8w8_blockscale{kind}": writes("Out")
        for kind in ("_ck", "_cktile", "_bpreshuffle_ck", "_bpreshuffle_cktile")
    },
    "aiter.shuffle_weight": like("x"),
    "aiter.get_CKGEMM_config": lambda a: None,
}

FUSED_MOE: Mapping[str, Answer] = {
    # The layer allocates, Triton's product of that name writes C.
    "aiter.fused_moe": lambda a: write(a["C"]) if "C" in a else like("hidden_states")(a),
    "aiter.get_padded_M": lambda a: 1 << (a["M"] - 1).bit_length(),
    "aiter.moe_sorting": sorted_by_aiter,
    "aiter.per_group_quant_hip": lambda a: (
        numbered(*a["x"].shape, dtype=a["quant_dtype"]), fp32(*a["x"].shape[:-1], a["x"].shape[-1] // BLOCK)
    ),
    "aiter.get_optimal_moe_config": lambda a: {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128},
    "flashinfer.trtllm_fp8_block_scale_moe": lambda a: (
        None if "output" in a else numbered(*a["hidden_states"].shape)
    ),
    "flashinfer.shuffle_matrix_a": like("input_tensor"),
    "flashinfer.convert_to_block_layout": lambda a: numbered(
        a["input_tensor"].shape[1] // a["blockK"], len(a["input_tensor"]), a["blockK"], dtype=torch.uint8
    ),
    "deep_gemm.get_mk_alignment_for_contiguous_layout": lambda a: 128,
    "deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout": lambda a: 64,
    "deep_gemm.get_mn_major_tma_aligned_tensor": lambda a: columns(
        a["sf"].shape[-2], a["sf"].shape[-1], *a["sf"].shape[:-2]
    ),
    "deep_gemm.m_grouped_fp8_gemm_nt_contiguous": writes("d"),
    "deep_gemm.m_grouped_fp8_gemm_nt_masked": writes("d"),
    "deep_gemm.fp8_m_grouped_gemm_nt_masked": writes("d"),
    "vllm.compute_aligned_M_and_alignment": lambda a: (-(-a["M"] * a["num_topk"] // 64) * 64, 64),
    "vllm.get_mk_alignment_for_contiguous_layout": lambda a: [128, 128],
    "vllm.mk_alignment_scope": lambda a: contextlib.nullcontext(),
    "vllm.deepgemm_moe_permute": placed_by_vllm,
    "vllm.m_grouped_fp8_gemm_nt_contiguous": writes("2"),
    "vllm.silu_mul_per_token_group_quant_fp8_colmajor": lambda a: (
        a["output"], columns(len(a["output"]), a["output"].shape[1] // BLOCK)
    ),
    "vllm.silu_mul_quant_fp8_packed_triton": lambda a: (
        a["output_q"],
        columns(len(a["output_q"]), -(-a["output_q"].shape[1] // (4 * BLOCK)), dtype=torch.int32),
    ),
    "vllm.fused_experts": like("hidden_states"),
    "vllm.fp8_w8a8_moe_quant_config": lambda a: "the quantisation",
    "sglang.moe_ep_deepgemm_preprocess": placed_by_sglang,
    "sglang.per_token_group_quant": lambda a: quantised(
        a["input"], a["scale_ue8m0"], a["input"].shape[-1] // 2
    ),
    "sglang.fused_experts": like("hidden_states"),
    "sglang.model_parallel_is_initialized": lambda a: False,
}  # fmt: skip
