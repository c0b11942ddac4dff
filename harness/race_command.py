"""`python -m harness tune` where a device can time the implementation: races, case by case, each choice
stored before the next case begins."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kernels
from harness import plan, tables
from harness.candidates import Progress
from harness.disturbance import Monitor
from harness.errors import FAILED, NOTHING_RAN, OK, NothingRan, UsageError
from harness.halving import halving
from harness.journal import Journal
from harness.race import Field, choice
from harness.records import CaseDone, Cell, Record
from harness.run_command import detected, measure_rest, say_busy, session_of, watched
from harness.run_folder import Request, begin, case_of, finished_cases, resumed
from harness.session import exit_code
from harness.threads import thread_environment
from harness.tuned import Place, path, read, source, store
from harness.workers import Worker, WorkerFailure, cache_environment
from kernels.op import BOUNDARIES
from kernels.platform import Platform
from kernels.tuning import Target, Tunable
from shapes.case import Case, merge, text_of
from shapes.suites import suites

KEEP, PER_CASE = 24, "30s"


@dataclass(frozen=True)
class Racing:
    """What `tune` is asked about races, unread.

    keep:    configurations that the estimate leaves in a race
    journal: the folder of its rounds
    """

    device: str | None = None
    budget: str | None = None
    per_case: str | None = None
    launch: str | None = None
    keep: int | None = None
    journal: str | None = None
    resume: str | None = None
    retry: bool = False
    disturbed: str | None = None
    prepare_timeout: float = 900.0
    call_timeout: float = 120.0

    @property
    def asked(self) -> str:
        """The first option that only makes sense of a race; empty if there is none."""
        names = ("device", "budget", "per_case", "launch", "keep", "journal", "resume")
        return next((f"--{name.replace('_', '-')}" for name in names if getattr(self, name)), "")


@dataclass(frozen=True)
class Chosen:
    """Which cases and implementations, unread; shard: (i, n): the i-th of n parts of the cases, from 1."""

    op: str | None
    impl: str | None
    suite: str | None
    case: Sequence[str]
    shard: tuple[int, int]


def racers(chosen: Chosen, platform: Platform) -> list[Tunable]:
    """Implementations that have configurations and can be timed here."""
    ops = [plan.choose_op(chosen.op)] if chosen.op else kernels.OPS.values()
    return [
        implementation
        for op in ops
        for implementation in plan.choose_implementations(op, chosen.impl)
        if isinstance(implementation, Tunable)
        and implementation.available(platform).ok
        and not implementation.interpreted(platform)
    ]


def tried(
    chosen: Chosen, racing: Racing, folder: Path, compiling: str
) -> tuple[int, list[dict[str, Any]]] | None:
    """As `race`; None where nothing of what is chosen can be timed here, or the option named by `compiling`
    asks for something else. Raises UsageError or NothingRan where a race is asked for all the same."""
    if compiling:
        if racing.asked:
            raise UsageError(f"{racing.asked} is for races; {compiling} compiles")
        return None
    platform = detected(racing.device)
    if racing.resume or racers(chosen, platform):
        return race(chosen, racing, platform, folder)
    if racing.asked:
        raise NothingRan(
            f"{racing.asked} is for races, and nothing of these can be timed on {platform.device}"
        )
    return None


def race(
    chosen: Chosen, racing: Racing, platform: Platform, folder: Path
) -> tuple[int, list[dict[str, Any]]]:
    """Races one implementation after the other; gives the exit code and a row for each case."""
    if racing.resume:
        run = Journal(Path(racing.resume)).run()
        found = [i for i in kernels.implementations(plan.choose_op(run.op).name) if i.name == run.baseline]
    else:
        found = racers(chosen, platform)
    if racing.journal and len(found) > 1:
        names = ", ".join(i.name for i in found)
        raise UsageError(f"--journal takes the rounds of one implementation; choose one by --impl: {names}")
    codes, rows = [], []
    with watched(platform) as (monitor, busy):
        say_busy(busy, quiet=False)
        for implementation in found:
            one = Race(implementation, chosen, racing, platform, monitor, busy, folder)
            codes.append(one.run())
            rows += one.rows
    if FAILED in codes:
        return FAILED, rows
    return (OK if OK in codes else NOTHING_RAN), rows


class Race:
    """Of one implementation's configurations, over cases."""

    def __init__(
        self,
        implementation: Tunable,
        chosen: Chosen,
        racing: Racing,
        platform: Platform,
        monitor: Monitor,
        busy: list[str],
        folder: Path,
    ) -> None:
        self.implementation, self.platform, self.monitor = implementation, platform, monitor
        self.request = Request(
            op=implementation.op,
            device=racing.device,
            launch=racing.launch,
            budget=racing.budget,
            per_case=racing.per_case or (None if racing.resume else PER_CASE),
            resume=racing.resume,
            retry=racing.retry,
            out=racing.journal,
            disturbed=racing.disturbed,
            prepare_timeout=racing.prepare_timeout,
            call_timeout=racing.call_timeout,
        )
        if racing.resume:
            self.journal, self.settings = resumed(self.request, platform, racing=True)
        else:
            race = {"keep": racing.keep or KEEP, "folder": str(folder.resolve())}
            cases = _cases(implementation, chosen, platform)
            suite = "ad hoc" if chosen.case else chosen.suite or "all"
            name = implementation.name
            self.journal, self.settings = begin(
                self.request, platform, busy, cases, [name], name, suite, race
            )
        assert self.settings.race is not None
        self.folder = Path(self.settings.race["folder"])
        self.rows: list[dict[str, Any]] = []

    def run(self) -> int:
        """Gives the exit code of its run."""
        target = self._target()
        self.place = Place(target.kind, target.arch, target.device, measured=True)
        where = f"{self.platform.name or self.platform.kind} {self.implementation.name}"
        field = Field(self.implementation, target, self.settings.race["keep"], Progress(where))
        print(f"racing {where}; rounds in {self.journal.folder}", file=sys.stderr)
        if field.unpruned:
            print(field.unpruned, file=sys.stderr)
        records = finished_cases(self.journal, self.request.retry)
        for planned in self.settings.cases:
            if planned.key in records:
                self._keep(case_of(planned), records[planned.key], again=True)

        def report(case: Case, found: list[Record]) -> None:
            records[case.key] = found
            print(f"\n{summary(found)}")
            print(f"{self._keep(case, found)}\n", flush=True)

        session = session_of(self.settings, self.request, self.platform, self.monitor, self.journal, report)
        session.entries, session.contest = field.entries, halving
        measure_rest(session, self.settings, self.request, records, sys.stdout)
        return exit_code([r for found in records.values() for r in found if isinstance(r, Cell)])

    def _target(self) -> Target:
        """What configurations are chosen for here, as a worker finds it. Raises NothingRan."""
        threads = self.settings.provenance["machine"]["threads"]
        kind, device = self.platform.kind, self.platform.device
        environment = (
            thread_environment(self.platform, threads)
            | cache_environment(plan.PLAIN)
            | self.implementation.environment(self.platform)
        )
        with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch:
            worker = None
            try:
                worker = Worker("bench", environment, Path(scratch) / "log")
                hello = worker.ask("hello", 120, kind=kind, device=device, threads=threads)
            except WorkerFailure as failure:
                raise NothingRan(f"{device} cannot be used: {failure.reason}") from None
            finally:
                if worker is not None:
                    worker.kill()
        return Target(**hello["target"])

    def _keep(self, case: Case, records: Sequence[Record], again: bool = False) -> str:
        """Stores what a finished case chose, and says so; again: only if what is there is not newer."""
        found = choice(case, records, self.implementation, self.settings)
        failed = [r for r in records if isinstance(r, Cell) and r.status not in ("ok", "unsupported")]
        for cell in failed:
            print(f"{cell.status}: {case.text}: {cell.name}: {cell.reason}", file=sys.stderr)
        row = {"op": case.op, "implementation": self.implementation.name, "target": self.place.folder}
        if found is None:
            self.rows.append(row | {"case": case.text, "config": None})
            return "nothing stored: there is no verdict on the configuration that was used before"
        self.rows.append(row | found)
        file = path(self.folder, self.implementation.name, self.place)
        newer = [
            entry
            for entry in read(file)["choices"]
            if entry["case"] == found["case"] and entry["created"] > found["created"]
        ]
        if not (again and newer):
            store(self.folder, self.implementation.name, self.place, [found], self._provenance())
        return f"stored in {file}: {told(found)}"

    def _provenance(self) -> dict[str, Any]:
        """Of the file; each choice has what was different for those before it."""
        machine, versions = (self.settings.provenance[group] for group in ("machine", "versions"))
        return {
            "device": machine["device"],
            "driver": machine["driver"],
            **{name: versions.get(name, "") for name in ("torch", "triton")},
            "commit": self.settings.provenance["git"]["commit"],
            "source": source(self.implementation),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }


def _cases(implementation: Tunable, chosen: Chosen, platform: Platform) -> list[Case]:
    """Those that it takes here, each of equal weight: whatever serving weighs, each is a question of its own.
    At the narrowest boundary of its call. Raises NothingRan where there is none."""
    op = kernels.OPS[implementation.op]
    boundary = next(b for b in BOUNDARIES if b in implementation.boundaries)
    if chosen.suite or chosen.case:
        found = plan.choose_cases(op, chosen.suite, chosen.case, boundary, platform.arch)
    else:
        names = [name for name, suite in suites().items() if list(suite.cases(op.name))]
        found = merge(c for name in names for c in plan.choose_cases(op, name, (), boundary, platform.arch))
    takes = {case.key: implementation.supports(case, platform) for case in found}
    able = [case for case in found if takes[case.key].ok]
    if not able:
        reason = next(iter(takes.values())).reason
        raise NothingRan(f"{implementation.name} takes none of these cases: {reason}")
    at, of = chosen.shard
    return [replace(case, weight=1 / len(able)) for case in able[at - 1 :: of]]


def summary(records: Sequence[Record]) -> str:
    """The table of who was not beaten, and how many were."""
    beaten = {id(r) for r in records if isinstance(r, Cell) and r.status == "ok" and not r.samples.seconds}
    done = next(r for r in records if isinstance(r, CaseDone))
    entries: Mapping[str, Any] = done.entries
    lines = [tables.case_table([r for r in records if id(r) not in beaten])]
    if entries:
        pruned = ", ".join(f"{count} {why}" for why, count in entries["pruned"].items())
        lines.append(
            f"of {entries['considered']} configurations {entries['raced']} were raced, {len(beaten)} of them "
            f"beaten in the heats" + (f"; not raced: {pruned}" if pruned else "")
        )
    return "\n".join(lines)


def told(found: Mapping[str, Any]) -> str:
    """A stored choice in words."""
    config, against = (text_of(found[name]) for name in ("config", "against"))
    ratio = f"{found['ratio']}x ({found['low']}..{found['high']})"
    return f"{config}, {found['verdict']} against {against}: {ratio}"
