"""kernels/ops/attention/decode_attention.py of SGLang 0.5.23: decode attention over a split KV cache.

SGLang calls it in srt/layers/attention/triton_backend.py:2472, with what lines 953 to 972 allocate: fp32
`attn_logits` [batch, heads, splits, Lv] and `attn_lse` [batch, heads, splits], int32 `num_kv_splits` [batch].
"""

import torch

from ...._kernel import cdiv, flat, is_hip, not_doubled, power_of_two, rows

_MIN_BLOCK_KV = 32


def _extract_kv_strides(buf, page_size):
    """Line 212: a buffer is [slots, heads, dim], whatever the page; slots follow one another in a page."""
    if buf.ndim != 3:
        raise ValueError(f"unexpected KV buffer ndim={buf.ndim}, shape={buf.shape}")
    slot, head = buf.stride(0), buf.stride(1)
    return slot, head, slot * page_size, slot


def decode_attention_fwd(
    q,
    k_buffer,
    v_buffer,
    o,
    kv_indptr,
    kv_indices,
    attn_logits,
    attn_lse,
    num_kv_splits,
    max_kv_splits,
    sm_scale,
    k_scale,
    v_scale,
    logit_cap=0.0,
    sinks=None,
    xai_temperature_len=-1,
    has_mla=False,
    use_pdl=False,
    page_size=1,
    score_mod=None,
    aux_tensors=None,
    enable_lean=None,
    lean_Mp=None,
    lean_Lp=None,
    lean_Op=None,
    lean_locks=None,
    uneven_batch=None,
):
    """Line 1191. Without `lean_locks` there is no lean kernel; gfx950's tuning (line 181) changes the number
    of splits, never the result."""
    assert max_kv_splits == attn_logits.shape[2], "max_kv_splits is the third size of attn_logits"
    assert q.shape[0] <= kv_indptr.shape[0] - 1, "kv_indptr has an entry per sequence and one"
    assert q.shape[0] <= attn_logits.shape[0], "attn_logits has room for the batch"
    not_doubled(lean_locks is None, "lean attention")
    not_doubled(not logit_cap and sinks is None and xai_temperature_len <= 0, "other scores")
    not_doubled(score_mod is None and aux_tensors is None, "score_mod")
    if use_pdl and is_hip():
        raise RuntimeError("programmatic dependent launch is CUDA's")
    for buffer in (k_buffer, v_buffer):
        _extract_kv_strides(buffer, page_size)
    heads, kv_heads = q.shape[1], v_buffer.shape[-2]
    assert k_buffer.shape[-2] == kv_heads, "K and V have the same heads"
    lk, lv = k_buffer.shape[-1], v_buffer.shape[-1]
    if q.shape[-1] != lk or o.shape != (*q.shape[:2], lv):
        raise RuntimeError(f"q {tuple(q.shape)} or o {tuple(o.shape)} would be overrun")
    _scratch(attn_logits, attn_lse, heads, max_kv_splits, lv)
    # Line 826: K is loaded as 512 + 64, 256 + 32, or whole.
    nope = {576: 512, 288: 256}.get(lk, lk)
    grouped = heads != kv_heads
    if grouped and has_mla and (nope != lv or not power_of_two(lv)):
        raise RuntimeError(f"V of {lv} is not the part of K that is loaded first ({nope})")
    query = rows(q, "q")
    batch, indptr = q.shape[0], flat(kv_indptr, "kv_indptr", q.shape[0] + 1)
    indices = flat(kv_indices, "kv_indices", indptr[batch])
    splits = flat(num_kv_splits, "num_kv_splits", batch)
    scale = sm_scale * k_scale
    for b in range(batch):
        slots = torch.tensor(indices[indptr[b] : indptr[b + 1]], dtype=torch.long, device=q.device)
        keys = _gathered(k_buffer, slots, page_size, "k_buffer")
        values = keys[..., :lv] if grouped and has_mla else _gathered(v_buffer, slots, page_size, "v_buffer")
        _stage1(query[b], keys, values, nope, scale, attn_logits[b], attn_lse[b], splits[b])
        o[b] = (_stage2(attn_logits[b], attn_lse[b], len(slots), splits[b]) * v_scale).to(o.dtype)


def _scratch(attn_logits, attn_lse, heads, splits, lv):
    """Stage 1 finds the place of a log-sum-exp from the strides of attn_logits, divided by Lv (line 784)."""
    for what, tensor, inner in (
        ("attn_logits", attn_logits, (splits, lv)),
        ("attn_lse", attn_lse, (splits,)),
    ):
        if tensor.dtype != torch.float32:
            raise RuntimeError(f"{what} is {tensor.dtype}: partial results are fp32")
        if tuple(tensor.shape[1:]) != (heads, *inner) or not tensor.is_contiguous():
            raise RuntimeError(f"{what} {tuple(tensor.shape)} would be misread as [*, {heads}, {inner}]")
    if len(attn_lse) < len(attn_logits):
        raise RuntimeError("memory access fault: attn_lse is shorter than attn_logits")


def _gathered(buffer, slots, page_size, what):
    """[tokens, heads, dim]: slot i is in page i // page_size, at i % page_size."""
    slot, head, page, token = _extract_kv_strides(buffer, page_size)
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < buffer.shape[0]:
        raise RuntimeError(f"memory access fault: slot {int(slots.max())} of {buffer.shape[0]} in {what}")
    memory = rows(buffer, what)
    assert (page, token, head) == (slot * page_size, slot, buffer.stride(1))
    return memory[slots // page_size * page_size + slots % page_size]


def _stage1(q, keys, values, nope, scale, logits, lse, splits):
    """Line 530: [heads, dim] queries against each split's tokens. The first part of a query is cast to the
    cache's dtype, the rope part of K to the query's; P is cast to V's dtype."""
    group = q.shape[0] // keys.shape[1]
    first = q[:, :nope].to(keys.dtype).float()
    keys = keys.repeat_interleave(group, 1)
    scores = torch.einsum("hd,thd->ht", first, keys[..., :nope].float())
    scores += torch.einsum("hd,thd->ht", q[:, nope:].float(), keys[..., nope:].to(q.dtype).float())
    scores *= scale
    values = values.repeat_interleave(group, 1)
    for split, start, end in _parts(len(values), splits, logits.shape[1]):
        part = scores[:, start:end]
        top = part.amax(1, keepdim=True)
        weights = torch.exp(part - top)
        total = weights.sum(1)
        rounded = weights.to(values.dtype).float()
        logits[:, split] = torch.einsum("ht,thd->hd", rounded, values[start:end].float()) / total[:, None]
        lse[:, split] = top[:, 0] + total.log()


def _parts(tokens, splits, launched):
    """The splits that have tokens, of those that are launched: line 632."""
    length = cdiv(cdiv(tokens, splits), _MIN_BLOCK_KV) * _MIN_BLOCK_KV
    for split in range(launched):
        start, end = length * split, min(length * (split + 1), tokens)
        if end > start:
            yield split, start, end


def _stage2(logits, lse, tokens, splits):
    """Line 935: the partial results, weighted by their log-sum-exp. No token at all is 0 / 0."""
    present = [split for split, _, _ in _parts(tokens, splits, logits.shape[1])]
    if not present:
        return torch.full_like(logits[:, 0], torch.nan)
    weights = torch.softmax(lse[:, present], 1)
    return torch.einsum("hs,hsd->hd", weights, logits[:, present])
