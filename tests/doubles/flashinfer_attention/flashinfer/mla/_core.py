"""BatchMLAPagedAttentionWrapper: flashinfer/mla/_core.py:1963-2569, csrc/batch_mla_{plan,run}.cu (fa2),
csrc/batch_mla_sm90_{plan,run}.cu (fa3), csrc/cutlass_mla.cu. No profiler."""

import math
import warnings

import torch

from flashinfer.utils import arch, attend, check, check_shape_dtype_device, vectors

SMS = {"sm_90": 132, "sm_100": 148}  # H100 SXM, B200


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        if backend == "cutlass":  # :2109, nothing else is set: plan cannot be called
            self._backend = backend
            return
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf = qo_indptr
        self._kv_indptr_buf = kv_indptr
        self._kv_indices_buf = kv_indices
        self._kv_len_arr_buf = kv_len_arr
        if backend == "auto":  # utils.py:705, determine_mla_backend
            self._backend = "fa3" if arch() == "sm_90" else "fa2"
            if arch() != "sm_90":  # :2041
                warnings.warn(
                    f"backend='auto' selected '{self._backend}', not Blackwell-native", stacklevel=2
                )
        else:
            self._backend = backend

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        half = (torch.float16, torch.bfloat16)
        fp8 = kv_data_type == torch.float8_e4m3fn
        check(kv_data_type in half or fp8, f"MLA kv_data_type {kv_data_type} is not supported", ValueError)
        check(head_dim_kpe >= 0, "head_dim_kpe must be >= 0", ValueError)
        if fp8:  # :2195-2217
            check(self._backend in ("fa2", "fa3"), "FP8 MLA needs the fa2 or fa3 backend", ValueError)
            check(arch() == "sm_90", "FP8 kv_data_type for MLA requires an SM90 (Hopper) device", ValueError)
            check(q_data_type == torch.bfloat16, "FP8 MLA only supports a bfloat16 query", ValueError)
            dims = head_dim_ckv == 512 and head_dim_kpe in (0, 64)
            check(dims, "FP8 MLA only supports head_dim_ckv=512 and head_dim_kpe in (0, 64)", ValueError)
        # jit/attention/modules.py:194 in gen_batch_mla_module; sm90a code runs on no other architecture
        check(self._backend in ("fa2", "fa3"), f"Unsupported backend: {self._backend}", ValueError)
        check(
            self._backend == "fa2" or arch() == "sm_90", "fa3: no kernel image is available for this device"
        )
        # one template for q, kv and out: 16-bit types of the same kind, or e4m3 against bf16
        check(
            q_data_type in half and (fp8 or q_data_type == kv_data_type), "q and kv dtypes do not go together"
        )
        check(not use_profiler, "the profiler is not doubled", NotImplementedError)
        b = kv_len_arr.shape[0]  # batch_mla_plan.cu:176
        for name, t in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), ("kv_len", kv_len_arr)):
            check(t.dtype == torch.int32, f"{name} must be int32")  # batch_mla_plan.cu:165
            check(t.is_contiguous(), f"{name} must be contiguous")
        check(len(qo_indptr) == len(kv_indptr) == b + 1, "the planner reads beyond indptr: b + 1 entries")
        check(kv_indices.dim() == 1 and kv_indices.is_contiguous(), "kv_indices must be contiguous [pages]")
        rows = (qo_indptr[1:] - qo_indptr[:-1]).tolist()
        check(min(rows) >= 0, "qo_indptr should be non-decreasing")  # scheduler.cuh:1595
        self._needs_workspace(rows, num_heads, head_dim_ckv)
        if self._use_cuda_graph:  # :2233, copies into the buffers given at construction
            self._qo_indptr_buf.copy_(qo_indptr)
            self._kv_indptr_buf.copy_(kv_indptr)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
            self._kv_len_arr_buf.copy_(kv_len_arr)
        else:
            self._qo_indptr_buf = qo_indptr.to(self.device)
            self._kv_indptr_buf = kv_indptr.to(self.device)
            self._kv_indices_buf = kv_indices.to(self.device)
            self._kv_len_arr_buf = kv_len_arr.to(self.device)
        # the schedule holds what plan saw; of the buffers the kernel reads kv_indices alone
        self._plan_info = (qo_indptr.tolist(), kv_indptr.tolist(), kv_len_arr.tolist(), num_heads)
        self._causal = causal
        self._page_size = page_size
        self._sm_scale = float(sm_scale)
        self._head_dim_ckv, self._head_dim_kpe = head_dim_ckv, head_dim_kpe
        self._q_data_type, self._kv_data_type = q_data_type, kv_data_type

    def _needs_workspace(self, rows, heads, head_dim):
        """scheduler.cuh, MLAPlan: partial results of two tiles per cluster, 2-byte values and fp32 lse."""
        cluster = 2 if sum(rows) * heads // len(rows) > 64 else 1
        tiles = 2 * (SMS[arch()] // cluster) * cluster * 64
        buffer = self._float_workspace_buffer
        enough = buffer.shape[0] * buffer.element_size() >= tiles * (2 * head_dim + 4)
        check(enough, "Buffer overflow when allocating mla_partial_o: the float workspace is too small")

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        check(profiler_buffer is None, "the profiler is not doubled", NotImplementedError)
        scales = (ckv_scale, ckv_scale_arr, kpe_scale)
        if self._backend == "cutlass":
            check(not return_lse, "return_lse does not support cutlass backend for now.", ValueError)
            check(not any(s is not None for s in scales), "scales need an fa2/fa3 backend", ValueError)
            return self._cutlass(q_nope, q_pe, ckv_cache, kpe_cache, out, kv_len, page_table, o_scale)
        check(o_scale is None, "o_scale is only supported with the cutlass backend for now.", ValueError)
        for name, t, planned in (
            ("q_nope", q_nope, self._q_data_type),
            ("q_pe", q_pe, self._q_data_type),
            ("ckv_cache", ckv_cache, self._kv_data_type),
            ("kpe_cache", kpe_cache, self._kv_data_type),
        ):  # :2447-2466
            check(
                t.dtype == planned,
                f"{name}.dtype={t.dtype} does not match the planned {planned}.",
                ValueError,
            )
            check(t.dim() == 3, f"{name} must have 3 dimensions: the kernel takes strides 0 and 1")
            vectors(t, name)
        fp8 = self._kv_data_type == torch.float8_e4m3fn
        if fp8:  # :2470-2489
            one = (ckv_scale is None) != (ckv_scale_arr is None)
            check(one, "Exactly one of ckv_scale or ckv_scale_arr is required", ValueError)
            check(kpe_scale is not None, "kpe_scale is required when kv_data_type is FP8.", ValueError)
            for scale in (s for s in (ckv_scale, kpe_scale) if s is not None):
                check(
                    math.isfinite(float(scale)) and float(scale) > 0,
                    "must be finite and positive",
                    ValueError,
                )
        else:
            check(not any(s is not None for s in scales), "scales are only valid for FP8.", ValueError)
        if ckv_scale_arr is not None:  # :2529
            shape = (*ckv_cache.shape[:-1], self._head_dim_ckv // 128)
            check_shape_dtype_device(ckv_scale_arr, shape, torch.float32, ckv_cache.device, "ckv_scale_arr")
            check(ckv_scale_arr.is_contiguous(), "ckv_scale_arr must be contiguous.", ValueError)
        if out is None:
            out = torch.full_like(q_nope, math.nan)  # empty_like at :2515
        else:
            check_shape_dtype_device(out, q_nope.shape, q_nope.dtype, q_nope.device, "out")
            vectors(out, "out")
        shape = q_nope.shape[:2]
        if return_lse and lse is None:
            lse = torch.full(shape, math.nan)
        elif return_lse:
            check_shape_dtype_device(lse, shape, torch.float32, q_nope.device, "lse")
        if lse is not None:
            check(lse.is_contiguous(), "lse must be contiguous: the kernel writes q * num_heads + r")
        check(self._kv_indices_buf.dtype == torch.int32, "kv_indices must be int32")  # batch_mla_run.cu:41
        self._misread(q_nope, q_pe, ckv_cache, kpe_cache)

        rows, pages, lengths, _ = self._plan_info
        for i, length in enumerate(lengths):
            slots = self._slots(pages[i], length, len(ckv_cache))
            ckv, kpe = ckv_cache[slots].float(), kpe_cache[slots].float()
            if fp8:  # mla_hopper.cuh, repack to bf16 with the scale multiplied in
                scale = ckv_scale_arr[slots].repeat_interleave(128, -1) if ckv_scale is None else ckv_scale
                ckv, kpe = (ckv * scale).bfloat16().float(), (kpe * kpe_scale).bfloat16().float()
            at = slice(rows[i], rows[i + 1])
            query = torch.cat([q_nope[at], q_pe[at]], -1)
            key = torch.cat([ckv, kpe], -1)[:, None]
            o, base2 = attend(query, key, ckv[:, None], self._sm_scale, self._causal)
            out[at] = o.to(out.dtype)
            if lse is not None:
                lse[at] = base2 * math.log(2) if return_lse_base_on_e else base2
        return (out, lse) if return_lse else out

    def _misread(self, q_nope, q_pe, ckv_cache, kpe_cache):
        """The launcher checks no shape: heads and page size are the planned ones, the rest strides alone."""
        rows, _, _, heads = self._plan_info
        n = q_nope.shape[0]
        check(q_nope.shape == (n, heads, self._head_dim_ckv), f"q_nope must be [n, {heads}, head_dim_ckv]")
        check(q_pe.shape == (n, heads, self._head_dim_kpe), f"q_pe must be [n, {heads}, head_dim_kpe]")
        check(rows[-1] <= n, "illegal memory access: q has fewer rows than qo_indptr says")
        check(
            ckv_cache.shape[1:] == (self._page_size, self._head_dim_ckv), "ckv_cache is not the planned one"
        )
        check(
            kpe_cache.shape[1:] == (self._page_size, self._head_dim_kpe), "kpe_cache is not the planned one"
        )
        check(len(ckv_cache) == len(kpe_cache), "ckv_cache and kpe_cache have other numbers of pages")

    def _slots(self, begin, length, num_pages):
        """(pages, offsets) of a request: kv_indices[kv_indptr + token // page_size] (mla.cuh:1077)."""
        token = torch.arange(length)
        at = begin + token // self._page_size
        inside = length == 0 or int(at[-1]) < len(self._kv_indices_buf)
        check(inside, "illegal memory access: a page beyond kv_indices")
        page = self._kv_indices_buf[at].long()
        check(
            bool(((page >= 0) & (page < num_pages)).all()), "illegal memory access: a page beyond the cache"
        )
        return page, token % self._page_size

    def _cutlass(self, q_nope, q_pe, ckv_cache, kpe_cache, out, kv_len, page_table, o_scale):
        """:2397-2437 and include/flashinfer/attention/cutlass_mla.cuh. No plan; the softmax scale is fixed at
        (128 + 64)**-0.5 (cutlass_mla.cuh:89); both concatenations are part of the call."""
        check(arch() == "sm_100", "cutlass MLA: no kernel image for this device (jit/mla.py:23)")
        out_scale = 1.0
        if o_scale is not None:
            out_scale = float(o_scale)
            check(
                math.isfinite(out_scale) and out_scale > 0, "o_scale must be finite and positive", ValueError
            )
            fp8 = out is not None and out.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
            check(fp8, "an FP8 out tensor must be provided when o_scale is used", ValueError)
            check_shape_dtype_device(out, q_nope.shape, None, q_nope.device, "out")
        elif out is None:
            out = torch.full_like(q_nope, math.nan)
        else:
            check_shape_dtype_device(out, q_nope.shape, q_nope.dtype, q_nope.device, "out")
        q, kv = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
        check(q.dim() == 3 and kv.dim() == 3, "Expected ndim == 3", ValueError)  # :60
        check(
            kv_len.dim() == 1 and page_table.dim() == 2, "Expected kv_len [b], page_table [b, n]", ValueError
        )
        check(q.shape[1] == 128, f"Expected 128 heads for q_nope_pe, got {q.shape[1]}", ValueError)
        check(q.shape[2] == kv.shape[2] == 576, "Expected head dim 576", ValueError)
        check(len(q) == len(page_table), "Expected the same batch size for q and page_table", ValueError)
        page = kv.shape[1]
        aligned = page_table.shape[1] % (128 / page) == 0
        check(aligned, "Expected block_num % (128 / block_size) == 0", ValueError)  # :82
        # sm100_fmha_mla_tma_warpspecialized.hpp, can_implement: at most the tile, a power of 2
        check(page <= 128 and page & (page - 1) == 0, f"page size {page} is not taken")
        check(
            q.dtype in (torch.float16, torch.bfloat16) and kv.dtype == q.dtype, "bf16 or fp16, all the same"
        )
        # cutlass_mla.cu:33 takes bare pointers
        check(kv_len.dtype == page_table.dtype == torch.int32, "kv_len and page_table are read as int32")
        check(len(kv_len) == len(q), "kv_len is read for each of the batch")
        tensors = (kv_len, page_table, out)
        check(all(t.is_contiguous() for t in tensors), "kv_len, page_table and out are read as contiguous")
        for i, length in enumerate(kv_len.tolist()):
            check(length <= page * page_table.shape[1], "kv_len is beyond the page table")
            token = torch.arange(length)
            pages = page_table[i][token // page].long()
            check(bool(((pages >= 0) & (pages < len(kv))).all()), "a page beyond the cache")
            keys = kv[pages, token % page][:, None]
            o, _ = attend(q[i : i + 1], keys, keys[..., :512], 192**-0.5, False)
            out[i] = (o[0] / out_scale).to(out.dtype)
        return out
