"""BatchPrefillWithRaggedKVCacheWrapper: flashinfer/prefill.py:3193-4389, csrc/batch_prefill.cu (fa2),
csrc/batch_prefill_sm90.cu (fa3), csrc/fmha_cutlass_sm100.cu (cutlass), flashinfer/cudnn/prefill.py (cudnn),
trtllm_ragged_attention_deepseek (cute-dsl at head dimension 128). Causal or full attention; fmha_v2, the
modular cute-dsl kernel, masks, windows, position encodings and CUDA-graph buffers are not doubled."""

import functools
import math
from itertools import pairwise
from typing import Any

import torch

from flashinfer._ragged import trtllm_ragged_attention_deepseek
from flashinfer.cudnn import cudnn_batch_prefill_with_kv_cache
from flashinfer.utils import FLOAT8, arch, attend, check, check_shape_dtype_device, vectors


class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check(kv_layout in ("NHD", "HND"), f"Invalid kv_layout {kv_layout}", KeyError)  # utils.py:170
        extras = (qo_indptr_buf, kv_indptr_buf, custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs)
        plain = not use_cuda_graph and all(e is None for e in extras)
        check(plain, "CUDA-graph buffers, masks and jit_args are not doubled", NotImplementedError)
        self._kv_layout = kv_layout
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._backend = backend

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
    ) -> None:
        extras = (custom_mask, packed_custom_mask, prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr)
        plain = all(e is None for e in extras) and pos_encoding_mode == "NONE" and not use_fp16_qk_reduction
        plain = plain and window_left < 0 and not logits_soft_cap and token_pos_in_items_len == 0
        check(plain, "masks, windows, soft caps and position encodings are not doubled", NotImplementedError)
        q_dtype = _dtype(q_data_type)  # the default is float16, whatever q is (:3461)
        kv_dtype = q_dtype if kv_data_type is None else _dtype(kv_data_type)
        o_dtype = q_dtype if o_data_type is None else _dtype(o_data_type)
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        check(len(kv_indptr) == len(qo_indptr), "kv_indptr and qo_indptr must be equally long", ValueError)
        planned = self._backend != "cudnn"  # whose graph takes heads, widths and index types from tensors
        for name, t in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)) if planned else ():
            # the planners cast pointers to the type of kv_indptr (:3858), cutlass to int*
            check(t.dtype == torch.int32 and t.is_contiguous(), f"{name} is read as contiguous int32")
        dims = (head_dim_qk, head_dim_vo)
        if self._backend == "cute-dsl":  # :3708
            check(dims[0] == dims[1], "cute-dsl backend requires head_dim_vo == head_dim_qk",
                  NotImplementedError)  # fmt: skip
            nhd = self._kv_layout == "NHD"
            check(nhd, "cute-dsl backend only supports NHD layout", NotImplementedError)
            check(dims[0] == 128, "the modular cute-dsl kernel is not doubled", NotImplementedError)
        if self._backend == "auto":  # :3804, utils.py:545 and :427
            mixed = kv_dtype in FLOAT8 and q_dtype not in FLOAT8
            hopper = arch() == "sm_90" and not mixed and _fa3_dims(*dims)
            self._backend = "fa3" if hopper else "fa2"  # and stays so for later plans
        doubled = self._backend in ("fa2", "fa3", "cutlass", "cudnn", "cute-dsl")
        check(doubled, f"backend {self._backend} is not doubled", NotImplementedError)
        half = (torch.float16, torch.bfloat16)
        if self._backend == "fa3":
            check(arch() == "sm_90", "fa3: no kernel image is available for this device")
            check(_fa3_dims(*dims), f"fa3 is not instantiated for {dims}")  # hopper/prefill_sm90.cuh:522
            # hopper/quantization/prefill_sm90.cuh:391 has one HEAD_DIM for FP8
            check(
                q_dtype in half and kv_dtype == q_dtype, f"fa3 at {dims}: q and kv are the same 16-bit dtype"
            )
        if self._backend == "fa2":
            # :4312 casts FP8 q, k and v to fp16 under a module compiled for FP8: its pointers are misread
            check(q_dtype in half, "fa2: q must be fp16 or bf16")
            check(kv_dtype in (q_dtype, *FLOAT8), "fa2: kv has q's dtype, or FP8")
        if self._backend == "cutlass":
            check(arch() == "sm_100", "cutlass FMHA: no kernel image for this device")
            check(dims in ((192, 128), (128, 128), (64, 64)), "Unsupported head dimensions")
            check(q_dtype == kv_dtype and q_dtype in (*half, *FLOAT8), "cutlass: q and k have the same dtype")
        grouped = not planned or num_qo_heads % num_kv_heads == 0
        check(grouped, "num_qo_heads must be a multiple of num_kv_heads")
        self._qo_indptr_buf = qo_indptr.to(self.device)
        self._kv_indptr_buf = kv_indptr.to(self.device)
        rows, keys = qo_indptr.tolist(), kv_indptr.tolist()
        for name, t in (("qo_indptr", rows), ("kv_indptr", keys)):
            check(t == sorted(t), f"{name} should be non-decreasing")
        self._plan_info = (rows, keys, num_qo_heads, num_kv_heads, *dims)
        self._dtypes = (q_dtype, kv_dtype, o_dtype)
        self._causal, self._sm_scale = causal, sm_scale
        self._seq_lens_q, self._seq_lens_kv = seq_lens_q, seq_lens
        self._max_token_per_sequence, self._max_sequence_kv = max_token_per_sequence, max_sequence_kv
        self._v_indptr_buf = self._kv_indptr_buf if v_indptr is None else v_indptr.to(self.device)
        self._o_indptr_buf = self._qo_indptr_buf if o_indptr is None else o_indptr.to(self.device)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        check(
            not args and kv_cache_sf is None,
            "FP8 and NVFP4 scale tensors are not doubled",
            NotImplementedError,
        )
        rows, keys, heads, kv_heads, dim_qk, dim_vo = self._plan_info
        q_dtype, kv_dtype, o_dtype = self._dtypes
        check(q.dtype == q_dtype, f"q {q.dtype} is not the planned {q_dtype}", ValueError)  # utils.py:356
        check(k.dtype == kv_dtype, f"k {k.dtype} is not the planned {kv_dtype}", ValueError)
        check(v.dtype == kv_dtype, f"v {v.dtype} is read as {kv_dtype}")  # nobody checks it
        if self._backend in ("cudnn", "cute-dsl"):
            out_dtype = o_dtype
            if out_dtype.itemsize == 1:
                out_dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
            shape = (*q.shape[:-1], v.shape[-1])
            out = torch.full(shape, math.nan, dtype=out_dtype) if out is None else out
            check_shape_dtype_device(out, shape, out_dtype, q.device, "out")
            if return_lse and lse is None:
                lse = torch.full(q.shape[:2], math.nan)
            elif return_lse:
                check_shape_dtype_device(lse, q.shape[:2], torch.float32, q.device, "lse")
            scales = (q_scale, k_scale, v_scale, o_scale)
            run = self._cudnn if self._backend == "cudnn" else self._cute_dsl
            return run(q, k, v, scales, out, lse, return_lse)
        total = q.size(0) == rows[-1]
        check(total, f"q.shape[0] ({q.size(0)}) does not match qo_indptr[-1] ({rows[-1]})", ValueError)
        planned = self._qo_indptr_buf.tolist() == rows and self._kv_indptr_buf.tolist() == keys
        check(planned, "indptr changed after plan: the schedule is stale")
        if self._kv_layout == "HND":  # fa3 and cutlass take sizes 0 and 1 as tokens and heads
            check(self._backend == "fa2", "HND is misread by this backend")
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        check(q.shape[1:] == (heads, dim_qk), f"q must be [n, {heads}, {dim_qk}]")
        check(k.shape[1:] == (kv_heads, dim_qk), f"k must be [m, {kv_heads}, {dim_qk}]")
        check(v.shape == (len(k), kv_heads, dim_vo), f"v must be [m, {kv_heads}, {dim_vo}]")
        check(keys[-1] <= len(k), "illegal memory access: k has fewer rows than kv_indptr says")
        for name, t in (("q", q), ("k", k), ("v", v)):
            vectors(t, name)
        scale = dim_qk**-0.5 if self._sm_scale is None else self._sm_scale
        shape = (*q.shape[:-1], dim_vo)
        out_dtype = (
            o_dtype if o_dtype.itemsize > 1 else (torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
        )
        if out is None:
            out = torch.full(shape, math.nan, dtype=out_dtype)
        else:
            check_shape_dtype_device(out, shape, out_dtype, q.device, "out")
        # fa2 and cutlass write rows of H * dv; fa3 alone takes strides of out
        check(out.is_contiguous() or self._backend == "fa3", "out must be contiguous")
        vectors(out, "out")
        if self._backend == "cutlass":  # DISPATCH_DTYPE_IN_OUT: bf16 out of FP8, else the dtype of the inputs
            check(
                out.dtype == (torch.bfloat16 if q.dtype in FLOAT8 else q.dtype),
                "cutlass: out has another dtype",
            )
        else:
            check(out.dtype in (torch.float16, torch.bfloat16), "out must be fp16 or bf16")
        if return_lse and lse is None:
            lse = torch.full(q.shape[:2], math.nan)
        elif return_lse:
            check_shape_dtype_device(lse, q.shape[:2], torch.float32, q.device, "lse")
        check(lse is None or lse.is_contiguous(), "lse must be contiguous")
        out_scale = 1.0
        if self._backend == "cutlass":  # fmha_varlen :4545; fa2 and fa3 ignore these scales
            factors = [1.0 if s is None else float(s) for s in (q_scale, k_scale, v_scale, o_scale)]
            scale, out_scale = scale * factors[0] * factors[1], factors[2] / factors[3]
        for i in range(len(rows) - 1):
            at, seen = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])
            o, base2 = attend(q[at], k[seen], v[seen], scale, self._causal)
            out[at] = (o * out_scale).to(out.dtype)
            if lse is not None:
                lse[at] = base2
        return (out, lse) if return_lse else out

    def _cudnn(self, q, k, v, scales, out, lse, return_lse):
        """:4275; qo_indptr and the others are offsets in elements, seq_lens of the two sides are needed. lse
        is [tokens, heads] here and [sequences, max, heads] there: no call that asks for it gets through."""
        last = int(self._qo_indptr_buf[-1])
        check(q.numel() == last, f"q.numel() ({q.numel()}) does not match qo_indptr[-1] ({last})", ValueError)
        check(self._kv_layout == "NHD", "HND is misread by this backend")
        check(self._seq_lens_q is not None, "'NoneType' object has no attribute 'dim'", AttributeError)
        lengths = [
            t.reshape(-1, 1, 1, 1) if t is not None and t.dim() == 1 else t
            for t in (self._seq_lens_q, self._seq_lens_kv)
        ]
        cudnn_batch_prefill_with_kv_cache(
            q, k, v, q.shape[-1] ** -0.5 if self._sm_scale is None else self._sm_scale,
            self._float_workspace_buffer, max_token_per_sequence=self._max_token_per_sequence,
            max_sequence_kv=self._max_sequence_kv, actual_seq_lens_q=lengths[0],
            actual_seq_lens_kv=lengths[1], return_lse=return_lse, causal=self._causal, q_scale=scales[0],
            k_scale=scales[1], v_scale=scales[2], batch_offsets_q=self._qo_indptr_buf,
            batch_offsets_k=self._kv_indptr_buf, batch_offsets_v=self._v_indptr_buf,
            batch_offsets_o=self._o_indptr_buf, out=out, lse=lse,
        )  # fmt: skip
        return (out, lse) if return_lse else out

    def _cute_dsl(self, q, k, v, scales, out, lse, return_lse):
        """:4195, the route of head dimension 128."""
        none = all(s is None for s in scales)
        check(none, "cute-dsl backend does not support FP8 scale parameters", NotImplementedError)
        rows = self._plan_info[0]
        check(q.size(0) == rows[-1], f"q.shape[0] ({q.size(0)}) does not match qo_indptr[-1]", ValueError)
        lengths = self._kv_indptr_buf[1:] - self._kv_indptr_buf[:-1]
        return trtllm_ragged_attention_deepseek(
            query=q, key=k, value=v, workspace_buffer=self._float_workspace_buffer, seq_lens=lengths,
            max_q_len=max(b - a for a, b in pairwise(rows)),
            max_kv_len=int(lengths.max()), bmm1_scale=128**-0.5 if self._sm_scale is None else self._sm_scale,
            bmm2_scale=1.0, o_sf_scale=1.0, batch_size=len(rows) - 1, window_left=-1,
            cum_seq_lens_q=self._qo_indptr_buf, cum_seq_lens_kv=self._kv_indptr_buf, enable_pdl=None,
            is_causal=self._causal, return_lse=return_lse, out=out, lse=lse, backend="cute-dsl",
        )  # fmt: skip

    run_return_lse = functools.partialmethod(run, return_lse=True)


def _dtype(dtype):
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _fa3_dims(dim_qk, dim_vo):
    """utils.py:475, is_fa3_prefill_head_dim_supported."""
    return dim_qk in (64, 128, 256) if dim_qk == dim_vo else (dim_qk, dim_vo) == (192, 128)
