"""FlashMLA's dense FP8 decoding, which engines build beside upstream's kernels.

csrc/extension/sm90/dense_fp8/ of vllm-project/FlashMLA 46d64a8 (2025-10-22) and of sgl-project/FlashMLA,
branch rebase (2026-05-21): the same but for the integers' types. The engines' own pins are later: untested
on hardware.
"""

import math
import os

import torch

from double_arithmetic import flash_mla
from double_arithmetic.checks import check, one_device

BLOCK, META = flash_mla.BLOCK, flash_mla.META
UNSET = -(1 << 30)  # columns 5..7 of the metadata: torch.empty, never written


def get_mla_decoding_metadata_dense_fp8(seqlens_k, num_heads_per_head_k, num_heads_k):
    """pybind.cpp:190-230, flash_fwd_mla_metadata.cu: (i32 [parts, 8] in tokens, num_splits i32 [b + 1])."""
    check(seqlens_k.is_contiguous(), "seqlens_k must be contiguous")
    check(seqlens_k.dtype == torch.int32, "seqlens_k must be int32")
    check(len(seqlens_k) < 4096, "params.batch_size < MaxBatchSize")
    parts = flash_mla.SMS // num_heads_k // math.ceil(num_heads_per_head_k / BLOCK)
    counts = [math.ceil(n / BLOCK) for n in seqlens_k.tolist()]
    payload = math.ceil(sum(n + flash_mla.OVERHEAD for n in counts) / parts) + flash_mla.OVERHEAD
    return token_schedule(seqlens_k.tolist(), counts, payload, parts, UNSET)


def token_schedule(lengths, counts, payload, parts, unset):
    """First request and token, last request and token, first split; then three columns that none reads."""
    begins, splits = flash_mla.spread(counts, payload, parts)
    meta = []
    for begin, (request, block, _) in zip(begins, [*begins[1:], (len(lengths), 0, 0)], strict=True):
        end = (request, block * BLOCK) if block > 0 else (request - 1, lengths[request - 1])
        meta.append([begin[0], begin[1] * BLOCK, *end, begin[2], unset, unset, unset])
    return [torch.tensor(meta, dtype=torch.int32), torch.tensor(splits, dtype=torch.int32)]


def token_tasks(meta, lengths):
    """flash_fwd_mla_kernel.h, flash_fwd_splitkv_mla_kernel: the tasks of `flash_mla.walk`."""
    for first, begin, last, end, split, *_ in meta:
        for i in range(first, last + 1) if 0 <= first < len(lengths) else ():
            start_block = begin // BLOCK if i == first else 0
            end_block = math.ceil((end if i == last else lengths[i]) / BLOCK)
            whole = start_block == 0 and end_block == math.ceil(lengths[i] / BLOCK)
            yield i, start_block, end_block, split if i == first else 0, whole


def fwd_kvcache_mla_fp8(
    q,
    kcache,
    head_size_v,
    seqlens_k,
    block_table,
    softmax_scale,
    is_causal,
    meta,
    splits,
    descale_q,
    descale_k,
):
    """pybind.cpp:14-188: q and kcache e4m3, descales f32 [1] -> out bf16 [b, s_q, h_q, 512], natural lse f32
    [b, h_q, s_q]. Slots beyond a length are read as zero; a length of 0 reads before the block table.
    """
    check(os.environ.get("DOUBLE_ARCH", "sm_90") == "sm_90", "Dense FP8 MLA is only supported on SM90")
    check(q.dtype == torch.float8_e4m3fn, "q must be float8_e4m3fn")
    for t, name in ((meta, "tile_scheduler_metadata"), (splits, "num_splits")):
        check(isinstance(t, torch.Tensor), f"expected a Tensor for {name}")
        check(t.dtype == torch.int32, f"{name} must have dtype int32")
        check(t.is_contiguous(), f"{name} must be contiguous")
    q, rows = flash_mla.checked(q, kcache, head_size_v, seqlens_k, block_table, meta, splits)
    check(descale_q is not None and descale_k is not None, "descale is required when input dtype is fp8")
    one_device(q, descale_q, descale_k)
    for t in (descale_q, descale_k):
        check(t.dtype == torch.float32 and t.shape == (1,), "descale must have shape [1] and dtype float")
    check(meta.dim() == 2 and meta.shape[1] == META, "tile_scheduler_metadata must have 8 columns")
    check(splits.shape == (len(q) + 1,), "num_splits must have shape [b + 1]")
    hidden = rows if is_causal else torch.zeros_like(rows)
    scale = softmax_scale * float(descale_q) * float(descale_k)
    lengths = seqlens_k.tolist()
    tasks = token_tasks(meta.tolist(), lengths)
    out, lse = flash_mla.walk(
        q.float(), kcache.float(), block_table, seqlens_k, hidden, scale, tasks, splits, len(meta)
    )
    empty = [i for i, n in enumerate(lengths) if n == 0]
    out[empty], lse[empty] = math.nan, math.nan
    return flash_mla.unfold(out * float(descale_k), lse, rows, torch.bfloat16)
