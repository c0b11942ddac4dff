"""A case measured on a device: the entries that can run it, in groups that memory holds; each group is
checked, timed in interleaved rounds, and checked again. The way from here: checks.py, and
workers/worker.py, whose process runs workers/child/bench.py."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.catalogue.devices import last_level
from harness.machine.monitor.base import Monitor
from harness.plan.entry import ConfigSearch, Entry, by_worker, entry_of, own_choice
from harness.plan.memory import Memory, Rotation, rotation
from harness.plan.select import kept_sizes, ragged_cases
from harness.progress import MEASURING, Progress
from harness.results.schema import Record
from harness.run.cells import Group, build_records
from harness.run.checks import PREPARING_ANEW, SAMPLE_S, CaseChecks
from harness.run.device import OwnDevice
from harness.run.plan import RunPlan
from harness.timing.rounds import Policy, Rounds
from harness.workers.child.timers import LONG_S
from harness.workers.process import WorkerFailure
from harness.workers.worker import Worker, attempt
from kernels.engines import choices, engines
from kernels.platform import Platform
from shapes.case import Case

SLOW = 4.0  # an entry that takes so many times as long as the fastest is no choice: it is sampled rarely


@dataclass
class CaseMeasurer:
    """Measures the cases of a plan on a device, one after the other."""

    plan: RunPlan
    device: OwnDevice
    progress: Progress
    memory_share: float = 1.0
    """The share of the free memory that it may use: other devices of this machine may be measured too."""
    ragged: dict[tuple[str, ...], str] = field(init=False, default_factory=dict)
    """What was checked at ragged sizes in this run (see `_kind`), with the reason if it was wrong."""
    far: dict[tuple[str, ...], bool] = field(init=False, default_factory=dict)
    """Whether these were right with addresses of more than 32 bits, where that was checked."""

    @property
    def platform(self) -> Platform:
        return self.device.platform

    def measure(self, case: Case, budget_s: float, max_s: float, scratch: Path) -> list[Record]:
        """The records of a case, CaseDone the last. Measures for `budget_s` seconds, or for up to `max_s`
        where one round in each block takes longer. scratch: a folder for logs"""
        able, refused, search = self._entries(case)
        refusing: list[Group] = []
        groups: list[Group] = []
        for baseline, entries in self._compared(case, able):
            more, too_large, sets = self._groups(case, baseline, entries)
            groups += more
            refusing.append(Group(case, [*refused, *too_large], sets))
        for group in groups:
            self._measure_group(group, budget_s / len(groups), max_s / len(groups), scratch)
        records, done = build_records(case, [*refusing, *groups], self.platform, self.plan.record, search)
        return [*records, done]

    def _entries(self, case: Case) -> tuple[list[Entry], list[Entry], ConfigSearch | None]:
        """The entries that can run the case; those that cannot, with the reason written down; and how their
        configurations were found."""
        plan = self.plan
        entries: dict[str, Entry] = {}
        search = None
        for impl in plan.implementations:
            is_supported = impl.supports(case, self.platform).ok
            configs, found = plan.configs_of(impl, case) if is_supported else own_choice(impl, case)
            search = found or search
            for setting, launch, config in itertools.product(plan.settings, plan.record.launches, configs):
                entry = entry_of(impl, case, self.platform, launch, setting, config)
                if entry.interpreted and plan.record.contrast == "settings":
                    entry.fail("unsupported", "it is interpreted here: there is no time to compare")
                if reason := self.ragged.get(_kind(entry.name, case)):
                    entry.fail("wrong", reason)
                entries[entry.name] = entry  # launch modes that give the same (eager) entry give it once
        able = [entry for entry in entries.values() if entry.alive]
        refused = [entry for entry in entries.values() if not (entry.alive or entry.setting.is_rerun)]
        return able, refused, search

    def _baseline(self, case: Case) -> str:
        """The implementation that the others are compared with: the run's, or what its engine runs."""
        baseline = self.plan.record.baseline
        if baseline not in engines():
            return baseline
        by_engine = choices(case.op, self.platform.arch, case.sizes, self.plan.settings[0].variables)
        return by_engine[baseline].row

    def _compared(self, case: Case, entries: list[Entry]) -> list[tuple[str, list[Entry]]]:
        """The entries that are compared with each other, with the name of their baseline: all entries, or
        where settings are compared those of each implementation and launch mode."""
        if self.plan.record.contrast == "implementations":
            return [(self._baseline(case), entries)]
        if not entries:
            return [(self._baseline(case), [])]
        rivals: dict[tuple[str, str], list[Entry]] = {}
        for entry in entries:
            rivals.setdefault((entry.impl.name, entry.launch), []).append(entry)
        return [(members[0].impl.name, members) for members in rivals.values()]

    def _groups(
        self, case: Case, baseline: str, entries: list[Entry]
    ) -> tuple[list[Group], list[Entry], Rotation]:
        """The groups of entries, each of which memory holds at once; the entries that are too large for
        memory; and the sets of operands that calls rotate over."""
        memory = Memory(case, self.platform, baseline, self.plan.record.cache, self.memory_share)
        ceilings = self.plan.ceilings
        sets = rotation(
            memory.op,
            memory.sizes,
            memory.mode,
            last_level(self.platform, ceilings),
            reach=ceilings.reach if ceilings else 0,
            fits=functools.partial(memory.holds, entries),
        )
        groups, too_large = memory.groups(entries, sets.copies)
        return [Group(case, members, sets) for members in groups], too_large, sets

    def _measure_group(self, group: Group, budget_s: float, max_s: float, scratch: Path) -> None:
        """Checks the entries of a group, times them, and checks them again."""
        started = time.perf_counter()
        checks = CaseChecks(
            case=group.case,
            workers=self._workers(group.entries, scratch),
            say=self.progress.say,
            seed=self.plan.record.seed,
            ragged=self._ragged(group),
        )
        try:
            checks.before(group.rotation)
            self.progress.say(MEASURING)
            self._time(checks, group, budget_s, max_s)
            checks.after(group.rotation)
            self._remember(group)
        except WorkerFailure as failure:
            for entry in group.entries:
                entry.fail("error", f"the reference could not be computed or compared: {failure.reason}")
            group.rounds = Rounds()
            group.baseline = None
            group.rerun = None
        finally:
            checks.close()
        group.setup_s = time.perf_counter() - started - group.rounds.spent_s
        group.phases = checks.phases

    def _time(self, checks: CaseChecks, group: Group, budget_s: float, max_s: float) -> None:
        """Times the entries that are right in interleaved rounds, the baseline twice."""
        timed = checks.timed
        if not timed:
            return
        # The first entry takes the baseline's place where the baseline failed, and where settings are
        # compared: all entries of the group are then of one implementation, those of the first setting first.
        baseline_name = self._baseline(group.case)
        baselines = [pair for pair in timed if pair[1].impl.name == baseline_name]
        worker, baseline = baselines[0] if baselines else timed[0]
        rerun = next((entry for _, entry in timed if entry.setting.is_rerun), None)
        if rerun is None:
            rerun = replace(baseline, name=f"{baseline.name} (again)", host_s=[])
            timed.append((worker, rerun))
        budget_s = min(max_s, max(budget_s, opening_s([entry.call_s for _, entry in timed])))
        self.device.monitor.take_conditions()  # forgets what was seen before this case
        samples = GroupSampler(checks, timed, group.rotation, self.device.monitor, self.progress, budget_s)
        policy = Policy(
            disturbed=self.plan.disturbed,
            margin=self.plan.record.margin,
            slow=SLOW,
            seed=self.plan.record.seed,
            baseline=baseline.name,
            rerun=rerun.name,
            budget_s=budget_s,
            begin_block=samples.begin_block,
            begin_round=samples.begin_round,
            end_round=self.device.monitor.end,
        )
        samplers = {entry.name: functools.partial(samples.take, worker, entry) for worker, entry in timed}
        rounds = self.plan.make_rounds(samplers, policy)
        group.rounds = rounds
        group.baseline = baseline
        group.rerun = rerun
        group.conditions = self.device.monitor.take_conditions()
        for _, entry in timed:
            if entry.name in rounds.dropped:
                entry.fail("error", rounds.dropped[entry.name])
            if rounds.stopped == "disturbed":
                share = f"{len(rounds.left_out)} of {len(rounds.made)} rounds"
                reason = f"too disturbed to measure, {share}: {rounds.left_out[-1].disturbed}"
                entry.fail("error", f"{reason} (without --disturbed refuse they count)")
            entry.beaten = rounds.beaten.get(entry.name, "")

    def _remember(self, group: Group) -> None:
        """Notes what was found at ragged sizes and with far addresses: entries of the same kind in the run's
        later cases are not checked for that again, but get what was noted."""
        for entry in group.entries:
            kind = _kind(entry.name, group.case)
            is_wrong = entry.status == "wrong" and entry.reason.startswith("at ")
            self.ragged[kind] = entry.reason if is_wrong else ""
            if "far" in entry.check:
                self.far[kind] = entry.check["far"]
            elif entry.check and kind in self.far:
                entry.check["far"] = self.far[kind]

    def _ragged(self, group: Group) -> list[Case]:
        """The small cases of uneven sizes, if an entry was not checked at them yet. A race compares
        configurations, each of which is checked at its own case only."""
        asked = {_kind(entry.name, group.case) for entry in group.entries if not entry.interpreted}
        if asked <= self.ragged.keys() or self.plan.record.race is not None:
            return []
        return ragged_cases(self.plan.op, group.case, self.platform.arch)

    def _workers(self, entries: Sequence[Entry], scratch: Path) -> list[Worker]:
        workers = []
        for number, members in enumerate(by_worker(entries)):
            log = scratch / f"{members[0].impl.runtime}-{number}.log"
            workers.append(Worker(members, self.platform, self.plan.record.threads, self.plan.deadlines, log))
        return workers


@dataclass
class GroupSampler:
    """Takes the samples of a group's rounds: one worker works at a time, and the machine is watched."""

    checks: CaseChecks
    timed: Sequence[tuple[Worker, Entry]]
    rotation: Rotation
    monitor: Monitor
    progress: Progress
    budget_s: float
    rounds: int = 0  # how many rounds were begun
    spent_s: float = 0.0  # seconds spent in samples

    def begin_block(self, block: int, names: Collection[str]) -> None:
        """Prepares the named entries anew, on operands in fresh buffers."""
        self.progress.rounds(self.rounds, self.spent_s, self.budget_s)
        workers = self.checks.workers
        with self.checks.phase(PREPARING_ANEW):
            prepare = functools.partial(self._prepare, names=names)
            if block == 0:  # most of it is faulting memory in
                self.checks.side_by_side(workers, prepare)
            else:  # one at a time: the seconds of first calls decide whether later blocks need them
                for worker in workers:
                    prepare(worker)
        for worker in workers:
            worker.pause()

    def _living(self, worker: Worker) -> list[Entry]:
        """The timed entries of a worker that have not failed."""
        return [entry for its_worker, entry in self.timed if its_worker is worker and entry.alive]

    def _prepare(self, worker: Worker, names: Collection[str]) -> None:
        living = self._living(worker)
        if living:
            attempt(living, worker.fresh, self.rotation)
        for entry in living:
            if entry.alive and entry.name in names:
                attempt([entry], worker.prepare, entry)

    def begin_round(self) -> None:
        self.progress.rounds(self.rounds, self.spent_s, self.budget_s, between_blocks=False)
        self.rounds += 1
        self.monitor.begin()

    def take(self, worker: Worker, entry: Entry) -> float:
        """Takes a sample of an entry and returns seconds per call. Raises RuntimeError where it fails."""
        if entry.alive:
            attempt([entry], worker.ask, entry, "inspect")
        if entry.alive:
            began = time.perf_counter()
            with self.monitor.watching(f"{self.checks.case.key} {entry.name}"):
                answer = attempt([entry], worker.ask, entry, "sample", at_least_s=SAMPLE_S)
            took_s = time.perf_counter() - began
            self.spent_s += took_s
            entry.samples_s += took_s
            worker.pause()
            if answer is not None:
                if answer["host_seconds"] is not None:
                    entry.host_s.append(answer["host_seconds"])
                return float(answer["seconds"])
        # The other entries of its worker are prepared again now, and not during their own samples.
        for other in self._living(worker):
            attempt([other], worker.prepare, other)
        worker.pause()
        raise RuntimeError(entry.reason)


def opening_s(calls_s: Sequence[float]) -> float:
    """The seconds that one round in each of the opening blocks takes, and a fifth more for what is not
    foreseen. calls_s: the seconds that a call of each entry takes"""
    sampling_s = sum(max(call_s, SAMPLE_S) for call_s in calls_s)
    untimed_s = sum(call_s for call_s in calls_s if call_s < LONG_S)
    return 1.2 * Policy().opening * (sampling_s + untimed_s)


def _kind(name: str, case: Case) -> tuple[str, ...]:
    """An entry's name, with all of a case that its ragged cases have in common with it."""
    return name, case.boundary, *(f"{size}={value}" for size, value in kept_sizes(case).items())
