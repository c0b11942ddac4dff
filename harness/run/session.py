"""A run from its first case to its last: workers, memory, budget, journal."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.catalogue.devices import last_level
from harness.errors import HarnessError, NothingRan
from harness.machine.monitor.base import Monitor
from harness.plan import budget
from harness.plan.arms import Arm
from harness.plan.contender import Contender, Entries, contender_name, default_entries
from harness.plan.memory import Memory
from harness.plan.rotation import Rotation, rotation
from harness.results.journal import Journal
from harness.results.schema import CaseDone, Cell, DisturbedRound, Record
from harness.run.case import CaseRun, Contest, Measured
from harness.run.cells import Yardsticks, build_cells
from harness.timing.interleaved import measure
from harness.timing.rounds import Rounds
from harness.workers.environment import thread_environment
from harness.workers.process import Worker, WorkerFailure
from harness.workers.station import Deadlines, Station
from kernels.op import Implementation, Op
from kernels.platform import Platform
from shapes.case import Case


@dataclass
class Session:
    """Everything a run needs once its plan stands.

    baseline: whom the others are compared with; where arms are, each implementation's own first arm
    contrast: what shares rounds and is compared, implementations, or the arms of each implementation
    entries:  the configurations under which an implementation enters a case
    contest:  what makes rounds of the contenders' turns
    report:   is given each finished case's records
    """

    op: Op
    platform: Platform
    implementations: Sequence[Implementation]
    baseline: str
    arms: Sequence[Arm]
    launches: Sequence[str]
    cache: str
    least_s: float
    seed: int
    threads: int
    deadlines: Deadlines
    yardsticks: Yardsticks
    monitor: Monitor
    keep_disturbed: bool
    journal: Journal
    progress: Any
    report: Any
    contrast: str = "implementations"
    entries: Callable[[Implementation, Case], Entries] = default_entries
    contest: Contest = measure
    spent_s: float = 0.0
    setup_s: float = 0.0
    left_out: list[Case] = field(default_factory=list)

    def run(self, cases: Sequence[Case], budget_s: float) -> None:
        """Measures the cases that fit the rest of the budget, heaviest first, and notes the others."""
        queue = list(cases)
        with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as folder:
            scratch = Path(folder)
            while queue:
                remaining = budget_s - self.spent_s
                if self.spent_s and remaining < self.least_s:
                    break
                share_s, reached = budget.allowance(remaining, queue, self.least_s)
                self._case(queue.pop(0), share_s, remaining, reached, scratch)
        self.left_out = queue

    def _case(self, case: Case, budget_s: float, most_s: float, to_go: int, scratch: Path) -> None:
        self.progress.case(case, to_go, budget_s)
        contenders, refused, configs = self._contenders(case)
        parts: list[Measured] = []
        groups: list[tuple[list[Contender], str, Rotation]] = []
        for baseline, able in self._fields(contenders):
            found, too_large, turns = self._groups(case, baseline, able)
            groups += [(group, baseline, turns) for group in found]
            parts.append(Measured(case, [*refused, *too_large], turns))
            refused = []
        for group, baseline, turns in groups:
            shares = (budget_s / len(groups), most_s / len(groups))
            parts.append(self._group(case, group, baseline, turns, *shares, scratch))
        records = self._records(case, parts, configs)
        try:
            self.journal.append(records)
        finally:
            self.report(case, records)

    def _fields(self, contenders: list[Contender]) -> list[tuple[str, list[Contender]]]:
        """Those that are compared with each other, and the implementation that is their baseline."""
        if self.contrast == "implementations":
            return [(self.baseline, contenders)]
        fields: dict[tuple[str, str], list[Contender]] = {}
        for contender in contenders:
            fields.setdefault((contender.impl.name, contender.launch), []).append(contender)
        return [(name, found) for (name, _), found in fields.items()] or [(self.baseline, [])]

    def _groups(
        self, case: Case, baseline: str, contenders: list[Contender]
    ) -> tuple[list[list[Contender]], list[Contender], Rotation]:
        """Those that memory holds at once, those that it never holds, and the sets that calls rotate over."""
        sizes = self.op.sizes(case.sizes)
        memory = Memory(self.op, sizes, self.platform, baseline, self.cache)
        anchors = memory.anchors(contenders)
        turns = rotation(
            self.op,
            sizes,
            self.cache,
            last_level(self.platform),
            lambda copies: not anchors or memory.fits(anchors, copies),
        )
        return *memory.groups(contenders, turns.copies), turns

    def _contenders(self, case: Case) -> tuple[list[Contender], list[Contender], dict[str, Any]]:
        """Who can run the case; who cannot, with the reason written down; how their configurations were
        found."""
        able, refused, found = [], [], {}
        for impl in self.implementations:
            support = impl.supports(case, self.platform)
            interpreted = support.ok and impl.interpreted(self.platform)
            launches = self.launches if impl.captures and not interpreted else ["eager"]
            entries = self.entries(impl, case) if support.ok else Entries()
            found |= entries.found
            for arm, launch, config in itertools.product(self.arms, launches, entries.configs):
                name = contender_name(impl.name, arm.name, launch, self.platform.kind, config)
                contender = Contender(name, impl, arm, launch, interpreted, config)
                if not support.ok:
                    contender.fail("unsupported", support.reason)
                elif interpreted and self.contrast == "arms":
                    contender.fail("unsupported", "it is interpreted here: there is no time to compare")
                if contender.alive:
                    able.append(contender)
                elif not arm.again:
                    refused.append(contender)
        return able, refused, found

    def _group(
        self,
        case: Case,
        group: list[Contender],
        baseline: str,
        turns: Rotation,
        budget_s: float,
        most_s: float,
        scratch: Path,
    ) -> Measured:
        stations: dict[tuple[str, str], Station] = {}
        for contender in group:
            key = (contender.arm.name, contender.impl.runtime)
            if key not in stations:
                log = scratch / f"{contender.impl.runtime}-{len(stations)}.log"
                stations[key] = Station([], self.platform, self.threads, self.deadlines, log)
            stations[key].contenders.append(contender)
        started = time.perf_counter()
        judge = None
        try:
            judge = Worker("judge", thread_environment(self.platform, self.threads), scratch / "judge.log")
            kind, device = self.platform.kind, self.platform.device
            judge.ask("hello", self.deadlines.prepare, kind=kind, device=device, threads=self.threads)
            runner = CaseRun(
                case,
                list(stations.values()),
                judge,
                self.seed,
                scratch,
                self.progress.say,
                self.monitor,
                self.keep_disturbed,
                self.yardsticks.margin,
                self.contest,
            )
            measured = runner.run(turns, budget_s, most_s, baseline)
        except WorkerFailure as failure:
            for contender in group:
                contender.fail("error", f"the reference could not be computed or compared: {failure.reason}")
            measured = Measured(case, group, turns, Rounds(), setup_s=time.perf_counter() - started)
        finally:
            for station in stations.values():
                station.stop()
            if judge is not None:
                judge.kill()
        return measured

    def _records(
        self, case: Case, parts: Sequence[Measured], found: dict[str, Any] | None = None
    ) -> list[Record]:
        cells: dict[str, Cell] = {}
        verdicts: list[Record] = []
        blocks = 0
        for part in parts:
            # A block and a round name one moment of the case: groups share none.
            part.rounds = part.rounds.numbered(blocks)
            blocks = max(blocks, part.rounds.next_block)
            assessed, compared = build_cells(part, self.platform, self.yardsticks)
            # The baseline of every group but the first is there for the ratios only.
            for contender, cell in zip(part.contenders, assessed, strict=True):
                first = cells.setdefault(contender.name, cell)
                if first is not cell:
                    first.samples.add(cell.samples)
                    first.heats.add(cell.heats)
            verdicts += compared
        rounds = [r for part in parts for r in part.rounds.rounds]
        timed = [part for part in parts if part.anchor is not None]
        done = CaseDone(
            case=case.key,
            measured_s=sum(part.rounds.spent_s for part in parts),
            setup_s=sum(part.setup_s for part in parts),
            rounds=len(rounds),
            blocks=min((len({r.block for r in part.rounds.rounds}) for part in timed), default=0),
            heats=sum(len(part.rounds.heats) for part in parts),
            stopped=", ".join(dict.fromkeys(part.rounds.stopped for part in timed)),
            disturbed=[found for part in timed for found in _disturbed(part.rounds)],
            conditions=[part.conditions for part in timed],
            entries=found or {},
        )
        self.spent_s += done.measured_s
        self.setup_s += done.setup_s
        return [*cells.values(), *verdicts, done]


def _disturbed(rounds: Rounds) -> list[DisturbedRound]:
    left_out = [(r, False) for r in rounds.disturbed]
    kept = [(r, True) for r in (*rounds.heats, *rounds.rounds) if r.disturbed]
    return [
        DisturbedRound(
            block=r.block,
            round=r.index,
            reason=r.disturbed,
            counted=counted,
            seconds={} if counted else dict(r.seconds),
        )
        for r, counted in sorted([*left_out, *kept], key=lambda one: (one[0].block, one[0].index))
    ]


def exit_code(cells: Sequence[Cell]) -> int:
    """0 all that could run is right; 1 something was wrong or broke; 3 nothing could run."""
    statuses = {cell.status for cell in cells}
    if statuses & {"wrong", "impossible", "error", "crashed", "timeout"}:
        return HarnessError.exit_code
    return 0 if statuses & {"ok", "checked"} else NothingRan.exit_code
