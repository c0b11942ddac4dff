"""Driver of devices: gives them tasks, takes what they answer, and lives with those that fail, hang or go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from harness.cluster.dispatch import Dispatcher, Task
from harness.cluster.orders import Answer, CommandDone, Opened, Opening, Order
from harness.cluster.pool import Offer, Pool
from harness.errors import NothingRan
from harness.results.schema import Record
from harness.run.device import DeviceFacts

if TYPE_CHECKING:
    from typing_extensions import Self

LOOK_S = 5.0
"""So often it looks whether devices joined or left."""
STARTING_S = 600.0
"""For an agent to start and to measure its device's ceilings."""
LONGEST_S = 7200.0
"""Of a task, beside ten times what is expected of it: a library may build for long."""
NO_DEVICE_S = 30.0
"""Without any device that could do what waits, before the driver ends."""


class Job(Protocol):
    """Task of one kind for devices of one type, and its record: a run, or a command."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str: ...

    @property
    def rank(self) -> int: ...

    def tasks(self) -> Sequence[Task]:
        """What is not done yet, the most valuable first."""

    def order(self, task: Task, left_s: float) -> Order | None:
        """None: its own budget is spent."""

    def take(self, task: Task, result: list[Record] | CommandDone, by: Opened, wall_s: float) -> float:
        """Records what a device made of it; gives the seconds of it that were measuring."""

    def take_back(self, task: Task) -> None:
        """What was ordered was not finished."""

    def joined(self, device: Opened) -> Sequence[Task]:
        """What comes with a device that joined late."""

    def end(self) -> None:
        """Nothing more comes."""


@dataclass
class Member:
    """A device of the pool. opened: None until its agent has answered; began: its task, by the clock"""

    offer: Offer
    opened: Opened | None = None
    task: Task | None = None
    began: float = 0.0

    @property
    def name(self) -> str:
        return self.opened.used.name if self.opened else self.offer.id


@dataclass
class Driver:
    """Of a pool, which it closes in the end: `with driver: driver.open(); driver.add(jobs); driver.run()`.

    on_begin: is told what begins on which device
    ends:     when the last task must be over, by the clock
    threads:  of each worker, on a CPU
    """

    pool: Pool
    log: Callable[[str], None]
    on_begin: Callable[[Task, str], None] = lambda *_: None
    ends: float = float("inf")
    threads: int | None = None
    clock: Callable[[], float] = time.monotonic
    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    members: dict[str, Member] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    references: dict[str, Opened] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    offered: set[str] = field(default_factory=set)
    deserted: bool = False
    looked: float = float("-inf")
    idle_since: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        for job in self.jobs.values():
            job.end()

    def open(self) -> dict[str, list[Opened]]:
        """Starts an agent on each device, and waits until each has told what it is: what does not fit is said
        before anything is measured. Gives the devices of each type. Raises NothingRan where there is none."""
        until = min(self.ends, self.clock() + STARTING_S)
        while self.clock() < until:
            self._look()
            starting = any(member.opened is None for member in self.members.values())
            again = (self.lost & self.offered) - self.members.keys() - self.refused.keys()
            if not starting and not again:
                break
            for answer in self.pool.wait(1.0):
                self._take(answer)
        types = self._types()
        self.references = {type: most_alike(devices) for type, devices in types.items()}
        for member in list(self.members.values()):
            if member.opened:
                self._opened(member, member.opened)
        if not types:
            reasons = "; ".join(self.refused.values())
            raise NothingRan(f"no device can be measured: {reasons or 'there is none'}")
        return self._types()

    def _types(self) -> dict[str, list[Opened]]:
        types: dict[str, list[Opened]] = {}
        for member in self.members.values():
            if member.opened:
                types.setdefault(member.offer.type, []).append(member.opened)
        return types

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.jobs[job.name] = job
            self.dispatcher.add(job.name, job.type, job.rank, job.tasks())

    def run(self) -> None:
        """Until all is done that can be. Raises PoolGone, and what a job raises that cannot record."""
        while True:
            self._look()
            for member in list(self.members.values()):
                if member.opened and not member.task:
                    self._give(member)
            if self._is_over():
                return
            for answer in self.pool.wait(max(0.0, min(1.0, self.ends - self.clock()))):
                self._take(answer)
            for member in list(self.members.values()):
                if self.clock() > member.began + self._limit_s(member):
                    reason = "it takes far longer than anything should"
                    self._take(Answer(member.offer.id, None, reason, lost=True))
            if self.clock() >= self.ends:
                self._cut_off()
                return

    def _limit_s(self, member: Member) -> float:
        """Of what it does now, in which each request has a deadline of its own."""
        if member.opened is None:
            return STARTING_S
        if member.task is None:
            return float("inf")
        return LONGEST_S + 10 * self.dispatcher.lanes[member.task.lane].expected_s(member.task)

    def _look(self) -> None:
        """Starts agents on devices that are new, or whose agent was lost."""
        if self.clock() < self.looked + LOOK_S:
            return
        self.looked = self.clock()
        offers = self.pool.offers()
        self.offered = {offer.id for offer in offers}
        for offer in offers:
            if offer.id in self.members or offer.id in self.refused:
                continue
            self.members[offer.id] = Member(offer, began=self.clock())
            self.pool.start(offer)
            share = 1 / offer.beside
            opening = Opening(offer.type, self.threads, share, offer.device, offer.is_gpu)
            self.pool.send(offer.id, opening)

    def _is_over(self) -> bool:
        """Nobody works, and nothing that waits is for a device that is there; for others a while has been
        waited."""
        if any(member.task for member in self.members.values()):
            self.idle_since = None
            return False
        types = {member.offer.type for member in self.members.values()}
        wanting = self.dispatcher.wanting(types, self.ends - self.clock())
        if any(not member.opened for member in self.members.values()) and self.dispatcher.waiting:
            return False
        if not wanting:
            return True
        self.idle_since = self.clock() if self.idle_since is None else self.idle_since
        if self.pool.grows and self.clock() < self.idle_since + NO_DEVICE_S:
            return False
        self.deserted = True
        self.log(f"no device is left for {wanting} of what waits")
        return True

    @property
    def failed(self) -> bool:
        """Whether there is work that no device did, though there was time."""
        return self.deserted or bool(self.dispatcher.given_up)

    def _asked_types(self) -> set[str]:
        return {job.type for job in self.jobs.values()}

    def _alone(self, member: Member) -> bool:
        return sum(other.offer.type == member.offer.type for other in self.members.values()) == 1

    def _give(self, member: Member) -> None:
        while True:
            left_s = self.ends - self.clock()
            task = self.dispatcher.next(member.name, member.offer.type, left_s, self._alone(member))
            if task is None:
                return
            order = self.jobs[task.lane].order(task, left_s)
            if order is not None:
                member.task, member.began = task, self.clock()
                self.pool.send(member.offer.id, order)
                self.on_begin(task, member.name)
                return
            self.dispatcher.close(task.lane)

    def _take(self, answer: Answer) -> None:
        member = self.members.get(answer.device)
        if member is None:
            return
        task, member.task = member.task, None
        if isinstance(answer.result, Opened):
            member.opened = answer.result
            if self.references:  # before, it waits for the others
                self._opened(member, answer.result)
        elif task is None:
            self._not_opened(member, answer)
        elif answer.result is not None:
            assert member.opened is not None
            wall_s = self.clock() - member.began
            measured_s = self.jobs[task.lane].take(task, answer.result, member.opened, wall_s)
            self.dispatcher.done(task, member.name, wall_s, measured_s)
        else:
            self.jobs[task.lane].take_back(task)
            then = self.dispatcher.fail(task, member.name, answer.error, self._alone(member))
            self.log(f"{member.name}: {answer.error}, in {task.key}: {then}")
            if self.dispatcher.is_out(member.name):
                self._refuse(member, "")
        if answer.lost and answer.device in self.members:
            self.pool.stop(answer.device)
            del self.members[answer.device]
            self.looked = self.clock()  # a node that has gone is seen to be gone by the next look

    def _opened(self, member: Member, opened: Opened) -> None:
        reference = self.references.get(member.offer.type, opened)
        if different := differences(reference.facts, opened.facts):
            of = reference.used.name
            self._refuse(member, f"{opened.used.name} differs from {of}: {'; '.join(different)}")
        elif self.jobs and member.offer.type not in self._asked_types():
            self._refuse(member, f"nothing is measured on devices of type {member.offer.type}")
        else:
            if self.jobs:
                known = opened.used.name in self.names
                self.log(f"{opened.used.name} {'is back' if known else 'has joined'}")
                for job in () if known else self.jobs.values():
                    if job.type == member.offer.type:
                        self.dispatcher.add(job.name, job.type, job.rank, job.joined(opened))
            self.names.add(opened.used.name)
            for line in opened.facts.busy:
                self.log(f"note: {opened.used.name}: {line}")

    def _not_opened(self, member: Member, answer: Answer) -> None:
        """What it says of itself counts; an agent that was lost is started again, once."""
        id = member.offer.id
        if answer.lost and id not in self.lost:
            self.lost.add(id)
        else:
            self._refuse(member, f"{member.name}: {answer.error}")

    def _refuse(self, member: Member, reason: str) -> None:
        """It is left out for good."""
        self.refused[member.offer.id] = reason
        if reason:
            self.log(f"left out: {reason}")
        self.pool.stop(member.offer.id)
        self.members.pop(member.offer.id, None)

    def _cut_off(self) -> None:
        for member in self.members.values():
            if member.task:
                self.log(f"the time is up: {member.task.key} was not finished on {member.name}")
                self.jobs[member.task.lane].take_back(member.task)
                member.task = None


# What all devices of a type must have in common to measure one run, the last on CPUs only; of the others all
# names count.
MACHINE = ("device", "arch", "driver", "threads")


def most_alike(devices: Sequence[Opened]) -> Opened:
    """The first of those that most others are like."""
    alike = [sum(not differences(a.facts, b.facts) for b in devices) for a in devices]
    return devices[alike.index(max(alike))]


def differences(a: DeviceFacts, b: DeviceFacts) -> list[str]:
    """What `b` has for what `a` has: another device, other libraries, another commit of the suite."""
    different = []
    for group in ("machine", "versions", "git"):
        of_a, of_b = a.provenance[group], b.provenance[group]
        machine = MACHINE if a.platform.kind == "cpu" else MACHINE[:-1]
        for name in machine if group == "machine" else sorted(of_a.keys() | of_b.keys()):
            if of_a.get(name) != of_b.get(name):
                different.append(f"{name} {of_b.get(name) or 'missing'} for {of_a.get(name) or 'missing'}")
    return different
