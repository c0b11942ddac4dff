"""Jobs for devices: the cases of a run, the calibration of each device, a command as a whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from harness import files
from harness.cluster.dispatch import Task
from harness.cluster.orders import CaseOrder, CommandDone, CommandOrder, Opened, Order
from harness.errors import NOTHING_RAN
from harness.files import JournalFull, JsonObject
from harness.plan import budget
from harness.results.journal import Journal
from harness.results.schema import Calibration, CaseDone, Cell, DeviceUsed, Record
from harness.run.execute import ENOUGH, keep
from harness.run.folder import finished_cases
from harness.run.plan import RunPlan, case_of
from harness.run.request import Request
from shapes.case import Case

ASIDE_S = {"smoke": 15.0, "cpu": 60.0, "gpu": 30.0}
"""Of a case beside its measuring, before one was seen: what runs in results/epyc-zen4-2core took. No GPU has
been seen yet: a guess."""

MOST = 3.0
"""Times what a case is worth, where its calls are so slow that their first rounds take longer."""

OnRecords = Callable[[Case, list[Record]], None]
OnCommand = Callable[[str, CommandDone], None]


def tasks(lane: str, keys: Iterable[str], per_case_s: float, suite: str, kind: str) -> list[Task]:
    """Of cases; kind: of platform"""
    aside_s = ASIDE_S["smoke" if suite == "smoke" else "cpu" if kind == "cpu" else "gpu"]
    return [Task(lane, key, per_case_s, aside_s) for key in keys]


@dataclass
class RunJob:
    """The unfinished cases of a run.

    request:      what its plan does not say again
    devices:      how many share its cases: its budget is each one's; 0: each case has what it is worth at
                  least, and the wall-clock is the budget
    on_case:      is given each finished case's records
    calibrations: of all devices, as far as they are known
    left_out:     cases that it did not reach
    """

    name: str
    type: str
    rank: int
    journal: Journal
    plan: RunPlan
    request: Request
    on_case: OnRecords
    devices: int
    calibrations: Sequence[Calibration] = ()
    left_out: list[Case] = field(default_factory=list)

    def __post_init__(self) -> None:
        finished = finished_cases(self.journal, self.plan.retry)
        done = [r for records in finished.values() for r in records if isinstance(r, CaseDone)]
        self.spent_s = sum(record.measured_s for record in done)
        self.by = {device.name for device in self.journal.devices()}
        self.met: set[str] = set()
        self.planned = {planned.key: planned for planned in self.plan.record.cases}
        # Those that are made again come last: what broke may break again.
        before = self.journal.finished()
        order = sorted(self.planned, key=lambda key: key in before)
        self.waiting = {key: self.planned[key] for key in order if key not in finished}
        self.given: dict[str, float] = {}
        cells = [r for records in finished.values() for r in records if isinstance(r, Cell)]
        self.statuses = Counter[str](cell.status for cell in cells)

    def tasks(self) -> Sequence[Task]:
        record = self.plan.record
        kind = record.provenance["machine"]["platform"]
        return tasks(self.name, self.waiting, self.plan.per_case_s, record.suite, kind)

    def order(self, task: Task, left_s: float) -> CaseOrder | None:
        plan = self.plan
        share_s = plan.per_case_s
        most_s = MOST * share_s
        if self.devices:
            most_s = plan.budget_s * self.devices - self.spent_s - sum(self.given.values())
            if (self.spent_s or self.given) and most_s < ENOUGH * plan.per_case_s:
                return None
            reach = max(1, int(most_s // plan.per_case_s))
            others = (p for key, p in self.waiting.items() if key != task.key)
            queue = [case_of(p) for p in (self.planned[task.key], *islice(others, reach))]
            share_s, _ = budget.allowance(most_s, queue, plan.per_case_s)
        del self.waiting[task.key]
        self.given[task.key] = share_s
        record = plan.record.model_copy(update={"cases": [self.planned[task.key]]})
        return CaseOrder(record, self.request, task.key, min(share_s, left_s), min(most_s, left_s))

    def take_back(self, task: Task) -> None:
        self.given.pop(task.key, None)
        self.waiting[task.key] = self.planned[task.key]

    def take(self, task: Task, result: list[Record] | CommandDone, by: Opened, wall_s: float) -> float:
        assert isinstance(result, list)
        done = next(record for record in result if isinstance(record, CaseDone))
        self.given.pop(task.key, None)
        self.spent_s += done.measured_s
        self.statuses.update(record.status for record in result if isinstance(record, Cell))
        news = self._news(by.used)
        try:
            keep(self.journal, [*news, *result])
        finally:
            self.on_case(case_of(self.planned[task.key]), result)
        return done.measured_s

    def _news(self, used: DeviceUsed) -> list[Record]:
        """With a device's first case comes who it is, and its calibrations, which a kill would lose later."""
        news: list[Record] = [] if used.name in self.by else [used]
        if used.name not in self.met:
            news += [calibration for calibration in self.calibrations if calibration.device == used.name]
        self.by.add(used.name)
        self.met.add(used.name)
        return news

    def joined(self, device: Opened) -> Sequence[Task]:
        return []

    def end(self) -> None:
        self.left_out = [case_of(planned) for planned in self.waiting.values()]
        if mine := [calibration for calibration in self.calibrations if calibration.device in self.met]:
            known = self.journal.calibrations()
            keep(self.journal, [calibration for calibration in mine if calibration not in known])


@dataclass
class CommandJob:
    """A command of Python's, done when its files are in its folder, `done.json` the last of them.

    arguments:  with `{out}` for its folder
    expected_s: its wall-clock; most_s: when it is killed
    """

    name: str
    type: str
    rank: int
    folder: Path
    arguments: Sequence[str]
    expected_s: float
    most_s: float
    on_done: OnCommand

    @property
    def done(self) -> Path:
        return self.folder / "done.json"

    @property
    def statuses(self) -> dict[str, int]:
        """`ok`, or `error` of a command that failed; of one that could not do anything here neither."""
        try:
            code = json.loads(self.done.read_text())["code"]
        except (OSError, ValueError, KeyError):
            return {}
        return {} if code == NOTHING_RAN else {"error" if code else "ok": 1}

    def tasks(self) -> Sequence[Task]:
        return [] if self.done.exists() else [Task(self.name, self.name, 0.0, self.expected_s)]

    def order(self, task: Task, left_s: float) -> Order | None:
        return CommandOrder(self.arguments, min(left_s, self.most_s))

    def take_back(self, task: Task) -> None:
        pass

    def take(self, task: Task, result: list[Record] | CommandDone, by: Opened, wall_s: float) -> float:
        assert isinstance(result, CommandDone)
        for name, content in result.files.items():
            self._write(name, content)
        self.on_done(self.name, result)
        if result.code is None:  # killed at its time: another time may do
            return 0.0
        facts: JsonObject = {
            "arguments": list(self.arguments),
            "code": result.code,
            "seconds": round(wall_s, 1),
            "device": by.used.name,
            "provenance": by.facts.provenance,
            "output": result.output,
        }
        self._write(self.done.name, (json.dumps(facts, indent=1) + "\n").encode())
        return 0.0

    def _write(self, name: str, content: bytes) -> None:
        try:
            files.replace(self.folder / name, content)
        except OSError as error:
            raise JournalFull(f"cannot write to {self.folder / name}: {error.strerror}") from None

    def joined(self, device: Opened) -> Sequence[Task]:
        return []

    def end(self) -> None:
        pass
