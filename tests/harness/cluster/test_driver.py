"""The driver on devices that are not there: none of what fails, hangs, leaves or joins loses a case."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
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
def drive(tmp_path: Path) -> Iterator[Callable[..., Driven]]:
    yield lambda pool, cases, **rest: Driven(tmp_path / "run", pool, cases, **rest)


def keys(count: int) -> list[str]:
    return [f"case {i}" for i in range(count)]


def test_devices_share_the_cases(drive):
    pool = SimulatedPool(dict.fromkeys("abcd", "cpu"), ten_seconds)
    driven = drive(pool, 40)
    assert sorted(driven.recorded) == sorted(keys(40))
    assert Counter(device for device, _ in pool.measured) == dict.fromkeys("abcd", 10)
    assert pool.now < 5 + 10 * 10 + 5 and pool.closed
    assert {device.name for device in driven.journal.devices()} == set("abcd")
    assert {r.device for r in driven.journal.lines.records() if isinstance(r, CaseDone)} == set("abcd")


def test_the_first_are_begun_first(drive):
    pool = SimulatedPool(dict.fromkeys("ab", "cpu"), ten_seconds)
    drive(pool, 9)
    assert [case for _, case in pool.measured] == keys(9)


@pytest.mark.parametrize("fault", ["dies", "hangs", "fails"])
def test_what_fails_on_one_device_is_measured_on_another(drive, fault: str):
    faults = {("a", "case 0")}
    pool = SimulatedPool(
        dict.fromkeys("ab", "cpu"), lambda d, c: fault if (d, c) in faults else 10.0
    )  # fmt: skip
    driven = drive(pool, 6)
    assert sorted(driven.recorded) == keys(6)
    assert ("b", "case 0") in pool.measured
    (line,) = [line for line in driven.lines if "case 0" in line]
    assert line.startswith("a: ") and line.endswith(", in case 0: given to another device")


def test_a_device_that_fails_twice_in_a_row_is_left_out(drive):
    pool = SimulatedPool(dict.fromkeys("ab", "cpu"), lambda d, c: "fails" if d == "a" else 10.0)
    driven = drive(pool, 8)
    assert sorted(driven.recorded) == keys(8)
    assert {device for device, _ in pool.measured} == {"b"}
    (line,) = [line for line in driven.lines if "left out" in line]
    assert line.endswith("a is left out, as it failed 2 times in a row")


def test_a_device_that_did_something_in_between_has_not_failed_in_a_row(drive):
    faults = {("a", "case 0"), ("a", "case 3")}
    pool = SimulatedPool(
        dict.fromkeys("ab", "cpu"), lambda d, c: "fails" if (d, c) in faults else 10.0
    )  # fmt: skip
    driven = drive(pool, 12)
    assert sorted(driven.recorded) == sorted(keys(12))
    assert sum("out of luck" in line for line in driven.lines) == len(faults)
    assert not any("left out" in line for line in driven.lines)


def test_a_case_that_kills_every_device_is_given_up_and_costs_nobody(drive):
    """Devices that finish something in between are sound."""
    pool = SimulatedPool(dict.fromkeys("abc", "cpu"), lambda d, c: "dies" if c == "case 2" else 10.0)
    driven = drive(pool, 12)
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

    driven = drive(SimulatedPool({"a": "cpu"}, once), 4)
    assert driven.recorded == ["case 1", "case 2", "case 3", "case 0"]


def test_the_only_device_that_always_fails_ends_it_in_one_line(drive):
    driven = drive(SimulatedPool({"a": "cpu"}, lambda d, c: "dies"), 4)
    assert driven.recorded == []
    assert sum("left out" in line for line in driven.lines) == 1
    assert len(driven.lines) == 2 * MOST_FAILURES and "a is back" in driven.lines
    assert driven.lines[-1] == "no device is left for 4 of what waits"


def test_a_device_that_joins_late_helps(drive):
    pool = SimulatedPool(dict.fromkeys("ab", "cpu"), ten_seconds, joins={"b": 50.0})
    driven = drive(pool, 20)
    assert sorted(driven.recorded) == sorted(keys(20))
    assert Counter(device for device, _ in pool.measured)["b"] >= 5
    assert "b has joined" in driven.lines


def test_a_device_that_leaves_costs_the_case_it_was_on(drive):
    pool = SimulatedPool(dict.fromkeys("ab", "cpu"), ten_seconds, leaves={"b": 32.0})
    driven = drive(pool, 20)
    assert sorted(driven.recorded) == sorted(keys(20))
    assert Counter(driven.recorded).most_common(1)[0][1] == 1


def test_when_all_have_left_it_waits_a_while_and_ends(drive):
    pool = SimulatedPool({"a": "cpu"}, ten_seconds, leaves={"a": 32.0})
    driven = drive(pool, 20)
    assert len(driven.recorded) == 2
    assert driven.lines[-1] == "no device is left for 18 of what waits"
    assert 32 + NO_DEVICE_S <= pool.now <= 32 + NO_DEVICE_S + 10


def test_one_that_comes_while_it_waits_goes_on(drive):
    pool = SimulatedPool({"a": "cpu", "b": "cpu"}, ten_seconds, leaves={"a": 32.0}, joins={"b": 50.0})
    assert sorted(drive(pool, 6).recorded) == keys(6)


def test_another_torch_is_said_before_anything_is_measured_and_left_out(drive):
    pool = SimulatedPool(dict.fromkeys("abc", "cpu"), ten_seconds, versions={"c": "2.11.0"})
    driven = drive(pool, 4)
    assert driven.lines[0] == "left out: c differs from a: torch 2.11.0 for 2.13.0"
    assert {device for device, _ in pool.measured} == {"a", "b"}


def test_most_decide_what_is_another(drive):
    pool = SimulatedPool(dict.fromkeys("abc", "cpu"), ten_seconds, versions={"a": "2.11.0"})
    assert drive(pool, 4).lines[0] == "left out: a differs from b: torch 2.11.0 for 2.13.0"


def test_another_torch_that_joins_late_is_left_out(drive):
    pool = SimulatedPool(dict.fromkeys("ab", "cpu"), ten_seconds, joins={"b": 30.0}, versions={"b": "2.11.0"})
    assert drive(pool, 8).lines == ["left out: b differs from a: torch 2.11.0 for 2.13.0"]
    assert {device for device, _ in pool.measured} == {"a"}


def test_a_node_that_dies_while_its_agent_starts_delays_nobody(drive):
    pool = SimulatedPool(dict.fromkeys("ab", "cpu"), ten_seconds, leaves={"b": 3.0})
    driven = drive(pool, 4)
    assert sorted(driven.recorded) == keys(4) and pool.now < 70
    assert not driven.driver.failed


def test_what_no_device_did_though_there_was_time_is_a_failure(drive):
    pool = SimulatedPool({"a": "cpu"}, ten_seconds, leaves={"a": 32.0})
    assert drive(pool, 6).driver.failed
    pool = SimulatedPool({"b": "cpu"}, ten_seconds)
    assert not drive(pool, 6, ends=60.0).driver.failed, "there was none"


def test_a_pool_that_does_not_grow_is_not_waited_for(drive):
    pool = SimulatedPool({"a": "cpu"}, lambda d, c: "dies", grows=False)
    assert drive(pool, 4).driver.failed and pool.now < 30


def test_no_device_at_all_is_one_line(drive):
    with pytest.raises(NothingRan, match="no device can be measured: there is none"):
        drive(SimulatedPool({}, ten_seconds), 4)


def test_time_is_kept_by_not_beginning_and_by_cutting_off(drive):
    """20 s are expected of a case that nothing is known of; what was seen tells of the others."""
    slow = {"case 6": 500.0}
    pool = SimulatedPool({"a": "cpu"}, lambda d, c: slow.get(c, 10.0))
    driven = drive(pool, 30, ends=100.0)
    assert driven.recorded == keys(6)
    assert "the time is up: case 6 was not finished on a" in driven.lines
    assert pool.now == 100.0
    assert driven.job.left_out[0].sizes["batch"] == 7


def test_a_driver_that_goes_on_measures_only_what_is_missing(drive):
    drive(SimulatedPool(dict.fromkeys("ab", "cpu"), ten_seconds), 20, ends=90.0)
    pool = SimulatedPool(dict.fromkeys("ab", "cpu"), ten_seconds)
    again = drive(pool, 20)
    assert Counter(again.recorded) == Counter(keys(20))
    assert 0 < len(pool.measured) < 20


@pytest.mark.parametrize("seed", range(20))
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
