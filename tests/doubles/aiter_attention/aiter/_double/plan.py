"""The planners of persistent MLA decode: csrc/kernels/mla/metadata/v1_2_device.cuh and v1_0_device.cuh.

Both fill the caller's buffers in place. What they leave unwritten stays as it was.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..jit.core import is_experimental_enabled
from ..jit.utils.chip_info import get_cu_num, get_gfx
from .strict import check, doubled, indices, sure


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Buffers:
    """The six buffers; a write behind the end of one raises where the device writes on."""

    _NAMES = ("work_info_set", "work_indptr", "reduce_indptr", "reduce_final_map", "reduce_partial_map")

    def __init__(self, meta: torch.Tensor, *buffers: torch.Tensor):
        sure(meta.dtype == torch.uint64 and meta.numel() >= 2, "work_metadata_ptrs holds two 64-bit pointers")
        self._flat = {}
        for name, buffer in zip(self._NAMES, buffers, strict=True):
            sure(buffer.dtype == torch.int32 and buffer.is_contiguous(), f"{name} is written as packed int32")
            self._flat[name] = buffer.view(-1)
        self.reduce_size = buffers[2].shape[0]
        pointers = [self._flat[name].data_ptr() for name in ("work_indptr", "work_info_set")]
        meta.view(-1).view(torch.int64)[:2] = torch.tensor(pointers)

    def put(self, name: str, at: int, *values: int) -> None:
        flat = self._flat[name]
        sure(
            at >= 0 and at + len(values) <= flat.numel(),
            f"{name}[{at}] lies behind its {flat.numel()} entries",
        )
        flat[at : at + len(values)] = torch.tensor(values, dtype=torch.int32)

    def work(self, at: int, batch, loc, q_start, q_end, kv_start, kv_end, kv_offset) -> None:
        # MlaWorkInfo: batch_idx, partial_qo_loc, qo_start, qo_end, kv_start, kv_end, kv_offset, padding
        self.put("work_info_set", at * 8, batch, loc, q_start, q_end, kv_start, kv_end, kv_offset, 0)


@dataclass
class Problem:
    queries: list[int]  # seqlens_qo_indptr
    keys: list[int]  # seqlens_kv_indptr: pages
    last: list[int]  # kv_last_page_lens
    batches: int  # times `ratio` where heads are folded into batches of 16
    heads: int
    ratio: int
    qlen: int  # max_seqlen_qo
    uniform: int  # uni_seqlen_qo
    page: int
    step: int  # kv_granularity, in pages
    causal: bool
    clusters: int
    splits: int
    per_group: int = 128  # kPackedQoLenPerWg

    def query_range(self, batch: int) -> tuple[int, int]:
        """v1_comm.cuh QoState: a uniform length, where one is given, else seqlens_qo_indptr."""
        if self.uniform > 0:
            return self.uniform * batch, self.uniform * (batch + 1)
        sure(batch + 1 < len(self.queries), "heads folded into batches read seqlens_qo_indptr behind its end")
        return self.queries[batch], self.queries[batch + 1]

    def key_count(self, batch: int) -> int:
        batch //= self.ratio
        return self.keys[batch + 1] - self.keys[batch]


def v1_2(arrays, heads, causal, page, step, qlen, uniform, topk, max_splits, fp8, buffers: Buffers) -> None:
    """v1_2_device.cuh get_mla_metadata_v1_2_device; `fp8` is (q, kv)."""
    doubled(topk < 0, "sparse attention (topk)")
    doubled(not is_experimental_enabled(), "AITER_ENABLE_EXPERIMENTAL")
    arch, both, none = get_gfx(), all(fp8), not any(fp8)
    native = (
        heads == 16
        or (heads == 64 and both and qlen == 1)
        or (arch == "gfx950" and none)
        or (arch == "gfx942" and heads == 128 and both)
        or (arch == "gfx950" and both and heads in (32, 64, 128))
    )
    ratio = heads // 16 if not native and heads % 16 == 0 else 1
    heads_of_group, heads = heads, 16 if ratio > 1 else heads
    known = native or heads in (16, 128) or (heads == 8 and (
        (arch == "gfx950" and qlen == 4 and both) or (arch == "gfx942" and qlen == 2 and none)
    ))  # fmt: skip
    check(known, "get_mla_metadata_v1_2_device:"
          " only supports #heads in [16, 64, 128], or (#head, uni_seqlen_qo)"
          " = (16*N, 1) where N is in [2, 8)")  # fmt: skip
    p = problem(arrays, heads, ratio, qlen, uniform, page, step, causal)
    p.splits = p.clusters if max_splits < 0 else min(p.clusters, max_splits * p.batches)
    packed = heads * qlen
    if (arch == "gfx950" and none and packed >= 64 and heads <= 64 and (packed < 128 or heads == 48)) or (
        arch == "gfx950" and both and heads == 32 and qlen == 3
    ):
        p.per_group = 64
    split_queries = not 0 < qlen * heads_of_group <= p.per_group  # MLA_METADATA_DISPATCHER

    overhead = max(1, cdiv(16, page))  # fixed_over_head_num_blocks

    def tiles(batch: int) -> int:  # mla_v12_num_qo_tiles
        if not split_queries:
            return 1
        low, high = p.query_range(batch)
        return high - low if p.heads * 2 > p.per_group else cdiv((high - low) * p.heads, p.per_group)

    total = sum((cdiv(p.key_count(b), step) + overhead) * tiles(b) for b in range(p.batches))
    payload = cdiv(total, p.splits) + overhead
    buffers.put("reduce_indptr", 0, 0)
    buffers.put("work_indptr", 0, 0)
    wanted = int(os.environ.get("AITER_MLA_META_USE_PARALLEL", "1")) != 0
    lds = {"gfx942": 65536, "gfx950": 163840}[arch]
    fits = 4 * (3 + (5 if uniform > 0 else 6) * p.batches) <= lds
    if wanted and qlen == 1 and not split_queries and page == 1 and ratio == 1 and fits:
        _parallel(p, payload, overhead, buffers)
    else:
        sequential(p, payload, overhead, tiles, buffers)


def problem(arrays, heads, ratio, qlen, uniform, page, step, causal) -> Problem:
    queries, keys, last = (
        indices(n, a) for n, a in zip(("qo_indptr", "kv_indptr", "last"), arrays, strict=True)
    )
    batch = len(keys) - 1
    sure(
        uniform > 0 or len(queries) > batch,
        f"seqlens_qo_indptr has {len(queries)} entries for {batch} sequences",
    )
    sure(len(last) >= batch or page == 1, f"kv_last_page_lens has {len(last)} entries for {batch} sequences")
    units = get_cu_num()
    return Problem(
        queries, keys, last, batch * ratio, heads, ratio, qlen, uniform, page, step, causal, units, units
    )


def _parallel(p: Problem, payload: int, overhead: int, buffers: Buffers) -> None:
    """kn_get_mla_metadata_v1_2_parallel: one query token, page 1."""
    per_cu = payload - overhead
    cu, remain, works, reduces, partial = 0, payload, 0, 0, 0
    ends, todo = {}, []
    for batch in range(p.batches):
        begin, end = (p.keys[batch + i] - p.keys[0] for i in (0, 1))
        blocks = cdiv(end - begin, p.step)
        low, high = p.query_range(batch)
        if blocks + overhead <= remain:
            cuts = [0, blocks]
            homes = [cu]
            remain -= blocks + overhead
        else:
            first = remain - overhead if remain > overhead else 0
            if not first:
                ends[cu + 1] = works  # a compute unit is left as it is
            cuts = (
                [0]
                + ([first] if first else [])
                + [*range(first + per_cu, blocks, per_cu), blocks][: blocks or 0]
            )
            homes = list(range(cu, cu + len(cuts))) if first else list(range(cu + 1, cu + len(cuts)))
            fresh = cdiv(blocks - first, per_cu)
            cu += fresh
            remain = payload - (blocks - first - (fresh - 1) * per_cu + overhead)
        frags = len(cuts) - 1
        for i in range(frags):
            kv_end = min(begin + cuts[i + 1] * p.step, end)
            loc = partial + i * (high - low) if frags > 1 else -1
            work = (batch, loc, low, high, begin + cuts[i] * p.step, kv_end, end - kv_end)
            todo.append((works + i, work))
            if frags > 1:
                buffers.put("reduce_partial_map", reduces + i, loc)
            if i < frags - 1:
                ends[homes[i] + 1] = works + i + 1
        works += frags
        if frags > 1:
            reduces += frags
            partial += frags * (high - low)
            buffers.put("reduce_final_map", batch * 2, low, high)
        buffers.put("reduce_indptr", batch + 1, reduces)
    for at, work in todo:
        buffers.work(at, *work)
    for unit in range(1, p.clusters + 1):
        buffers.put("work_indptr", unit, ends.get(unit, works))
    for at in range(p.batches, buffers.reduce_size):
        buffers.put("reduce_indptr", at, reduces)


def sequential(p: Problem, payload: int, overhead: int, tiles, buffers: Buffers) -> None:
    """kn_get_mla_metadata_v1_2, dense."""
    batch = block = split = tile = head = 0
    begin, end = 0, p.key_count(0)
    works = partial = done_tiles = reduces = 0
    tail_done = False

    def work_of(blocks: int, size: int, closing: bool):
        nonlocal tail_done
        low, high = p.query_range(batch)
        q_start = low + tile * size
        q_end, kv_start = min(q_start + size, high), begin + block * p.step
        if p.page == 1:
            tail = tiles(batch) - 1 - tile
            if p.ratio != 1:
                modulus = q_start // p.ratio % p.uniform if p.uniform > 0 else 0
                tail = tiles(batch) - modulus - 1
            tail = max(tail, 0) if p.causal else 0
            kv_end = min(kv_start + blocks * p.step, end - tail)
            near = end - kv_end < p.qlen  # tail_done_threshold
            if closing and ((near and end - kv_end > 0) or tail_done):
                kv_end = end - tail
            elif not closing and near:
                tail_done, kv_end = True, end - tail
            offset = end - kv_end
        else:
            kv_end = min(kv_start + blocks * p.step, end)
            offset = 0
            if end > kv_end:
                sure(batch < len(p.last), "heads folded into batches read kv_last_page_lens behind its end")
                offset = (end - kv_end - 1) * p.page + p.last[batch]
        return q_start, q_end, kv_start, kv_end, offset

    for cu in range(p.clusters):
        remain = payload
        while batch < p.batches:
            low, high = p.query_range(batch)
            size = cdiv(high - low, tiles(batch))
            left = cdiv(end - begin, p.step) - block
            if remain >= left + overhead or tail_done:
                work = work_of(left, size, closing=True)
                if split:
                    for i in range(split + 1):
                        buffers.put("reduce_partial_map", reduces + i, partial - (split - i) * size)
                    buffers.put("reduce_final_map", done_tiles * 2, *work[:2])
                    buffers.work(works, batch, partial, *work)
                    reduces += split + 1
                    partial += size
                else:
                    buffers.work(works, batch, -1, *work)
                buffers.put("reduce_indptr", done_tiles + 1, reduces)
                done_tiles += 1
                works += 1
                remain -= left + overhead
                tile = 0 if tile == tiles(batch) - 1 else tile + 1
                if tile == 0:
                    batch += 1
                    head = 0 if head == p.ratio - 1 else head + 1
                    if batch < p.batches and head == 0:
                        begin, end = end, end + p.key_count(batch)
                block = split = 0
                tail_done = False
            elif remain > overhead:
                work = work_of(remain - overhead, size, closing=False)
                if not tail_done:
                    buffers.work(works, batch, partial, *work)
                    partial += size
                    works += 1
                    block += remain - overhead
                    split += 1
                    break
            else:
                break
        buffers.put("work_indptr", cu + 1, works)
    for at in range(done_tiles, buffers.reduce_size):
        buffers.put("reduce_indptr", at, reduces)


def v1_0(arrays, heads, step, uniform, max_splits, buffers: Buffers) -> None:
    """v1_0_device.cuh: the same number of splits for every sequence (intra_batch_mode, as SGLang plans)."""
    arch = get_gfx()
    ratio = heads // 16 if heads not in (16, 128) and heads % 16 == 0 and heads < 128 else 1
    heads = 16 if ratio > 1 else heads
    check(heads in (16, 128), "get_mla_metadata_v1_0_device: only supports #heads in [16, 128], or 16*N")
    sure(uniform > 0, "the planner multiplies by uni_seqlen_qo")
    if heads == 128:
        doubled(uniform == 1, "128 heads and more than one query token in intra_batch_mode")
        ratio = uniform
    p = problem(arrays, heads, ratio, uniform, uniform, 1, step, False)
    per_batch = cdiv(p.clusters, p.batches)
    works, todo, reduce_ends = 0, [], [0]
    for batch in range(p.batches):
        begin = p.keys[batch // ratio] if batch // ratio else 0  # p_lds_kv_seqlen[0] = 0
        end = max(p.keys[batch // ratio + 1], p.keys[batch // ratio] + 1)
        count = end - p.keys[batch // ratio]
        blocks = cdiv(count, step)
        wanted = 16 if arch == "gfx942" else min(count // 196, per_batch, max_splits)  # get_local_splits
        sure(wanted > 0, f"a sequence of {count} tokens gives 0 splits, the planner divides by them")
        share = cdiv(blocks, wanted)
        splits = cdiv(blocks, share)
        if 0 < count % (share * step) <= 4 and splits > 1:
            splits -= 1
        for i in range(splits):
            start = begin + i * share * step
            stop = min(start + share * step, end)
            if end - stop <= 4 and splits > 1:
                stop = end
            loc = -1 if splits == 1 else (works + i) * uniform
            todo.append((batch, loc, batch * uniform, (batch + 1) * uniform, start, stop, end - stop))
            buffers.put("reduce_partial_map", works + i, loc)
        buffers.put("reduce_final_map", batch * 2, batch * uniform, (batch + 1) * uniform)
        works += splits
        reduce_ends.append(works)
    for at, work in enumerate(todo):
        buffers.work(at, *work)
    each, more = divmod(works, p.clusters)
    for unit in range(p.clusters + 1):
        buffers.put("work_indptr", unit, unit * each + min(unit, more))
    for at in range(buffers.reduce_size):
        buffers.put("reduce_indptr", at, reduce_ends[min(at, p.batches)])
