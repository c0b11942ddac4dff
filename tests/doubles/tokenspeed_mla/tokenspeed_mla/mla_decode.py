"""tokenspeed_mla/mla_decode.py of tokenspeed-mla 2.0.4: the Python checks of tokenspeed_mla_decode, what
the compiled kernels' signatures demand (_get_compiled_mla_kernel), and what they compute
(mla_decode_fp8.py, mla_decode_fp16.py)."""

from __future__ import annotations

import math

import torch

from .utils import capability, ceil_div, fold, get_num_sm

FP8 = torch.float8_e4m3fn
LATENT, ROPE, TILE = 512, 64, 128
MASKED = -1.0e6  # mla_decode_fp8.py:3512: a score, before the scale


def tokenspeed_mla_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    softmax_scale: float,
    output_scale: float = 1.0,
    out: torch.Tensor | None = None,
    is_var_seq: bool = True,
    causal_mask: bool = True,
    window_left: int = -1,
    enable_pdl: bool = False,
    return_lse: bool = False,
    causal_seqs: torch.Tensor | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave_size: int = 1,
    *,
    min_split_kv: int = 1,
    local_visible_lens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Line 735. query [B, q_len, H, 576], cache [pages, page size, 576] of the same dtype (FP8, bf16,
    fp16), workspace int8, block_tables int32 [B, pages of a row], seq_lens [B]. Returns [B, q_len, H,
    512], bf16 of FP8, and with return_lse its LSE in base 2, fp32 [B, q_len, H]. Whole tiles of 128 slots
    are read: a NaN in a masked slot's latent makes the sequence's output NaN; a page that is not in the
    cache reads as zeros."""
    if type(min_split_kv) is not int or not 1 <= min_split_kv <= 256:
        raise ValueError("min_split_kv must be an integer in [1, 256]")
    supported = {torch.float16, torch.bfloat16, FP8}
    assert query.dtype in supported, f"tokenspeed_mla_decode only supports {supported}, got {query.dtype}"
    assert kv_cache.dtype == query.dtype, f"kv_cache dtype {kv_cache.dtype} must match {query.dtype}"
    batch, queries, heads, width = query.shape
    assert width == kv_lora_rank + qk_rope_head_dim
    if kv_cache.dim() == 4:
        kv_cache = kv_cache.squeeze(1)
    if max_seq_len <= 0:
        raise ValueError(f"max_seq_len must be > 0, got {max_seq_len}")
    plain = window_left == -1 and cp_world == 1 and causal_seqs is None and local_visible_lens is None
    if not plain or cp_rank or cp_interleave_size != 1:
        raise NotImplementedError(
            "the double does not cover windows, context parallelism and visible lengths"
        )
    if out is not None and out.dtype == FP8:
        raise NotImplementedError("the double does not cover the FP8 output of SM107")
    size = _workspace_size(query, out, max_seq_len, min_split_kv)
    given = f"{workspace_buffer.dtype}, {workspace_buffer.numel()} bytes"
    assert workspace_buffer.dtype == torch.int8, f"workspace_buffer must be torch.int8, got {given}"
    assert workspace_buffer.numel() >= size, f"workspace_buffer too small: {given}, need {size} bytes"
    dtype = torch.bfloat16 if query.dtype == FP8 else query.dtype
    if out is None:
        shape = (batch, queries, heads, kv_lora_rank)
        out = torch.full(shape, torch.nan, dtype=dtype, device=query.device)
    lengths = seq_lens if seq_lens.dtype == torch.int32 else seq_lens.to(torch.int32)
    _implementable(kv_lora_rank, qk_rope_head_dim, kv_cache.shape[1], heads, queries, query.dtype)
    _signature(query, kv_cache, block_tables, out, lengths, dtype)
    if size:
        _argument(workspace_buffer.dim() == 1 and workspace_buffer.is_contiguous(), "workspace: compact, 1-D")
        _argument(workspace_buffer.data_ptr() % 32 == 0, "workspace: aligned to 32 bytes")
    lse = torch.zeros(batch, queries, heads, device=query.device)
    _attend(query, kv_cache, block_tables, lengths, softmax_scale, output_scale, causal_mask, out, lse)
    return (out, lse) if return_lse else out


def _tile(heads: int, queries: int, dtype: torch.dtype) -> int:
    """mla_helpers.py select_mla_decode_tilers: rows of a tile of queries."""
    device = capability()
    return 64 if dtype == FP8 and heads * queries <= 64 and device == (10, 0) else 128


def _workspace_size(query: torch.Tensor, out: torch.Tensor | None, max_seq_len: int, least: int) -> int:
    """Lines 89 and 980: bytes of fp32 partial outputs and LSE; none for one split."""
    batch, queries, heads, _ = query.shape
    tile = _tile(heads, queries, query.dtype)
    folded = fold(heads, queries, tile)
    rows, steps = heads * folded, queries // folded
    adjacent = query.stride(1) == heads * query.stride(2)
    adjacent = adjacent and (out is None or out.stride(1) == heads * out.stride(2))
    if tile == 128 and adjacent and ceil_div(heads * queries, tile) < steps:
        rows, steps = tile, ceil_div(heads * queries, tile)
    sms, tiles = get_num_sm(query.device), ceil_div(max_seq_len, TILE)
    if tile == 64:
        per_batch = min(tiles, max(1, sms // batch // steps))
        splits = min(ceil_div(tiles, ceil_div(tiles, per_batch)), 64)
    else:
        splits = min(max(1, sms // batch // (steps * 2)), 32)
    splits = max(splits, least)
    if query.dtype == FP8:
        splits = ceil_div(tiles, ceil_div(tiles, splits))
    return 0 if splits == 1 else batch * rows * steps * splits * (LATENT + 1) * 4


def _implementable(latent: int, rope: int, page: int, heads: int, queries: int, dtype: torch.dtype) -> None:
    """_check_can_implement: can_implement of mla_decode_fp8.py:4710 and mla_decode_fp16.py."""
    tile = _tile(heads, queries, dtype)
    fits = 0 < heads <= tile and not (tile == 64 and heads < tile and heads * queries > tile)
    pages = page > 1 and TILE % page == 0
    if latent != LATENT or rope != ROPE or not fits or not pages or queries < 1:
        raise ValueError(
            "tokenspeed_mla_decode: unsupported configuration "
            f"(q_len={queries}, num_heads={heads}, page_size={page}, dtype={dtype})"
        )


def _argument(holds: bool, what: str) -> None:
    """The compiled kernel's own check of its arguments (TVM FFI)."""
    if not holds:
        raise ValueError(f"Mismatched argument: {what}")


def _signature(query, cache, tables, out, lengths, dtype) -> None:
    """Lines 301-380: what the fake tensors fix."""
    batch, queries, heads, _ = query.shape
    _argument(query.stride(-1) == 1, "q_latent: a last stride of 1")
    _argument(cache.dim() == 3 and cache.stride(-1) == 1, "c_latent: 3-D, a last stride of 1")
    _argument(cache.shape[-1] == LATENT + ROPE, "c_rope: the width of q_rope")
    for what, tensor in (("q_latent", query), ("c_latent", cache)):
        _argument(tensor.data_ptr() % 16 == 0, f"{what}: aligned to 16 bytes")
        outer = [s * tensor.element_size() % 16 for s in tensor.stride()[:-1]]
        _argument(not any(outer), f"{what}: strides in multiples of 16 bytes (its tensor map)")
    _argument(tables.dtype == torch.int32, f"page_table: int32, not {tables.dtype}")
    _argument(tables.dim() == 2 and tables.is_contiguous(), "page_table: 2-D, compact")
    _argument(
        tables.shape[0] == batch and lengths.shape == (batch,), "page_table, cache_seqs: a row a sequence"
    )
    _argument(lengths.is_contiguous(), "cache_seqs: compact")
    shape = (batch, queries, heads, LATENT)
    _argument(out.dtype == dtype and tuple(out.shape) == shape, f"o: {dtype} {shape}")
    _argument(out.is_contiguous(), "o: compact")


def _attend(query, cache, tables, lengths, scale, output_scale, causal, out, lse) -> None:
    pages, page = cache.shape[:2]
    queries = query.shape[1]
    flat, width = tables.flatten().tolist(), tables.shape[1]
    for b, length in enumerate(lengths.tolist()):
        tiles = ceil_div(length, TILE)
        if tiles <= 0:
            continue  # its output is undefined
        first, count = b * width, tiles * (TILE // page)
        if first + count > len(flat):
            raise RuntimeError("memory access fault: the page table is read by tiles of 128 slots")
        slots = torch.zeros(count, page, cache.shape[2], device=cache.device)
        for place, i in enumerate(flat[first : first + count]):
            if 0 <= i < pages:  # a tensor map's bounds
                slots[place] = cache[i].float()
        slots = slots.flatten(0, 1)
        scores = query[b].float() @ slots.T
        ends = length - (queries - 1) + torch.arange(queries) if causal else torch.full((queries,), length)
        visible = torch.arange(tiles * TILE)[None] < ends[:, None]
        scores = torch.where(visible[:, None], scores, MASKED)
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scale * (scores - top))
        total = weights.sum(-1, keepdim=True)
        out[b] = (weights @ slots[:, :LATENT] / total * output_scale).to(out.dtype)
        lse[b] = (total.log2() + scale * math.log2(math.e) * top)[..., 0]
