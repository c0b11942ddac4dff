"""`python -m harness run`: reads the request, plans, measures, prints."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import kernels
from harness import plan, tables
from harness.assess import Yardsticks
from harness.ceilings import Ceilings, ceilings, peaks
from harness.disturbance import Monitor, monitor_for
from harness.errors import NothingRan, UsageError
from harness.journal import Journal, JournalFull
from harness.outputs import require_writable, write_outputs
from harness.progress import Progress
from harness.provenance import provenance
from harness.published import figures
from harness.records import CaseDone, Cell, PlannedCase, Record, Run
from harness.session import Session, device_lock, exit_code
from harness.stations import Deadlines
from harness.statistics import CONFIDENCE
from harness.threads import default_threads
from harness.workers import ROOT, WorkerFailure, worker_pids
from kernels.platform import Platform, detect
from shapes.case import Case
from shapes.suites import CASE_S, suites


@dataclass(frozen=True)
class Request:
    """The command line of `run`, unread."""

    op: str | None = None
    impl: str | None = None
    suite: str | None = None
    case: Sequence[str] = ()
    boundary: str | None = None
    baseline: str | None = None
    device: str | None = None
    cache: str | None = None
    launch: str | None = None
    budget: str | None = None
    per_case: str | None = None
    set: Sequence[str] = ()
    resume: str | None = None
    retry: bool = False
    out: str | None = None
    json: str | None = None
    csv: str | None = None
    published: bool = False
    quiet: bool = False
    disturbed: str | None = None
    seed: int | None = None
    threads: int | None = None
    prepare_timeout: float = 900.0
    call_timeout: float = 120.0


# What decides a run's plan, and so cannot be said again when it is resumed.
PLANNING = ("impl", "suite", "case", "boundary", "baseline", "cache", "launch", "set", "out", "seed",
            "threads")  # fmt: skip


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
                shown = [tables.case_table(found), tables.published(known, case)]
                print("\n" + "\n".join(filter(None, shown)) + "\n", file=human, flush=True)

        session = session_of(settings, request, platform, monitor, journal, report)
        measure_rest(session, settings, request, records, human)
        write_outputs(request.json, request.csv, settings, _flat(records))
    return exit_code([r for r in _flat(records) if isinstance(r, Cell)])


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
    budget_s = plan.parse_seconds(request.budget, "--budget") if request.budget else settings.budget_s
    try:
        session.run(todo, budget_s)
    except JournalFull:
        _rescue(records)
        raise
    if not request.quiet:
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
    op = plan.choose_op(request.op)
    cases = plan.choose_cases(op, request.suite, request.case, request.boundary, platform.arch)
    chosen = plan.choose_implementations(op, request.impl)
    baseline = plan.choose_baseline(op, platform, request.baseline, chosen)
    suite = "ad hoc" if request.case else request.suite or "smoke"
    return begin(request, platform, busy, cases, [i.name for i in chosen], baseline, suite)


def begin(
    request: Request,
    platform: Platform,
    busy: list[str],
    cases: Sequence[Case],
    implementations: Sequence[str],
    baseline: str,
    suite: str,
    race: dict[str, Any] | None = None,
) -> tuple[Journal, Run]:
    """Opens the folder of a new run of these cases. The default budget is 60 s, of a race what each of its
    cases is worth at least."""
    op = cases[0].op
    arm = plan.parse_arm(request.set)
    launches = plan.launches(platform, request.launch)
    if request.per_case:
        per_case_s = plan.parse_seconds(request.per_case, "--per-case")
    else:
        per_case_s = suites()[suite].per_case_s if suite in suites() else CASE_S
    if request.budget:
        budget_s = plan.parse_seconds(request.budget, "--budget")
    else:
        budget_s = 60.0 if race is None else per_case_s * len(cases)
    threads = request.threads or plan.parse_threads(os.environ.get("OMP_NUM_THREADS")) or default_threads()
    created = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    device = re.sub(r"[^a-z0-9]+", "-", f"{platform.name or platform.kind}".lower()).strip("-")
    what = op if race is None else f"{op}-{baseline}-race"
    identity = f"{created}-{what}-{suite.replace(' ', '-')}-{device}"
    folder = Path(request.out) if request.out else ROOT / "results" / "local" / identity
    settings = Run(
        id=folder.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=sys.argv[1:],
        op=op,
        suite=suite,
        cases=[PlannedCase(**_planned(case)) for case in cases],
        implementations=list(implementations),
        baseline=baseline,
        arms={arm.name: arm.variables},
        launches=launches,
        cache=request.cache or "serving",
        budget_s=budget_s,
        per_case_s=per_case_s,
        seed=request.seed or 0,
        confidence=CONFIDENCE,
        disturbed=request.disturbed or "drop",  # type: ignore[arg-type]
        busy=busy,
        race=race,
        ceilings=_ceilings(platform, threads, request.quiet),
        provenance=provenance(platform, threads),
    )
    return Journal.create(folder, settings), settings


def _ceilings(platform: Platform, threads: int, quiet: bool) -> dict[str, Any]:
    try:
        return asdict(ceilings(platform, threads))
    except WorkerFailure as failure:
        if not quiet:
            print(f"no ceilings, so no percentages: {failure.reason}", file=sys.stderr)
        return {}


def _planned(case: Case) -> dict[str, Any]:
    facts = asdict(case) | {"key": case.key}
    return {name: facts[name] for name in PlannedCase.model_fields}


def case_of(planned: PlannedCase) -> Case:
    return Case(planned.op, planned.sizes, planned.boundary, planned.place, planned.weight)


def resumed(request: Request, platform: Platform, racing: bool = False) -> tuple[Journal, Run]:
    """Opens a run again, or a race, as it was planned; it must be on this machine and with these
    libraries."""
    given = [name for name in PLANNING if getattr(request, name) not in (None, ())]
    if given:
        raise UsageError(f"--resume goes on with the run's own plan; leave out --{given[0]}")
    journal = Journal(Path(request.resume or ""))
    settings = journal.run()
    if racing != (settings.race is not None):
        raise UsageError(
            f"{journal.folder} is a {'run' if racing else 'race'}: "
            f"python -m harness {'run' if racing else 'tune'} --resume goes on with it"
        )
    if request.op not in (None, settings.op):
        raise UsageError(f"{journal.folder} is a run of {settings.op}, not {request.op}")
    present = [i.name for i in kernels.implementations(plan.choose_op(settings.op).name)]
    if missing := sorted(set(settings.implementations) - set(present)):
        raise UsageError(
            f"{journal.folder} measures {missing[0]}, which is not here; set {kernels.PLUGINS} as then"
        )
    try:
        then = {group: dict(settings.provenance[group]) for group in ("machine", "versions")}
        now = provenance(platform, int(then["machine"]["threads"]))
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"cannot read {journal.folder / 'run.json'}: its provenance is not whole") from None
    for group, names in (("machine", ("device", "device_id", "arch", "driver")), ("versions", None)):
        before, after = then[group], now[group]
        for name in names or sorted(before | after):
            if before.get(name) != after.get(name):
                raise UsageError(
                    f"{journal.folder} was measured with {name} {before.get(name)}; here it is "
                    f"{after.get(name)}: start a new run"
                )
    return journal, settings


def finished_cases(journal: Journal, retry: bool) -> dict[str, list[Record]]:
    """Records of each finished case by its key; retry: without those of cases that are to be made again."""
    broken = {"crashed", "timeout", "error"} if retry else set()
    return {
        key: found
        for key, found in journal.finished().items()
        if not any(isinstance(r, Cell) and r.status in broken for r in found)
    }


def session_of(
    settings: Run, request: Request, platform: Platform, monitor: Monitor, journal: Journal, report: Any
) -> Session:
    op = kernels.OPS[settings.op]
    return Session(
        op=op,
        platform=platform,
        implementations=[i for i in kernels.implementations(op.name) if i.name in settings.implementations],
        baseline=settings.baseline,
        arms=[plan.Arm(variables) for variables in settings.arms.values()],
        launches=settings.launches,
        cache=settings.cache,
        least_s=plan.parse_seconds(request.per_case, "--per-case")
        if request.per_case
        else settings.per_case_s,
        seed=settings.seed,
        threads=settings.provenance["machine"]["threads"],
        deadlines=Deadlines(request.prepare_timeout, request.call_timeout),
        yardsticks=Yardsticks(Ceilings.recorded(settings.ceilings), peaks(platform), settings.confidence),
        monitor=monitor,
        keep_disturbed=(request.disturbed or settings.disturbed) == "keep",
        journal=journal,
        progress=Progress(request.quiet),
        report=report,
    )


def _print_end(session: Session, records: dict[str, list[Record]], budget_s: float, human: IO[str]) -> None:
    if text := tables.left_out(session.left_out, budget_s):
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
