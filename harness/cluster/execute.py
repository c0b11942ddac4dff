"""A run on the devices of a cluster: its cases side by side, each whole on one device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence

from harness.cluster.calibration import CalibrationJob
from harness.cluster.driver import Driver, Job
from harness.cluster.jobs import RunJob
from harness.cluster.orders import Opened
from harness.cluster.pool import Pool, PoolGone
from harness.cluster.ray_pool import RayPool
from harness.errors import FAILED, OK, HarnessError, UsageError
from harness.files import require_writable
from harness.results.effects import regressions
from harness.results.export import write_outputs
from harness.results.schema import Calibration
from harness.run.execute import Display, exit_code
from harness.run.folder import begin, resume, select_all
from harness.run.request import Request
from harness.run.session import Outcome
from kernels.platform import Platform


def run_on_cluster(request: Request, request_of: Callable[[Platform], Request], display: Display) -> int:
    """As `harness.run.execute.run`. request_of: what the command asks for on a device of the cluster"""
    require_writable(request.json, request.csv)
    pool = RayPool(request.cluster or "auto", [request.device] if request.device else [])
    return run_on(pool, request, request_of, display)


def run_on(pool: Pool, request: Request, request_of: Callable[[Platform], Request], display: Display) -> int:
    """On the devices of one type that a pool has. Returns the exit code."""
    began, before_s = time.perf_counter(), 0.0
    runs: list[RunJob] = []

    def jobs_of(types: Mapping[str, Sequence[Opened]]) -> Sequence[Job]:
        if len(types) > 1:
            raise UsageError(
                f"the cluster has devices of several types: choose --device {' or '.join(types)}"
            )
        nonlocal before_s
        before_s = time.perf_counter() - began
        ((type, devices),) = types.items()
        facts, asked = devices[0].facts, request_of(devices[0].facts.platform)
        if asked.resume:
            journal, plan = resume(asked, facts.provenance)
        else:
            selection = select_all(asked, facts.platform)
            journal, plan = begin(asked, facts.platform, lambda _: facts, selection, display.log)
        made: list[Calibration] = []
        record, count = plan.record, len(plan.record.cases)
        on_case = functools.partial(display.case, record)
        job = RunJob(record.id, type, 0, journal, plan, asked, on_case, len(devices), made)
        runs.append(job)
        display.log(f"{count} cases on {len(devices)} of {type}: {', '.join(d.used.name for d in devices)}")
        return [job, *calibrations(type, devices, made, display.log)]

    driver = Driver(pool, jobs_of, display.log, threads=request.threads)
    try:
        driver.run()
    except PoolGone as gone:
        folder = runs[0].journal.folder if runs else None
        then = f"; finished cases are recorded, --resume {folder} measures the rest" if folder else ""
        raise HarnessError(f"{gone}{then}") from None
    (job,) = runs
    finished = job.journal.finished()
    outcome = Outcome(
        records=[record for records in finished.values() for record in records],
        cases=len(finished),
        left_out=job.left_out,
        before_s=before_s,
        budget_s=job.plan.budget_s,
        folder=job.journal.folder,
    )
    display.end(job.plan.record, outcome)
    write_outputs(request.json, request.csv, job.plan.record, outcome.records)
    code = exit_code(outcome.records)
    if code == OK and driver.schedule.given_up:
        return FAILED
    return FAILED if code == OK and job.plan.record.trees and regressions(outcome.records) else code


def calibrations(
    type: str, devices: Sequence[Opened], made: list[Calibration], log: Callable[[str], None]
) -> list[Job]:
    """Before and after all else; none where there is nothing to set beside a device."""
    if len(devices) == 1:
        return []
    return [CalibrationJob(type, when, devices, made, log) for when in ("first", "last")]
