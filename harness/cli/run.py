"""`python -m harness run`: progress, tables and the end of a run, in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.catalogue.published import figures
from harness.progress import Progress
from harness.report import arm_table, case_table
from harness.results.schema import Record, Run
from harness.run.request import Request
from harness.run.session import Outcome
from shapes.case import Case


class RunDisplay:
    """Tables on stdout, or on stderr where data go to stdout; progress and log on stderr; quiet: nothing."""

    def __init__(self, request: Request) -> None:
        self.quiet = request.quiet
        self.progress = Progress(request.quiet)
        self.tables = sys.stderr if "-" in (request.json, request.csv) else sys.stdout
        self.published = figures() if request.published else []

    def log(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr)

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        if self.quiet:
            return
        arms = run.contrast == "arms"
        table = arm_table.case_table(records, run) if arms else case_table.case_table(records)
        shown = [table, case_table.published(self.published, case)]
        print("\n" + "\n".join(filter(None, shown)) + "\n", file=self.tables, flush=True)

    def end(self, run: Run, outcome: Outcome) -> None:
        if self.quiet:
            return
        if run.contrast == "arms":
            print(arm_table.conclusion(outcome.records, run), file=self.tables)
        print(end_text(outcome), file=self.tables)


def end_text(outcome: Outcome) -> str:
    """What the budget did not reach, what was spent, and where it is recorded."""
    left_out = case_table.left_out(outcome.left_out, outcome.budget_s)
    cases = f"{outcome.cases} case" + "s" * (outcome.cases != 1)
    spent = (
        f"{cases}; measuring {outcome.spent_s:.1f} s of {outcome.budget_s:g} s, "
        f"set-up and checks {outcome.setup_s:.1f} s; recorded in {outcome.folder}"
    )
    return f"{left_out}\n{spent}" if left_out else spent
