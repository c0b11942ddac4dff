"""Plan of a campaign: when each step would begin and end, and what does not fit, by the driver's rules."""

from __future__ import annotations

import copy
import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.campaign.jobs import Commands, share_s
from harness.campaign.spec import Step
from harness.cluster.dispatch import Dispatcher, Task
from harness.cluster.jobs import tasks
from harness.errors import HarnessError
from harness.run.folder import select_all, worth_s
from harness.tune.race import implementations_here, race_selection
from kernels.platform import Platform


@dataclass
class PlannedLane:
    """Seconds from the beginning; None where nothing of it fits."""

    name: str
    type: str
    cases: int
    fit: int = 0
    begins_s: float | None = None
    ends_s: float | None = None


@dataclass(frozen=True)
class Devices:
    """Of one type."""

    platform: Platform
    count: int


def plan_tasks(
    steps: Sequence[Step], devices: Mapping[str, Devices], budget_s: float, commands: Commands
) -> tuple[Dispatcher, dict[str, str]]:
    """Of all steps, and of those that have nothing to do the reasons."""
    dispatcher, reasons = Dispatcher(), dict[str, str]()
    for type, of_type in devices.items():
        for step in steps:
            if not step.is_for(type, of_type.platform.kind):
                continue
            name = step.name if len(devices) == 1 else f"{step.name} on {type}"
            try:
                dispatcher.add(
                    name, type, step.rank, _tasks(step, name, of_type.platform, budget_s, commands)
                )
            except HarnessError as error:
                reasons[name] = str(error)
    return dispatcher, reasons


def _tasks(step: Step, lane: str, platform: Platform, budget_s: float, commands: Commands) -> Sequence[Task]:
    if not step.casewise:
        return [Task(lane, step.name, 0.0, share_s(step, budget_s))]
    if step.command == "tune":
        tuned, asked = commands.race(step, Path())
        made: list[Task] = []
        for implementation in implementations_here(tuned, platform):
            request = asked.of(implementation)
            cases = race_selection(implementation, tuned, platform).cases
            keys = [f"{implementation.name} {case.key}" for case in cases]
            made += tasks(lane, keys, worth_s(request, ""), "", platform.kind)
        return made
    request = commands.request(step)(platform)
    selection = select_all(request, platform)
    keys = [case.key for case in selection.cases]
    return tasks(lane, keys, worth_s(request, selection.suite), selection.suite, platform.kind)


def simulated(dispatcher: Dispatcher, counts: Mapping[str, int], left_s: float) -> list[PlannedLane]:
    """What becomes of a dispatcher on so many devices of each type, if all takes what is expected."""
    dispatcher = copy.deepcopy(dispatcher)
    for each in dispatcher.lanes.values():  # the devices here have other names
        each.waiting = deque(replace(task, device="") for task in each.waiting)
    lanes = {
        lane.name: PlannedLane(lane.name, lane.type, len(lane.waiting)) for lane in dispatcher.lanes.values()
    }
    free = [(0.0, f"{type} {index}", type) for type, count in counts.items() for index in range(count)]
    heapq.heapify(free)
    while free:
        now, device, type = heapq.heappop(free)
        task = dispatcher.next(device, type, left_s - now)
        if task is None:
            continue
        lane = lanes[task.lane]
        end = now + dispatcher.lanes[task.lane].expected_s(task)
        lane.fit += 1
        if lane.begins_s is None:
            lane.begins_s = now
        lane.ends_s = end  # tasks of a lane take equally long: the last to begin is the last to end
        heapq.heappush(free, (end, device, type))
    return list(lanes.values())
