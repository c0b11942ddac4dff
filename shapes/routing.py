"""The experts that the tokens of a MoE layer go to, as one rank sees them.

DeepSeek's router is group-limited: consecutive experts form groups, and the picks of a token lie in at most
`group_topk` groups (DeepSeek-V3 technical report, section 2.1.2). There are four patterns:

balanced  experts are dealt in order: their loads differ by at most one (as in DeepSeek's profile-data)
uniform   every token draws at random
zipf:S    every token draws at random, the expert in place p of a shuffled list in proportion to p^-S
one       every token picks the same experts

One base routing is drawn for each pattern. A seed exchanges experts that lie on one rank and in one group,
and moves tokens. So the counts and loads, and with them the work, are the same for every seed. A seed has
several turns, one for each set of operands that timed calls rotate over (see kernels.operands.Seeds).
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice, pairwise

PATTERNS = ("balanced", "uniform", "zipf:S", "one")
MOST_ZIPF = 2.0  # the largest S
MISSES = 64
"""After so many draws in a row of experts that a token cannot pick, it draws among those that it can pick."""
SAMPLE = 4096  # the number of tokens that are drawn to estimate the share of the tokens that reach a rank

Picks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Routing:
    """The routing of one MoE layer on one rank, which holds the first experts / ep routed experts."""

    tokens: int  # the rows of the rank's kernel; each has at least one pick on the rank
    experts: int
    topk: int
    ep: int = 1
    shared: int = 0
    """1 if the shared expert is fused as one more expert of the rank, which every row picks last; else 0."""
    pattern: str = "balanced"
    groups: int = 8
    """The number of groups of consecutive experts; one that does not divide the experts limits nothing."""
    group_topk: int = 4  # the most groups that the picks of a token lie in

    def __post_init__(self) -> None:
        for name in ("tokens", "experts", "topk", "ep", "groups", "group_topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of a routing must be at least 1")
        if self.shared not in (0, 1):
            raise ValueError(f"shared={self.shared} of a routing must be 0 or 1")
        if self.experts % self.ep:
            raise ValueError(f"ep={self.ep} must divide the {self.experts} experts")
        if self.topk > self._most_groups * self._group_size:
            raise ValueError(
                f"topk={self.topk} does not fit into {self._most_groups} groups of {self._group_size} experts"
            )
        self._exponent  # noqa: B018 - raises for an unknown pattern

    def picks(self, seed: int = 0, turn: int = 0) -> Picks:
        """The picks of each row in the rank's own numbering: routed experts are 0 .. local - 1, the fused
        shared expert is `local`, and experts of other ranks are -1.

        Seeds that differ by 1 give every row other experts. Each turn of a seed hits experts that earlier
        turns did not hit, as long as there are any on the rank in the same group.
        """
        shared_pick = (self.local,) if self.shared else ()
        picks = []
        for row in self.global_picks(seed, turn):
            on_rank = tuple(expert if expert < self.local else -1 for expert in row)
            picks.append(on_rank + shared_pick)
        return tuple(picks)

    def global_picks(self, seed: int = 0, turn: int = 0) -> Picks:
        """The picks of the same rows in the layer's numbering, without the shared expert."""
        base = _base(self)
        exchanged = list(range(self.experts))  # expert of the base routing -> expert that takes its place
        for part in base.slices:
            size = len(part.experts)
            # The hit experts come first in a slice. Each turn replaces them by as many others, or, where all
            # or none are hit, moves the experts by one.
            step = part.hit if 0 < part.hit < size else 1
            for i, expert in enumerate(part.experts):
                exchanged[expert] = part.experts[(i + seed + turn * step) % size]
        # Rows move by one only once the seeds have moved experts round the smallest slice: if both moved with
        # each seed, the moves could cancel out.
        smallest = min(len(part.experts) for part in base.slices)
        first = seed // smallest % self.tokens
        rows = base.rows[first:] + base.rows[:first]
        return tuple(tuple(exchanged[expert] for expert in row) for row in rows)

    def loads(self, seed: int = 0, turn: int = 0) -> list[int]:
        """The rows of each of the rank's experts; the shared expert comes last."""
        counts = Counter(expert for row in self.picks(seed, turn) for expert in row)
        return [counts[expert] for expert in range(self.local + self.shared)]

    @property
    def local(self) -> int:
        """The routed experts on the rank."""
        return self.experts // self.ep

    @property
    def reach(self) -> float:
        """The share of the tokens of all ranks that become rows of one rank, the mean over the ranks."""
        return _reach(replace(self, tokens=1, shared=0))

    @property
    def hit(self) -> int:
        """The number of the rank's experts that have rows, with the shared one; the same for every seed."""
        return sum(load > 0 for load in _loads(self))

    @property
    def pairs(self) -> int:
        """The number of (row, expert) pairs on the rank, with those of the shared expert."""
        return sum(_loads(self))

    @property
    def busiest(self) -> int:
        """The rows of the rank's expert that has most, the shared one included."""
        return max(_loads(self))

    @property
    def skew(self) -> float:
        """The rows of the rank's busiest routed expert, divided by the mean of its routed experts."""
        routed = _loads(self)[: self.local]
        return max(routed) * self.local / sum(routed)

    def touched(self, turns: int) -> int:
        """The number of the rank's experts, with the shared one, that `turns` turns of a seed hit."""
        if turns < 1:
            return 0
        on_rank = [part for part in _base(self).slices if part.experts[0] < self.local]
        return sum(min(len(part.experts), turns * part.hit) for part in on_rank) + self.shared

    @property
    def _group_size(self) -> int:
        """The experts of a group; all experts where routing is not limited."""
        return self.experts // self.groups if self.experts % self.groups == 0 else self.experts

    @property
    def _most_groups(self) -> int:
        """The most groups that the picks of a token lie in."""
        return min(self.group_topk, self.experts // self._group_size)

    @property
    def _exponent(self) -> float | None:
        """S of zipf:S, 0 for uniform draws, None for patterns that draw nothing."""
        if self.pattern in ("balanced", "one"):
            return None
        if self.pattern == "uniform":
            return 0.0
        zipf = re.fullmatch(r"zipf:(\d+(?:\.\d+)?)", self.pattern)
        if not zipf or not 0 < float(zipf[1]) <= MOST_ZIPF:
            raise ValueError(
                f"unknown routing {self.pattern!r}; routings: {', '.join(PATTERNS)} "
                f"with S a decimal up to {MOST_ZIPF:g}, for example zipf:0.8"
            )
        return float(zipf[1])


@dataclass(frozen=True)
class _Slice:
    """The experts that lie on one rank and in one group."""

    experts: tuple[int, ...]  # those that the base routing hits come first
    hit: int  # the number of experts that the base routing hits


@dataclass(frozen=True)
class _Base:
    """The routing that all seeds start from."""

    rows: Picks  # the picks of each row in the layer's numbering
    slices: tuple[_Slice, ...]


@functools.lru_cache(maxsize=32)
def _base(routing: Routing) -> _Base:
    """The rows are the first tokens with a pick on the rank, which holds the experts below `local`."""
    reaching_rank = (row for row in _tokens(routing) if min(row) < routing.local)
    rows = list(islice(reaching_rank, routing.tokens))
    order = random.Random("order of tokens and experts")
    order.shuffle(rows)
    hit = {expert for row in rows for expert in row}
    slices = []
    for consecutive in _slices(routing):
        experts = list(consecutive)
        order.shuffle(experts)
        experts.sort(key=lambda expert: expert not in hit)
        slices.append(_Slice(tuple(experts), len(hit.intersection(experts))))
    return _Base(tuple(rows), tuple(slices))


@functools.lru_cache(maxsize=4096)
def _loads(routing: Routing) -> tuple[int, ...]:
    return tuple(routing.loads())


@functools.lru_cache(maxsize=256)
def _reach(routing: Routing) -> float:
    """See Routing.reach. A token becomes one row of each rank on which it has a pick."""
    sample = islice(_tokens(routing), SAMPLE)
    reached = sum(len({expert // routing.local for expert in row}) for row in sample)
    return reached / (SAMPLE * routing.ep)


def _slices(routing: Routing) -> list[range]:
    """The experts that lie on one rank and in one group, for each rank and group."""
    of_ranks = range(0, routing.experts + 1, routing.local)
    of_groups = range(0, routing.experts + 1, routing._group_size)
    bounds = sorted({*of_ranks, *of_groups})
    return [range(first, end) for first, end in pairwise(bounds)]


def _tokens(routing: Routing) -> Iterator[tuple[int, ...]]:
    """The picks of the tokens of all ranks, in the layer's numbering; an endless iterator."""
    if routing._exponent is not None:
        yield from _drawn(routing, routing._exponent)
    rows = _balanced_rows(routing)
    if routing.pattern == "one":
        rows = rows[:1]
    while True:
        yield from rows


def _balanced_rows(routing: Routing) -> list[tuple[int, ...]]:
    """Deals the experts to tokens in order, `topk` to each, over and over, until the picks repeat.

    The order takes `width` groups at a time, which are called a set, and interleaves their experts, so that a
    token has picks of several groups. The width is the largest with which all tokens keep the group limit.
    Where no token has picks of two sets, the result takes a token of each set in turn.
    """
    size, limit, topk = routing._group_size, routing._most_groups, routing.topk
    for width in range(limit, 0, -1):
        dealt = cycle(_interleaved(routing, width))
        count = math.lcm(routing.experts, topk) // topk  # of the tokens until the picks repeat
        rows = [tuple(islice(dealt, topk)) for _ in range(count)]
        if any(len({expert // size for expert in row}) > limit for row in rows):
            continue
        sets_are_whole = (routing.experts // size) % width == 0
        if not sets_are_whole or (width * size) % topk:
            return rows  # some tokens have picks of two sets
        tokens_of_set = width * size // topk
        alternating = []
        for i in range(tokens_of_set):
            alternating += rows[i::tokens_of_set]  # the i-th token of each set
        return alternating
    raise ValueError(f"no balanced routing has topk={topk} in {limit} of the groups of {size} experts")


def _interleaved(routing: Routing, width: int) -> list[int]:
    """All experts: of `width` groups the first of each, the second of each ...; then of the next groups."""
    size = routing._group_size
    order: list[int] = []
    for start in range(0, routing.experts, width * size):
        end = min(start + width * size, routing.experts)
        for i in range(size):
            order += range(start + i, end, size)
    return order


def _drawn(routing: Routing, exponent: float) -> Iterator[tuple[int, ...]]:
    """Draws the picks of one token after another by the weights of experts. A token cannot pick an expert
    that it has or, at the group limit, one of another group: such draws do not count."""
    chance = random.Random("picks")
    experts = range(routing.experts)
    size, limit = routing._group_size, routing._most_groups
    weights = [(index + 1) ** -exponent for index in experts]
    chance.shuffle(weights)
    sums = list(accumulate(weights))

    def draw() -> Iterator[int]:
        while True:
            yield from chance.choices(experts, cum_weights=sums, k=1024)

    def can_pick(expert: int, row: list[int], groups: set[int]) -> bool:
        return expert not in row and (len(groups) < limit or expert // size in groups)

    draws = draw()
    while True:
        row: list[int] = []
        groups: set[int] = set()
        misses = 0
        while len(row) < routing.topk:
            expert = next(draws)
            if not can_pick(expert, row, groups):
                misses += 1
                if misses < MISSES:
                    continue
                left = [expert for expert in experts if can_pick(expert, row, groups)]
                expert = chance.choices(left, [weights[expert] for expert in left])[0]
            row.append(expert)
            groups.add(expert // size)
            misses = 0
        yield tuple(row)
