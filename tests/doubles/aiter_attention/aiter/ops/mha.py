"""aiter/ops/mha.py: variable-length prefill, its choice of backend and what each backend checks.

Every backend aligns a causal mask to the bottom right: OPUS (gfx950), the v3 assembly (mask 2 of
hsa/ARCH/fmha_v3_fwd/*.csv; csrc/cpp_itfs/mha_fwd.cu get_cfg_mask_type) and CK ("b:-1,0").
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .._double.softmax import attend, bottom_right
from .._double.strict import check, compiled, doubled, indices, scalar, sure
from ..jit.utils.chip_info import get_gfx
from ..utility import dtypes

__all__ = ["flash_attn_varlen_fp8_pertensor_func", "flash_attn_varlen_func"]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    min_seqlen_q=0,
    dropout_p=0.0,
    softmax_scale=None,
    logits_soft_cap=0.0,
    causal=False,
    window_size=(-1, -1, 0),
    bias=None,
    alibi_slopes=None,
    deterministic=False,
    return_lse=False,
    return_attn_probs=False,
    how_v3_bf16_cvt=1,
    block_table=None,
    out=None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None,
    sink_ptr: Tensor | None = None,
):
    if block_table is not None and (cu_seqlens_q_padded is not None or cu_seqlens_k_padded is not None):
        raise NotImplementedError(
            "Paged/Split-KV attention (using block_table) does not currently support "
            "physical sequence padding (cu_seqlens_*_padded)."
        )
    plain = (
        block_table is cu_seqlens_q_padded is cu_seqlens_k_padded is bias is alibi_slopes is sink_ptr is None
    )
    doubled(plain, "pages, padding, bias, ALiBi, sinks")
    doubled(dropout_p == 0.0 and not return_attn_probs, "dropout")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        assert return_lse
        doubled(False, "the backward pass")
    result, lse = _forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
        logits_soft_cap, (None, None, None), return_lse, out,
    )  # fmt: skip
    return (result, lse) if return_lse else result


def flash_attn_varlen_fp8_pertensor_func(
    q,
    k,
    v,
    q_descale,
    k_descale,
    v_descale,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    min_seqlen_q=0,
    logits_soft_cap=0.0,
    causal=False,
    window_size=(-1, -1, 0),
    softmax_scale=None,
    sink_ptr=None,
):
    doubled(sink_ptr is None, "sinks")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    descales = (q_descale, k_descale, v_descale)
    return _forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
        logits_soft_cap, descales, False, None,
    )[0]  # fmt: skip


def _forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, window, cap, descales, return_lse, out):
    """_flash_attn_varlen_forward."""
    doubled(tuple(window[:2]) == (-1, -1) and (len(window) < 3 or window[2] == 0), "windows")
    doubled(cap == 0.0, "logits_soft_cap")
    _, heads, dim = q.shape
    kv_heads, v_dim = v.shape[-2:]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # maybe_contiguous
    opus = (
        int(os.environ.get("AITER_DISABLE_FMHA_OPUS", "0")) == 0
        and get_gfx() == "gfx950"
        and q.dtype == dtypes.bf16
        and (dim, v_dim) == (192, 128)
        and heads % kv_heads == 0
        and all(d is None for d in descales)
        and not return_lse
    )
    if opus:  # its wrapper converts: fmha_fwd_bf16_opus_varlen_fwd
        cu_q, cu_k = (x.to(torch.int32).contiguous() for x in (cu_q, cu_k))
        max_q, max_k, scale = int(max_q), int(max_k), float(scale)
        # fmha_fwd_bf16_opus_kernels.cu
        check(max_q > 0 and max_k > 0, "group mode requires max_seqlen_q and max_seqlen_k")
        check(out is None or out.dtype == q.dtype, "q/k/v/out must share dtype")
    fp8 = q.dtype == dtypes.fp8
    per_tensor = all(d is not None for d in descales) and descales[0].shape == (1,)
    same = all(d is not None and d.shape == descales[0].shape for d in descales)
    per_head = same and descales[0].shape == (cu_q.numel() - 1, kv_heads)
    square = (dim, v_dim) == (128, 128)
    v3_fp8 = fp8 and same and square and (per_tensor or per_head)
    v3 = (
        (square or (dim, v_dim) == (192, 128))
        and heads % kv_heads == 0
        and (q.dtype == dtypes.bf16 or v3_fp8)
    )
    ratio = heads // kv_heads
    v3 = v3 and not (v3_fp8 and ratio & (ratio - 1))
    if not opus:
        _check_types(max_q, max_k, scale, causal, return_lse)
    if not opus and not v3:
        # cmdGenFunc_mha_varlen_fwd: the other architecture's FP8 is no dtype here
        if q.dtype not in (dtypes.fp16, dtypes.bf16, dtypes.fp8):
            raise NotImplementedError("Unsupported dtype for MHA")
        # CK's codegen (example/ck_tile/01_fmha/codegen/ops/fmha_fwd.py): "no need lse" for FP8
        check(not (fp8 and return_lse), "invalid argument for fmha_fwd")
        square_dims = {(64, 64), (128, 128), (192, 128), (256, 256)}
        doubled((dim, v_dim) in square_dims, f"head dimensions {dim} and {v_dim} in CK")
    _check_tensors(q, k, v, cu_q, cu_k, out)
    if fp8 and v3:
        check(
            all(d.dtype == torch.float32 for d in descales), "q_descale, k_descale, v_descale must be float32"
        )
    given = [d is not None for d in descales]
    check(
        all(given) or not any(given),
        "q_descale, k_descale, v_descale must be all provided or all not provided",
    )
    return _run(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, descales, v3_fp8, return_lse, out)


@compiled("pybind")
def _check_types(max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, is_causal: bool,
                 return_softmax_lse: bool) -> None:  # fmt: skip
    """The compiled ops' hints: a tensor is no int, an int is no float."""


def _check_tensors(q, k, v, cu_q, cu_k, out) -> None:
    """mha_varlen_fwd_kernels.cu, asm_mha_varlen_fwd.cu."""
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
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


def _run(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, descales, v3_fp8, return_lse, out):
    starts, key_starts = indices("cu_seqlens_q", cu_q), indices("cu_seqlens_k", cu_k)
    if out is None:
        out = torch.full((*q.shape[:2], v.shape[2]), float("nan"), dtype=_out_dtype(q))
    lse = (
        torch.full((q.shape[1], q.shape[0]), float("nan")) if return_lse else None
    )  # [heads, tokens], natural
    if max_k <= 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("inf"))
        return out, lse
    for b in range(len(starts) - 1):
        rows, keys = range(starts[b], starts[b + 1]), range(key_starts[b], key_starts[b + 1])
        sure(0 <= starts[b] <= starts[b + 1] <= q.shape[0], "cu_seqlens_q leads outside q")
        sure(0 <= key_starts[b] <= key_starts[b + 1] <= k.shape[0], "cu_seqlens_k leads outside k")
        sure(
            len(rows) <= max_q,
            f"sequence {b} has {len(rows)} query tokens, the grid is of max_seqlen_q={max_q}",
        )
        sure(len(keys) <= max_k, f"sequence {b} has {len(keys)} keys, more than max_seqlen_k={max_k}")
        times = [_descale(d, b, v3_fp8, n) for n, d in zip("qkv", descales, strict=True)]
        wide = [_slice(x, keys).float() * t for x, t in zip((k, v), times[1:], strict=True)]
        wide = [x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in wide]
        query = _slice(q, rows).float() * torch.as_tensor(times[0]).repeat_interleave(
            q.shape[1] // k.shape[1] if v3_fp8 and descales[0].dim() == 2 else 1, dim=0
        )
        seen = (
            bottom_right(len(rows), len(keys))
            if causal
            else torch.ones(len(rows), len(keys), dtype=torch.bool)
        )
        found, found_lse = attend(query, *wide, scale, seen)
        out[rows.start : rows.stop] = found.to(out.dtype)
        if lse is not None:
            lse[:, rows.start : rows.stop] = found_lse.T
    return out, lse


def _slice(x: torch.Tensor, rows: range) -> torch.Tensor:
    return x[rows.start : rows.stop]


def _descale(descale, b: int, v3: bool, name: str) -> torch.Tensor:
    """[heads or 1, 1]: the v3 assembly takes one per tensor or one per sequence and KV head; CK reads the
    float at the pointer (mha_varlen_fwd_kernels.cu passes no stride)."""
    if descale is None:
        return torch.ones(1, 1)
    if v3 and descale.dim() == 2:
        return descale[b][:, None]
    return torch.full((1, 1), scalar(f"{name}_descale", descale.reshape(-1)[:1]))
