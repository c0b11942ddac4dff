"""Triton launches that bring the pairs of a call into the order of experts, in tiles of one expert each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.fused_moe.sizes import FusedMoeSizes

if TYPE_CHECKING:
    import torch

CHUNK = {"cpu": 1 << 16, "cuda": 1024, "rocm": 1024}
"""Pairs at a time where they are counted and placed."""
THREADS = 256  # of a program of four warps, at most

ONE_LAUNCH = 4096
"""Pairs up to which every program counts for itself: four passes of a histogram in shared memory, which are
less than another launch. As many are then a segment, if there are not more than MOST_SEGMENTS."""
MOST_SEGMENTS = 16


def tiles_for(rows: int, sizes: FusedMoeSizes) -> int:
    """Tiles that any picks of this size need at most: all but one of an expert's tiles are full."""
    pairs = sizes.tokens * sizes.picks
    return min(pairs, (pairs + min(sizes.local_experts, pairs) * (rows - 1)) // rows)


def segments_for(pairs: int) -> int:
    """Of the pairs, each the work of a program for every expert; 1 where every program counts for itself."""
    return max(1, min(MOST_SEGMENTS, -(-pairs // ONE_LAUNCH)))


class Alignment:
    """slots:  int32 [tiles * rows]: the pair in each slot, or how many pairs there are where it is empty
    owners: int32 [tiles]: the expert of a tile
    used:   int32 [1]: tiles that have an expert
    """

    def __init__(self, sizes: FusedMoeSizes, rows: int, ids: torch.Tensor) -> None:
        import torch
        import triton

        from kernels.fused_moe.triton import align_jit

        self.ids, self.pairs, self.local_experts = ids, sizes.tokens * sizes.picks, sizes.local_experts
        tiles, segments = tiles_for(rows, sizes), segments_for(self.pairs)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=ids.device)

        self.slots, self.owners, self.used = empty(tiles * rows), empty(tiles), empty(1)
        self.counted = segments > 1
        self.counts = empty(segments if self.counted else 0, sizes.local_experts)
        self.per_segment = -(-self.pairs // segments)
        self.chunk = chunk_for(self.pairs, ids.device)
        grid = (sizes.local_experts, segments)
        self.count, self.place = align_jit.count_kernel[grid], align_jit.place_kernel[grid]
        self.placing = {
            "TILE": rows,
            "CHUNK": self.chunk,
            "EXPERTS": triton.next_power_of_2(sizes.local_experts),
            "SEGMENTS": triton.next_power_of_2(segments),
            "COUNTED": self.counted,
        }

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.slots, self.owners, self.used

    def __call__(self) -> None:
        if self.counted:
            self.count(self.ids, self.counts, self.pairs, self.per_segment, CHUNK=self.chunk)
        counted = (self.ids, self.counts, *self.tensors, self.pairs, self.local_experts, self.per_segment)
        self.place(*counted, **self.placing)


def chunk_for(pairs: int, device: torch.device) -> int:
    """A power of two, not below the threads of a program: its histogram counts each value once."""
    return min(CHUNK["cpu" if device.type == "cpu" else "cuda"], max(THREADS, 1 << (pairs - 1).bit_length()))
