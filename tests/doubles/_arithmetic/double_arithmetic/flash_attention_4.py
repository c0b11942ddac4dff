"""FlashAttention 4: flash_attn/cute/interface.py, _flash_attn_fwd, of flash-attn-4 4.0.0b36. vLLM 0.33.0's
copy (vllm/vllm_flash_attn/cute/interface.py) is the same for prefill, but that on Hopper it takes heads up to
512 and splits.

Not doubled: gathered keys, windows, sinks, soft caps, modifiers, block sparsity, scheduler metadata and
seqused_q.
"""

import math
import os
from itertools import pairwise

import torch

from double_arithmetic.attention import attend, keys
from double_arithmetic.checks import check

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BLACKWELL = ("sm_100", "sm_103", "sm_110")
BLOCK = 128  # tile_n of prefill (192, 128) and of the 128-key MLA kernels


def arch():
    return os.environ.get("DOUBLE_ARCH", "sm_90")


def sms():
    """Of an H100 SXM, of a B200."""
    return 132 if arch() == "sm_90" else 148


def forward(
    q,
    k,
    v,
    *,
    qv=None,
    cu_q=None,
    cu_k=None,
    used_k=None,
    max_q=None,
    max_k=None,
    table=None,
    scale=None,
    causal=False,
    splits=1,
    return_lse=False,
    out=None,
    descales=(None, None, None),
    widest_on_hopper=256,
    splits_on_hopper=False,
):
    """(out [total_q, h, dv], natural lse f32 [h, total_q], with qv [total_q, h]); q, k, v: [total, h, d], or
    [b, s, h, d] without cu_seqlens. The lse is None unless it or a gradient is asked for. descales:
    f32 [b, h_k].

    maybe_contiguous (cute_dsl_utils.py:87) copies what is not aligned: strides are free, and cost a kernel.
    """
    if k is v:
        raise NotImplementedError("keys that are the values (no rope part) are not doubled")
    shared = descales[1] is not None and descales[1] is descales[2]
    h, d = q.shape[-2:]
    h_k, dv = v.shape[-2:]
    b = len(q) if cu_q is None else len(cu_q) - 1
    if table is not None:
        assert cu_k is None, "page_table is not supported with cu_seqlens_k"
        assert table.dtype == torch.int32, "page_table must be int32"
        assert table.shape == (b, table.shape[1])
    assert k.shape == (*v.shape[:-1], d), "k and v must go together"
    assert v.dim() == (4 if cu_k is None else 3)
    assert cu_k is not None or table is not None or len(v) == b
    assert cu_k is None or cu_k.shape == (b + 1,), "cu_seqlens_k must have shape (batch_size + 1,)"
    assert used_k is None or used_k.shape == (b,), "seqused_k must have shape (batch_size,)"
    fp8 = v.dtype in FP8
    assert fp8 or v.dtype in (torch.float16, torch.bfloat16), "inputs must be float16, bfloat16 or fp8"
    assert all(t is None or t.dtype == v.dtype for t in (q, k, qv)), (
        "q, k, v, and qv must have the same dtype"
    )
    for t in (t for t in (cu_q, cu_k, used_k) if t is not None):
        assert t.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be int32"
        assert t.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be contiguous"
    given = [t for t in (q, k, v, qv, cu_q, cu_k, used_k, table, out, *descales) if t is not None]
    assert len({t.device for t in given}) == 1, "inputs must be on one device"
    assert h % h_k == 0, "num_head must be divisible by num_head_kv"
    _validate_head_dims(d, dv, 16 // v.element_size(), widest_on_hopper)
    if scale is None:
        scale = (d if qv is None else d + dv) ** -0.5
    dtype = torch.bfloat16 if fp8 else q.dtype
    if out is not None:
        assert out.shape == (*q.shape[:-1], dv) and out.dtype == dtype, "out must have q's shape, of dv"
        assert out.stride(-1) == 1 and out.data_ptr() % 16 == 0, "out must have a contiguous last dimension"
    for t in (t for t in descales if t is not None):
        assert fp8, "q_descale/k_descale/v_descale are only supported for FP8 inputs"
        assert t.shape == (b, h_k), "a descale must have shape (batch_size, num_head_kv)"
        assert t.dtype == torch.float32, "a descale must be float32"
    assert not fp8 or arch() in ("sm_100", "sm_103"), (
        "FP8 is only supported on SM100 (compute capability 10.x) for FA4 CuTe."
    )

    rows = [i * q.shape[1] for i in range(b + 1)] if cu_q is None else cu_q.tolist()
    flat, flat_qv = q.reshape(-1, h, d), None if qv is None else qv.reshape(-1, h, dv)
    check(rows == sorted(rows) and rows[-1] <= len(flat), "illegal memory access: cu_seqlens_q is beyond q")
    longest = max(e - s for s, e in pairwise(rows))
    # is_static_persistent follows from max_seqlen_q: longer rows would not be computed
    check(max_q is None or longest <= max_q, "max_seqlen_q is too small")
    # a ragged q without max_seqlen_q is planned as if it were one sequence
    planned_q = max_q if max_q is not None else q.shape[1] if cu_q is None else len(flat)
    planned_k = (
        max_k if max_k is not None else table.shape[1] * v.shape[1] if table is not None else v.shape[-3]
    )
    block = None if table is not None and v.shape[1] != BLOCK else BLOCK
    if qv is not None:
        assert arch() in BLACKWELL, "only support Blackwell arch with qv"
        assert qv.shape == (*q.shape[:-1], dv) and dv == 512 and d == 64
        block = _mla_block(b, h, h_k, len(flat), planned_q, planned_k, table, v, fp8, splits)
        if any(t is not None for t in descales[1:]):
            assert all(t is not None for t in descales[1:]), (
                "MLA absorbed needs k_descale and v_descale together (or neither)"
            )
            assert shared, "MLA absorbed requires k_descale and v_descale to be the same tensor"
    elif arch() == "sm_90" and not splits_on_hopper:
        tiles = b * h * math.ceil(planned_q / 128)
        count = splits if splits >= 1 else _splits(tiles, math.ceil(planned_k / BLOCK), 128)
        assert count <= 1, "SplitKV not supported on SM 9.0"

    found = torch.full((len(flat), h, dv), math.nan, dtype=dtype)
    lse = torch.full((len(flat), h), math.nan)
    for i in range(b):
        at = slice(rows[i], rows[i + 1])
        key, value, spare = keys(i, k, v, cu_k, used_k, table, block)
        check(max_k is None or len(key) <= max_k, "max_seqlen_k is too small")
        query, query_v = flat[at].float(), None if qv is None else flat_qv[at].float()
        key, value = key.float(), value.float()
        if fp8:
            by_q, by_k, by_v = (torch.ones(h_k) if t is None else t[i] for t in descales)
            query = query * by_q.repeat_interleave(h // h_k)[:, None]
            query_v = None if qv is None else query_v * by_q.repeat_interleave(h // h_k)[:, None]
            key, value = key * by_k[:, None], value * by_v[:, None]
        o, log = attend(query, query_v, key, value, spare, scale, causal)
        found[at], lse[at] = o.to(dtype), log
    found = found.view(*q.shape[:-1], dv)
    out = found if out is None else out.copy_(found)
    if not return_lse and not any(t is not None and t.requires_grad for t in (q, k, v, qv)):
        return out, None
    if qv is not None:
        return out, lse.view(q.shape[:-1])
    return out, lse.view(*q.shape[:-1]).transpose(-1, -2).contiguous()


def _mla_block(b, h, h_k, total_q, max_q, max_k, table, v, fp8, splits):
    """_mla_1cta_route (572) and _mla_fwd_plan (611): the rows that TMA loads at once, None for cp.async.

    The 64-key kernel takes pages of whole 64-key blocks by TMA, the 128-key ones pages of 128 (1412). Rows of
    a loaded page beyond the sequence are multiplied by P = 0: NaN spreads (flash_attn_varlen_func, 4277).
    """
    group, past_one_wave = h // h_k, 2 * h_k * b > sms()

    def one_cta(splitting):
        decodes = max_q * group <= 64
        return fp8 or splits > 1 or splitting or (decodes and past_one_wave)

    by_64 = not fp8 and group <= 64 and (group == 64 or (h_k == 1 and max_q == 1))
    single = one_cta(splits < 1)
    if single and splits < 1:
        tile_n, least, rows = (64, 4, max_q * 64) if by_64 else (BLOCK, 1, max_q * group)
        tile_m = 64 if by_64 else BLOCK if rows <= BLOCK else 2 * BLOCK
        blocks = math.ceil(max_k / tile_n)
        per_token = 64 if by_64 else group
        partial = 0 if per_token % tile_m == 0 else b - 1
        tiles = h_k * min(b * math.ceil(rows / tile_m), math.ceil(total_q * per_token / tile_m) + partial)
        if _splits(tiles, blocks, min(128, max(1, blocks // least))) < (2 if by_64 else 5):
            single = one_cta(False)
    if table is None:
        return 64 if single and by_64 else BLOCK
    if single and by_64:
        return 64 if v.shape[1] % 64 == 0 else None
    return BLOCK if v.shape[1] == BLOCK else None


def _splits(tiles, blocks, most):
    """num_splits_heuristic (315)."""
    if blocks <= 4 or tiles == 0:
        return 1
    return max(1, min(sms() // tiles, most, blocks))


def _validate_head_dims(d, dv, alignment, widest_on_hopper):
    """:121-138."""
    divides = d % alignment == 0 and dv % alignment == 0
    if arch() == "sm_90":
        fits = 8 <= d <= widest_on_hopper and 8 <= dv <= widest_on_hopper
        assert fits and divides, f"({d}, {dv}) is not supported on SM90."
    elif arch() in BLACKWELL:
        absorbed = (d == 64 or d == dv) and dv == 512
        plain = 8 <= d <= 128 and 8 <= dv <= 128
        right = plain or absorbed or (d, dv) in ((192, 128), (256, 256))
        assert right and divides, f"({d}, {dv}) is not supported on SM100/SM110."
    else:
        raise NotImplementedError(f"{arch()} is not doubled")
