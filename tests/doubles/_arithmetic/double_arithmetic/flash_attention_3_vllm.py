"""The scheduler of FlashAttention 3 in vllm-project/flash-attention 617264c (2026-08-06), hopper/:
flash_api.cpp, heuristics.h and flash_prepare_scheduler.cu. It never sorts: vectors of rows of q, with more
than one split the splits, and with a causal mask heads in L2; then a semaphore."""

import math

import torch

from double_arithmetic.checks import check
from double_arithmetic.flash_attention_3 import (
    HALF,
    block_m,
    block_n,
    everything,
    packed_rows,
    sees_causally,
)

SMS = 132  # of an H100 SXM (cudaDeviceProp::multiProcessorCount)
MOST = 992  # PREPARE_VARLEN_MAX_BATCHES_1CTA: a larger batch is not split


def get_scheduler_metadata(
    b, max_q, max_k, h, h_k, d, dv, dtype, seqused_k, cu_q, page_size, causal, splits, pack
):
    """flash_api.cpp:583-725 -> int32 [vectors * (b rounded up to 4) + 1]."""
    known = dtype in (*HALF, torch.float8_e4m3fn)
    check(known, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    check(h % h_k == 0, "Number of heads in key/value must divide number of heads in query")
    check(seqused_k.dtype == torch.int32, "expected scalar type Int")
    check(cu_q is None or cu_q.dtype == torch.int32, "expected scalar type Int")
    check(seqused_k.shape == (b,), "cache_seqlens is read for each of the batch")
    check(cu_q is None or cu_q.shape == (b + 1,), "cu_seqlens_q is read for each of the batch")
    place = {"b": b, "group": h // h_k, "h_k": h_k, "d": d, "dv": dv, "fp8": dtype == torch.float8_e4m3fn}
    place |= {"max_q": max_q, "max_k": max_k, "splits": splits, "pack": pack, "page": page_size}
    place["causal"] = sees_causally(causal, max_q, d, page_size is not None)
    rounded, splits = -(-b // 4) * 4, num_splits(place)
    counts = [max_q] * b if cu_q is None else (cu_q[1:] - cu_q[:-1]).tolist()
    factor = place["group"] if _packs(place) else 1
    meta = torch.full((_vectors(place) * rounded + 1,), -1, dtype=torch.int32)
    meta[:b] = torch.tensor(counts, dtype=torch.int32) * factor
    if b <= MOST and splits > 1:
        meta[rounded : rounded + b] = splits
    if place["causal"]:
        start = (_vectors(place) - 1) * rounded
        meta[start : start + b] = 1
    meta[-1] = 0
    return meta


def reached(meta, place):
    """flash_api.cpp:1096-1125: the shape follows from the splits that this call would choose."""
    b = place["b"]
    if meta is None:
        return everything
    check(place["varlen"], "scheduler_metadata has another shape where nothing is ragged")
    size = _vectors(place) * (-(-b // 4) * 4) + 1
    check(meta.shape == (size,), f"scheduler_metadata must have shape ({size})")
    check(meta.is_contiguous() and meta.dtype == torch.int32, "scheduler_metadata must be contiguous int32")
    rows = meta[:b].tolist() if int(meta[-1]) == 0 else [0] * b
    block = block_m(place["d"], place["dv"])
    limit = [-(-n // block) * block for n in rows]
    return packed_rows(limit, place["group"], _packs(place))


def num_splits(place):
    """get_num_splits and num_splits_heuristic, as if there were one sequence (num_splits_dynamic_ptr)."""
    if place["splits"] > 0:
        return place["splits"]
    element = 1 if place["fp8"] else 2
    most = math.ceil(place["max_k"] / block_n(place["d"], place["dv"], place["fp8"]))
    row_blocks = math.ceil(place["max_q"] * place["group"] / block_m(place["d"], place["dv"]))
    total = place["h_k"] * row_blocks
    head, cache = place["max_k"] * (place["d"] + place["dv"]) * element, 50 << 20
    if total >= 0.8 * SMS:
        wide = head > cache and row_blocks >= SMS * 2 and not place["causal"]
        return min(math.ceil(head / cache), 128) if wide else 1
    if most <= 4:
        return 1
    tried = range(1, min(128, SMS, most) + 1)
    waves = [total * n / SMS for n in tried]
    filled = [w / math.ceil(w) for w in waves]
    return next(n for n, part in zip(tried, filled, strict=True) if part >= 0.85 * max(filled))


def _vectors(place):
    return 1 + int(place["b"] <= MOST and num_splits(place) > 1) + int(place["causal"])


def _packs(place):
    """get_pack_gqa: a ragged q is packed (should_pack_gqa), a split or a page without TMA too."""
    if place["pack"] is not None:
        return place["pack"] or num_splits(place) > 1
    return place["group"] != 1
