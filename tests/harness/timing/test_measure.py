"""harness.timing.rounds.measure, with entries that only move a clock."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from harness.statistics.intervals import MIN_BLOCKS
from harness.statistics.paired import compare
from harness.timing.rounds import Policy, Round, Rounds, measure
from tests.support.simulated_machine import Machine, Noise

SHORT = dict.fromkeys(range(MIN_BLOCKS), 5)


class Race:
    """Entries that take known seconds a sample, and what they were asked to do, in order."""

    def __init__(self, **sample_s: float) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.entries = {name: self.sample(name, s) for name, s in sample_s.items()}

    def clock(self) -> float:
        return self.now

    def sample(self, name: str, took: float, value: object = None) -> Callable[[], object]:
        """A turn that takes so long and gives a thousandth of it as its time, or `value`."""

        def run() -> object:
            self.log.append(name)
            self.now += took
            return took / 1000 if value is None else value

        return run

    def begin_block(self, block: int, entries: object) -> None:
        self.log.append(f"block {block}")
        self.now += 1000.0

    def measure(self, *disturbances: str, **policy: object) -> Rounds:
        """disturbances: what the rounds are disturbed by, over and over"""
        if disturbances:
            words = itertools.cycle(disturbances)
            policy = {
                "begin_round": lambda: self.log.append("begin"),
                "end_round": lambda: self.end(words),
            } | policy
        policy = {"budget_s": 1e9, "clock": self.clock, "begin_block": self.begin_block} | policy
        return measure(self.entries, Policy(**policy))

    def end(self, words: Iterator[str]) -> str:
        self.log.append("end")
        return next(words)


def raising(error: BaseException) -> Callable[[], float]:
    def sample() -> float:
        raise error

    return sample


def test_every_round_holds_every_entry_in_an_order_of_its_own():
    race = Race(a=1, b=2, c=3)
    race.measure(blocks=5, max_rounds=40)
    samples = [name for name in race.log if not name.startswith("block")]
    found = [tuple(samples[i : i + 3]) for i in range(0, len(samples), 3)]
    assert len(found) == 200
    assert all(sorted(order) == ["a", "b", "c"] for order in found)
    # All six orders, each about equally often: 200 / 6 = 33, standard deviation 5.
    counts = Counter(found)
    assert len(counts) == 6
    assert all(12 < n < 55 for n in counts.values())
    logs = []
    for seed in (0, 1):
        again = Race(a=1, b=2, c=3)
        again.measure(blocks=5, max_rounds=40, seed=seed)
        logs.append(again.log)
    assert race.log == logs[0] != logs[1]


def test_blocks_and_rounds_are_numbered_prepared_and_watched():
    race = Race(a=1, b=2)
    found = race.measure("", blocks=3, max_rounds=4)
    assert [(r.block, r.index) for r in found.rounds] == [(b, i) for b in range(3) for i in range(4)]
    watched = [[f"block {block}", *["begin", "end"] * 4] for block in range(3)]
    assert [entry for entry in race.log if entry not in "ab"] == list(itertools.chain(*watched))
    assert (found.stopped, found.dropped) == ("complete", {})


def test_one_that_fails_later_keeps_its_earlier_times_and_gets_no_other_turn():
    race = Race(a=1, b=2)
    values = iter([0.5, -1.0])
    race.entries["late"] = lambda: next(values)  # a further sample would raise StopIteration
    found = race.measure(blocks=2, max_rounds=3)
    assert found.dropped == {"late": "gave -1.0 as its time"}
    late, *nothing = found.series("late")
    assert (late, len(nothing), all(map(math.isnan, nothing))) == (0.5, 5, True)
    assert (found.series("a"), found.series("b")) == ([0.001] * 6, [0.002] * 6)


@pytest.mark.parametrize("budget_s", [0.001, 3, 10, 16, 59, 60, 61, 200, 1000])
def test_the_budget_holds_and_is_shared_by_the_blocks(budget_s):
    race = Race(a=1, b=2)
    found = race.measure(blocks=5, max_rounds=20, budget_s=budget_s)
    one_round = 3
    assert found.spent_s == one_round * len(found.rounds) == race.now % 1000, "preparing is not on it"
    assert found.spent_s <= max(budget_s, one_round), "one round at any rate, and then none that does not fit"
    assert found.stopped == ("complete" if budget_s >= 5 * 20 * one_round else "budget")
    rounds = Counter(found.blocks)
    assert len(rounds) == min(5, max(1, int(budget_s // one_round)))
    assert max(rounds.values()) - min(rounds.values()) <= 1


@pytest.mark.parametrize(("lengths", "blocks"), [
    ([1, 1, 5, 1], [0, 0, 0]),  # as long as the one before
    ([5, 1, 1, 1], [0, 1, 1]),  # in a block that would be prepared for it as long as the longest so far
])  # fmt: skip
def test_no_round_is_begun_that_may_not_fit(lengths, blocks):
    race = Race()
    left = iter(lengths)
    race.entries["a"] = lambda: race.sample("a", next(left))()
    found = race.measure(blocks=2 * blocks[-1] + 1, budget_s=10)
    assert (found.blocks, found.stopped) == (blocks, "budget")


def test_the_budget_of_the_first_blocks_is_shared_and_the_rest_makes_no_crumbs():
    found = Machine({"a": 1.0, "b": 1.0}, Noise(own=0.2)).measured(budget_s=0.1 * 42)
    assert Counter(found.blocks) == {0: 5, 1: 5, 2: 5, 3: 5, 4: 5, 5: 5, 6: 6, 7: 6}
    assert found.stopped == "budget"


@pytest.mark.parametrize(("preparing_s", "rounds"), [(0.0, [5, 5, 6]), (1.5, [15]), (3.0, [])])
def test_what_is_left_over_is_worth_preparing_for_as_long_as_that_takes(preparing_s, rounds):
    """A round is 0.1 s, and what is left after the first blocks 1.6 s."""
    machine = Machine({"a": 1.0, "b": 1.0}, Noise(own=0.2))

    def prepare(*_: object) -> None:
        machine.now += preparing_s

    found = machine.measured(begin_block=prepare, budget_s=0.1 * (30 + 16))
    later = Counter(block for block in found.blocks if block >= MIN_BLOCKS)
    assert [later[block] for block in sorted(later)] == rounds
    assert found.stopped == "budget"


def test_one_that_fails_costs_itself_only():
    race = Race(a=1, b=2)
    values = {repr(value): value for value in (math.nan, math.inf, 0.0, -1.0, None, "1.0")}
    race.entries |= {name: (lambda value=value: value) for name, value in values.items()}
    race.entries |= {"raises": raising(RuntimeError("out of luck")), "KeyError": raising(KeyError())}
    found = race.measure(blocks=5, max_rounds=4)
    wanted = {name: f"gave {name} as its time" for name in values}
    assert found.dropped == wanted | {"raises": "out of luck", "KeyError": "KeyError"}
    assert len(found.rounds) == 20
    assert all(set(r.seconds) == {"a", "b"} for r in found.rounds)
    assert found.stopped == "complete"


def test_what_a_failure_wasted_is_not_the_others_budget():
    race = Race(a=1, b=1)
    race.entries["slow and wrong"] = race.sample("slow and wrong", 1000.0, value=-1.0)
    assert race.measure(blocks=5, max_rounds=4, budget_s=40).spent_s == 40


@pytest.mark.parametrize("names", ["", "ab"])
def test_nobody_is_left(names):
    race = Race()
    race.entries = {name: raising(ValueError(name)) for name in names}
    found = race.measure()
    assert (found.stopped, found.spent_s) == ("no entries", 0)
    assert found.dropped == {name: name for name in names}
    assert race.log == ["block 0"][: len(names)], "nothing is prepared for nobody"


@pytest.mark.parametrize(("sample_s", "samples"), [
    ({"a": 1, "b": 3, "c": 9}, {"a": 12, "b": 12, "c": 3}),
    ({"a": 1, "b": 5, "c": 9}, {"a": 12, "b": 12, "c": 12}),  # only the fastest would be left
])  # fmt: skip
def test_who_is_slow_has_a_turn_in_the_first_round_of_each_block_only(sample_s, samples):
    race = Race(**sample_s)
    found = race.measure(blocks=3, max_rounds=4, slow=4.0)
    assert {name: race.log.count(name) for name in samples} == samples
    assert samples["c"] == 12 or [r.index for r in found.rounds if "c" in r.seconds] == [0, 0, 0]
    assert found.dropped == {}


def test_a_slow_entry_has_its_sample_in_a_round_that_counts():
    race = Race(a=1, b=1, slow=9)
    found = race.measure("hot", "", "", blocks=3, max_rounds=4, slow=4.0, half_width=0)
    assert sum("slow" in r.seconds for r in found.rounds) == 3
    assert all("slow" in r.seconds for r in found.rounds if r.index < 2)


@pytest.mark.parametrize(
    ("b", "own", "policy", "rounds", "stopped"),
    [
        (2.0, 0.0, {}, SHORT, "tight"),
        (1.5, 0.03, {}, SHORT, "clear"),  # though the interval is wide
        (1.0, 0.1, {}, SHORT | dict.fromkeys(range(6, 14), 20), "complete"),
        (2.0, 0.0, {"half_width": 0, "blocks": 8, "max_rounds": 3}, dict.fromkeys(range(8), 3), "complete"),
    ],
    ids=["tight", "clear", "never", "to the end"],
)
def test_measuring_ends(b, own, policy, rounds, stopped):
    found = Machine({"a": 1.0, "b": b}, Noise(own=own)).measured(**policy)
    assert (Counter(found.blocks), found.stopped) == (rounds, stopped)


def test_who_is_slow_is_not_waited_for():
    """Its own times lie so far apart that nothing would be clear of it."""
    race = Race(a=1, b=2)
    times = itertools.cycle([0.005, 0.5])
    race.entries["slow"] = lambda: next(times)
    found = race.measure(slow=4.0)
    assert (Counter(found.blocks), found.stopped) == (SHORT, "tight")


def test_measuring_ends_without_an_baseline_that_failed():
    machine = Machine({"anchor": 1.0, "again": 1.0, "a": 1.0, "b": 2.0}, Noise(own=0.03))
    lives = iter([1.0] * 3)  # a further sample raises StopIteration
    entries = machine.entries | {"anchor": lambda: next(lives)}
    found = measure(entries, machine.policy(baseline="anchor", rerun="again"))
    assert set(found.dropped) == {"anchor"}
    assert (len(found.rounds), found.stopped) == (30, "clear")


def test_who_was_never_timed_undisturbed_is_not_waited_for():
    """Its only samples were in disturbed rounds; the others are far apart, and that ends it."""
    race = Race(a=1, b=2)
    lives = iter([1e-3])
    race.entries["once"] = lambda: next(lives)
    found = race.measure("hot", *[""] * 1000)
    assert found.stopped == "tight"
    assert set(found.dropped) == {"once"}


def test_disturbed_rounds_are_kept_apart_and_made_again():
    found = Race(a=1, b=2).measure("", "", "steal 9 %", blocks=4, max_rounds=6, half_width=0)
    assert Counter(found.blocks) == dict.fromkeys(range(4), 6), "as many as without disturbance"
    assert {r.disturbed for r in found.rounds} == {""}
    assert {r.disturbed for r in found.left_out} == {"steal 9 %"}
    assert len(found.made) == len(found.rounds) + len(found.left_out) == 35
    assert all(set(r.seconds) == {"a", "b"} for r in found.left_out), "nothing is lost"
    places = [(r.block, r.index) for r in [*found.rounds, *found.left_out]]
    assert len(set(places)) == len(places)
    assert found.spent_s == 3 * len(found.made), "they were paid for"
    assert found.stopped == "complete"


@pytest.mark.parametrize(
    ("words", "budget_s", "most"), [(["hot"], 1e9, 40), (["hot", "hot", ""], 1e9, 40), (["hot"], 7, 2)]
)
def test_a_machine_that_is_mostly_disturbed_is_given_up_where_that_is_refused(words, budget_s, most):
    found = Race(a=1, b=2).measure(*words, disturbed="refuse", budget_s=budget_s)
    assert found.stopped == "disturbed"
    assert len(found.made) <= most, "soon, and at any rate"
    assert bool(found.rounds) is ("" in words)


@pytest.mark.parametrize("words", [["hot"], ["hot", "hot", ""], ["", "hot"]])
def test_where_it_is_never_quiet_all_rounds_count(words):
    """Half of the rounds is a measurement yet."""
    found = Race(a=1, b=2).measure(*words)
    mostly = words[0] == "hot"
    assert (found.stopped, bool(found.left_out)) == ("tight", not mostly)
    assert any(r.disturbed for r in found.rounds) is mostly
    assert Counter(found.blocks) >= Counter(SHORT)


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [({}, {0: 12} | dict.fromkeys(range(1, 7), 6)), ({"disturbed": "keep"}, dict.fromkeys(range(7), 6))],
)
def test_where_it_is_never_quiet_or_all_rounds_are_kept_none_is_made_again(policy, rounds):
    found = Race(a=1, b=2).measure("hot", blocks=7, half_width=0, max_rounds=6, **policy)
    assert Counter(found.blocks) == rounds


@pytest.mark.parametrize(("hot", "blocks"), [(15, range(2, 8)), (10, range(1, 7))])
def test_quiet_blocks_are_waited_for_and_count_alone(hot, blocks):
    """A block whose rounds were all disturbed shows nothing of what a preparation makes."""
    found = Race(a=1, b=2).measure(*["hot"] * hot, *[""] * 1000)
    assert set(found.blocks) == set(blocks)
    assert (len(found.left_out), found.stopped) == (hot, "tight")
    assert not any(r.disturbed for r in found.rounds)


def test_who_has_no_quiet_time_makes_all_rounds_count():
    made = [
        (Round(block, 0, {"a": 1.0}), Round(block, 1, {"a": 1.0, "b": 2.0}, "hot", use="left out"))
        for block in range(6)
    ]
    rounds = Rounds([each for block in made for each in block])
    assert rounds.choose(6)
    assert (len(rounds.rounds), rounds.left_out) == (12, [])
    rounds.dropped["b"] = "gone"
    assert not rounds.choose(6)
    assert (len(rounds.rounds), len(rounds.left_out)) == (6, 6)


class Neighbours(Machine):
    """Others come and go every thirty samples or so, are seen, and double a sample's time, give or take 30
    %."""

    here = seen = False

    def sample(self, name: str) -> float:
        self.here ^= self.random.random() < 1 / 30
        self.seen |= self.here
        return super().sample(name) * (2 * math.exp(self.random.gauss(0, 0.3)) if self.here else 1)

    def end_round(self) -> str:
        seen, self.seen = self.seen, False
        return "neighbours" if seen else ""


@pytest.mark.parametrize(("b", "verdicts"), [(1.0, {"same", "unclear"}), (1.5, {"faster"})])
def test_verdicts_beside_neighbours_that_come_and_go(b, verdicts):
    """A function that is as fast is not called otherwise, and one that takes half as long again is found; 5 %
    may be wrong."""
    wrong = 0
    for seed in range(40):
        machine = Neighbours({"a": 1.0, "b": b}, seed=seed)
        found = machine.measured(end_round=machine.end_round)
        compared = compare(found.series("a"), found.series("b"), blocks=found.blocks)
        wrong += compared.verdict not in verdicts
    assert wrong <= 3
