"""Triton launches that bring the pairs of a call into the order of experts, in tiles that belong to one
expert."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from kernels.fused_moe.sizes import FusedMoeSizes

if TYPE_CHECKING:
    import torch

CHUNK = {"cpu": 1 << 16, "cuda": 1024, "rocm": 1024}
"""Pairs that are counted or placed at a time."""

THREADS = 256  # the most threads of a program of four warps

ONE_LAUNCH = 4096
"""Pairs up to which each program counts all of them: four passes of a histogram in shared memory take less
than another launch. More pairs are divided into segments of about this many, each with a program for every
expert."""

MOST_SEGMENTS = 16


def tiles_for(rows: int, sizes: FusedMoeSizes) -> int:
    """The most tiles that any picks of this size need: all tiles of an expert but one are full."""
    pairs = sizes.tokens * sizes.picks
    return min(pairs, (pairs + min(sizes.local_experts, pairs) * (rows - 1)) // rows)


class Alignment:
    """A call places the pairs in tiles of `rows` slots, each tile for one expert. It writes `tensors`, or
    with `by_pair` `row_of` and `owners`."""

    def __init__(self, sizes: FusedMoeSizes, rows: int, ids: torch.Tensor, by_pair: bool = False) -> None:
        import torch
        import triton

        from kernels.fused_moe.triton.align_jit import count_kernel, place_kernel

        pairs, experts, tiles = sizes.tokens * sizes.picks, sizes.local_experts, tiles_for(rows, sizes)
        segments = max(1, min(MOST_SEGMENTS, -(-pairs // ONE_LAUNCH)))
        per_segment, chunk = -(-pairs // segments), chunk_for(pairs, ids.device)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=ids.device)

        self.used = empty(1)  # the number of tiles that have an expert
        # The expert of each tile, or of each slot.
        self.owners = empty(tiles * rows if by_pair else tiles)
        # The pair in each slot, and the number of pairs in an empty slot; or the slot of each pair.
        self.slots = empty(0 if by_pair else tiles * rows)
        self.row_of = empty(pairs if by_pair else 0)
        self.tensors = self.slots, self.owners, self.used
        placed = (None, self.row_of) if by_pair else (self.slots, None)
        counts = empty(segments if segments > 1 else 0, experts)
        count = functools.partial(
            count_kernel[(experts, segments)], ids, counts, pairs, per_segment, CHUNK=chunk
        )
        place = functools.partial(
            place_kernel[(experts, segments)],
            *(ids, counts, *placed, self.owners, self.used, pairs, experts, per_segment, tiles * rows),
            TILE=rows,
            CHUNK=chunk,
            EXPERTS=triton.next_power_of_2(experts),
            SEGMENTS=triton.next_power_of_2(segments),
            COUNTED=segments > 1,
        )
        self.launches = [count, place] if segments > 1 else [place]

    def __call__(self) -> None:
        for launch in self.launches:
            launch()


def chunk_for(pairs: int, device: torch.device) -> int:
    """A power of two, and at least the threads of a program, so that its histogram counts each value once."""
    return min(CHUNK["cpu" if device.type == "cpu" else "cuda"], max(THREADS, 1 << (pairs - 1).bit_length()))
