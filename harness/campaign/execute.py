"""A campaign from its steps to its archive: all steps on a pool's devices, within a budget of wall-clock
time. The archive is one zip file to carry home, which every command reads as the folder that it was."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from harness import files
from harness.archive import packed
from harness.campaign.plan import ReadStep, Step, jobs_of, steps_of
from harness.cluster.agent import Agent, OpenedDevice
from harness.cluster.driver import Driver, Job, Pool, Task
from harness.cluster.execute import RunJob, begin_run, calibration_jobs
from harness.errors import FAILED, NOTHING_RAN, OK, HarnessError, UsageError, mistake
from harness.files import JournalFull, JsonObject
from harness.paths import ROOT
from harness.plan.budget import parse_seconds
from harness.results.schema import Calibration
from harness.run.execute import FAILING, RunCases
from harness.run.plan import PLANNING, Request
from harness.tune.race import RaceDisplay, TuneRequest, begin_race, implementations_here

AnyRequest = TypeVar("AnyRequest", bound=Request)

FILE = "campaign.json"
END_S, END_SHARE = 5.0, 0.02
"""Seconds, or the part of the budget if that is longer, that are kept for ending agents and the archive."""
MOST_BYTES = 16_000_000  # the most bytes of an archive
BESIDE = (FILE, "tuned", "decision")  # what is archived beside the folders of steps
LAST_CHARACTERS = 4000  # how much of the end of a command's output is brought back
RUN = (
    "import os, sys; from harness.workers.child.main import die_with_parent; die_with_parent(); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""Python code that becomes `python ARGUMENTS`, and dies with the agent that started it."""


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
    cases: str | None = None

    @property
    def budget_s(self) -> float:
        """Seconds of wall-clock. Raises UsageError."""
        return parse_seconds(self.budget, "--budget")


@dataclass(frozen=True)
class CommandDone:
    code: int | None  # the exit code; None where it was killed
    output: str  # the end of what it printed
    files: Mapping[str, bytes]  # path within `{out}` -> content


@dataclass(frozen=True)
class CommandOrder:
    """The order to run `python` with arguments. The files of a folder `{out}` in them are brought back."""

    arguments: Sequence[str]
    deadline_s: float  # seconds of wall-clock after which it is killed

    def obey(self, agent: Agent) -> CommandDone:
        """Releases the device, which the command takes itself. Kills a late one and all that it started."""
        agent.release()
        with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as folder:
            out = Path(folder) / "out"
            out.mkdir()
            words = [argument.replace("{out}", str(out)) for argument in self.arguments]
            process = subprocess.Popen(
                [sys.executable, "-c", RUN, *words], cwd=ROOT, env=os.environ | _environment(agent),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
                errors="replace", start_new_session=True,
            )  # fmt: skip
            try:
                printed, _ = process.communicate(timeout=self.deadline_s)
                code: int | None = process.returncode
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                printed, _ = process.communicate()
                code = None
            written = [path for path in sorted(out.rglob("*")) if path.is_file()]
            contents = {path.relative_to(out).as_posix(): path.read_bytes() for path in written}
        return CommandDone(code, printed[-LAST_CHARACTERS:], contents)


def _environment(agent: Agent) -> dict[str, str]:
    """Variables with which a command uses the agent's number of threads and sees its device alone. They
    cannot name a GPU without a uuid that begins with GPU- or MIG-: there the command may see all GPUs."""
    platform, threads = agent.platform, agent.device.threads
    variables = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    if platform.kind == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    elif platform.uuid.startswith(("GPU-", "MIG-")):
        name = "CUDA_VISIBLE_DEVICES" if platform.kind == "cuda" else "ROCR_VISIBLE_DEVICES"
        variables[name] = platform.uuid
    return variables


@dataclass
class CommandJob(Job):
    """A step that runs whole: a command that an agent runs. It is done when `done.json`, the
    last of its files, is in its folder."""

    folder: Path
    arguments: Sequence[str]  # `{out}` among them stands for a folder whose files come into this one
    wall_s: float  # the expected seconds; the command is killed after twice as many
    on_done: Callable[[int | None, str], None]  # is told the exit code and the end of the output
    cases = 1

    def __post_init__(self) -> None:
        self.overhead_s = self.wall_s
        if not self.done:
            self.waiting.append(Task(self.name, self.name))

    @property
    def file(self) -> Path:
        return self.folder / "done.json"

    @property
    def done(self) -> int:
        return int(self.file.exists())

    @property
    def statuses(self) -> dict[str, int]:
        """`ok`, or `error` for a command that failed; empty for one for which nothing could run here."""
        code = json.loads(self.file.read_bytes())["code"] if self.done else NOTHING_RAN
        return {} if code == NOTHING_RAN else {"error" if code else "ok": 1}

    def order(self, task: Task, left_s: float) -> CommandOrder:
        return CommandOrder(self.arguments, min(left_s, 2 * self.wall_s))

    def take(self, task: Task, result: Any, by: OpenedDevice, wall_s: float) -> float:
        contents = dict(result.files)
        # A killed command has no code and is not done: --resume with a longer budget gives it more time.
        if result.code is not None:
            facts: JsonObject = {
                "arguments": list(self.arguments), "code": result.code, "seconds": round(wall_s, 1),
                "device": by.used.name, "provenance": by.facts.provenance, "output": result.output,
            }  # fmt: skip
            contents[self.file.name] = (json.dumps(facts, indent=1) + "\n").encode()
        for name, content in contents.items():
            with files.explained(f"cannot write to {self.folder / name}", error=JournalFull):
                files.replace(self.folder / name, content)
        self.on_done(result.code, result.output)
        return 0.0


@dataclass(frozen=True)
class Archive:
    file: Path
    size: int  # bytes
    left_out: Sequence[str]  # steps whose files would make it too large, the least valuable first


@dataclass(frozen=True)
class CampaignOutcome:
    jobs: Sequence[RunJob | CommandJob]
    folder: Path
    archive: Archive
    wall_s: float
    calibrations: Sequence[Calibration] = ()


class CampaignDisplay(RaceDisplay, Protocol):
    """What a person sees of a campaign. `case` is called for each case, `begin` when all jobs are known."""

    def begin(self, driver: Driver, counts: Mapping[str, int]) -> None:
        """counts: devices of each type"""

    def task(self, task: Task, device: str, driver: Driver) -> None:
        """Is called when a device begins a task."""

    def command(self, step: str, code: int | None, output: str) -> None:
        """Is called when a command that ran whole is finished."""

    def finish(self, outcome: CampaignOutcome) -> None: ...


@dataclass(frozen=True)
class JobMaker:
    types: Mapping[str, Sequence[OpenedDevice]]  # the devices by type
    calibrations: Sequence[Calibration]  # of the devices, as far as they are known
    budget_s: float
    read: ReadStep
    folder: Path
    has_one_type: bool  # of devices, so that folders need not tell the type
    display: CampaignDisplay

    def jobs(self, step: Step, name: str, type: str) -> Iterator[RunJob | CommandJob]:
        """The jobs of a step on a type of devices. Raises HarnessError where there are none."""
        device = self.types[type][0]
        folder = (self.folder if self.has_one_type else self.folder / type) / step.name
        request = self.read(step)
        if request is None:
            words, wall_s = step.whole_command(self.budget_s), step.wall_s(self.budget_s)
            on_done = functools.partial(self.display.command, step.name)
            yield CommandJob(name, type, step.rank, folder, words, wall_s, on_done)
        elif isinstance(request, TuneRequest):
            request = replace(request, tuned=str(self.folder / "tuned"))
            for implementation in implementations_here(request, device.facts.platform):
                race = _into(request, folder.with_name(f"{folder.name}-{implementation.name}"))
                cases, _ = begin_race(implementation, race, device.facts, device.target, self.display)
                race_name = f"{name}: {implementation.name}"
                yield RunJob(race_name, type, step.rank, cases, calibrations=self.calibrations)
        else:
            run = _into(request(device.facts.platform), folder)
            journal, plan = begin_run(run, device, self.display.log)
            cases = RunCases(plan, journal, functools.partial(self.display.case, plan.record))
            yield RunJob(name, type, step.rank, cases, calibrations=self.calibrations)


def _into(request: AnyRequest, folder: Path) -> AnyRequest:
    """The request for a run in a folder. Where a run was begun there, the request resumes it; the options
    that decide a plan then get their defaults, because --resume takes the plan from the folder."""
    if not (folder / "run.json").exists():
        return replace(request, out=str(folder))
    planning = [option for option in fields(request) if option.name in PLANNING]
    defaults: dict[str, Any] = {option.name: option.default for option in planning}
    return replace(request, **defaults, resume=str(folder), retry=True)


def run_campaign(
    pool: Pool, request: CampaignRequest, folder: Path, began: float, read: ReadStep,
    display: CampaignDisplay, conclude: Callable[[Path, Sequence[Path]], None] = lambda folder, runs: None,
) -> int:  # fmt: skip
    """Returns the exit code; raises HarnessError.

    began:    when the command began, by time.monotonic()
    conclude: is called for each type of devices with its folder and the campaign's runs there, and may write
              into the folder. That may hold runs of other commands, too
    """
    resumed = _resumed_steps(folder) if request.resume else None
    if not resumed and (folder / FILE).exists():
        raise UsageError(f"{folder} holds a campaign: --resume {folder}, or another --out")
    budget_s = request.budget_s
    driver = Driver(
        pool, display.log, on_begin=lambda task, device: display.task(task, device, driver),
        ends=began + budget_s - max(END_S, END_SHARE * budget_s), threads=request.threads,
        go_on=f"--resume {folder} measures the rest",
    )  # fmt: skip
    with driver:
        types = driver.open()
        kinds = {type: devices[0].facts.platform.kind for type, devices in types.items()}
        steps, has_one_type = resumed or _new_steps(folder, request.file, kinds)
        if has_one_type and len(kinds) > 1:
            choices = " or ".join(sorted(kinds))
            raise UsageError(f"{folder} is of one type of devices: choose --device {choices}")
        for step in steps:
            read(step)  # raises UsageError for a mistake in its options
            if not any(step.is_for(type, kind) for type, kind in kinds.items()):
                wanted = ", ".join(step.devices) or step.kind
                display.log(f"left out: {step.name}: of {wanted} there is none, but {', '.join(kinds)}")
        for type, devices in types.items():
            driver.add(calibration_jobs(driver, type, devices))
        maker = JobMaker(types, driver.calibrations, budget_s, read, folder, has_one_type, display)
        jobs = list(jobs_of(steps, kinds, has_one_type, maker.jobs, display.log))
        driver.add(jobs)
        display.begin(driver, {type: len(devices) for type, devices in types.items()})
        driver.run()
    runs: dict[str, list[Path]] = {type: [] for type in types}
    for job in jobs:
        if isinstance(job, RunJob) and job.run.journal.finished():
            runs[job.type].append(job.run.journal.folder)
        elif isinstance(job, RunJob):
            job.run.journal.remove()
    for type, of_type in runs.items():
        conclude(folder if has_one_type else folder / type, of_type)
    archive = pack(folder, [step.name for step in steps])
    wall_s = time.monotonic() - began
    display.finish(CampaignOutcome(jobs, folder, archive, wall_s, driver.calibrations))
    statuses = {status for job in jobs for status in job.statuses}
    if statuses & FAILING or driver.failed:
        return FAILED
    return OK if any(job.done for job in jobs) else NOTHING_RAN


def _new_steps(folder: Path, file: str | None, kinds: Mapping[str, str]) -> tuple[Sequence[Step], bool]:
    """Writes the steps of a new campaign to its folder. Returns them, and whether the devices are of one
    type. Raises UsageError. kinds: type of devices -> kind of platform"""
    steps, has_one_type = steps_of(file, kinds.values()), len(kinds) == 1
    content = {"schema_version": 1, "steps": [asdict(step) for step in steps], "alone": has_one_type}
    with files.explained(f"cannot write to {folder}", "; choose another --out"):
        files.replace(folder / FILE, json.dumps(content, indent=1) + "\n")
    return steps, has_one_type


def _resumed_steps(folder: Path) -> tuple[Sequence[Step], bool]:
    """What `_new_steps` wrote to the folder. Raises UsageError."""
    file = folder / FILE
    try:
        with files.explained(f"no campaign in {folder}: cannot read {file}"):
            content = json.loads(file.read_bytes())
        return [Step(**step) for step in content["steps"]], bool(content["alone"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {file}: {mistake(error)}") from None


def pack(folder: Path, steps: Sequence[str], most: int = MOST_BYTES) -> Archive:
    """Writes the archive beside the folder. Where it would have more than `most` bytes, as many of the last
    steps are left out as it takes. Raises HarnessError where it cannot be written."""
    target = folder.with_name(f"{folder.name}.zip")
    left_out: list[str] = []
    with files.explained(f"cannot write {target}", f"; {folder} is whole", HarnessError):
        data = packed(folder, lambda name: bool(step_of(name, steps)))
        for step in reversed(steps):
            if len(data) > most:
                left_out.append(step)
                data = packed(folder, lambda name: step_of(name, steps) not in {"", *left_out})
        files.replace(target, data)
    return Archive(target, len(data), left_out)


def step_of(name: str, steps: Sequence[str]) -> str:
    """The step that a file belongs to, or the name in BESIDE under which it lies; empty for a file that is
    not the campaign's. The folder of a race is STEP-IMPLEMENTATION, and an implementation has a dot."""
    for part in PurePosixPath(name).parts[:2]:  # the step's folder may lie in the folder of a device's type
        for known in (*BESIDE, *steps):
            if part == known or (part.startswith(f"{known}-") and "." in part):
                return known
    return ""
