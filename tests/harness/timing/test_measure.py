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
    """Entries whose samples take known seconds, and a log of what was asked of them, in order."""

    def __init__(self, **sample_s: float) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.entries = {name: self.sample(name, s) for name, s in sample_s.items()}

    def clock(self) -> float:
        return self.now

    def sample(self, name: str, took: float, value: object = None) -> Callable[[], object]:
        """A sampler that takes `took` seconds and returns a thousandth of them as its time, or `value`."""

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
    measured = [tuple(samples[i : i + 3]) for i in range(0, len(samples), 3)]
    assert len(measured) == 200
    assert all(sorted(order) == ["a", "b", "c"] for order in measured)
    # All six orders, each about equally often: 200 / 6 = 33, standard deviation 5.
    counts = Counter(measured)
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
    measured = race.measure("", blocks=3, max_rounds=4)
    assert [(r.block, r.index) for r in measured.rounds] == [(b, i) for b in range(3) for i in range(4)]
    watched = [[f"block {block}", *["begin", "end"] * 4] for block in range(3)]
    assert [entry for entry in race.log if entry not in "ab"] == list(itertools.chain(*watched))
    assert (measured.stopped, measured.dropped) == ("complete", {})


def test_an_entry_that_fails_later_keeps_its_times_and_gets_no_further_sample():
    race = Race(a=1, b=2)
    values = iter([0.5, -1.0])
    race.entries["late"] = lambda: next(values)  # a further sample would raise StopIteration
    measured = race.measure(blocks=2, max_rounds=3)
    assert measured.dropped == {"late": "gave -1.0 as its time"}
    late, *nothing = measured.series("late")
    assert (late, len(nothing), all(map(math.isnan, nothing))) == (0.5, 5, True)
    assert (measured.series("a"), measured.series("b")) == ([0.001] * 6, [0.002] * 6)


@pytest.mark.parametrize("budget_s", [0.001, 3, 10, 16, 59, 60, 61, 200, 1000])
def test_the_budget_holds_and_is_shared_by_the_blocks(budget_s):
    race = Race(a=1, b=2)
    measured = race.measure(blocks=5, max_rounds=20, budget_s=budget_s)
    one_round = 3
    assert measured.spent_s == one_round * len(measured.rounds) == race.now % 1000, "without preparing"
    assert measured.spent_s <= max(budget_s, one_round), "one round in any case, and others that fit"
    assert measured.stopped == ("complete" if budget_s >= 5 * 20 * one_round else "budget")
    rounds = Counter(measured.blocks)
    assert len(rounds) == min(5, max(1, int(budget_s // one_round)))
    assert max(rounds.values()) - min(rounds.values()) <= 1


@pytest.mark.parametrize(("lengths", "blocks"), [
    ([1, 1, 5, 1], [0, 0, 0]),  # a round is expected to take as long as the last one
    ([5, 1, 1, 1], [0, 1, 1]),  # the first round of a block: as long as the longest one so far
])  # fmt: skip
def test_no_round_is_begun_that_may_not_fit(lengths, blocks):
    race = Race()
    left = iter(lengths)
    race.entries["a"] = lambda: race.sample("a", next(left))()
    measured = race.measure(blocks=2 * blocks[-1] + 1, budget_s=10)
    assert (measured.blocks, measured.stopped) == (blocks, "budget")


def test_opening_blocks_share_the_budget_and_no_later_block_is_short():
    measured = Machine({"a": 1.0, "b": 1.0}, Noise(own=0.2)).measured(budget_s=0.1 * 42)
    assert Counter(measured.blocks) == {0: 5, 1: 5, 2: 5, 3: 5, 4: 5, 5: 5, 6: 6, 7: 6}
    assert measured.stopped == "budget"


@pytest.mark.parametrize(("preparing_s", "rounds"), [(0.0, [5, 5, 6]), (1.5, [15]), (3.0, [])])
def test_a_later_block_is_begun_if_as_much_time_is_left_as_preparing_takes(preparing_s, rounds):
    """A round takes 0.1 s, and 1.6 s are left after the opening blocks."""
    machine = Machine({"a": 1.0, "b": 1.0}, Noise(own=0.2))

    def prepare(*_: object) -> None:
        machine.now += preparing_s

    measured = machine.measured(begin_block=prepare, budget_s=0.1 * (30 + 16))
    later = Counter(block for block in measured.blocks if block >= MIN_BLOCKS)
    assert [later[block] for block in sorted(later)] == rounds
    assert measured.stopped == "budget"


def test_an_entry_that_fails_costs_itself_only():
    race = Race(a=1, b=2)
    values = {repr(value): value for value in (math.nan, math.inf, 0.0, -1.0, None, "1.0")}
    race.entries |= {name: (lambda value=value: value) for name, value in values.items()}
    race.entries |= {"raises": raising(RuntimeError("out of luck")), "KeyError": raising(KeyError())}
    measured = race.measure(blocks=5, max_rounds=4)
    wanted = {name: f"gave {name} as its time" for name in values}
    assert measured.dropped == wanted | {"raises": "out of luck", "KeyError": "KeyError"}
    assert len(measured.rounds) == 20
    assert all(set(r.seconds) == {"a", "b"} for r in measured.rounds)
    assert measured.stopped == "complete"


def test_seconds_of_a_failed_sample_do_not_count_as_spent():
    race = Race(a=1, b=1)
    race.entries["slow and wrong"] = race.sample("slow and wrong", 1000.0, value=-1.0)
    assert race.measure(blocks=5, max_rounds=4, budget_s=40).spent_s == 40


@pytest.mark.parametrize("names", ["", "ab"])
def test_measuring_ends_where_no_entry_is_left(names):
    race = Race()
    race.entries = {name: raising(ValueError(name)) for name in names}
    measured = race.measure()
    assert (measured.stopped, measured.spent_s) == ("no entries", 0)
    assert measured.dropped == {name: name for name in names}
    assert race.log == ["block 0"][: len(names)], "without entries no block is prepared"


@pytest.mark.parametrize(("sample_s", "samples"), [
    ({"a": 1, "b": 3, "c": 9}, {"a": 12, "b": 12, "c": 3}),
    ({"a": 1, "b": 5, "c": 9}, {"a": 12, "b": 12, "c": 12}),  # only the fastest would be left
])  # fmt: skip
def test_a_slow_entry_is_sampled_in_the_first_round_of_each_block_only(sample_s, samples):
    race = Race(**sample_s)
    measured = race.measure(blocks=3, max_rounds=4, slow=4.0)
    assert {name: race.log.count(name) for name in samples} == samples
    assert samples["c"] == 12 or [r.index for r in measured.rounds if "c" in r.seconds] == [0, 0, 0]
    assert measured.dropped == {}


def test_a_slow_entry_has_its_sample_in_a_round_that_counts():
    race = Race(a=1, b=1, slow=9)
    measured = race.measure("hot", "", "", blocks=3, max_rounds=4, slow=4.0, half_width=0)
    assert sum("slow" in r.seconds for r in measured.rounds) == 3
    assert all("slow" in r.seconds for r in measured.rounds if r.index < 2)


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
    measured = Machine({"a": 1.0, "b": b}, Noise(own=own)).measured(**policy)
    assert (Counter(measured.blocks), measured.stopped) == (rounds, stopped)


def test_measuring_does_not_go_on_for_a_slow_entry():
    """The slow entry has times so far apart that its comparisons stay unclear."""
    race = Race(a=1, b=2)
    times = itertools.cycle([0.005, 0.5])
    race.entries["slow"] = lambda: next(times)
    measured = race.measure(slow=4.0)
    assert (Counter(measured.blocks), measured.stopped) == (SHORT, "tight")


def test_measuring_ends_without_a_baseline_that_failed():
    machine = Machine({"anchor": 1.0, "again": 1.0, "a": 1.0, "b": 2.0}, Noise(own=0.03))
    lives = iter([1.0] * 3)  # a further sample raises StopIteration
    entries = machine.entries | {"anchor": lambda: next(lives)}
    measured = measure(entries, machine.policy(baseline="anchor", rerun="again"))
    assert set(measured.dropped) == {"anchor"}
    assert (len(measured.rounds), measured.stopped) == (30, "clear")


def test_measuring_does_not_go_on_for_an_entry_without_a_quiet_time():
    """It was sampled in a disturbed round only. The other two entries are far apart: that ends measuring."""
    race = Race(a=1, b=2)
    lives = iter([1e-3])
    race.entries["once"] = lambda: next(lives)
    measured = race.measure("hot", *[""] * 1000)
    assert measured.stopped == "tight"
    assert set(measured.dropped) == {"once"}


def test_disturbed_rounds_are_kept_apart_and_made_again():
    measured = Race(a=1, b=2).measure("", "", "steal 9 %", blocks=4, max_rounds=6, half_width=0)
    assert Counter(measured.blocks) == dict.fromkeys(range(4), 6), "as many as without disturbance"
    assert {r.disturbed for r in measured.rounds} == {""}
    assert {r.disturbed for r in measured.left_out} == {"steal 9 %"}
    assert len(measured.made) == len(measured.rounds) + len(measured.left_out) == 35
    assert all(set(r.seconds) == {"a", "b"} for r in measured.left_out), "nothing is lost"
    places = [(r.block, r.index) for r in [*measured.rounds, *measured.left_out]]
    assert len(set(places)) == len(places)
    assert measured.spent_s == 3 * len(measured.made), "their time was spent"
    assert measured.stopped == "complete"


@pytest.mark.parametrize(
    ("words", "budget_s", "most"), [(["hot"], 1e9, 40), (["hot", "hot", ""], 1e9, 40), (["hot"], 7, 2)]
)
def test_a_machine_that_is_mostly_disturbed_is_given_up_where_that_is_refused(words, budget_s, most):
    measured = Race(a=1, b=2).measure(*words, disturbed="refuse", budget_s=budget_s)
    assert measured.stopped == "disturbed"
    assert len(measured.made) <= most, "measuring ended soon"
    assert bool(measured.rounds) is ("" in words)


@pytest.mark.parametrize("words", [["hot"], ["hot", "hot", ""], ["", "hot"]])
def test_where_it_is_never_quiet_all_rounds_count(words):
    """Where half of the rounds are quiet, only these count."""
    measured = Race(a=1, b=2).measure(*words)
    mostly = words[0] == "hot"
    assert (measured.stopped, bool(measured.left_out)) == ("tight", not mostly)
    assert any(r.disturbed for r in measured.rounds) is mostly
    assert Counter(measured.blocks) >= Counter(SHORT)


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [({}, {0: 12} | dict.fromkeys(range(1, 7), 6)), ({"disturbed": "keep"}, dict.fromkeys(range(7), 6))],
)
def test_where_it_is_never_quiet_or_all_rounds_are_kept_none_is_made_again(policy, rounds):
    measured = Race(a=1, b=2).measure("hot", blocks=7, half_width=0, max_rounds=6, **policy)
    assert Counter(measured.blocks) == rounds


@pytest.mark.parametrize(("hot", "blocks"), [(15, range(2, 8)), (10, range(1, 7))])
def test_quiet_blocks_are_waited_for_and_count_alone(hot, blocks):
    """A block whose rounds were all disturbed shows nothing of the effect of its preparation."""
    measured = Race(a=1, b=2).measure(*["hot"] * hot, *[""] * 1000)
    assert set(measured.blocks) == set(blocks)
    assert (len(measured.left_out), measured.stopped) == (hot, "tight")
    assert not any(r.disturbed for r in measured.rounds)


def test_an_entry_without_a_quiet_time_makes_all_rounds_count():
    made = [
        (Round(block, 0, {"a": 1.0}), Round(block, 1, {"a": 1.0, "b": 2.0}, "hot", use="left out"))
        for block in range(6)
    ]
    rounds = Rounds([each for block in made for each in block])
    assert not rounds.choose_counted(6)
    assert (len(rounds.rounds), rounds.left_out) == (12, [])
    rounds.dropped["b"] = "gone"
    assert rounds.choose_counted(6)
    assert (len(rounds.rounds), len(rounds.left_out)) == (6, 6)


class Neighbours(Machine):
    """Other work comes and goes every 30 samples or so, is seen, and about doubles the time of a sample."""

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
    """Equal entries are seldom told apart, and one that takes 1.5 times as long is found to be slower."""
    wrong = 0
    for seed in range(40):
        machine = Neighbours({"a": 1.0, "b": b}, seed=seed)
        measured = machine.measured(end_round=machine.end_round)
        compared = compare(measured.series("a"), measured.series("b"), blocks=measured.blocks)
        wrong += compared.verdict not in verdicts
    assert wrong <= 3
