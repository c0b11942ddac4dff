"""vllm/model_executor/layers/fused_moe/deep_gemm_utils.py of vLLM 0.33.0: tokens into rows sorted by
expert for DeepGEMM's contiguous layout, and back. DeepGemmExperts.apply (experts/deep_gemm_moe.py) calls
them in order: deepgemm_moe_permute, a GEMM, silu and quantisation, a GEMM, deepgemm_unpermute_and_reduce,
the middle under mk_alignment_scope; with SiLU on sm_90, and on sm_100 with UE8M0, under use_psum_layout."""

import math

import torch

from vllm._kernel import UNDEFINED, addressed, misread, packed, rows, undefined
from vllm.utils.deep_gemm import (
    get_mk_alignment_for_contiguous_layout,
    get_theoretical_mk_alignment_for_contiguous_layout,
)


def expert_num_tokens_round_up_and_sum(expert_num_tokens: torch.Tensor, alignment: int) -> int:
    counts = (expert_num_tokens.to(torch.int64) + (alignment - 1)) // alignment * alignment
    return torch.sum(counts).item()


def compute_aligned_M_and_alignment(
    M: int, num_topk: int, local_num_experts: int, alignment: int, expert_tokens_meta
) -> tuple[int, int]:
    """Line 27: rows of the workspace, and the alignment of an expert's, which may be less than DeepGEMM's."""
    if expert_tokens_meta is not None and expert_tokens_meta.expert_num_tokens_cpu is not None:
        counts = expert_tokens_meta.expert_num_tokens_cpu
        return expert_num_tokens_round_up_and_sum(counts, alignment), alignment
    per_call = get_theoretical_mk_alignment_for_contiguous_layout(M * num_topk, local_num_experts)
    if per_call and per_call <= alignment:
        alignment = per_call
    rows_sum = M * num_topk + min(M * num_topk, local_num_experts) * (alignment - 1)
    return -(-rows_sum // alignment) * alignment, alignment


def compute_aligned_M(
    M: int, num_topk: int, local_num_experts: int, alignment: int, expert_tokens_meta
) -> int:
    return compute_aligned_M_and_alignment(M, num_topk, local_num_experts, alignment, expert_tokens_meta)[0]


def _local(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> list[list[int]]:
    """apply_expert_map, line 107: an id of -1 is not looked up. A kernel reads a row's ids one by one."""
    ids = rows(topk_ids, "topk_ids", topk_ids.shape).tolist()
    if expert_map is None:
        return ids
    table = addressed(expert_map, "expert_map", (expert_map.numel(),), (1,)).tolist()
    if any(i >= len(table) or i < -1 for row in ids for i in row):
        raise RuntimeError("memory access fault: expert_map is read past its end")
    return [[i if i == -1 else table[i] for i in row] for row in ids]


def _count(topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """fused_moe/utils.py count_expert_num_tokens."""
    flat = packed(topk_ids, "topk_ids", tuple(topk_ids.shape))
    counts = [0] * experts
    for row in _local(flat, expert_map):
        for expert in row:
            if 0 <= expert < experts:
                counts[expert] += 1
    return torch.tensor(counts, dtype=torch.int32, device=topk_ids.device)


@torch.no_grad()
def ep_scatter(
    recv_x: torch.Tensor,
    recv_x_scale: torch.Tensor,
    recv_topk: torch.Tensor,
    num_recv_tokens_per_expert: torch.Tensor,
    expert_map: torch.Tensor | None,
    expert_start_loc: torch.Tensor,
    output_tensor: torch.Tensor,
    output_tensor_scale: torch.Tensor,
    m_indices: torch.Tensor,
    output_index: torch.Tensor,
    align_m: int = 128,
    block_size: int = 128,
    pack_ue8m0: bool = False,
    use_psum_layout: bool = False,
):
    """Line 277. fp32 scales are read and written at a column stride of 1: row-major. The order of an expert's
    rows is that of atomic additions; here from the last token to the first."""
    experts, hidden = num_recv_tokens_per_expert.shape[0], recv_x.shape[1]
    if use_psum_layout:
        assert m_indices.shape == (experts,)
    else:
        assert m_indices.shape[0] % align_m == 0
    assert expert_start_loc.shape[0] == experts
    for name, tensor in (("counts", num_recv_tokens_per_expert), ("m_indices", m_indices)):
        misread(tensor.dtype == torch.int32, f"{name} of {tensor.dtype}, not int32")
    counts = packed(num_recv_tokens_per_expert, "the counts", (experts,)).tolist()
    starts, ends, layout = [0], [], packed(m_indices, "m_indices", tuple(m_indices.shape))
    for expert, count in enumerate(counts):
        ends.append(starts[-1] + count)
        if not use_psum_layout:
            if ends[-1] > layout.numel():
                raise RuntimeError("memory access fault: m_indices is written past its end")
            layout[starts[-1] : ends[-1]] = expert
        starts.append(starts[-1] + -(-count // align_m) * align_m)
    if use_psum_layout:
        layout.copy_(torch.tensor(ends, dtype=torch.int32))
    tokens, groups = recv_topk.shape[0], hidden // block_size
    values = rows(recv_x, "recv_x", (tokens, hidden))
    if pack_ue8m0:
        scales = _packed_bytes(addressed(recv_x_scale, "scales", (tokens, groups), recv_x_scale.stride()))
    else:
        misread(recv_x_scale.dtype == output_tensor_scale.dtype, "scales of another dtype than their copies")
        scales = rows(recv_x_scale, "recv_x_scale", (tokens, groups))
    index = rows(output_index, "output_index", recv_topk.shape)
    next_row = starts[:-1]
    for token, ids in reversed(list(enumerate(_local(recv_topk, expert_map)))):
        for slot, expert in enumerate(ids):
            if expert < 0:
                continue
            if expert >= experts:
                raise RuntimeError(f"memory access fault: expert {expert} of {experts}")
            row = next_row[expert]
            next_row[expert] += 1
            if row >= output_tensor.shape[0]:
                raise RuntimeError("memory access fault: output_tensor is written past its end")
            index[token, slot] = row
            output_tensor[row] = values[token]
            output_tensor_scale[row] = scales[token]
    expert_start_loc.copy_(torch.tensor(next_row, dtype=torch.int32))


def _packed_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Four UE8M0 bytes of a row to an int32, the first lowest; bytes past the row are undefined."""
    whole = torch.full((scales.shape[0], -(-scales.shape[1] // 4) * 4), 255, dtype=torch.uint8)
    whole[:, : scales.shape[1]] = scales
    return whole.view(torch.int32)


@torch.no_grad()
def ep_gather(
    input_tensor: torch.Tensor,
    recv_topk_ids: torch.Tensor,
    recv_topk_weight: torch.Tensor,
    input_index: torch.Tensor,
    expert_map: torch.Tensor | None,
    output_tensor: torch.Tensor,
):
    """Line 426: each token's rows, weighted and summed in fp32. The number of tokens is that of the
    output."""
    tokens, hidden = output_tensor.shape[0], input_tensor.shape[1]
    assert hidden % math.gcd(hidden, 1024) == 0
    shape = (tokens, recv_topk_ids.shape[1])
    index = rows(input_index, "input_index", shape).tolist()
    weight = rows(recv_topk_weight, "recv_topk_weight", shape)
    source = rows(input_tensor, "input_tensor", tuple(input_tensor.shape))
    out = rows(output_tensor, "output_tensor", (tokens, hidden))
    local = _local(recv_topk_ids[:tokens], expert_map)
    for token in range(tokens):
        total = torch.zeros(hidden, device=out.device)
        for slot in range(shape[1]):
            if local[token][slot] >= 0:
                row = index[token][slot]
                if not 0 <= row < source.shape[0]:
                    raise RuntimeError(f"memory access fault: row {row} of {source.shape[0]}")
                total += source[row].float() * weight[token, slot]
        out[token] = total.to(out.dtype)


def deepgemm_moe_permute(
    aq: torch.Tensor,
    aq_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    local_num_experts: int,
    expert_map: torch.Tensor | None,
    expert_tokens_meta,
    aq_out: torch.Tensor | None = None,
    block_size: int | None = None,
    use_psum_layout: bool = False,
):
    """Line 467. Returns the rows, their scales, DeepGEMM's grouped layout (an expert per row, -1 in
    padding, or with `use_psum_layout` each expert's end), the row of each token's slot and the alignment
    that was used."""
    assert aq.ndim == 2
    assert topk_ids.dtype.is_signed, "The kernel uses -1 to represent invalid topk_ids"
    hidden, device = aq.size(1), aq.device
    block_m, block_k = get_mk_alignment_for_contiguous_layout()
    block_k = block_k if block_size is None else block_size
    m_sum, align_used = compute_aligned_M_and_alignment(
        topk_ids.size(0), topk_ids.size(1), local_num_experts, block_m, expert_tokens_meta
    )
    expert_start_loc = undefined((local_num_experts,), torch.int32, device)
    assert aq_out is None or aq_out.shape == (m_sum, hidden)
    if aq_out is None:
        aq_out = undefined((m_sum, hidden), aq.dtype, device)
    pack_ue8m0 = aq_scale.dtype == torch.uint8
    groups = hidden // block_k
    if pack_ue8m0:
        aligned, columns = -(-m_sum // 4) * 4, (groups + 3) // 4
        storage = torch.full((aligned * columns,), -1, dtype=torch.int32, device=device)
        scales = storage.as_strided((m_sum, columns), (1, aligned))
    else:
        scales = torch.zeros((m_sum, groups), device=device, dtype=torch.float32)
    if use_psum_layout:
        layout = undefined((local_num_experts,), torch.int32, device)
    else:
        layout = torch.full((m_sum,), -1, device=device, dtype=torch.int32)
    inv_perm = torch.full(topk_ids.shape, UNDEFINED, device=device, dtype=torch.int32)
    counts = None if expert_tokens_meta is None else expert_tokens_meta.expert_num_tokens
    ep_scatter(
        recv_x=aq,
        recv_x_scale=aq_scale,
        recv_topk=topk_ids,
        num_recv_tokens_per_expert=(
            _count(topk_ids, local_num_experts, expert_map) if counts is None else counts
        ),
        expert_start_loc=expert_start_loc,
        expert_map=expert_map,
        output_tensor=aq_out,
        output_tensor_scale=scales,
        m_indices=layout,
        output_index=inv_perm,
        align_m=align_used,
        block_size=block_k,
        pack_ue8m0=pack_ue8m0,
        use_psum_layout=use_psum_layout,
    )
    return aq_out, scales, layout, inv_perm, align_used


def deepgemm_unpermute_and_reduce(
    a: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    inv_perm: torch.Tensor,
    expert_map: torch.Tensor | None,
    output: torch.Tensor,
):
    """Line 562."""
    return ep_gather(a, topk_ids, topk_weights, inv_perm, expert_map, output)
