"""aiter/mla.py: MLA decode and persistent FP8 prefill.

Where the library allocates without filling (`torch.empty`), this double fills with NaN, so that what no
kernel wrote is seen.
"""

from __future__ import annotations

import os

import torch

import aiter
from aiter import dtypes

from ._double.asm_decode import letter
from ._double.asm_kernels import granule
from ._double.splits import busiest, indptr
from ._double.stage2 import stage2, unwritten
from ._double.strict import doubled, sure
from .jit.core import is_experimental_enabled
from .jit.utils.chip_info import get_cu_num, get_gfx
from .ops.attention import get_mla_decode_fwd_max_splits


def get_meta_param(
    num_kv_splits,
    bs,
    total_kv,
    nhead,
    max_seqlen_q,
    dtype,
    tg_factor=1,
    ignore_total_kv=0,
):
    doubled(tg_factor == 1 and not ignore_total_kv, "the split count of MLA of V4")
    if num_kv_splits is None:
        num_kv_splits = busiest(bs, total_kv / bs, get_cu_num())
    if dtype == dtypes.fp8:
        blocks = {8: 64, 16: 128, 24: 128, 32: 128, 48: 64, 64: 64, 128: 32, 256: 32, 384: 32, 512: 32}
        block = blocks[int(nhead * max_seqlen_q)]  # KeyError for others, there too
        num_kv_splits = min(num_kv_splits, (total_kv + bs * block - 1) // (bs * block))
        if num_kv_splits > 1:
            num_kv_splits = min(num_kv_splits, int(abs(total_kv / bs - max_seqlen_q) // block) + 1)
    sure(num_kv_splits > 0, "without tokens there are no splits, and the indptr has no step")
    return num_kv_splits, indptr(num_kv_splits, bs)


def _use_persistent_mla_decode(bs, nhead, max_seqlen_q, q_dtype, kv_dtype):
    slow = q_dtype == kv_dtype == dtypes.bf16 and nhead == 16 and max_seqlen_q == 1 and get_gfx() == "gfx950"
    try:
        limit = int(os.getenv("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", "32"))
    except ValueError:
        limit = 32
    return not slow or limit <= 0 or bs < limit


def mla_decode_fwd(
    q,
    kv_buffer,
    o,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_last_page_lens,
    max_seqlen_q,
    page_size=1,
    nhead_kv=1,
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
    g_kv_indptr=None,
    cp_world_size=1,
    cp_rank=0,
    causal=True,
):
    assert logit_cap <= 0, f"{logit_cap=} is not support yet"
    doubled(not is_experimental_enabled(), "AITER_ENABLE_EXPERIMENTAL")
    doubled(os.environ.get("AITER_MLA_USE_OPUS", "0") != "1", "AITER_MLA_USE_OPUS")
    doubled(kv_buffer.dtype != torch.uint8, "the byte cache of three buffers")
    _, _, _, qk_head_dim = kv_buffer.shape
    if sm_scale is None:
        sm_scale = 1.0 / (qk_head_dim**0.5)
    total_s, nhead, _ = o.shape
    bs = qo_indptr.shape[0] - 1
    persistent = work_meta_data is not None
    if persistent and num_kv_splits is None:
        persistent = _use_persistent_mla_decode(bs, nhead, max_seqlen_q, q.dtype, kv_buffer.dtype)

    def stage1(q, o, splits, logits, attn_lse, final_lse):
        work = (work_meta_data, work_indptr, work_info_set) if persistent else (None, None, None)
        aiter.mla_decode_stage1_asm_fwd(
            q, kv_buffer, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, splits, *work, max_seqlen_q,
            page_size, nhead_kv, sm_scale, logits, attn_lse, o, final_lse, q_scale, kv_scale, g_kv_indptr,
            cp_world_size, cp_rank, None, 0, causal,
        )  # fmt: skip

    if persistent:
        if num_kv_splits is None:
            num_kv_splits = get_mla_decode_fwd_max_splits(nhead, max_seqlen_q, q.dtype, kv_buffer.dtype)
        maps = reduce_indptr, reduce_final_map, reduce_partial_map
        run = _Persistent(stage1, maps, max_seqlen_q, num_kv_splits, return_lse, return_logits)
        return run(q, kv_buffer, o, num_kv_splits_indptr)

    if num_kv_splits is None or num_kv_splits_indptr is None:
        num_kv_splits, num_kv_splits_indptr = get_meta_param(
            num_kv_splits, bs, kv_indices.shape[0], nhead, max_seqlen_q, q.dtype
        )
    kinds = letter(q.dtype), letter(kv_buffer.dtype)
    direct = num_kv_splits == 1 and (
        kinds[0] == "fp8"
        or (kinds[0] == "bf16" and max_seqlen_q == 4)
        or (kinds == ("bf16", "bf16") and nhead in (8, 32))
    )
    if direct:  # the kernel writes packed bf16 into o
        sure(
            o.dtype == dtypes.bf16 and o.is_contiguous(), "with one split the kernel writes o as packed bf16"
        )
        logits = o.view((total_s, num_kv_splits, *o.shape[1:]))
    else:
        logits = unwritten(total_s, num_kv_splits, *o.shape[1:])
    attn_lse = unwritten(total_s, num_kv_splits, nhead, 1)
    final_lse = unwritten(total_s, nhead) if return_lse else None
    stage1(q, o, num_kv_splits_indptr, logits, attn_lse, final_lse)
    if direct:
        return logits.view(o.shape), final_lse if return_lse else attn_lse
    stage2(logits, attn_lse, o, final_lse, qo_indptr, num_kv_splits_indptr, kv_indptr, kv_last_page_lens,
            page_size, max_seqlen_q, granule(nhead, max_seqlen_q, *kinds))  # fmt: skip
    return logits, final_lse


class _Persistent:
    """The persistent branch: heads that no kernel takes natively are folded into rows of 16."""

    def __init__(self, stage1, maps, qlen, splits, return_lse, return_logits):
        self.stage1, self.maps, self.qlen, self.splits = stage1, maps, qlen, splits
        self.return_lse, self.return_logits = return_lse, return_logits

    def __call__(self, q, kv, o, splits_indptr):
        tokens, heads, dim = o.shape
        qlen, fold = self.qlen, 1
        if not self._native(heads, q.dtype, kv.dtype):
            assert heads in range(32, 128 + 1, 16), f"nhead={heads} and max_seqlen_q={qlen} not supported"
            fold = heads // 16
        folded, target = q, o
        if fold > 1:
            if qlen > 1:  # sequence, fold, token
                q = q.reshape(tokens // qlen, qlen, fold, 16, -1).permute(0, 2, 1, 3, 4)
                folded = q.reshape(tokens * fold, 16, -1)
            else:
                folded = q.view(tokens * fold, 16, -1)
            target = o.view(tokens * fold, 16, -1)
        partials = self.maps[2].size(0) * qlen
        nhead = target.shape[1]
        logits, attn_lse = unwritten(partials, 1, nhead, dim), unwritten(partials, 1, nhead, 1)
        final_lse = unwritten(target.shape[0], nhead) if self.return_lse else None
        self.stage1(folded, target, splits_indptr, logits, attn_lse, final_lse)
        aiter.mla_reduce_v1(logits, attn_lse, *self.maps, qlen, self.splits, target, final_lse)
        if fold > 1:
            if self.return_logits:
                logits = logits.view(-1, 1, heads, dim)
            if qlen > 1:  # o gets other storage: a view of the old one does not see the result
                back = target.reshape(tokens // qlen, fold, qlen, 16, -1).permute(0, 2, 1, 3, 4)
                o.set_(back.reshape(tokens, heads, -1).contiguous())
            if final_lse is not None and qlen > 1:
                final_lse = final_lse.reshape(tokens // qlen, fold, qlen, 16).permute(0, 2, 1, 3)
            if final_lse is not None:
                final_lse = final_lse.reshape(tokens, heads).contiguous()
        return logits, final_lse

    def _native(self, heads, q_dtype, kv_dtype) -> bool:
        fp8, bf16 = q_dtype == kv_dtype == dtypes.fp8, q_dtype == kv_dtype == dtypes.bf16
        if get_gfx() == "gfx942":
            return (
                heads == 16
                or (fp8 and (heads == 128 or (heads == 64 and self.qlen == 1)))
                or (bf16 and heads == 8 and self.qlen == 2)
            )
        return heads == 16 or bf16 or (fp8 and (heads in (32, 64, 128) or (heads == 8 and self.qlen == 4)))


def mla_prefill_ps_fwd(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    output: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_page_indices: torch.Tensor,
    work_indptr: torch.Tensor | None,
    work_info_set: torch.Tensor | None,
    max_seqlen_q: int,
    is_causal: bool,
    reduce_indptr: torch.Tensor | None = None,
    reduce_final_map: torch.Tensor | None = None,
    reduce_partial_map: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    total_s, nhead, v_head_dim = output.shape
    if softmax_scale is None:
        softmax_scale = 1.0 / (v_head_dim**0.5)  # of 128, not of the 192 that are multiplied
    tile_q = 256
    logits = unwritten(reduce_partial_map.size(0) * tile_q, nhead, v_head_dim)
    attn_lse = unwritten(reduce_partial_map.size(0) * tile_q, nhead)
    final_lse = unwritten(total_s, nhead)
    aiter.mla_prefill_ps_asm_fwd(
        Q, K, V, qo_indptr, kv_indptr, kv_page_indices, work_indptr, work_info_set, max_seqlen_q,
        softmax_scale,
        is_causal, logits, attn_lse, output, q_scale, k_scale, v_scale,
    )  # fmt: skip
    aiter.mla_reduce_v1(
        logits, attn_lse, reduce_indptr, reduce_final_map, reduce_partial_map, tile_q, 0, output, final_lse
    )
    return output.view(total_s, nhead, v_head_dim), attn_lse
