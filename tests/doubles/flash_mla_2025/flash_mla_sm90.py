"""flash_mla_sm90: csrc/sm90/flash_api.cpp and csrc/sm90/kernels/ at ebf3064.

The kernel's walk is kept: parts of the schedule, blocks of the table, partial results, combination. Metadata
that was made for other lengths gives what the real kernel would give; what it leaves unwritten is NaN.
"""

import math

import torch

SMS = 132  # of an H100 SXM (cudaDeviceProp::multiProcessorCount)
BLOCK = 64  # kernels/config.h, PAGE_BLOCK_SIZE and BLOCK_SIZE_M
OVERHEAD = 5  # kernels/config.h, FIXED_OVERHEAD_NUM_BLOCKS
META = 8  # kernels/params.h:47, TileSchedulerMetaDataSize


def get_mla_metadata(seqlens_k, num_heads_per_head_k, num_heads_k):
    """flash_api.cpp, get_mla_metadata and kernels/get_mla_metadata.cu."""
    check(seqlens_k.is_contiguous() and seqlens_k.dtype == torch.int32, "seqlens_k must be contiguous int32")
    parts = SMS // num_heads_k // math.ceil(num_heads_per_head_k / BLOCK)
    lengths = seqlens_k.tolist()
    counts = [math.ceil(n / BLOCK) for n in lengths]
    payload = max(math.ceil(sum(n + OVERHEAD for n in counts) / parts) + OVERHEAD, 2 * OVERHEAD)
    request = block = split = 0
    splits, meta = [0], []
    for _ in range(parts):
        begin = (request, block * BLOCK)
        begin_split = split
        remaining = payload
        while request < len(lengths):
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
        end = (request, block * BLOCK) if block > 0 else (request - 1, lengths[request - 1])
        meta.append([*begin, *end, begin_split, 0, 0, 0])
    assert request == len(lengths) and block == 0 and split == 0
    return [torch.tensor(meta, dtype=torch.int32), torch.tensor(splits, dtype=torch.int32)]


def fwd_kvcache_mla(q, kcache, head_size_v, seqlens_k, block_table, softmax_scale, is_causal, meta, splits):
    """flash_api.cpp, mha_fwd_kvcache_mla. The page size is not checked: the kernel reads 64 rows from where
    each block begins, whatever its size."""
    if not isinstance(meta, torch.Tensor) or not isinstance(splits, torch.Tensor):
        raise TypeError("fwd_kvcache_mla(): incompatible function arguments")  # pybind: const at::Tensor &
    check(q.dtype in (torch.bfloat16, torch.half), "q must be bf16 or fp16")
    check(kcache.dtype == q.dtype, "query and key must have the same dtype")
    check(seqlens_k.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(meta.dtype == torch.int32 and splits.dtype == torch.int32, "metadata must have dtype int32")
    check(q.stride(-1) == 1 and kcache.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    check(seqlens_k.is_contiguous(), "seqlens_k must be contiguous")
    check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    check(meta.is_contiguous() and splits.is_contiguous(), "metadata must be contiguous")
    b, s_q, h_q, d = q.shape
    blocks, _, h_k, _ = kcache.shape
    check(d == 576, "Only head_size_k == 576 is supported")
    check(type(head_size_v) is int and head_size_v == 512, "Only head_size_v == 512 is supported")
    check(b > 0, "batch size must be positive")
    check(h_q % h_k == 0, "Number of heads in key/value must divide number of heads in query")
    is_causal = is_causal and s_q != 1
    rows, group = s_q * h_q // h_k, h_q // h_k
    q = q.view(b, s_q, h_k, group, d).transpose(2, 3).reshape(b, rows, h_k, d)
    check(kcache.shape[3] == d, "kcache must have shape [blocks, page, h_k, 576]")
    check(seqlens_k.shape == (b,), "seqlens_k must have shape [b]")
    check(block_table.dim() == 2 and block_table.shape[0] == b, "block_table must have shape [b, blocks]")
    check(meta.dim() == 2 and meta.shape[1] == META, "metadata must have 8 columns")
    check(splits.shape == (b + 1,), "num_splits must have shape [b + 1]")
    tma(q, "q"), tma(kcache, "kcache")
    parts = len(meta)
    # splitkv_mla.cu: the TMA shape is (64, 576, h_k, blocks) with the strides of the cache
    kcache = kcache.as_strided((blocks, BLOCK, h_k, d), kcache.stride(), kcache.storage_offset())

    out = torch.full((b, h_k, rows, 512), math.nan)
    lse = torch.full((b, h_k, rows), math.nan)
    out_parts = torch.full((b + parts, h_k, rows, 512), math.nan)
    lse_parts = torch.full((b + parts, h_k, rows), math.nan)
    hidden = s_q - 1 - torch.arange(rows) // group if is_causal else torch.zeros(rows, dtype=torch.long)
    for first, begin, last, end, split, *_ in meta.tolist():
        if first >= b:  # splitkv_mla.cu:1026
            continue
        for i in range(first, last + 1):  # :1033-1039
            length = int(seqlens_k[i])
            start_block = begin // BLOCK if i == first else 0
            end_block = math.ceil((end if i == last else length) / BLOCK)
            whole = start_block == 0 and end_block == math.ceil(length / BLOCK)
            o, log = attend(
                q[i], kcache, block_table[i], start_block, end_block, length - hidden, softmax_scale
            )
            if whole:  # :1233
                out[i], lse[i] = o, torch.where(log == -math.inf, math.inf, log)
            else:
                at = int(splits[i]) + (split if i == first else 0)
                check(0 <= at < b + parts, "illegal memory access: a split beyond the accumulators")
                out_parts[at], lse_parts[at] = o, log
    for i in range(b):
        begin, end = int(splits[i]), int(splits[i + 1])
        if end - begin != 1:  # mla_combine.cu: one split was written in place
            total = lse_parts[begin:end].logsumexp(0)
            lse[i] = total = torch.where(total == -math.inf, math.inf, total)
            out[i] = ((lse_parts[begin:end] - total).exp()[..., None] * out_parts[begin:end]).sum(0)
    out = out.to(q.dtype).view(b, h_k, s_q, group, 512).transpose(1, 2).reshape(b, s_q, h_q, 512)
    lse = lse.view(b, h_k, s_q, group).transpose(2, 3).reshape(b, h_q, s_q)
    return [out, lse]


def attend(q, kcache, table, start_block, end_block, borders, scale):
    """One request's rows [rows, h_k, 576] over blocks start..end of its table, keys below each row's border.
    Reads slots below the longest border only. Returns out f32 [h_k, rows, 512] and the natural lse."""
    check(end_block <= table.shape[0], "illegal memory access: a block beyond the block table")
    keys = [kcache[:0, 0]]
    for n in range(start_block, max(end_block, start_block)):
        page = int(table[n])
        check(0 <= page < len(kcache), f"illegal memory access: block {page} of {len(kcache)}")
        keys.append(kcache[page][: max(int(borders.max()) - n * BLOCK, 0)])
    keys = torch.cat(keys).float()  # [tokens, h_k, 576]
    scores = torch.einsum("rhd,khd->hrk", q.float(), keys) * scale
    seen = start_block * BLOCK + torch.arange(len(keys)) < borders[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    log = scores.logsumexp(-1) if len(keys) else torch.full((kcache.shape[2], len(borders)), -math.inf)
    weights = torch.where(seen, (scores - log[..., None]).exp(), 0.0)
    return torch.einsum("hrk,khd->hrd", weights, keys[..., :512]), log


def tma(t, name):
    """What cuTensorMapEncodeTiled takes: a base and outer strides of 16 bytes (splitkv_mla.cu)."""
    outer = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    aligned = t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in outer)
    check(aligned, f"{name}: TMA needs a base and strides of 16 bytes")


def check(right, message):
    if not right:
        raise RuntimeError(message)
