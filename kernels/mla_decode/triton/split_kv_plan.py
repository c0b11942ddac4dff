"""Plan of split-KV MLA decode: parts of nearly equal size for each program, the longest first."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

WORTH = 1.25  # how much longer the longest sequence must be than a part for a second pass to pay


@dataclass(frozen=True)
class SplitPlan:
    """parts: (sequence, first token, behind the last, slot of its result); slot -1: all of its sequence
    split: (sequence, first slot, number of slots) of each sequence that is several parts
    """

    parts: tuple[tuple[int, int, int, int], ...]
    split: tuple[tuple[int, int, int], ...]

    @property
    def slots(self) -> int:
        return sum(count for *_, count in self.split)

    @property
    def most(self) -> int:
        """Slots of a sequence."""
        return max((count for *_, count in self.split), default=0)

    @property
    def longest(self) -> int:
        """Tokens of a part."""
        return max(end - first for _, first, end, _ in self.parts)


@functools.lru_cache(4096)
def plan(lengths: tuple[int, ...], tokens: int, programs: int, least: int) -> SplitPlan:
    """For about so many programs, each of which takes steps of so many tokens, and `least` tokens at least.

    A sequence is cut where it is longer than a part should be, into parts of the same number of steps, but
    for one: they begin where a step does.
    """
    steps = [math.ceil(length / tokens) for length in lengths]
    most = _most_steps(steps, programs, math.ceil(least / tokens))
    parts, split, slots = [], [], 0
    for sequence, (length, count) in enumerate(zip(lengths, steps, strict=True)):
        cuts = math.ceil(count / most)
        bounds = [count * i // cuts * tokens for i in range(cuts)] + [length]
        slot = slots if cuts > 1 else -1
        if cuts > 1:
            split.append((sequence, slots, cuts))
            slots += cuts
        for i in range(cuts):
            parts.append((sequence, bounds[i], bounds[i + 1], slot + i))
    return SplitPlan(tuple(sorted(parts, key=lambda part: part[1] - part[2])), tuple(split))


def _most_steps(steps: Sequence[int], programs: int, least: int) -> int:
    """Of a part: the fewest that leave no more parts than programs; where there are more sequences than
    that, as many steps as all programs have to take on average, so that no sequence outlasts the rest."""
    low = max(least, math.ceil(sum(steps) / programs))
    high = longest = max(low, *steps)
    if len(steps) >= programs:
        high = low
    while low < high:
        middle = (low + high) // 2
        if sum(math.ceil(count / middle) for count in steps) <= programs:
            high = middle
        else:
            low = middle + 1
    return low if low * WORTH < longest else longest
