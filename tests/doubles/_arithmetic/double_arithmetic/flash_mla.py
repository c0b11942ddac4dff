"""FlashMLA's dense decoding: csrc/api/dense_decode.h, csrc/smxx/decode/, csrc/sm90/decode/dense/ of
deepseek-ai/FlashMLA 9241ae3, and the interface's metadata.

The kernel's walk is kept: parts of the schedule, blocks of the table, partial results, combination. Metadata
that was made for other lengths gives what the real kernel would give; what it leaves unwritten is NaN.
"""

import dataclasses
import math
import os
from typing import Any

import torch

from double_arithmetic.checks import aligned, check, one_device

SMS = 132  # of an H100 SXM (cudaDeviceProp::multiProcessorCount)
BLOCK = 64  # sm90/decode/dense/config.h, PAGE_BLOCK_SIZE and BLOCK_SIZE_M; dense_decode.h:103
OVERHEAD = 5  # dense_decode.h:104, fixed_overhead_num_blocks
META = 8  # params.h:10, DecodingSchedMeta: 8 int32


@dataclasses.dataclass
class FlashMLASchedMeta:
    """flash_mla_interface.py, FlashMLASchedMeta: tile_scheduler_metadata i32 [sm parts, 8], num_splits i32
    [b + 1], both made by the first call."""

    have_initialized: bool = False
    config: dict[str, Any] | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def keep_config(meta, q, k_cache, **others):
    """The first call's sizes are kept; a later call of other sizes raises AssertionError."""
    b, s_q, h_q = q.shape[:3]
    sizes = {"b": b, "s_q": s_q, "h_q": h_q, "page_block_size": k_cache.shape[1], "h_k": k_cache.shape[2]}
    sizes |= others
    if not meta.have_initialized:
        meta.have_initialized, meta.config = True, sizes
    for name, size in sizes.items():
        assert meta.config[name] == size, (
            f"sched_meta.config.{name} is {meta.config[name]}, the arguments' is {size}"
        )


def dense_decode_fwd(q, kcache, head_size_v, seqlens_k, block_table, softmax_scale, is_causal, meta, splits):
    """dense_decode.h:14-225."""
    check(os.environ.get("DOUBLE_ARCH", "sm_90") == "sm_90", "Dense decode MLA is only supported on SM90a")
    check(q.dtype in (torch.bfloat16, torch.half), "q must be bf16 or fp16")  # :33
    q, rows = checked(q, kcache, head_size_v, seqlens_k, block_table, meta, splits)
    b, _, h_k, _ = q.shape
    parts = max(SMS // h_k // math.ceil(len(rows) / BLOCK), 1)  # :78
    if meta is None:  # :95
        meta, splits = block_schedule(seqlens_k.tolist(), parts)
    else:  # :115-122; the numbers in it are believed
        check(meta.dtype == torch.int32 and meta.is_contiguous(), "metadata must be contiguous int32")
        check(meta.shape == (parts, META), "tile_scheduler_metadata must have shape [num_sm_parts, 8]")
        check(splits.dtype == torch.int32 and splits.shape == (b + 1,), "num_splits must be int32 [b + 1]")
    check(parts <= 160, "more than 160 parts")  # combine.cu, MLA_NUM_SPLITS_SWITCH
    hidden = rows if is_causal else torch.zeros_like(rows)
    tasks = _block_tasks(meta.tolist(), seqlens_k.tolist())
    out, lse = walk(q, kcache, block_table, seqlens_k, hidden, softmax_scale, tasks, splits, parts)
    return *unfold(out, lse, rows, q.dtype), meta, splits


def walk(q, kcache, table, lengths, hidden, scale, tasks, splits, parts):
    """q [b, rows, h_k, 576] over tasks (request, first block, end block, split, whether it is the whole):
    out f32 [b, h_k, rows, 512] and natural lse [b, h_k, rows]; both are NaN where nothing is written."""
    b, rows, h_k, _ = q.shape
    out = torch.full((b, h_k, rows, 512), math.nan)  # torch.empty at :90
    lse = torch.full((b, h_k, rows), math.nan)
    out_parts = torch.full((b + parts, h_k, rows, 512), math.nan)  # :165
    lse_parts = torch.full((b + parts, h_k, rows), math.nan)
    for i, start, end, split, whole in tasks:
        o, log = _attend(q[i], kcache, table[i], start, end, int(lengths[i]) - hidden, scale)
        if whole:  # splitkv_mla.cuh:1230-1237
            out[i], lse[i] = o, torch.where(log == -math.inf, math.inf, log)
        else:  # :1242-1258
            at = int(splits[i]) + split
            check(0 <= at < b + parts, "illegal memory access: a split beyond the accumulators")
            out_parts[at], lse_parts[at] = o, log
    for i in range(b):
        begin, end = int(splits[i]), int(splits[i + 1])
        if end - begin != 1:  # combine.cu: one split was written in place
            out[i], lse[i] = _combine(out_parts[begin:end], lse_parts[begin:end])
    return out, lse


def fold(q, h_k):
    """dense_decode.h:76: [b, s_q, h_q, d] as [b, s_q * group, h_k, d], and how many of the last keys each
    of these rows does not see under a causal mask."""
    b, s_q, h_q, d = q.shape
    group = h_q // h_k
    q = q.view(b, s_q, h_k, group, d).transpose(2, 3).reshape(b, s_q * group, h_k, d)
    return q, s_q - 1 - torch.arange(s_q * group) // group


def unfold(out, lse, rows, dtype):
    """:219: out [b, s_q, h_q, 512], lse f32 [b, h_q, s_q]."""
    b, h_k = out.shape[:2]
    s_q = int(rows.max()) + 1
    out = out.to(dtype).unflatten(2, (s_q, -1)).transpose(1, 2).reshape(b, s_q, -1, 512)
    return out, lse.view(b, h_k, s_q, -1).transpose(2, 3).reshape(b, -1, s_q)


def checked(q, kcache, head_size_v, seqlens_k, block_table, meta, splits):
    """:33-82, which dense FP8 decoding shares."""
    check(kcache.dtype == q.dtype, "query and key must have the same dtype")
    check(seqlens_k.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    one_device(q, kcache, seqlens_k, block_table, meta, splits)
    check(q.stride(-1) == 1, "q must have contiguous last dimension")
    check(kcache.stride(-1) == 1, "kcache must have contiguous last dimension")
    check(seqlens_k.is_contiguous(), "seqlens_k must be contiguous")
    check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    b, _, h_q, d = q.shape
    blocks, page, h_k, _ = kcache.shape
    # :60 lets 512 through, splitkv_mla.cuh:1277 asserts 576
    check(d == 576, "Only head_size_k == 576 is supported")
    check(type(head_size_v) is int and head_size_v == 512, "Only head_size_v == 512 is supported")
    check(page == BLOCK, "Currently page_block_size must be 64")
    check(b > 0, "batch size must be positive")
    check(h_q % h_k == 0, "Number of heads in key/value must divide number of heads in query")
    check(kcache.shape == (blocks, page, h_k, d), "kcache must have shape [blocks, 64, h_k, 576]")
    check(seqlens_k.shape == (b,), "seqlens_k must have shape [b]")
    check(block_table.dim() == 2 and block_table.shape[0] == b, "block_table must have shape [b, blocks]")
    q, rows = fold(q, h_k)
    aligned(q, "q")
    aligned(kcache, "kcache")
    return q, rows


def _attend(q, kcache, table, start_block, end_block, borders, scale):
    """One request's rows [rows, h_k, 576] over blocks start..end of its table, keys below each row's border.

    Reads slots below the longest border only: the kernel masks scores and zeroes values beyond the length
    (splitkv_mla.cuh, fill_oob_V). -> out f32 [h_k, rows, 512] and natural lse, -inf where no key is seen.
    """
    check(end_block <= table.shape[0], "illegal memory access: a block beyond the block table")
    h_k = kcache.shape[2]
    taken = table[start_block : max(end_block, start_block)].tolist()
    check(all(0 <= n < len(kcache) for n in taken), "illegal memory access: a block beyond the cache")
    below = max(int(borders.max()) - start_block * BLOCK, 0)
    keys = torch.cat([*(kcache[n] for n in taken), kcache[:0, 0]])[:below].float()  # [tokens, h_k, 576]
    scores = torch.einsum("rhd,khd->hrk", q.float(), keys) * scale
    seen = start_block * BLOCK + torch.arange(len(keys)) < borders[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    log = scores.logsumexp(-1) if len(keys) else torch.full((h_k, len(borders)), -math.inf)
    weights = torch.where(seen, (scores - log[..., None]).exp(), 0.0)
    return torch.einsum("hrk,khd->hrd", weights, keys[..., :512]), log


def _combine(outs, logs):
    """combine.cu: no split at all gives zeros, and lse +inf."""
    total = logs.logsumexp(0) if len(logs) else torch.full(logs.shape[1:], -math.inf)
    total = torch.where(total == -math.inf, math.inf, total)
    return ((logs - total).exp()[..., None] * outs).sum(0), total


def _block_tasks(meta, lengths):
    """splitkv_mla.cuh:1021-1033."""
    for first, last, begin, end, split, first_split, last_split, _ in meta:
        for i in range(first, last + 1) if first < len(lengths) else ():
            start_block = begin if i == first else 0
            end_block = end if i == last else math.ceil(lengths[i] / BLOCK)
            whole = not first_split if i == first else (not last_split if i == last else True)
            yield i, start_block, end_block, split if i == first else 0, whole


def block_schedule(lengths, parts):
    """get_decoding_sched_meta.cu: (metadata [parts, 8] in blocks, num_splits [b + 1])."""
    b = len(lengths)
    lasts = [max(n - 1, 0) // BLOCK for n in lengths]
    payload = math.ceil(sum(last + 1 + OVERHEAD for last in lasts) / parts) + OVERHEAD
    begins, splits = spread([last + 1 for last in lasts], payload, parts)
    meta = []
    for begin, (request, block, _) in zip(begins, [*begins[1:], (b, 0, 0)], strict=True):
        last = request if block > 0 else request - 1
        end = block if block > 0 else (0 if lengths[last] == 0 else lasts[last] + 1)
        first_split = begin[1] != 0
        last_split = end != lasts[last] + 1 and lengths[last] != 0
        if begin[0] == last:
            first_split = last_split = first_split or last_split
        meta.append([begin[0], last, begin[1], end, begin[2], int(first_split), int(last_split), 0])
    return torch.tensor(meta, dtype=torch.int32), torch.tensor(splits, dtype=torch.int32)


def spread(counts, payload, parts):
    """The walk of both schedulers: where each part begins (request, block, split), and num_splits."""
    request = block = split = 0
    begins, splits = [], [0]
    for _ in range(parts):
        begins.append((request, block, split))
        remaining = payload
        while request < len(counts):
            left = counts[request] - block
            if remaining >= left + OVERHEAD:
                splits.append(splits[-1] + split + 1)
                remaining -= left + OVERHEAD
                request, block, split = request + 1, 0, 0
            else:
                if remaining > OVERHEAD:
                    block += remaining - OVERHEAD
                    split += 1
                break
    check(request == len(counts) and block == 0 and split == 0, "the schedule does not end with the batch")
    return begins, splits
