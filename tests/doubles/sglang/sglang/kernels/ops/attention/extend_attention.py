"""kernels/ops/attention/extend_attention.py of SGLang 0.5.23: prefill over a cached prefix and new tokens.

SGLang calls it in srt/layers/attention/triton_backend.py (1545, 2062) with int32 `qo_indptr` and `kv_indptr`,
int64 `kv_indices`, scales that are numbers, and an empty `kv_indices` where nothing is cached.
"""

import numbers

import torch

from ...._kernel import flat, not_doubled, rows
from .decode_attention import _gathered


def extend_attention_fwd(
    q_extend,
    k_extend,
    v_extend,
    o_extend,
    k_buffer,
    v_buffer,
    qo_indptr,
    kv_indptr,
    kv_indices,
    custom_mask,
    is_causal,
    mask_indptr,
    max_len_extend,
    k_scale,
    v_scale,
    sm_scale=None,
    logit_cap=0.0,
    skip_prefix_custom_mask=True,
    sliding_window_size=-1,
    sinks=None,
    window_kv_offsets=None,
    xai_temperature_len=-1,
    lse_extend=None,
    skip_prefix=False,
    skip_extend=False,
    page_size=1,
    score_mod=None,
    aux_tensors=None,
    extend_seq_lens_cpu=None,
    identity_kv_indices=False,
):
    """Line 916. Rows of a sequence past `max_len_extend` are not computed (the grid, line 1075)."""
    not_doubled(custom_mask is None and mask_indptr is None, "custom masks")
    not_doubled(sliding_window_size <= 0 and sinks is None and window_kv_offsets is None, "windows")
    not_doubled(not logit_cap and xai_temperature_len <= 0, "other scores")
    not_doubled(score_mod is None and aux_tensors is None, "score_mod")
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale), ("max_len_extend", max_len_extend)):
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} is a number, not {type(value).__name__}")
    if not q_extend.dtype == k_extend.dtype:
        raise RuntimeError(f"tl.dot of {q_extend.dtype} and {k_extend.dtype}")
    not_doubled(q_extend.dtype.itemsize >= 2 and v_extend.dtype.itemsize >= 2, "FP8 of the new tokens")
    tokens, heads, lq = q_extend.shape
    kv_heads, lv = k_extend.shape[1], v_extend.shape[-1]
    if k_extend.shape[-1] != lq or k_buffer.shape[-1] != lq or v_buffer.shape[-1] != lv:
        raise RuntimeError("K would be overrun: its head dimension is that of Q, in the cache too")
    if o_extend.shape != (tokens, heads, lv) or v_extend.shape[:2] != k_extend.shape[:2]:
        raise RuntimeError(f"o_extend {tuple(o_extend.shape)} or v_extend would be overrun")
    q, k, v = rows(q_extend, "q_extend"), rows(k_extend, "k_extend"), rows(v_extend, "v_extend")
    rows(o_extend, "o_extend")
    batch = qo_indptr.shape[0] - 1
    ends, cached = flat(qo_indptr, "qo_indptr", batch + 1), flat(kv_indptr, "kv_indptr", batch + 1)
    if ends[batch] > tokens or (not skip_extend and ends[batch] > k.shape[0]):
        raise RuntimeError(f"memory access fault: {ends[batch]} new tokens of {tokens}")
    used = 0 if skip_prefix else cached[batch]
    listed = list(range(used)) if identity_kv_indices else flat(kv_indices, "kv_indices", used)
    scale = sm_scale or lq**-0.5
    # Line 60: Q and K are loaded as 512 + 64, 256 + 32 or 128 + 64; both parts are cast alike.
    for b in range(batch):
        count = min(ends[b + 1] - ends[b], max_len_extend)
        at = slice(ends[b], ends[b] + count)
        scores, values = [], []
        if not skip_prefix and cached[b + 1] > cached[b]:
            slots = torch.tensor(listed[cached[b] : cached[b + 1]], device=q.device)
            keys = _gathered(k_buffer, slots, page_size, "k_buffer")
            scores.append(_scores(q[at].to(keys.dtype), keys, heads // kv_heads) * (scale * k_scale))
            values.append((_gathered(v_buffer, slots, page_size, "v_buffer"), v_scale))
        if not skip_extend:
            part = _scores(q[at], k[at], heads // kv_heads) * scale
            if is_causal:
                later = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
                part = part.masked_fill(later, -torch.inf)
            scores.append(part)
            values.append((v[at], 1.0))
        out, lse = _weighted(scores, values, heads // kv_heads, (heads, count, lv))
        o_extend[at] = out.transpose(0, 1).to(o_extend.dtype)
        if lse_extend is not None:
            lse_extend[at] = lse.T


def _scores(q, keys, group):
    """[heads, queries, keys] in fp32."""
    return torch.einsum("qhd,khd->hqk", q.float(), keys.repeat_interleave(group, 1).float())


def _weighted(scores, values, group, shape):
    """[heads, queries, Lv] and the log-sum-exp; P is cast to V's dtype. Nothing to see is 0 and -inf."""
    if not scores:
        return torch.zeros(shape), torch.full(shape[:2], -torch.inf)
    top = torch.stack([part.amax(-1) for part in scores]).amax(0)[..., None]
    total, out = 0, 0
    for part, (value, scale) in zip(scores, values, strict=True):
        weights = torch.exp(part - top)
        total = total + weights.sum(-1)
        value = value.repeat_interleave(group, 1)
        rounded = weights.to(value.dtype).float()
        out = out + torch.einsum("hqk,khd->hqd", rounded, value.float()) * scale
    return out / total[..., None], top[..., 0] + total.log()
