"""aiter/ops/attention.py of v0.1.9, the same in v0.1.8 but for one condition of the buffers' sizes.

All are compile_ops entries (pybind, at::Tensor), so that only the schema and this text tell their arguments.
There are no last page lengths and no page size in the planner, and no `num_kv_splits` in the merge.
"""

from __future__ import annotations

import math

import torch

from .. import _planner
from .._asm_kernels import kernel, step_of
from .._double import asm_decode, reduce
from .._double.plan import Buffers
from .._double.strict import check, compiled, doubled
from ..jit.utils.chip_info import get_cu_num
from ..utility import dtypes

__all__ = [
    "get_mla_metadata_info_v1",
    "get_mla_metadata_v1",
    "mla_decode_stage1_asm_fwd",
    "mla_reduce_v1",
]


@compiled("pybind", at_tensors=True)
def mla_decode_stage1_asm_fwd(
    Q: torch.Tensor,
    KV: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_kv_splits_indptr: torch.Tensor | None,
    work_meta_data: torch.Tensor | None,
    work_indptr: torch.Tensor | None,
    work_info_set: torch.Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    splitData: torch.Tensor,
    splitLse: torch.Tensor,
    output: torch.Tensor,
    q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
) -> None:
    doubled(KV.shape[1] == 1, "pages of more than one token: the merge counts pages for tokens")
    doubled(num_kv_splits_indptr is not None or work_meta_data is not None, "work_indptr alone")
    asm_decode.stage1(
        Q, KV, qo_indptr, (kv_indptr, kv_page_indices, kv_last_page_lens), num_kv_splits_indptr,
        (work_meta_data, work_indptr, work_info_set), max_seqlen_q, KV.shape[1], KV.shape[2], softmax_scale,
        (splitData, splitLse), output, None, (q_scale, kv_scale), True, kernel, step_of,
    )  # fmt: skip


def get_mla_metadata_info_v1(
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: bool,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
):
    assert num_head_qo % 16 == 0
    cu_num = get_cu_num()  # there: torch.cuda's multi_processor_count
    native = num_head_qo == 16 or (
        num_head_qo == 128 and kv_dtype == q_dtype == dtypes.fp8
    )  # v0.1.8: kv alone
    tiles = math.ceil(max_seqlen_qo * num_head_qo / (128 if native else 16))
    batch_size = batch_size * max_seqlen_qo if is_sparse else batch_size
    tile_cnt = batch_size * tiles
    if fast_mode:
        max_work = (batch_size + cu_num - 1) * tiles
        max_split_tiles = min(batch_size + cu_num - 1, (cu_num - 1) * 2) * tiles
    else:
        max_work = max_split_tiles = tile_cnt * cu_num
    if intra_batch_mode:
        max_work = max_split_tiles = tile_cnt * num_kv_splits
    return (
        (2, torch.uint64),  # work_metadata_ptrs
        (cu_num + 1, torch.int32),  # work_indptr
        ((max_work, 8), torch.int32),  # work_info_set
        (tile_cnt + 1, torch.int32),  # reduce_indptr
        ((tile_cnt, 2), torch.int32),  # reduce_final_map
        (max_split_tiles, torch.int32),  # reduce_partial_map
    )


@compiled("pybind", at_tensors=True)
def get_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
) -> None:
    check(kv_granularity & (kv_granularity - 1) == 0, "kv_granularity Must be power of 2!")
    for name, array in ("seqlens_qo_indptr", seqlens_qo_indptr), ("seqlens_kv_indptr", seqlens_kv_indptr):
        check(array.stride(0) == 1, f"{name} should be continuous!")
        check(array.dtype == torch.int32, f"{name}'s element type should be int!")
    doubled(num_heads_k == 1, "more than one latent head")
    doubled(topk < 0, "sparse attention (topk)")
    doubled(max_seqlen_qo == uni_seqlen_qo == 1, "planning for other than one query token each")
    arrays = seqlens_qo_indptr, seqlens_kv_indptr
    buffers = Buffers(
        work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map
    )
    if fast_mode:
        fp8 = dtype_q is not None and dtype_kv is not None and dtype_q.itemsize == dtype_kv.itemsize == 1
        _planner.v1_2(arrays, num_heads_per_head_k, kv_granularity, max_split_per_batch, fp8, buffers)
    else:
        doubled(intra_batch_mode, "the planner v1_1 (neither fast_mode nor intra_batch_mode)")
        _planner.v1_0(arrays, num_heads_per_head_k, kv_granularity, max_split_per_batch, buffers)


@compiled("pybind", at_tensors=True)
def mla_reduce_v1(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor | None,
    reduce_partial_map: torch.Tensor,
    max_seqlen_q: int,
    final_output: torch.Tensor,
    final_lse: torch.Tensor | None = None,
) -> None:
    reduce.reduce(
        partial_output,
        partial_lse,
        reduce_indptr,
        reduce_final_map,
        reduce_partial_map,
        final_output,
        final_lse,
    )
