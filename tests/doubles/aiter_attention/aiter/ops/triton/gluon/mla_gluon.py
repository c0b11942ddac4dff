"""aiter/ops/triton/gluon/mla_gluon.py: MLA decode in Gluon, for gfx950 alone.

It finds keys by one index per token, in a list with an indptr or in a table with lengths, and reads no row
that no sequence names (masked buffer loads). Rows behind a query token's own, of the same sequence, are read
and weighed with 0.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ...._double.softmax import attend, merge
from ...._double.strict import doubled, sure
from ....jit.utils.chip_info import get_gfx

_XCDS = 8  # aiter/ops/triton/utils/device_info.py get_num_xcds of an MI350X, undivided


def mla_gluon(
    q_nope,
    q_pe,
    kv_c,
    o,
    page_table,
    seq_info,
    sm_scale,
    k_pe=None,
    kv_pe_offset=512,
    use_2d_view=True,
    kv_scale=1.0,
    min_kv_seq_len=1,
    return_lse=False,
    has_pe=True,
    attn_sink=None,
):
    """:823. q_nope [B, H, 512] and q_pe [B, H, 64], or [B, Q, H, ...] for Q query tokens each, bf16, of any
    leading strides; kv_c [N, 576], or [N, 512] with k_pe [N, 64] and kv_pe_offset=0, bf16 or e4m3fn; o as
    q_nope. use_2d_view: page_table int32 [B, longest] and seq_info int32 lengths [B]; else page_table int32
    [all tokens] and seq_info int32 indptr [B + 1]. kv_scale is a number. -> o, log-sum-exp fp32 [B, Q, H] or
    None."""
    if k_pe is None:
        k_pe = kv_c
    doubled(has_pe and attn_sink is None, "the sparse prefill of V4")
    assert q_nope.dim() in (3, 4), f"q_nope must be 3-D or 4-D, got {q_nope.dim()}-D"
    batch, qlen = q_nope.shape[0], q_nope.shape[1] if q_nope.dim() == 4 else 1
    nhead, width, rope = q_nope.shape[-2], q_nope.shape[-1], q_pe.shape[-1]
    assert get_gfx() == "gfx950", f"mla_gluon requires gfx950 (CDNA4), got {get_gfx()}"
    assert width == 512, f"mla_gluon requires head_dim_ckv=512, got {width}"
    assert rope == 64, f"mla_gluon requires head_dim_kpe=64, got {rope}"
    wide = nhead in (64, 128)
    assert wide or 1 <= nhead <= 96, f"mla_gluon requires nhead <= 96 or in (64, 128), got {nhead}"
    kinds = (torch.bfloat16,) if wide else (torch.bfloat16, torch.float8_e4m3fn)
    assert kv_c.dtype in kinds and k_pe.dtype == kv_c.dtype, f"kv_c/k_pe are {kv_c.dtype}/{k_pe.dtype}"
    assert q_nope.dtype == q_pe.dtype == torch.bfloat16, f"q is {q_nope.dtype}/{q_pe.dtype}"
    step = 64 if kv_c.dtype == torch.bfloat16 else 128
    if wide:
        programs = _XCDS * -(-nhead // 64) * qlen * (batch // _XCDS)
        assert batch % 64 == 0, f"mla_gluon[bh64] requires batch_size divisible by 64, got {batch}"
        splits = max(1, 1 << (-(-256 // programs) - 1).bit_length())
        least = splits * (3 * step + splits)
        assert min_kv_seq_len > least, f"mla_gluon[bh64] requires min_kv_seq_len > {least}"
    else:
        splits = max(1, 256 // (batch * qlen * -(-nhead // 16)))
    _sure_of(q_nope, q_pe, kv_c, k_pe, o, sm_scale, kv_scale)
    if splits == 1:
        o.view(batch, qlen, nhead, 1, width)  # there too: o must have a view of this shape
    table, starts, lengths = _places(page_table, seq_info, use_2d_view, batch)
    shape = (batch, qlen, nhead)
    out, lse = o.view(*shape, width) if q_nope.dim() == 4 else o[:, None], torch.full(shape, float("nan"))
    queries = torch.cat([q_nope, q_pe], dim=-1).view(*shape, width + rope)
    for b in range(batch):
        length = lengths[b]
        if length < 1 and splits == 1:  # every program returns: o stays as it was
            continue
        at = _read(table, "page_table", starts[b] + torch.arange(length))
        keys = torch.cat([_rows(kv_c, at, 0, width), _rows(k_pe, at, kv_pe_offset, rope)], dim=-1)
        share = max(step, length // splits)
        ends = [i * share for i in range(min(splits, -(-length // share)))] + [length]
        seen = torch.arange(length)[None] < length - qlen + 1 + torch.arange(qlen)[:, None]
        parts = []
        for low, high in pairwise(ends):
            sure(not wide or high - low > 2 * step, "the kernel assumes three blocks of 64 in a split")
            some, scale = keys[low:high], sm_scale * kv_scale
            found, found_lse = attend(queries[b], some, some[..., :width], scale, seen[:, low:high])
            parts.append(((found * kv_scale).bfloat16().float(), found_lse))
        if splits == 1:
            found, found_lse = parts[0]
            found = found.masked_fill((found_lse == float("-inf"))[..., None], float("nan"))  # 0 / 0
        elif parts:
            found, found_lse = merge(*(torch.stack(x) for x in zip(*parts, strict=True)))
            found_lse = found_lse.masked_fill(found_lse == float("inf"), float("-inf"))
        else:
            found, found_lse = torch.zeros(width), torch.tensor(float("-inf"))
        out[b], lse[b] = found.bfloat16(), found_lse
    return o, lse if return_lse else None


def _sure_of(q_nope, q_pe, kv_c, k_pe, o, *scales) -> None:
    sure(q_pe.shape[:-1] == q_nope.shape[:-1] and o.shape == q_nope.shape, "q_pe and o are read as q_nope's")
    last = q_nope.stride(-1) == q_pe.stride(-1) == kv_c.stride(-1) == k_pe.stride(-1) == o.stride(-1) == 1
    sure(last, "rows of q, of the cache and of o are read as neighbours: no inner stride is passed")
    sure(o.dtype == torch.bfloat16, f"the kernel stores bf16, o is {o.dtype}")
    numbers = all(isinstance(scale, (int, float)) for scale in scales)
    sure(numbers, "sm_scale and kv_scale are numbers: a tensor is taken for a pointer and does not compile")
    bytes_of_cache = kv_c.shape[0] * kv_c.stride(0) * kv_c.element_size()
    doubled(bytes_of_cache <= 1 << 31, "a cache of more than 2 GB, whose loads are not masked")


def _places(page_table, seq_info, use_2d_view: bool, batch: int):
    """The table as memory, where each sequence begins in it, and how long it is."""
    for name, array in ("page_table", page_table), ("seq_info", seq_info):
        sure(array.dtype == torch.int32, f"{name} is copied or added as int32, not as {array.dtype}")
        sure(array.stride(-1) == 1, f"{name} is read as neighbours")
    infos = _read(seq_info, "seq_info", torch.arange(batch + (not use_2d_view))).tolist()
    if use_2d_view:
        return page_table, [page_table.stride(0) * b for b in range(batch)], infos
    return page_table, infos[:-1], [stop - start for start, stop in pairwise(infos)]


def _read(array: torch.Tensor, name: str, at: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor's memory, counted from its first."""
    size = array.untyped_storage().nbytes() // array.element_size() - array.storage_offset()
    inside = not at.numel() or 0 <= int(at.min()) <= int(at.max()) < size
    sure(inside, f"{name} is read outside its memory")
    return array.as_strided((size,), (1,))[at]


def _rows(cache: torch.Tensor, at: torch.Tensor, offset: int, width: int) -> torch.Tensor:
    """fp32 [tokens, width] of the cache, each row `offset` elements behind its index times stride(-2)."""
    elements = at.long()[:, None] * cache.stride(-2) + offset + torch.arange(width)
    if cache.element_size() == 1:
        return _read(cache.view(torch.uint8), "the cache", elements).view(cache.dtype).float()
    return _read(cache, "the cache", elements).float()
