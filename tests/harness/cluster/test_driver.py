"""The driver on simulated devices: no case is lost where a device fails, hangs, leaves or joins."""

import itertools
import math
import random
import socket
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from harness.cluster.agent import Device
from harness.cluster.driver import MOST_FAILURES, Driver, Job, Task, differences, next_task
from harness.cluster.execute import RunJob, calibration_jobs, only_type
from harness.cluster.ray_cluster import PoolGone, RayPool, _cause, require_head
from harness.errors import NothingRan, UsageError
from harness.files import JournalFull
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, DeviceUsed, Record
from harness.run.device import DeviceFacts
from harness.run.execute import RunCases
from harness.run.plan import Request, RunPlan
from kernels.platform import named
from tests.support.simulated_pool import SimulatedPool, made_up_run, pool, records


class Driven:
    """A made-up run that is driven on a pool until the driver ends."""

    def __init__(
        self, folder: Path, pool: SimulatedPool, cases: int, ends: float = float("inf"), type: str = "cpu"
    ) -> None:
        self.lines: list[str] = []
        self.shown: list[str] = []
        run = made_up_run(cases)
        self.journal = Journal(folder) if (folder / "run.json").exists() else Journal.create(folder, run)
        plan = RunPlan.of(self.journal.run(), Request())
        self.job = RunJob("run", type, 0, RunCases(plan, self.journal, self._on_case), 0)
        self.driver = Driver(pool, self.lines.append, ends=ends, clock=pool.clock)
        with self.driver:
            self.driver.open()
            self.driver.add([self.job])
            self.driver.run()

    def _on_case(self, case: object, records: list[Record]) -> None:
        self.shown += [record.case for record in records if isinstance(record, CaseDone)]

    @property
    def given_up(self) -> list[str]:
        """The keys of cases at which so many devices failed that no other tries it."""
        return [task.key for task, names in self.driver.tried.items() if len(names) >= MOST_FAILURES]

    @property
    def recorded(self) -> list[str]:
        """The keys of finished cases in the journal's order, with repeats."""
        return [r.case for r in self.journal.lines.records() if isinstance(r, CaseDone)]


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., Driven]:
    return lambda pool, cases, **rest: Driven(tmp_path / "run", pool, cases, **rest)


def keys(count: int) -> list[str]:
    return [f"case {i}" for i in range(count)]


def failing(fault: str, *which: tuple[str, str]) -> Callable[[str, str], float | str]:
    return lambda device, case: fault if (device, case) in which else 10.0


def first_time(fault: str, key: str) -> Callable[[str, str], float | str]:
    tries: Counter[str] = Counter()

    def takes(device: str, case: str) -> float | str:
        tries[case] += 1
        return fault if case == key and tries[case] == 1 else 10.0

    return takes


def of_device(fault: str, name: str) -> Callable[[str, str], float | str]:
    return lambda device, case: fault if device == name else 10.0


OLD = "2.11.0"
"""Another version of torch."""


def drives() -> dict[str, tuple[SimulatedPool, int, float]]:
    """By name: the pool, the number of cases, and the time at which the driver must end."""
    return {
        "devices share the cases, the first first": (pool("abcd"), 40, math.inf),
        "a device dies in a case": (pool("ab", failing("dies", ("a", "case 0"))), 6, math.inf),
        "a device hangs in a case": (pool("ab", failing("hangs", ("a", "case 0"))), 6, math.inf),
        "it hangs, and the pool does not see it": (
            pool("ab", failing("hangs", ("a", "case 0")), hang_s=1e6), 6, math.inf,
        ),
        "a device fails in a case": (pool("ab", failing("fails", ("a", "case 0"))), 6, math.inf),
        "one that fails twice in a row is left out": (pool("ab", of_device("fails", "a")), 8, math.inf),
        "one that did something in between has not failed in a row": (
            pool("ab", failing("fails", ("a", "case 0"), ("a", "case 3"))), 12, math.inf,
        ),
        "a case that kills every device is given up": (
            pool("abc", lambda device, case: "dies" if case == "case 2" else 10.0), 12, math.inf,
        ),
        "the only device tries again": (pool("a", first_time("dies", "case 0")), 4, math.inf),
        "the only device always fails": (pool("a", of_device("dies", "a")), 4, math.inf),
        "one joins late": (pool("ab", joins={"b": 50.0}), 20, math.inf),
        "one leaves": (pool("ab", leaves={"b": 32.0}), 20, math.inf),
        "all have left: it waits a while": (pool("a", leaves={"a": 32.0}), 20, math.inf),
        "one comes while it waits": (pool("ab", leaves={"a": 32.0}, joins={"b": 50.0}), 6, math.inf),
        "another torch": (pool("abc", versions={"c": OLD}), 4, math.inf),
        "most decide what is another": (pool("abc", versions={"a": OLD}), 4, math.inf),
        "another torch joins late": (pool("ab", joins={"b": 30.0}, versions={"b": OLD}), 8, math.inf),
        "a node dies while its agent starts": (pool("ab", leaves={"b": 3.0}), 4, math.inf),
        "an agent never starts": (
            pool("ab", lambda device, case: 400.0 if device == "a" else "hangs"), 4, math.inf,
        ),
        "an agent dies whenever it starts": (pool("ab", failing("breaks", ("b", "opening"))), 4, math.inf),
        "a pool that does not grow is not waited for": (
            pool("a", of_device("dies", "a"), grows=False), 4, math.inf,
        ),
        # 20 s are expected of a case that nothing is known of; what was seen tells of the others.
        "time is kept by not beginning and by cutting off": (
            pool("a", lambda device, case: 500.0 if case == "case 6" else 10.0), 30, 99.5,
        ),
        "there was no time for the last": (pool("b"), 6, 60.0),
    }  # fmt: skip


def test_what_becomes_of_devices_and_cases_is_as_committed(snapshot, tmp_path):
    texts = []
    for name, (devices, cases, ends) in drives().items():
        driven = Driven(tmp_path / name, devices, cases, ends)
        by: dict[str, list[str]] = {}
        for device, case in devices.measured:
            by.setdefault(device, []).append(case.removeprefix("case "))
        given_up = driven.given_up
        left_out = driven.job.run.left
        cut_off = sum(line.startswith("the time is up") for line in driven.lines)
        assert driven.job.given == len(driven.recorded) + cut_off, "what failed was given back"
        assert devices.closed and max(Counter(driven.recorded).values(), default=1) == 1
        assert {*driven.recorded} | {*given_up} | {*left_out} == {*keys(cases)}, name
        texts += [
            f"=== {name}",
            *driven.lines,
            *(f"{device} measured {' '.join(cases)}" for device, cases in by.items()),
            f"{len(driven.recorded)} of {cases} recorded in {devices.now:g} s",
            f"left out: {', '.join(left_out)}; given up: {', '.join(given_up)}",
            f"failed: {driven.driver.failed}",
            "",
        ]
    snapshot(Path(__file__).parent / "snapshots" / "drives.txt", "\n".join(texts))


def test_failures_of_a_device_are_counted_whatever_it_is_called(drive):
    """An agent that has started has another name than its device had before."""
    openings = itertools.count()

    def takes(device: str, case: str) -> float | str:
        if device == "a" and case == "opening":
            return 10.0 if next(openings) == 0 else "breaks"
        return "dies" if device == "a" else 10.0

    devices = pool("ab", takes, named="node-{}")
    driven = drive(devices, 6)
    assert driven.driver.refused.keys() == {"a"}
    assert next(openings) == 2, "it is started once more, and then left out"
    assert [device for device, _ in devices.measured] == ["b"] * 6


def test_time_is_kept_for_what_only_one_device_may_do():
    tasks = (Task("run", "a case"), Task("last", "calibration", device="a"))
    for device, left_s, key in (("a", 30, "calibration"), ("a", 35, "a case"), ("b", 30, "a case")):
        run = Job("run", "cpu", 0, waiting=deque(tasks[:1]), measure_s=10, overhead_s=10)
        last = Job("last", "cpu", 1, waiting=deque(tasks[1:]), measure_s=3, overhead_s=12)
        assert next_task([run, last], device, "cpu", left_s).key == key
    assert run.given == 1
    for overhead_s in (20.0, 10.0):
        run.learn(overhead_s)
    assert run.expected_s == pytest.approx(10 + 0.7 * 20 + 0.3 * 10), "it forgets slowly"
    run.waiting.append(tasks[0])
    assert next_task([run], "b", "cpu", 1e3, failed=tasks) is None, "another device is to try it"


def test_what_is_being_measured_is_taken_from_the_budget(tmp_path, monkeypatch):
    journal = Journal.create(tmp_path / "run", made_up_run(40))
    plan = RunPlan.of(journal.run(), Request())
    job = RunJob("run", "cpu", 0, RunCases(plan, journal, print), 2)
    first = job.waiting.popleft()
    last = job.order(first, 4.0)
    assert last and max(last.budget_s, last.max_s) <= 4.0, "it ends when the time is up"
    job.take_back(first)
    orders = [job.order(job.waiting.popleft(), math.inf) for _ in range(39)]
    given_s = [order.budget_s for order in orders if order]
    assert 2 < len(given_s) < 40 and sum(given_s) <= 2 * plan.budget_s
    plan = RunPlan.of(journal.run(), Request(budget="0.1s", retry=True))
    assert RunJob("run", "cpu", 0, RunCases(plan, journal, print), 1).order(first, math.inf)
    crash = {"status": "crashed"}
    journal.append(r.model_copy(update=crash if isinstance(r, Cell) else {}) for r in records(last, "a", 3))
    again = RunJob("run", "cpu", 0, RunCases(plan, journal, print), 1)
    assert again.waiting[-1].key == first.key, "what broke may break again"
    full = RunJob("run", "cpu", 0, RunCases(plan, journal, Mock()), 1)
    monkeypatch.setattr(Journal, "append", Mock(side_effect=JournalFull("no space left")))
    with pytest.raises(JournalFull):
        full.take(first, records(last, "a", 3), Mock(used=DeviceUsed(name="a", type="cpu", host="a")), 1.0)
    assert full.run.on_case.called, "what cannot be kept is printed all the same"


def test_devices_of_a_machine_share_its_memory_and_are_calibrated_within_the_time():
    devices = pool("ab")
    driver = Driver(devices, print, threads=3, clock=devices.clock)
    type, opened = only_type(driver)
    assert devices.openings == [Device(id, type, devices_on_machine=2, threads=3) for id in "ab"]
    first, _ = calibration_jobs(driver, type, opened)
    orders = [first.order(first.waiting[0], left_s) for left_s in (math.inf, 4.0)]
    assert [(order.budget_s, order.max_s) for order in orders] == [(3.0, 9.0), (3.0, 4.0)]
    of_one, _ = calibration_jobs(driver, type, opened[:1])
    assert not of_one.waiting
    of_one.joined(opened[1])
    assert len(of_one.waiting) == 2, "the first is beside another now"


def test_no_device_at_all_is_one_line(drive):
    with pytest.raises(NothingRan, match="no device can be measured: there is none"):
        drive(pool(""), 4)


def test_devices_of_several_types_are_to_be_chosen_from():
    several = SimulatedPool({"a": "MI300X", "b": "H200", "c": "H200"}, lambda device, case: 10.0)
    with pytest.raises(UsageError, match=r"of devices: choose --device H200 or MI300X$"):
        only_type(Driver(several, print, clock=several.clock))
    assert not several.started


def test_a_head_is_gone_once_it_has_not_answered_for_a_while(monkeypatch):
    """Ray itself is asked for nothing then: it would wait for the head for a minute and end the process."""
    clock = Mock(return_value=0.0)
    slept = Mock(side_effect=lambda s: clock.configure_mock(return_value=clock.return_value + 2.9))
    monkeypatch.setattr("harness.cluster.ray_cluster.time", Mock(monotonic=clock, sleep=slept))
    ray, at_exit = Mock(), Mock()
    monkeypatch.setattr("harness.cluster.ray_cluster.atexit", at_exit)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        pool = RayPool.__new__(RayPool)
        pool.head, pool.ray = address, ray
        pool.actors = {"a": SimpleNamespace(task="a case", agent="agent")}
        require_head(address)
        assert not slept.called
    for asks in (pool.devices, lambda: pool.wait(0.0)):
        slept.reset_mock()
        with pytest.raises(PoolGone, match=rf"^the cluster's head at {address} is gone$"):
            asks()
        assert slept.call_count == 3, "5.8 s are not enough"
    pool.close()
    assert not ray.mock_calls
    assert at_exit.register.called


def test_the_devices_of_a_cluster_are_each_gpu_or_else_the_cpus_of_a_node(monkeypatch):
    monkeypatch.setattr("harness.cluster.ray_cluster.require_head", Mock())
    has = [
        ("a", {"GPU": 2.0, "CPU": 8.0, "accelerator_type:H200": 1.0}), ("a", {"CPU": 4.0}),
        ("a", {"CPU": 8.0, "device:left": 1.0}), ("b", {}),
        ("b", {"GPU": 1.0, "device:MI300X": 1.0}), ("dead", {"GPU": 8.0}), ("c", {"GPU": 1.0}),
    ]  # fmt: skip
    pool = RayPool.__new__(RayPool)
    pool.head, pool.ray, pool.type = Mock(), Mock(), None
    pool.ray.nodes.return_value = [
        {"Alive": host != "dead", "NodeManagerHostname": host, "NodeID": f"{i}234567", "Resources": resources}
        for i, (host, resources) in enumerate(has)
    ]
    assert [(d.id, d.type, d.devices_on_machine, d.is_gpu, d.resources) for d in pool.devices()] == [
        *((f"a-023456-gpu{i}", "H200", 2, True, {"GPU": 1.0}) for i in range(2)),
        ("a-123456", "cpu", 2, False, {"CPU": 4.0}),
        ("a-223456", "left", 2, False, {"CPU": 8.0, "device:left": 1.0}),
        ("b-423456-gpu0", "MI300X", 1, True, {"GPU": 1.0, "device:MI300X": 1.0}),
        ("c-623456-gpu0", "gpu", 1, True, {"GPU": 1.0}),
    ]
    said = {"its node x died": "its node died", "a dead node": "its node died", "it died": "OSError"}
    assert {text: _cause(OSError(text)) for text in said} == said


def test_one_run_is_measured_by_devices_that_are_alike():
    """All facts count, the number of threads only where a CPU is measured."""

    def facts(kind: str, driver: str = "1", threads: int = 1, **git: str) -> DeviceFacts:
        machine = {"platform": kind, "device": "it", "arch": "", "driver": driver, "threads": threads}
        return DeviceFacts(named(kind), {"machine": machine, "versions": {}, "git": git}, None)

    assert differences(facts("cpu"), facts("cpu", threads=2)) == ["threads 2 for 1"]
    assert differences(facts("cuda"), facts("cuda", threads=2)) == []
    assert differences(facts("cuda"), facts("cuda", "2", commit="c")) == [
        "driver 2 for 1",
        "commit c for missing",
    ]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_fails_no_case_is_lost_or_twice(drive, seed: int):
    draw = random.Random(seed)
    names = [f"device {i}" for i in range(draw.randint(2, 8))]
    leaves = {n: draw.uniform(10, 300) for n in names[1:] if draw.random() < 0.4}
    joins = {n: draw.uniform(0, 200) for n in names[1:] if draw.random() < 0.4 and n not in leaves}

    def takes(device: str, case: str) -> float | str:
        if device != names[0] and draw.random() < 0.1:
            return draw.choice(["dies", "hangs", "fails"])
        return draw.uniform(5, 30)

    driven = drive(SimulatedPool(dict.fromkeys(names, "cpu"), takes, joins=joins, leaves=leaves), 60)
    given_up = {*driven.given_up}
    assert max(Counter(driven.recorded).values()) == 1
    assert {*driven.recorded} | given_up == {*keys(60)}
    assert not {*driven.recorded} & given_up
    assert driven.shown == driven.recorded
    assert len(driven.journal.devices()) == len({d.name for d in driven.journal.devices()})
