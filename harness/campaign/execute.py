"""A campaign from its steps to its archive: all steps on a pool's devices, within a budget of wall-clock. The
archive is one zip file to carry home, which every command reads as the folder that it was."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from harness import files
from harness.archive import packed
from harness.campaign.command import CommandJob
from harness.campaign.plan import ReadStep, Step, jobs_of, steps_of
from harness.cluster.agent import Opened
from harness.cluster.driver import Driver, Pool, Task
from harness.cluster.execute import RunJob, begin_race, begin_run, calibrations
from harness.errors import FAILED, NOTHING_RAN, OK, HarnessError, UsageError, mistake
from harness.plan.budget import parse_seconds
from harness.results.schema import Calibration
from harness.run.execute import BROKEN
from harness.run.plan import PLANNING, Request
from harness.tune.race import RaceDisplay, TuneRequest, implementations_here

AnyRequest = TypeVar("AnyRequest", bound=Request)

FILE = "campaign.json"
END_S, END_SHARE = 5.0, 0.02
"""Seconds of the budget that are kept for agents to end and for the archive, or this part of it if longer."""
MOST_BYTES = 16_000_000
"""The largest size of an archive."""
BESIDE = (FILE, "tuned")
"""What is archived beside the folders of steps."""


@dataclass(frozen=True)
class CampaignRequest:
    """The options of `campaign` as they were given."""

    file: str | None = None
    budget: str = "25m"
    cluster: str | None = None
    device: str | None = None
    out: str | None = None
    resume: str | None = None
    plan: str | None = None
    devices: Sequence[str] = ()
    threads: int | None = None
    quiet: bool = False

    @property
    def budget_s(self) -> float:
        """Seconds of wall-clock. Raises UsageError."""
        return parse_seconds(self.budget, "--budget")


@dataclass(frozen=True)
class Archive:
    file: Path
    size: int
    left_out: Sequence[str]  # steps whose files would make it too large, the least valuable first


@dataclass(frozen=True)
class CampaignOutcome:
    jobs: Sequence[RunJob | CommandJob]
    folder: Path
    archive: Archive
    wall_s: float
    calibrations: Sequence[Calibration] = ()


class CampaignDisplay(RaceDisplay, Protocol):
    """What a person sees of a campaign: `case` is called for each case of a run or race, and `begin` when all
    jobs are known."""

    def begin(self, driver: Driver, counts: Mapping[str, int]) -> None:
        """counts: devices of each type"""

    def task(self, task: Task, device: str, driver: Driver) -> None:
        """Is called when a device begins a task."""

    def command(self, step: str, code: int | None, output: str) -> None:
        """Is called when a command that ran whole is finished."""

    def finish(self, outcome: CampaignOutcome) -> None: ...


@dataclass(frozen=True)
class Steps:
    """The steps of a campaign that measures."""

    types: Mapping[str, Sequence[Opened]]  # the devices by type
    calibrations: Sequence[Calibration]  # of the devices, as far as they are known
    budget_s: float
    read: ReadStep
    folder: Path
    alone: bool  # there is one type of devices, so that folders need not tell it
    display: CampaignDisplay

    def jobs(self, step: Step, name: str, type: str) -> Iterator[RunJob | CommandJob]:
        """The jobs of a step on a type of devices. Raises HarnessError where there is none."""
        device = self.types[type][0]
        folder = (self.folder if self.alone else self.folder / type) / step.name
        request = self.read(step)
        if request is None:
            words, wall_s = step.whole_command(self.budget_s), step.wall_s(self.budget_s)
            on_done = functools.partial(self.display.command, step.name)
            yield CommandJob(name, type, step.rank, folder, words, wall_s, on_done)
        elif isinstance(request, TuneRequest):
            request = replace(request, tuned=str(self.folder / "tuned"))
            for implementation in implementations_here(request, device.facts.platform):
                where = folder.with_name(f"{folder.name}-{implementation.name}")
                journal, race = begin_race(implementation, _into(request, where), device, self.display)
                of = f"{name}: {implementation.name}"
                yield RunJob(of, type, step.rank, journal, race.plan, race.on_case, 0, self.calibrations)
        else:
            run = _into(request(device.facts.platform), folder)
            journal, plan = begin_run(run, device, self.display.log)
            on_case = functools.partial(self.display.case, plan.record)
            yield RunJob(name, type, step.rank, journal, plan, on_case, 0, self.calibrations)


def _into(request: AnyRequest, folder: Path) -> AnyRequest:
    """The request for a run in a folder; where one was begun there, to go on with it as it was planned."""
    if not (folder / "run.json").exists():
        return replace(request, out=str(folder))
    planned: dict[str, Any] = {each.name: each.default for each in fields(request) if each.name in PLANNING}
    return replace(request, **planned, resume=str(folder), retry=True)


def run_campaign(
    pool: Pool, request: CampaignRequest, folder: Path, began: float, read: ReadStep, display: CampaignDisplay
) -> int:
    """Returns the exit code; raises HarnessError. began: when the command did, by time.monotonic()"""
    resumed = _resumed_steps(folder) if request.resume else None
    if not resumed and (folder / FILE).exists():
        raise UsageError(f"{folder} holds a campaign: --resume {folder}, or another --out")
    budget_s = request.budget_s
    driver = Driver(
        pool,
        display.log,
        on_begin=lambda task, device: display.task(task, device, driver),
        ends=began + budget_s - max(END_S, END_SHARE * budget_s),
        threads=request.threads,
        go_on=f"--resume {folder} measures the rest",
    )
    with driver:
        types = driver.open()
        kinds = {type: devices[0].facts.platform.kind for type, devices in types.items()}
        steps, alone = resumed or _new_steps(folder, request.file, kinds)
        if alone and len(kinds) > 1:
            choices = " or ".join(sorted(kinds))
            raise UsageError(f"{folder} is of one type of devices: choose --device {choices}")
        for step in steps:
            read(step)
            if not any(step.is_for(type, kind) for type, kind in kinds.items()):
                wanted = ", ".join(step.devices) or step.kind
                display.log(f"left out: {step.name}: of {wanted} there is none, but {', '.join(kinds)}")
        for type, devices in types.items():
            driver.add(calibrations(driver, type, devices))
        make = Steps(types, driver.calibrations, budget_s, read, folder, alone, display).jobs
        jobs = list(jobs_of(steps, kinds, alone, make, display.log))
        driver.add(jobs)
        display.begin(driver, {type: len(devices) for type, devices in types.items()})
        driver.run()
    for job in jobs:
        if isinstance(job, RunJob) and not job.journal.finished():
            job.journal.remove()
    archive = pack(folder, [step.name for step in steps])
    wall_s = time.monotonic() - began
    display.finish(CampaignOutcome(jobs, folder, archive, wall_s, driver.calibrations))
    statuses = {status for job in jobs for status in job.statuses}
    if statuses & BROKEN or driver.failed:
        return FAILED
    return OK if any(job.done for job in jobs) else NOTHING_RAN


def _new_steps(folder: Path, file: str | None, kinds: Mapping[str, str]) -> tuple[Sequence[Step], bool]:
    """The steps of a new campaign, which are written to its folder, and whether its devices are of one type.
    Raises UsageError. kinds: of platform, by type of devices"""
    steps, alone = steps_of(file, kinds.values()), len(kinds) == 1
    content = {"schema_version": 1, "steps": [asdict(step) for step in steps], "alone": alone}
    with files.explained(f"cannot write to {folder}", "; choose another --out"):
        files.replace(folder / FILE, json.dumps(content, indent=1) + "\n")
    return steps, alone


def _resumed_steps(folder: Path) -> tuple[Sequence[Step], bool]:
    """As `_new_steps`, of the campaign in a folder."""
    file = folder / FILE
    try:
        with files.explained(f"no campaign in {folder}: cannot read {file}"):
            kept = json.loads(file.read_text())
        return [Step(**step) for step in kept["steps"]], bool(kept["alone"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {file}: {mistake(error)}") from None


def pack(folder: Path, steps: Sequence[str], most: int = MOST_BYTES) -> Archive:
    """Writes the archive beside the folder. Where it would have more than `most` bytes, the last steps are
    left out, as many as it takes. Raises HarnessError where it cannot be written."""
    target = folder.with_name(f"{folder.name}.zip")
    left_out: list[str] = []
    with files.explained(f"cannot write {target}", f"; {folder} is whole", HarnessError):
        data = packed(folder, lambda name: bool(step_of(name, steps)))
        while len(data) > most and len(left_out) < len(steps):
            left_out.append(steps[-1 - len(left_out)])
            data = packed(folder, lambda name: step_of(name, steps) not in {"", *left_out})
        files.replace(target, data)
    return Archive(target, len(data), left_out)


def step_of(name: str, steps: Sequence[str]) -> str:
    """The step that a file belongs to, or what of BESIDE it is; empty for a file that is not the campaign's.
    The folder of a race is called as its step and its implementation."""
    for part in PurePosixPath(name).parts[:2]:
        for known in (*BESIDE, *steps):
            if part == known or (part.startswith(f"{known}-") and "." in part):
                return known
    return ""
