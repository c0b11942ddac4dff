"""The plan of a campaign: when each step would begin and end, and what does not fit, by the driver's own
rules."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.campaign.spec import Step
from harness.cluster.driver import Dispatcher, Job, Task
from harness.cluster.execute import case_tasks
from harness.errors import HarnessError
from harness.run.folder import select_all, worth_s
from harness.run.request import Request
from harness.tune.race import TuneRequest, implementations_here, race_selection
from kernels.platform import Platform

ReadStep = Callable[[Step], Callable[[Platform], Request] | TuneRequest | None]
"""Reads a step's arguments as its command does. Returns the request of `run` or `toggle` on a platform, the
request of `tune`, or None for a command that runs whole. Raises UsageError, which names the step."""


@dataclass
class PlannedJob:
    """When a job would begin and end, in seconds from the campaign's beginning."""

    name: str
    cases: int
    fit: int = 0  # cases that fit the time
    begins_s: float | None = None
    ends_s: float | None = None


def planned_jobs(
    steps: Sequence[Step], platforms: Mapping[str, Platform], budget_s: float, read: ReadStep
) -> tuple[list[Job], dict[str, str]]:
    """The jobs of all steps on platforms, by type of devices, for a plan; and the reasons of steps that have
    nothing to do."""
    jobs: list[Job] = []
    reasons: dict[str, str] = {}
    for type, platform in platforms.items():
        for step in steps:
            if step.is_for(type, platform.kind):
                name = step.name if len(platforms) == 1 else f"{step.name} on {type}"
                try:
                    waiting = deque(_tasks(step, name, platform, budget_s, read))
                    jobs.append(Job(name, type, step.rank, waiting=waiting))
                except HarnessError as error:
                    reasons[name] = str(error)
    return jobs, reasons


def _tasks(step: Step, job: str, platform: Platform, budget_s: float, read: ReadStep) -> list[Task]:
    request = read(step)
    if request is None:
        return [Task(job, step.name, 0.0, step.wall_s(budget_s))]
    if isinstance(request, TuneRequest):
        tasks: list[Task] = []
        request = replace(request, dry_run=True)
        for implementation in implementations_here(request, platform):
            worth = worth_s(request.run_request(implementation), "")
            cases = race_selection(implementation, request, platform).cases
            keys = [f"{implementation.name} {case.key}" for case in cases]
            tasks += case_tasks(job, keys, worth, "", platform.kind)
        return tasks
    asked = request(platform)
    selection = select_all(asked, platform)
    keys = [case.key for case in selection.cases]
    return case_tasks(job, keys, worth_s(asked, selection.suite), selection.suite, platform.kind)


def simulated(jobs: Sequence[Job], counts: Mapping[str, int], left_s: float) -> list[PlannedJob]:
    """What becomes of jobs on so many devices of each type, by the driver's own rules, if each task takes
    what is expected of it."""
    dispatcher = Dispatcher()
    for job in jobs:  # the devices have other names here
        waiting = deque(replace(task, device="") for task in job.waiting)
        dispatcher.add(Job(job.name, job.type, job.rank, waiting=waiting, aside_s=job.aside_s))
    planned = {job.name: PlannedJob(job.name, len(job.waiting)) for job in jobs}
    free = [(0.0, f"{type} {index}", type) for type, count in counts.items() for index in range(count)]
    heapq.heapify(free)
    while free:
        now, device, type = heapq.heappop(free)
        task = dispatcher.next(device, type, left_s - now)
        if task is None:
            continue
        end = now + dispatcher.jobs[task.job].expected_s(task)
        of = planned[task.job]
        of.fit += 1
        if of.begins_s is None:
            of.begins_s = now
        of.ends_s = end  # tasks of a job take equally long, so the last to begin is the last to end
        heapq.heappush(free, (end, device, type))
    return list(planned.values())
