"""flash_mla.cuda: csrc/api/dense_decode.h, csrc/smxx/decode/, csrc/sm90/decode/dense/ at 9241ae3.

The kernel's walk is kept: parts of the schedule, blocks of the table, partial results, combination. Metadata
that was made for other lengths gives what the real kernel would give; what it leaves unwritten is NaN.
"""

import math
import os

import torch

SMS = 132  # of an H100 SXM (cudaDeviceProp::multiProcessorCount)
BLOCK = 64  # sm90/decode/dense/config.h, PAGE_BLOCK_SIZE and BLOCK_SIZE_M; dense_decode.h:103
OVERHEAD = 5  # dense_decode.h:104, fixed_overhead_num_blocks
META = 8  # params.h:10, DecodingSchedMeta: 8 int32


def dense_decode_fwd(q, kcache, head_size_v, seqlens_k, block_table, softmax_scale, is_causal, meta, splits):
    """dense_decode.h:14-225."""
    check(os.environ.get("DOUBLE_ARCH", "sm_90") == "sm_90", "Dense decode MLA is only supported on SM90a")
    check(q.dtype in (torch.bfloat16, torch.half), "q must be bf16 or fp16")  # :33
    check(kcache.dtype == q.dtype, "query and key must have the same dtype")  # :35
    check(seqlens_k.dtype == torch.int32, "seqlens_k must have dtype int32")  # :36
    check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")  # :37
    given = [t for t in (q, kcache, seqlens_k, block_table, meta, splits) if t is not None]
    check(len({t.device for t in given}) == 1, "all tensors must be on one device")  # :40-45
    check(q.stride(-1) == 1, "q must have contiguous last dimension")  # :48
    check(kcache.stride(-1) == 1, "kcache must have contiguous last dimension")  # :49
    check(seqlens_k.is_contiguous(), "seqlens_k must be contiguous")  # :50
    check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")  # :51
    b, s_q, h_q, d = q.shape
    blocks, page, h_k, _ = kcache.shape
    # :60 lets 512 through, splitkv_mla.cuh:1277 asserts 576
    check(d == 576, "Only head_size_k == 576 is supported")
    check(type(head_size_v) is int and head_size_v == 512, "Only head_size_v == 512 is supported")  # :61
    check(page == BLOCK, "Currently page_block_size must be 64")  # :67
    check(b > 0, "batch size must be positive")  # :68
    check(h_q % h_k == 0, "Number of heads in key/value must divide number of heads in query")  # :69
    is_causal = is_causal and s_q != 1  # :71
    rows, group = s_q * h_q // h_k, h_q // h_k
    q = q.view(b, s_q, h_k, group, d).transpose(2, 3).reshape(b, rows, h_k, d)  # :76
    parts = max(SMS // h_k // math.ceil(rows / BLOCK), 1)  # :78
    check(kcache.shape == (blocks, page, h_k, d), "kcache must have shape [blocks, 64, h_k, 576]")  # :81
    check(seqlens_k.shape == (b,), "seqlens_k must have shape [b]")  # :82
    check(block_table.dim() == 2 and block_table.shape[0] == b, "block_table must have shape [b, blocks]")
    tma(q, "q"), tma(kcache, "kcache")
    if meta is None:  # :95
        meta, splits = schedule(seqlens_k.tolist(), parts)
    else:  # :115-122; the numbers in it are believed
        check(meta.dtype == torch.int32 and meta.is_contiguous(), "metadata must be contiguous int32")
        check(meta.shape == (parts, META), "tile_scheduler_metadata must have shape [num_sm_parts, 8]")
        check(splits.dtype == torch.int32 and splits.shape == (b + 1,), "num_splits must be int32 [b + 1]")
    check(parts <= 160, "more than 160 parts")  # combine.cu, MLA_NUM_SPLITS_SWITCH

    out = torch.full((b, h_k, rows, 512), math.nan)  # torch.empty at :90
    lse = torch.full((b, h_k, rows), math.nan)
    out_parts = torch.full((b + parts, h_k, rows, 512), math.nan)  # :165
    lse_parts = torch.full((b + parts, h_k, rows), math.nan)
    hidden = s_q - 1 - torch.arange(rows) // group if is_causal else torch.zeros(rows, dtype=torch.long)
    for first, last, begin, end, split, first_split, last_split, _ in meta.tolist():
        if first >= b:  # splitkv_mla.cuh:1021
            continue
        for i in range(first, last + 1):  # :1027-1033
            length = int(seqlens_k[i])
            start_block = begin if i == first else 0
            end_block = end if i == last else math.ceil(length / BLOCK)
            whole = not first_split if i == first else (not last_split if i == last else True)
            o, log = attend(
                q[i], kcache, block_table[i], start_block, end_block, length - hidden, softmax_scale
            )
            if whole:  # :1230-1237
                out[i], lse[i] = o, torch.where(log == -math.inf, math.inf, log)
            else:  # :1242-1258
                at = int(splits[i]) + (split if i == first else 0)
                check(0 <= at < b + parts, "illegal memory access: a split beyond the accumulators")
                out_parts[at], lse_parts[at] = o, log
    for i in range(b):
        begin, end = int(splits[i]), int(splits[i + 1])
        if end - begin != 1:  # combine.cu: one split was written in place
            out[i], lse[i] = combine(out_parts[begin:end], lse_parts[begin:end])
    out = out.to(q.dtype).view(b, h_k, s_q, group, 512).transpose(1, 2).reshape(b, s_q, h_q, 512)  # :219
    lse = lse.view(b, h_k, s_q, group).transpose(2, 3).reshape(b, h_q, s_q)
    return out, lse, meta, splits


def attend(q, kcache, table, start_block, end_block, borders, scale):
    """One request's rows [rows, h_k, 576] over blocks start..end of its table, keys below each row's border.

    Reads slots below the longest border only: the kernel masks scores and zeroes values beyond the length
    (splitkv_mla.cuh, fill_oob_V). -> out f32 [h_k, rows, 512] and natural lse, -inf where no key is seen.
    """
    check(end_block <= table.shape[0], "illegal memory access: a block beyond the block table")
    h_k = kcache.shape[2]
    taken = range(start_block, max(end_block, start_block))
    pages = [kcache[page(int(table[n]), kcache)][: max(int(borders.max()) - n * BLOCK, 0)] for n in taken]
    keys = torch.cat([*pages, kcache[:0, 0]]).float()  # [tokens, h_k, 576]
    scores = torch.einsum("rhd,khd->hrk", q.float(), keys) * scale
    seen = start_block * BLOCK + torch.arange(len(keys)) < borders[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    log = scores.logsumexp(-1) if len(keys) else torch.full((h_k, len(borders)), -math.inf)
    weights = torch.where(seen, (scores - log[..., None]).exp(), 0.0)
    return torch.einsum("hrk,khd->hrd", weights, keys[..., :512]), log


def page(number, kcache):
    check(0 <= number < len(kcache), f"illegal memory access: block {number} of {len(kcache)}")
    return number


def combine(outs, logs):
    """combine.cu: no split at all gives zeros, and lse +inf."""
    total = logs.logsumexp(0) if len(logs) else torch.full(logs.shape[1:], -math.inf)
    total = torch.where(total == -math.inf, math.inf, total)
    return ((logs - total).exp()[..., None] * outs).sum(0), total


def schedule(lengths, parts):
    """get_decoding_sched_meta.cu: (metadata [parts, 8], num_splits [b + 1])."""
    b = len(lengths)
    lasts = [max(n - 1, 0) // BLOCK for n in lengths]
    payload = math.ceil(sum(last + 1 + OVERHEAD for last in lasts) / parts) + OVERHEAD
    request = block = split = 0
    splits, meta = [0], []
    for _ in range(parts):
        begin = (request, block, split)
        remaining = payload
        while request < b:
            left = lasts[request] + 1 - block
            if remaining >= left + OVERHEAD:
                splits.append(splits[-1] + split + 1)
                remaining -= left + OVERHEAD
                request, block, split = request + 1, 0, 0
            else:
                if remaining > OVERHEAD:
                    block += remaining - OVERHEAD
                    split += 1
                break
        last = request if block > 0 else request - 1
        end = block if block > 0 else (0 if lengths[last] == 0 else lasts[last] + 1)
        first_split = begin[1] != 0
        last_split = end != lasts[last] + 1 and lengths[last] != 0
        if begin[0] == last:
            first_split = last_split = first_split or last_split
        meta.append([begin[0], last, begin[1], end, begin[2], int(first_split), int(last_split), 0])
    assert request == b and block == 0 and split == 0
    return torch.tensor(meta, dtype=torch.int32), torch.tensor(splits, dtype=torch.int32)


def tma(t, name):
    """What cuTensorMapEncodeTiled takes: a base and outer strides of 16 bytes (splitkv_mla.cuh:1282-1313)."""
    outer = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    aligned = t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in outer)
    check(aligned, f"{name}: TMA needs a base and strides of 16 bytes")


def check(right, message):
    if not right:
        raise RuntimeError(message)
