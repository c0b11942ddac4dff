"""A campaign from its steps to its archive: all steps on a pool's devices, within a budget of wall-clock. The
archive is one zip file to carry home, which every command reads as the folder that it was."""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from harness import files
from harness.archive import packed
from harness.campaign.spec import Step, steps_of
from harness.campaign.steps import CampaignDisplay, ReadStep, Steps
from harness.cluster.driver import Driver, Pool, PoolGone
from harness.cluster.execute import CommandJob, RunJob, calibrations
from harness.errors import FAILED, NOTHING_RAN, OK, HarnessError, UsageError, mistake
from harness.results.schema import Calibration
from harness.run.execute import BROKEN

FILE = "campaign.json"
END_S, END_SHARE = 5.0, 0.02
"""Of the budget, for agents to end and for the archive: so many seconds, or such a part if it is longer."""
MOST_BYTES = 16_000_000
"""The size of an archive."""
BESIDE = (FILE, "tuned")
"""What is archived beside the folders of steps."""


@dataclass(frozen=True)
class CampaignRequest:
    """What a campaign was asked for."""

    file: str | None
    """Of the steps; None: the default steps."""
    budget_s: float
    """Of wall-clock."""
    folder: Path
    resume: bool
    """Whether the folder holds the campaign already."""
    began: float
    """When the command began, by time.monotonic()."""
    threads: int | None = None

    @property
    def ends(self) -> float:
        """When measuring must be over, by time.monotonic()."""
        return self.began + self.budget_s - max(END_S, END_SHARE * self.budget_s)


@dataclass(frozen=True)
class Archive:
    file: Path
    size: int
    left_out: Sequence[str]
    """Steps whose files would make it too large, the least valuable first."""


@dataclass
class StepOutcome:
    """What became of a step on a type of devices."""

    name: str
    cases: int
    done: int
    statuses: dict[str, int] = field(default_factory=dict)
    """How many rows have each status."""


@dataclass(frozen=True)
class CampaignOutcome:
    steps: Sequence[StepOutcome]
    folder: Path
    archive: Archive
    wall_s: float
    calibrations: Sequence[Calibration] = ()


class WholeDisplay(CampaignDisplay, Protocol):
    """What a person sees of a campaign, its end included."""

    def end(self, outcome: CampaignOutcome) -> None: ...


def run_campaign(pool: Pool, request: CampaignRequest, read: ReadStep, display: WholeDisplay) -> int:
    """Returns the exit code; raises HarnessError."""
    if request.resume:
        _resumed_steps(request.folder)  # what is wrong with it is said before devices are opened
    elif (request.folder / FILE).exists():
        raise UsageError(f"{request.folder} holds a campaign: --resume {request.folder}, or another --out")
    made: list[Calibration] = []
    driver = Driver(
        pool,
        display.log,
        on_begin=lambda task, device: display.task(task, device, driver),
        ends=request.ends,
        threads=request.threads,
    )
    try:
        with driver:
            types = driver.open()
            kinds = {type: devices[0].facts.platform.kind for type, devices in types.items()}
            steps, alone = _resumed_steps(request.folder) if request.resume else _new_steps(request, kinds)
            if alone and len(kinds) > 1:
                choices = " or ".join(sorted(kinds))
                raise UsageError(f"{request.folder} is of one type of devices: choose --device {choices}")
            for step in steps:
                read(step)
                if not any(step.is_for(type, kind) for type, kind in kinds.items()):
                    wanted = ", ".join(step.devices) or step.kind
                    display.log(f"left out: {step.name}: of {wanted} there is none, but {', '.join(kinds)}")
            whole = Steps(steps, request.budget_s, read, request.folder, alone, display)
            for type, devices in types.items():
                driver.add(calibrations(type, devices, made, display.log))
                driver.add(whole.jobs(type, devices, made))
            display.begin(driver, {type: len(devices) for type, devices in types.items()})
            driver.run()
    except PoolGone as gone:
        then = f"finished cases are recorded, --resume {request.folder} measures the rest"
        raise HarnessError(f"{gone}; {then}") from None
    outcomes = []
    for job in driver.dispatcher.jobs.values():
        if isinstance(job, CommandJob):
            outcomes.append(StepOutcome(job.name, 1, int(job.done.exists()), job.statuses))
        elif isinstance(job, RunJob):
            outcomes.append(StepOutcome(job.name, len(job.planned), len(job.finished), dict(job.statuses)))
            if not job.journal.finished():
                job.journal.remove()
    archive = pack(request.folder, [step.name for step in steps])
    display.end(CampaignOutcome(outcomes, request.folder, archive, time.monotonic() - request.began, made))
    statuses = {status for step in outcomes for status in step.statuses}
    if statuses & BROKEN or driver.failed:
        return FAILED
    return OK if any(step.done for step in outcomes) else NOTHING_RAN


def _new_steps(request: CampaignRequest, kinds: Mapping[str, str]) -> tuple[Sequence[Step], bool]:
    """The steps of a new campaign, which are written to its folder, and whether its devices are of one type.
    Raises UsageError. kinds: of platform, by type of devices"""
    steps, alone = steps_of(request.file, kinds.values()), len(kinds) == 1
    content = {"schema_version": 1, "steps": [asdict(step) for step in steps], "alone": alone}
    try:
        files.replace(request.folder / FILE, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        reason = f"cannot write to {request.folder}: {error.strerror}"
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
