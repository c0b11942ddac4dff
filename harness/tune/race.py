"""Races of configurations on a device: each checked and measured as any contender is."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import kernels
from harness.catalogue.architectures import architectures
from harness.errors import FAILED, NOTHING_RAN, OK, NothingRan, UsageError
from harness.machine.monitor.base import Monitor
from harness.plan import arms, select
from harness.plan.contender import Entries
from harness.report.tune_table import stored_text, summary
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, Record, Run, Verdict
from harness.run.execute import detected, measure_rest, say_busy, session_of, watched
from harness.run.folder import begin, case_of, finished_cases, resumed
from harness.run.request import Request
from harness.run.session import exit_code
from harness.timing.successive_halving import halving
from harness.tune.offline import Progress
from harness.tune.store import Place, path, read, source, store
from harness.workers.environment import cache_environment, thread_environment
from harness.workers.process import Worker, WorkerFailure
from kernels.op import BOUNDARIES
from kernels.platform import Platform
from kernels.triton_runtime import SuiteTriton
from kernels.tuning import Target, Tunable
from shapes.case import Case, merge
from shapes.suites import suites

TURNED = {"faster": "slower", "slower": "faster"}


class Field:
    """Who enters the races of one implementation on one target: the best `keep` by the estimate."""

    def __init__(self, implementation: Tunable, target: Target, keep: int, said: Any) -> None:
        self.op = kernels.OPS[implementation.op]
        self.implementation, self.target, self.keep = implementation, target, keep
        self.compiling = _compiling(implementation, target, said)

    @property
    def unpruned(self) -> str:
        """Why nothing is left out beforehand; empty where the estimate chooses."""
        if self.compiling:
            return ""
        known = ", ".join(architectures())
        return f"all configurations are raced: only those of Triton kernels on {known} are known by compiling"

    def entries(self, implementation: Tunable, case: Case) -> Entries:
        sizes = self.op.sizes(case.sizes)
        choice = implementation.choose(self.target, sizes)
        if self.compiling:
            best, considered, pruned = self._best(case)
        else:
            best = list(implementation.configurations(self.target, sizes))
            considered, pruned = len(best), {}
        configs = [asdict(config) for config in dict.fromkeys([choice.config, *best])]
        found = {
            "anchor": configs[0],
            "origin": choice.origin,
            "considered": considered,
            "pruned": pruned,
            "raced": len(configs),
        }
        return Entries(configs, found)

    def _best(self, case: Case) -> tuple[list[Any], int, dict[str, int]]:
        """The survivors, of how many, and how many of the others are left out for what."""
        assert self.compiling is not None
        searches = self.compiling.searches([case], self.keep)
        self.compiling.run(searches)
        (search,) = searches
        survivors = [one.config for one in search.fitting_best_first[: self.keep]]
        refused = dict(search.refusals)
        worse = len(search.candidates) - len(survivors) - sum(refused.values())
        return survivors, len(search.candidates), refused | {"worse by the estimate": worse}


def _compiling(implementation: Tunable, target: Target, said: Any) -> Any:
    """What judges its configurations without running them; None where nothing can."""
    known = architectures().get(target.arch)
    if known is None or not isinstance(implementation, SuiteTriton):
        return None
    from harness.compile.survey import able
    from harness.tune.offline import Compiling

    able([known])
    return Compiling(implementation, replace(known, units=target.units), said=said)


def choice(case: Case, records: Sequence[Record], implementation: Tunable, run: Run) -> dict[str, Any] | None:
    """What is stored of a finished case: the challenger if it is faster than the anchor by the engine's own
    verdict, else the anchor, confirmed. None where nothing was told apart from nothing: no verdict, or one
    that the machine's noise swallowed.

    verdict, ratio, low, high: of `config` against `against`: time(against) / time(config)
    """
    cells = {r.name: r for r in records if isinstance(r, Cell)}
    done = next(r for r in records if isinstance(r, CaseDone))
    held = [
        v
        for v in records
        if isinstance(v, Verdict) and v.about == "baseline" and None not in (v.ratio, v.floor)
    ]
    if not held:
        return None
    best = max(held, key=lambda v: (v.verdict == "faster", v.low or 0.0))
    won = best.verdict == "faster"
    this, other = (best.a, best.b) if won else (best.b, best.a)
    ends = [best.ratio, best.low, best.high]
    ratio, low, high = ends if won else [1 / end if end else None for end in (ends[0], ends[2], ends[1])]
    sizes = kernels.OPS[case.op].sizes(case.sizes)
    machine, versions = run.provenance["machine"], run.provenance["versions"]
    return {
        "case": case.text,
        "features": implementation.features(sizes),
        "config": cells[this].config,
        "time_us": _short(cells[this].time_us),
        "verdict": best.verdict if won else TURNED.get(best.verdict, best.verdict),
        "ratio": _short(ratio),
        "low": _short(low),
        "high": _short(high),
        "confidence": best.confidence,
        "against": cells[other].config,
        "before": done.entries["origin"],
        **{name: done.entries[name] for name in ("considered", "pruned", "raced")},
        "failed": dict(Counter(c.status for c in cells.values() if c.status != "ok")),
        "conditions": _conditions(done),
        "launch": cells[this].launch,
        "cache": cells[this].cache,
        "run": run.id,
        "created": run.created,
        "commit": run.provenance["git"]["commit"],
        "driver": machine["driver"],
        **{name: versions.get(name, "") for name in ("torch", "triton")},
    }


def _conditions(done: CaseDone) -> dict[str, float]:
    """The middle of each quantity that was read."""
    values: dict[str, list[float]] = {}
    for group in done.conditions:
        for name, seen in group.items():
            if isinstance(seen, Mapping) and "median" in seen:
                values.setdefault(name, []).append(seen["median"])
    return {name: statistics.median(seen) for name, seen in values.items()}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


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
    ops = [select.choose_op(chosen.op)] if chosen.op else kernels.OPS.values()
    return [
        implementation
        for op in ops
        for implementation in select.choose_implementations(op, chosen.impl)
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
        found = [i for i in kernels.implementations(select.choose_op(run.op).name) if i.name == run.baseline]
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
            | cache_environment(arms.PLAIN)
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
        return f"stored in {file}: {stored_text(found)}"

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
        found = select.choose_cases(op, chosen.suite, chosen.case, boundary, platform.arch)
    else:
        names = [name for name, suite in suites().items() if list(suite.cases(op.name))]
        found = merge(c for name in names for c in select.choose_cases(op, name, (), boundary, platform.arch))
    takes = {case.key: implementation.supports(case, platform) for case in found}
    able = [case for case in found if takes[case.key].ok]
    if not able:
        reason = next(iter(takes.values())).reason
        raise NothingRan(f"{implementation.name} takes none of these cases: {reason}")
    at, of = chosen.shard
    return [replace(case, weight=1 / len(able)) for case in able[at - 1 :: of]]
