"""Runs and races on the devices of a cluster: their cases side by side, each whole on one device."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import kernels
from harness import files
from harness.cluster.agent import CaseOrder, CommandDone, CommandOrder, Opened, Order
from harness.cluster.driver import Driver, Job, Pool, Task
from harness.cluster.ray_cluster import PoolGone, RayPool
from harness.errors import FAILED, NOTHING_RAN, OK, HarnessError, NothingRan, UsageError
from harness.files import JournalFull, JsonObject, require_writable
from harness.plan import budget, select
from harness.plan.settings import PLAIN
from harness.results.effects import regressions
from harness.results.journal import Journal
from harness.results.read import write_outputs
from harness.results.schema import Calibration, CaseDone, Cell, DeviceUsed, Record, Run
from harness.run.execute import ENOUGH, Display, Outcome, exit_code, keep
from harness.run.folder import begin, finished_cases, planned_case, resume, select_all
from harness.run.plan import Request, RunPlan, case_of
from harness.statistics.intervals import CONFIDENCE
from harness.tune.race import (
    Race,
    RaceDisplay,
    Row,
    TuneRequest,
    implementations_here,
    open_race,
    race_result,
)
from kernels.platform import Platform
from kernels.tuning import Tunable
from shapes.case import Case

ASIDE_S = {"smoke": 15.0, "cpu": 60.0, "gpu": 30.0}
"""Seconds that a case takes beside its measuring, before one was seen: what runs in results/epyc-zen4-2core
took. The figure for GPUs is a guess."""
MOST = 3.0  # a case whose first rounds take longer than its budget may take so many times that budget
CALIBRATION_OP = "block_scale_gemm"
CALIBRATION_CASES = {
    "cpu": ("m=64 n=512 k=7168",),
    "gpu": ("m=64 n=2112 k=7168", "m=8192 n=2112 k=7168"),  # few rows read memory, many compute
}
CALIBRATION_S = 3.0
CALIBRATION_ASIDE_S = {"cpu": 12.0, "gpu": 15.0}


def case_tasks(job: str, keys: Iterable[str], per_case_s: float, suite: str, kind: str) -> list[Task]:
    """A task for each case of a job. kind: of platform"""
    aside_s = ASIDE_S["smoke" if suite == "smoke" else "cpu" if kind == "cpu" else "gpu"]
    return [Task(job, key, per_case_s, aside_s) for key in keys]


@dataclass
class RunJob(Job):
    """The unfinished cases of a run."""

    journal: Journal
    plan: RunPlan
    request: Request
    on_case: Callable[[Case, list[Record]], None]  # is given each finished case's records
    devices: int
    """How many devices share the cases: the run's budget is each device's. 0: the wall-clock is the budget,
    and each case has the time that it is worth."""
    calibrations: Sequence[Calibration] = ()  # of all devices, as far as they are known

    def __post_init__(self) -> None:
        finished = finished_cases(self.journal, self.plan.retry)
        done = [r for records in finished.values() for r in records if isinstance(r, CaseDone)]
        self.began = time.perf_counter()
        self.spent_s = sum(record.measured_s for record in done)
        self.given_s: dict[str, float] = {}
        self.recorded = {device.name for device in self.journal.devices()}
        self.met: set[str] = set()
        self.planned = {planned.key: planned for planned in self.plan.record.cases}
        self.finished = set(finished)
        cells = [r for records in finished.values() for r in records if isinstance(r, Cell)]
        self.statuses = Counter[str](cell.status for cell in cells)
        # Cases that are measured again come last: what broke may break again.
        before = self.journal.finished()
        keys = [key for key in sorted(self.planned, key=lambda key: key in before) if key not in finished]
        record = self.plan.record
        kind = record.provenance["machine"]["platform"]
        self.waiting.extend(case_tasks(self.name, keys, self.plan.per_case_s, record.suite, kind))

    @property
    def cases(self) -> int:
        return len(self.planned)

    @property
    def done(self) -> int:
        return len(self.finished)

    @property
    def left_out(self) -> list[Case]:
        return [case_of(planned) for key, planned in self.planned.items() if key not in self.finished]

    def order(self, task: Task, left_s: float) -> CaseOrder | None:
        per_case_s = self.plan.per_case_s
        share_s, most_s = per_case_s, MOST * per_case_s
        if self.devices:
            most_s = self.plan.budget_s * self.devices - self.spent_s - sum(self.given_s.values())
            if (self.spent_s or self.given_s) and most_s < ENOUGH * per_case_s:
                return None
            reach = max(1, int(most_s // per_case_s))
            queue = [task, *islice(self.waiting, reach)]
            cases = [case_of(self.planned[each.key]) for each in queue]
            share_s, _ = budget.allowance(most_s, cases, per_case_s)
        self.given_s[task.key] = share_s
        record = self.plan.record.model_copy(update={"cases": [self.planned[task.key]]})
        return CaseOrder(record, self.request, min(share_s, left_s), min(most_s, left_s), left_s)

    def take_back(self, task: Task) -> None:
        self.given_s.pop(task.key, None)

    def take(self, task: Task, result: list[Record] | CommandDone, by: Opened, wall_s: float) -> float:
        assert isinstance(result, list)
        done = next(record for record in result if isinstance(record, CaseDone))
        self.given_s.pop(task.key, None)
        self.finished.add(task.key)
        self.spent_s += done.measured_s
        self.statuses.update(record.status for record in result if isinstance(record, Cell))
        try:
            keep(self.journal, [*self._device_records(by.used), *result])
        finally:
            self.on_case(case_of(self.planned[task.key]), result)
        return done.measured_s

    def _device_records(self, used: DeviceUsed) -> list[Record]:
        """What is recorded with a device's first case: the device and its calibrations, which a kill would
        lose later."""
        made: list[Record] = [] if used.name in self.recorded else [used]
        if used.name not in self.met:
            made += [calibration for calibration in self.calibrations if calibration.device == used.name]
        self.recorded.add(used.name)
        self.met.add(used.name)
        return made

    def end(self) -> None:
        known = self.journal.calibrations()
        mine = [made for made in self.calibrations if made.device in self.met and made not in known]
        if mine:
            keep(self.journal, mine)


@dataclass
class CommandJob(Job):
    """A Python command. It is done when its files are in its folder, `done.json` the last of them."""

    folder: Path
    arguments: Sequence[str]  # `{out}` among them stands for the folder
    wall_s: float  # expected; it is killed after twice as long
    on_done: Callable[[int | None, str], None]  # is told the exit code and the end of the output
    cases = 1

    def __post_init__(self) -> None:
        if not self.done:
            self.waiting.append(Task(self.name, self.name, 0.0, self.wall_s))

    @property
    def file(self) -> Path:
        return self.folder / "done.json"

    @property
    def done(self) -> int:
        return int(self.file.exists())

    @property
    def statuses(self) -> dict[str, int]:
        """`ok`, or `error` for a command that failed; neither for one that could not do anything here."""
        try:
            code = json.loads(self.file.read_text())["code"]
        except (OSError, ValueError, KeyError):
            return {}
        return {} if code == NOTHING_RAN else {"error" if code else "ok": 1}

    def order(self, task: Task, left_s: float) -> Order | None:
        return CommandOrder(self.arguments, min(left_s, 2 * self.wall_s))

    def take(self, task: Task, result: list[Record] | CommandDone, by: Opened, wall_s: float) -> float:
        assert isinstance(result, CommandDone)
        for name, content in result.files.items():
            self._write(name, content)
        self.on_done(result.code, result.output)
        if result.code is None:  # killed at its time, which may be longer when the campaign goes on
            return 0.0
        facts: JsonObject = {
            "arguments": list(self.arguments),
            "code": result.code,
            "seconds": round(wall_s, 1),
            "device": by.used.name,
            "provenance": by.facts.provenance,
            "output": result.output,
        }
        self._write(self.file.name, (json.dumps(facts, indent=1) + "\n").encode())
        return 0.0

    def _write(self, name: str, content: bytes) -> None:
        try:
            files.replace(self.folder / name, content)
        except OSError as error:
            raise JournalFull(f"cannot write to {self.folder / name}: {error.strerror}") from None


@dataclass
class CalibrationJob(Job):
    """The same cases on each device of a type, with the op's best torch implementation. It shows how far the
    devices lie apart, before all other cases and after them."""

    when: Literal["first", "last"]
    devices: list[Opened]
    made: list[Calibration]  # is given each calibration; the jobs of runs read it
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        facts, op = self.devices[0].facts, kernels.OPS[CALIBRATION_OP]
        self.kind = "cpu" if facts.platform.kind == "cpu" else "gpu"
        cases = select.choose_cases(op, None, CALIBRATION_CASES[self.kind], "core", facts.platform.arch)
        baseline = select.choose_baseline(op, facts.platform, None, select.choose_implementations(op, None))
        whole = Run(
            id="calibration",
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=[],
            op=op.name,
            suite="ad hoc",
            cases=[planned_case(case) for case in cases],
            implementations=[baseline],
            baseline=baseline,
            settings={PLAIN: {}},
            launches=["eager"],
            cache="serving",
            budget_s=CALIBRATION_S,
            per_case_s=CALIBRATION_S,
            seed=0,
            confidence=CONFIDENCE,
            disturbed="prefer",
            ceilings={},
            provenance=facts.provenance,
        )
        self.runs = {case.key: whole.model_copy(update={"cases": [case]}) for case in whole.cases}
        if len(self.devices) > 1:  # a single device is compared with no other
            self._add(self.devices)

    def _add(self, devices: Sequence[Opened]) -> None:
        aside_s = CALIBRATION_ASIDE_S[self.kind]
        self.waiting.extend(
            Task(self.name, key, CALIBRATION_S, aside_s, device.used.name)
            for device in devices
            for key in self.runs
        )

    def joined(self, device: Opened) -> None:
        self.devices.append(device)
        self._add(self.devices if len(self.devices) == 2 else [device])

    def order(self, task: Task, left_s: float) -> Order | None:
        max_s = min(left_s, 3 * CALIBRATION_S)
        return CaseOrder(self.runs[task.key], Request(), CALIBRATION_S, max_s, left_s)

    def take(self, task: Task, result: list[Record] | CommandDone, by: Opened, wall_s: float) -> float:
        assert isinstance(result, list)
        for cell in result:
            if isinstance(cell, Cell) and cell.time_us and cell.low_us and cell.high_us:
                self.made.append(
                    Calibration(
                        device=by.used.name,
                        type=self.type,
                        when=self.when,
                        case=task.key,
                        impl=cell.impl,
                        time_us=cell.time_us,
                        low_us=cell.low_us,
                        high_us=cell.high_us,
                    )
                )
            elif isinstance(cell, Cell):
                self.log(f"{by.used.name} was not calibrated: {cell.status}: {cell.reason}")
        return CALIBRATION_S


def calibrations(
    type: str, devices: Sequence[Opened], made: list[Calibration], log: Callable[[str], None]
) -> list[Job]:
    """The jobs before and after all others."""
    return [
        CalibrationJob(f"calibration of {type}, first", type, -1, "first", list(devices), made, log),
        CalibrationJob(f"calibration of {type}, last", type, 1 << 30, "last", list(devices), made, log),
    ]


def run_on_cluster(request: Request, request_of: Callable[[Platform], Request], display: Display) -> int:
    """As `harness.run.execute.run`. request_of: what the command asks for on a device of the cluster"""
    require_writable(request.json, request.csv)
    pool = RayPool(request.cluster or "auto", [request.device] if request.device else [])
    return run_on(pool, request, request_of, display)


def run_on(pool: Pool, request: Request, request_of: Callable[[Platform], Request], display: Display) -> int:
    """Measures a run on the devices of one type that a pool has. Returns the exit code."""
    began = time.perf_counter()
    driver = Driver(pool, display.log, threads=request.threads)
    jobs: list[RunJob] = []
    with _measuring(driver, jobs) as (type, devices, made):
        jobs.append(_run_job(type, devices, request_of(devices[0].facts.platform), made, display))
    (job,) = jobs
    outcome = replace(_outcome(job), before_s=job.began - began)
    display.end(job.plan.record, outcome)
    write_outputs(request.json, request.csv, job.plan.record, outcome.records)
    code = exit_code(outcome.records)
    regressed = bool(job.plan.record.trees) and regressions(outcome.records)
    return FAILED if code == OK and (driver.failed or regressed) else code


@contextlib.contextmanager
def _measuring(
    driver: Driver, jobs: Sequence[RunJob]
) -> Iterator[tuple[str, Sequence[Opened], list[Calibration]]]:
    """Opens a driver's devices, which must be of one type, and yields that type, the devices and the list of
    their calibrations. Afterwards it measures the jobs that were added within."""
    try:
        with driver:
            type, devices = only_type(driver)
            made: list[Calibration] = []
            yield type, devices, made
            driver.add([*jobs, *calibrations(type, devices, made, driver.log)])
            driver.run()
    except PoolGone as gone:
        then = "".join(f"; --resume {job.journal.folder} measures the rest" for job in jobs)
        raise HarnessError(f"{gone}; finished cases are recorded{then}") from None


def only_type(driver: Driver) -> tuple[str, Sequence[Opened]]:
    """Opens the devices, which must be of one type. Raises UsageError before any is opened."""
    types = {device.type for device in driver.pool.devices()}
    if len(types) > 1:
        choices = " or ".join(sorted(types))
        raise UsageError(f"the cluster has several types of devices: choose --device {choices}")
    return next(iter(driver.open().items()))


def _run_job(
    type: str, devices: Sequence[Opened], request: Request, made: Sequence[Calibration], display: Display
) -> RunJob:
    """The job of a run that begins, or goes on. made: the devices' calibrations"""
    facts = devices[0].facts
    if request.resume:
        journal, plan = resume(request, facts.provenance)
    else:
        selection = select_all(request, facts.platform)
        journal, plan = begin(request, facts.platform, lambda _: facts, selection, display.log)
    names = ", ".join(device.used.name for device in devices)
    display.log(f"{len(plan.record.cases)} cases on {len(devices)} of {type}: {names}")

    def on_case(case: Case, records: Sequence[Record]) -> None:
        if max(len(devices), len(job.recorded)) == 1:
            records = [record.nameless if isinstance(record, CaseDone) else record for record in records]
        display.case(plan.record, case, records)

    job = RunJob(plan.record.id, type, 0, journal, plan, request, on_case, len(devices), made)
    return job


def _outcome(job: RunJob) -> Outcome:
    """Read from the job's journal."""
    finished = job.journal.finished()
    return Outcome(
        records=[record for records in finished.values() for record in records],
        cases=len(finished),
        left_out=job.left_out,
        before_s=0.0,
        budget_s=job.plan.budget_s,
        folder=job.journal.folder,
        calibrations=job.journal.calibrations(),
    )


def race_on_cluster(request: TuneRequest, display: RaceDisplay) -> tuple[int, list[Row]]:
    """As `harness.tune.race.race`."""
    pool = RayPool(request.cluster or "auto", [request.device] if request.device else [])
    return race_on(pool, request, display)


def race_on(pool: Pool, request: TuneRequest, display: RaceDisplay) -> tuple[int, list[Row]]:
    """Races all implementations at once on the devices of one type that a pool has."""
    driver = Driver(pool, display.log)
    jobs: list[RunJob] = []
    races: list[Race] = []
    with _measuring(driver, jobs) as (type, devices, made):
        platform, count = devices[0].facts.platform, len(devices)
        implementations = implementations_here(request, platform)
        if not implementations:
            raise NothingRan(f"nothing of these can be timed on {platform.name or platform.kind}")
        for implementation in implementations:
            journal, plan, race = begin_race(implementation, request, devices[0], display)
            name, asked = implementation.name, request.run_request(implementation)
            display.log(f"racing {name} on {count} of {type}; rounds in {journal.folder}")
            jobs.append(RunJob(name, type, 0, journal, plan, asked, race.on_case, count, made))
            races.append(race)
    codes = [FAILED] if driver.failed else []
    for job in jobs:
        outcome = _outcome(job)
        display.end(job.plan.record, outcome)
        codes.append(exit_code(outcome.records))
    return race_result(codes, races, display.log)


def begin_race(
    implementation: Tunable, request: TuneRequest, device: Opened, display: RaceDisplay
) -> tuple[Journal, RunPlan, Race]:
    """Begins a race for devices that are like this one, or goes on with it."""
    facts = device.facts
    journal, plan = open_race(
        implementation, request, facts.platform, lambda _: facts, display.log, facts.provenance
    )
    race = Race(implementation, device.target, plan, display, stores=request.stores)
    race.resume(finished_cases(journal, plan.retry))
    return journal, plan, race
