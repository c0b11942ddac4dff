"""Races of configurations on the devices of a cluster: their cases side by side, each whole on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import kernels
from harness.cluster.calibration import calibrations
from harness.cluster.driver import Driver
from harness.cluster.execute import only_type, outcome_of, pool_gone
from harness.cluster.jobs import RunJob
from harness.cluster.orders import Opened
from harness.cluster.pool import Pool, PoolGone
from harness.cluster.ray_pool import RayPool
from harness.errors import FAILED, NOTHING_RAN, OK, NothingRan, UsageError
from harness.plan import select
from harness.results.journal import Journal
from harness.results.schema import Calibration, RaceSettings
from harness.run.execute import exit_code
from harness.run.folder import Selection, begin, finished_cases, resume
from harness.run.plan import RunPlan
from harness.run.request import Request
from harness.tune.race import (
    KEEP,
    Race,
    RaceDisplay,
    RaceRequest,
    Row,
    TuneRequest,
    implementations_here,
    race_selection,
)
from kernels.platform import Platform
from kernels.tuning import Tunable


def race_on_cluster(
    tuned: TuneRequest, request: RaceRequest, address: str, display: RaceDisplay
) -> tuple[int, list[Row]]:
    """As `harness.tune.race.race`."""
    return race_on(RayPool(address, [request.device] if request.device else []), tuned, request, display)


def race_on(
    pool: Pool, tuned: TuneRequest, request: RaceRequest, display: RaceDisplay
) -> tuple[int, list[Row]]:
    """On the devices of one type that a pool has; of all implementations at once."""
    jobs: list[RunJob] = []
    races: list[Race] = []
    driver = Driver(pool, display.log)
    try:
        with driver:
            type, devices = only_type(driver)
            made: list[Calibration] = []
            facts = devices[0].facts
            implementations = _implementations(tuned, request, facts.platform)

            def open_run(asked: Request, selection: Selection, race: RaceSettings) -> tuple[Journal, RunPlan]:
                if asked.resume:
                    return resume(asked, facts.provenance, race=True)
                return begin(asked, facts.platform, lambda _: facts, selection, display.log, race)

            for implementation in implementations:
                run = open_race(implementation, tuned, request, devices[0], open_run, display)
                name, count, on_case = implementation.name, len(devices), run.race.on_case
                display.log(f"racing {name} on {count} of {type}; rounds in {run.journal.folder}")
                jobs.append(RunJob(name, type, 0, run.journal, run.plan, run.asked, on_case, count, made))
                races.append(run.race)
            driver.add([*jobs, *calibrations(type, devices, made, display.log)])
            driver.run()
    except PoolGone as gone:
        raise pool_gone(gone, [job.journal.folder for job in jobs]) from None
    codes = []
    for job in jobs:
        outcome = outcome_of(job)
        display.end(job.plan.record, outcome)
        codes.append(exit_code(outcome.records))
    rows = [row for race in races for row in race.rows]
    if FAILED in codes or driver.failed:
        return FAILED, rows
    return (OK if OK in codes else NOTHING_RAN), rows


def _implementations(tuned: TuneRequest, request: RaceRequest, platform: Platform) -> list[Tunable]:
    """That of the race that goes on, or those that can be timed. Raises NothingRan, UsageError."""
    if request.resume:
        run = Journal(Path(request.resume)).run()
        known = kernels.implementations(select.choose_op(run.op).name)
        return [i for i in known if i.name == run.baseline and isinstance(i, Tunable)]
    implementations = implementations_here(tuned, platform)
    if not implementations:
        raise NothingRan(f"nothing of these can be timed on {platform.name or platform.kind}")
    if request.journal and len(implementations) > 1:
        names = ", ".join(i.name for i in implementations)
        raise UsageError(f"--journal takes the rounds of one implementation; choose one by --impl: {names}")
    return implementations


@dataclass(frozen=True)
class OpenRace:
    """A race, and its run."""

    journal: Journal
    plan: RunPlan
    asked: Request
    race: Race


def open_race(
    implementation: Tunable,
    tuned: TuneRequest,
    request: RaceRequest,
    device: Opened,
    open_run: Callable[[Request, Selection, RaceSettings], tuple[Journal, RunPlan]],
    display: RaceDisplay,
) -> OpenRace:
    """Of one implementation's configurations, as `open_run` begins it or goes on with it."""
    asked = request.of(implementation)
    selection = race_selection(implementation, tuned, device.facts.platform)
    settings = RaceSettings(keep=request.keep or KEEP, folder=str(tuned.folder.resolve()))
    journal, plan = open_run(asked, selection, settings)
    race = Race(implementation, device.target, plan, display)
    race.resume(finished_cases(journal, plan.retry))
    return OpenRace(journal, plan, asked, race)
