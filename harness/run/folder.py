"""A new run, planned (`plan_run`) and begun in its folder (`begin`), or a run that goes on (`resume`)."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import kernels
from harness.errors import UsageError
from harness.files import JsonObject
from harness.machine.cpu_threads import ALLOWED
from harness.machine.device import differing
from harness.paths import RESULTS, command, portable
from harness.plan import budget, select
from harness.plan.settings import parse_setting
from harness.results.journal import Journal
from harness.results.schema import Cell, PlannedCase, RaceSettings, Record, Run
from harness.run.device import DeviceFacts
from harness.run.plan import PLANNING, Request, RunPlan
from harness.statistics.intervals import CONFIDENCE
from kernels.platform import Platform
from kernels.tuning import OWN, own_folder
from shapes.case import Case
from shapes.suites import CASE_S, suites


def plan_run(request: Request, platform: Platform) -> Run:
    """The record of the run that a request asks for on a platform, without the facts of a device that `begin`
    adds. Raises UsageError or StoredError for what cannot be understood."""
    if request.op is None:
        raise UsageError(f"--op is missing; ops: {', '.join(kernels.OPS)}")
    if len([option for option in (request.suite, request.case, request.cases) if option]) > 1:
        raise UsageError("give --suite, --cases or --case, not several")
    if request.retry:
        raise UsageError("--retry needs --resume RUN")
    op = select.choose_op(request.op)
    cases = select.choose_cases(
        op, request.cases or request.suite, request.case, request.boundary, platform.arch
    )
    implementations = select.choose_implementations(op, request.impl)
    if request.settings:  # each implementation is compared with itself under another setting
        baseline = implementations[0].name
    else:
        variables = parse_setting(request.set).variables
        baseline, missing = select.choose_baseline(
            op, platform, request.baseline, implementations, cases, variables
        )
        implementations += missing
    if not request.cluster:
        if (request.threads or 0) > len(ALLOWED):
            raise UsageError(f"--threads {request.threads}: this process may use {len(ALLOWED)} CPUs")
        for impl in implementations:
            if impl.name == request.baseline and not impl.available(platform).ok:
                reason = impl.available(platform).reason
                raise UsageError(f"--baseline {impl.name} cannot run here: {reason}")
    suite = request.suite or "smoke"
    if request.case:
        suite = "ad hoc"
    if request.cases:
        suite = Path(request.cases).name
    return record_of(request, platform, suite, cases, [impl.name for impl in implementations], baseline)


def record_of(
    request: Request,
    platform: Platform,
    suite: str,
    cases: Sequence[Case],
    implementations: Sequence[str],
    baseline: str,
    race: RaceSettings | None = None,
) -> Run:
    """The record of a run of these cases and implementations (see `plan_run`). The default budget is 60 s,
    and that of a race `per_case_s` for each case."""
    settings = request.settings or [parse_setting(request.set)]
    for folder in user_folders(setting.variables for setting in settings):
        own_folder(folder)  # raises StoredError where there is none
    if request.out:
        Journal.require_new(Path(request.out))
    per_case_s = suites()[suite].per_case_s if suite in suites() else CASE_S
    if request.per_case:
        per_case_s = budget.parse_seconds(request.per_case, "--per-case")
    budget_s = 60.0 if race is None else per_case_s * len(cases)
    if request.budget:
        budget_s = budget.parse_seconds(request.budget, "--budget")
    return Run(
        id="",
        created="",
        command=[portable(word) for word in sys.argv[1:]],
        op=cases[0].op,
        suite=suite,
        cases=[planned_case(case) for case in cases],
        implementations=list(implementations),
        baseline=baseline,
        settings={setting.name: setting.variables for setting in settings},
        flags=request.flags,
        trees={setting.name: Path(setting.tree).name for setting in settings if setting.tree},
        launches=select.launches(platform, request.launch),
        cache=request.cache or "serving",
        budget_s=budget_s,
        per_case_s=per_case_s,
        seed=request.seed or 0,
        confidence=CONFIDENCE,
        margin=request.margin,
        disturbed=request.disturbed or "prefer",
        race=race,
        ceilings={},
        provenance={},
    )


def note_useless_folders(settings: Iterable[Mapping[str, str | None]], log: Callable[[str], None]) -> None:
    """Logs a line for each folder of the user's (KERNEL_BENCH_TUNED) without configurations of this suite's
    implementations. Raises StoredError where a folder is missing. settings: the variables of each setting"""
    known = {impl.name for op in kernels.OPS for impl in kernels.implementations(op)}
    for folder in user_folders(settings):
        configured = {path.stem for path in own_folder(folder).glob("*/*.json")}
        if not known & configured:
            log(f"note: {OWN} names {folder}, which holds no <device>/<implementation>.json of this suite")


def user_folders(settings: Iterable[Mapping[str, str | None]]) -> list[str]:
    """The folders that KERNEL_BENCH_TUNED names in this process and in settings."""
    named = [os.environ.get(OWN)]
    named += [variables.get(OWN) for variables in settings]
    return [folder for folder in named if folder]


def begin(
    planned: Run, request: Request, facts: DeviceFacts, log: Callable[[str], None]
) -> tuple[Journal, RunPlan]:
    """Creates the folder of a planned run, whose record gets the facts of its device. Returns its journal and
    its plan. Logs a line if there are no ceilings."""
    note_useless_folders(planned.settings.values(), log)
    if facts.ceilings is None:
        log(f"no limits, so no percentages: {facts.no_ceilings}")
    folder = Path(request.out) if request.out else _new_folder(planned, facts.platform)
    begun = {
        "id": portable(folder.name),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "busy": list(facts.busy),
        "ceilings": asdict(facts.ceilings) if facts.ceilings else {},
        "provenance": facts.provenance,
    }
    record = planned.model_copy(update=begun)
    return Journal.create(folder, record), RunPlan.of(record, request)


def _new_folder(planned: Run, platform: Platform) -> Path:
    """A folder that is not there yet: another run may have begun in the same second."""
    what = planned.op if planned.race is None else f"{planned.op}-{planned.baseline}-race"
    created = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    device = re.sub(r"[^a-z0-9]+", "-", f"{platform.name or platform.kind}".lower()).strip("-")
    name = f"{created}-{what}-{re.sub('[ /]+', '-', planned.suite)}-{device}"
    folder = RESULTS / "local" / name
    for number in itertools.count(2):
        if not folder.exists():
            break
        folder = RESULTS / "local" / f"{name}-{number}"
    return folder


def planned_case(case: Case) -> PlannedCase:
    return PlannedCase(**asdict(case), key=case.key)


def resume(request: Request, now: JsonObject, race: bool = False) -> tuple[Journal, RunPlan]:
    """Opens a recorded run as it was planned. Raises UsageError where it was measured on another machine or
    with other libraries, and where it is a race and none is expected, or the reverse.

    now:  the provenance of this machine and its libraries, as it would be recorded now
    race: whether a race is expected
    """
    for name in PLANNING:
        if getattr(request, name) not in (None, ()):  # the defaults of options that were not given
            raise UsageError(f"--resume goes on with the run's own plan; leave out --{name}")
    journal = Journal(Path(request.resume or ""))
    record = journal.run()
    is_race = record.race is not None
    if is_race != race:
        kind = "race" if is_race else "run"
        going_on = command("tune" if is_race else "run", "--resume", journal.folder)
        raise UsageError(f"{journal.folder} is a {kind}; to go on with it: {going_on}")
    if request.op not in (None, record.op):
        raise UsageError(f"{journal.folder} is a run of {record.op}, not {request.op}")
    present = {impl.name for impl in kernels.implementations(select.choose_op(record.op).name)}
    if missing := sorted(set(record.implementations) - present):
        raise UsageError(
            f"{journal.folder} measures {missing[0]}, which is not here; set {kernels.PLUGINS} as then"
        )
    for name, before, after in differing(record.provenance, now, ("device", "device_id", "arch", "driver")):
        advice = f"give --device {before}" if name == "device_id" else "start a new run"
        raise UsageError(f"{journal.folder} was measured with {name} {before}; here it is {after}: {advice}")
    return journal, RunPlan.of(record, request)


BROKEN = {"crashed", "timeout", "error"}
"""The statuses of cells that broke: measured again, they may give a time."""


def finished_cases(journal: Journal, retry: bool) -> dict[str, list[Record]]:
    """The records of each finished case by its key. retry: whether a case is unfinished if a cell broke"""

    def broke(records: Iterable[Record]) -> bool:
        return any(isinstance(record, Cell) and record.status in BROKEN for record in records)

    finished = journal.finished()
    return {key: records for key, records in finished.items() if not (retry and broke(records))}
