"""aiter/ops/triton/moe/moe_align_block_size.py: slots of tokens sorted by expert, for moe_op.fused_moe."""

import torch


def moe_align_block_size_triton(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
) -> None:
    """:22. Writes slot numbers (token * top_k + place) and experts' blocks; it does not fill the padding, so
    sorted_token_ids must come filled with topk_ids.numel()
    (op_tests/triton_tests/moe/test_moe.py: `sorted_ids.fill_(topk_ids.numel())`)."""
    flat = topk_ids.flatten()
    if not topk_ids.is_contiguous() or any(
        t.dtype != torch.int32 for t in (sorted_token_ids, expert_ids, num_tokens_post_pad)
    ):
        raise RuntimeError("topk_ids must be contiguous and the outputs int32")
    if flat.min() < 0 or flat.max() >= num_experts:
        raise RuntimeError(
            "memory access fault: an expert that is not there"
        )  # stage1 counts at this address
    start = 0
    for expert in range(num_experts):
        slots = (flat == expert).nonzero().flatten()
        end = start + -(-len(slots) // block_size) * block_size
        if end > len(sorted_token_ids) or -(-end // block_size) > len(expert_ids):
            raise RuntimeError("memory access fault: sorted_token_ids or expert_ids is too short")
        sorted_token_ids[start : start + len(slots)] = slots.int()
        expert_ids[start // block_size : end // block_size] = expert
        start = end
    num_tokens_post_pad[0] = start
