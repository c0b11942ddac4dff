"""What the rows of several libraries share: arguments by the libraries' names, layouts of the paged cache
(page lists, page tables, copies without NaN), and the query in FP8.

Rows give the cache with a dimension for its one head as kv[:, :, None] [pages, page, 1, 576], the cache in
smaller pages as kv.view(-1, page, 576), and the query tokens of all sequences one after the other as `packed`
[batch * q, heads, 576]. Page lists and tables are stationary: they follow from the page table and the
lengths, and are made before timing."""

from __future__ import annotations

import itertools
import math
from typing import Any

from kernels.attention import BYTES, arguments_of
from kernels.binding import Function
from kernels.lazy import torch
from kernels.mla_decode.operands import LATENT, ROPE, WIDTH, MlaDecodeOperands, MlaDecodeSizes
from kernels.op import Call, Prepared, sequence

HOPPER_UNITS = 132  # compute units (streaming multiprocessors) of an H100 or H200
MOST_UNITS = 304  # compute units of an MI300X, which has the most of all devices; for plans of memory
SLACK = 256  # entries in memory behind the end of a page list, because kernels fetch whole blocks of it


def bound(
    function: Function, o: MlaDecodeOperands, out: torch.Tensor | None = None, /, **further: Any
) -> Call:
    """The call of a library's function with the arguments below that it declares, and with `further` ones,
    which take precedence. q and the output are packed: [batch * q, heads, width]."""
    by_names = {  # a key holds all names that libraries have for its value
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
        "qk_rope_head_dim head_dim_kpe headdim": ROPE,  # FlashAttention's heads are the rope part of q
        "page_size": o.page,
        "q_data_type qkv_dtype": o.q.dtype,
        "kv_data_type": o.kv.dtype,
        "k_scale v_scale kv_scale": o.kv_scale,
    }
    return function.bind(**arguments_of(function, by_names) | further)


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


def one_token_sequences(operands: MlaDecodeOperands) -> tuple[torch.Tensor, torch.Tensor]:
    """The page table [batch * q, max_pages + 1] and lengths [batch * q], int32, for a kernel that takes one
    query token of each sequence: each query token is made a sequence, which ends at the token's own key. They
    are in the order of `packed`."""
    queries = operands.q.shape[1]
    if queries == 1:
        return operands.page_table, operands.lengths
    shortened_by = torch.arange(queries - 1, -1, -1, dtype=torch.int32, device=operands.q.device)
    lengths = operands.lengths[:, None] - shortened_by
    return operands.page_table.repeat_interleave(queries, 0), lengths.flatten()


def page_list(operands: MlaDecodeOperands, page: int, least_entries: int = 0) -> torch.Tensor:
    """The page numbers of all sequences one after the other, int32 [entries].

    page: tokens of a page, which divide the cache's own
    least_entries: a shorter list is filled up to so many entries with the first sequence's first page"""
    table = operands.split_pages(page)
    pages = [row[:count] for row, count in zip(table, page_counts(operands, page), strict=True)]
    missing = max(0, least_entries - sum(map(len, pages)))
    with_slack = torch.cat([*pages, table[0, :1].expand(missing + SLACK)])
    return with_slack[:-SLACK]


def finite_table(o: MlaDecodeOperands, page: int, multiple: int = 1, *, min_tokens: int = 0) -> torch.Tensor:
    """A page table without the page of NaN: int32 [batch, width]. The width has room for the longest sequence
    and for `min_tokens`, and is rounded up to a multiple. Unused places repeat the sequence's first page.
    page: tokens of a page, which divide the cache's own"""
    table, counts = o.split_pages(page), page_counts(o, page)
    width = math.ceil(max(*counts, math.ceil(min_tokens / page)) / multiple) * multiple
    table = torch.nn.functional.pad(table, (0, max(0, width - table.shape[1])))[:, :width]
    is_used = torch.arange(width, device=table.device) < torch.tensor(counts, device=table.device)[:, None]
    return torch.where(is_used, table, table[:, :1]).contiguous()


def latent_and_rope(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both parts of q or of the cache [..., 576]: views [..., 512] and [..., 64]."""
    return tensor[..., :LATENT], tensor[..., LATENT:]


def partial_bytes(rows: int) -> int:
    """The bytes of partial results in fp32: 512 values and the logarithm of a sum for each row."""
    return rows * (LATENT + 1) * 4


def cache_bytes(sizes: MlaDecodeSizes) -> int:
    """The bytes of a FiniteCache: those of the copy, and a page for the list of unused slots."""
    return (sizes.cache_pages + 1) * sizes.page * WIDTH * BYTES[sizes.kv]


class FiniteCache:
    """A copy of the cache, `kv`, with zeros for NaN in unused slots: for kernels that multiply whole pages by
    weights that a mask made 0. Engines give them pools in which every page is finite."""

    def __init__(self, operands: MlaDecodeOperands) -> None:
        self.operands = operands
        self.kv, self.unused_slots = operands.kv.clone(), operands.unused_slots()
        self.clear()

    def clear(self) -> None:
        # As bytes, because indexing does not take FP8: all bits of a zero are 0.
        self.kv.view(torch.uint8).flatten(0, 1).index_fill_(0, self.unused_slots, 0)

    def prepared(self, out: torch.Tensor | None, call: Call, result: Any = None, q: Any = None) -> Prepared:
        """A call that reads this copy. result: as in Prepared; q: where the call reads q, if not in o.q"""
        inputs = {"q": self.operands.q if q is None else q, "kv": self.kv}
        return Prepared(self.operands, out, call, inputs=inputs, after_load=self.clear, result=result)


def query_buffer(operands: MlaDecodeOperands) -> torch.Tensor:
    """The query for a kernel that takes q in the cache's dtype: q itself, or on an FP8 cache an empty buffer
    in the cache's format, which `rounding_q` fills."""
    return torch.empty_like(operands.q, dtype=operands.kv.dtype) if operands.is_fp8 else operands.q


def rounding_q(operands: MlaDecodeOperands, query: torch.Tensor, decode: Call) -> Call:
    """A call that rounds q into `query`, if that is not q itself, and then calls `decode`. Engines fuse this
    rounding into the kernel before."""
    return decode if query is operands.q else sequence(lambda: query.copy_(operands.q), decode)
