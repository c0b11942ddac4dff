"""The driver of devices gives tasks to agents and takes their answers. If a device fails, another one does
its task."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.cluster.agent import Answer, Device, OpenedDevice, Order, ThisMachine
from harness.cluster.ray_cluster import PoolGone, RayPool
from harness.errors import NothingRan
from harness.machine.device import differing
from harness.results.schema import Calibration
from harness.run.device import DeviceFacts

LOOK_S = 5.0  # the pool is asked for its devices every so many seconds
STARTING_S = 600.0  # seconds for an agent to start and to measure its device's ceilings
LONGEST_FACTOR, LONGEST_S = 10, 7200.0  # a task fails after this factor times its expected time, and 2 h more
NO_DEVICE_S = 30.0  # the driver ends after so many seconds without a device that can do a waiting task
MOST_FAILURES = 2
"""After so many failures in a row a device is left out. After so many failures a task is given up; a task
that is bound to a device is given up at its first failure."""
EARLIER = 0.7  # the weight of the earlier estimate of a task's overhead; that of the last task is 1 - EARLIER

Pool = ThisMachine | RayPool


@dataclass(frozen=True)
class Task:
    """A piece of work for one device: a case of a run, or a command."""

    job: str
    key: str
    device: str = ""  # the only device that may do it; empty: any of the job's type


@dataclass
class Job:
    """Tasks for devices of one type. Subclasses give orders and record results; a plan simulates it."""

    name: str
    type: str
    rank: int  # jobs of a lower rank come first; those of one rank take turns
    waiting: deque[Task] = field(default_factory=deque, kw_only=True)  # not given to a device; the next first
    measure_s: float = field(default=0.0, kw_only=True)  # seconds of measuring of each task
    overhead_s: float = field(default=0.0, kw_only=True)  # further seconds of each: a guess, then an average
    any_done: bool = field(default=False, kw_only=True)  # whether a task is done
    given: int = field(default=0, kw_only=True)  # how many tasks were given to devices

    @property
    def expected_s(self) -> float:
        """Seconds of wall-clock that each task is expected to take."""
        return self.measure_s + self.overhead_s

    def learn(self, overhead_s: float) -> None:
        """Notes what a task took apart from measuring: the job's others will take about as long."""
        if self.any_done:
            overhead_s = EARLIER * self.overhead_s + (1 - EARLIER) * overhead_s
        self.overhead_s = overhead_s
        self.any_done = True

    def order(self, task: Task, left_s: float) -> Order | None:
        """The order for a task; None where the job's own budget is spent."""
        raise NotImplementedError

    def take(self, task: Task, result: Any, by: OpenedDevice, wall_s: float) -> float:
        """Records the result of an order. Returns the seconds of it that were measuring."""
        raise NotImplementedError

    def take_back(self, task: Task) -> None:
        """Notes that the order for a task was not finished."""

    def joined(self, device: OpenedDevice) -> None:
        """Adds the tasks that come with a device that joined late."""

    def end(self) -> None:
        """Notes that nothing more comes."""


def next_task(
    jobs: Iterable[Job], device: str, type: str, left_s: float, failed: Collection[Task] = ()
) -> Task | None:
    """Takes the task that comes next for a device; None where none fits the time.

    It is taken from the job of the lowest rank; among jobs of one rank, from the job that has given the
    fewest tasks. A task that any device may do leaves time for the tasks that only this device may do.

    failed: the tasks that are left to other devices, because this one failed at them
    """
    jobs = [job for job in jobs if job.type == type and job.waiting]
    bound_s = sum(job.expected_s for job in jobs for task in job.waiting if task.device == device)
    for job in sorted(jobs, key=lambda job: (job.rank, job.given)):
        for index, task in enumerate(job.waiting):
            kept_s = 0.0 if task.device else bound_s
            may_do = task.device in ("", device) and task not in failed
            if may_do and job.expected_s + kept_s <= left_s:
                del job.waiting[index]
                job.given += 1
                return task
    return None


@dataclass
class Member:
    """A device that has an agent."""

    device: Device
    began: float  # by the driver's clock: when its start began, and later its task
    until: float  # when the start or the task has taken far too long
    opened: OpenedDevice | None = None  # what the agent said of the device; None while it starts
    task: Task | None = None

    @property
    def name(self) -> str:
        return self.opened.used.name if self.opened else self.device.id


@dataclass
class Driver:
    """Is used as `with driver: driver.open(); driver.add(jobs); driver.run()`; the end closes its pool."""

    pool: Pool
    log: Callable[[str], None]
    on_begin: Callable[[Task, str], None] | None = None  # gets each task that begins, and its device's name
    ends: float = math.inf  # when the last task must be over, by the clock
    threads: int | None = None  # of each worker, on a CPU
    go_on: str = ""  # what a person does to measure the rest, if the pool is gone
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.jobs: dict[str, Job] = {}  # by name
        self.calibrations: list[Calibration] = []  # of devices, as far as they are known
        self.present: set[str] = set()  # ids of the devices that the pool had when it was last asked
        self.members: dict[str, Member] = {}  # by id
        self.refused: dict[str, str] = {}  # ids of devices that are left out, and why
        # By type, the device that the others of the type must be like; empty until all have started.
        self.typical: dict[str, OpenedDevice] = {}
        self.names: set[str] = set()  # of all devices that were taken
        self.failures = Counter[str]()  # how often each device failed in a row
        self.tried: dict[Task, list[str]] = {}  # the devices that failed at a task
        self.failed = False  # whether there is work that no device did although there was time
        self.asked_pool = -math.inf  # when the pool was last asked for its devices
        self.idle_since: float | None = None  # since when no device has a task

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.pool.close()
        for job in self.jobs.values():
            job.end()
        if isinstance(error, PoolGone) and self.go_on:
            raise PoolGone(f"{error}; finished cases are recorded, {self.go_on}") from None

    def open(self) -> dict[str, list[OpenedDevice]]:
        """Starts an agent on each device and waits until each has said what it is: a device that does not fit
        is left out before anything is measured. Returns the devices of each type. Raises NothingRan."""
        self._work(min(self.ends, self.clock() + STARTING_S), self._all_have_started)
        self.typical = {type: most_alike(devices) for type, devices in self._types().items()}
        for member in list(self.members.values()):
            if member.opened:
                self._admit(member, member.opened)
        types = self._types()
        if not types:
            reasons = "; ".join(self.refused.values())
            raise NothingRan(f"no device can be measured: {reasons or 'there is none'}")
        return types

    def _types(self) -> dict[str, list[OpenedDevice]]:
        types: dict[str, list[OpenedDevice]] = {}
        for member in self.members.values():
            if member.opened:
                types.setdefault(member.device.type, []).append(member.opened)
        return types

    def add(self, jobs: Iterable[Job]) -> None:
        self.jobs |= {job.name: job for job in jobs}

    def run(self) -> None:
        """Works until nothing more can be done or the time is up. Raises PoolGone, or what a job raises."""
        self._work(self.ends, self._is_over)
        for member in self.members.values():
            if member.task:
                self.log(f"the time is up: {member.task.key} was not finished on {member.name}")
                self.jobs[member.task.job].take_back(member.task)

    def _work(self, ends: float, is_over: Callable[[], bool]) -> None:
        """Starts agents, gives tasks and takes answers until a time, or until it is over."""
        while self.clock() < ends:
            self._start_agents()
            for member in self.members.values():
                if member.opened and not member.task:
                    self._give_task(member)
            if is_over():
                return
            for answer in self.pool.wait(max(0.0, min(1.0, ends - self.clock()))):
                self._take_answer(answer)
            for member in list(self.members.values()):
                if self.clock() > member.until:
                    reason = "it takes far longer than anything should"
                    self._take_answer(Answer(member.device.id, None, reason, lost=True))

    def _start_agents(self) -> None:
        """Starts agents on devices that are new, or whose agent was lost."""
        if self.clock() < self.asked_pool + LOOK_S:
            return
        self.asked_pool = self.clock()
        devices = self.pool.devices()
        self.present = {device.id for device in devices}
        for device in devices:
            if device.id not in self.members and device.id not in self.refused:
                self.members[device.id] = Member(device, self.clock(), self.clock() + STARTING_S)
                self.pool.send(device.id, replace(device, threads=self.threads))

    def _all_have_started(self) -> bool:
        """Whether each device that is there has told what it is, or is left out."""
        are_starting = any(not member.opened for member in self.members.values())
        return not are_starting and self.present.issubset([*self.members, *self.refused])

    def _is_over(self) -> bool:
        """Whether no device works, and nothing waits for a device that is there or may still come."""
        members = self.members.values()
        if any(member.task for member in members):
            self.idle_since = None
            return False
        left_s = self.ends - self.clock()
        fitting = [job for job in self.jobs.values() if job.expected_s <= left_s]
        waiting = len([task for job in fitting for task in job.waiting if not task.device])
        if waiting == 0:
            return True
        # Devices that have started did not take these tasks: they are of another type, or failed at them.
        if self.idle_since is None:
            self.idle_since = self.clock()
        starting = any(not member.opened for member in members)
        if starting or (self.pool.grows and self.clock() < self.idle_since + NO_DEVICE_S):
            return False
        self.failed = True
        self.log(f"no device is left for {waiting} of what waits")
        return True

    def _is_only_of_type(self, member: Member) -> bool:
        return [other.device.type for other in self.members.values()].count(member.device.type) == 1

    def _give_task(self, member: Member) -> None:
        left_s, name = self.ends - self.clock(), member.name
        failed = [task for task, names in self.tried.items() if name in names]
        if self._is_only_of_type(member):
            failed = []
        while task := next_task(self.jobs.values(), name, member.device.type, left_s, failed):
            job = self.jobs[task.job]
            order = job.order(task, left_s)
            if order is not None:
                member.task, member.began = task, self.clock()
                member.until = member.began + LONGEST_S + LONGEST_FACTOR * job.expected_s
                if self.on_begin:
                    self.on_begin(task, name)
                self.pool.send(member.device.id, order)
                return
            job.waiting.clear()  # the job's budget is spent

    def _take_answer(self, answer: Answer) -> None:
        member = self.members.get(answer.device)
        if member is None:
            return
        task = member.task
        member.task, member.until = None, math.inf
        if answer.result is None:
            self._note_failure(member, task, answer)
        elif isinstance(answer.result, OpenedDevice):
            member.opened = answer.result
            if self.typical:
                self._admit(member, member.opened)
        else:
            assert task is not None and member.opened is not None
            job, wall_s = self.jobs[task.job], self.clock() - member.began
            measured_s = job.take(task, answer.result, member.opened, wall_s)
            job.learn(max(0.0, wall_s - measured_s))
            self.failures.pop(member.device.id, None)

    def _note_failure(self, member: Member, task: Task | None, answer: Answer) -> None:
        """Notes that a device failed, hung or died in a task or, without a task, as it was opened. An agent
        that was lost is started again, unless the device failed too often in a row."""
        name, id = member.name, member.device.id
        self.failures[id] += 1
        failed_too_often = self.failures[id] >= MOST_FAILURES
        if task is not None:
            consequence = self._take_back(task, member)
            if failed_too_often:
                reason = f"as it failed {MOST_FAILURES} times in a row"
                consequence += f"; {name} is left out, {reason}"
                self.refused[id] = reason
            self.log(f"{name}: {answer.error}, in {task.key}: {consequence}")
        elif failed_too_often or not answer.lost:  # an agent that is still there would only fail again
            self._refuse(member, f"{name}: {answer.error}")
        if answer.lost or id in self.refused:
            self._remove(member)
        if answer.lost:  # the pool may still list a node that is gone, so it is not asked again at once
            self.asked_pool = self.clock()

    def _take_back(self, task: Task, member: Member) -> str:
        """Takes a task back from a device that failed at it. Another device gets it next; a device that is
        alone gets it again after the job's others. A task that is bound to the device, or that failed
        MOST_FAILURES times, is given up. Returns what becomes of the task, in words."""
        job = self.jobs[task.job]
        job.take_back(task)
        job.given -= 1
        names = self.tried.setdefault(task, [])
        names.append(member.name)
        if task.device:
            return "given up"
        if len(names) >= MOST_FAILURES:
            self.failed = True
            return f"given up, as {' and '.join(dict.fromkeys(names))} failed at it"
        if self._is_only_of_type(member):
            job.waiting.append(task)
            return "tried again later"
        job.waiting.appendleft(task)
        return "given to another device"

    def _admit(self, member: Member, opened: OpenedDevice) -> None:
        """Keeps a device that has started, or leaves it out where it is unlike the others or has no job."""
        type, name = member.device.type, member.name
        jobs = [job for job in self.jobs.values() if job.type == type]
        typical = self.typical.get(type, opened)
        if different := differences(typical.facts, opened.facts):
            self._refuse(member, f"{name} differs from {typical.used.name}: {'; '.join(different)}")
        elif self.jobs and not jobs:
            self._refuse(member, f"nothing is measured on devices of type {type}")
        else:
            is_new = name not in self.names
            if self.jobs:  # others have begun to work
                self.log(f"{name} has joined" if is_new else f"{name} is back")
            if is_new:
                for job in jobs:
                    job.joined(opened)
            self.names.add(name)
            for line in opened.facts.busy:
                self.log(f"note: {name}: {line}")

    def _refuse(self, member: Member, reason: str) -> None:
        self.refused[member.device.id] = reason
        self.log(f"left out: {reason}")
        self._remove(member)

    def _remove(self, member: Member) -> None:
        self.pool.stop(member.device.id)
        self.members.pop(member.device.id, None)


def most_alike(devices: Sequence[OpenedDevice]) -> OpenedDevice:
    """The device that most others are like; the first of several."""
    return max(devices, key=lambda a: len([b for b in devices if not differences(a.facts, b.facts)]))


def differences(a: DeviceFacts, b: DeviceFacts) -> list[str]:
    """The facts in which two devices differ and so cannot measure one run, in words (`X for Y`: b has X where
    a has Y): device, driver, threads of a CPU, any library's version, the suite's commit."""
    machine = ["device", "arch", "driver"] + (["threads"] if a.platform.kind == "cpu" else [])
    return [
        f"{name} {of_b or 'missing'} for {of_a or 'missing'}"
        for name, of_a, of_b in differing(a.provenance, b.provenance, machine, ("versions", "git"))
    ]
