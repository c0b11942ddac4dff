"""Carries out a request: takes the device, plans or resumes the run, measures and records case after case,
and returns the exit code. docs/architecture.md describes the way of a run through the files."""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import kernels
from harness.errors import FAILED, NOTHING_RAN, OK
from harness.files import JournalFull, require_writable
from harness.machine.device import surroundings
from harness.paths import command
from harness.plan import budget
from harness.plan.select import choose_implementations
from harness.progress import Progress
from harness.results.effects import lost, regressions
from harness.results.journal import Journal
from harness.results.read import write_outputs
from harness.results.schema import Calibration, CaseDone, Cell, Record, Run
from harness.run.case import CaseMeasurer
from harness.run.device import OwnDevice, device_facts, own_device
from harness.run.folder import BROKEN, begin, finished_cases, plan_run, resume
from harness.run.plan import Request, RunPlan, case_of
from harness.workers.environment import worker_threads
from kernels.platform import Platform
from shapes.case import Case

FAILING = {"wrong", "impossible"} | BROKEN
"""The statuses of cells that make a command fail."""

ENOUGH = 0.9
"""A case is begun if this share of `per_case_s` is left of the budget. The share is less than 1 because the
last round of a case may take longer than what was left of the case's budget."""


class Display(Protocol):
    """What a person sees of a run."""

    progress: Progress

    def log(self, line: str) -> None: ...

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        """Shows a finished case."""

    def end(self, run: Run, outcome: Outcome) -> None: ...


def run(request: Request, platform: Platform, display: Display) -> int:
    """Measures what a request asks for on this device, and returns the exit code. Raises HarnessError."""
    began = time.perf_counter()
    require_writable(request.json, request.csv)
    threads = worker_threads(request.threads)
    # Planning comes before the device is taken: a user's mistake is said at once.
    if request.resume:
        journal, plan = resume(request, surroundings(platform))
    else:
        planned = plan_run(request, platform)
    with own_device(platform) as device:
        if not request.resume:
            journal, plan = begin(planned, request, device_facts(device, threads), display.log)
        cases = RunCases(plan, journal, functools.partial(display.case, plan.record))
        if request.resume and request.budget:  # seconds for the unfinished cases, beside those already spent
            cases.plan = replace(plan, budget_s=plan.budget_s + cases.spent_s)
        for line in device.busy:
            display.log(f"note: {line}")
        with resumable("run", journal):
            outcome = measure(cases, device, display.progress, time.perf_counter() - began)
        return finish(request, plan.record, outcome, display)


@contextlib.contextmanager
def resumable(name: str, journal: Journal) -> Iterator[None]:
    """Gives a KeyboardInterrupt a text with the command that goes on with the run. name: of that command"""
    try:
        yield
    except KeyboardInterrupt:
        rest = command(name, "--resume", journal.folder)
        raise KeyboardInterrupt(f"finished cases are recorded; the rest:\n  {rest}") from None


@dataclass
class RunCases:
    """The cases of a run: those that are finished, with their records, and the others."""

    plan: RunPlan
    journal: Journal
    on_case: Callable[[Case, list[Record]], None]  # called with each case that was measured and its records

    def __post_init__(self) -> None:
        self.all = {planned.key: case_of(planned) for planned in self.plan.record.cases}  # cases by their key
        self.finished = finished_cases(self.journal, self.plan.retry)  # records by the key of their case

    @property
    def left(self) -> dict[str, Case]:
        """The unfinished cases by their keys, as the plan orders them: the heaviest first."""
        return {key: case for key, case in self.all.items() if key not in self.finished}

    @property
    def spent_s(self) -> float:
        """Seconds that finished cases were measured."""
        return sum(map(measured_s, self.finished.values()))

    def take(self, key: str, records: list[Record], new_devices: Sequence[Record] = ()) -> None:
        """Records a case, after the devices of a cluster that are new to the run. Raises JournalFull."""
        self.finished[key] = records
        try:
            keep(self.journal, [*new_devices, *records])
        finally:
            self.on_case(self.all[key], records)

    def outcome(self, before_s: float = 0.0, calibrations: Sequence[Calibration] = ()) -> Outcome:
        return Outcome(
            records=[record for records in self.finished.values() for record in records],
            cases=len(self.finished),
            left_out=list(self.left.values()),
            before_s=before_s,
            budget_s=self.plan.budget_s,
            folder=self.journal.folder,
            calibrations=calibrations,
        )


def measure(cases: RunCases, device: OwnDevice, progress: Progress, before_s: float = 0.0) -> Outcome:
    """Measures the cases that are not finished yet, the heaviest first, as far as the budget reaches; each is
    recorded before the next one begins. Raises JournalFull. before_s: seconds since the command began"""
    plan = cases.plan
    measurer = CaseMeasurer(plan, device, progress)
    with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch:
        while left := cases.left:
            remaining_s = plan.budget_s - cases.spent_s
            if cases.spent_s and remaining_s < ENOUGH * plan.per_case_s:
                break
            share_s, cases_reached = budget.allowance(remaining_s, list(left.values()), plan.per_case_s)
            key, case = next(iter(left.items()))  # the heaviest
            progress.case(case, cases_reached, share_s)
            cases.take(key, measurer.measure(case, share_s, remaining_s, Path(scratch)))
    return cases.outcome(before_s)


def measured_s(records: Iterable[Record]) -> float:
    return sum(record.measured_s for record in records if isinstance(record, CaseDone))


def keep(journal: Journal, records: Sequence[Record]) -> None:
    """Adds a finished case to the journal. Prints its lines on stderr before it raises JournalFull."""
    try:
        journal.append(records)
    except JournalFull:
        for record in records:
            print(record.model_dump_json(), file=sys.stderr)
        raise


@dataclass(frozen=True)
class Outcome:
    records: list[Record]  # of finished cases; in a resumed run those of earlier sessions come first
    cases: int  # how many cases are finished
    left_out: list[Case]  # cases that the budget did not reach
    before_s: float  # seconds from the beginning of the command to the first case
    budget_s: float
    folder: Path  # the folder of the run
    calibrations: Sequence[Calibration] = ()  # of the devices, where several measured the run


def finish(request: Request, record: Run, outcome: Outcome, display: Display) -> int:
    """Writes `--json` and `--csv`, shows a finished run, and returns the exit code."""
    try:
        write_outputs(request.json, request.csv, record, outcome.records)
    finally:
        display.end(record, outcome)
    code = exit_code(outcome.records)
    if code == OK and request.impl:  # Cells of a baseline that was not asked for do not count.
        asked = {impl.name for impl in choose_implementations(kernels.OPS[record.op], request.impl)}
        cells = [cell for cell in outcome.records if isinstance(cell, Cell)]
        code = exit_code(cell for cell in cells if cell.impl in asked)
    if code == OK and record.trees:
        is_slower = regressions(outcome.records) or lost(outcome.records, record.first_setting)
        code = FAILED if is_slower else OK
    return code


def exit_code(records: Iterable[Record]) -> int:
    """The exit code for the cells among records. `finish` also returns FAILED for regressions."""
    return code_of({record.status for record in records if isinstance(record, Cell)})


def code_of(statuses: set[str]) -> int:
    """FAILED if one of the statuses is in FAILING, NOTHING_RAN if no cell could run, and otherwise OK."""
    if statuses & FAILING:
        return FAILED
    return OK if statuses & {"ok", "checked"} else NOTHING_RAN
