"""The scheduler of FlashAttention 3 at Dao-AILab/flash-attention 0251105 and in SGLang's fork (10d7867):
vectors of splits, tiles of q, the batch of each place, and with a causal mask heads in L2; then a semaphore.
"""

import torch

from double_arithmetic.checks import check
from double_arithmetic.flash_attention_3 import (
    HALF,
    block_m,
    everything,
    packed_rows,
    sees_causally,
)


def get_scheduler_metadata(b, max_q, h, h_k, d, dv, dtype, seqused_k, cu_q, page_size, causal, splits, pack):
    """flash_api.cpp:522-670 -> int32 [(3, or 4 if causal and max_q > 1) * (b rounded up to 4) + 1]."""
    known = dtype in (*HALF, torch.float8_e4m3fn)
    check(known, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    check(h % h_k == 0, "Number of heads in key/value must divide number of heads in query")
    check(seqused_k.dtype == torch.int32, "expected scalar type Int")
    check(cu_q is None or cu_q.dtype == torch.int32, "expected scalar type Int")
    check(seqused_k.shape == (b,), "cache_seqlens is read for each of the batch")
    causal = sees_causally(causal, max_q, d, page_size is not None)
    rounded = -(-b // 4) * 4
    counts = [max_q] * b if cu_q is None else (cu_q[1:] - cu_q[:-1]).tolist()
    packed = _packs(pack, h // h_k)
    # flash_prepare_scheduler.cu with Sort: by work, the longest first
    order = sorted(range(b), key=lambda i: -int(seqused_k[i]))
    meta = torch.full(((4 if causal else 3) * rounded + 1,), -1, dtype=torch.int32)
    for place, i in enumerate(order):
        meta[place] = max(splits, 1)
        meta[rounded + place] = -(-counts[i] * (h // h_k if packed else 1) // block_m(d, dv))
        meta[2 * rounded + place] = i
        if causal:
            meta[3 * rounded + place] = 1
    meta[-1] = 0
    return meta


def reached(meta, place):
    """:995-1007; where nothing is ragged, metadata is looked at only with a causal mask and one split."""
    b, group = place["b"], place["group"]
    if meta is None or not (place["varlen"] or (place["causal"] and place["splits"] == 1)):
        return everything
    check(place["varlen"], "scheduler_metadata has another shape where nothing is ragged")
    rounded = -(-b // 4) * 4
    size = (4 if place["causal"] else 3) * rounded + 1
    check(meta.shape == (size,), f"scheduler_metadata must have shape ({size})")
    check(meta.is_contiguous() and meta.dtype == torch.int32, "scheduler_metadata must be contiguous int32")
    places = meta[2 * rounded : 2 * rounded + b].tolist()
    check(sorted(places) == list(range(b)), "scheduler_metadata is of another batch: illegal memory access")
    tiles = meta[rounded : rounded + b].tolist() if int(meta[-1]) == 0 else [0] * b
    block = block_m(place["d"], place["dv"])
    limit = {i: n * block for i, n in zip(places, tiles, strict=True)}
    return packed_rows(limit, group, _packs(place["pack"], group))


def _packs(pack, group):
    """flash_api.cpp:426, get_pack_gqa, as it comes out for MLA (split, or paged without TMA)."""
    return group != 1 if pack is None else pack
