"""vllm/_custom_ops.py of vLLM 0.33.0, lines 3434 and 3461, and what it calls: sm100_cutlass_mla_kernel.cu at
commits 4c2b01d and 0f5257e, cutlass_sm100_mla/device/sm100_mla.hpp and
cutlass_sm100_mla/kernel/{sm100_fmha_mla_tma_warpspecialized,sm100_fmha_mla_reduction}.hpp, of csrc.

What the caller owes is in v1/attention/backends/mla/cutlass_mla.py: queries of 128 heads (q_pad_num_heads), a
page table whose rows are whole tiles of 128 slots, a workspace of bytes that is large enough. The op checks
none of it: what it would misread raises here.
"""

import os

import torch

HEADS, LATENT, ROPE, TILE = 128, 512, 64, 128
SMS = 148  # of a B200, for a caller who gives no number
OUTPUTS = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float8_e4m3fn: torch.bfloat16,
}


def sm100_cutlass_mla_get_workspace_size(
    max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int
) -> int:
    """Bytes: fp32 partial outputs and their LSE, 128 heads, for each split."""
    splits = _splits(max_seq_len, num_batches, sm_count if sm_count > 0 else SMS, num_kv_splits)
    return _workspace(splits, num_batches)


def _splits(slots: int, batch: int, sms: int, asked: int) -> int:
    """sm100_mla.hpp set_split_kv: one for more than one sequence, at most 16 for one."""
    if asked >= 1:
        return asked
    most = min(16, -(-slots // TILE), *([1] if batch > 1 else []))
    split = min(most, max(1, sms // batch))
    return -(-most // -(-most // split))


def _workspace(splits: int, batch: int) -> int:
    """get_workspace_size; used with more than one split only."""
    return (4 * LATENT + 4) * HEADS * splits * batch


def _fault(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"memory access fault: {what}")


def _misread(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"would be misread: {what}")


def _at(tensor: torch.Tensor, what: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor's memory from its first element on, at these strides."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    _fault(last < held, f"{what} is addressed to element {last} of {held}")
    return torch.as_strided(tensor.detach(), shape, strides)


def sm100_cutlass_mla_decode(
    out: torch.Tensor,
    lse: torch.Tensor,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    workspace: torch.Tensor,
    scale: float,
    num_kv_splits: int,
) -> torch.Tensor:
    """One query token per sequence. out [B, 128, 512] and lse [B, 128] fp32 (or empty: none), q_nope [B,
    128, 512], q_pe [B, 128, 64], cache [pages, page size, 576] of one dtype, fp16, bf16 or FP8 (then out
    is bf16), seq_lens int32 [B], page_table int32 [B, pages of a row]. LSE in natural logarithms. Whole
    tiles of 128 slots are read: a NaN in a masked slot's latent makes the sequence's output NaN. A
    sequence of no slots is left unwritten."""
    arch = os.environ.get("DOUBLE_ARCH", "sm_90")
    if not arch.startswith("sm_10"):
        raise RuntimeError(f"sm100_cutlass_mla_decode has no kernel image for {arch}")
    if q_nope.dtype not in OUTPUTS:
        raise RuntimeError("Unsupported input data type of MLA")
    batch, heads = q_nope.shape[0], q_nope.shape[1]
    pages, page_size = kv_c_and_k_pe_cache.shape[:2]
    _misread(q_pe.dtype == kv_c_and_k_pe_cache.dtype == q_nope.dtype, "q_pe or the cache, of another dtype")
    _misread(out.dtype == OUTPUTS[q_nope.dtype], f"out of {out.dtype}, written as {OUTPUTS[q_nope.dtype]}")
    _misread(seq_lens.dtype == torch.int32, f"seq_lens of {seq_lens.dtype}, not int32")
    _misread(page_table.dtype == torch.int32, f"page_table of {page_table.dtype}, not int32")
    _misread(workspace.dtype in (torch.uint8, torch.int8), "a workspace that is counted in bytes")
    _misread(kv_c_and_k_pe_cache.dim() == 3 and kv_c_and_k_pe_cache.shape[2] == LATENT + ROPE, "the cache")
    _misread(q_nope.shape[2] == LATENT and q_pe.shape[2] == ROPE, "queries of other than 512 and 64")
    _misread(q_nope.stride(2) == q_pe.stride(2) == 1, "queries whose last stride is not 1")
    _misread(heads == HEADS and q_pe.shape[1] == HEADS, f"{heads} heads: 128 are read at their stride")
    # 4c2b01d takes the cache for contiguous, 0f5257e reads its strides: only what both read alike.
    _misread(kv_c_and_k_pe_cache.is_contiguous(), "a cache that is not contiguous")
    # kernel can_implement: a status that CUTLASS_CHECK raises.
    possible = page_size <= TILE and page_size & (page_size - 1) == 0
    if not possible or page_table.shape[1] * page_size <= 0 or batch == 0:
        raise RuntimeError(f"Error Invalid Problem (pages of {page_size}, batch {batch})")
    if num_kv_splits > 1 and batch > 1:
        raise NotImplementedError("the double does not cover splits by hand, under which a batch may hang")
    align = 16 // q_nope.element_size()
    for what, tensor in (("q_nope", q_nope), ("q_pe", q_pe)):
        aligned = tensor.stride(0) % align == 0 and tensor.stride(1) % align == 0
        _misread(aligned and tensor.data_ptr() % 16 == 0, f"{what} is not aligned to 16 bytes")
    splits = _splits(page_table.shape[1] * page_size, batch, SMS, num_kv_splits)
    if splits > 1:
        held = workspace.untyped_storage().nbytes() - workspace.storage_offset()
        _fault(_workspace(splits, batch) <= held, f"a workspace of {held} bytes for {splits} splits")
    lengths = _at(seq_lens, "seq_lens", (batch,), (1,)).tolist()
    width = page_table.shape[1]
    table = _at(page_table, "page_table", (batch, width), (width, 1)).flatten().tolist()
    outputs = _at(out, "out", (batch, HEADS, LATENT), (HEADS * LATENT, LATENT, 1))
    sums = _at(lse, "lse", (batch, HEADS), (HEADS, 1)) if lse.numel() else None
    for b, length in enumerate(lengths):
        tiles = -(-length // TILE)
        if tiles <= 0:
            continue
        first, count = b * width, tiles * (TILE // page_size)
        _fault(first + count <= len(table), "the page table is read by tiles of 128 slots")
        ids = table[first : first + count]
        _fault(all(0 <= i < pages for i in ids), "a page of the last tile that is not in the cache")
        slots = kv_c_and_k_pe_cache[ids].flatten(0, 1).float()
        query = torch.cat((q_nope[b], q_pe[b]), -1).float()
        scores = query @ slots.T
        scores[:, length:] = -torch.inf
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scale * (scores - top))
        total = weights.sum(-1, keepdim=True)
        outputs[b] = (weights @ slots[:, :LATENT] / total).to(out.dtype)
        if sums is not None:
            sums[b] = (total.log() + scale * top)[:, 0]
    return out
