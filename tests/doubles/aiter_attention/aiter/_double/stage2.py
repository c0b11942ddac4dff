"""aiter/mla.py _fwd_kernel_stage2_asm: the splits of non-persistent decode merged, in Triton."""

from __future__ import annotations

import torch

from .softmax import merge
from .strict import indices, sure


def unwritten(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.float32)


def stage2(logits, attn_lse, o, final_lse, qo_indptr, splits_indptr, kv_indptr, last, page_size, qlen, step):
    """It writes o by its strides, in o's dtype. `step`: the tokens in which a split is counted."""
    sure(o.stride(2) == 1, "stage 2 writes a row of o as neighbours")
    rows, splits = indices("qo_indptr", qo_indptr), indices("num_kv_splits_indptr", splits_indptr)
    pages, batch = indices("kv_indptr", kv_indptr), qo_indptr.shape[0] - 1
    if splits[batch] == batch and not (o.shape[1] in (8, 16) and qlen == 1):  # FINAL_OUT: read as o's dtype
        sure(o.dtype == torch.bfloat16, f"with one split stage 2 reads the kernel's bf16 as {o.dtype}")
        o.copy_(logits.view(-1).view(torch.bfloat16)[: o.numel()].view(o.shape))
        return
    for b in range(batch):
        length = pages[b + 1] - pages[b]
        if page_size > 1:
            length = (length - 1) * page_size + indices("kv_last_page_lens", last)[b]
        used = min(splits[b + 1] - splits[b], -(-length // step))
        for row in range(rows[b], rows[b + 1]):
            if used < 1:  # 0 / 0
                o[row] = float("nan")
                continue
            out, lse = merge(logits[row, :used], attn_lse[row, :used, :, 0])
            o[row] = out.to(o.dtype)
            if final_lse is not None:
                final_lse[row] = lse
