"""The way of a run: a plan on a device, measured, printed, exported; an exit code."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from harness.errors import FAILED, NOTHING_RAN, OK
from harness.files import require_writable
from harness.machine.device import choose_device
from harness.machine.provenance import surroundings
from harness.progress import Progress
from harness.results.effects import regressions
from harness.results.journal import Journal
from harness.results.read import write_outputs
from harness.results.schema import CaseDone, Cell, Record, Run
from harness.run.device import OwnDevice, device_facts, own_device
from harness.run.folder import begin, finished_cases, resume, select_all
from harness.run.measurer import CaseMeasurer
from harness.run.plan import RunPlan, case_of
from harness.run.request import Request
from harness.run.session import OnCase, Outcome, Session
from harness.workers.process import WorkerProcess
from shapes.case import Case

BROKEN = {"wrong", "impossible", "error", "crashed", "timeout"}


class Display(Protocol):
    """What a person sees of a run."""

    progress: Progress

    def log(self, line: str) -> None:
        """What is worth a line before anything is measured."""

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        """A case is finished."""

    def end(self, run: Run, outcome: Outcome) -> None:
        """The run is."""


def run(request: Request, display: Display) -> int:
    """Returns the exit code; raises HarnessError."""
    began = time.perf_counter()
    require_writable(request.json, request.csv)
    with own_device(choose_device(request.device)) as device:
        if request.resume:
            journal, plan = resume(request, surroundings(device.platform))
        else:
            facts_of = functools.partial(device_facts, device)
            selection = select_all(request, device.platform)
            journal, plan = begin(request, device.platform, facts_of, selection, display.log)
        record, finished = plan.record, finished_cases(journal, plan.retry)
        for line in device.busy:
            display.log(f"note: {line}")
        outcome = measure(
            plan,
            device,
            journal,
            display.progress,
            lambda case, records: display.case(record, case, records),
            finished=finished,
            began=began,
        )
        display.end(record, outcome)
        write_outputs(request.json, request.csv, record, outcome.records)
    code = exit_code(outcome.records)
    return FAILED if code == OK and record.trees and regressions(outcome.records) else code


def measure(
    plan: RunPlan,
    device: OwnDevice,
    journal: Journal,
    progress: Progress,
    on_case: OnCase,
    *,
    finished: Mapping[str, list[Record]],
    judge: WorkerProcess | None = None,
    began: float | None = None,
) -> Outcome:
    """Measures what is planned and not finished yet; `began`: the command, by time.perf_counter. Raises
    JournalFull."""
    now = time.perf_counter()
    before_s = sum(r.measured_s for records in finished.values() for r in records if isinstance(r, CaseDone))
    measurer = CaseMeasurer(plan, device, progress, judge)
    session = Session(measurer, journal, on_case, spent_s=before_s)
    session.run([case_of(planned) for planned in plan.record.cases if planned.key not in finished])
    cases = {**finished, **session.records}
    return Outcome(
        records=[record for records in cases.values() for record in records],
        cases=len(cases),
        left_out=session.left_out,
        before_s=now - (now if began is None else began),
        budget_s=plan.budget_s,
        folder=journal.folder,
    )


def exit_code(records: Iterable[Record]) -> int:
    """0 all that could run is right; 1 something was wrong or broke; 3 nothing could run."""
    statuses = {record.status for record in records if isinstance(record, Cell)}
    if statuses & BROKEN:
        return FAILED
    return OK if statuses & {"ok", "checked"} else NOTHING_RAN
