"""Keys and values of one sequence, by page table or offsets, and the softmax over them."""

import math

import torch

from double_arithmetic.checks import check


def keys(i, k, v, cu, used, table, block):
    """(keys, values, spare values) of sequence i. block: the rows that TMA loads at once, or None where
    each row is loaded by itself; the spare values are the rows of the last block beyond the sequence."""
    if table is not None:
        return _paged(k, v, table[i], None if used is None else int(used[i]), block)
    if cu is not None:
        begin, end = cu[i : i + 2].tolist()
        check(0 <= begin <= end <= len(k), "illegal memory access: cu_seqlens_k is beyond k")
        k, v = k[begin:], v[begin:]
        length = end - begin
    else:
        k, v = k[i], v[i]
        length = len(k)
    count = length if used is None else int(used[i])
    check(count <= length, "seqused_k is beyond the sequence")
    loaded = count if block is None else -(-count // block) * block
    return k[:count], v[:count], v[count:loaded]


def _paged(k, v, pages, count, block):
    page = k.shape[1]
    count = len(pages) * page if count is None else count
    check(count <= len(pages) * page, "seqused_k is beyond the page table")
    loaded = count if block is None else -(-count // block) * block
    token = torch.arange(loaded)
    number = pages[token // page].long()
    check(bool(((number >= 0) & (number < len(k))).all()), "illegal memory access: a page beyond the cache")
    values = v[number, token % page]
    return k[number[:count], token[:count] % page], values[:count], values[count:]


def attend(q, qv, k, v, spare, scale, causal):
    """out f32 [n, h, dv], natural lse [n, h] of scale * (q k + qv v), causal to the bottom right.

    A row that sees no key is zero, its lse -inf. A masked value is multiplied by 0: NaN and infinity spread
    (Dao-AILab/flash-attention issue 2374), here to every row, in a kernel to the rows whose tile reads it.
    """
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v, spare = (t.float().repeat_interleave(group, 1) for t in (k, v, spare))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k)
    if qv is not None:
        scores = scores + torch.einsum("nhd,mhd->hnm", qv.float(), v)
    scores = scores * scale
    if causal:
        hidden = torch.arange(m)[None, :] > torch.arange(n)[:, None] + m - n
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1) if m else torch.full(scores.shape[:2], -math.inf)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    return torch.einsum("hnm,mhd->nhd", weights, v) + (0.0 * spare).sum(0), lse.T
