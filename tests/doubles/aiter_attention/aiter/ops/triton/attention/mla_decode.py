"""aiter/ops/triton/attention/mla_decode.py: the plain split-KV decode, one query token per sequence."""

from __future__ import annotations

import torch

from ...._double.softmax import attend, merge
from ...._double.strict import doubled, indices, scalar, sure
from ....utility import dtypes


def decode_attention_fwd(
    q,
    k_buffer,
    v_buffer,
    o,
    lse,
    req_to_token,
    b_seq_len,
    attn_logits,
    num_kv_splits,
    sm_scale,
    page_size=1,
    logit_cap=0.0,
    k_scale=None,
    v_scale=None,
):
    assert num_kv_splits == attn_logits.shape[2]
    doubled(logit_cap <= 0, "logit_cap")
    batch, heads, dim = q.shape
    v_dim = v_buffer.shape[-1]
    fp8 = k_buffer.dtype == dtypes.fp8
    sure(q.dtype in (dtypes.bf16, dtypes.fp16), f"keys are cast to q's {q.dtype}")
    sure(
        v_buffer.dtype == k_buffer.dtype and (fp8 or k_buffer.dtype == q.dtype),
        "one dtype, or this FP8 cache",
    )
    sure(
        k_buffer.shape[-1] == dim and k_buffer.shape[-2] == v_buffer.shape[-2] == 1,
        "one latent head of q's width",
    )
    rows_packed = q.stride(2) == k_buffer.stride(-1) == v_buffer.stride(-1) == o.stride(2) == 1
    sure(rows_packed, "rows of q, k, v and o are read as neighbours")
    shapes = o.shape == (batch, heads, v_dim) and lse.shape == (batch, heads) and lse.stride(1) == 1
    sure(
        shapes and attn_logits.shape[:2] == (batch, heads),
        "o, lse and attn_logits are of q's batch and heads",
    )
    # the log-sum-exp of a split lies behind its v_dim values
    sure(
        attn_logits.shape[3] > v_dim and attn_logits.stride(3) == 1,
        f"attn_logits holds {v_dim} + 1 per split",
    )
    sure(attn_logits.dtype == torch.float32, "the merge reads what the splits wrote")
    sure(req_to_token.stride(1) == 1 and not req_to_token.is_floating_point(), "a row of the table is packed")
    lengths = indices("b_seq_len", b_seq_len, batch)
    times = [
        scalar(n, s) if fp8 and s is not None else 1.0
        for n, s in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    if k_buffer.dim() == 4:  # a token is found at page * page_size + slot, times stride(-3)
        sure(
            k_buffer.stride(0) == page_size * k_buffer.stride(1),
            "pages are taken to lie page_size tokens apart",
        )
    flat = [x.reshape(-1, x.shape[-1]) for x in (k_buffer, v_buffer)]
    for b in range(batch):
        positions = torch.arange(lengths[b])
        sure(lengths[b] > 0, f"sequence {b} is empty")
        sure((lengths[b] - 1) // page_size < req_to_token.shape[1], "the table is shorter than the sequence")
        at = req_to_token[b].long()[positions // page_size] * page_size + positions % page_size
        sure(0 <= int(at.min()) and int(at.max()) < flat[0].shape[0], "the table leads outside the cache")
        share = -(-lengths[b] // num_kv_splits)
        outs, lses = [], []
        for split in range(-(-lengths[b] // share)):
            part = at[split * share : (split + 1) * share]
            keys, values = (_wide(x, part, t, q.dtype, fp8) for x, t in zip(flat, times, strict=True))
            seen = torch.ones(1, len(part), dtype=torch.bool)
            out, found = attend(
                q[b : b + 1], *(x[:, None].expand(-1, heads, -1) for x in (keys, values)), sm_scale, seen
            )
            attn_logits[b, :, split, :v_dim], attn_logits[b, :, split, v_dim] = out[0], found[0]
            outs.append(out[0])
            lses.append(found[0])
        merged, found = merge(torch.stack(outs), torch.stack(lses))
        o[b], lse[b] = merged.to(o.dtype), found.to(lse.dtype)


def _wide(
    buffer: torch.Tensor, at: torch.Tensor, times: float, dtype: torch.dtype, fp8: bool
) -> torch.Tensor:
    """FP8 is scaled in fp32 and rounded to q's dtype."""
    if not fp8:
        return buffer[at]
    return (buffer.view(torch.uint8)[at].view(buffer.dtype).float() * times).to(dtype)
