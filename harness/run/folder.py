"""A run's plan, as its folder holds it: begun, or opened again to go on with."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import kernels
from harness.errors import UsageError
from harness.machine.cpu_threads import default_threads
from harness.machine.provenance import provenance
from harness.paths import RESULTS
from harness.plan import budget, revisions, select
from harness.plan.arms import Arm, parse_arm, parse_threads
from harness.results.journal import Journal
from harness.results.schema import Cell, PlannedCase, Record, Run
from harness.run.ceilings import ceilings
from harness.run.request import PLANNING, Request
from harness.statistics.intervals import CONFIDENCE
from harness.workers.process import WorkerFailure
from kernels.platform import Platform
from shapes.case import Case
from shapes.suites import CASE_S, suites


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
    arms = list(request.arms) or [parse_arm(request.set)]
    launches = select.launches(platform, request.launch)
    if request.per_case:
        per_case_s = budget.parse_seconds(request.per_case, "--per-case")
    else:
        per_case_s = suites()[suite].per_case_s if suite in suites() else CASE_S
    if request.budget:
        budget_s = budget.parse_seconds(request.budget, "--budget")
    else:
        budget_s = 60.0 if race is None else per_case_s * len(cases)
    threads = request.threads or parse_threads(os.environ.get("OMP_NUM_THREADS")) or default_threads()
    created = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    device = re.sub(r"[^a-z0-9]+", "-", f"{platform.name or platform.kind}".lower()).strip("-")
    what = op if race is None else f"{op}-{baseline}-race"
    identity = f"{created}-{what}-{suite.replace(' ', '-')}-{device}"
    folder = Path(request.out) if request.out else RESULTS / "local" / identity
    settings = Run(
        id=folder.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=sys.argv[1:],
        op=op,
        suite=suite,
        cases=[PlannedCase(**_planned(case)) for case in cases],
        implementations=list(implementations),
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
    present = [i.name for i in kernels.implementations(select.choose_op(settings.op).name)]
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


def arms_of(settings: Run) -> list[Arm]:
    """As planned; where they are compared, the first of them again at the end."""
    arms = [
        revisions.arm(name, settings.trees[name]) if name in settings.trees else Arm(variables)
        for name, variables in settings.arms.items()
    ]
    return [*arms, replace(arms[0], again=True)] if settings.contrast == "arms" else arms


def finished_cases(journal: Journal, retry: bool) -> dict[str, list[Record]]:
    """Records of each finished case by its key; retry: without those of cases that are to be made again."""
    broken = {"crashed", "timeout", "error"} if retry else set()
    return {
        key: found
        for key, found in journal.finished().items()
        if not any(isinstance(r, Cell) and r.status in broken for r in found)
    }
