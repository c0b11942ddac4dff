"""Triton sources that bring (token, expert) pairs into the order of experts, on the device, without atomics.

The pairs of an expert fill tiles of TILE slots, the last of which may end with empty slots. The pairs of an
expert keep their order, so that every run gives the same result. Few pairs take one launch, in which each
program counts all of them. Many take two launches, in segments that keep a device busy.
"""

import triton
import triton.language as tl


@triton.jit
def count_kernel(
    ids,  # int32 [pairs]; -1: of another rank
    counts,  # int32 [segments, experts]
    pairs, pairs_of_segment,
    CHUNK: tl.constexpr,  # pairs that are read at a time
):  # fmt: skip
    """Each program counts the pairs of one expert in one segment. Grid: (experts, segments)."""
    expert, segment = tl.program_id(0), tl.program_id(1)
    end = tl.minimum(pairs, (segment + 1) * pairs_of_segment)
    total = tl.zeros([CHUNK], tl.int32)
    for start in range(segment * pairs_of_segment, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        total += (tl.load(ids + at, mask=at < end, other=-1) == expert).to(tl.int32)
    tl.store(counts + segment * tl.num_programs(0) + expert, tl.sum(total, 0))


@triton.jit
def place_kernel(
    ids,  # int32 [pairs]
    counts,  # int32 [segments, experts], if COUNTED
    slots,  # output, int32 [tiles * TILE]: the pair in each slot, `pairs` in an empty one; None with row_of
    row_of,  # output, int32 [pairs]: the slot of each pair of this rank; or None
    expert_of,  # output, int32 [tiles]; with row_of [all_slots], of each slot, then -1 behind the last expert
    used_tiles,  # int32 [1]: the number of tiles that have an expert
    pairs, experts, pairs_of_segment,
    all_slots,  # the number of slots of all tiles
    TILE: tl.constexpr,  # slots of a tile
    CHUNK: tl.constexpr,  # pairs or slots that are read or written at a time
    EXPERTS: tl.constexpr,  # experts, rounded up to a power of two
    SEGMENTS: tl.constexpr,  # segments, rounded up to a power of two
    COUNTED: tl.constexpr,  # whether count_kernel has run; else there is one segment, counted here
):  # fmt: skip
    """Each program writes the slots of one expert that one segment fills, and in the first segment also the
    `expert_of` of the expert's tiles. Grid: (experts, segments)."""
    expert, segment = tl.program_id(0), tl.program_id(1)
    all_experts, all_segments = tl.arange(0, EXPERTS), tl.arange(0, SEGMENTS)
    before = 0  # the expert's pairs in earlier segments
    if COUNTED:
        exists = (all_segments < tl.num_programs(1))[:, None] & (all_experts < experts)[None, :]
        places = counts + all_segments[:, None] * experts + all_experts[None, :]
        count = tl.load(places, mask=exists, other=0)
        pairs_of_each = tl.sum(count, 0)  # the pairs of each expert
        is_before = (all_segments < segment)[:, None] & (all_experts == expert)[None, :]
        before = tl.sum(tl.where(is_before, count, 0))
    else:
        pairs_of_each = tl.zeros([EXPERTS], tl.int32)
        for start in range(0, pairs, CHUNK):
            at = start + tl.arange(0, CHUNK)
            owner = tl.load(ids + at, mask=at < pairs, other=-1)
            pairs_of_each += tl.histogram(owner, EXPERTS, mask=owner >= 0)
    tiles = (pairs_of_each + TILE - 1) // TILE
    first_tile = tl.sum(tl.where(all_experts < expert, tiles, 0), 0)
    end_tile = first_tile + tl.sum(tl.where(all_experts == expert, tiles, 0), 0)
    tl.store(used_tiles, tl.sum(tiles, 0), mask=(expert == 0) & (segment == 0))

    if segment == 0:
        ENTRIES_OF_TILE: tl.constexpr = 1 if row_of is None else TILE
        end_entry = end_tile * ENTRIES_OF_TILE
        for start in range(first_tile * ENTRIES_OF_TILE, end_entry, CHUNK):
            at = start + tl.arange(0, CHUNK)
            tl.store(expert_of + at, tl.zeros([CHUNK], tl.int32) + expert, mask=at < end_entry)
        if row_of is None:
            # The empty slots are fewer than a tile.
            pairs_of_expert = tl.sum(tl.where(all_experts == expert, pairs_of_each, 0), 0)
            empty = first_tile * TILE + pairs_of_expert + tl.arange(0, TILE)
            tl.store(slots + empty, tl.zeros([TILE], tl.int32) + pairs, mask=empty < end_tile * TILE)
        elif expert == experts - 1:
            for start in range(end_tile * TILE, all_slots, CHUNK):
                at = start + tl.arange(0, CHUNK)
                tl.store(expert_of + at, tl.zeros([CHUNK], tl.int32) - 1, mask=at < all_slots)

    next_slot = first_tile * TILE + before
    end = tl.minimum(pairs, (segment + 1) * pairs_of_segment)
    for start in range(segment * pairs_of_segment, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        is_own = (tl.load(ids + at, mask=at < end, other=-1) == expert).to(tl.int32)
        slot = next_slot + tl.cumsum(is_own, 0) - 1
        if row_of is None:
            tl.store(slots + slot, at, mask=is_own > 0)
        else:
            tl.store(row_of + at, slot, mask=is_own > 0)
        next_slot += tl.sum(is_own, 0)
