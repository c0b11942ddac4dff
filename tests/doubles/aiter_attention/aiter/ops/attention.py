"""aiter/ops/attention.py: the planners' and the compiled kernels' Python faces, for MLA."""

from __future__ import annotations

import math

import torch

from .._double import asm_decode, plan, ps, reduce
from .._double.strict import check, compiled, doubled, sure
from ..jit.core import is_experimental_enabled
from ..jit.utils.chip_info import get_cu_num, get_gfx
from ..utility import dtypes
from ..utility.dtypes import _aiter_dtype_id
from .enum import MlaVersion

__all__ = [
    "get_mla_decode_fwd_max_splits",
    "get_mla_metadata_info_v1",
    "get_mla_metadata_v1",
    "get_ps_metadata_info_v1",
    "get_ps_metadata_v1",
    "mla_decode_stage1_asm_fwd",
    "mla_prefill_ps_asm_fwd",
    "mla_reduce_v1",
]


@compiled("ctypes")
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
    page_size: int,
    nhead_kv: int,
    softmax_scale: float,
    splitData: torch.Tensor,
    splitLse: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    g_kv_indptr: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    valid_split_count: torch.Tensor | None = None,
    use_valid_split_count_reduce: int = 0,
    causal: bool = True,
) -> None:
    doubled(g_kv_indptr is None and cp_world_size == 1, "context parallelism")
    if num_kv_splits_indptr is None:
        doubled(work_meta_data is not None, "work_indptr without work_meta_data")
    else:
        sure(
            work_meta_data is None, "num_kv_splits_indptr makes it the non-persistent kernel: no work is read"
        )
    asm_decode.stage1(
        Q, KV, qo_indptr, (kv_indptr, kv_page_indices, kv_last_page_lens), num_kv_splits_indptr,
        (work_meta_data, work_indptr, work_info_set), max_seqlen_q, page_size, nhead_kv, softmax_scale,
        (splitData, splitLse), output, lse, (q_scale, kv_scale), bool(causal),
    )  # fmt: skip


def get_ps_metadata_info_v1(
    batch_size: int,
    num_head_k: int,
    max_qlen: int,
    qlen_granularity: int = 256,
):
    cu_num = get_cu_num()  # there: torch.cuda's multi_processor_count
    cus_per_cluster = cu_num // math.gcd(num_head_k, cu_num)
    per_batch = math.ceil(max_qlen / qlen_granularity)
    tiles = batch_size * per_batch
    return (
        (2, torch.uint64),  # work_metadata_ptrs
        (cu_num + 1, torch.int32),  # work_indptr
        (((batch_size + cus_per_cluster - 1) * per_batch * num_head_k, 8), torch.int32),  # work_info
        (tiles + 1, torch.int32),  # reduce_indptr
        ((tiles, 2), torch.int32),  # reduce_final_map
        (min(batch_size + cus_per_cluster - 1, (cus_per_cluster - 1) * 2) * per_batch, torch.int32),
    )


@compiled("pybind")
def get_ps_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    pages_kv_indptr: torch.Tensor,
    context_lens: torch.Tensor,
    gqa_ratio: int,
    num_heads_k: int,
    work_metadata_ptrs: torch.Tensor,
    work_indptr: torch.Tensor,
    work_info: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    qhead_granularity: int = 1,
    qlen_granularity: int = 256,
    kvlen_granularity: int = 16,
    block_size: int = 16,
    is_causal: bool = True,
) -> None:
    _check_indptr(kvlen_granularity, "kvlen_granlarity", seqlens_qo_indptr, pages_kv_indptr)
    # the host planner leaves work_metadata_ptrs alone: a scratch one takes the pointers
    scratch = torch.empty(2, dtype=torch.uint64)
    sure(work_metadata_ptrs.numel() >= 2, "work_metadata_ptrs holds two 64-bit pointers")
    buffers = plan.Buffers(
        scratch, work_info, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map
    )
    ps.plan(
        seqlens_qo_indptr, pages_kv_indptr, context_lens, num_heads_k, buffers,
        qhead_granularity, qlen_granularity, kvlen_granularity, block_size, is_causal,
    )  # fmt: skip


@compiled("ctypes")
def mla_prefill_ps_asm_fwd(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    work_indptr: torch.Tensor | None,
    work_info_set: torch.Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    is_causal: bool,
    splitData: torch.Tensor,
    splitLse: torch.Tensor,
    output: torch.Tensor,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    ps.prefill(
        Q, K, V, (qo_indptr, kv_indptr, kv_page_indices), (work_indptr, work_info_set), max_seqlen_q,
        softmax_scale, is_causal, (splitData, splitLse), output, (q_scale, k_scale, v_scale),
    )  # fmt: skip


def get_mla_decode_fwd_max_splits(
    num_head_qo: int,
    max_seqlen_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> int:
    doubled(not is_experimental_enabled(), "AITER_ENABLE_EXPERIMENTAL")  # else twice as many for one kernel
    return get_cu_num()


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
    max_split_per_batch: int = -1,
):
    assert num_head_qo % 8 == 0
    max_splits = get_mla_decode_fwd_max_splits(num_head_qo, max_seqlen_qo, q_dtype, kv_dtype)
    arch, heads = get_gfx(), num_head_qo
    qlen = 1 if is_sparse else max_seqlen_qo
    packed = qlen * heads
    bf16 = q_dtype == kv_dtype == dtypes.bf16
    fp8 = q_dtype == kv_dtype == dtypes.fp8
    tiles = math.ceil(packed / 16)
    if (arch == "gfx950" and bf16 and packed >= 64 and heads <= 64 and (packed < 128 or heads == 48)) or (
        arch == "gfx950" and fp8 and heads == 32 and qlen == 3
    ):
        tiles = qlen if heads * 2 > 64 else math.ceil(packed / 64)
    elif (
        heads == 16
        or (arch == "gfx942" and heads == 128 and fp8)
        or (arch == "gfx950" and fp8 and ((heads == 32 and qlen == 4) or heads in (64, 128)))
        or (heads == 64 and fp8 and qlen == 1)
    ):
        tiles = math.ceil(packed / 128)
    elif arch == "gfx950" and (packed >= 128 or heads > 64) and bf16 and heads != 48:
        tiles = qlen if heads * 2 > 128 else math.ceil(packed / 128)

    batch = batch_size * max_seqlen_qo if is_sparse else batch_size
    tile_cnt = batch * tiles
    if fast_mode:
        max_work = (batch + max_splits - 1) * tiles
        max_split_tiles = min(batch + max_splits - 1, (max_splits - 1) * 2) * tiles
    else:
        max_work = max_split_tiles = tile_cnt * max_splits
    if max_split_per_batch > 0:
        max_split_tiles = max(max_split_tiles, tile_cnt + min(max_splits, max_split_per_batch * batch))
    if intra_batch_mode:
        max_work = max_split_tiles = tile_cnt * num_kv_splits
    return (
        (2, torch.uint64),  # work_metadata_ptrs
        (max_splits + 1, torch.int32),  # work_indptr
        ((max_work, 8), torch.int32),  # work_info_set
        (tile_cnt + 1, torch.int32),  # reduce_indptr
        ((tile_cnt, 2), torch.int32),  # reduce_final_map
        (max_split_tiles, torch.int32),  # reduce_partial_map
    )


def get_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    is_cp_round_robin: bool = False,
    mla_version: int = MlaVersion.V32.value,
    dtype_q_nope: torch.dtype | None = None,
    dtype_q_rope: torch.dtype | None = None,
    dtype_kv_nope: torch.dtype | None = None,
    dtype_kv_rope: torch.dtype | None = None,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
) -> None:
    # the aliases fill in what was not given; C++ (metadata.cu) takes bf16 for what is still None
    kinds = [dtype_q_nope or dtype_q or dtypes.bf16, dtype_kv_nope or dtype_kv or dtypes.bf16]
    fp8 = [_aiter_dtype_id(kind) == 0 for kind in kinds]
    doubled(not is_cp_round_robin and mla_version == MlaVersion.V32, "context parallelism, MLA of V4")
    _get_mla_metadata_v1_impl(
        seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, num_heads_k, is_causal,
        work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map,
        page_size, kv_granularity, max_seqlen_qo, uni_seqlen_qo, fast_mode, topk, max_split_per_batch,
        intra_batch_mode, *fp8,
    )  # fmt: skip


@compiled("pybind")
def _get_mla_metadata_v1_impl(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    page_size: int,
    kv_granularity: int,
    max_seqlen_qo: int,
    uni_seqlen_qo: int,
    fast_mode: bool,
    topk: int,
    max_split_per_batch: int,
    intra_batch_mode: bool,
    q_fp8: bool,
    kv_fp8: bool,
) -> None:
    _check_indptr(kv_granularity, "kv_granularity", seqlens_qo_indptr, seqlens_kv_indptr)
    check(page_size & (page_size - 1) == 0, "get_mla_metadata_v1: page_size Must be power of 2!")
    check(kv_last_page_lens.stride(0) == 1, "get_mla_metadata_v1: kv_last_page_lens should be continuous!")
    check(kv_last_page_lens.dtype == torch.int32, "kv_last_page_lens's element type should be int!")
    doubled(num_heads_k == 1, "more than one latent head")
    arrays = seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens
    buffers = plan.Buffers(
        work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map
    )
    if fast_mode:
        plan.v1_2(
            arrays, num_heads_per_head_k, is_causal, page_size, kv_granularity, max_seqlen_qo, uni_seqlen_qo,
            topk, max_split_per_batch, (q_fp8, kv_fp8), buffers,
        )  # fmt: skip
    else:
        doubled(intra_batch_mode, "the planner v1_1 (neither fast_mode nor intra_batch_mode)")
        plan.v1_0(arrays, num_heads_per_head_k, kv_granularity, uni_seqlen_qo, max_split_per_batch, buffers)


def _check_indptr(granularity: int, name: str, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> None:
    check(granularity & (granularity - 1) == 0, f"{name} Must be power of 2!")
    for which, array in ("seqlens_qo_indptr", qo_indptr), ("seqlens_kv_indptr", kv_indptr):
        check(array.stride(0) == 1, f"{which} should be continuous!")
        check(array.dtype == torch.int32, f"{which}'s element type should be int!")


@compiled("pybind")
def mla_reduce_v1(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor | None,
    reduce_partial_map: torch.Tensor,
    max_seqlen_q: int,
    num_kv_splits: int,
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
