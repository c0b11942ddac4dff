"""Triton sources that bring (row, expert) pairs into the order of experts, on the device and without atomics.

Each expert's pairs fill tiles of TILE slots; the last tile of an expert ends in empty slots. Counting is
one launch, placing another, so every run gives the same order.
"""

import triton
import triton.language as tl


@triton.jit
def count_kernel(
    ids,  # int32 [pairs]; -1: of another rank
    counts,  # int32 [experts]
    pairs,
    CHUNK: tl.constexpr,
):
    """One program: the pairs of one expert. Grid (experts,)."""
    expert = tl.program_id(0)
    total = tl.zeros([CHUNK], tl.int32)
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        total += (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit
def place_kernel(
    ids,  # int32 [pairs]
    counts,  # int32 [experts]
    slots,  # int32 [tiles * TILE]: the pair in each slot, `pairs` in empty ones
    owners,  # int32 [tiles]: the expert of each tile
    used,  # int32 [1]: tiles that have one
    pairs,
    experts,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,  # padded to a power of two
):
    """One program: the slots and tiles of one expert. Grid (experts,)."""
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    tiles = (tl.load(counts + other, mask=other < experts, other=0) + TILE - 1) // TILE
    first = tl.sum(tl.where(other < expert, tiles, 0), 0)
    own = tl.sum(tl.where(other == expert, tiles, 0), 0)
    tl.store(used, tl.sum(tiles, 0), mask=expert == 0)

    for start in range(0, own, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        tl.store(owners + first + tile, tl.zeros([CHUNK], tl.int32) + expert, mask=tile < own)

    taken = first * TILE
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        mine = (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        slot = taken + tl.cumsum(mine, 0) - 1
        tl.store(slots + slot, at, mask=mine > 0)
        taken += tl.sum(mine, 0)

    # Fewer than a tile are left.
    empty = taken + tl.arange(0, TILE)
    tl.store(slots + empty, tl.zeros([TILE], tl.int32) + pairs, mask=empty < (first + own) * TILE)
