"""kernels/ops/moe/ep_moe_kernels.py of SGLang 0.5.23: tokens into DeepGEMM's masked and contiguous
layouts, the activation between its GEMMs, and back. The order of an expert's rows is that of atomic
additions; here from the last token to the first."""

import torch

from ...._kernel import (
    FP8,
    addressed,
    inside,
    integers,
    packed,
    poisoned,
    quantised,
    rows,
    scale_ue8m0,
    silu_and_mul,
)
from ..quantization.fp8_kernel import per_token_group_quant_fp8


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def silu_and_mul_masked_post_quant_fwd(
    input: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor,
    quant_group_size: int,
    masked_m: torch.Tensor,
    scale_ue8m0: bool = False,
    gemm1_alpha: float = 0.0,
    gemm1_clamp_limit: float = 0.0,
    num_real_tokens: int | None = None,
    topk: int | None = None,
):
    """Line 464. input [E, M, 2 K], output FP8 [E, M, K], output_scale fp32 [E, M, G] of any strides or,
    packed, int32 [E, G / 4, M]; masked_m [E] rows of each expert are written."""
    assert input.is_contiguous()
    assert output.dtype == FP8
    assert output.is_contiguous()
    assert len(input.shape) == 3
    assert input.shape[0] == masked_m.shape[0]
    assert input.shape[-1] % 2 == 0
    experts, m, half = *input.shape[:2], input.shape[-1] // 2
    assert half % quant_group_size == 0
    if gemm1_alpha:
        raise NotImplementedError("the double of SGLang does not cover gemm1_alpha")
    live = integers(masked_m, "masked_m", experts)
    values, scale = quantised(silu_and_mul(input, input.dtype), quant_group_size, scale_ue8m0)
    if output_scale.dtype == torch.int32:
        assert scale_ue8m0, "packed int32 scales are UE8M0 by definition"
        assert num_real_tokens is not None and topk is not None
        groups = half // quant_group_size
        assert groups % 4 == 0, "packed UE8M0 path requires num_groups % 4 == 0"
        assert tuple(output_scale.shape) == (experts, groups // 4, m)
        if sum(live) > num_real_tokens * topk:
            raise RuntimeError("rows beyond num_real_tokens * topk are not reached by the grid")
        target, stored = output_scale.mT, packed(scale)
    else:
        shape = (experts, m, half // quant_group_size)
        target, stored = addressed(output_scale, "output_scale", shape, output_scale.stride()), scale
    for expert, count in enumerate(live):
        if count > m:
            raise RuntimeError(f"memory access fault: row {count} of {m}")
        output[expert, :count] = values[expert, :count]
        target[expert, :count] = stored[expert, :count]


def post_reorder_deepgemm(
    down_output,
    output,
    src2dst,
    topk_ids,
    topk_weights,
    topk,
    num_tokens,
    hidden_size,
    routed_scaling_factor: float,
    lora_delta=None,
):
    """Line 1059. Sums the rows of src2dst that are not negative, weighted, in fp32. topk_ids is not read;
    every tensor is taken for contiguous."""
    if lora_delta is not None:
        raise NotImplementedError("the double of SGLang does not cover lora_delta")
    index = addressed(src2dst, "src2dst", (num_tokens, topk), (topk, 1)).tolist()
    weights = addressed(topk_weights, "topk_weights", (num_tokens, topk), (topk, 1))
    source = addressed(
        down_output, "down_output", (down_output.numel() // hidden_size, hidden_size), (hidden_size, 1)
    )
    out = addressed(output, "output", (num_tokens, hidden_size), (hidden_size, 1))
    for token in range(num_tokens):
        total = torch.zeros(hidden_size, device=out.device)
        for slot, row in enumerate(index[token]):
            if row >= 0:
                total += source[inside(row, source, "down_output")].float() * weights[token, slot].float()
        out[token] = (total * routed_scaling_factor).to(out.dtype)


@torch.no_grad()
def ep_scatter(
    recv_x: torch.Tensor,
    recv_x_scale: torch.Tensor,
    recv_topk: torch.Tensor,
    num_recv_tokens_per_expert: torch.Tensor,
    num_valid_tokens_per_expert: torch.Tensor,
    expert_start_loc: torch.Tensor,
    output_tensor: torch.Tensor,
    output_tensor_scale: torch.Tensor,
    m_indices: torch.Tensor,
    output_index: torch.Tensor,
    scale_ue8m0: bool = False,
    quant_block_size: int = 128,
    expert_alignment: int = 128,
    expert_start: int = 0,
):
    """Line 1224. The counts that place experts are rounded up already, those that are valid are not. Slots of
    no local expert get an index of -1."""
    step = expert_alignment & -expert_alignment
    experts, hidden = num_recv_tokens_per_expert.shape[0], recv_x.shape[1]
    groups = hidden // quant_block_size
    groups = _cdiv(groups, 4) if scale_ue8m0 else groups
    assert m_indices.shape[0] % step == 0
    is_fp8 = recv_x_scale is not None and recv_x.dtype != torch.bfloat16
    if is_fp8:
        assert recv_x_scale.dtype == output_tensor_scale.dtype
        assert recv_x_scale.shape[1] == output_tensor_scale.shape[1] == groups
    padded = integers(num_recv_tokens_per_expert, "num_recv_tokens_per_expert", experts)
    valid = integers(num_valid_tokens_per_expert, "num_valid_tokens_per_expert", experts)
    integers(m_indices, "m_indices", 1)
    starts = [sum(padded[:expert]) for expert in range(experts)]
    layout = addressed(m_indices, "m_indices", (m_indices.numel(),), (1,))
    for expert, start in enumerate(starts):
        written = _cdiv(padded[expert], step) * step
        if written != padded[expert] or start + written > layout.numel():
            raise RuntimeError(f"memory access fault: m_indices, written in steps of {step}")
        layout[start : start + written] = -1
        layout[start : start + valid[expert]] = expert
    tokens = recv_topk.shape[0]
    ids = rows(recv_topk, "recv_topk", tuple(recv_topk.shape)).tolist()
    values = rows(recv_x, "recv_x", (tokens, hidden))
    if is_fp8:
        scales = addressed(recv_x_scale, "recv_x_scale", (tokens, groups), recv_x_scale.stride())
    index = rows(output_index, "output_index", tuple(recv_topk.shape))
    for token in reversed(range(tokens)):
        for slot, global_expert in enumerate(ids[token]):
            expert = global_expert - expert_start
            index[token, slot] = -1
            if not 0 <= expert < experts:
                continue
            row = inside(starts[expert], output_tensor, "output_tensor")
            starts[expert] += 1
            index[token, slot] = row
            output_tensor[row] = values[token]
            if is_fp8:
                output_tensor_scale[row] = scales[token]
    expert_start_loc.copy_(torch.tensor(starts, dtype=torch.int32))


@torch.no_grad()
def ep_gather(
    input_tensor: torch.Tensor,
    recv_topk_ids: torch.Tensor,
    recv_topk_weight: torch.Tensor,
    input_index: torch.Tensor,
    output_tensor: torch.Tensor,
):
    """Line 1486. Unlike post_reorder_deepgemm it goes by the ids: one that is not negative is read."""
    tokens, hidden = output_tensor.shape[0], input_tensor.shape[1]
    block = 128 if hidden % 1024 != 0 else 1024
    assert hidden % block == 0
    shape = (tokens, recv_topk_ids.shape[1])
    ids = rows(recv_topk_ids, "recv_topk_ids", shape).tolist()
    index = rows(input_index, "input_index", shape).tolist()
    weights = rows(recv_topk_weight, "recv_topk_weight", shape)
    source = rows(input_tensor, "input_tensor", tuple(input_tensor.shape))
    out = rows(output_tensor, "output_tensor", (tokens, hidden))
    for token in range(tokens):
        total = torch.zeros(hidden, device=out.device)
        for slot, expert in enumerate(ids[token]):
            if expert >= 0:
                row = inside(index[token][slot], source, "input_tensor")
                total += source[row].float() * weights[token, slot]
        out[token] = total.to(out.dtype)


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """Line 1525."""
    assert 16 % element_size == 0
    per = 16 // element_size
    return _cdiv(x, per) * per


def tma_align_input_scale(input_scale: torch.Tensor):
    """Line 1575: the same [M, G], in columns of M rounded up to 16 bytes."""
    assert input_scale.dim() == 2
    m, groups = input_scale.shape
    column = get_tma_aligned_size(m, input_scale.element_size())
    output = poisoned((groups, column), input_scale.dtype, input_scale.device)
    return output.t()[:m].copy_(input_scale)


def fused_moe_dispatch_index(
    topk_ids: torch.Tensor, num_local_experts: int, m_max: int, expert_start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Line 1638. Rows of each expert int32 [E], and of each slot its row in [E * m_max] or -1, int32
    [slots]."""
    flat = topk_ids.view(-1)
    counts, places = [0] * num_local_experts, [-1] * flat.numel()
    for slot in reversed(range(flat.numel())):
        expert = int(flat[slot]) - expert_start
        if 0 <= expert < num_local_experts:
            places[slot] = expert * m_max + counts[expert]
            counts[expert] += 1
    device = topk_ids.device
    return (
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(places, dtype=torch.int32, device=device),
    )


def moe_ep_deepgemm_preprocess(
    topk_ids: torch.Tensor,
    num_local_experts: int,
    hidden_states: torch.Tensor,
    top_k: int,
    block_shape,
    output_dtype: torch.dtype = FP8,
    use_mxfp8: bool = False,
    expert_start: int = 0,
) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Line 1738, FP8. Quantises and scatters: masked_m [E], expected_m, src2dst [T * top_k], FP8 [E, M, K]
    with M the tokens rounded up past the next 256, and its scales: fp32 [E, M, G], or on sm_100 packed
    int32 [E, M, G / 4] in columns of M."""
    if use_mxfp8 or output_dtype != FP8:
        raise NotImplementedError("the double of SGLang does not cover MXFP8 and bf16 here")
    tokens, hidden = hidden_states.shape
    m_max = (tokens // 256 + 1) * 256
    expected_m = (topk_ids.numel() - 1) // num_local_experts + 1
    masked_m, src2dst = fused_moe_dispatch_index(topk_ids, num_local_experts, m_max, expert_start)
    _, block_k = block_shape or [128, 128]
    groups, device = hidden // block_k, hidden_states.device
    gateup = poisoned((num_local_experts, m_max, hidden), FP8, device)
    if scale_ue8m0():
        assert hidden_states.dtype == torch.bfloat16 and hidden_states.is_contiguous()
        assert groups % 4 == 0, "num_groups must be a multiple of 4 for int32 packing"
        values, scale = quantised(hidden_states.float(), block_k, True)
        stored = packed(scale)
        scales = poisoned((num_local_experts, groups // 4, m_max), torch.int32, device).mT
    else:
        values, stored = per_token_group_quant_fp8(hidden_states, block_k)
        scales = poisoned((num_local_experts, m_max, groups), torch.float32, device)
    for slot, row in enumerate(src2dst.tolist()):
        if row >= 0:
            expert, place = divmod(row, m_max)
            gateup[expert, place] = values[slot // top_k]
            scales[expert, place] = stored[slot // top_k]
    return masked_m, expected_m, src2dst, gateup, scales
