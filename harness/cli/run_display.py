"""Tables, notes and progress of a run, printed in the terminal: `run`, `toggle`, `compare`, `tune`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.catalogue.published import figures
from harness.progress import Progress
from harness.report import arm_table, case_table
from harness.report.tune_table import race_table, stored_text
from harness.results.schema import Record, Run
from shapes.case import Case

if TYPE_CHECKING:
    from harness.run.request import Request
    from harness.run.session import Outcome


class RunDisplay:
    """A `harness.run.execute.Display`. Tables go to stdout, or to stderr where JSON or CSV goes to stdout;
    nothing is printed where the request is quiet."""

    def __init__(self, request: Request) -> None:
        self.progress = Progress(request.quiet)
        self.quiet = request.quiet
        self.file = sys.stderr if "-" in (request.json, request.csv) else sys.stdout
        self.published = figures() if request.published else []

    def log(self, line: str) -> None:
        """A line about what will be measured, before anything is."""
        if not self.quiet:
            print(line, file=sys.stderr)

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        """The table of a finished case."""
        arms = run.contrast == "arms"
        table = arm_table.case_table(records, run) if arms else case_table.case_table(records)
        tables = [table, case_table.published(self.published, case)]
        self._print("\n" + "\n".join(filter(None, tables)) + "\n")

    def end(self, run: Run, outcome: Outcome) -> None:
        """What the arms come to, what the budget did not reach, and where the run is recorded."""
        if run.contrast == "arms":
            self._print(arm_table.conclusion(outcome.records, run))
        self._print(end_text(outcome))

    def _print(self, text: str) -> None:
        if not self.quiet:
            print(text, file=self.file, flush=True)


class RaceTables:
    """A `harness.tune.race.RaceDisplay`: tables on stdout, progress and log on stderr."""

    def __init__(self) -> None:
        self.progress = Progress(quiet=False)

    def log(self, line: str) -> None:
        print(line, file=sys.stderr)

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        print(f"\n{race_table(records)}")

    def stored(self, file: Path, choice: Mapping[str, Any] | None) -> None:
        if choice is None:
            text = "nothing stored: there is no verdict on the configuration that was used before"
        else:
            text = f"stored in {file}: {stored_text(choice)}"
        print(f"{text}\n", flush=True)

    def end(self, run: Run, outcome: Outcome) -> None:
        print(end_text(outcome))


def end_text(outcome: Outcome) -> str:
    """What the budget did not reach, what was spent, and where it is recorded."""
    left_out = case_table.left_out(outcome.left_out, outcome.budget_s)
    cases = f"{outcome.cases} case" + "s" * (outcome.cases != 1)
    spent = (
        f"{cases}; measuring {outcome.spent_s:.1f} s of {outcome.budget_s:g} s, "
        f"set-up and checks {outcome.setup_s:.1f} s; recorded in {outcome.folder}"
    )
    return f"{left_out}\n{spent}" if left_out else spent


def print_note(line: str) -> None:
    """A note on stderr about what was asked for."""
    print(f"note: {line}", file=sys.stderr)
