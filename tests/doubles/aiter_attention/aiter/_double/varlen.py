"""Attention over packed sequences, as AITER's variable-length forward kernels find them in memory.

Every backend aligns a causal mask to the bottom right: OPUS (gfx950), the v3 assembly (mask 2 of
hsa/ARCH/fmha_v3_fwd/*.csv; csrc/cpp_itfs/mha_fwd.cu get_cfg_mask_type) and CK ("b:-1,0").
"""

from __future__ import annotations

import torch

from ..utility import dtypes
from .softmax import attend, bottom_right
from .strict import check, indices, scalar, sure


def causal_mask(causal: bool, left: int, right: int, max_k: int) -> bool | None:
    """Whether the mask is causal, or None for a window (csrc/py_itfs_cu/asm_mha_varlen_fwd.cu and
    csrc/py_itfs_ck/mha_varlen_fwd_kernels.cu: causal alone sets the right bound to 0)."""
    left, right = (-1 if w >= max_k else w for w in (left, right))
    bounds = (left, 0 if causal else right)
    return {(-1, -1): False, (-1, 0): True}.get(bounds)


def check_tensors(q, k, v, cu_q, cu_k, out) -> None:
    """What both entries check alike: mha_varlen_fwd_kernels.cu, asm_mha_varlen_fwd.cu."""
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    for x in (q, k, v):
        check(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    for name, cu in ("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k):
        check(cu.dtype == torch.int32, f"{name} must have dtype int32")
        check(cu.is_contiguous(), f"{name} must be contiguous")
        check(cu.shape == (cu_q.numel(),), f"{name} must have shape (batch_size + 1)")
    check(cu_q.numel() > 1, "batch size must be postive")
    check(q.shape[1] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
    check(
        k.shape == (v.shape[0], v.shape[1], q.shape[2]),
        "k must have shape (total_k, num_heads_k, head_size_q)",
    )
    if out is not None:
        check(out.dtype == _out_dtype(q),
              "For FP16/BF16 input, output must have the same dtype as inputs. For FP8"
              " input, output must have dtype BF16")  # fmt: skip
        check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
        check(
            out.shape == (*q.shape[:2], v.shape[2]), "out must have shape (total_q, num_heads, head_size_v)"
        )


def _out_dtype(q: torch.Tensor) -> torch.dtype:
    return dtypes.bf16 if q.dtype == dtypes.fp8 else q.dtype


def run(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, descales, per_head, return_lse, out, skip=0,
        zero=False):  # fmt: skip
    """-> out, lse [heads, tokens] of natural logarithms, or None. `per_head`: descales may be
    [sequences, KV heads]. `skip`: sequences of no more query tokens are left alone. `zero`: what is
    unwritten is 0 and -inf (zero_tensors)."""
    starts, key_starts = indices("cu_seqlens_q", cu_q), indices("cu_seqlens_k", cu_k)
    if out is None:
        out = torch.full((*q.shape[:2], v.shape[2]), float("nan"), dtype=_out_dtype(q))
    lse = torch.full((q.shape[1], q.shape[0]), float("nan")) if return_lse else None
    if zero:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
    if max_k <= 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("inf"))
        return out, lse
    group = q.shape[1] // k.shape[1]
    for b in range(len(starts) - 1):
        rows, keys = slice(starts[b], starts[b + 1]), slice(key_starts[b], key_starts[b + 1])
        n, m = rows.stop - rows.start, keys.stop - keys.start
        sure(0 <= rows.start <= rows.stop <= q.shape[0], "cu_seqlens_q leads outside q")
        sure(0 <= keys.start <= keys.stop <= k.shape[0], "cu_seqlens_k leads outside k")
        sure(n <= max_q, f"sequence {b} has {n} query tokens, the grid is of max_seqlen_q={max_q}")
        sure(m <= max_k, f"sequence {b} has {m} keys, more than max_seqlen_k={max_k}")
        if skip and n <= skip:
            continue
        times = [_descale(d, b, per_head, name) for name, d in zip("qkv", descales, strict=True)]
        query = q[rows].float() * times[0].repeat_interleave(group if times[0].shape[0] > 1 else 1, dim=0)
        wide = [x[keys].float() * t for x, t in zip((k, v), times[1:], strict=True)]
        wide = [x.repeat_interleave(group, dim=1) for x in wide]
        seen = bottom_right(n, m) if causal else torch.ones(n, m, dtype=torch.bool)
        found, found_lse = attend(query, *wide, scale, seen)
        out[rows] = found.to(out.dtype)
        if lse is not None:
            lse[:, rows] = found_lse.T
    return out, lse


def _descale(descale, b: int, per_head: bool, name: str) -> torch.Tensor:
    """[KV heads or 1, 1]: the v3 assembly takes one per tensor or one per sequence and KV head, by strides;
    CK reads the float at the pointer (mha_varlen_fwd_kernels.cu passes no stride)."""
    if descale is None:
        return torch.ones(1, 1)
    if per_head and descale.dim() == 2:
        return descale[b][:, None]
    return torch.full((1, 1), scalar(f"{name}_descale", descale.reshape(-1)[:1]))
