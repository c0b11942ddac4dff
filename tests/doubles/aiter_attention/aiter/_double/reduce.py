"""csrc/kernels/mla/reduce.cu: partial tiles merged by their log-sum-exps."""

from __future__ import annotations

import torch

from .softmax import merge
from .strict import check, indices, sure

# MLA_REDUCE_ROUTER: (#heads, head dimension)
_SHAPES = {
    64: {64},
    128: {1, 2, 4, 8, 10, 16, 32, 40, 48, 64, 96, 128},
    512: {8, 16, 24, 32, 48, 64, 80, 96, 112, 128},
}


def reduce(outs, lses, indptr, final_map, partial_map, out, lse) -> None:
    check(
        outs.dtype == lses.dtype == torch.float32,
        "mla_reduce_v1: partial_out and partial_lse must be float32!",
    )
    heads, dim = outs.shape[-2], out.shape[-1]
    known = heads in _SHAPES.get(dim, ())
    check(
        known,
        f"kn_mla_reduce_v1 doesn't support the specified settings: #heads: {heads}, head dimension: {dim}.",
    )
    check(
        out.dtype in (torch.bfloat16, torch.float16),
        f"kn_mla_reduce_v1 doesn't support output type {out.dtype}.",
    )
    check(lse is None or lse.dtype == torch.float32, "kn_mla_reduce_v1 doesn't support output LSE type")
    sure(
        outs.is_contiguous() and lses.is_contiguous() and out.stride(-1) == 1,
        "the buffers are read as packed",
    )
    outs, lses = outs.view(-1, heads, dim), lses.view(-1, heads)
    groups, places = indices("reduce_indptr", indptr), indices("reduce_partial_map", partial_map)
    for tile in range(len(groups) - 1):
        low, high = groups[tile], groups[tile + 1]
        if high - low < 2:  # one split was written as final
            continue
        sure(0 <= low and high <= len(places), "reduce_indptr leads outside reduce_partial_map")
        if final_map is None:
            count = places[low + 1] - places[low]
            start, stop = tile * count, (tile + 1) * count
        else:
            sure(
                final_map.dtype == torch.int32 and final_map.is_contiguous(),
                "reduce_final_map is packed int32",
            )
            start, stop = final_map.view(-1, 2)[tile].tolist()
        rows = torch.tensor(places[low:high])[:, None] + torch.arange(stop - start)
        inside = (
            0 <= start <= stop <= out.shape[0] and 0 <= int(rows.min()) and int(rows.max()) < outs.shape[0]
        )
        sure(inside, f"reduce tile {tile} leads outside the partial or the final buffer")
        merged, found = merge(outs[rows], lses[rows])
        out[start:stop] = merged.to(out.dtype)
        if lse is not None:
            lse[start:stop] = found
