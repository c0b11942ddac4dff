"""The assembly MLA decode kernels (csrc/py_itfs_cu/asm_mla.cu), over the memory that they are pointed at.

The kernels are binaries: what they read is what their arguments say (`KernelArgs`) and what AITER's own
reference does with the same arrays (op_tests/test_mla_persistent.py, torch_mla_split_kv).
"""

from __future__ import annotations

import torch

from ..jit.utils.chip_info import get_gfx
from ..utility import dtypes
from .asm_kernels import granule, kernel
from .softmax import attend
from .strict import check, doubled, indices, scalar, sure

HEAD, VALUE = 576, 512  # every decode kernel is built for 512 + 64 and writes 512


def letter(dtype: torch.dtype) -> str:
    return {dtypes.bf16: "bf16", dtypes.fp8: "fp8"}.get(dtype, str(dtype))


class Cache:
    """The paged cache as a kernel sees it: a base, one stride per page (s_Bs) and log2 of the page size."""

    def __init__(self, kv, page_size, kv_indptr, kv_indices, kv_last_page_lens, batch):
        sure(
            page_size > 0 and page_size & (page_size - 1) == 0, f"page_size={page_size} is passed as its log2"
        )
        self.kv, self.page_size = kv, page_size
        self.indptr = indices("kv_indptr", kv_indptr, batch + 1)
        self.pages = indices("kv_indices", kv_indices)
        self.last = indices("kv_last_page_lens", kv_last_page_lens, batch)

    def rows(self, first: int, skip: int, tokens: int) -> torch.Tensor:
        """fp32 [tokens, 576]: those behind the first `skip` slots of the page of entry `first`, a slot
        being 576 elements, and on through the entries that follow."""
        slots = torch.arange(skip, skip + tokens)
        entries = [first + slot // self.page_size for slot in slots.tolist()]
        known = not entries or (entries[0] >= 0 and entries[-1] < len(self.pages))
        sure(
            known, f"kv_indices has {len(self.pages)} entries, [{first}, {entries and entries[-1]}] are read"
        )
        pages = torch.tensor([self.pages[e] for e in entries], dtype=torch.int64)
        outside = tokens and not (0 <= int(pages.min()) and int(pages.max()) < self.kv.shape[0])
        sure(not outside, f"kv_indices names a page outside the {self.kv.shape[0]} of the cache")
        at = pages * self.kv.stride(0) + slots % self.page_size * HEAD
        size = self.kv.untyped_storage().nbytes() // self.kv.element_size() - self.kv.storage_offset()
        sure(not tokens or int(at.max()) + HEAD <= size, "the slots of a page lie outside the cache")
        raw = self.kv.as_strided((size,), (1,)).view(
            torch.int16 if self.kv.element_size() == 2 else torch.uint8
        )
        return raw[at[:, None] + torch.arange(HEAD)].view(self.kv.dtype).float()

    def masked(self) -> torch.Tensor:
        """fp32 [512]: what a masked position of a persistent kernel adds, row 0 of the cache times p = 0.

        A NaN or an infinity there spreads to every request, which is why sglang 0.5.23 zeroes the row before
        each persistent call (layers/attention/aiter_backend.py:1468-1473). Which works have masked positions
        is in the binary: here all have.
        """
        return 0.0 * self.kv[0, 0, 0, :VALUE].float()

    def length(self, sequence: int) -> int:
        pages = self.indptr[sequence + 1] - self.indptr[sequence]
        return (pages - 1) * self.page_size + self.last[sequence] if pages > 0 else 0


def stage1(q, kv, qo_indptr, cache_arrays, splits, work, qlen, page_size, nhead_kv, scale, partial, output,
           lse,
           scales, causal, look_up=kernel, step_of=granule):  # fmt: skip
    """Checks as asm_mla.cu does, then runs the kernel: persistent where no split counts are given. `look_up`
    and `step_of` are a version's own table of kernels and granule of splits."""
    split_data, split_lse = partial
    batch = qo_indptr.shape[0] - 1
    persistent = splits is None  # asm_mla.cu: `num_kv_splits_indptr == nullptr`
    check(q.is_contiguous(), "mla_decode_stage1_asm_fwd:only support Q.is_contiguous() for now")
    check(nhead_kv == 1, "mla_decode_stage1_asm_fwd:only support num_kv_heads==1 for now")
    doubled(kv.dtype not in (torch.uint8, torch.int8), "the byte cache of three buffers")
    check(kv.dim() == 4 and q.shape[2] == kv.shape[3], "only support head_size == KV.size(3) for now")
    sure(q.shape[2] == HEAD and output.shape[2] == VALUE, f"the kernels are built for {HEAD} and {VALUE}")
    sure(kv.shape[2] == 1 and kv.stride(3) == 1, "a row of the cache is read as 576 neighbours")
    sure(output.shape[:2] == q.shape[:2], "q and o differ in tokens or heads")
    kinds = letter(q.dtype), letter(kv.dtype)
    for name, kind in zip(["Q", "KV"], kinds, strict=True):
        check(kind in ("bf16", "fp8"), f"mla_decode_stage1_asm_fwd: unsupport {name} dtype:{kind}")
    q_scale, kv_scale = scales
    if kinds[0] == "fp8":
        check(q_scale is not None and kv_scale is not None, "fp8 Q requires q_scale and kv_scale")
    q_times = scalar("q_scale", q_scale) if kinds[0] == "fp8" else 1.0
    kv_times = scalar("kv_scale", kv_scale) if kinds[1] == "fp8" else 1.0  # bf16 over bf16 reads neither
    found = look_up(get_gfx(), *kinds, q.shape[1], qlen, persistent, causal, lse is not None)

    cache = Cache(kv, page_size, *cache_arrays, batch)
    queries = indices("qo_indptr", qo_indptr, batch + 1)
    wide = q.float()

    def part(rows, first, skip, tokens, offset, end):
        """Rows of q over tokens of the cache; `offset` tokens follow them, `end` is behind the last query."""
        keys = cache.rows(first, skip, tokens)
        seen = torch.ones(len(rows), tokens, dtype=torch.bool)
        if found.masks:
            behind_key = offset + tokens - 1 - torch.arange(tokens)
            behind_query = torch.tensor([end - 1 - row for row in rows])
            seen = behind_key[None, :] >= behind_query[:, None]
        out, lse = attend(wide[rows], keys, keys[..., :VALUE], scale * q_times * kv_times, seen)
        return out * kv_times, lse

    if persistent:
        _persistent(q, cache, queries, batch, work, qlen, partial, output, lse, part)
    else:
        split_lse = split_lse[..., 0]
        step = step_of(q.shape[1], qlen, *kinds)
        ends = indices("num_kv_splits_indptr", splits, batch + 1)
        for b in range(batch):
            rows = list(range(queries[b], queries[b + 1]))
            sure(
                len(rows) == qlen,
                f"sequence {b} has {len(rows)} query tokens; Q's stride is that of {qlen} each",
            )
            sure(0 <= queries[b] and queries[b + 1] <= q.shape[0], "qo_indptr leads outside q")
            count, blocks = ends[b + 1] - ends[b], -(-cache.length(b) // step)
            sure(0 < count <= split_data.shape[1], f"num_kv_splits_indptr gives sequence {b} {count} splits")
            used = min(count, blocks)
            for s in range(used):
                low, high = (min(blocks * (s + i) // used * step, cache.length(b)) for i in (0, 1))
                first = cache.indptr[b] + low // page_size
                rest = cache.length(b) - high
                out, found_lse = part(rows, first, low % page_size, high - low, rest, queries[b + 1])
                if split_data.shape[1] > 1:
                    split_data[rows, s], split_lse[rows, s] = out, found_lse
                else:
                    _whole(split_data, split_lse, output, lse, rows, out, found_lse, kinds, qlen)


def _whole(split_data, split_lse, output, lse, rows, out, found_lse, kinds, qlen):
    """One split. The kernel writes bf16 (`out_16_nosplit`), into o itself where mla.py passed a view;
    only
    the 16-head single-token kernel keeps fp32 for stage 2 (mla.py MAYBE_FINAL_OUT)."""
    if split_data.dtype == torch.bfloat16:
        split_data[rows, 0] = out.bfloat16()
    elif split_data.shape[2] in (8, 16) and qlen == 1:
        split_data[rows, 0], split_lse[rows, 0] = out, found_lse
    else:
        packed = split_data.view(-1).view(torch.bfloat16)[: output.numel()].view(output.shape)
        packed[rows] = out.bfloat16()
    if kinds[0] != "fp8":  # vllm/_aiter_ops.py: one-split FP8 writes neither LSE
        split_lse[rows, 0] = found_lse
        if lse is not None:
            lse[rows] = found_lse


def _persistent(q, cache, queries, batch, work, qlen, partial, output, lse, part):
    meta, work_indptr, work_info = work
    split_data, split_lse = partial
    sure(
        work_indptr is not None and work_info is not None, "the grid is work_indptr's, None is a null pointer"
    )
    sure(meta.dtype == torch.uint64 and meta.numel() >= 2, "work_meta_data holds two 64-bit pointers")
    # asm_mla.cu: ptr_STP = work_meta_data; the kernel follows the pointers that the planner left there
    pointers = [work_indptr.data_ptr(), work_info.data_ptr()]
    sure(
        meta.view(torch.int64).tolist()[:2] == pointers,
        "work_meta_data points at other buffers than those given",
    )
    sure(output.dtype == torch.bfloat16 and output.is_contiguous(), "the kernel writes o as packed bf16")
    starts = indices("work_indptr", work_indptr)
    sure(
        work_info.dtype == torch.int32 and work_info.is_contiguous(), "work_info_set is read as packed int32"
    )
    works = work_info.view(-1, 8).tolist()
    heads_folded = q.shape[0] // max(queries[batch], 1)  # mla.py folds heads into rows: batches times as many
    for w in (w for cu in range(len(starts) - 1) for w in range(starts[cu], starts[cu + 1])):
        sure(0 <= w < len(works), f"work {w} lies outside work_info_set")
        b, loc, q_start, q_end, kv_start, kv_end, offset, _ = works[w]
        sequence = b // heads_folded if heads_folded > 1 else b
        sure(0 <= sequence < batch, f"work {w} is of sequence {sequence}, there are {batch}")
        sure(0 <= q_start < q_end <= q.shape[0], f"work {w} is of query rows [{q_start}, {q_end}) outside q")
        sure(q_end - q_start <= qlen, f"work {w} has more than max_seqlen_q={qlen} query tokens")
        tokens = (kv_end - kv_start) * cache.page_size
        if offset == 0:  # the last page of the sequence
            tokens += cache.last[sequence] - cache.page_size
        end = (b + 1) * qlen if heads_folded > 1 else queries[sequence + 1]
        rows = list(range(q_start, q_end))
        out, found_lse = part(rows, kv_start, 0, max(tokens, 0), offset, end)
        out = out + cache.masked()
        if loc == -1:
            output[rows] = out.bfloat16()
            if lse is not None:
                lse[rows] = found_lse
        else:
            sure(
                0 <= loc and loc + len(rows) <= split_data.shape[0],
                f"work {w} writes outside the partial buffer",
            )
            split_data[loc : loc + len(rows), 0] = out
            split_lse[loc : loc + len(rows), 0, :, 0] = found_lse
