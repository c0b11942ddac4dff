"""A campaign from its steps to its archive: all steps on a pool's devices, within a budget of wall-clock. The
archive is one zip file to carry home, which every command reads as the folder that it was."""

from __future__ import annotations

import functools
import io
import json
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from harness import files
from harness.archive import packed
from harness.campaign.plan import ReadStep, Step, steps_of
from harness.cluster.agent import Opened
from harness.cluster.driver import Driver, Job, Pool, Task
from harness.cluster.execute import CommandJob, RunJob, begin_race, calibrations
from harness.cluster.ray_cluster import PoolGone
from harness.errors import FAILED, NOTHING_RAN, OK, HarnessError, UsageError, mistake
from harness.plan.budget import parse_seconds
from harness.progress import Progress
from harness.results.schema import Calibration, Record, Run
from harness.run.execute import BROKEN, Outcome
from harness.run.folder import begin, resume, select_all
from harness.run.plan import Request
from harness.tune.race import TuneRequest, implementations_here
from shapes.case import Case

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


class CampaignDisplay(Protocol):
    """What a person sees of a campaign."""

    def log(self, line: str) -> None: ...

    def begin(self, driver: Driver, counts: Mapping[str, int]) -> None:
        """Is called when all jobs are known. counts: devices of each type"""

    def task(self, task: Task, device: str, driver: Driver) -> None:
        """Is called when a device begins a task."""

    def case(self, step: str, run: Run, case: Case, records: Sequence[Record]) -> None:
        """Is called when a case of a step is finished."""

    def command(self, step: str, code: int | None, output: str) -> None:
        """Is called when a command that ran whole is finished."""

    def end(self, outcome: CampaignOutcome) -> None: ...


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
    alone: bool  # there is one type of devices, so that names and folders need not tell it
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
            on_done = functools.partial(self.display.command, step.name)
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


def run_campaign(
    pool: Pool, request: CampaignRequest, folder: Path, began: float, read: ReadStep, display: CampaignDisplay
) -> int:
    """Returns the exit code; raises HarnessError. began: when the command did, by time.monotonic()"""
    if request.resume:
        _resumed_steps(folder)  # a mistake in it is said before devices are opened
    elif (folder / FILE).exists():
        raise UsageError(f"{folder} holds a campaign: --resume {folder}, or another --out")
    budget_s = request.budget_s
    made: list[Calibration] = []
    driver = Driver(
        pool,
        display.log,
        on_begin=lambda task, device: display.task(task, device, driver),
        ends=began + budget_s - max(END_S, END_SHARE * budget_s),
        threads=request.threads,
    )
    try:
        with driver:
            types = driver.open()
            kinds = {type: devices[0].facts.platform.kind for type, devices in types.items()}
            if request.resume:
                steps, alone = _resumed_steps(folder)
            else:
                steps, alone = _new_steps(folder, request.file, kinds)
            if alone and len(kinds) > 1:
                choices = " or ".join(sorted(kinds))
                raise UsageError(f"{folder} is of one type of devices: choose --device {choices}")
            for step in steps:
                read(step)
                if not any(step.is_for(type, kind) for type, kind in kinds.items()):
                    wanted = ", ".join(step.devices) or step.kind
                    display.log(f"left out: {step.name}: of {wanted} there is none, but {', '.join(kinds)}")
            whole = Steps(steps, budget_s, read, folder, alone, display)
            for type, devices in types.items():
                driver.add(calibrations(type, devices, made, display.log))
                driver.add(whole.jobs(type, devices, made))
            display.begin(driver, {type: len(devices) for type, devices in types.items()})
            driver.run()
    except PoolGone as gone:
        then = f"finished cases are recorded, --resume {folder} measures the rest"
        raise HarnessError(f"{gone}; {then}") from None
    jobs = [job for job in driver.dispatcher.jobs.values() if isinstance(job, RunJob | CommandJob)]
    for job in jobs:
        if isinstance(job, RunJob) and not job.journal.finished():
            job.journal.remove()
    archive = pack(folder, [step.name for step in steps])
    display.end(CampaignOutcome(jobs, folder, archive, time.monotonic() - began, made))
    statuses = {status for job in jobs for status in job.statuses}
    if statuses & BROKEN or driver.failed:
        return FAILED
    return OK if any(job.done for job in jobs) else NOTHING_RAN


def _new_steps(folder: Path, file: str | None, kinds: Mapping[str, str]) -> tuple[Sequence[Step], bool]:
    """The steps of a new campaign, which are written to its folder, and whether its devices are of one type.
    Raises UsageError. kinds: of platform, by type of devices"""
    steps, alone = steps_of(file, kinds.values()), len(kinds) == 1
    content = {"schema_version": 1, "steps": [asdict(step) for step in steps], "alone": alone}
    try:
        files.replace(folder / FILE, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        reason = f"cannot write to {folder}: {error.strerror}"
        raise UsageError(f"{reason}; choose another --out") from None
    return steps, alone


def _resumed_steps(folder: Path) -> tuple[Sequence[Step], bool]:
    """As `_new_steps`, of the campaign in a folder."""
    file = folder / FILE
    try:
        kept = json.loads(file.read_text())
        return [Step(**step) for step in kept["steps"]], bool(kept["alone"])
    except OSError as error:
        raise UsageError(f"no campaign in {folder}: cannot read {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {file}: {mistake(error)}") from None


def pack(folder: Path, steps: Sequence[str], most: int = MOST_BYTES) -> Archive:
    """Writes the archive beside the folder. Where it would have more than `most` bytes, the last steps are
    left out, as many as it takes. Raises HarnessError where it cannot be written."""
    target = folder.with_name(f"{folder.name}.zip")
    try:
        data = packed(folder, lambda name: bool(step_of(name, steps)))
        left_out = _too_large(data, steps, most)
        if left_out:
            data = packed(folder, lambda name: step_of(name, steps) not in {"", *left_out})
        files.replace(target, data)
    except OSError as error:
        raise HarnessError(f"cannot write {target}: {error.strerror}; {folder} is whole") from None
    return Archive(target, len(data), left_out)


def step_of(name: str, steps: Sequence[str]) -> str:
    """The step that a file belongs to, or what of BESIDE it is; empty for a file that is not the campaign's.
    The folder of a race is called as its step and its implementation."""
    for part in PurePosixPath(name).parts[:2]:
        for known in (*BESIDE, *steps):
            if part == known or (part.startswith(f"{known}-") and "." in part):
                return known
    return ""


def _too_large(data: bytes, steps: Sequence[str], most: int) -> list[str]:
    """The last steps, without which an archive is not too large."""
    sizes: dict[str, int] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            step = step_of(member.filename, steps)
            sizes[step] = sizes.get(step, 0) + member.compress_size + 3 * len(member.filename) + 200
    left_out: list[str] = []
    size = len(data)
    for step in reversed(steps):
        if size <= most:
            break
        size -= sizes.get(step, 0)
        left_out.append(step)
    return left_out
