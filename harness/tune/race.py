"""Races of configurations on a device: each configuration is checked and measured as any entry is."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import kernels
from harness.errors import FAILED, NOTHING_RAN, OK, NothingRan, UsageError
from harness.machine.device import choose_device, surroundings
from harness.plan import select
from harness.plan.budget import parse_shard
from harness.plan.entry import ConfigSearch
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, RaceSettings, Record, Run
from harness.run.device import DeviceFacts, device_facts, own_device
from harness.run.execute import Display, RunCases, exit_code, measure, resumable
from harness.run.folder import begin, record_of, resume
from harness.run.plan import Request, RunPlan, case_of
from harness.timing.successive_halving import halving
from harness.tune.configs import ask_tables, raced_configs
from harness.tune.store import choice, folder_name, path, provenance, store, store_winner
from harness.workers.environment import worker_threads
from harness.workers.process import WorkerFailure, start_judge
from kernels.engine_tuning import EngineTuned
from kernels.op import BOUNDARIES
from kernels.platform import Platform
from kernels.triton_runtime import CPU
from kernels.tuning import TUNED, Target, Tunable
from shapes.case import Case, merge, text_of
from shapes.suites import suites

KEEP = 24  # the default of --keep
PER_CASE = "30s"  # the default of --per-case

# Seconds that a case takes beside measuring, and that each of its configurations adds; more for an engine's
# row, whose configurations the race itself compiles. On an H100 cases of four to seven configurations took 12
# to 21 s, on an H200 cases of eleven of an engine's row 23 to 41 s (tune-* in results/h100 and results/h200).
CASE_S = 12.0
CONFIG_S = 1.0
ENGINE_CONFIG_S = 2.0

Choice = Mapping[str, Any] | None  # what is stored for a case (see `store.choice`); None without a verdict
Row = dict[str, Any]  # a stored choice in `tune --json`, with its op, implementation and target
RaceResult = tuple[int, list[Row]]  # the exit code, and a row for each case


@dataclass(frozen=True)
class TuneRequest(Request):
    """The options of `tune` as they were given. `out` is the folder of the race's rounds."""

    tuned: str | None = None  # the folder of the winners; None: kernels/tuned
    shard: str | None = None
    dry_run: bool = False
    check: bool = False
    keep: int | None = None

    @property
    def folder(self) -> Path:
        return Path(self.tuned) if self.tuned else TUNED

    @property
    def stores(self) -> bool:
        return not (self.check or self.dry_run)


class RaceDisplay(Display, Protocol):
    """What a person sees of a race."""

    def stored(self, file: Path | None, choice: Choice) -> None:
        """Shows what was stored for a finished case, and where. Without a file nothing was stored and the
        present configuration stays; without a choice there was no verdict."""


def tune(request: TuneRequest, display: RaceDisplay) -> RaceResult:
    """Races one implementation after the other on the device of this machine, or says what would be raced.
    Raises NothingRan where nothing can be timed here."""
    platform = choose_device(request.device)
    implementations = implementations_here(request, platform)
    if not implementations:
        raise NothingRan(f"nothing of these can be timed on {platform.device}; `compile` needs no device")
    for implementation in implementations:  # a race that is impossible fails before the wait for the device
        if request.resume:
            resume(request, surroundings(platform), race=True)
        else:
            plan_race(implementation, request, platform)
    if request.dry_run:
        display.log("\n".join(would_race(implementations, request, platform)))
        return OK, []
    races: list[Race] = []
    codes: list[int] = []
    threads = worker_threads(request.threads)
    with own_device(platform) as device:
        for line in device.busy:
            display.log(f"note: {line}")
        target = target_of(platform, threads)
        if request.resume:
            facts = DeviceFacts(platform, surroundings(platform), ceilings=None)
        else:
            facts = device_facts(device, threads)
        for implementation in implementations:
            cases, race = begin_race(implementation, request, facts, target, display)
            name = f"{platform.name or platform.kind} {implementation.name}"
            display.log(f"racing {name}; rounds in {cases.journal.folder}")
            with resumable("tune", cases.journal):
                cases.plan = with_configs(cases.plan, platform, target)
                outcome = measure(cases, device, display.progress)
            display.end(cases.plan.record, outcome)
            codes.append(exit_code(outcome.records))
            races.append(race)
    return race_result(codes, races, display.log)


def implementations_here(request: TuneRequest, platform: Platform) -> list[Tunable]:
    """The implementations of a request that have configurations and can be timed on a platform. Rows of
    engines are among them only where --impl names them. A race that is resumed has one, its own. Raises
    UsageError where the winners of an engine's row would go among the suite's own."""
    if request.resume:
        if request.out:
            raise UsageError("--resume goes on in the race's own folder; leave out --journal")
        run = Journal(Path(request.resume)).run()
        known = kernels.implementations(select.choose_op(run.op).name)
        return [i for i in known if i.name == run.baseline and isinstance(i, Tunable)]
    ops = [select.choose_op(request.op)] if request.op else kernels.OPS.values()
    chosen = [i for op in ops for i in select.choose_implementations(op, request.impl)]
    tunable = [
        i for i in chosen if isinstance(i, Tunable) and (request.impl or not isinstance(i, EngineTuned))
    ]
    here = [i for i in tunable if i.available(platform).ok and not i.interpreted(platform)]
    engines = [i.name for i in here if isinstance(i, EngineTuned)]
    if engines and request.folder == TUNED and request.stores:
        raise UsageError(f"--out is missing: the folder for the tables of {engines[0]}'s engine")
    if request.out and len(here) > 1:
        names = ", ".join(i.name for i in here)
        raise UsageError(f"--journal takes the rounds of one implementation; choose one by --impl: {names}")
    return here


def would_race(implementations: Sequence[Tunable], request: TuneRequest, platform: Platform) -> Iterator[str]:
    """Yields a line for each case and implementation. Runs no engine; only identifies the device's target."""
    keep = request.keep or KEEP
    target = target_of(platform, worker_threads())
    for implementation in implementations:
        name, op = implementation.name, kernels.OPS[implementation.op]
        planned = plan_race(implementation, request, platform)
        configurations = 0
        for case in map(case_of, planned.cases):
            known = len(list(implementation.configurations(target, op.sizes(case.sizes))))
            raced = min(keep, known) + 1  # the baseline, too
            configurations += raced
            yield f"{name}: {case.text}: up to {raced} of {known} configurations"
        config_s = ENGINE_CONFIG_S if isinstance(implementation, EngineTuned) else CONFIG_S
        overhead_s = CASE_S * len(planned.cases) + config_s * configurations
        word = "case" if len(planned.cases) == 1 else "cases"
        seconds = f"{planned.budget_s:.0f} s of measuring, beside it about {overhead_s:.0f} s"
        yield f"{name}: {len(planned.cases)} {word}, {configurations} configurations: {seconds}"
        if isinstance(implementation, EngineTuned):
            winners = f"what is faster goes into tables in --out: {implementation.how_to_use}"
            yield f"{name}: against what the engine takes now; {winners}"


def race_result(codes: Sequence[int], races: Sequence[Race], log: Callable[[str], None]) -> RaceResult:
    """The exit code of races, and their rows. With --check a challenger that won fails the command."""
    rows = [row for race in races for row in race.rows]
    changed = [line for race in races if not race.stores for line in race.changed]
    for line in changed:
        log(line)
    if FAILED in codes or changed:
        return FAILED, rows
    return (OK if OK in codes else NOTHING_RAN), rows


def begin_race(
    implementation: Tunable, request: TuneRequest, facts: DeviceFacts, target: Target, display: RaceDisplay
) -> tuple[RunCases, Race]:
    """Begins the run that races one implementation's configurations, or goes on with a resumed one. facts,
    target: those of the device, or of any one of several equal devices"""
    if request.resume:
        journal, plan = resume(request, facts.provenance, race=True)
    else:
        planned = plan_race(implementation, request, facts.platform)
        journal, plan = begin(planned, request, facts, display.log)
    race = Race(implementation, target, plan.record, display, stores=request.stores)
    cases = RunCases(plan, journal, race.on_case)
    race.store_earlier(cases.finished)
    return cases, race


def plan_race(implementation: Tunable, request: TuneRequest, platform: Platform) -> Run:
    """The record of a race, as harness.run.folder.plan_run makes that of a run. It has the cases that an
    implementation takes here, at the narrowest boundary of its call. All cases have the same weight, as each
    is a question of its own. Raises NothingRan where there is no case."""
    op = kernels.OPS[implementation.op]
    boundary = next(b for b in BOUNDARIES if b in implementation.boundaries)
    if request.suite or request.case:
        cases = select.choose_cases(op, request.suite, request.case, boundary, platform.arch)
    else:
        names = [name for name, suite in suites().items() if list(suite.cases(op.name))]
        cases = merge(c for name in names for c in select.choose_cases(op, name, (), boundary, platform.arch))
    supports = {case.key: implementation.supports(case, platform) for case in cases}
    supported = [case for case in cases if supports[case.key].ok]
    if not supported:
        reason = supports[cases[0].key].reason
        raise NothingRan(f"{implementation.name} takes none of these cases: {reason}")
    shard, shards = parse_shard(request.shard)
    of_shard = [replace(case, weight=1 / len(supported)) for case in supported[shard - 1 :: shards]]
    suite = "ad hoc" if request.case else request.suite or "all"
    request = replace(request, per_case=request.per_case or PER_CASE)
    race = RaceSettings(keep=request.keep or KEEP, folder=str(request.folder.resolve()))
    return record_of(request, platform, suite, of_shard, [implementation.name], implementation.name, race)


def with_configs(plan: RunPlan, platform: Platform, target: Target) -> RunPlan:
    """A race's plan, with the configurations that are raced on a device. Raises NothingRan."""
    record = plan.record
    assert record.race is not None
    implementation = next(i for i in plan.implementations if i.name == record.baseline)
    tables = {}
    if isinstance(implementation, EngineTuned):
        cases = [case_of(planned) for planned in record.cases]
        tables = ask_tables(implementation, cases, platform, plan.deadlines.prepare)
    configs_of = functools.partial(raced_configs, target=target, keep=record.race.keep, tables=tables)
    return replace(plan, configs_of=configs_of, make_rounds=halving)


def target_of(platform: Platform, threads: int) -> Target:
    """The target that configurations are chosen for on this device, by a worker. Raises NothingRan."""
    if platform.kind == "cpu":
        return CPU
    with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as scratch:
        try:
            worker = start_judge(platform, threads, 120, Path(scratch) / "judge.log")
        except WorkerFailure as failure:
            raise NothingRan(f"{platform.device} cannot be used: {failure.reason}") from None
        worker.kill()
    return Target(**worker.facts["target"])


@dataclass
class Race:
    """A race of one implementation's configurations over cases: stores what each finished case chose."""

    implementation: Tunable
    target: Target
    record: Run
    display: RaceDisplay
    stores: bool = True
    rows: list[Row] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # a line for each case that a challenger won

    def on_case(self, case: Case, records: list[Record]) -> None:
        self.display.case(self.record, case, records)
        self.display.stored(*self._take(case, records))

    def store_earlier(self, finished: Mapping[str, list[Record]]) -> None:
        """Stores the choices of cases that an earlier command finished, unless newer ones are stored."""
        for planned in self.record.cases:
            if planned.key in finished:
                self._take(case_of(planned), finished[planned.key], unless_newer=True)

    def _take(
        self, case: Case, records: Sequence[Record], unless_newer: bool = False
    ) -> tuple[Path | None, Choice]:
        """Logs the failures of a finished case, adds its row and stores its choice. Returns the file of the
        choice, if anything is stored, and the choice, if there is one."""
        for cell in records:
            if isinstance(cell, Cell) and cell.status not in ("ok", "unsupported"):
                self.display.log(f"{cell.status}: {case.text}: {cell.name}: {cell.reason}")
        chosen = choice(case, records, self.implementation, self.record)
        name, target = self.implementation.name, folder_name(self.target)
        row: Row = {"op": case.op, "implementation": name, "target": target}
        row |= chosen or {"case": case.text, "config": None}
        search = next(r for r in records if isinstance(r, CaseDone)).search
        winner = None
        # A choice that is not compared with the baseline is no winner: the baseline failed.
        if chosen and search and chosen["against"] == search.baseline and chosen["config"] != search.baseline:
            winner = chosen["config"]
            faster = f"{text_of(winner)} is faster than what is used now"
            self.changed.append(f"{target} {name} {case.text}: {faster}")
        file = self._store(case, chosen, search, winner, unless_newer) if self.stores else None
        if isinstance(self.implementation, EngineTuned):
            row["file"] = str(file) if file else None
        self.rows.append(row)
        return file, chosen

    def _store(
        self, case: Case, chosen: Choice, search: ConfigSearch | None, winner: Choice, unless_newer: bool
    ) -> Path | None:
        """Stores what a case chose. Returns the file; None where an engine keeps its own configuration."""
        assert self.record.race is not None
        folder, implementation = Path(self.record.race.folder), self.implementation
        if isinstance(implementation, EngineTuned):
            if not winner or not search:
                return None
            m = implementation.tables.m_of(kernels.OPS[case.op].sizes(case.sizes))
            return store_winner(folder, search.tables, m, winner)
        file = path(folder, implementation.name, self.target)
        if chosen:
            store(file, self.target, chosen, provenance(implementation, self.record), unless_newer)
        return file
