"""`python -m harness run`: reads the request, plans, measures, prints."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import kernels
from harness import plan, revisions, tables, toggle_tables
from harness.assess import Yardsticks
from harness.ceilings import Ceilings, ceilings, peaks
from harness.disturbance import Monitor, monitor_for
from harness.errors import FAILED, OK, NothingRan, UsageError
from harness.journal import Journal, JournalFull
from harness.outputs import require_writable, write_outputs
from harness.progress import Progress
from harness.provenance import provenance
from harness.published import figures
from harness.records import CaseDone, Cell, PlannedCase, Record, Run
from harness.session import Session, device_lock, exit_code
from harness.stations import Deadlines
from harness.statistics import CONFIDENCE, MARGIN
from harness.threads import default_threads
from harness.toggle_tables import regressions
from harness.workers import ROOT, WorkerFailure, worker_pids
from kernels.platform import Platform, detect
from shapes.case import Case
from shapes.suites import CASE_S, suites


@dataclass(frozen=True)
class Request:
    """The command line of `run`, unread; of `toggle`, with the arms that it asks for;
    of `compare --revisions`, with a tree in each arm."""

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
    margin: float = MARGIN
    arms: Sequence[plan.Arm] = ()
    flags: dict[str, list[str | None]] = field(default_factory=dict)
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
    platform = _platform(request.device)
    monitor = monitor_for(platform, worker_pids)
    with device_lock(platform):
        if reason := monitor.blocked():
            raise NothingRan(f"{platform.device} cannot be measured: {reason}")
        busy = monitor.before()
        journal, settings, finished = (
            _resumed(request, platform) if request.resume else _begun(request, platform, busy)
        )
        if not request.quiet:
            for line in busy:
                print(f"note: {line}", file=sys.stderr)
        human: IO[str] = sys.stderr if "-" in (request.json, request.csv) else sys.stdout
        records = {key: list(found) for key, found in finished.items()}
        known = figures() if request.published else []

        def report(case: Case, found: list[Record]) -> None:
            records[case.key] = found
            if not request.quiet:
                arms = settings.contrast == "arms"
                table = toggle_tables.case_table(found, settings) if arms else tables.case_table(found)
                shown = [table, tables.published(known, case)]
                print("\n" + "\n".join(filter(None, shown)) + "\n", file=human, flush=True)

        session = _session(settings, request, platform, monitor, journal, report)
        session.spent_s = sum(r.measured_s for r in _flat(finished) if isinstance(r, CaseDone))
        todo = [_case(c) for c in settings.cases if c.key not in finished]
        budget_s = plan.parse_seconds(request.budget, "--budget") if request.budget else settings.budget_s
        try:
            session.run(todo, budget_s)
        except JournalFull as failure:
            _rescue(failure, records, journal)
            raise
        if not request.quiet:
            if settings.contrast == "arms":
                print(toggle_tables.conclusion(_flat(records), settings), file=human)
            _print_end(session, records, budget_s, journal, human)
        write_outputs(request.json, request.csv, settings, _flat(records))
    code = exit_code([r for r in _flat(records) if isinstance(r, Cell)])
    return FAILED if code == OK and settings.trees and regressions(_flat(records)) else code


def _flat(records: dict[str, list[Record]]) -> list[Record]:
    return [record for found in records.values() for record in found]


def _platform(device: str | None) -> Platform:
    try:
        return detect(device)
    except LookupError as error:
        raise UsageError(str(error)) from None


def _begun(
    request: Request, platform: Platform, busy: list[str]
) -> tuple[Journal, Run, dict[str, list[Record]]]:
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
    arms = list(request.arms) or [plan.parse_arm(request.set)]
    launches = plan.launches(platform, request.launch)
    budget_s = plan.parse_seconds(request.budget or "60s", "--budget")
    suite = "ad hoc" if request.case else request.suite or "smoke"
    if request.per_case:
        per_case_s = plan.parse_seconds(request.per_case, "--per-case")
    else:
        per_case_s = suites()[suite].per_case_s if suite in suites() else CASE_S
    threads = request.threads or plan.parse_threads(os.environ.get("OMP_NUM_THREADS")) or default_threads()
    created = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    device = re.sub(r"[^a-z0-9]+", "-", f"{platform.name or platform.kind}".lower()).strip("-")
    identity = f"{created}-{op.name}-{suite.replace(' ', '-')}-{device}"
    folder = Path(request.out) if request.out else ROOT / "results" / "local" / identity
    settings = Run(
        id=folder.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=sys.argv[1:],
        op=op.name,
        suite=suite,
        cases=[PlannedCase(**_planned(case)) for case in cases],
        implementations=[i.name for i in chosen],
        baseline=baseline,
        arms={arm.name: arm.variables for arm in arms if not arm.again},
        flags=request.flags,
        trees={arm.name: Path(arm.tree).name for arm in arms if arm.tree and not arm.again},
        launches=launches,
        cache=request.cache or "serving",
        budget_s=budget_s,
        per_case_s=per_case_s,
        seed=request.seed or 0,
        confidence=CONFIDENCE,
        margin=request.margin,
        disturbed=request.disturbed or "drop",  # type: ignore[arg-type]
        busy=busy,
        ceilings=_ceilings(platform, threads, request.quiet),
        provenance=provenance(platform, threads),
    )
    journal = Journal.create(folder, settings)
    return journal, settings, {}


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


def _case(planned: PlannedCase) -> Case:
    return Case(planned.op, planned.sizes, planned.boundary, planned.place, planned.weight)


def _resumed(request: Request, platform: Platform) -> tuple[Journal, Run, dict[str, list[Record]]]:
    """Opens a run again, as it was planned; it must be on this machine and with these libraries."""
    given = [name for name in PLANNING if getattr(request, name) not in (None, ())]
    if given:
        raise UsageError(f"--resume goes on with the run's own plan; leave out --{given[0]}")
    journal = Journal(Path(request.resume or ""))
    settings = journal.run()
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
    finished = journal.finished()
    if request.retry:
        broken = {"crashed", "timeout", "error"}
        finished = {
            key: found
            for key, found in finished.items()
            if not any(isinstance(r, Cell) and r.status in broken for r in found)
        }
    return journal, settings, finished


def _arms(settings: Run) -> list[plan.Arm]:
    """As planned; where they are compared, the first of them again at the end."""
    arms = [
        revisions.arm(name, settings.trees[name]) if name in settings.trees else plan.Arm(variables)
        for name, variables in settings.arms.items()
    ]
    return [*arms, replace(arms[0], again=True)] if settings.contrast == "arms" else arms


def _session(
    settings: Run, request: Request, platform: Platform, monitor: Monitor, journal: Journal, report: Any
) -> Session:
    op = kernels.OPS[settings.op]
    return Session(
        op=op,
        platform=platform,
        implementations=[i for i in kernels.implementations(op.name) if i.name in settings.implementations],
        baseline=settings.baseline,
        contrast=settings.contrast,
        arms=_arms(settings),
        launches=settings.launches,
        cache=settings.cache,
        least_s=plan.parse_seconds(request.per_case, "--per-case")
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


def _print_end(
    session: Session, records: dict[str, list[Record]], budget_s: float, journal: Journal, human: IO[str]
) -> None:
    if text := tables.left_out(session.left_out, budget_s):
        print(text, file=human)
    cases = f"{len(records)} case" + "s" * (len(records) != 1)
    print(
        f"{cases}; measuring {session.spent_s:.1f} s of {budget_s:g} s, "
        f"set-up and checks {session.setup_s:.1f} s; recorded in {journal.folder}",
        file=human,
    )


def _rescue(failure: JournalFull, records: dict[str, list[Record]], journal: Journal) -> None:
    """The journal's disk is full: what was measured goes to stderr, whole."""
    last = list(records.values())[-1:] or [[]]
    for record in last[0]:
        print(record.model_dump_json(), file=sys.stderr)
