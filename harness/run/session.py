"""A run from its first case to its last: budget, journal."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.files import JournalFull
from harness.plan import budget
from harness.results.journal import Journal
from harness.results.schema import Calibration, CaseDone, Record
from harness.run.measurer import CaseMeasurer
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
    calibrations: of its devices, where several measured it
    """

    records: list[Record]
    cases: int
    left_out: list[Case]
    before_s: float
    budget_s: float
    folder: Path
    calibrations: Sequence[Calibration] = ()


@dataclass
class Session:
    """Measures cases, one after the other.

    on_case: is given each finished case's records
    records: of each finished case, by its key
    spent_s: of the budget
    """

    measurer: CaseMeasurer
    journal: Journal
    on_case: OnCase
    spent_s: float = 0.0
    left_out: list[Case] = field(default_factory=list)
    records: dict[str, list[Record]] = field(default_factory=dict)

    def run(self, cases: Sequence[Case]) -> None:
        """Measures the cases that fit the rest of the budget, heaviest first, and notes the others."""
        plan, queue = self.measurer.plan, list(cases)
        with tempfile.TemporaryDirectory(prefix="deepseek-kernel-bench-") as folder:
            while queue:
                remaining = plan.budget_s - self.spent_s
                if self.spent_s and remaining < ENOUGH * plan.per_case_s:
                    break
                share_s, reached = budget.allowance(remaining, queue, plan.per_case_s)
                case = queue.pop(0)
                self.measurer.progress.case(case, reached, share_s)
                self._record(case, self.measurer.measure(case, share_s, remaining, Path(folder)))
        self.left_out = queue

    def _record(self, case: Case, records: list[Record]) -> None:
        self.spent_s += sum(record.measured_s for record in records if isinstance(record, CaseDone))
        self.records[case.key] = records
        try:
            keep(self.journal, records)
        finally:
            self.on_case(case, records)


def keep(journal: Journal, records: Sequence[Record]) -> None:
    """Adds a finished case to the journal; where there is no room its lines go to stderr, and JournalFull is
    raised."""
    try:
        journal.append(records)
    except JournalFull:
        for record in records:
            print(record.model_dump_json(), file=sys.stderr)
        raise
