"""What several libraries ask for: the operands by the names that they have there, layouts of the paged cache
(page lists, padded tables, finite copies), and the query in FP8. Where a library wants one head of the cache,
a row gives it kv[:, :, None] [pages, page, 1, 576]; where it wants the query tokens of all sequences one
after the other, `packed` [batch * q, heads, 576]; and for smaller pages kv.view(-1, page, 576).

Layouts of the cache are stationary: they follow from the page table and the lengths, and are made before
timing.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from kernels.attention import BYTES, needed
from kernels.binding import Function
from kernels.lazy import torch
from kernels.mla_decode.operands import LATENT, ROPE, WIDTH, MlaDecodeOperands, MlaDecodeSizes
from kernels.op import Call, Prepared, sequence

HOPPER_UNITS = 132  # compute units of an H100 or H200
MOST_UNITS = 304  # an MI300X has the most units of all devices; used in plans of memory

SLACK = 256  # entries in memory behind the end of a list, because kernels fetch whole blocks of it


def bound(
    function: Function, o: MlaDecodeOperands, out: torch.Tensor | None = None, /, **further: Any
) -> Call:
    """The call of a library's function with the operands that it needs, and with further arguments, which
    replace those below. q and the output are packed: [batch * q, heads, width]."""
    usual = {
        "q q_extend": o.packed,
        "out o o_extend": None if out is None else out.flatten(0, 1),
        "softmax_scale sm_scale": o.scale,
        "cache_seqlens seqused_k b_seq_len kv_len_arr seq_lens": o.lengths,
        "cu_seqlens_q qo_indptr": query_starts(o),
        "max_seqlen_q max_len_extend": o.q.shape[1],
        "causal": o.q.shape[1] > 1,
        "num_heads_kv": 1,
        "max_seq_len": o.sizes.model_len,
        "batch_size": len(o.q),
        "num_heads num_heads_q": o.heads,
        "kv_lora_rank head_dim_ckv head_dim_v headdim_v": LATENT,
        "qk_rope_head_dim head_dim_kpe headdim": ROPE,
        "page_size": o.page,
        "q_data_type qkv_dtype": o.q.dtype,
        "kv_data_type": o.kv.dtype,
        "k_scale v_scale kv_scale": o.kv_scale,
    }
    return function.bind(**needed(function, usual) | further)


def compute_units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def page_counts(operands: MlaDecodeOperands, page: int) -> list[int]:
    return [math.ceil(length / page) for length in operands.host_lengths]


def query_starts(operands: MlaDecodeOperands) -> torch.Tensor:
    """Where the query tokens of each sequence begin in `packed`: int32 [batch + 1]."""
    batch, queries = operands.q.shape[:2]
    return torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=operands.q.device)


def page_starts(operands: MlaDecodeOperands, page: int) -> torch.Tensor:
    """Where each sequence begins in `page_list`: int32 [batch + 1]. page: tokens of a page"""
    starts = [0, *itertools.accumulate(page_counts(operands, page))]
    return torch.tensor(starts, dtype=torch.int32, device=operands.q.device)


def flattened(operands: MlaDecodeOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """For a kernel of one query token: the page table and the lengths with a row for each query token, in the
    order of `packed`, int32 [batch * q, max_pages + 1] and [batch * q]. A length ends at the token's key."""
    queries = operands.q.shape[1]
    if queries == 1:
        return operands.page_table, operands.lengths
    ends = torch.arange(1 - queries, 1, dtype=torch.int32, device=operands.q.device)
    return operands.page_table.repeat_interleave(queries, 0), (operands.lengths[:, None] + ends).flatten()


def page_list(operands: MlaDecodeOperands, page: int, least: int = 0) -> torch.Tensor:
    """The page numbers of all sequences one after the other, int32 [pages]. page: tokens of a page, which
    divide the cache's own. The first page number fills the list up to `least` entries, and SLACK further ones
    in memory."""
    table = operands.split_pages(page)
    pages = [row[:count] for row, count in zip(table, page_counts(operands, page), strict=True)]
    missing = max(0, least - sum(map(len, pages)))
    listed = torch.cat([*pages, table[0, :1].expand(missing + SLACK)])
    return listed[:-SLACK]


def full_pages(operands: MlaDecodeOperands, page: int, multiple: int = 1, *, tokens: int = 0) -> torch.Tensor:
    """A page table without the page of NaN: int32 [batch, width]. The width is that of the longest sequence,
    or of so many tokens, rounded up to a multiple. Unused places repeat the sequence's first page."""
    table, counts = operands.split_pages(page), page_counts(operands, page)
    width = math.ceil(max(*counts, math.ceil(tokens / page)) / multiple) * multiple
    table = torch.nn.functional.pad(table, (0, max(0, width - table.shape[1])))[:, :width]
    used = torch.arange(width, device=table.device) < torch.tensor(counts, device=table.device)[:, None]
    return torch.where(used, table, table[:, :1]).contiguous()


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and the rope part of q or of the cache [..., 576]: views [..., 512] and [..., 64]."""
    return tensor[..., :LATENT], tensor[..., LATENT:]


def partial_bytes(rows: int) -> int:
    """The bytes of partial results in fp32: 512 values and the logarithm of a sum for each row."""
    return rows * (LATENT + 1) * 4


def cache_bytes(sizes: MlaDecodeSizes) -> int:
    """The bytes of a copy of the cache, to within a page."""
    return (sizes.used_pages + 4) * sizes.page * WIDTH * BYTES[sizes.kv]


class FiniteCache:
    """A copy of the cache, `kv`, with zeros for NaN in unused slots: for kernels that multiply whole pages by
    weights that a mask made 0. Engines give them pools in which every page is finite."""

    def __init__(self, operands: MlaDecodeOperands) -> None:
        self.operands = operands
        self.kv, self.unused = operands.kv.clone(), operands.unused_slots()
        self.clear()

    def clear(self) -> None:
        # As bytes, because indexing does not take FP8: all bits of a zero are 0.
        self.kv.view(torch.uint8).flatten(0, 1).index_fill_(0, self.unused, 0)

    def prepared(self, out: torch.Tensor | None, call: Call, result: Any = None) -> Prepared:
        """A call that reads this copy. result: as in Prepared"""
        inputs = {"q": self.operands.q, "kv": self.kv}
        return Prepared(self.operands, out, call, inputs=inputs, after_load=self.clear, result=result)


def query_buffer(operands: MlaDecodeOperands) -> torch.Tensor:
    """The query for a kernel that takes q in the cache's dtype: q itself, or on an FP8 cache a buffer in the
    cache's format, which `after_query` fills."""
    return torch.empty_like(operands.q, dtype=operands.kv.dtype) if operands.is_fp8 else operands.q


def after_query(operands: MlaDecodeOperands, query: torch.Tensor, decode: Call) -> Call:
    """A call that first rounds q into that buffer, then decodes."""
    return decode if query is operands.q else sequence(lambda: query.copy_(operands.q), decode)
