"""Dispatcher of tasks to devices: who is given what next, and what becomes of it when a device fails.

Pure: it knows neither processes nor clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

MOST_FAILURES = 2
"""After so many in a row a device is left out, and a task that failed so often is given up."""
FORGETS = 0.7  # of what was known, when another is seen


@dataclass(frozen=True)
class Task:
    """What one device does whole: a case of a run, say.

    lane:      who share an estimate of what a case takes beside its measuring: an op's cases of a suite
    measure_s: of measuring; aside_s: of setting up and checking, as long as nothing was seen
    device:    the only one that may do it; empty: any of the lane's type
    """

    lane: str
    key: str
    measure_s: float
    aside_s: float
    device: str = ""


@dataclass
class Lane:
    """Tasks in a row, of one rank among others.

    type: of the devices that may do it; rank: lanes of a lower rank come first, those of one take samples
    """

    name: str
    type: str
    rank: int
    waiting: deque[Task] = field(default_factory=deque)
    given: int = 0
    aside_s: float | None = None

    def expected_s(self, task: Task) -> float:
        return task.measure_s + (task.aside_s if self.aside_s is None else self.aside_s)


@dataclass
class Dispatcher:
    """Lanes of tasks, and what failed.

    failed:   device -> how often
    tried:    task -> the devices that failed at it
    given_up: tasks that no device is to try again, with the last reason
    """

    lanes: dict[str, Lane] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    tried: dict[Task, list[str]] = field(default_factory=dict)
    given_up: dict[Task, str] = field(default_factory=dict)

    def add(self, name: str, type: str, rank: int, tasks: Iterable[Task]) -> None:
        lane = self.lanes.setdefault(name, Lane(name, type, rank))
        lane.waiting.extend(tasks)

    @property
    def waiting(self) -> bool:
        return any(lane.waiting for lane in self.lanes.values())

    def wanting(self, types: Set[str], left_s: float) -> int:
        """How much waits for a device that is not there, these types being, and would fit the time."""
        return sum(
            not task.device
            and (lane.type not in types or task in self.tried)
            and lane.expected_s(task) <= left_s
            for lane in self.lanes.values()
            for task in lane.waiting
        )

    def next(self, device: str, type: str, left_s: float, alone: bool = False) -> Task | None:
        """The most valuable task that this device may do in the time that is left: of the lowest rank, from
        the lane that was given least; a lane's tasks in their order. None where nothing fits. Time is kept
        for what only this device may do.

        alone: no other of its type is there, who could try what this one failed at
        """
        lanes = [lane for lane in self.lanes.values() if lane.type == type and lane.waiting]
        owed_s = sum(
            lane.expected_s(task) for lane in lanes for task in lane.waiting if task.device == device
        )
        for lane in sorted(lanes, key=lambda lane: (lane.rank, lane.given)):
            for index, task in enumerate(lane.waiting):
                mine = task.device in ("", device) and (alone or device not in self.tried.get(task, ()))
                others_s = 0.0 if task.device else owed_s
                if mine and lane.expected_s(task) + others_s <= left_s:
                    del lane.waiting[index]
                    lane.given += 1
                    return task
        return None

    def done(self, task: Task, device: str, wall_s: float, measured_s: float) -> None:
        """What a case took tells what the lane's others will take."""
        self.failed.pop(device, None)
        lane, aside = self.lanes[task.lane], max(0.0, wall_s - measured_s)
        lane.aside_s = aside if lane.aside_s is None else FORGETS * lane.aside_s + (1 - FORGETS) * aside

    def fail(self, task: Task, device: str, reason: str, alone: bool = False) -> str:
        """The device failed at it: another is to try, or this one again if it is alone, after the lane's
        others. Gives what becomes of the task and of the device, in words."""
        self.failed[device] = self.failed.get(device, 0) + 1
        tried = self.tried.setdefault(task, [])
        tried.append(device)
        lane = self.lanes[task.lane]
        lane.given -= 1
        if task.device:
            what = "given up"
        elif len(tried) >= MOST_FAILURES:
            self.given_up[task] = reason
            what = f"given up, as {' and '.join(dict.fromkeys(tried))} failed at it"
        elif alone:
            lane.waiting.append(task)
            what = "tried again later"
        else:
            lane.waiting.appendleft(task)
            what = "given to another device"
        if self.is_out(device):
            what += f"; {device} is left out, as it failed {self.failed[device]} times in a row"
        return what

    def is_out(self, device: str) -> bool:
        return self.failed.get(device, 0) >= MOST_FAILURES

    def close(self, lane: str) -> None:
        """Its budget is spent: nothing of it is given any more."""
        self.lanes[lane].waiting.clear()
