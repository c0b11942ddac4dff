"""Triton launches that bring the pairs of a call into the order of experts, in tiles that belong to one
expert."""

from __future__ import annotations

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
    """A call fills `slots`, `owners` and `used` from the ids."""

    slots: torch.Tensor  # int32 [tiles * rows]: the pair in each slot; the number of pairs in an empty slot
    owners: torch.Tensor  # int32 [tiles]: the expert of each tile
    used: torch.Tensor  # int32 [1]: the number of tiles that have an expert

    def __init__(self, sizes: FusedMoeSizes, rows: int, ids: torch.Tensor) -> None:
        import torch
        import triton

        from kernels.fused_moe.triton import align_jit

        self.ids, self.pairs, self.local_experts = ids, sizes.tokens * sizes.picks, sizes.local_experts
        tiles = tiles_for(rows, sizes)
        segments = max(1, min(MOST_SEGMENTS, -(-self.pairs // ONE_LAUNCH)))

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
    """A power of two, and at least the threads of a program, so that its histogram counts each value once."""
    return min(CHUNK["cpu" if device.type == "cpu" else "cuda"], max(THREADS, 1 << (pairs - 1).bit_length()))
