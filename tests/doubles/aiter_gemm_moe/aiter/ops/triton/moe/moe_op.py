"""aiter/ops/triton/moe/moe_op.py: one GEMM of an MoE layer, to be called twice; block-scaled FP8 alone
here."""

from typing import Any

import torch

from aiter._kernel import as_fp8, cdiv

_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def fused_moe(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A_scale: torch.Tensor | None,
    B_scale: torch.Tensor | None,
    B_zp: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor,
    mul_routed_weight: bool,
    top_k: int,
    compute_type: Any,
    use_fp8_w8a8: bool,
    use_int8_w8a16: bool,
    use_int4_w4a16: bool,
    block_shape: list[int] | None = None,
    config: dict[str, Any] | None = None,
) -> None:
    """:55. A [rows, K] fp8 already, A_scale [rows, K/128] (group quantisation is a TODO at :120); B [E, N, K]
    not shuffled, B_scale [E, N/128, K/128]; C [tokens, top_k, N] by its last two strides, one row per slot.
    Without routed weights here the caller multiplies in the second GEMM and sums over top_k itself. `config`
    has a default of None that cannot be used (:137)."""
    assert topk_weights.stride(1) == 1
    assert sorted_token_ids.stride(0) == 1
    if not use_fp8_w8a8 or use_int8_w8a16 or use_int4_w4a16 or block_shape is None:
        raise NotImplementedError("the double has block-scaled FP8 alone")
    assert B_scale is not None
    assert len(block_shape) == 2
    block_n, block_k = block_shape
    assert cdiv(A.shape[-1], block_k) == A_scale.shape[-1]
    assert cdiv(B.shape[-2], block_n) == B_scale.shape[-2]
    assert cdiv(B.shape[-1], block_k) == B_scale.shape[-1]
    block_m, step = config["BLOCK_SIZE_M"], config["BLOCK_SIZE_K"]
    a, b, slots = as_fp8(A, "A").float(), as_fp8(B, "B").float(), topk_ids.numel()
    if not topk_weights.is_contiguous() or A.shape[1] != B.shape[2]:
        raise RuntimeError("topk_weights or A would be misread")
    if sorted_token_ids.dtype != torch.int32 or expert_ids.dtype != torch.int32:
        raise RuntimeError("sorted_token_ids and expert_ids must be int32")
    rows = torch.as_strided(C, (slots, B.shape[1]), (C.stride(1), C.stride(2)), C.storage_offset())
    used = len(sorted_token_ids)
    if A.shape[0] < block_m:  # :137
        used = min(used, A.shape[0] * top_k * block_m)
    for start in range(0, min(int(num_tokens_post_padded[0]), used), block_m):
        block = sorted_token_ids[start : start + block_m].long()
        if block.min() < 0:
            raise RuntimeError("memory access fault: a slot below 0")
        block = block[block < slots]
        expert = int(expert_ids[start // block_m])
        if expert == -1:  # another rank's: zeros (_triton_kernels/moe/moe_op.py:664)
            rows[block] = 0
            continue
        if not 0 <= expert < B.shape[0] or (block.numel() and block.max() // top_k >= A.shape[0]):
            raise RuntimeError("memory access fault: an expert or a row that is not there")
        total = torch.zeros(len(block), B.shape[1])
        for k in range(
            0, A.shape[1], step
        ):  # one scale per step: BLOCK_SIZE_K must divide block_k to be right
            column = A_scale[block // top_k, k // block_k][:, None]
            scale = B_scale[expert, :, k // block_k].repeat_interleave(block_n)[: B.shape[1]]
            total += (a[block // top_k, k : k + step] @ b[expert, :, k : k + step].T) * column * scale
        if mul_routed_weight:
            total *= topk_weights.flatten()[block][:, None]
        rows[block] = total.to(_COMPUTE[str(compute_type)]).to(C.dtype)
