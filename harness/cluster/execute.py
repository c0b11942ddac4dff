"""Runs and races on the devices of a cluster: their cases side by side, each whole on one device."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from harness.cluster.agent import CaseOrder, OpenedDevice
from harness.cluster.driver import Driver, Job, Pool, Task
from harness.cluster.ray_cluster import RayPool
from harness.errors import FAILED, OK, NothingRan, UsageError
from harness.files import require_writable
from harness.plan import budget
from harness.results.journal import Journal
from harness.results.schema import Calibration, CaseDone, Cell, DeviceUsed, Record
from harness.run.execute import ENOUGH, Display, Outcome, RunCases, exit_code, finish, keep, measured_s
from harness.run.folder import begin, plan_run, resume
from harness.run.plan import Request, RunPlan
from harness.tune.race import (
    Race,
    RaceDisplay,
    RaceResult,
    TuneRequest,
    begin_race,
    implementations_here,
    race_result,
)
from kernels.platform import Platform
from shapes.case import Case

MOST_TIMES = 3.0  # a case may take this many times its budget, if its first rounds need more than the budget
CALIBRATION_OP = "block_scale_gemm"
CALIBRATION_CASES = {
    "cpu": ("m=64 n=512 k=7168",),
    "gpu": ("m=64 n=2112 k=7168", "m=8192 n=2112 k=7168"),  # few rows read memory, many compute
}
CALIBRATION_S = 3.0  # seconds of measuring of each calibration case


def expected_overhead_s(suite: str, kind: str) -> float:
    """The estimated seconds that a case takes apart from measuring, until one is done. On CPUs it is what
    runs in results/epyc-zen4-2core took; the figure for GPUs is a guess. kind: of platform"""
    if suite == "smoke":
        return 15.0
    return 60.0 if kind == "cpu" else 30.0


@dataclass
class RunJob(Job):
    """The unfinished cases of a run."""

    run: RunCases
    device_count: int = 0
    """How many devices share the cases, each for the run's budget. 0: only the driver's end limits it."""
    calibrations: Sequence[Calibration] = ()  # of all devices, as far as they are known

    def __post_init__(self) -> None:
        plan, journal = self.run.plan, self.run.journal
        self.measure_s = plan.per_case_s
        kind = plan.record.provenance["machine"]["platform"]
        self.overhead_s = expected_overhead_s(plan.record.suite, kind)
        self.granted_s: dict[str, float] = {}  # the budget of each case that is being measured
        self.used: dict[str, DeviceUsed] = {}  # devices that measured a case in this command, by name
        # The recorded devices and calibrations, those of earlier commands too.
        self.device_records: list[Record] = [*journal.devices(), *journal.calibrations()]
        # Cases that are measured again come last: they failed, and may fail again.
        self.earlier = journal.finished()  # the records of cases that earlier commands measured
        keys = sorted(self.run.left, key=lambda key: key in self.earlier)
        self.waiting.extend(Task(self.name, key) for key in keys)

    @property
    def cases(self) -> int:
        return len(self.run.all)

    @property
    def done(self) -> int:
        return len(self.run.finished)

    @property
    def statuses(self) -> Counter[str]:
        """How many rows have each status, also of cases that --resume is to measure again and did not."""
        records = itertools.chain.from_iterable({**self.earlier, **self.run.finished}.values())
        return Counter(record.status for record in records if isinstance(record, Cell))

    def order(self, task: Task, left_s: float) -> CaseOrder | None:
        plan, spent_s = self.run.plan, self.run.spent_s
        budget_s, max_s = plan.per_case_s, MOST_TIMES * plan.per_case_s
        if self.device_count > 0:
            # The case may take all of the run's budget that is neither spent nor granted to others.
            max_s = plan.budget_s * self.device_count - spent_s - sum(self.granted_s.values())
            is_first = spent_s == 0 and not self.granted_s
            if not is_first and max_s < ENOUGH * plan.per_case_s:
                return None
            unfinished = [self.run.all[waiting.key] for waiting in (task, *self.waiting)]
            budget_s, _ = budget.allowance(max_s, unfinished, plan.per_case_s)
        self.granted_s[task.key] = budget_s
        return CaseOrder(_of_case(plan, task.key), min(budget_s, left_s), min(max_s, left_s), left_s)

    def take_back(self, task: Task) -> None:
        self.granted_s.pop(task.key, None)

    def take(self, task: Task, result: Any, by: OpenedDevice, wall_s: float) -> float:
        """Records the case at once, and what is new of devices: a kill of this process must lose nothing."""
        self.granted_s.pop(task.key, None)
        self.used[by.used.name] = by.used
        self.run.take(task.key, result, self._new_device_records())
        return measured_s(result)

    def _new_device_records(self) -> list[Record]:
        """The devices that measured a case, and their calibrations, as far as they are not recorded yet."""
        calibrations = [made for made in self.calibrations if made.device in self.used]
        new = [made for made in [*self.used.values(), *calibrations] if made not in self.device_records]
        self.device_records += new
        return new

    def end(self) -> None:
        if new := self._new_device_records():
            keep(self.run.journal, new)

    def outcome(self, before_s: float = 0.0) -> Outcome:
        return self.run.outcome(before_s, self.run.journal.calibrations())


def _of_case(plan: RunPlan, key: str) -> RunPlan:
    """The plan with one of its cases alone."""
    cases = [planned for planned in plan.record.cases if planned.key == key]
    return replace(plan, record=plan.record.model_copy(update={"cases": cases}))


@dataclass
class CalibrationJob(Job):
    """The same cases on each device of a type, with the op's best torch implementation, before all other
    cases or after them. They show how far the devices lie apart."""

    when: Literal["first", "last"]
    devices: list[OpenedDevice]
    driver: Driver  # has the list of calibrations, which the jobs of runs read

    def __post_init__(self) -> None:
        facts = self.devices[0].facts
        kind = "cpu" if facts.platform.kind == "cpu" else "gpu"
        self.measure_s, self.overhead_s = CALIBRATION_S, expected_overhead_s("smoke", kind)
        request = Request(op=CALIBRATION_OP, case=CALIBRATION_CASES[kind], boundary="core", launch="eager")
        record = plan_run(request, facts.platform)
        changes = {"implementations": [record.baseline], "provenance": facts.provenance}
        self.plan = RunPlan.of(record.model_copy(update=changes), request)
        if len(self.devices) > 1:  # a single device is compared with no other
            self._add(self.devices)

    def _add(self, devices: Sequence[OpenedDevice]) -> None:
        keys = [case.key for case in self.plan.record.cases]
        self.waiting.extend(Task(self.name, key, device.used.name) for device in devices for key in keys)

    def joined(self, device: OpenedDevice) -> None:
        self.devices.append(device)
        # A device that was alone so far was not calibrated.
        self._add(self.devices if len(self.devices) == 2 else [device])

    def order(self, task: Task, left_s: float) -> CaseOrder:
        most_s = min(left_s, 3 * CALIBRATION_S)
        return CaseOrder(_of_case(self.plan, task.key), CALIBRATION_S, most_s, left_s)

    def take(self, task: Task, result: Any, by: OpenedDevice, wall_s: float) -> float:
        name = by.used.name
        for cell in (record for record in result if isinstance(record, Cell)):
            if cell.time_us and cell.low_us and cell.high_us:
                measured = cell.model_dump(include={"case", "impl", "time_us", "low_us", "high_us"})
                calibration = Calibration(device=name, type=self.type, when=self.when, **measured)
                self.driver.calibrations.append(calibration)
            else:
                self.driver.log(f"{name} was not calibrated: {cell.status}: {cell.reason}")
        return CALIBRATION_S


def calibration_jobs(driver: Driver, type: str, devices: Sequence[OpenedDevice]) -> list[CalibrationJob]:
    """The jobs that calibrate devices of a type before and after all other jobs."""
    ranks: dict[Literal["first", "last"], int] = {"first": -1, "last": 1 << 30}
    return [
        CalibrationJob(f"calibration of {type}, {when}", type, rank, when, list(devices), driver)
        for when, rank in ranks.items()
    ]


def run_on_cluster(
    request: Request, request_of: Callable[[Platform], Request], display: Display, pool: Pool | None = None
) -> int:
    """As `harness.run.execute.run`, on the devices of one type of a pool, by default the cluster's.
    request_of: what the command asks for on a device of the pool"""
    began = time.perf_counter()
    require_writable(request.json, request.csv)
    with _driver(request, display, pool) as driver:
        type, devices = only_type(driver)
        journal, plan = begin_run(request_of(devices[0].facts.platform), devices[0], display.log)
        record, count = plan.record, len(devices)
        names = ", ".join(device.used.name for device in devices)
        display.log(f"{len(record.cases)} cases on {count} of {type}: {names}")

        def on_case(case: Case, records: Sequence[Record]) -> None:
            used = {device.name for device in job.device_records if isinstance(device, DeviceUsed)}
            if max(count, len(used)) == 1:  # a single device needs no name in the display
                records = [made.nameless if isinstance(made, CaseDone) else made for made in records]
            display.case(record, case, records)

        cases = RunCases(plan, journal, on_case)
        job = RunJob(record.id, type, 0, cases, count, driver.calibrations)
        before_s = time.perf_counter() - began
        _work(driver, [job], type, devices)
    code = finish(request, record, job.outcome(before_s), display)
    return FAILED if code == OK and driver.failed else code


def _driver(request: Request, display: Display, pool: Pool | None) -> Driver:
    pool = pool or RayPool(request.cluster or "auto", request.device)
    return Driver(pool, display.log, threads=request.threads)


def _work(driver: Driver, jobs: Sequence[RunJob], type: str, devices: Sequence[OpenedDevice]) -> None:
    """Does the jobs on devices of one type, with calibrations before and after them."""
    driver.add([*jobs, *calibration_jobs(driver, type, devices)])
    folders = ", ".join(f"--resume {job.run.journal.folder}" for job in jobs)
    driver.go_on = f"{folders} measures the rest"
    driver.run()


def only_type(driver: Driver) -> tuple[str, Sequence[OpenedDevice]]:
    """Opens the devices, which must be of one type. Raises UsageError before any is opened."""
    types = {device.type for device in driver.pool.devices()}
    if len(types) > 1:
        choices = " or ".join(sorted(types))
        raise UsageError(f"the cluster has several types of devices: choose --device {choices}")
    # A node of another type may have joined meanwhile: the first type counts.
    return next(iter(driver.open().items()))


def begin_run(request: Request, device: OpenedDevice, log: Callable[[str], None]) -> tuple[Journal, RunPlan]:
    """Begins a run for devices that are like this one, or goes on with it."""
    facts = device.facts
    if request.resume:
        return resume(request, facts.provenance)
    return begin(plan_run(request, facts.platform), request, facts, log)


def race_on_cluster(request: TuneRequest, display: RaceDisplay, pool: Pool | None = None) -> RaceResult:
    """As `harness.tune.race.tune`, all implementations at once, on the devices of one type of a pool."""
    jobs: list[RunJob] = []
    races: list[Race] = []
    with _driver(request, display, pool) as driver:
        type, devices = only_type(driver)
        platform, count = devices[0].facts.platform, len(devices)
        implementations = implementations_here(request, platform)
        if not implementations:
            raise NothingRan(f"nothing of these can be timed on {platform.name or platform.kind}")
        for implementation in implementations:
            cases, race = begin_race(implementation, request, devices[0].facts, devices[0].target, display)
            name = implementation.name
            display.log(f"racing {name} on {count} of {type}; rounds in {cases.journal.folder}")
            jobs.append(RunJob(name, type, 0, cases, count, driver.calibrations))
            races.append(race)
        _work(driver, jobs, type, devices)
    codes = [FAILED] if driver.failed else []
    for job in jobs:
        outcome = job.outcome()
        display.end(job.run.plan.record, outcome)
        codes.append(exit_code(outcome.records))
    return race_result(codes, races, display.log)
