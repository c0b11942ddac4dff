"""harness.timing.interleaved.measure, with contenders that only move a clock."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable

import pandas
import pytest

from harness.statistics.intervals import MIN_BLOCKS
from harness.timing.interleaved import measure
from harness.timing.rounds import Policy, Round, Rounds
from tools.simulated_machine import TURN_S, Family, Machine


class Clock:
    """Stands still until somebody spends time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Race:
    """Contenders that take known seconds a turn, and what they were asked to do, in order."""

    def __init__(self, **turn_s: float) -> None:
        self.clock = Clock()
        self.log: list[str] = []
        self.contenders = {name: self.turn(name, s) for name, s in turn_s.items()}

    def turn(self, name: str, took: float, value: object = None) -> Callable[[], object]:
        """A turn that takes so long and gives a thousandth of it as its time, or `value`."""

        def run() -> object:
            self.log.append(name)
            self.clock.now += took
            return took / 1000 if value is None else value

        return run

    def begin_block(self, block: int, contenders: object) -> None:
        self.log.append(f"block {block}")
        self.clock.now += 1000.0

    def measure(self, **policy: object) -> Rounds:
        policy = {"budget_s": 1e9, "clock": self.clock, "begin_block": self.begin_block} | policy
        return measure(self.contenders, Policy(**policy))


def orders(race: Race, size: int) -> list[tuple[str, ...]]:
    """The order of each round, from the log."""
    turns = [name for name in race.log if not name.startswith("block")]
    return [tuple(turns[i : i + size]) for i in range(0, len(turns), size)]


def test_every_round_holds_every_contender_in_an_order_of_its_own():
    race = Race(a=1, b=2, c=3)
    race.measure(blocks=5, max_rounds=40)
    found = orders(race, 3)
    assert len(found) == 200
    assert all(sorted(order) == ["a", "b", "c"] for order in found)
    # All six orders, each about equally often: 200 / 6 = 33, standard deviation 5.
    counts = Counter(found)
    assert len(counts) == 6
    assert all(12 < n < 55 for n in counts.values())


def test_seeds_reproduce_the_order():
    def order(seed: int) -> list[str]:
        race = Race(a=1, b=2, c=3, d=4)
        race.measure(blocks=3, max_rounds=5, seed=seed)
        return race.log

    assert order(7) == order(7)
    assert order(7) != order(8)


def test_blocks_and_rounds_are_numbered_and_prepared_once_each():
    race = Race(a=1, b=2)
    found = race.measure(blocks=3, max_rounds=4)
    assert [(r.block, r.index) for r in found.rounds] == [(b, i) for b in range(3) for i in range(4)]
    assert [name for name in race.log if name.startswith("block")] == ["block 0", "block 1", "block 2"]
    assert race.log[0] == "block 0", "prepared before its first turn"
    assert found.stopped == "complete"
    assert found.dropped == {}


def test_preparing_a_block_is_not_on_the_budget():
    race = Race(a=1, b=2)
    found = race.measure(blocks=5, max_rounds=2, budget_s=100)
    assert race.clock.now == 5 * 1000 + 5 * 2 * 3
    assert found.spent_s == 30
    assert found.stopped == "complete"


@pytest.mark.parametrize("budget_s", [0.001, 1, 3, 10, 15, 16, 31, 59, 60, 61, 200, 1000])
def test_the_budget_holds_and_is_shared_by_the_blocks(budget_s):
    race = Race(a=1, b=2)
    found = race.measure(blocks=5, max_rounds=20, budget_s=budget_s)
    one_round = 3
    assert found.spent_s == one_round * len(found.rounds)
    assert found.spent_s <= max(budget_s, one_round), "one round at any rate, and then none that does not fit"
    assert found.stopped == ("complete" if budget_s >= 5 * 20 * one_round else "budget")
    rounds = Counter(found.blocks)
    assert len(rounds) == min(5, max(1, int(budget_s // one_round)))
    assert max(rounds.values()) - min(rounds.values()) <= 1


def test_no_round_is_begun_that_may_not_fit():
    """Rounds get longer: what is left must hold the longest so far."""
    race = Race(a=1)
    lengths = iter([1, 1, 5, 1, 1, 1, 1])

    def slower() -> float:
        race.clock.now += next(lengths)
        return 1.0

    race.contenders["a"] = slower
    found = race.measure(blocks=1, max_rounds=20, budget_s=10)
    assert found.spent_s <= 10
    assert [r.seconds["a"] for r in found.rounds] == [1.0] * 3


def raising(error: Exception) -> Callable[[], float]:
    def turn() -> float:
        raise error

    return turn


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (raising(RuntimeError("out of luck")), "out of luck"),
        (raising(KeyError()), "KeyError"),
        (lambda: math.nan, "gave nan as its time"),
        (lambda: math.inf, "gave inf as its time"),
        (lambda: 0.0, "gave 0.0 as its time"),
        (lambda: -1.0, "gave -1.0 as its time"),
        (lambda: None, "gave None as its time"),
        (lambda: "1.0", "gave '1.0' as its time"),
    ],
)
def test_one_that_fails_costs_itself_only(turn, reason):
    race = Race(a=1, b=2)
    race.contenders["bad"] = turn
    found = race.measure(blocks=5, max_rounds=4)
    assert found.dropped == {"bad": reason}
    assert len(found.rounds) == 20
    assert all(set(r.seconds) == {"a", "b"} for r in found.rounds)
    assert found.stopped == "complete"


def test_one_that_fails_later_keeps_its_earlier_times_and_gets_no_other_turn():
    race = Race(a=1, b=2)
    values = iter([0.5, 0.5, 0.5, -1.0])
    race.contenders["bad"] = lambda: next(values)  # a further turn would raise StopIteration
    found = race.measure(blocks=2, max_rounds=4)
    assert found.dropped == {"bad": "gave -1.0 as its time"}
    series = found.series("bad")
    assert series[:3] == [0.5] * 3
    assert all(map(math.isnan, series[3:]))
    assert found.series("a") == [0.001] * 8


def test_what_a_failure_wasted_is_not_the_others_budget():
    race = Race(a=1, b=1)
    race.contenders["slow and wrong"] = race.turn("slow and wrong", 1000.0, value=-1.0)
    found = race.measure(blocks=5, max_rounds=4, budget_s=40)
    assert "slow and wrong" in found.dropped
    assert len(found.rounds) == 20
    assert found.spent_s == 40


def test_all_of_them_fail():
    found = measure({"a": raising(ValueError("a")), "b": raising(ValueError("b"))}, Policy(clock=Clock()))
    assert found.stopped == "no contenders"
    assert found.dropped == {"a": "a", "b": "b"}
    assert found.spent_s == 0
    assert len(found.table()) <= 1


def test_no_contenders():
    race = Race()
    found = race.measure()
    assert found.rounds == []
    assert found.stopped == "no contenders"
    assert race.log == [], "nothing is prepared for nobody"
    assert found.table().empty
    assert found.table().index.names == ["block", "round"]


def test_table():
    race = Race(a=1, b=2)
    race.contenders["late"] = race.turn("late", 1, value=-1)
    table = race.measure(blocks=2, max_rounds=3).table()
    assert isinstance(table, pandas.DataFrame)
    assert table.shape == (6, 2)
    assert sorted(table.columns) == ["a", "b"]
    assert table.index.names == ["block", "round"]
    assert list(table.index) == [(b, i) for b in range(2) for i in range(3)]
    assert (table["a"] == 0.001).all()
    assert (table["b"] == 0.002).all()
    assert table.loc[(1, 2), "b"] == 0.002


def test_table_has_nan_where_a_contender_gave_no_time():
    values = iter([0.5, -1.0])
    found = measure({"a": lambda: 1e-3, "bad": lambda: next(values)}, Policy(blocks=1, max_rounds=3))
    table = found.table()
    assert table["bad"].isna().tolist() == [False, True, True]
    assert table["a"].notna().all()


def test_default_policy():
    found = measure({"a": lambda: 1e-3, "b": lambda: 2e-3})
    assert len({r.block for r in found.rounds}) >= 5
    assert found.stopped == "tight"
    assert found.blocks == [r.block for r in found.rounds]


def test_interrupting_is_not_a_contenders_failure():
    with pytest.raises(KeyboardInterrupt):
        measure({"a": raising(KeyboardInterrupt())})


def test_who_is_slow_has_a_turn_in_the_first_round_of_each_block_only():
    race = Race(a=1, b=3, slow=9)
    found = race.measure(blocks=3, max_rounds=4, slow=4.0)
    for name, turns in (("a", 12), ("b", 12), ("slow", 3)):
        assert race.log.count(name) == turns
    assert [r.index for r in found.rounds if "slow" in r.seconds] == [0, 0, 0]
    assert found.dropped == {}


def test_nobody_sits_out_where_only_the_fastest_would_be_left():
    race = Race(a=1, b=5, c=9)
    race.measure(blocks=2, max_rounds=3, slow=4.0)
    assert {race.log.count(name) for name in "abc"} == {6}


def test_the_time_of_who_sits_out_goes_to_the_others():
    race = Race(a=1, b=1, slow=50)
    found = race.measure(blocks=5, max_rounds=100, slow=4.0, budget_s=400)
    assert race.log.count("slow") == 5
    assert race.log.count("a") > 40
    assert found.spent_s <= 400


def test_measuring_ends_after_short_blocks_when_they_settle_it():
    race = Race(a=1, b=2)
    found = race.measure()
    assert Counter(found.blocks) == dict.fromkeys(range(MIN_BLOCKS), 5)
    assert found.stopped == "tight"


def test_what_short_blocks_leave_open_gets_long_ones():
    machine = Machine(Family(own=0.1), {"a": 1.0, "b": 1.0}, seed=1)
    policy = Policy(clock=machine.clock, begin_block=machine.prepare)
    found = measure(machine.contenders, policy)
    rounds = Counter(found.blocks)
    assert [rounds[block] for block in range(14)] == [5] * 6 + [20] * 8
    assert found.stopped == "complete"


def test_a_clear_verdict_ends_it_though_the_interval_is_wide():
    machine = Machine(Family(own=0.03), {"a": 1.0, "b": 1.5}, seed=1)
    found = measure(machine.contenders, Policy(clock=machine.clock, begin_block=machine.prepare))
    assert len(found.rounds) == 30
    assert found.stopped == "clear"


def test_without_a_half_width_it_goes_on_to_the_end():
    found = Race(a=1, b=2).measure(half_width=0, blocks=8, max_rounds=3)
    assert Counter(found.blocks) == dict.fromkeys(range(8), 3)
    assert found.stopped == "complete"


def test_the_budget_of_the_first_blocks_is_shared_and_the_rest_makes_no_crumbs():
    machine = Machine(Family(own=0.2), {"a": 1.0, "b": 1.0}, seed=1)
    policy = Policy(clock=machine.clock, begin_block=machine.prepare, budget_s=0.1 * 42)
    found = measure(machine.contenders, policy)
    rounds = Counter(found.blocks)
    assert [rounds[block] for block in range(9)] == [5, 5, 5, 5, 5, 5, 6, 6, 0]
    assert found.stopped == "budget"


@pytest.mark.parametrize(("preparing_s", "rounds"), [(0.0, [5, 5, 6]), (1.5, [15]), (3.0, [])])
def test_what_is_left_over_is_worth_preparing_for_as_long_as_that_takes(preparing_s, rounds):
    """A round is 0.1 s, and what is left after the first blocks 1.6 s."""
    machine = Machine(Family(own=0.2), {"a": 1.0, "b": 1.0}, seed=1)

    def prepare(*_: object) -> None:
        machine.prepare()
        machine.now += preparing_s

    found = measure(
        machine.contenders, Policy(clock=machine.clock, begin_block=prepare, budget_s=0.1 * (30 + 16))
    )
    later = Counter(block for block in found.blocks if block >= MIN_BLOCKS)
    assert [later[block] for block in sorted(later)] == rounds
    assert found.stopped == "budget"


def test_who_is_slow_is_not_waited_for():
    machine = Machine(Family(own=0.05), {"a": 1.0, "slow": 50.0, "b": 2.0}, seed=1)
    policy = Policy(clock=machine.clock, begin_block=machine.prepare, slow=4.0, half_width=0.05)
    found = measure(machine.contenders, policy)
    assert len(found.rounds) == 30
    assert found.stopped in ("clear", "tight")


def test_looking_costs_less_than_a_hundredth_of_a_round():
    """Ten contenders that are nearly equal: all looks are taken, and no verdict is clear."""

    def session() -> tuple[float, Rounds]:
        started = time.process_time()
        true = {f"c{i}": 1 + 0.002 * i for i in range(10)}
        machine = Machine(Family(), true, seed=3)
        policy = Policy(clock=machine.clock, begin_block=machine.prepare, twin="c1", budget_s=1e9)
        found = measure(machine.contenders, policy)
        return time.process_time() - started, found

    seconds, found = min((session() for _ in range(3)), key=lambda one: one[0])
    assert len(found.rounds) == 190
    round_s = 10 * TURN_S
    assert seconds / len(found.rounds) < 0.01 * round_s


def test_measuring_ends_without_an_anchor_that_failed():
    machine = Machine(Family(own=0.03), {"anchor": 1.0, "again": 1.0, "a": 1.0, "b": 2.0}, seed=1)
    turns = machine.contenders
    lives = iter([1.0] * 3)  # a further turn raises StopIteration
    policy = Policy(clock=machine.clock, begin_block=machine.prepare, anchor="anchor", twin="again")
    found = measure(turns | {"anchor": lambda: next(lives)}, policy)
    assert set(found.dropped) == {"anchor"}
    assert len(found.rounds) == 30
    assert found.stopped == "clear"


class Weather:
    """Says after each round what disturbed it: the given words, over and over."""

    def __init__(self, race: Race, *words: str) -> None:
        self.race, self.words = race, itertools.cycle(words)
        self.policy = {"begin_round": lambda: race.log.append("begin"), "end_round": self.end}

    def end(self) -> str:
        self.race.log.append("end")
        return next(self.words)


def test_disturbed_rounds_are_kept_apart_and_made_again():
    race = Race(a=1, b=2)
    weather = Weather(race, "", "", "steal 9 %")
    found = race.measure(blocks=4, max_rounds=6, half_width=0, **weather.policy)
    assert Counter(found.blocks) == dict.fromkeys(range(4), 6), "as many as without disturbance"
    assert {r.disturbed for r in found.rounds} == {""}
    assert {r.disturbed for r in found.disturbed} == {"steal 9 %"}
    assert found.made == len(found.rounds) + len(found.disturbed) == 35
    assert all(set(r.seconds) == {"a", "b"} for r in found.disturbed), "nothing is lost"
    places = [(r.block, r.index) for r in [*found.rounds, *found.disturbed]]
    assert len(set(places)) == len(places)
    assert found.spent_s == 3 * found.made, "they were paid for"
    assert found.stopped == "complete"


def test_the_watch_is_set_around_each_round():
    race = Race(a=1, b=2)
    weather = Weather(race, "")
    race.measure(blocks=2, max_rounds=3, half_width=0, **weather.policy)
    assert len(race.log) == 2 * (1 + 3 * 4)
    assert [entry for entry in race.log if entry not in "ab"] == (["block 0"] + ["begin", "end"] * 3) + (
        ["block 1"] + ["begin", "end"] * 3
    )


@pytest.mark.parametrize("words", [["hot"], ["hot", "hot", ""]])
def test_a_machine_that_is_mostly_disturbed_is_given_up_where_that_is_refused(words):
    race = Race(a=1, b=2)
    weather = Weather(race, *words)
    found = race.measure(blocks=14, max_rounds=20, disturbed="refuse", **weather.policy)
    assert found.stopped == "disturbed"
    assert found.made <= 40, "soon, and at any rate"


def test_a_machine_that_is_always_disturbed_ends_within_its_budget():
    race = Race(a=1, b=2)
    weather = Weather(race, "hot")
    found = race.measure(budget_s=7, disturbed="refuse", **weather.policy)
    assert found.stopped == "disturbed"
    assert found.rounds == []
    assert found.spent_s <= 7
    assert found.table().empty


@pytest.mark.parametrize("words", [["hot"], ["hot", "hot", ""]])
def test_where_it_is_never_quiet_all_rounds_count(words):
    race = Race(a=1, b=2)
    weather = Weather(race, *words)
    found = race.measure(blocks=14, max_rounds=20, **weather.policy)
    assert found.stopped == "tight"
    assert found.disturbed == []
    assert sum(bool(r.disturbed) for r in found.rounds) >= len(found.rounds) / 2
    assert Counter(found.blocks) >= Counter(dict.fromkeys(range(MIN_BLOCKS), 5))


def test_quiet_blocks_are_waited_for_and_count_alone():
    """The first two blocks are all disturbed; once six others are quiet those count."""
    race = Race(a=1, b=2)
    weather = Weather(race, *["hot"] * 15, *[""] * 1000)
    found = race.measure(blocks=14, max_rounds=20, **weather.policy)
    assert set(found.blocks) == set(range(2, 8))
    assert len(found.disturbed) == 15
    assert not any(r.disturbed for r in found.rounds)


def test_where_it_is_never_quiet_no_round_is_made_again():
    race = Race(a=1, b=2)
    weather = Weather(race, "hot")
    found = race.measure(blocks=7, half_width=0, max_rounds=6, **weather.policy)
    assert Counter(found.blocks) == {0: 12} | dict.fromkeys(range(1, 7), 6)


def test_who_has_no_quiet_time_makes_all_rounds_count():
    rounds = Rounds(
        rounds=[Round(block, 0, {"a": 1.0}) for block in range(6)],
        disturbed=[Round(block, 1, {"a": 1.0, "b": 2.0}, "hot") for block in range(6)],
    )
    assert rounds.choose(6)
    assert (len(rounds.rounds), rounds.disturbed) == (12, [])
    rounds.dropped["b"] = "gone"
    assert not rounds.choose(6)
    assert (len(rounds.rounds), len(rounds.disturbed)) == (6, 6)


def test_half_the_rounds_disturbed_is_a_measurement_yet():
    race = Race(a=1, b=2)
    weather = Weather(race, "", "hot")
    found = race.measure(**weather.policy)
    assert found.stopped == "tight"
    assert Counter(found.blocks) == dict.fromkeys(range(MIN_BLOCKS), 5)


def test_who_is_slow_has_its_turn_in_a_round_that_counts():
    race = Race(a=1, b=1, slow=9)
    weather = Weather(race, "hot", "", "")
    found = race.measure(blocks=3, max_rounds=4, slow=4.0, half_width=0, **weather.policy)
    assert sum("slow" in r.seconds for r in found.rounds) == 3
    assert all("slow" in r.seconds for r in found.rounds if r.index < 2)


def test_who_was_never_timed_undisturbed_is_not_waited_for():
    """Its only turns were in disturbed rounds; the others are far apart, and that ends it."""
    race = Race(a=1, b=2)
    lives = iter([1e-3])
    race.contenders["once"] = lambda: next(lives)
    weather = Weather(race, "hot", *[""] * 1000)
    found = race.measure(**weather.policy)
    assert found.stopped == "tight"
    assert set(found.dropped) == {"once"}


def test_the_first_look_has_enough_blocks_that_count():
    """A block whose rounds were all disturbed shows nothing of what a preparation makes."""
    race = Race(a=1, b=2)
    weather = Weather(race, *["hot"] * 10, *[""] * 1000)
    found = race.measure(**weather.policy)
    assert len(set(found.blocks)) == MIN_BLOCKS
    assert found.stopped == "tight"
