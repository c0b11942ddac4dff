"""Routing patterns: limits, loads and counts by brute force, for every seed and turn."""

import hashlib
from collections import Counter

import pytest

from shapes.routing import Routing

PATTERNS = ("balanced", "uniform", "zipf:0.6", "zipf:1.2", "one")
R1 = {"experts": 256, "topk": 8}
LAYERS = (
    R1, R1 | {"ep": 8}, R1 | {"shared": 1}, {"experts": 16, "topk": 8}, {"experts": 16, "topk": 6},
    {"experts": 32, "topk": 4, "ep": 2}, {"experts": 24, "topk": 5, "ep": 6}, {"experts": 20, "topk": 3},
    {"experts": 16, "topk": 2, "groups": 1, "group_topk": 1, "ep": 4, "shared": 1},
)  # fmt: skip


@pytest.fixture(params=PATTERNS)
def routings(request) -> list[Routing]:
    """The routings of a pattern."""
    return [Routing(tokens, pattern=request.param, **layer) for tokens in (1, 3, 40) for layer in LAYERS]


def groups_of(routing: Routing) -> tuple[int, int]:
    """(experts of a group, allowed groups); one group if the groups do not divide the experts."""
    if routing.experts % routing.groups:
        return routing.experts, 1
    return routing.experts // routing.groups, routing.group_topk


def test_rows_obey_the_router(routings):
    for routing in routings:
        size, limit = groups_of(routing)
        for seed, turn in ((0, 0), (1, 0), (0, 3), (7, 2)):
            rows = routing.global_picks(seed, turn)
            assert len(rows) == routing.tokens
            for row in rows:
                assert len(set(row)) == len(row) == routing.topk
                assert all(0 <= expert < routing.experts for expert in row)
                assert len({expert // size for expert in row}) <= limit
                assert min(row) < routing.local, "a row that arrives has a pick on the rank"


def test_picks_are_the_rank_s_part_of_the_layer_s(routings):
    for routing in routings:
        local = routing.experts // routing.ep
        for own, layer in zip(routing.picks(2, 1), routing.global_picks(2, 1), strict=True):
            assert len(own) == routing.topk + routing.shared
            assert own[: routing.topk] == tuple(expert if expert < local else -1 for expert in layer)
            assert own[routing.topk :] == (local,) * routing.shared


def test_counts_are_exact_for_every_seed_and_turn(routings):
    for routing in routings:
        loads = sorted(routing.loads())
        for seed, turn in [(seed, 0) for seed in range(9)] + [(0, 1), (0, 2), (5, 7), (10**9, 3)]:
            counts = Counter(e for row in routing.picks(seed, turn) for e in row if e >= 0)
            assert (routing.pairs, routing.hit) == (sum(counts.values()), len(counts))
            found = routing.loads(seed, turn)
            assert found == [counts[e] for e in range(routing.local + routing.shared)]
            assert sorted(found) == loads
            routed = found[: routing.local]
            assert routing.skew == pytest.approx(max(routed) / (sum(routed) / len(routed)))
            assert routing.pattern != "balanced" or max(routed) - min(routed) <= 1


def test_touched_is_the_union_over_turns_and_neighbouring_seeds_differ(routings):
    for routing in routings:
        for seed in (0, 3):
            union: set[int] = set()
            for turn in range(6):
                union.update(e for row in routing.picks(seed, turn) for e in row if e >= 0)
                assert routing.touched(turn + 1) == len(union)
        assert (routing.touched(0), routing.touched(1)) == (0, routing.hit)
        for seed in range(12):
            here, next_ = routing.global_picks(seed), routing.global_picks(seed + 1)
            assert here == routing.global_picks(seed) != next_
            assert here != routing.global_picks(seed, 1), "where all experts are hit, too"
            if routing.tokens == 1 and routing.experts != 24:  # there, some slices have one expert
                assert all(a != b for a, b in zip(here[0], next_[0], strict=True))


def test_picks_are_those_of_recorded_runs():
    layers = (*LAYERS, {"experts": 32, "topk": 4, "group_topk": 3})
    picks = [Routing(40, pattern=p, **layer).global_picks(1) for p in PATTERNS for layer in layers]
    digest = hashlib.sha256(repr(picks).encode()).hexdigest()[:16]
    assert digest == "012831b4ecce76c6"


def test_balanced_tokens_use_as_many_groups_as_they_may():
    """Two picks in each of four groups of 32 experts: 16 turns of one token hit all 128 experts."""
    one, few = Routing(1, **R1), Routing(3, **R1)
    assert few.picks(32) == (*few.picks()[1:], few.picks()[0]), "after 32 seeds each expert is where it was"
    assert [one.touched(turns) for turns in (1, 2, 16, 17)] == [8, 16, 128, 128]
    for row in Routing(100, **R1).picks():
        assert sorted(Counter(expert // 32 for expert in row).values()) == [2, 2, 2, 2]


def test_popular_experts_are_busier():
    skews = [Routing(4000, **R1, pattern=p).skew for p in ("uniform", "zipf:0.3", "zipf:0.8", "zipf:1.6")]
    assert skews == sorted(skews)
    assert skews[0] < 1.5 < 10 < skews[2]


def test_a_rank_gets_its_slice_of_all_pairs():
    """A rank has one of 8 groups, and a token picks in 4 of them: half of the tokens reach it, with two picks
    each."""
    routing = Routing(1000, **R1, ep=8, pattern="uniform")
    ranks = Counter(expert // 32 for row in routing.global_picks() for expert in row)
    assert sum(ranks.values()) == 1000 * 8 and ranks[0] == routing.pairs
    assert routing.pairs / routing.tokens == pytest.approx(2, rel=0.05)


def test_reach_is_the_share_of_tokens_that_a_rank_gets():
    """Each rank has one of eight groups, and a token picks in four: half of the tokens reach a rank. Without
    expert parallelism all do."""
    for pattern in ("balanced", "uniform"):
        assert Routing(1, **R1, ep=8, pattern=pattern).reach == pytest.approx(0.5, abs=0.005)
    assert Routing(1, **R1, pattern="uniform").reach == 1
    two = Routing(1, **R1, ep=16, pattern="uniform").reach
    assert 0.25 < two < 0.5, "two ranks to a group"


@pytest.mark.parametrize(
    "pattern", ["", "Uniform", "zipf", "zipf:", "zipf:-1", "zipf:0", "zipf:9", "zipf:1e0"]
)
def test_an_unknown_pattern_is_one_clear_line(pattern):
    with pytest.raises(
        ValueError, match=r"^unknown routing .*; routings: balanced, uniform, zipf:S, one "
    ) as error:
        Routing(1, **R1, pattern=pattern)
    assert repr(pattern) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("fields", "line"), [
    ({"tokens": 0}, "tokens=0 of a routing must be at least 1"),
    ({"ep": 3}, "ep=3 must divide the 256 experts"),
    ({"shared": 2}, "shared=2 of a routing must be 0 or 1"),
    ({"experts": 8}, "topk=8 does not fit into 4 groups of 1 experts"),
    ({"experts": 4}, "topk=8 does not fit into 1 groups of 4 experts"),
])  # fmt: skip
def test_an_impossible_routing_is_one_clear_line(fields, line):
    with pytest.raises(ValueError) as error:
        Routing(**{"tokens": 1} | R1 | fields)
    assert str(error.value) == line
