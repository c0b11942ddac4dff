"""flash_mla_sm90: csrc/sm90/flash_api.cpp and csrc/sm90/kernels/ at ebf3064.

The kernel's walk is kept: parts of the schedule, blocks of the table, partial results, combination. Metadata
that was made for other lengths gives what the real kernel would give; what it leaves unwritten is NaN.
"""

import math

import torch
from double_arithmetic import flash_mla
from double_arithmetic.checks import aligned, check
from double_arithmetic.flash_mla_fp8 import token_schedule, token_tasks

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
    return token_schedule(lengths, counts, payload, parts, 0)


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
    b, _, h_q, d = q.shape
    blocks, _, h_k, _ = kcache.shape
    check(d == 576, "Only head_size_k == 576 is supported")
    check(type(head_size_v) is int and head_size_v == 512, "Only head_size_v == 512 is supported")
    check(b > 0, "batch size must be positive")
    check(h_q % h_k == 0, "Number of heads in key/value must divide number of heads in query")
    q, rows = flash_mla.fold(q, h_k)
    check(kcache.shape[3] == d, "kcache must have shape [blocks, page, h_k, 576]")
    check(seqlens_k.shape == (b,), "seqlens_k must have shape [b]")
    check(block_table.dim() == 2 and block_table.shape[0] == b, "block_table must have shape [b, blocks]")
    check(meta.dim() == 2 and meta.shape[1] == META, "metadata must have 8 columns")
    check(splits.shape == (b + 1,), "num_splits must have shape [b + 1]")
    aligned(q, "q"), aligned(kcache, "kcache")
    # splitkv_mla.cu: the TMA shape is (64, 576, h_k, blocks) with the strides of the cache
    kcache = kcache.as_strided((blocks, BLOCK, h_k, d), kcache.stride(), kcache.storage_offset())
    hidden = rows if is_causal else torch.zeros_like(rows)
    tasks = token_tasks(meta.tolist(), seqlens_k.tolist())
    out, lse = flash_mla.walk(
        q, kcache, block_table, seqlens_k, hidden, softmax_scale, tasks, splits, len(meta)
    )
    return list(flash_mla.unfold(out, lse, rows, q.dtype))
