"""aiter/ops/triton/attention/mha.py: AITER's Triton prefill."""

from __future__ import annotations

import torch

from ...._double.softmax import attend, bottom_right
from ...._double.strict import Misread, doubled, sure


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    bias=None,
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    return_attn_probs=False,
    block_table=None,
    out=None,
    sink=None,
    config: dict[str, any] | None = None,
):
    # _flash_attn_forward
    if bias is not None:
        raise ValueError("Bias is not supported yet in the Triton Backend")
    if int(window_size[1]) != -1:
        raise ValueError("window_size_right is not supported yet in the Triton Backend")
    doubled(int(window_size[0]) <= 0 and alibi_slopes is sink is None, "windows, ALiBi, sinks")
    doubled(dropout_p == 0.0 and not return_attn_probs, "dropout")
    sure(block_table is None and out is None, "block_table and out are accepted and ignored")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    max_seqlen_q, max_seqlen_k = int(max_seqlen_q), int(max_seqlen_k)
    dim, v_dim, heads = q.shape[-1], v.shape[-1], q.shape[1]
    fp8 = q.dtype.itemsize == 1
    rest = dim - v_dim
    powers = v_dim >= 16 and rest >= 16 and not (v_dim & (v_dim - 1) or rest & (rest - 1))
    assert rest == 0 or powers, (
        "Positional encoding support requires NOPE and PE head sizes to be unpadded powers of 2."
    )
    assert not fp8 or rest == 0, "Positional encoding doesn't support FP8."
    if fp8 or not q.dtype == k.dtype == v.dtype:
        raise Misread("the kernel compiles for q, k and v of one 16 or 32 bit dtype; FP8 would want descales")
    sure(k.shape == (v.shape[0], v.shape[1], dim), "the kernel reads as many rows and heads of v as of k")
    sure(heads % k.shape[1] == 0, "query heads are dealt out to KV heads in equal groups")
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    sure(
        not (cu_seqlens_q.is_floating_point() or cu_seqlens_k.is_floating_point()), "cu_seqlens are integers"
    )
    sure(len(starts) == len(key_starts), "cu_seqlens_k is read for the sequences of cu_seqlens_q")
    result = torch.zeros((*q.shape[:-1], v_dim), dtype=q.dtype)
    lse = torch.zeros((q.shape[0], heads), dtype=torch.float32)  # [tokens, heads], unlike CK's
    for b in range(len(starts) - 1):
        low, high, first, last = starts[b], starts[b + 1], key_starts[b], key_starts[b + 1]
        sure(
            0 <= low <= high <= q.shape[0] and 0 <= first <= last <= k.shape[0],
            "cu_seqlens lead outside q or k",
        )
        sure(
            high - low <= max_seqlen_q, f"sequence {b} is longer than the grid of max_seqlen_q={max_seqlen_q}"
        )
        wide = [x[first:last].repeat_interleave(heads // k.shape[1], dim=1) for x in (k, v)]
        seen = (
            bottom_right(high - low, last - first) if causal else torch.ones(high - low, last - first).bool()
        )
        found, found_lse = attend(q[low:high], *wide, softmax_scale, seen)
        result[low:high] = found.to(q.dtype)
        lse[low:high] = found_lse.masked_fill(found_lse == float("-inf"), 0.0)  # _attn_fwd stores 0 there
    return (result, lse) if return_lse else result
