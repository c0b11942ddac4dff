"""Persistent FP8 prefill: planner (csrc/kernels/mla/metadata/v1_2_host.cuh) and kernel (asm_mla.cu)."""

from __future__ import annotations

import math

import torch

from ..jit.utils.chip_info import get_cu_num, get_gfx
from ..utility import dtypes
from .plan import Buffers, cdiv
from .softmax import attend
from .strict import check, indices, scalar, sure


def plan(
    qo_indptr, kv_indptr, context_lens, heads, buffers: Buffers, per_head, per_tile, per_unit, block, causal
):
    """get_ps_metadata_v1_2_host: clusters of compute units share the heads, units of kv are dealt out."""
    queries = indices("seqlens_qo_indptr", qo_indptr)
    batch = len(queries) - 1
    pages, lengths = (
        indices("pages_kv_indptr", kv_indptr, batch + 1),
        indices("context_lens", context_lens, batch),
    )
    sure(per_unit % block == 0, "kn_generate_ps_metadata asserts kvlen_granularity % block_size == 0")
    clusters = math.gcd(heads, get_cu_num())
    groups = get_cu_num() // clusters
    tiles = [
        tile for b in range(batch) for tile in _tiles(b, queries, lengths[b], per_tile, per_unit, causal)
    ]
    each, more = divmod(sum(units for *_, units, _ in tiles), groups)
    works, starts = [], {0: 0}
    for cluster in range(clusters):
        at = part = done = 0  # tile, partial tile, blocks of the tile already given away
        for group in range(groups):
            kept = at, part, done
            for head in range(heads // clusters):
                first = (cluster * (heads // clusters) + head) * per_head
                at, part, done = kept
                room = (each + (group < more)) * per_unit // block
                while at < len(tiles) and room > 0:
                    b, low, high, units, reach = tiles[at]
                    kv_start = pages[b] + done
                    last = reach - done * block <= room * block
                    took = units * per_unit // block - done if last else room
                    loc = -1 if last and not done else per_tile * part
                    part += loc != -1
                    kv_end = min(kv_start + took, pages[b + 1])
                    offset = 0 if last else lengths[b] - (kv_end - pages[b]) * block
                    works.append(
                        (b, loc, low, high, kv_start, kv_end, offset, first | (first + per_head) << 16)
                    )
                    at, done = (at + 1, 0) if last else (at, done + took)
                    room -= took
            starts[cluster * groups + group + 1] = len(works)
    for at, count in starts.items():
        buffers.put("work_indptr", at, count)
    for at, work in enumerate(works):
        buffers.put("work_info_set", at * 8, *work)
    _reduce(works, buffers)


def _tiles(b, queries, length, per_tile, per_unit, causal):
    low, high = queries[b], queries[b + 1]
    cuts = [(start, min(start + per_tile, high)) for start in range(low, high, per_tile)]
    for i in range(len(cuts)):  # from both ends in turn
        start, stop = cuts[i // 2 if i % 2 == 0 else len(cuts) - 1 - i // 2]
        reach = min(length - (high - stop), length) if causal else length
        yield b, start, stop, cdiv(reach, per_unit), reach


def _reduce(works, buffers: Buffers) -> None:
    """generate_reduce_info: a std::map by (qo_start, qo_end) of sets of partial places."""
    groups: dict[tuple[int, int], set[int]] = {}
    for _, loc, low, high, *_ in works:
        if loc != -1:
            groups.setdefault((low, high), set()).add(loc)
    at = 0
    buffers.put("reduce_indptr", 0, 0)
    for i, (place, locs) in enumerate(sorted(groups.items())):
        buffers.put("reduce_final_map", i * 2, *place)
        buffers.put("reduce_partial_map", at, *sorted(locs))
        at += len(locs)
        buffers.put("reduce_indptr", i + 1, at)
    for i in range(len(groups), buffers.reduce_size):
        buffers.put("reduce_indptr", i, at)


def prefill(q, k, v, arrays, works, max_seqlen_q, scale, causal, partial, output, scales) -> None:
    """mla_prefill_ps_asm_fwd: q [T, H, 192], k [pages, H, 192], v [pages, H, 128], all FP8; bf16 out."""
    check(q.dtype == dtypes.fp8, f"mla_prefill_ps_asm_fwd: unsupport Q dtype:{q.dtype}")
    check(k.dtype == dtypes.fp8, f"mla_prefill_ps_asm_fwd: unsupport K dtype:{k.dtype}")
    # asm_mla.cu, though hsa/gfx942/mla/mla_asm.csv has rows for it
    check(
        get_gfx() != "gfx942", "mla_prefill_ps_asm_fwd: fp8 mla persistent prefill is not supported on gfx942"
    )
    check(q.shape[1] == k.shape[1], "get_heuristic_kernel_mla: cannot get heuristic kernel! (Gqa is 1)")
    sure(v.dtype == dtypes.fp8 and v.shape[:2] == k.shape[:2], "V is read as FP8 of K's pages and heads")
    sure((q.shape[2], k.shape[2], v.shape[2]) == (192, 192, 128), "the kernel is mla_pfl_qh192_vh128")
    packed = all(t.is_contiguous() for t in (q, k, v, output, *partial))
    sure(packed, "no stride is passed: q, k, v and the output are read as packed")
    sure(
        output.dtype == torch.bfloat16 and output.shape == (*q.shape[:2], 128),
        "the output is bf16 [T, H, 128]",
    )
    times_q, times_k, times_v = (scalar(f"{n}_scale", s) for n, s in zip("qkv", scales, strict=True))
    queries, pages, entries = (
        indices(n, a) for n, a in zip(("qo_indptr", "kv_indptr", "pages"), arrays, strict=True)
    )
    sure(works[0] is not None and works[1] is not None, "work_indptr and work_info_set are read")
    starts = indices("work_indptr", works[0])
    sure(works[1].dtype == torch.int32 and works[1].is_contiguous(), "work_info_set is read as packed int32")
    infos = works[1].view(-1, 8).tolist()
    # the grid has a group for each step of work_indptr (asm_mla.cu:1191), which takes the works from its
    # number on (ops/attention.py:1342, as mla/hk/mi35x_v32_fwd_decode_m16x8_fp8_fp8.cuh:32 does)
    for work in (w for group in range(len(starts) - 1) for w in range(starts[group], starts[group + 1])):
        sure(0 <= work < len(infos), "work_indptr leads outside work_info_set")
        b, loc, low, high, kv_start, kv_end, _, heads = infos[work]
        first, stop = heads & 0xFFFF, heads >> 16
        sure(0 <= b < len(queries) - 1 and 0 <= low <= high <= q.shape[0], "a work is of rows outside q")
        sure(
            high - low <= min(max_seqlen_q, 256),
            "a work has more query rows than max_seqlen_q and a tile of 256",
        )
        sure(0 <= first <= stop <= q.shape[1], "a work is of heads that q does not have")
        sure(0 <= kv_start <= kv_end <= len(entries), "a work is of pages behind kv_page_indices")
        at = torch.tensor(entries[kv_start:kv_end], dtype=torch.int64)
        sure(
            not len(at) or 0 <= int(at.min()) <= int(at.max()) < k.shape[0], "kv_page_indices leads outside K"
        )
        rows, position = torch.arange(low, high), torch.arange(kv_start, kv_end)
        seen = torch.ones(high - low, kv_end - kv_start, dtype=torch.bool)
        if causal:
            seen = (pages[b + 1] - 1 - position)[None] >= (queries[b + 1] - 1 - rows)[:, None]
        some = slice(first, stop)
        keys, values = (t.view(torch.uint8)[:, some][at].view(t.dtype) for t in (k, v))
        out, lse = attend(q[low:high, some], keys, values, scale * times_q * times_k, seen)
        if loc == -1:
            output[low:high, some] = (out * times_v).bfloat16()
        else:
            sure(loc + high - low <= partial[0].shape[0], "a work writes outside the partial buffer")
            partial[0][loc : loc + high - low, some] = out * times_v
            partial[1][loc : loc + high - low, some] = lse
