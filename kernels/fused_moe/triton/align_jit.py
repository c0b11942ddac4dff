"""Triton sources that bring (row, expert) pairs into the order of experts, on the device and without atomics.

The pairs of an expert fill tiles of TILE slots, the last of which ends with empty slots. The pairs of an
expert keep their order, so that every run gives the same result. Few pairs take one launch, in which each
program counts all of them. Many take two launches, with so many segments of pairs that a device is busy.
"""

import triton
import triton.language as tl


@triton.jit
def count_kernel(
    ids,  # int32 [pairs]; -1: of another rank
    counts,  # int32 [segments, experts]
    pairs,
    per_segment,  # pairs of a segment
    CHUNK: tl.constexpr,
):
    """Each program counts the pairs of one expert in one segment. Grid: (experts, segments)."""
    expert, segment = tl.program_id(0), tl.program_id(1)
    end = tl.minimum(pairs, (segment + 1) * per_segment)
    total = tl.zeros([CHUNK], tl.int32)
    for start in range(segment * per_segment, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        total += (tl.load(ids + at, mask=at < end, other=-1) == expert).to(tl.int32)
    tl.store(counts + segment * tl.num_programs(0) + expert, tl.sum(total, 0))


@triton.jit
def place_kernel(
    ids,  # int32 [pairs]
    counts,  # int32 [segments, experts], if COUNTED
    slots,  # int32 [tiles * TILE]: the pair in each slot, `pairs` in an empty one; None with row_of
    row_of,  # int32 [pairs]: the slot of each pair of this rank; or None
    owners,  # int32 [tiles]: the expert of each tile; with row_of [rows], of each slot, -1 after the last
    used,  # int32 [1]: the number of tiles that have an expert
    pairs,
    experts,
    per_segment,  # pairs of a segment
    rows,  # slots in all
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,  # rounded up to a power of two
    SEGMENTS: tl.constexpr,  # rounded up too
    COUNTED: tl.constexpr,
):
    """Each program writes the slots of one expert that one segment fills, and in the first segment also the
    owners of the expert's tiles. Grid: (experts, segments)."""
    expert, segment = tl.program_id(0), tl.program_id(1)
    other, part = tl.arange(0, EXPERTS), tl.arange(0, SEGMENTS)
    before = 0
    if COUNTED:
        there = (part < tl.num_programs(1))[:, None] & (other < experts)[None, :]
        each = tl.load(counts + part[:, None] * experts + other[None, :], mask=there, other=0)
        load = tl.sum(each, 0)
        before = tl.sum(tl.where((part < segment)[:, None] & (other == expert)[None, :], each, 0))
    else:
        load = tl.zeros([EXPERTS], tl.int32)
        for start in range(0, pairs, CHUNK):
            at = start + tl.arange(0, CHUNK)
            owner = tl.load(ids + at, mask=at < pairs, other=-1)
            load += tl.histogram(owner, EXPERTS, mask=owner >= 0)
    tiles = (load + TILE - 1) // TILE
    first = tl.sum(tl.where(other < expert, tiles, 0), 0)
    own = tl.sum(tl.where(other == expert, tiles, 0), 0)
    tl.store(used, tl.sum(tiles, 0), mask=(expert == 0) & (segment == 0))

    if segment == 0:
        OWNERS: tl.constexpr = 1 if row_of is None else TILE
        for start in range(0, own * OWNERS, CHUNK):
            at = start + tl.arange(0, CHUNK)
            owner = tl.zeros([CHUNK], tl.int32) + expert
            tl.store(owners + first * OWNERS + at, owner, mask=at < own * OWNERS)
        if row_of is None:
            # The empty slots are fewer than a tile.
            empty = first * TILE + tl.sum(tl.where(other == expert, load, 0), 0) + tl.arange(0, TILE)
            tl.store(slots + empty, tl.zeros([TILE], tl.int32) + pairs, mask=empty < (first + own) * TILE)
        elif expert == experts - 1:
            for start in range((first + own) * TILE, rows, CHUNK):
                at = start + tl.arange(0, CHUNK)
                tl.store(owners + at, tl.zeros([CHUNK], tl.int32) - 1, mask=at < rows)

    taken = first * TILE + before
    end = tl.minimum(pairs, (segment + 1) * per_segment)
    for start in range(segment * per_segment, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        mine = (tl.load(ids + at, mask=at < end, other=-1) == expert).to(tl.int32)
        slot = taken + tl.cumsum(mine, 0) - 1
        if row_of is None:
            tl.store(slots + slot, at, mask=mine > 0)
        else:
            tl.store(row_of + at, slot, mask=mine > 0)
        taken += tl.sum(mine, 0)
