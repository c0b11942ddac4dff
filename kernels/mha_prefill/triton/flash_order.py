"""Order of a varlen kernel's programs: long ones first, those that share keys together."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import NamedTuple

from kernels.tuning import Target


class Tile(NamedTuple):
    """What one program takes: some query rows of one head of one sequence."""

    head: int
    sequence: int
    first: int


@dataclass(frozen=True)
class Cache:
    dies: int  # programs are dealt to them in turn; each has a cache of its own
    bytes: int  # of one cache, as far as keys and values may fill it


# H100: 50 MB of L2 (architecture white paper); MI300X and MI350X: 8 XCDs with 4 MB of L2 each (CDNA 3 and 4
# white papers), and consecutive programs go to consecutive XCDs (AITER's remap_xcd).
CACHES: Mapping[str, Cache] = {
    "cuda": Cache(1, 32 << 20),
    "rocm": Cache(8, 4 << 20),
    "cpu": Cache(1, 32 << 20),
}


def order(
    lengths: list[tuple[int, int]], heads: int, rows: int, target: Target, key_bytes: int
) -> list[Tile]:
    """All tiles of `rows` query rows.

    lengths:   (prefix, new) of each sequence
    key_bytes: of a key and its value, per head

    Each head of a sequence is dealt whole to the die with the least work so far, the longest first. On a die
    heads follow each other in sections of which the cache holds the keys and values, so that those come from
    memory once. Within a section the tiles with the most keys go first, so that none is left to run alone at
    the end.
    """
    cache = target.pick(CACHES)
    load = [(0, die) for die in range(cache.dies)]
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(cache.dies)]
    for sequence in sorted(range(len(lengths)), key=lambda s: -_work(*lengths[s])):
        for head in range(heads):
            work, die = load[0]
            heapq.heapreplace(load, (work + _work(*lengths[sequence]), die))
            dealt[die].append((head, sequence))
    queues = [list(_in_sections(pairs, lengths, rows, cache.bytes // key_bytes)) for pairs in dealt]
    return [tile for turn in zip_longest(*queues) for tile in turn if tile is not None]


def _work(prefix: int, new: int) -> int:
    """Pairs of a query and a key."""
    return new * prefix + new * (new + 1) // 2


def _in_sections(
    pairs: list[tuple[int, int]], lengths: list[tuple[int, int]], rows: int, most: int
) -> Iterator[Tile]:
    """The tiles of (head, sequence) pairs, in sections of at most `most` keys, or of one pair."""
    section: list[tuple[int, int]] = []
    total = 0
    for head, sequence in pairs:
        keys = sum(lengths[sequence])
        if section and total + keys > most:
            yield from _longest_first(section, lengths, rows)
            section, total = [], 0
        section.append((head, sequence))
        total += keys
    yield from _longest_first(section, lengths, rows)


def _longest_first(section: list[tuple[int, int]], lengths: list[tuple[int, int]], rows: int) -> list[Tile]:
    tiles = chain.from_iterable(
        (Tile(head, sequence, first) for first in range(0, lengths[sequence][1], rows))
        for head, sequence in section
    )
    return sorted(tiles, key=lambda tile: -(lengths[tile.sequence][0] + tile.first))
