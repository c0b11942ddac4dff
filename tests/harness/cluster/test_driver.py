"""The driver on devices that are not there: none of what fails, hangs, leaves or joins loses a case."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cluster.dispatch import MOST_FAILURES
from harness.cluster.driver import NO_DEVICE_S, Driver
from harness.cluster.jobs import RunJob
from harness.errors import NothingRan
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Record
from harness.run.plan import RunPlan
from harness.run.request import Request
from tests.support.simulated_pool import SimulatedPool, made_up_run


def ten_seconds(device: str, case: str) -> float:
    return 10.0


class Driven:
    """A made-up run of so many cases, driven on a pool until the driver ends."""

    def __init__(
        self, folder: Path, pool: SimulatedPool, cases: int, ends: float = float("inf"), type: str = "cpu"
    ) -> None:
        self.lines: list[str] = []
        self.shown: list[str] = []
        run = made_up_run(cases)
        self.journal = Journal(folder) if (folder / "run.json").exists() else Journal.create(folder, run)
        plan = RunPlan.of(self.journal.run(), Request())
        self.job = RunJob("run", type, 0, self.journal, plan, Request(), self._on_case, 0)
        self.driver = Driver(pool, self.lines.append, ends=ends, clock=pool.clock)
        with self.driver:
            self.driver.open()
            self.driver.add([self.job])
            self.driver.run()

    def _on_case(self, case: object, records: list[Record]) -> None:
        self.shown += [record.case for record in records if isinstance(record, CaseDone)]

    @property
    def recorded(self) -> list[str]:
        """Keys in the order of the journal, each as often as it stands there."""
        return [r.case for r in self.journal.lines.records() if isinstance(r, CaseDone)]


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., Driven]:
    return lambda pool, cases, **rest: Driven(tmp_path / "run", pool, cases, **rest)


def keys(count: int) -> list[str]:
    return [f"case {i}" for i in range(count)]


def pool(names: str, takes: Callable[[str, str], float | str] = ten_seconds, **more: object) -> SimulatedPool:
    return SimulatedPool(dict.fromkeys(names, "cpu"), takes, **more)


def failing(fault: str, *which: tuple[str, str]) -> Callable[[str, str], float | str]:
    return lambda device, case: fault if (device, case) in which else 10.0


def test_devices_share_the_cases_and_the_first_are_begun_first(drive):
    four = pool("abcd")
    driven = drive(four, 40)
    assert sorted(driven.recorded) == sorted(keys(40))
    assert [case for _, case in four.measured] == keys(40)
    assert Counter(device for device, _ in four.measured) == dict.fromkeys("abcd", 10)
    assert four.now < 5 + 10 * 10 + 5 and four.closed
    assert {device.name for device in driven.journal.devices()} == set("abcd")
    assert {r.device for r in driven.journal.lines.records() if isinstance(r, CaseDone)} == set("abcd")


@pytest.mark.parametrize("fault", ["dies", "hangs", "fails"])
def test_what_fails_on_one_device_is_measured_on_another(drive, fault: str):
    two = pool("ab", failing(fault, ("a", "case 0")))
    driven = drive(two, 6)
    assert sorted(driven.recorded) == keys(6)
    assert ("b", "case 0") in two.measured
    (line,) = [line for line in driven.lines if "case 0" in line]
    assert line.startswith("a: ") and line.endswith(", in case 0: given to another device")


def test_a_device_that_fails_twice_in_a_row_is_left_out(drive):
    two = pool("ab", lambda d, c: "fails" if d == "a" else 10.0)
    driven = drive(two, 8)
    assert sorted(driven.recorded) == keys(8)
    assert {device for device, _ in two.measured} == {"b"}
    (line,) = [line for line in driven.lines if "left out" in line]
    assert line.endswith("a is left out, as it failed 2 times in a row")


def test_a_device_that_did_something_in_between_has_not_failed_in_a_row(drive):
    driven = drive(pool("ab", failing("fails", ("a", "case 0"), ("a", "case 3"))), 12)
    assert sorted(driven.recorded) == sorted(keys(12))
    assert sum("out of luck" in line for line in driven.lines) == 2
    assert not any("left out" in line for line in driven.lines)


def test_a_case_that_kills_every_device_is_given_up_and_costs_nobody(drive):
    """Devices that finish something in between are sound."""
    driven = drive(pool("abc", lambda d, c: "dies" if c == "case 2" else 10.0), 12)
    assert sorted(driven.recorded) == sorted(set(keys(12)) - {"case 2"})
    assert [task.key for task in driven.driver.dispatcher.given_up] == ["case 2"]
    assert any("case 2: given up, as " in line for line in driven.lines)
    assert not any("left out" in line for line in driven.lines)
    assert [case.key for case in driven.job.left_out] != []


def test_the_only_device_tries_again_after_the_others(drive):
    tries: Counter[str] = Counter()

    def once(device: str, case: str) -> float | str:
        tries[case] += 1
        return "dies" if case == "case 0" and tries[case] == 1 else 10.0

    assert drive(pool("a", once), 4).recorded == ["case 1", "case 2", "case 3", "case 0"]


def test_the_only_device_that_always_fails_ends_it_in_one_line(drive):
    driven = drive(pool("a", lambda d, c: "dies"), 4)
    assert driven.recorded == []
    assert sum("left out" in line for line in driven.lines) == 1
    assert len(driven.lines) == 2 * MOST_FAILURES and "a is back" in driven.lines
    assert driven.lines[-1] == "no device is left for 4 of what waits"


def test_a_device_that_joins_late_helps_and_one_that_leaves_costs_the_case_it_was_on(drive):
    three = pool("abc", joins={"b": 50.0}, leaves={"c": 32.0})
    driven = drive(three, 20)
    assert Counter(driven.recorded) == Counter(keys(20))
    assert Counter(device for device, _ in three.measured)["b"] >= 3
    assert "b has joined" in driven.lines


def test_when_all_have_left_it_waits_a_while_and_ends(drive):
    one = pool("a", leaves={"a": 32.0})
    driven = drive(one, 20)
    assert len(driven.recorded) == 2 and driven.driver.failed
    assert driven.lines[-1] == "no device is left for 18 of what waits"
    assert 32 + NO_DEVICE_S <= one.now <= 32 + NO_DEVICE_S + 10


def test_one_that_comes_while_it_waits_goes_on(drive):
    assert sorted(drive(pool("ab", leaves={"a": 32.0}, joins={"b": 50.0}), 6).recorded) == keys(6)


@pytest.mark.parametrize(
    ("other", "joins", "said"),
    [("c", {}, "c differs from a"), ("a", {}, "a differs from b"), ("c", {"c": 30.0}, "c differs from a")],
)
def test_a_device_with_another_torch_than_most_is_left_out(drive, other, joins, said):
    three = pool("abc", versions={other: "2.11.0"}, joins=joins)
    assert drive(three, 8).lines[0] == f"left out: {said}: torch 2.11.0 for 2.13.0"
    assert {device for device, _ in three.measured} == {*"abc"} - {other}


def test_a_node_that_dies_while_its_agent_starts_delays_nobody(drive):
    two = pool("ab", leaves={"b": 3.0})
    driven = drive(two, 4)
    assert sorted(driven.recorded) == keys(4) and two.now < 70
    assert not driven.driver.failed


def test_a_pool_that_does_not_grow_is_not_waited_for(drive):
    one = pool("a", lambda d, c: "dies", grows=False)
    assert drive(one, 4).driver.failed and one.now < 30


def test_no_device_at_all_is_one_line(drive):
    with pytest.raises(NothingRan, match="no device can be measured: there is none"):
        drive(pool(""), 4)


def test_time_is_kept_by_not_beginning_and_by_cutting_off(drive):
    """20 s are expected of a case that nothing is known of; what was seen tells of the others."""
    one = pool("a", lambda d, c: {"case 6": 500.0}.get(c, 10.0))
    driven = drive(one, 30, ends=100.0)
    assert driven.recorded == keys(6) and not driven.driver.failed
    assert "the time is up: case 6 was not finished on a" in driven.lines
    assert one.now == 100.0
    assert driven.job.left_out[0].sizes["batch"] == 7


def test_a_driver_that_goes_on_measures_only_what_is_missing(drive):
    drive(pool("ab"), 20, ends=90.0)
    rest = pool("ab")
    assert Counter(drive(rest, 20).recorded) == Counter(keys(20))
    assert 0 < len(rest.measured) < 20


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_no_case_is_lost_or_twice(drive, seed: int):
    draw = random.Random(seed)
    names = [f"device {i}" for i in range(draw.randint(2, 8))]
    leaves = {n: draw.uniform(10, 300) for n in names[1:] if draw.random() < 0.4}
    joins = {n: draw.uniform(0, 200) for n in names[1:] if draw.random() < 0.4 and n not in leaves}

    def takes(device: str, case: str) -> float | str:
        if device != names[0] and draw.random() < 0.1:
            return draw.choice(["dies", "hangs", "fails"])
        return draw.uniform(5, 30)

    pool = SimulatedPool(dict.fromkeys(names, "cpu"), takes, joins=joins, leaves=leaves)
    driven = drive(pool, 60)
    given_up = {task.key for task in driven.driver.dispatcher.given_up}
    assert max(Counter(driven.recorded).values()) == 1
    assert {*driven.recorded} | given_up == {*keys(60)}
    assert not {*driven.recorded} & given_up
    assert driven.shown == driven.recorded
    assert len(driven.journal.devices()) == len({d.name for d in driven.journal.devices()})
