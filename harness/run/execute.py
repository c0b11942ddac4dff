"""`python -m harness run`: reads the request, plans, measures, prints."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

import kernels
from harness.catalogue.devices import Ceilings, peaks
from harness.catalogue.published import figures
from harness.errors import FAILED, OK, NothingRan, UsageError
from harness.files import require_writable
from harness.machine.monitor import monitor_for
from harness.machine.monitor.base import Monitor
from harness.plan import budget, select
from harness.progress import Progress
from harness.report import arm_table, case_table
from harness.results.effects import regressions
from harness.results.export import write_outputs
from harness.results.journal import Journal, JournalFull
from harness.results.schema import CaseDone, Cell, Record, Run
from harness.run.cells import Yardsticks
from harness.run.device_lock import device_lock
from harness.run.folder import arms_of, begin, case_of, finished_cases, resumed
from harness.run.request import Request
from harness.run.session import Session, exit_code
from harness.workers.process import worker_pids
from harness.workers.station import Deadlines
from kernels.platform import Platform, detect
from shapes.case import Case


def run(request: Request) -> int:
    """Returns the exit code; raises HarnessError."""
    require_writable(request.json, request.csv)
    platform = detected(request.device)
    with watched(platform) as (monitor, busy):
        if request.resume:
            journal, settings = resumed(request, platform)
        else:
            journal, settings = _begun(request, platform, busy)
        finished = finished_cases(journal, request.retry)
        say_busy(busy, request.quiet)
        human: IO[str] = sys.stderr if "-" in (request.json, request.csv) else sys.stdout
        records = {key: list(found) for key, found in finished.items()}
        known = figures() if request.published else []

        def report(case: Case, found: list[Record]) -> None:
            records[case.key] = found
            if not request.quiet:
                arms = settings.contrast == "arms"
                table = arm_table.case_table(found, settings) if arms else case_table.case_table(found)
                shown = [table, case_table.published(known, case)]
                print("\n" + "\n".join(filter(None, shown)) + "\n", file=human, flush=True)

        session = session_of(settings, request, platform, monitor, journal, report)
        measure_rest(session, settings, request, records, human)
        write_outputs(request.json, request.csv, settings, _flat(records))
    code = exit_code([r for r in _flat(records) if isinstance(r, Cell)])
    return FAILED if code == OK and settings.trees and regressions(_flat(records)) else code


@contextlib.contextmanager
def watched(platform: Platform) -> Iterator[tuple[Monitor, list[str]]]:
    """The device to ourselves, as far as other runs go: what watches it, and what else uses it. Raises
    NothingRan where it cannot be had."""
    monitor = monitor_for(platform, worker_pids)
    with device_lock(platform):
        if reason := monitor.blocked():
            raise NothingRan(f"{platform.device} cannot be measured: {reason}")
        yield monitor, monitor.before()


def say_busy(busy: Sequence[str], quiet: bool) -> None:
    for line in () if quiet else busy:
        print(f"note: {line}", file=sys.stderr)


def measure_rest(
    session: Session, settings: Run, request: Request, records: dict[str, list[Record]], human: IO[str]
) -> None:
    """Measures what is planned and not among the records, which the session's `report` adds to."""
    session.spent_s = sum(r.measured_s for r in _flat(records) if isinstance(r, CaseDone))
    todo = [case_of(c) for c in settings.cases if c.key not in records]
    budget_s = budget.parse_seconds(request.budget, "--budget") if request.budget else settings.budget_s
    try:
        session.run(todo, budget_s)
    except JournalFull:
        _rescue(records)
        raise
    if not request.quiet:
        if settings.contrast == "arms":
            print(arm_table.conclusion(_flat(records), settings), file=human)
        _print_end(session, records, budget_s, human)


def _flat(records: dict[str, list[Record]]) -> list[Record]:
    return [record for found in records.values() for record in found]


def detected(device: str | None) -> Platform:
    try:
        return detect(device)
    except LookupError as error:
        raise UsageError(str(error)) from None


def _begun(request: Request, platform: Platform, busy: list[str]) -> tuple[Journal, Run]:
    """Plans a new run and opens its folder."""
    if request.op is None:
        raise UsageError(f"--op is missing; ops: {', '.join(kernels.OPS)}")
    if request.suite and request.case:
        raise UsageError("give --suite or --case, not both")
    if request.retry:
        raise UsageError("--retry needs --resume RUN")
    op = select.choose_op(request.op)
    cases = select.choose_cases(op, request.suite, request.case, request.boundary, platform.arch)
    chosen = select.choose_implementations(op, request.impl)
    # Arms are compared with an arm of the same implementation.
    arms = bool(request.arms)
    baseline = chosen[0].name if arms else select.choose_baseline(op, platform, request.baseline, chosen)
    suite = "ad hoc" if request.case else request.suite or "smoke"
    return begin(request, platform, busy, cases, [i.name for i in chosen], baseline, suite)


def session_of(
    settings: Run, request: Request, platform: Platform, monitor: Monitor, journal: Journal, report: Any
) -> Session:
    op = kernels.OPS[settings.op]
    return Session(
        op=op,
        platform=platform,
        implementations=[i for i in kernels.implementations(op.name) if i.name in settings.implementations],
        baseline=settings.baseline,
        contrast=settings.contrast,
        arms=arms_of(settings),
        launches=settings.launches,
        cache=settings.cache,
        least_s=budget.parse_seconds(request.per_case, "--per-case")
        if request.per_case
        else settings.per_case_s,
        seed=settings.seed,
        threads=settings.provenance["machine"]["threads"],
        deadlines=Deadlines(request.prepare_timeout, request.call_timeout),
        yardsticks=Yardsticks(
            Ceilings.recorded(settings.ceilings), peaks(platform), settings.confidence, settings.margin
        ),
        monitor=monitor,
        keep_disturbed=(request.disturbed or settings.disturbed) == "keep",
        journal=journal,
        progress=Progress(request.quiet),
        report=report,
    )


def _print_end(session: Session, records: dict[str, list[Record]], budget_s: float, human: IO[str]) -> None:
    if text := case_table.left_out(session.left_out, budget_s):
        print(text, file=human)
    cases = f"{len(records)} case" + "s" * (len(records) != 1)
    print(
        f"{cases}; measuring {session.spent_s:.1f} s of {budget_s:g} s, "
        f"set-up and checks {session.setup_s:.1f} s; recorded in {session.journal.folder}",
        file=human,
    )


def _rescue(records: dict[str, list[Record]]) -> None:
    """The journal's disk is full: what was measured goes to stderr, whole."""
    last = list(records.values())[-1:] or [[]]
    for record in last[0]:
        print(record.model_dump_json(), file=sys.stderr)
