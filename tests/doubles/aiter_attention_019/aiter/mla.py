"""aiter/mla.py of v0.1.9: MLA decode. The page size is the cache's, and no causal flag is passed.

v0.1.8 has neither return_logits nor return_lse, and returns the persistent log-sum-exp always.
"""

from __future__ import annotations

import aiter
from aiter import dtypes

from ._asm_kernels import step_of
from ._double.splits import busiest, indptr
from ._double.stage2 import stage2, unwritten
from ._double.strict import doubled, sure
from .jit.utils.chip_info import get_cu_num


def get_meta_param(num_kv_splits, bs, total_kv, nhead, max_seqlen_q, dtype):
    if num_kv_splits is None:
        num_kv_splits = busiest(bs, total_kv / bs, get_cu_num())
    if dtype == dtypes.fp8:
        blocks = {16: 128, 32: 128, 48: 64, 64: 64, 128: 32, 256: 32, 384: 32, 512: 32}
        block = blocks[int(nhead * max_seqlen_q)]  # KeyError for others, there too
        num_kv_splits = min(num_kv_splits, int(total_kv / bs + block - 1) // block)
    return num_kv_splits, indptr(num_kv_splits, bs)


def mla_decode_fwd(
    q,
    kv_buffer,
    o,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_last_page_lens,
    max_seqlen_q,
    sm_scale=None,
    logit_cap=0.0,
    num_kv_splits=None,
    num_kv_splits_indptr=None,
    work_meta_data=None,
    work_indptr=None,
    work_info_set=None,
    reduce_indptr=None,
    reduce_final_map=None,
    reduce_partial_map=None,
    q_scale=None,
    kv_scale=None,
    intra_batch_mode=False,
    return_logits=False,
    return_lse=False,
):
    assert logit_cap <= 0, f"{logit_cap=} is not support yet"
    doubled(max_seqlen_q == 1, "more than one query token each")
    _, _, _, qk_head_dim = kv_buffer.shape
    if sm_scale is None:
        sm_scale = 1.0 / (qk_head_dim**0.5)
    total_s, nhead, v_head_dim = o.shape
    bs = qo_indptr.shape[0] - 1

    def stage1(q, o, work, logits, attn_lse):
        aiter.mla_decode_stage1_asm_fwd(
            q, kv_buffer, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, num_kv_splits_indptr, *work,
            max_seqlen_q, sm_scale, logits, attn_lse, o, q_scale, kv_scale,
        )  # fmt: skip

    if work_meta_data is not None:
        native = nhead == 16 or (nhead == 128 and q.dtype == kv_buffer.dtype == dtypes.fp8)
        fold = 1 if native else nhead // 16
        assert native or nhead in range(32, 128 + 1, 16), f"{nhead=} and {max_seqlen_q=} not supported"
        target = o.view(total_s * fold, nhead // fold, -1)
        partials = reduce_partial_map.size(0) * max_seqlen_q
        logits = unwritten(partials, 1, target.shape[1], v_head_dim)
        attn_lse = unwritten(partials, 1, target.shape[1], 1)
        final_lse = unwritten(*target.shape[:2]) if return_lse else None
        work = (work_meta_data, work_indptr, work_info_set)
        stage1(q.view(*target.shape[:2], -1), target, work, logits, attn_lse)
        maps = (reduce_indptr, reduce_final_map, reduce_partial_map)
        aiter.mla_reduce_v1(logits, attn_lse, *maps, max_seqlen_q, target, final_lse)
        if fold > 1 and return_logits:
            logits = logits.view(-1, 1, nhead, v_head_dim)
        return logits, final_lse

    if num_kv_splits is None or num_kv_splits_indptr is None:
        num_kv_splits, num_kv_splits_indptr = get_meta_param(
            num_kv_splits, bs, kv_indices.shape[0], nhead, max_seqlen_q, q.dtype
        )
    attn_lse = unwritten(total_s, num_kv_splits, nhead, 1)
    if num_kv_splits == 1 and q.dtype == dtypes.fp8:  # the kernel writes packed bf16 into o
        sure(
            o.dtype == dtypes.bf16 and o.is_contiguous(), "with one split the kernel writes o as packed bf16"
        )
        stage1(q, o, (None,) * 3, o.view(total_s, 1, nhead, v_head_dim), attn_lse)
        return o, attn_lse
    logits = unwritten(total_s, num_kv_splits, nhead, v_head_dim)
    stage1(q, o, (None,) * 3, logits, attn_lse)
    stage2(logits, attn_lse, o, None, qo_indptr, num_kv_splits_indptr, kv_indptr, kv_last_page_lens, 1,
           max_seqlen_q, step_of(nhead, max_seqlen_q))  # fmt: skip
    return logits, unwritten(total_s, nhead)  # stage 2 has no log-sum-exp to write
