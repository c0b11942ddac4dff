"""The steps of a campaign, the most valuable first, and when each of them would begin and end."""

from __future__ import annotations

import copy
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

import kernels
from harness.cluster.driver import Job, Task, next_task
from harness.cluster.execute import expected_overhead_s
from harness.errors import HarnessError, UsageError, mistake
from harness.files import read_toml
from harness.paths import option_words
from harness.plan.budget import parse_seconds
from harness.plan.select import choose_op
from harness.run.folder import plan_run
from harness.run.plan import Request
from harness.tune.race import TuneRequest, implementations_here, plan_race
from kernels.platform import Platform
from shapes.suites import cases_file

DEFAULTS = Path(__file__).parent / "defaults"
CASEWISE = ("run", "toggle", "tune")
"""Commands whose cases are measured one by one, each on whichever device is free. Others run whole."""
REFUSED = (
    "out", "resume", "retry", "json", "csv", "cluster", "op", "threads", "journal", "quiet",
    "budget", "device", "target", "shard", "check", "published",
)  # fmt: skip
"""Options of CASEWISE commands that the campaign itself sets."""
LEAST_SHARE_S = 30.0  # the least seconds that a command with a share of a campaign has
BUDGET_OF_SHARE = 0.8  # the part of a whole command's time that is measuring; the rest is set-up

Option = str | int | float | bool | list[str]


class StepTable(BaseModel, extra="forbid"):
    """A `[[step]]` of the file."""

    command: Literal["run", "toggle", "tune", "doctor", "serving replay"]
    name: str = Field("", pattern=r"^[\w.-]*$")
    ops: list[str] = []  # for a CASEWISE command; each op is a run of its own. Default: all ops
    options: dict[str, Option] = {}
    """Options of the command by their long names. {out} is the step's folder, {budget} 0.8 of its share."""
    devices: list[str] = []  # types of devices, such as H200 or cpu; default: all that there are
    repeats: int = Field(1, ge=1, le=100)  # how many times the step is made, each time anew
    share: float | None = Field(None, gt=0, le=1)  # of the campaign's time, for a command that runs whole
    expected: str = "60s"  # the time of a command that runs whole and has no share


class CampaignSpec(BaseModel, extra="forbid"):
    step: list[StepTable] = Field(min_length=1)  # the most valuable first


@dataclass(frozen=True)
class Step:
    """A command for one op, or for none."""

    name: str
    command: str
    rank: int  # the place of its table in the file; steps of one rank take turns
    op: str
    arguments: Sequence[str]  # as in a command line, after the command's name
    devices: Sequence[str] = ()  # types of devices; empty: all
    share: float | None = None  # see StepTable
    expected_s: float = 60.0
    kind: str = ""  # kind of platform: cuda, rocm or cpu; empty: all

    def is_for(self, type: str, kind: str) -> bool:
        """Whether it is measured on devices of this type (H200), whose kind of platform this is (cuda)."""
        return type in (self.devices or [type]) and self.kind in ("", kind)

    @property
    def casewise(self) -> bool:
        return self.command in CASEWISE

    def wall_s(self, budget_s: float) -> float:
        """The seconds that a command which runs whole has in a campaign of that budget."""
        return self.expected_s if self.share is None else max(LEAST_SHARE_S, self.share * budget_s)

    def whole_command(self, budget_s: float) -> list[str]:
        """Python's arguments for a command that runs whole, in a campaign of that budget."""
        words = ["-m", "harness", *self.command.split(), *self.arguments]
        measuring_s = BUDGET_OF_SHARE * self.wall_s(budget_s)
        return [word.replace("{budget}", f"{measuring_s:.0f}s") for word in words]


def steps_of(file: str | None, kinds: Iterable[str]) -> list[Step]:
    """The steps in a TOML file, or `run` at the cases of a JSON file; without a file the default steps of
    each of these kinds of platform, for that kind alone. Raises UsageError."""
    if file and file.endswith(".json"):
        try:
            ops = list(dict.fromkeys(case.op for case in cases_file(file).cases))
        except ValueError as error:
            raise UsageError(str(error)) from None
        step = {"command": "run", "name": "cases", "ops": ops, "options": {"cases": file}}
        return list(_steps_of_table(StepTable.model_validate(step), 0))
    if file:
        return _steps(Path(file))
    return [
        replace(step, kind=kind)
        for kind in dict.fromkeys(kinds) for step in _steps(DEFAULTS / f"{kind}.toml")
    ]  # fmt: skip


def _steps(file: Path) -> list[Step]:
    """A step for each op and repeat of each table. Raises UsageError, also for a name that two steps have."""
    try:
        spec = CampaignSpec.model_validate(read_toml(file))
    except ValidationError as error:
        raise UsageError(f"cannot read {file}: {mistake(error)}") from None
    steps = [step for rank, table in enumerate(spec.step) for step in _steps_of_table(table, rank)]
    for name, count in Counter(step.name for step in steps).items():
        if count > 1:
            raise UsageError(f"two steps are called {name!r}: give one a name")
    return steps


def _steps_of_table(table: StepTable, rank: int) -> Iterator[Step]:
    casewise = table.command in CASEWISE
    if casewise and table.share is not None:
        raise UsageError(f"step {rank + 1}: leave out share: {table.command} takes what its cases take")
    if not casewise and table.ops:
        raise UsageError(f"step {rank + 1}: {table.command} takes no ops")
    for name in table.options:
        if casewise and name in REFUSED:
            raise UsageError(f"step {rank + 1}: leave out the option {name}: it is the campaign's own")
    ops = [choose_op(op).name for op in table.ops or kernels.OPS] if casewise else [""]
    for op, repeat in product(ops, range(1, table.repeats + 1)):
        number = f"-{repeat}" if table.repeats > 1 else ""
        name = f"{table.name or _default_name(table)}{number}"
        yield Step(
            name=f"{op}-{name}" if op else name, command=table.command, rank=rank, op=op,
            arguments=[*(["--op", op] if op else []), *option_words(table.options)], devices=table.devices,
            share=table.share, expected_s=parse_seconds(table.expected, "expected"),
        )  # fmt: skip


def _default_name(table: StepTable) -> str:
    """The command, unless it is `run`, and the suite."""
    suite = table.options.get("suite", "smoke" if table.command == "run" else "")
    command = "" if table.command == "run" else table.command.replace(" ", "-")
    return "-".join(filter(None, [command, str(suite)]))


AnyJob = TypeVar("AnyJob", bound=Job)
ReadStep = Callable[[Step], Callable[[Platform], Request] | TuneRequest | None]
"""Reads a step's arguments as its command does. For `tune` it returns the request. For `run` and `toggle`,
whose requests depend on the platform, it returns a function that makes one; for a command that runs whole,
None. Raises UsageError, which names the step."""


@dataclass
class PlannedJob:
    """When a job would begin and end, in seconds from the campaign's beginning."""

    name: str
    cases: int
    fit: int = 0  # how many of the cases fit the time
    begins_s: float | None = None
    ends_s: float | None = None


def jobs_of(
    steps: Sequence[Step], kinds: Mapping[str, str], has_one_type: bool,
    make: Callable[[Step, str, str], Iterable[AnyJob]], log: Callable[[str], None],
) -> Iterator[AnyJob]:  # fmt: skip
    """The jobs of all steps on each type of devices; `log` is told of a step that has none, with the reason.

    kinds:        type of devices -> kind of platform
    has_one_type: of devices, so that the names of jobs need not tell the type
    make:         gives the jobs of a step, from the step, the jobs' name and the type of devices
    """
    for type, kind in kinds.items():
        for step in steps:
            if step.is_for(type, kind):
                name = step.name if has_one_type else f"{step.name} on {type}"
                try:
                    yield from make(step, name, type)
                except HarnessError as error:
                    log(f"left out: {name}: {error}")


def planned_job(step: Step, name: str, type: str, platform: Platform, budget_s: float, read: ReadStep) -> Job:
    """A step's job as a plan simulates it. Raises HarnessError where it has nothing to do."""
    request, measure_s = read(step), 0.0
    if request is None:
        keys, overhead_s = [step.name], step.wall_s(budget_s)
    elif isinstance(request, TuneRequest):
        request = replace(request, dry_run=True)  # so that a missing --out is no error
        tunable = implementations_here(request, platform)
        races = [plan_race(implementation, request, platform) for implementation in tunable]
        keys = [f"{race.baseline} {case.key}" for race in races for case in race.cases]
        measure_s = races[0].per_case_s if races else 0.0
        overhead_s = expected_overhead_s("", platform.kind)
    else:
        planned = plan_run(request(platform), platform)
        keys = [case.key for case in planned.cases]
        measure_s = planned.per_case_s
        overhead_s = expected_overhead_s(planned.suite, platform.kind)
    waiting = deque(Task(name, key) for key in keys)
    return Job(name, type, step.rank, waiting=waiting, measure_s=measure_s, overhead_s=overhead_s)


def simulated(jobs: Sequence[Job], counts: Mapping[str, int], left_s: float) -> list[PlannedJob]:
    """When jobs begin and end by the driver's own rules, if each task takes the time that is expected of it.

    counts: type of devices -> their number; left_s: seconds that the campaign has left
    """
    copies = {job.name: copy.copy(job) for job in jobs}
    for job in copies.values():  # no task is bound to a device, as the simulated ones have names of their own
        job.waiting = deque(replace(task, device="") for task in job.waiting)
    planned = {job.name: PlannedJob(job.name, len(job.waiting)) for job in jobs}
    # The devices by the time at which they are free: seconds, name, type.
    free = [(0.0, f"{type} {index}", type) for type, count in counts.items() for index in range(count)]
    heapq.heapify(free)
    while free:
        now_s, device, type = heapq.heappop(free)
        task = next_task(copies.values(), device, type, left_s - now_s)
        if task is None:
            continue
        end_s = now_s + copies[task.job].expected_s
        result = planned[task.job]
        result.fit += 1
        if result.begins_s is None:
            result.begins_s = now_s
        result.ends_s = end_s  # tasks of a job take equally long, so the last to begin is the last to end
        heapq.heappush(free, (end_s, device, type))
    return list(planned.values())
