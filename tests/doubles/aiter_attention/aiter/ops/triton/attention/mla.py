"""aiter/ops/triton/attention/mla.py: AITER's Triton MLA decode over a block table."""

from __future__ import annotations

import torch

from ...._double.softmax import attend
from ...._double.strict import doubled, indices, scalar, sure
from ....utility import dtypes


def mla_decode_fwd(
    q,
    kv_buffer,
    out,
    cu_seqlens_q,
    seqused_k,
    max_seqlen_kv: int,
    block_tables,
    softmax_scale: float,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    causal: bool,
    q_descale,
    kv_descale,
    q_scales=None,
    out_scale=None,
    shuffled_kv_cache: bool = False,
    skip_reduce: bool = False,
):
    assert causal, "Only causal attention is supported"
    doubled(
        q_scales is out_scale is None and not shuffled_kv_cache and not skip_reduce, "FP4, shuffled, partials"
    )
    tokens, heads, dim = q.shape
    _, block_size, kv_heads, _ = kv_buffer.shape
    batch = len(seqused_k)
    per_sequence = tokens // batch
    assert kv_lora_rank + qk_rope_head_dim == dim, (
        "qk_head_dim must be equal to kv_lora_rank + qk_rope_head_dim"
    )
    # _mla_decode_fwd_kernel: TILE_SIZE is the block size, in tl.arange and as a side of tl.dot
    sure(
        block_size >= 16 and block_size & (block_size - 1) == 0,
        f"block_size={block_size}: tl.dot wants 16, 32, ...",
    )
    for name, width in ("kv_lora_rank", kv_lora_rank), ("qk_rope_head_dim", qk_rope_head_dim):
        sure(width >= 16 and width & (width - 1) == 0, f"{name}={width} is given to tl.arange")
    kinds = (dtypes.bf16, dtypes.fp8)
    sure(q.dtype in kinds and kv_buffer.dtype in kinds, "q and the cache are bf16 or this architecture's FP8")
    # K is cast to q's dtype as it is: bf16 keys become FP8 without a scale
    sure(q.dtype == dtypes.bf16 or kv_buffer.dtype == dtypes.fp8, "a bf16 cache is cast to q's FP8")
    sure(
        kv_buffer.shape[3] == dim and q.stride(2) == out.stride(2) == 1,
        "q's and the output's rows are neighbours",
    )
    sure(kv_heads == 1, "one latent head is read")
    sure(tokens == per_sequence * batch, f"{tokens} tokens are taken as {per_sequence} for each of {batch}")
    starts, lengths = indices("cu_seqlens_q", cu_seqlens_q, batch), indices("seqused_k", seqused_k)
    sure(
        block_tables.dtype == torch.int32 and block_tables.stride(1) == 1,
        "a row of the table is packed int32",
    )
    q_times = 1.0 if q_descale is None else scalar("q_descale", q_descale)
    kv_times = 1.0 if kv_descale is None else scalar("kv_descale", kv_descale)
    for b in range(batch):
        sure(0 <= starts[b] and starts[b] + per_sequence <= tokens, "cu_seqlens_q leads outside q")
        sure(lengths[b] > 0, f"sequence {b} is empty")
        count = -(-lengths[b] // block_size)
        sure(count <= block_tables.shape[1], "the block table is shorter than the sequence")
        blocks = block_tables[b, :count].long()
        sure(
            0 <= int(blocks.min()) and int(blocks.max()) < kv_buffer.shape[0],
            "the block table leads outside the cache",
        )
        raw = kv_buffer.view(torch.uint8) if kv_buffer.dtype == dtypes.fp8 else kv_buffer
        keys = raw[blocks].view(kv_buffer.dtype).float().flatten(0, 1)[: lengths[b]].expand(-1, heads, -1)
        rows = slice(starts[b], starts[b] + per_sequence)
        last = lengths[b] - per_sequence + torch.arange(per_sequence)
        seen = torch.arange(lengths[b])[None] <= last[:, None]
        found, _ = attend(q[rows], keys, keys[..., :kv_lora_rank], softmax_scale * q_times * kv_times, seen)
        out[rows] = (found * kv_times).to(out.dtype)
    return out
