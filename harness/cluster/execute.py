"""A run on the devices of a cluster: its cases side by side, each whole on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from harness.cluster.calibration import calibrations
from harness.cluster.driver import Driver
from harness.cluster.jobs import RunJob
from harness.cluster.orders import Opened
from harness.cluster.pool import Pool, PoolGone
from harness.cluster.ray_pool import RayPool
from harness.errors import FAILED, OK, HarnessError, UsageError
from harness.files import require_writable
from harness.results.effects import regressions
from harness.results.export import write_outputs
from harness.results.schema import Calibration, CaseDone, Record
from harness.run.execute import Display, Outcome, exit_code
from harness.run.folder import begin, resume, select_all
from harness.run.request import Request
from kernels.platform import Platform
from shapes.case import Case


def run_on_cluster(request: Request, request_of: Callable[[Platform], Request], display: Display) -> int:
    """As `harness.run.execute.run`. request_of: what the command asks for on a device of the cluster"""
    require_writable(request.json, request.csv)
    pool = RayPool(request.cluster or "auto", [request.device] if request.device else [])
    return run_on(pool, request, request_of, display)


def run_on(pool: Pool, request: Request, request_of: Callable[[Platform], Request], display: Display) -> int:
    """On the devices of one type that a pool has. Returns the exit code."""
    began, job = time.perf_counter(), None
    driver = Driver(pool, display.log, threads=request.threads)
    try:
        with driver:
            type, devices = only_type(driver)
            made: list[Calibration] = []
            job = run_job(type, devices, request_of(devices[0].facts.platform), made, display)
            before_s = time.perf_counter() - began
            driver.add([job, *calibrations(type, devices, made, display.log)])
            driver.run()
    except PoolGone as gone:
        raise pool_gone(gone, [job.journal.folder] if job else []) from None
    outcome = outcome_of(job, before_s)
    display.end(job.plan.record, outcome)
    write_outputs(request.json, request.csv, job.plan.record, outcome.records)
    code = exit_code(outcome.records)
    if code == OK and driver.failed:
        return FAILED
    return FAILED if code == OK and job.plan.record.trees and regressions(outcome.records) else code


def outcome_of(job: RunJob, before_s: float = 0.0) -> Outcome:
    """Read from its journal. before_s: from the command's beginning to its first case"""
    finished = job.journal.finished()
    return Outcome(
        records=[record for records in finished.values() for record in records],
        cases=len(finished),
        left_out=job.left_out,
        before_s=before_s,
        budget_s=job.plan.budget_s,
        folder=job.journal.folder,
        calibrations=job.journal.calibrations(),
    )


def only_type(driver: Driver) -> tuple[str, Sequence[Opened]]:
    """The devices that a driver opens. Raises UsageError, before it does, where they are of several types."""
    types = {offer.type for offer in driver.pool.offers()}
    if len(types) > 1:
        choices = " or ".join(sorted(types))
        raise UsageError(f"the cluster has several types of devices: choose --device {choices}")
    return next(iter(driver.open().items()))


def pool_gone(gone: PoolGone, folders: Iterable[Path]) -> HarnessError:
    """In a line, with how each run goes on."""
    then = "".join(f"; --resume {folder} measures the rest" for folder in folders)
    return HarnessError(f"{gone}; finished cases are recorded{then}")


def run_job(
    type: str, devices: Sequence[Opened], request: Request, made: Sequence[Calibration], display: Display
) -> RunJob:
    """Of a run that begins, or goes on, on devices of a type. made: their calibrations"""
    facts = devices[0].facts
    if request.resume:
        journal, plan = resume(request, facts.provenance)
    else:
        selection = select_all(request, facts.platform)
        journal, plan = begin(request, facts.platform, lambda _: facts, selection, display.log)
    names = ", ".join(device.used.name for device in devices)
    display.log(f"{len(plan.record.cases)} cases on {len(devices)} of {type}: {names}")

    def on_case(case: Case, records: Sequence[Record]) -> None:
        if max(len(devices), len(job.by)) == 1:
            records = [record.nameless if isinstance(record, CaseDone) else record for record in records]
        display.case(plan.record, case, records)

    job = RunJob(plan.record.id, type, 0, journal, plan, request, on_case, len(devices), made)
    return job
