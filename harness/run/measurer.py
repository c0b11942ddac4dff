"""A case measured on a device: groups that memory holds, and a worker for each setting and runtime."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.catalogue.devices import last_level
from harness.plan.entry import ConfigSearch, Entry, entry_name, own_choice
from harness.plan.memory import Memory
from harness.plan.rotation import Rotation, rotation
from harness.plan.select import kept_sizes, ragged_cases
from harness.progress import Progress
from harness.results.schema import Record
from harness.run.case import CaseRun, Measured
from harness.run.cells import build_records
from harness.run.device import OwnDevice
from harness.run.plan import RunPlan
from harness.workers.judge import start_judge
from harness.workers.process import WorkerFailure, WorkerProcess
from harness.workers.worker import Worker
from kernels.platform import Platform
from shapes.case import Case


@dataclass(frozen=True)
class Group:
    """Entries that memory holds at once.

    baseline: the implementation whom the others are compared with, if it is among them
    """

    entries: list[Entry]
    baseline: str
    rotation: Rotation


@dataclass
class CaseMeasurer:
    """Measures what a plan says, case by case, on a device.

    judge:        ready for the first case; each other starts one
    memory_share: of what is free, where other devices of this machine are measured meanwhile
    ragged:       what was checked on ragged sizes in this run (see `_kind`), with the reason if it was wrong
    far:          of it what was right or wrong with addresses of more than 32 bits
    """

    plan: RunPlan
    device: OwnDevice
    progress: Progress
    judge: WorkerProcess | None = None
    memory_share: float = 1.0
    ragged: dict[tuple[str, ...], str] = field(default_factory=dict)
    far: dict[tuple[str, ...], bool] = field(default_factory=dict)

    @property
    def platform(self) -> Platform:
        return self.device.platform

    def measure(self, case: Case, budget_s: float, max_s: float, scratch: Path) -> list[Record]:
        """The case's records, CaseDone the last. Measures for `budget_s` seconds, or up to `max_s` where one
        round in each block takes longer; scratch: a folder for outputs and logs."""
        able, refused, search = self._entries(case)
        parts: list[Measured] = []
        groups: list[Group] = []
        for baseline, entries in self._compared(able):
            more, too_large, rotation = self._groups(case, baseline, entries)
            groups += more
            parts.append(Measured(case, [*refused, *too_large], rotation))
        for group in groups:
            parts.append(self._run_group(case, group, budget_s / len(groups), max_s / len(groups), scratch))
        records, done = build_records(case, parts, self.platform, self.plan.yardsticks(self.platform), search)
        return [*records, done]

    def _compared(self, entries: list[Entry]) -> list[tuple[str, list[Entry]]]:
        """Those that are compared with each other, and the implementation that is their baseline."""
        if self.plan.record.contrast == "implementations":
            return [(self.plan.record.baseline, entries)]
        rivals: dict[tuple[str, str], list[Entry]] = {}
        for entry in entries:
            rivals.setdefault((entry.impl.name, entry.launch), []).append(entry)
        return [(name, settings) for (name, _), settings in rivals.items()] or [
            (self.plan.record.baseline, [])
        ]

    def _groups(
        self, case: Case, baseline: str, entries: list[Entry]
    ) -> tuple[list[Group], list[Entry], Rotation]:
        """Those that memory holds at once, those that it never holds, and the sets that calls rotate over."""
        op, cache = self.plan.op, self.plan.record.cache
        sizes = op.sizes(case.sizes)
        memory = Memory(op, sizes, self.platform, baseline, cache, self.memory_share, case.boundary)
        ceilings = self.plan.yardsticks(self.platform).ceilings
        sets = rotation(
            op,
            sizes,
            cache,
            last_level(self.platform, ceilings),
            ceilings.reach if ceilings else 0,
            lambda copies: memory.holds(entries, copies),
        )
        groups, too_large = memory.groups(entries, sets.copies)
        return [Group(members, baseline, sets) for members in groups], too_large, sets

    def _entries(self, case: Case) -> tuple[list[Entry], list[Entry], ConfigSearch | None]:
        """Who can run the case; who cannot, with the reason written down; how their configurations were
        found."""
        plan = self.plan
        able: list[Entry] = []
        refused: list[Entry] = []
        search = None
        for impl in plan.implementations:
            support = impl.supports(case, self.platform)
            interpreted = support.ok and impl.interpreted(self.platform)
            launches = plan.record.launches if impl.captures and not interpreted else ["eager"]
            configs_of = plan.configs_of if support.ok else own_choice
            configs, found = configs_of(impl, case)
            search = found or search
            for setting, launch, config in itertools.product(plan.settings, launches, configs):
                name = entry_name(impl.name, setting.name, launch, self.platform.kind, config)
                entry = Entry(name, impl, setting, launch, interpreted, config)
                if not support.ok:
                    entry.fail("unsupported", support.reason)
                elif interpreted and plan.record.contrast == "settings":
                    entry.fail("unsupported", "it is interpreted here: there is no time to compare")
                if self.ragged.get(_kind(name, case)):
                    entry.fail("wrong", self.ragged[_kind(name, case)])
                if entry.alive:
                    able.append(entry)
                elif not setting.is_rerun:
                    refused.append(entry)
        return able, refused, search

    def _run_group(self, case: Case, group: Group, budget_s: float, max_s: float, scratch: Path) -> Measured:
        started = time.perf_counter()
        runner = CaseRun(
            case=case,
            workers=self._workers(group.entries, scratch),
            start_judge=lambda: self._judge(scratch),
            monitor=self.device.monitor,
            scratch=scratch,
            say=self.progress.say,
            show_rounds=self.progress.rounds,
            rules=self.plan.rules,
            ragged=self._ragged(case, group),
        )
        try:
            measured = runner.run(group.rotation, budget_s, max_s, group.baseline)
            for entry in group.entries:
                wrong = entry.status == "wrong" and entry.reason.startswith("at ")
                kind = _kind(entry.name, case)
                self.ragged[kind] = entry.reason if wrong else ""
                if "far" in entry.check:
                    self.far[kind] = entry.check["far"]
                elif entry.check and kind in self.far:
                    entry.check["far"] = self.far[kind]
            return measured
        except WorkerFailure as failure:
            for entry in group.entries:
                entry.fail("error", f"the reference could not be computed or compared: {failure.reason}")
            setup_s = time.perf_counter() - started
            return Measured(case, group.entries, group.rotation, setup_s=setup_s, phases=runner.phases)
        finally:
            runner.close()

    def _ragged(self, case: Case, group: Group) -> list[Case]:
        """The small cases of uneven sizes, if somebody was not checked at them yet. Races compare
        configurations, each of which is checked at its own case."""
        asked = {_kind(c.name, case) for c in group.entries if not c.interpreted}
        if asked <= self.ragged.keys() or self.plan.record.race is not None:
            return []
        return ragged_cases(self.plan.op, case, self.platform.arch)

    def _workers(self, entries: Sequence[Entry], scratch: Path) -> list[Worker]:
        """A worker for each setting and runtime."""
        workers: dict[tuple[str, str], Worker] = {}
        for entry in entries:
            key = (entry.setting.name, entry.impl.runtime)
            if key not in workers:
                log = scratch / f"{entry.impl.runtime}-{len(workers)}.log"
                workers[key] = Worker([], self.platform, self.plan.threads, self.plan.deadlines, log)
            workers[key].entries.append(entry)
        return list(workers.values())

    def _judge(self, scratch: Path) -> WorkerProcess:
        judge, self.judge = self.judge, None
        if judge is not None and judge.alive:
            return judge
        log = scratch / "judge.log"
        return start_judge(self.platform, self.plan.threads, self.plan.deadlines.prepare, log)


def _kind(name: str, case: Case) -> tuple[str, ...]:
    """An entry, with all of a case that its ragged cases have in common with it."""
    return name, case.boundary, *(f"{size}={value}" for size, value in kept_sizes(case).items())
