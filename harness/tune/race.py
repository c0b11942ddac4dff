"""Races of configurations on a device: each checked and measured as any entry is."""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import kernels
from harness.catalogue.architectures import architectures
from harness.errors import FAILED, NOTHING_RAN, OK, NothingRan, UsageError
from harness.machine.device import choose_device
from harness.machine.provenance import surroundings
from harness.plan import select
from harness.plan.budget import parse_seconds
from harness.plan.entry import ConfigSearch, ConfigsOfCase
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, RaceSettings, Record, Run, Verdict
from harness.run.device import OwnDevice, device_facts, own_device
from harness.run.execute import Display, exit_code, measure
from harness.run.folder import Selection, begin, finished_cases, resume
from harness.run.plan import RunPlan, case_of
from harness.run.request import Request
from harness.timing.rounds import Disturbed
from harness.timing.successive_halving import halving
from harness.tune.engine import EngineConfigs, ask_tables, store_winner
from harness.tune.offline import CompileProgress
from harness.tune.store import Place, path, read, source, store
from harness.workers.environment import worker_threads
from harness.workers.process import WorkerFailure, WorkerProcess, start_judge
from kernels.engine_tuning import EngineTuned
from kernels.op import BOUNDARIES, Implementation
from kernels.platform import Platform
from kernels.triton_runtime import CPU, SuiteTriton
from kernels.tuning import TUNED, Target, Tunable
from shapes.case import Case, merge
from shapes.suites import suites

if TYPE_CHECKING:
    from harness.tune.offline import Compiling

TURNED = {"faster": "slower", "slower": "faster"}
Row = dict[str, Any]
"""A row of the table of what was chosen: a stored choice with its op, implementation and target."""


class RaceDisplay(Display, Protocol):
    """What a person sees of a race."""

    def stored(self, file: Path | None, choice: Mapping[str, Any] | None) -> None:
        """What was stored of a finished case, and where. No file: an engine's own choice, which is left; no
        choice: nothing."""


class RacedConfigs:
    """Which configurations of one implementation are raced on one target: the best `keep` by the estimate."""

    def __init__(
        self, implementation: Tunable, target: Target, keep: int, log: Callable[[str], None]
    ) -> None:
        self.op = kernels.OPS[implementation.op]
        self.implementation, self.target, self.keep = implementation, target, keep
        self.compiling = _compiling(implementation, target, log)

    @property
    def unpruned(self) -> str:
        """Why nothing is left out beforehand; empty where the estimate chooses."""
        if self.compiling:
            return ""
        known = ", ".join(architectures())
        return f"all configurations are raced: only those of Triton kernels on {known} are known by compiling"

    def configs_of(self, implementation: Implementation, case: Case) -> ConfigsOfCase:
        sizes = self.op.sizes(case.sizes)
        choice = self.implementation.choose(self.target, sizes)
        if self.compiling:
            best, considered, pruned = self._best(self.compiling, case)
        else:
            best = list(self.implementation.configurations(self.target, sizes))
            considered, pruned = len(best), {}
        configs = [asdict(config) for config in dict.fromkeys([choice.config, *best])]
        return ConfigsOfCase(
            configs,
            ConfigSearch(
                baseline=configs[0],
                origin=choice.origin,
                considered=considered,
                pruned=pruned,
                raced=len(configs),
            ),
        )

    def _best(self, compiling: Compiling, case: Case) -> tuple[list[Any], int, dict[str, int]]:
        """The survivors, of how many, and how many of the others are left out for what."""
        searches = compiling.searches([case], self.keep)
        compiling.run(searches)
        (search,) = searches
        survivors = [candidate.config for candidate in search.fitting_best_first[: self.keep]]
        refused = dict(search.refusals)
        worse = len(search.candidates) - len(survivors) - sum(refused.values())
        return survivors, len(search.candidates), refused | {"worse by the estimate": worse}


def _compiling(implementation: Tunable, target: Target, log: Callable[[str], None]) -> Compiling | None:
    """What judges its configurations without running them; None where nothing can."""
    known = architectures().get(target.arch)
    if known is None or not isinstance(implementation, SuiteTriton):
        return None
    from harness.compile.survey import able
    from harness.tune.offline import Compiling

    able([known])
    return Compiling(implementation, replace(known, units=target.units), log=log)


def choice(case: Case, records: Sequence[Record], implementation: Tunable, run: Run) -> dict[str, Any] | None:
    """What is stored of a finished case: the challenger if it is faster than the baseline by the engine's own
    verdict, else the baseline, confirmed. None where nothing was told apart from nothing: no verdict, or one
    that the machine's noise swallowed.

    verdict, ratio, low, high: of `config` against `against`: time(against) / time(config)
    """
    cells = {r.name: r for r in records if isinstance(r, Cell)}
    done = next(r for r in records if isinstance(r, CaseDone))
    verdicts = [
        v
        for v in records
        if isinstance(v, Verdict) and v.about == "baseline" and None not in (v.ratio, v.noise)
    ]
    if not verdicts or done.entries is None:
        return None
    search = done.entries
    best = max(verdicts, key=lambda v: (v.verdict == "faster", v.low or 0.0))
    won = best.verdict == "faster"
    this, other = (best.a, best.b) if won else (best.b, best.a)
    ends = [best.ratio, best.low, best.high]
    ratio, low, high = ends if won else [1 / end if end else None for end in (ends[0], ends[2], ends[1])]
    sizes = kernels.OPS[case.op].sizes(case.sizes)
    machine, versions = run.provenance["machine"], run.provenance["versions"]
    return {
        "case": case.text,
        "features": implementation.features(sizes),
        "config": cells[this].config or search.baseline,
        "time_us": _short(cells[this].time_us),
        "verdict": best.verdict if won else TURNED.get(best.verdict, best.verdict),
        "ratio": _short(ratio),
        "low": _short(low),
        "high": _short(high),
        "confidence": best.confidence,
        "against": cells[other].config or search.baseline,
        "before": search.origin,
        "considered": search.considered,
        "pruned": search.pruned,
        "raced": search.raced,
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
class RaceRequest:
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
    disturbed: Disturbed | None = None
    prepare_timeout: float = 900.0
    call_timeout: float = 120.0

    @property
    def race_option(self) -> str:
        """The first option given that only makes sense of a race; empty if there is none."""
        names = ("device", "budget", "per_case", "launch", "keep", "journal", "resume")
        return next((f"--{name.replace('_', '-')}" for name in names if getattr(self, name)), "")

    def of(self, implementation: Tunable) -> Request:
        return Request(
            op=implementation.op,
            device=self.device,
            launch=self.launch,
            budget=self.budget,
            per_case=self.per_case or (None if self.resume else PER_CASE),
            resume=self.resume,
            retry=self.retry,
            out=self.journal,
            disturbed=self.disturbed,
            prepare_timeout=self.prepare_timeout,
            call_timeout=self.call_timeout,
        )


@dataclass(frozen=True)
class TuneRequest:
    """Which cases and implementations are tuned, unread.

    shard:  (i, n): the i-th of n parts of the cases, from 1
    folder: where choices are stored
    dry:    whether it is only said what would be raced
    """

    op: str | None
    impl: str | None
    suite: str | None
    case: Sequence[str]
    shard: tuple[int, int]
    folder: Path
    dry: bool = False


def implementations_here(tuned: TuneRequest, platform: Platform) -> list[Tunable]:
    """Implementations that have configurations and can be timed here; those of engines where they are named.
    Raises UsageError where winners of an engine's would go among the suite's own."""
    ops = [select.choose_op(tuned.op)] if tuned.op else kernels.OPS.values()
    here = [
        implementation
        for op in ops
        for implementation in select.choose_implementations(op, tuned.impl)
        if isinstance(implementation, Tunable)
        and (tuned.impl or not isinstance(implementation, EngineTuned))
        and implementation.available(platform).ok
        and not implementation.interpreted(platform)
    ]
    engines = [implementation.name for implementation in here if isinstance(implementation, EngineTuned)]
    if engines and tuned.folder == TUNED and not tuned.dry:
        raise UsageError(f"--out is missing: the folder for the tables of {engines[0]}'s engine")
    return here


def race_if_possible(
    tuned: TuneRequest, request: RaceRequest, compiling: str, display: RaceDisplay
) -> tuple[int, list[Row]] | None:
    """As `race`; None where nothing of what is to be tuned can be timed here, or the option named by
    `compiling` asks for something else. Raises UsageError or NothingRan where a race is asked for all the
    same."""
    of_races = request.race_option or ("--dry-run" if tuned.dry else "")
    if compiling:
        if of_races:
            raise UsageError(f"{of_races} is for races; {compiling} compiles")
        return None
    platform = choose_device(request.device)
    if request.resume or implementations_here(tuned, platform):
        if tuned.dry:
            display.log("\n".join(would_race(tuned, request, platform)))
            return OK, []
        return race(tuned, request, platform, display)
    if of_races:
        raise NothingRan(f"{of_races} is for races, and nothing of these can be timed on {platform.device}")
    return None


CASE_S, CONFIG_S, ENGINE_CONFIG_S = 12.0, 1.0, 2.0
"""Beside measuring, of a case and of each of its configurations: on an H100 four to seven took 12 to 21 s
(results/h100/tune-*); on an H200 eleven of an engine's row, which are compiled only then, 23 to 41 s
(results/h200/tune-*)."""


def would_race(tuned: TuneRequest, request: RaceRequest, platform: Platform) -> Iterator[str]:
    """Yields for each implementation a line for each case and one for all. No engine is asked, and the device
    is only asked what it is."""
    keep = request.keep or KEEP
    with ExitStack() as stack:
        target, _ = target_here(platform, worker_threads(), stack)
        for implementation in implementations_here(tuned, platform):
            op, counts = kernels.OPS[implementation.op], []
            cases = race_selection(implementation, tuned, platform).cases
            for case in cases:
                known = sum(1 for _ in implementation.configurations(target, op.sizes(case.sizes)))
                counts.append(min(keep, known) + 1)
                yield f"{implementation.name}: {case.text}: up to {counts[-1]} of {known} configurations"
            per_case_s = parse_seconds(request.per_case or PER_CASE, "--per-case")
            if request.budget:
                measuring_s = parse_seconds(request.budget, "--budget")
            else:
                measuring_s = per_case_s * len(cases)
            config_s = ENGINE_CONFIG_S if isinstance(implementation, EngineTuned) else CONFIG_S
            beside_s = CASE_S * len(cases) + config_s * sum(counts)
            each = f"{implementation.name}: {len(cases)} cases, {sum(counts)} configurations"
            yield f"{each}: {measuring_s:.0f} s of measuring, beside it about {beside_s:.0f} s"
            if isinstance(implementation, EngineTuned):
                yield (
                    f"{implementation.name}: against what the engine takes now; what is faster goes into "
                    f"tables in --out: {implementation.reads}"
                )


def race(
    tuned: TuneRequest, request: RaceRequest, platform: Platform, display: RaceDisplay
) -> tuple[int, list[Row]]:
    """Races one implementation after the other; gives the exit code and a row for each case."""
    if request.resume:
        run = Journal(Path(request.resume)).run()
        known = kernels.implementations(select.choose_op(run.op).name)
        implementations = [i for i in known if i.name == run.baseline and isinstance(i, Tunable)]
    else:
        implementations = implementations_here(tuned, platform)
    if request.journal and len(implementations) > 1:
        names = ", ".join(i.name for i in implementations)
        raise UsageError(f"--journal takes the rounds of one implementation; choose one by --impl: {names}")
    codes, rows = [], []
    with own_device(platform) as device:
        for line in device.busy:
            display.log(f"note: {line}")
        for implementation in implementations:
            if request.resume:
                journal, plan = resume(request.of(implementation), surroundings(platform), race=True)
            else:
                settings = RaceSettings(keep=request.keep or KEEP, folder=str(tuned.folder.resolve()))
                selection = race_selection(implementation, tuned, platform)
                facts_of = functools.partial(device_facts, device)
                asked = request.of(implementation)
                journal, plan = begin(asked, platform, facts_of, selection, display.log, settings)
            display.log(
                f"racing {platform.name or platform.kind} {implementation.name}; rounds in {journal.folder}"
            )
            finished = finished_cases(journal, plan.retry)
            with racing(plan, device, display.log) as (raced, judge, target):
                this = Race(implementation, target, plan, display)
                this.resume(finished)
                outcome = measure(
                    raced, device, journal, display.progress, this.on_case, finished=finished, judge=judge
                )
            display.end(plan.record, outcome)
            codes.append(exit_code(outcome.records))
            rows += this.rows
    if FAILED in codes:
        return FAILED, rows
    return (OK if OK in codes else NOTHING_RAN), rows


@contextlib.contextmanager
def racing(
    plan: RunPlan, device: OwnDevice, log: Callable[[str], None]
) -> Iterator[tuple[RunPlan, WorkerProcess | None, Target]]:
    """A race's plan with the configurations that are raced on this device, the judge of its first case, if
    one is ready, and what the configurations are chosen for. Raises NothingRan."""
    record = plan.record
    assert record.race is not None
    implementation = next(i for i in plan.implementations if i.name == record.baseline)
    assert isinstance(implementation, Tunable)
    with ExitStack() as stack:
        target, judge = target_here(device.platform, plan.threads, stack)
        where = f"{device.platform.name or device.platform.kind} {implementation.name}"
        keep = record.race.keep
        if isinstance(implementation, EngineTuned):
            cases = [case_of(planned) for planned in record.cases]
            tables = ask_tables(implementation, cases, device.platform, plan.deadlines.prepare)
            entries = EngineConfigs(implementation, target, keep, tables).configs_of
        else:
            configs = RacedConfigs(implementation, target, keep, CompileProgress(where))
            if configs.unpruned:
                log(configs.unpruned)
            entries = configs.configs_of
        yield replace(plan, configs_of=entries, make_rounds=halving), judge, target


def target_here(platform: Platform, threads: int, stack: ExitStack) -> tuple[Target, WorkerProcess | None]:
    """What configurations are chosen for here, as a worker finds it: the judge of the first case. Raises
    NothingRan."""
    if platform.kind == "cpu":
        return CPU, None
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-"))
    try:
        judge = start_judge(platform, threads, 120, Path(scratch) / "judge.log")
    except WorkerFailure as failure:
        raise NothingRan(f"{platform.device} cannot be used: {failure.reason}") from None
    stack.callback(judge.kill)
    return Target(**judge.facts["target"]), judge


@dataclass
class Race:
    """A race of one implementation's configurations over cases: what its finished cases chose, and where that
    is stored."""

    implementation: Tunable
    target: Target
    plan: RunPlan
    display: RaceDisplay
    rows: list[Row] = field(default_factory=list)

    def on_case(self, case: Case, records: list[Record]) -> None:
        self.display.case(self.plan.record, case, records)
        self.display.stored(*self._store(case, records))

    def resume(self, finished: Mapping[str, list[Record]]) -> None:
        """Stores what an earlier command chose, unless what is stored is newer."""
        for planned in self.plan.record.cases:
            if planned.key in finished:
                self._store(case_of(planned), finished[planned.key], unless_newer=True)

    def _store(
        self, case: Case, records: Sequence[Record], unless_newer: bool = False
    ) -> tuple[Path | None, Mapping[str, Any] | None]:
        """Stores what a finished case chose, and gives it with its file. Of an engine's configurations it
        stores only one that was faster than the engine's own.

        unless_newer: not where a newer choice is stored
        """
        assert self.plan.record.race is not None
        place = Place(self.target.kind, self.target.arch, self.target.device, measured=True)
        folder = Path(self.plan.record.race.folder)
        for cell in records:
            if isinstance(cell, Cell) and cell.status not in ("ok", "unsupported"):
                self.display.log(f"{cell.status}: {case.text}: {cell.name}: {cell.reason}")
        entry = choice(case, records, self.implementation, self.plan.record)
        row: Row = {"op": case.op, "implementation": self.implementation.name, "target": place.folder}
        row |= entry or {"case": case.text, "config": None}
        self.rows.append(row)
        if isinstance(self.implementation, EngineTuned):
            to = self._store_engine(case, records, entry)
            row["file"] = str(to) if to else None
            return to, entry
        file = path(folder, self.implementation.name, place)
        if entry is None:
            return file, None
        newer = unless_newer and any(
            old["case"] == entry["case"] and old["created"] > entry["created"]
            for old in read(file)["choices"]
        )
        if not newer:
            store(folder, self.implementation.name, place, [entry], self._provenance())
        return file, entry

    def _store_engine(
        self, case: Case, records: Sequence[Record], entry: Mapping[str, Any] | None
    ) -> Path | None:
        """The file into which a configuration went that was faster than the engine's own; None: the engine's
        own is left as it is."""
        assert self.plan.record.race is not None and isinstance(self.implementation, EngineTuned)
        search = next(r for r in records if isinstance(r, CaseDone)).entries
        if search is None or entry is None:
            return None
        if entry["config"] == search.baseline or entry["against"] != search.baseline:  # it stayed, or failed
            return None
        m = self.implementation.tables.rows(kernels.OPS[case.op].sizes(case.sizes))
        return store_winner(Path(self.plan.record.race.folder), search.tables, m, entry["config"])

    def _provenance(self) -> dict[str, Any]:
        """Of the file; each choice has what was different for those before it."""
        record = self.plan.record
        machine, versions = (record.provenance[group] for group in ("machine", "versions"))
        return {
            "device": machine["device"],
            "driver": machine["driver"],
            **{name: versions.get(name, "") for name in ("torch", "triton")},
            "commit": record.provenance["git"]["commit"],
            "source": source(self.implementation),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }


def race_selection(implementation: Tunable, tuned: TuneRequest, platform: Platform) -> Selection:
    cases = _cases(implementation, tuned, platform)
    suite = "ad hoc" if tuned.case else tuned.suite or "all"
    return Selection(suite, cases, [implementation.name], implementation.name)


def _cases(implementation: Tunable, tuned: TuneRequest, platform: Platform) -> list[Case]:
    """Those that it takes here, each of equal weight: whatever serving weighs, each is a question of its own.
    At the narrowest boundary of its call. Raises NothingRan where there is none."""
    op = kernels.OPS[implementation.op]
    boundary = next(b for b in BOUNDARIES if b in implementation.boundaries)
    if tuned.suite or tuned.case:
        cases = select.choose_cases(op, tuned.suite, tuned.case, boundary, platform.arch)
    else:
        names = [name for name, suite in suites().items() if list(suite.cases(op.name))]
        cases = merge(c for name in names for c in select.choose_cases(op, name, (), boundary, platform.arch))
    takes = {case.key: implementation.supports(case, platform) for case in cases}
    able = [case for case in cases if takes[case.key].ok]
    if not able:
        reason = next(iter(takes.values())).reason
        raise NothingRan(f"{implementation.name} takes none of these cases: {reason}")
    at, of = tuned.shard
    return [replace(case, weight=1 / len(able)) for case in able[at - 1 :: of]]
