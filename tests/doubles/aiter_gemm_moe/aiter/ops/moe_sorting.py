"""aiter/ops/moe_sorting.py and moe_sorting_opus.py: slots of tokens sorted by expert, padded to whole
blocks."""

import torch

from ..jit.core import compile_ops


def _sort(ids, weights, out_ids, out_weights, out_experts, valid, buf, experts, unit, mask, local_tokens):
    """csrc/include/moe_sorting_opus.h:281-365. Outputs past the valid part are left as they were."""
    if weights.dtype != torch.float32:  # moe_sorting_opus_kernels.cu:31
        raise RuntimeError("topk_weights must be FP32 (float32)")
    if ids.dtype != torch.int32:  # :3541: any other type returns -1, which nobody reads, with nothing sorted
        raise RuntimeError(f"topk_ids of {ids.dtype} would not be sorted, silently: they must be int32")
    if not ids.is_contiguous() or not weights.is_contiguous() or weights.shape != ids.shape:
        raise RuntimeError(
            "topk_ids and topk_weights would be misread: they must be contiguous and of one shape"
        )
    for what, tensor in (("expert_mask", mask), ("num_local_tokens", local_tokens)):
        if tensor is not None and tensor.dtype != torch.int32:
            raise RuntimeError(f"{what} would be misread: it must be int32")
    if mask is not None and (mask.numel() != experts or not bool(((mask == 0) | (mask == 1)).all())):
        raise RuntimeError(f"expert_mask must hold {experts} zeros and ones")
    tokens = ids.shape[0] if local_tokens is None else int(local_tokens[0])
    ids, weights = ids[:tokens], weights[:tokens]
    # :794: ids address shared memory, unchecked: -1 or num_experts corrupts the counts of other experts.
    if ids.min() < 0 or ids.max() >= experts:
        raise RuntimeError("memory access fault: an expert id outside of 0 .. num_experts - 1")
    start, local = 0, 0
    for expert in range(experts):
        if mask is not None and not mask[expert]:
            continue
        token, place = (ids == expert).nonzero(as_tuple=True)
        if len(token) != len(token.unique()):  # :797: one cell per token and expert, the last write wins
            raise RuntimeError("a token that names an expert twice: one of the two would be lost")
        end = start + -(-len(token) // unit) * unit  # an expert without tokens takes no block
        out_ids[start:end] = tokens | (ids.shape[1] << 24)  # padding: the token past the last
        out_weights[start:end] = 0.0
        out_ids[start : start + len(token)] = (token | (place << 24)).int()  # :273, low 24 bits the token
        out_weights[start : start + len(token)] = weights[token, place]
        out_experts[start // unit : end // unit] = local  # numbered among the unmasked
        start, local = end, local + 1
    valid[0], valid[1] = start, tokens
    if buf.numel():
        buf[:tokens] = 0  # :1119: what the second GEMM adds to


@compile_ops("module_moe_sorting_opus", develop=True)
def moe_sorting_opus_get_workspace_size(
    tokens: int,
    num_experts: int,
    topk: int,
    dispatch_policy: int = 0,
) -> int:
    """moe_sorting_opus.py:11, csrc/include/moe_sorting_opus.h:1401: bytes. Policy 0 takes the single kernel
    where the tokens' table fits its shared memory, 1 always does, any other never."""
    rows = 65536 // 4 // 2 // (num_experts + 1)  # :362, the host's idea of shared memory on any architecture
    fits = min((rows - 2) // 8 * 8, -(-tokens // 8) * 8) if rows >= 10 else 0
    if dispatch_policy == 1 or (dispatch_policy == 0 and num_experts < 512 and tokens <= fits):
        return 0
    cell = 4 if tokens < 512 else 2 if topk >= 255 else 1  # :1162
    mesh = num_experts * -(-tokens // 32) * 32 * cell
    return mesh + -(-(num_experts + 1) // 32) * 32 * 4 + 32 * 4


@compile_ops("module_moe_sorting")
def moe_sorting_fwd(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    sorted_weights: torch.Tensor,
    sorted_expert_ids: torch.Tensor,
    num_valid_ids: torch.Tensor,
    moe_buf: torch.Tensor,
    num_experts: int,
    unit_size: int,
    local_expert_mask: torch.Tensor | None = None,
    num_local_tokens: torch.Tensor | None = None,
    dispatch_policy: int = 0,
) -> None:
    """moe_sorting.py:12 (CK's), with AITER_USE_CK_MOE_SORTING=1."""
    _sort(
        topk_ids,
        topk_weights,
        sorted_token_ids,
        sorted_weights,
        sorted_expert_ids,
        num_valid_ids,
        moe_buf,
        num_experts,
        unit_size,
        local_expert_mask,
        num_local_tokens,
    )


@compile_ops("module_moe_sorting_opus", develop=True)
def moe_sorting_opus_fwd(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    sorted_weights: torch.Tensor,
    sorted_expert_ids: torch.Tensor,
    num_valid_ids: torch.Tensor,
    moe_buf: torch.Tensor,
    num_experts: int,
    unit_size: int,
    local_expert_mask: torch.Tensor | None = None,
    num_local_tokens: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    dispatch_policy: int = 0,
    local_topk_ids: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
    reverse_sorted: torch.Tensor | None = None,
) -> None:
    """moe_sorting_opus.py:22, the default."""
    if any(t is not None for t in (local_topk_ids, m_indices, reverse_sorted)):
        raise NotImplementedError("the double sorts without the extras")
    tokens, topk = topk_ids.shape
    needed = moe_sorting_opus_get_workspace_size(tokens, num_experts, topk, dispatch_policy)
    if needed > (0 if workspace is None else workspace.numel() * workspace.element_size()):
        raise RuntimeError(
            f"memory access fault: the sort of policy {dispatch_policy} works in {needed} bytes"
        )
    _sort(
        topk_ids,
        topk_weights,
        sorted_token_ids,
        sorted_weights,
        sorted_expert_ids,
        num_valid_ids,
        moe_buf,
        num_experts,
        unit_size,
        local_expert_mask,
        num_local_tokens,
    )
