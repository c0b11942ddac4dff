"""aiter/ops/mha.py: variable-length prefill, its choice of backend and what each backend checks.

The three entries can be called by themselves: `fmha_v3_varlen_fwd` (assembly), `mha_varlen_fwd` (CK) and
`fmha_fwd_bf16_opus_varlen_fwd` (OPUS). Each lives in a module of its own that falls back to no other
(aiter/jit/optCompilerConfig.json: FAV3_ON with ENABLE_CK=0, FAV2_ON, module_fmha_fwd_bf16_opus).
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .._double.strict import check, compiled, doubled, sure
from .._double.varlen import causal_mask, check_tensors, run
from ..jit.utils.chip_info import get_gfx
from ..utility import dtypes

__all__ = [
    "flash_attn_varlen_fp8_pertensor_func",
    "flash_attn_varlen_func",
    "fmha_fwd_bf16_opus_varlen_fwd",
    "fmha_v3_varlen_fwd",
    "mha_varlen_fwd",
]

SQUARE, MLA = (128, 128), (192, 128)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, dropout_p=0.0,
    softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1, 0), bias=None,
    alibi_slopes=None, deterministic=False, return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1,
    block_table=None, out=None, cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None, sink_ptr: Tensor | None = None,
):  # fmt: skip
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
        logits_soft_cap, (None, None, None), return_lse, out, min_seqlen_q, how_v3_bf16_cvt,
    )  # fmt: skip
    return (result, lse) if return_lse else result


def flash_attn_varlen_fp8_pertensor_func(
    q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    min_seqlen_q=0, logits_soft_cap=0.0, causal=False, window_size=(-1, -1, 0), softmax_scale=None,
    sink_ptr=None,
):  # fmt: skip
    doubled(sink_ptr is None, "sinks")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    descales = (q_descale, k_descale, v_descale)
    return _forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
        logits_soft_cap, descales, False, None, min_seqlen_q, 1,
    )[0]  # fmt: skip


def _forward(q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, window, cap, descales, return_lse, out,
             min_q, cvt):  # fmt: skip
    """_flash_attn_varlen_forward."""
    doubled(tuple(window[:2]) == (-1, -1) and (len(window) < 3 or window[2] == 0), "windows")
    doubled(cap == 0.0, "logits_soft_cap")
    _, heads, dim = q.shape
    kv_heads, dims = v.shape[-2], (dim, v.shape[-1])
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # maybe_contiguous
    divides, no_scale = heads % kv_heads == 0, all(d is None for d in descales)
    if (
        int(os.environ.get("AITER_DISABLE_FMHA_OPUS", "0")) == 0
        and get_gfx() == "gfx950"
        and q.dtype == dtypes.bf16
        and dims == MLA
        and divides
        and no_scale
        and not return_lse
    ):
        return fmha_fwd_bf16_opus_varlen_fwd(
            q, k, v, softmax_scale=float(scale), causal=bool(causal), out=out, seqstart_q=cu_q,
            seqstart_k=cu_k, max_seqlen_q=int(max_q), max_seqlen_k=int(max_k),
        ), None  # fmt: skip
    v3_fp8 = q.dtype == dtypes.fp8 and dims in _fp8_dims() and _alike(descales, cu_q.numel() - 1, kv_heads)
    v3 = dims in (SQUARE, MLA, *(_fp8_dims() if v3_fp8 else ())) and divides
    v3 = v3 and (q.dtype == dtypes.bf16 or v3_fp8)
    v3 = v3 and not (v3_fp8 and (heads // kv_heads) & (heads // kv_heads - 1))
    v3 = v3 and not (dims == MLA and _past_32_bits(max_k, k, v))
    before = (q, k, v, cu_q, cu_k, max_q, max_k, min_q, 0.0, scale, 0.0, False, causal, -1, -1)
    if v3:
        found = fmha_v3_varlen_fwd(
            *before, return_lse, False, cvt, out, None, None, None, *descales, None, None, None
        )
    else:
        names = ("q_descale", "k_descale", "v_descale")
        found = mha_varlen_fwd(
            *before, 0, return_lse, False, out=out, **dict(zip(names, descales, strict=True))
        )
    return found[:2]


def _fp8_dims() -> tuple:
    """Head dimensions of FP8 kernels: hsa/ARCH/fmha_v3_fwd/fmha_fwd.csv, and is_fmha_v3_fp8."""
    return (SQUARE, (256, 256)) if get_gfx() == "gfx950" else (SQUARE,)


def _alike(descales, sequences: int, kv_heads: int) -> bool:
    if any(d is None for d in descales):
        return False
    shapes = {tuple(d.shape) for d in descales}
    return len(shapes) == 1 and shapes <= {(1,), (sequences, kv_heads)}


def _past_32_bits(max_k: int, k, v) -> bool:
    """_fmha_kv_byte_extent_ge_u32."""
    return any(int(max_k) * x.stride(-3) * x.element_size() >= 1 << 32 for x in (k, v))


@compiled("pybind", at_tensors=True)
def fmha_v3_varlen_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, min_seqlen_q: int, dropout_p: float,
    softmax_scale: float, logits_soft_cap: float, zero_tensors: bool, is_causal: bool,
    window_size_left: int, window_size_right: int, return_softmax_lse: bool, return_dropout_randval: bool,
    how_v3_bf16_cvt: int, out: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    gen: torch.Generator | None = None, cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_k_padded: torch.Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """csrc/py_itfs_cu/asm_mha_varlen_fwd.cu, csrc/cpp_itfs/mha_fwd.cu fmha_fwd_v3; the assembly is told
    nothing of min_seqlen_q."""
    doubled(block_table is cu_seqlens_q_padded is cu_seqlens_k_padded is None, "pages, padding")
    descales = (q_descale, k_descale, v_descale)
    fp8, dims = q.dtype == dtypes.fp8, (q.shape[-1], v.shape[-1])
    check(q.dtype in (dtypes.fp16, dtypes.bf16, torch.float8_e4m3fn, torch.float8_e4m3fnuz),
          "FlashAttention only support fp16, bf16 and fp8_e4m3 data type")  # fmt: skip
    sure(q.element_size() == 2 or fp8, f"the kernel for {get_gfx()} reads {dtypes.fp8}, not {q.dtype}")
    check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, out)
    _all_or_none(descales)
    if fp8:
        check(q_descale is not None, "q_descale, k_descale, v_descale must be provided for asm fp8")
        check(all(d.dtype == torch.float32 for d in descales),
              "q_descale, k_descale, v_descale must be float32")  # fmt: skip
        for d in descales:
            check(d.shape == (1,) or d.shape == (cu_seqlens_q.numel() - 1, k.shape[1]), "q_descale.sizes()")
        ratio = q.shape[1] // k.shape[1]
        sure(ratio in (1, 2, 4, 8, 16), f"the FP8 assembly shifts by log2 of the {ratio} heads per KV head")
    else:
        sure(q_descale is None, "descales are passed on for FP8 alone (init_fmha_fwd_v3_args)")
    check(not return_dropout_randval, "return_dropout_randval require p_dropout > 0")
    causal = causal_mask(is_causal, window_size_left, window_size_right, max_seqlen_k)
    rounding = (1,) if fp8 else (0, 1, 2)  # get_kernel_name_key compares bf16_cvt on gfx942 alone
    check(
        dims in (_fp8_dims() if fp8 else (SQUARE, MLA))
        and q.dtype != dtypes.fp16
        and causal is not None
        and bias is alibi_slopes is None
        and dropout_p <= 0.0
        and (get_gfx() == "gfx950" or how_v3_bf16_cvt in rounding),
        "invalid argument for fmha_v3_varlen_fwd",
    )
    sure(logits_soft_cap == 0.0, "the assembly has no logits_soft_cap")
    sure(dims != MLA or not _past_32_bits(max_seqlen_k, k, v), "offsets into k and v are of 32 bits")
    found = run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                descales, True, return_softmax_lse, out, zero=zero_tensors)  # fmt: skip
    return _four(*found)


@compiled("pybind", at_tensors=True)
def mha_varlen_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None, max_seqlen_q: int, max_seqlen_k: int, min_seqlen_q: int,
    dropout_p: float, softmax_scale: float, logits_soft_cap: float, zero_tensors: bool, is_causal: bool,
    window_size_left: int, window_size_right: int, sink_size: int, return_softmax_lse: bool,
    return_dropout_randval: bool, out: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None, gen: torch.Generator | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None, cu_seqlens_k_padded: torch.Tensor | None = None,
    sink_ptr: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """csrc/py_itfs_ck/mha_varlen_fwd_kernels.cu; min_seqlen_q other than 0 asks for CK's kernel with
    kSkipMinSeqlenQ, which leaves sequences of no more query tokens unwritten."""
    extras = (block_table, cu_seqlens_q_padded, cu_seqlens_k_padded, bias, alibi_slopes, sink_ptr)
    plain = all(x is None for x in extras) and sink_size == 0
    doubled(plain, "pages, padding, bias, ALiBi, sinks")
    doubled(dropout_p == 0.0 and logits_soft_cap == 0.0, "dropout, logits_soft_cap")
    # cmdGenFunc_mha_varlen_fwd: the other architecture's FP8 is no dtype here
    if q.dtype not in (dtypes.fp16, dtypes.bf16, dtypes.fp8):
        raise NotImplementedError("Unsupported dtype for MHA")
    if q.dtype == dtypes.fp8 and out is not None and out.dtype != dtypes.bf16:
        raise NotImplementedError("Unsupported output dtype for FP8 MHA")
    check(cu_seqlens_k is not None, "cu_seqlens_k must be provided if paged_KV is false")
    check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, out)
    descales = (q_descale, k_descale, v_descale)
    _all_or_none(descales)
    check(not return_dropout_randval, "return_dropout_randval require p_dropout > 0")
    # CK's codegen (example/ck_tile/01_fmha/codegen/ops/fmha_fwd.py): "no need lse" for FP8
    check(not (q.dtype == dtypes.fp8 and return_softmax_lse), "invalid argument for fmha_fwd")
    dims = (q.shape[-1], v.shape[-1])
    doubled(dims in {(64, 64), SQUARE, MLA, (256, 256)}, f"head dimensions {dims} in CK")
    causal = causal_mask(is_causal, window_size_left, window_size_right, max_seqlen_k)
    doubled(causal is not None, "windows")
    found = run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                descales, False, return_softmax_lse, out, min_seqlen_q, zero_tensors)  # fmt: skip
    return _four(*found)


def fmha_fwd_bf16_opus_varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, seqstart_q: Tensor,
    seqstart_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, out: Tensor | None = None,
    seqstart_q_pad: Tensor | None = None, seqstart_k_pad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """csrc/py_itfs_cu/fmha_fwd_bf16_opus_kernels.cu launch_d192_v128, in group mode: no log-sum-exp."""
    doubled(seqstart_q_pad is seqstart_k_pad is None, "padding")
    check(get_gfx() == "gfx950", "the OPUS forward is compiled for gfx950 alone")
    check(q.dtype == k.dtype == v.dtype and (out is None or out.dtype == q.dtype),
          "q/k/v/out must share dtype")  # fmt: skip
    check(q.dtype == dtypes.bf16, "fmha_fwd_bf16_opus_fwd only supports bf16")
    dims = (q.shape[-1], v.shape[-1])
    check(dims != SQUARE, "OPUS D=128 kernel supports batch mode only (no varlen)")
    check(dims == MLA, f"OPUS fwd supports (D_QK,D_V) in {{(128,128),(192,128)}}, got {dims}")
    check(q.dim() == k.dim() == v.dim() == 3, "group mode expects packed 3-D q/k/v/out [total, H, D]")
    check(k.shape[2] == 192, "group mode q/k head dim must be 192")
    check(v.shape[1] == k.shape[1], "group mode k/v must share H_KV")
    sure(v.shape[0] == k.shape[0], "v is read by the offsets of k")
    check(out is None or out.shape == (*q.shape[:2], 128), "group mode out must be [total_q, H, D_V]")
    check(seqstart_q.numel() > 1, "group mode requires seqstart_q length >= 2")
    max_q, max_k = int(max_seqlen_q), int(max_seqlen_k)
    check(max_q > 0 and max_k > 0, "group mode requires max_seqlen_q / max_seqlen_k > 0")
    starts = [x.to(torch.int32).contiguous() for x in (seqstart_q, seqstart_k)]
    check(all(x.dim() == 1 for x in starts), "seqstart must be 1-D")
    check(starts[1].numel() == starts[0].numel(), "seqstart_k length must be num_groups+1")
    check(q.shape[1] % k.shape[1] == 0, "H must be divisible by H_KV (GQA group)")
    check(all(x is None or x.stride(-1) == 1 for x in (q, k, v, out)),
          "q/k/v/out must be contiguous along the head dim")  # fmt: skip
    scale = float(softmax_scale)
    scale = scale if scale > 0 else 192**-0.5
    return run(q, k, v, *starts, max_q, max_k, scale, bool(causal), (None,) * 3, False, False, out)[0]


def _all_or_none(descales) -> None:
    check(
        len({d is None for d in descales}) == 1,
        "q_descale, k_descale, v_descale must be all provided or all not provided",
    )


def _four(out, lse) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, softmax_lse [heads, tokens], the dropout mask and the random state; what was not asked for is
    empty."""
    lse = torch.empty(0) if lse is None else lse
    return out, lse, torch.empty(0, dtype=out.dtype), torch.empty(2, dtype=torch.int64)
