"""kernels/ops/moe/moe_sorting_small.py: SGLang's own sort for few tokens, put into AITER on gfx950.

Its layout is AITER's. What it does for MXFP8 is not doubled.
"""

import functools

import torch

from sglang._kernel import arch, not_doubled


def _small_sort_supported(
    topk_ids, block_size, expert_mask, num_local_tokens, num_experts, emit_mx=True
):  # fmt: skip
    """:370."""
    m, topk = topk_ids.shape
    p = m * topk
    return (
        expert_mask is None
        and num_local_tokens is None
        and p <= 256
        and (
            (p <= 64 and p <= 2 * block_size)
            or num_experts <= 256
            or (not emit_mx and p > 32 and num_experts < 512)
        )
        and topk < 128
        and topk_ids.dtype == torch.int32
        and topk_ids.is_contiguous()
    )


def _run_small_sort(topk_ids, topk_weights, ids, weights, expert_ids, valid, moe_buf, block, quant, experts):
    """:394. In order of experts, then of pairs; what is past the valid part is left as it was."""
    not_doubled(quant is None, "MXFP8 in the sort")
    tokens, topk = topk_ids.shape
    if topk_weights.dtype != torch.float32 or not topk_weights.is_contiguous():
        raise RuntimeError("topk_weights would be misread: pairs are read one after another, as fp32")
    flat = topk_ids.flatten().tolist()
    if min(flat) < 0 or max(flat) >= experts:
        raise RuntimeError("memory access fault: an expert id outside of 0 .. num_experts - 1")
    at = 0
    for expert in sorted(set(flat)):
        pairs = [pair for pair, e in enumerate(flat) if e == expert]
        end = at + -(-len(pairs) // block) * block
        ids[at:end], weights[at:end] = topk << 24 | tokens, 0.0
        for slot, pair in enumerate(pairs, at):
            ids[slot] = pair % topk << 24 | pair // topk
            weights[slot] = topk_weights.flatten()[pair]
        expert_ids[at // block : end // block] = expert
        at = end
    valid[0], valid[1] = at, tokens
    moe_buf.zero_()


@functools.cache
def apply_aiter_small_moe_sort_patch() -> None:
    """:528. Only where aiter.fused_moe has the two functions that it replaces."""
    if arch() != "gfx950":
        return
    try:
        import aiter.fused_moe as fm
        from aiter import dtypes

        original = fm._moe_sorting_impl
        _ = fm.fused_dynamic_mxfp8_quant_moe_sort
    except (ImportError, AttributeError):
        return

    @functools.wraps(original)
    def sorting_impl_wrapper(
        topk_ids, topk_weights, num_experts, model_dim, moebuf_dtype, block_size, expert_mask,
        num_local_tokens, dispatch_policy, use_opus, return_local_topk_ids=False, accumulate=True,
        output_aux=False, **orig_kwargs,
    ):  # fmt: skip
        if (
            output_aux
            or return_local_topk_ids
            or orig_kwargs.get("output") is not None
            or not _small_sort_supported(
                topk_ids, int(block_size), expert_mask, num_local_tokens, int(num_experts), emit_mx=False
            )
        ):
            return original(
                topk_ids, topk_weights, num_experts, model_dim, moebuf_dtype, block_size, expert_mask,
                num_local_tokens, dispatch_policy, use_opus, return_local_topk_ids=return_local_topk_ids,
                accumulate=accumulate, output_aux=output_aux, **orig_kwargs,
            )  # fmt: skip
        (tokens, topk), device = topk_ids.shape, topk_ids.device
        padded = int(topk_ids.numel() + num_experts * block_size - topk)
        poison = torch.iinfo(torch.int32).min // 2  # the real ones are torch.empty
        ids = torch.full((padded,), poison, dtype=dtypes.i32, device=device)
        weights = torch.full((padded,), float("nan"), dtype=dtypes.fp32, device=device)
        blocks = int((padded + block_size - 1) // block_size)
        expert_ids = torch.full((blocks,), poison, dtype=dtypes.i32, device=device)
        valid = torch.empty(2, dtype=dtypes.i32, device=device)
        moe_buf = torch.empty(
            (tokens, model_dim) if accumulate else (0, 0), dtype=moebuf_dtype, device=device
        )
        _run_small_sort(
            topk_ids,
            topk_weights,
            ids,
            weights,
            expert_ids,
            valid,
            moe_buf,
            int(block_size),
            None,
            num_experts,
        )
        return ids, weights, expert_ids, valid, moe_buf

    fm._moe_sorting_impl = sorting_impl_wrapper
