"""The jobs that a campaign's steps become on devices of a type, and when each would begin and end."""

from __future__ import annotations

import functools
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from harness.campaign.spec import Step
from harness.cluster.agent import CommandDone, Opened
from harness.cluster.driver import Dispatcher, Driver, Job, Task
from harness.cluster.execute import CommandJob, RunJob, begin_race, case_tasks
from harness.errors import HarnessError
from harness.progress import Progress
from harness.results.schema import Calibration, Record, Run
from harness.run.folder import begin, resume, select_all, worth_s
from harness.run.request import Request
from harness.run.session import Outcome
from harness.tune.race import TuneRequest, implementations_here, race_selection
from kernels.platform import Platform
from shapes.case import Case

ReadStep = Callable[[Step], Callable[[Platform], Request] | TuneRequest | None]
"""Reads a step's arguments as its command does. Gives the request of `run` or `toggle` on a platform, the
request of `tune`, or None for a command that runs whole. Raises UsageError, which names the step."""


class CampaignDisplay(Protocol):
    """What a person sees of a campaign."""

    def log(self, line: str) -> None: ...

    def begin(self, driver: Driver, counts: Mapping[str, int]) -> None:
        """All that is to be done is known. counts: devices of each type"""

    def task(self, task: Task, device: str, driver: Driver) -> None:
        """A device begins a task."""

    def case(self, step: str, run: Run, case: Case, records: Sequence[Record]) -> None:
        """A case of a step is finished."""

    def command(self, step: str, code: int | None, output: str) -> None:
        """A command that ran whole is finished."""


@dataclass
class StepRace:
    """Shows a race as a step of a campaign: a `harness.tune.race.RaceDisplay`."""

    step: str
    display: CampaignDisplay
    progress: Progress

    def log(self, line: str) -> None:
        self.display.log(line)

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        self.display.case(self.step, run, case, records)

    def stored(self, file: Path | None, choice: Mapping[str, Any] | None) -> None:
        pass

    def end(self, run: Run, outcome: Outcome) -> None:
        pass


@dataclass(frozen=True)
class Steps:
    """The steps of a campaign that measures."""

    steps: Sequence[Step]
    budget_s: float
    read: ReadStep
    folder: Path
    alone: bool
    """Whether there is one type of devices, so that names and folders need not tell it."""
    display: CampaignDisplay

    def jobs(self, type: str, devices: Sequence[Opened], made: Sequence[Calibration]) -> Iterator[Job]:
        """Jobs on devices of a type; a step that has none is named with the reason. made: their
        calibrations"""
        for step in self.steps:
            if step.is_for(type, devices[0].facts.platform.kind):
                try:
                    yield from self._jobs(step, type, devices[0], made)
                except HarnessError as error:
                    self.display.log(f"left out: {step.name}: {error}")

    def _jobs(self, step: Step, type: str, device: Opened, made: Sequence[Calibration]) -> Iterator[Job]:
        name = step.name if self.alone else f"{step.name} on {type}"
        folder = (self.folder if self.alone else self.folder / type) / step.name
        request, facts = self.read(step), device.facts
        if request is None:
            words, wall_s = step.whole_command(self.budget_s), step.wall_s(self.budget_s)
            on_done = functools.partial(self._on_command, step)
            yield CommandJob(name, type, step.rank, folder, words, wall_s, on_done)
        elif isinstance(request, TuneRequest):
            request = replace(request, out=str(self.folder / "tuned"))
            display = StepRace(step.name, self.display, Progress(quiet=True))
            for implementation in implementations_here(request, facts.platform):
                where = folder.with_name(f"{folder.name}-{implementation.name}")
                begun = (where / "run.json").exists()
                if begun:
                    asked = replace(request, resume=str(where), retry=True, launch=None)
                else:
                    asked = replace(request, journal=str(where))
                journal, plan, race = begin_race(implementation, asked, device, display)
                of, run = f"{name}: {implementation.name}", asked.run_request(implementation)
                yield RunJob(of, type, step.rank, journal, plan, run, race.on_case, 0, made)
        else:
            run = request(facts.platform)
            if (folder / "run.json").exists():
                journal, plan = resume(Request(resume=str(folder), retry=True), facts.provenance)
            else:
                run = replace(run, out=str(folder))
                selection = select_all(run, facts.platform)
                journal, plan = begin(run, facts.platform, lambda _: facts, selection, self.display.log)
            on_case = functools.partial(self.display.case, step.name, plan.record)
            yield RunJob(name, type, step.rank, journal, plan, run, on_case, 0, made)

    def _on_command(self, step: Step, name: str, done: CommandDone) -> None:
        self.display.command(step.name, done.code, done.output)


@dataclass
class PlannedJob:
    """When a job would begin and end, in seconds from the campaign's beginning."""

    name: str
    cases: int
    fit: int = 0
    """How many of the cases fit the time."""
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
