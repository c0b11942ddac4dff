"""A campaign from its plan to its archive: all steps on a pool's devices, within a budget of wall-clock."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from harness import files
from harness.campaign.archive import Packed, pack
from harness.campaign.jobs import CampaignPlan, Commands, StepDisplay
from harness.campaign.spec import Step, steps_of
from harness.cluster.calibration import calibrations
from harness.cluster.dispatch import Task
from harness.cluster.driver import Driver
from harness.cluster.jobs import CommandJob, RunJob
from harness.cluster.pool import Pool, PoolGone
from harness.errors import FAILED, NOTHING_RAN, OK, HarnessError, UsageError, mistake
from harness.results.schema import Calibration
from harness.run.execute import BROKEN

FILE = "campaign.json"
END_S, END_SHARE = 5.0, 0.02
"""Of the budget, for agents to end and for the archive."""


@dataclass(frozen=True)
class CampaignRequest:
    """What a campaign was asked for.

    file:     of its steps; None: the default ones
    budget_s: of wall-clock
    resume:   whether the folder holds it already
    began:    the command, by time.monotonic()
    """

    file: str | None
    budget_s: float
    folder: Path
    resume: bool
    began: float
    threads: int | None = None


@dataclass
class StepOutcome:
    """Of a step on a type of devices. cases: that it has; done: that are finished; statuses: of its rows"""

    name: str
    type: str
    cases: int
    done: int
    statuses: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CampaignOutcome:
    steps: Sequence[StepOutcome]
    folder: Path
    archive: Packed
    wall_s: float
    calibrations: Sequence[Calibration] = ()


class CampaignDisplay(StepDisplay, Protocol):
    """And of its beginning and its end."""

    def begin(self, driver: Driver, counts: Mapping[str, int]) -> None:
        """All that is to be done is known. counts: devices of each type"""

    def task(self, task: Task, device: str, driver: Driver) -> None:
        """A device is given a task."""

    def end(self, outcome: CampaignOutcome) -> None: ...


def run_campaign(pool: Pool, request: CampaignRequest, commands: Commands, display: CampaignDisplay) -> int:
    """Returns the exit code; raises HarnessError."""
    if request.resume:
        kept_plan(request.folder)
    elif (request.folder / FILE).exists():
        raise UsageError(f"{request.folder} holds a campaign: --resume {request.folder}, or another --out")
    made: list[Calibration] = []
    driver = Driver(
        pool,
        display.log,
        on_begin=lambda task, device: display.task(task, device, driver),
        ends=request.began + request.budget_s - max(END_S, END_SHARE * request.budget_s),
        threads=request.threads,
    )
    try:
        with driver:
            types = driver.open()
            kinds = {type: devices[0].facts.platform.kind for type, devices in types.items()}
            kept = kept_plan(request.folder) if request.resume else begin_plan(request, kinds)
            steps = kept.steps
            if kept.alone and len(kinds) > 1:
                choices = " or ".join(sorted(kinds))
                raise UsageError(f"{request.folder} is of one type of devices: choose --device {choices}")
            for step in steps:
                commands.check(step)
                if not any(step.is_for(type, kind) for type, kind in kinds.items()):
                    wanted = ", ".join(step.devices) or step.kind
                    display.log(f"left out: {step.name}: of {wanted} there is none, but {', '.join(kinds)}")
            plan = CampaignPlan(steps, request.budget_s, commands, request.folder, kept.alone, display)
            for type, devices in types.items():
                driver.add(calibrations(type, devices, made, display.log))
                driver.add(plan.jobs(type, devices, made))
            display.begin(driver, {type: len(devices) for type, devices in types.items()})
            driver.run()
    except PoolGone as gone:
        then = f"finished cases are recorded, --resume {request.folder} measures the rest"
        raise HarnessError(f"{gone}; {then}") from None
    outcomes = [outcome(job) for job in driver.jobs.values() if isinstance(job, (RunJob, CommandJob))]
    for job in driver.jobs.values():
        if isinstance(job, RunJob) and not job.journal.finished():
            job.journal.remove()
    archive = pack(request.folder, [step.name for step in steps])
    display.end(CampaignOutcome(outcomes, request.folder, archive, time.monotonic() - request.began, made))
    statuses = {status for step in outcomes for status in step.statuses}
    if statuses & BROKEN or driver.failed:
        return FAILED
    return OK if any(step.done for step in outcomes) else NOTHING_RAN


@dataclass(frozen=True)
class KeptPlan:
    """alone: devices are of one type, so that no folder needs its name"""

    steps: Sequence[Step]
    alone: bool


def begin_plan(request: CampaignRequest, kinds: Mapping[str, str]) -> KeptPlan:
    """Writes what the campaign is. kinds: of platform, by the type of devices. Raises UsageError."""
    made = KeptPlan(steps_of(request.file, kinds.values()), len(kinds) == 1)
    text = json.dumps({"schema_version": 1} | asdict(made), indent=1) + "\n"
    try:
        files.replace(request.folder / FILE, text)
    except OSError as error:
        reason = f"cannot write to {request.folder}: {error.strerror}"
        raise UsageError(f"{reason}; choose another --out") from None
    return made


def kept_plan(folder: Path) -> KeptPlan:
    """Of the campaign in a folder. Raises UsageError where there is none, or it cannot be read."""
    file = folder / FILE
    try:
        kept = json.loads(file.read_text())
        return KeptPlan([Step(**step) for step in kept["steps"]], bool(kept["alone"]))
    except OSError as error:
        raise UsageError(f"no campaign in {folder}: cannot read {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {file}: {mistake(error)}") from None


def outcome(job: RunJob | CommandJob) -> StepOutcome:
    if isinstance(job, CommandJob):
        return StepOutcome(job.name, job.type, 1, int(job.done.exists()), job.statuses)
    return StepOutcome(
        job.name, job.type, len(job.planned), len(job.planned) - len(job.waiting), dict(job.statuses)
    )
