"""A run from its first case to its last: groups that memory holds, their workers, budget, journal."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.catalogue.devices import last_level
from harness.files import JournalFull
from harness.plan import budget
from harness.plan.contender import ConfigSearch, Contender, Entries, contender_name
from harness.plan.memory import Memory
from harness.plan.rotation import Rotation, rotation
from harness.progress import Progress
from harness.results.journal import Journal
from harness.results.schema import Record
from harness.run.case import CaseRun, Measured
from harness.run.cells import build_records
from harness.run.device import OwnDevice
from harness.run.plan import RunPlan
from harness.workers.judge import start_judge
from harness.workers.process import Worker, WorkerFailure
from harness.workers.station import Station
from kernels.platform import Platform
from shapes.case import Case

# Of the least that is worth a case: others took a little more than their share.
ENOUGH = 0.9

OnCase = Callable[[Case, list[Record]], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    records:  of all its cases, those finished before it was resumed first
    left_out: cases that the budget did not reach
    before_s: from the command's beginning to its first case
    """

    records: list[Record]
    cases: int
    left_out: list[Case]
    before_s: float
    budget_s: float
    folder: Path


@dataclass(frozen=True)
class Group:
    """Contenders that memory holds at once.

    baseline: the implementation whom the others are compared with, if it is among them
    """

    contenders: list[Contender]
    baseline: str
    rotation: Rotation


@dataclass
class Session:
    """Measures cases, one after the other.

    on_case: is given each finished case's records
    judge:   ready for the first case; each other starts one
    records: of each finished case, by its key
    spent_s: of the budget
    """

    plan: RunPlan
    device: OwnDevice
    journal: Journal
    progress: Progress
    on_case: OnCase
    judge: Worker | None = None
    spent_s: float = 0.0
    left_out: list[Case] = field(default_factory=list)
    records: dict[str, list[Record]] = field(default_factory=dict)

    @property
    def platform(self) -> Platform:
        return self.device.platform

    def run(self, cases: Sequence[Case]) -> None:
        """Measures the cases that fit the rest of the budget, heaviest first, and notes the others."""
        queue, min_s = list(cases), self.plan.per_case_s
        with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as folder:
            while queue:
                remaining = self.plan.budget_s - self.spent_s
                if self.spent_s and remaining < ENOUGH * min_s:
                    break
                share_s, reached = budget.allowance(remaining, queue, min_s)
                case = queue.pop(0)
                self.progress.case(case, reached, share_s)
                self._record(case, *self._measure(case, share_s, remaining, Path(folder)))
        self.left_out = queue

    def _record(self, case: Case, parts: Sequence[Measured], search: ConfigSearch | None) -> None:
        yardsticks = self.plan.yardsticks(self.platform)
        records, done = build_records(case, parts, self.platform, yardsticks, search)
        self.spent_s += done.measured_s
        self.records[case.key] = whole = [*records, done]
        try:
            self.journal.append(whole)
        except JournalFull:
            for record in whole:
                print(record.model_dump_json(), file=sys.stderr)
            raise
        finally:
            self.on_case(case, whole)

    def _measure(
        self, case: Case, budget_s: float, max_s: float, scratch: Path
    ) -> tuple[list[Measured], ConfigSearch | None]:
        """Each group's rounds, and who can run in none; how the configurations were found."""
        able, refused, search = self._contenders(case)
        parts: list[Measured] = []
        groups: list[Group] = []
        for baseline, contenders in self._compared(able):
            more, too_large, rotation = self._groups(case, baseline, contenders)
            groups += more
            parts.append(Measured(case, [*refused, *too_large], rotation))
            refused = []
        for group in groups:
            parts.append(self._run_group(case, group, budget_s / len(groups), max_s / len(groups), scratch))
        return parts, search

    def _compared(self, contenders: list[Contender]) -> list[tuple[str, list[Contender]]]:
        """Those that are compared with each other, and the implementation that is their baseline."""
        if self.plan.record.contrast == "implementations":
            return [(self.plan.record.baseline, contenders)]
        rivals: dict[tuple[str, str], list[Contender]] = {}
        for contender in contenders:
            rivals.setdefault((contender.impl.name, contender.launch), []).append(contender)
        return [(name, arms) for (name, _), arms in rivals.items()] or [(self.plan.record.baseline, [])]

    def _groups(
        self, case: Case, baseline: str, contenders: list[Contender]
    ) -> tuple[list[Group], list[Contender], Rotation]:
        """Those that memory holds at once, those that it never holds, and the sets that calls rotate over."""
        op, cache = self.plan.op, self.plan.record.cache
        sizes = op.sizes(case.sizes)
        memory = Memory(op, sizes, self.platform, baseline, cache)
        anchors = memory.anchors(contenders)
        ceilings = self.plan.yardsticks(self.platform).ceilings
        sets = rotation(
            op,
            sizes,
            cache,
            last_level(self.platform, ceilings),
            ceilings.reach if ceilings else 0,
            lambda copies: not anchors or memory.fits(anchors, copies),
        )
        groups, too_large = memory.groups(contenders, sets.copies)
        return [Group(members, baseline, sets) for members in groups], too_large, sets

    def _contenders(self, case: Case) -> tuple[list[Contender], list[Contender], ConfigSearch | None]:
        """Who can run the case; who cannot, with the reason written down; how their configurations were
        found."""
        plan = self.plan
        able: list[Contender] = []
        refused: list[Contender] = []
        search = None
        for impl in plan.implementations:
            support = impl.supports(case, self.platform)
            interpreted = support.ok and impl.interpreted(self.platform)
            launches = plan.record.launches if impl.captures and not interpreted else ["eager"]
            entries = plan.entries(impl, case) if support.ok else Entries()
            search = entries.search or search
            for arm, launch, config in itertools.product(plan.arms, launches, entries.configs):
                name = contender_name(impl.name, arm.name, launch, self.platform.kind, config)
                contender = Contender(name, impl, arm, launch, interpreted, config)
                if not support.ok:
                    contender.fail("unsupported", support.reason)
                elif interpreted and plan.record.contrast == "arms":
                    contender.fail("unsupported", "it is interpreted here: there is no time to compare")
                if contender.alive:
                    able.append(contender)
                elif not arm.is_twin:
                    refused.append(contender)
        return able, refused, search

    def _run_group(self, case: Case, group: Group, budget_s: float, max_s: float, scratch: Path) -> Measured:
        started = time.perf_counter()
        runner = CaseRun(
            case=case,
            stations=self._stations(group.contenders, scratch),
            start_judge=lambda: self._judge(scratch),
            monitor=self.device.monitor,
            scratch=scratch,
            say=self.progress.say,
            show_rounds=self.progress.rounds,
            rules=self.plan.rules,
        )
        try:
            return runner.run(group.rotation, budget_s, max_s, group.baseline)
        except WorkerFailure as failure:
            for contender in group.contenders:
                contender.fail("error", f"the reference could not be computed or compared: {failure.reason}")
            setup_s = time.perf_counter() - started
            return Measured(case, group.contenders, group.rotation, setup_s=setup_s, phases=runner.phases)
        finally:
            runner.close()

    def _stations(self, contenders: Sequence[Contender], scratch: Path) -> list[Station]:
        """A worker for each arm and runtime."""
        stations: dict[tuple[str, str], Station] = {}
        for contender in contenders:
            key = (contender.arm.name, contender.impl.runtime)
            if key not in stations:
                log = scratch / f"{contender.impl.runtime}-{len(stations)}.log"
                stations[key] = Station([], self.platform, self.plan.threads, self.plan.deadlines, log)
            stations[key].contenders.append(contender)
        return list(stations.values())

    def _judge(self, scratch: Path) -> Worker:
        judge, self.judge = self.judge, None
        if judge is not None and judge.alive:
            return judge
        log = scratch / "judge.log"
        return start_judge(self.platform, self.plan.threads, self.plan.deadlines.prepare, log)
