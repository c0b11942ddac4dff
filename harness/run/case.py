"""Measures a case on a device. Its entries are divided into groups that memory holds at once, and each group
is checked, timed in interleaved rounds, and checked again (checks.py). Workers make the calls."""

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

SLOW = 4.0  # `Policy.slow`: an entry so many times as slow as the fastest will not be chosen


@dataclass
class CaseMeasurer:
    """Measures the cases of a plan on a device, one after the other."""

    plan: RunPlan
    device: OwnDevice
    progress: Progress
    memory_share: float = 1.0  # of the free memory; other devices of the machine may be measured, too
    found_at_ragged: dict[tuple[str, ...], str] = field(init=False, default_factory=dict)
    """By kind of entry (see `_kind`) that was checked at ragged sizes: why it was wrong, or an empty text."""
    far: dict[tuple[str, ...], bool] = field(init=False, default_factory=dict)
    """Whether each kind that this run checked with addresses of more than 32 bits was right."""

    @property
    def platform(self) -> Platform:
        return self.device.platform

    def measure(self, case: Case, budget_s: float, max_s: float, scratch: Path) -> list[Record]:
        """Measures a case and returns its records, of which CaseDone is the last. Samples take `budget_s`
        seconds, or up to `max_s` if one round in each opening block takes more. scratch: a folder for logs"""
        able, unable, search = self._entries(case)
        measured: list[Group] = []
        not_measured: list[Group] = []  # only for the cells of entries that cannot run
        for baseline, entries in self._compared(case, able):
            members_of_groups, too_large, sets = self._groups(case, baseline, entries)
            for members in members_of_groups:
                measured.append(Group(case, members, sets, baseline_impl=baseline))
            not_measured.append(Group(case, [*unable, *too_large], sets))
        for group in measured:
            self._measure_group(group, budget_s / len(measured), max_s / len(measured), scratch)
        groups = [*not_measured, *measured]
        records, done = build_records(case, groups, self.platform, self.plan.record, search)
        return [*records, done]

    def _entries(self, case: Case) -> tuple[list[Entry], list[Entry], ConfigSearch | None]:
        """The entries that can run the case, those that cannot, and how a race found its configurations."""
        plan = self.plan
        entries: dict[str, Entry] = {}
        search = None
        for impl in plan.implementations:
            is_supported = impl.supports(case, self.platform).ok
            configs_of = plan.configs_of if is_supported else own_choice
            configs, search_of_impl = configs_of(impl, case)
            search = search_of_impl or search
            for setting, launch, config in itertools.product(plan.settings, plan.record.launches, configs):
                entry = entry_of(impl, case, self.platform, launch, setting, config)
                if entry.interpreted and plan.record.contrast == "settings":
                    entry.fail("unsupported", "it is interpreted here: there is no time to compare")
                if reason := self.found_at_ragged.get(_kind(entry.name, case)):
                    entry.fail("wrong", reason)
                entries[entry.name] = entry  # an entry that is eager in each launch mode is here once
        able = [entry for entry in entries.values() if entry.alive]
        unable = [entry for entry in entries.values() if not entry.alive and not entry.setting.is_rerun]
        return able, unable, search

    def _baseline(self, case: Case) -> str:
        """The name of the baseline's implementation; for an engine the one that it runs in this case."""
        baseline = self.plan.record.baseline
        if baseline not in engines():
            return baseline
        by_engine = choices(case.op, self.platform.arch, case.sizes, self.plan.settings[0].variables)
        return by_engine[baseline].row

    def _compared(self, case: Case, entries: list[Entry]) -> list[tuple[str, list[Entry]]]:
        """The entries that are compared with each other, with the implementation of their baseline: all
        entries, or where settings are compared, those of each implementation and launch mode."""
        if self.plan.record.contrast == "implementations" or not entries:
            return [(self._baseline(case), entries)]
        rivals: dict[tuple[str, str], list[Entry]] = {}
        for entry in entries:
            rivals.setdefault((entry.impl.name, entry.launch), []).append(entry)
        return [(impl, members) for (impl, _), members in rivals.items()]

    def _groups(
        self, case: Case, baseline: str, entries: list[Entry]
    ) -> tuple[list[list[Entry]], list[Entry], Rotation]:
        """The entries of each group that memory holds at once; those too large for it; and the rotation."""
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
        return groups, too_large, sets

    def _measure_group(self, group: Group, budget_s: float, max_s: float, scratch: Path) -> None:
        """Checks a group's entries, times them, and checks them again. budget_s, max_s: as for `measure`"""
        started = time.perf_counter()
        checks = CaseChecks(
            case=group.case,
            workers=self._workers(group.entries, scratch),
            say=self.progress.say,
            seed=self.plan.record.seed,
            ragged=self._ragged_cases(group),
        )
        try:
            checks.before(group.rotation)
            self.progress.say(MEASURING)
            self._time(checks, group, budget_s, max_s)
            checks.after(group.rotation)
            self._remember(checks, group)
        except WorkerFailure as failure:
            for entry in group.entries:
                entry.fail("error", f"the reference could not be computed or compared: {failure.reason}")
            group.rounds = Rounds()
            group.baseline = group.rerun = None
        finally:
            checks.close()
        group.setup_s = time.perf_counter() - started - group.rounds.spent_s
        group.phases = checks.phases

    def _time(self, checks: CaseChecks, group: Group, budget_s: float, max_s: float) -> None:
        """Times the right entries in interleaved rounds, the baseline twice. Budgets as for `measure`."""
        timed = checks.timed
        if not timed:
            return
        of_baseline = [(worker, entry) for worker, entry in timed if entry.impl.name == group.baseline_impl]
        worker, baseline = (of_baseline or timed)[0]  # where it failed, the first entry takes its place
        # Where settings are compared, the rerun is an entry of the group, in a worker of its own.
        rerun = next((entry for _, entry in timed if entry.setting.is_rerun), None)
        if rerun is None:
            rerun = replace(baseline, name=f"{baseline.name} (again)", host_s=[])
            timed.append((worker, rerun))
        budget_s = min(max_s, max(budget_s, opening_s([entry.call_s for _, entry in timed])))
        self.device.monitor.take_conditions()  # forgets what was seen before this case
        sampler = GroupSampler(checks, timed, group.rotation, self.device.monitor, self.progress, budget_s)
        policy = Policy(
            disturbed=self.plan.disturbed,
            margin=self.plan.record.margin,
            slow=SLOW,
            seed=self.plan.record.seed,
            baseline=baseline.name,
            rerun=rerun.name,
            budget_s=budget_s,
            begin_block=sampler.begin_block,
            begin_round=sampler.begin_round,
            end_round=self.device.monitor.end,
        )
        samples = {entry.name: functools.partial(sampler.take, worker, entry) for worker, entry in timed}
        group.rounds = self.plan.make_rounds(samples, policy)
        group.baseline = baseline
        group.rerun = rerun
        group.conditions = self.device.monitor.take_conditions()
        for _, entry in timed:
            _note_end(entry, group.rounds)

    def _remember(self, checks: CaseChecks, group: Group) -> None:
        """Notes what checks found at ragged sizes and with far addresses. Entries of the same kind in later
        cases of the run are not checked for that again: they get what was noted."""
        for entry in group.entries:
            kind = _kind(entry.name, group.case)
            self.found_at_ragged[kind] = checks.wrong_at_ragged.get(entry.name, "")
            if "far" in entry.check:
                self.far[kind] = entry.check["far"]
            elif entry.check and kind in self.far:
                entry.check["far"] = self.far[kind]

    def _ragged_cases(self, group: Group) -> list[Case]:
        """The small cases of uneven sizes at which the entries of a group are checked; none if all their
        kinds were checked before, or in a race, whose configurations are checked at their own case only."""
        kinds = {_kind(entry.name, group.case) for entry in group.entries if not entry.interpreted}
        if kinds <= self.found_at_ragged.keys() or self.plan.record.race is not None:
            return []
        return ragged_cases(self.plan.op, group.case, self.platform.arch)

    def _workers(self, entries: Sequence[Entry], scratch: Path) -> list[Worker]:
        """A worker for the entries of each setting and runtime. scratch: a folder for logs"""
        workers = []
        for number, members in enumerate(by_worker(entries)):
            log = scratch / f"{members[0].impl.runtime}-{number}.log"
            workers.append(Worker(members, self.platform, self.plan.record.threads, self.plan.deadlines, log))
        return workers


def _note_end(entry: Entry, rounds: Rounds) -> None:
    """Writes down against a timed entry why its rounds gave no result, or how it lost in a race."""
    if entry.name in rounds.dropped:
        entry.fail("error", rounds.dropped[entry.name])
    if rounds.stopped == "disturbed":
        share = f"{len(rounds.left_out)} of {len(rounds.made)} rounds"
        reason = f"too disturbed to measure, {share}: {rounds.left_out[-1].disturbed}"
        entry.fail("error", f"{reason} (without --disturbed refuse they count)")
    entry.beaten = rounds.beaten.get(entry.name, "")


@dataclass
class GroupSampler:
    """Takes the samples of a group's rounds. The monitor watches the machine; one worker works at a time."""

    checks: CaseChecks
    timed: Sequence[tuple[Worker, Entry]]
    rotation: Rotation
    monitor: Monitor
    progress: Progress
    budget_s: float
    begun: int = 0  # how many rounds were begun
    spent_s: float = 0.0  # seconds spent in samples

    def begin_block(self, block: int, names: Collection[str]) -> None:
        """Prepares the named entries anew, on operands in fresh buffers."""
        self.progress.rounds(self.begun, self.spent_s, self.budget_s)
        workers = self.checks.workers
        with self.checks.phase(PREPARING_ANEW):
            prepare = functools.partial(self._prepare, names=names)
            if block == 0:  # Most of this time memory is faulted in, which workers can do at the same time.
                self.checks.side_by_side(workers, prepare)
            else:  # Alone, because workers time the first calls (see bench.Bench.prepare).
                for worker in workers:
                    prepare(worker)
        for worker in workers:
            worker.pause()

    def _living(self, worker: Worker) -> list[Entry]:
        """The timed entries of a worker that have not failed."""
        return [entry for its_worker, entry in self.timed if its_worker is worker and entry.alive]

    def _prepare(self, worker: Worker, names: Collection[str]) -> None:
        """Moves a worker's operands to fresh buffers, and prepares those of its entries that are named."""
        living = self._living(worker)
        if living:
            attempt(living, worker.fresh, self.rotation)
        for entry in living:
            if entry.alive and entry.name in names:
                attempt([entry], worker.prepare, entry)

    def begin_round(self) -> None:
        self.progress.rounds(self.begun, self.spent_s, self.budget_s, between_blocks=False)
        self.begun += 1
        self.monitor.begin()

    def take(self, worker: Worker, entry: Entry) -> float:
        """Takes a sample of an entry; returns seconds per call. Raises RuntimeError where the entry fails."""
        if entry.alive:
            attempt([entry], worker.ask, entry, "compare_last")
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
        # The worker may have a new process. Its other entries are prepared in it now, because their own
        # samples would otherwise wait for that.
        for other in self._living(worker):
            attempt([other], worker.prepare, other)
        worker.pause()
        raise RuntimeError(entry.reason)


def opening_s(calls_s: Sequence[float]) -> float:
    """The seconds of a round in each opening block, and a fifth more, as calls vary. calls_s: the seconds of
    a call of each entry"""
    sampling_s = sum(max(call_s, SAMPLE_S) for call_s in calls_s)
    untimed_s = sum(call_s for call_s in calls_s if call_s < LONG_S)  # the untimed call before each sample
    return 1.2 * Policy().opening * (sampling_s + untimed_s)


def _kind(name: str, case: Case) -> tuple[str, ...]:
    """What one check at ragged sizes stands for: entries of this name and boundary at these kept sizes."""
    return name, case.boundary, *(f"{size}={value}" for size, value in kept_sizes(case).items())
