"""What `run`, `toggle`, `compare` and `tune` print in the terminal: tables, notes and progress."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from harness.catalogue.published import figures
from harness.paths import command
from harness.progress import Progress
from harness.report import case_table, comparison_table, notes
from harness.report.conclusion import conclusion
from harness.report.rows import CaseResult
from harness.report.summary import summary
from harness.report.terminal import COMMAND, show
from harness.report.text import counted, grouped
from harness.results.comparison import spreads
from harness.results.earlier import changed_since
from harness.results.schema import CaseDone, Cell, Record, Run
from shapes.case import Case, text_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from typing_extensions import Self

    from harness.run.execute import Outcome
    from harness.run.plan import Request


class TerminalDisplay:
    """Prints text above the line of progress, which the end of the context removes. Quiet, it only logs."""

    def __init__(self, quiet: bool, file: TextIO) -> None:
        self.progress = Progress(quiet)
        self.file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.clear()

    def log(self, line: str) -> None:
        self.progress.note(line)

    def print(self, what: RenderableType) -> None:
        if not self.progress.quiet:
            self.progress.clear()
            show(what, self.file)


class RunDisplay(TerminalDisplay):
    """A `harness.run.execute.Display`. Tables go to stdout, or to stderr where JSON or CSV goes to stdout."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.quiet, sys.stderr if "-" in (request.json, request.csv) else sys.stdout)
        self.published = figures() if request.published else []
        self.resumed = request.resume
        self.measured = 0  # cases so far

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        self.measured += 1
        self.print("")
        self.print(case_table.case_table(records, run))
        published = case_table.published(self.published, case)
        if published is not None:
            self.print(published)
        self.print("")

    def end(self, run: Run, outcome: Outcome) -> None:
        """Prints what was measured and what was not, what all cases say together, and what changed."""
        self.print(end_text(outcome))
        if self.resumed and not self.measured and not outcome.left_out:
            again = command("show", Path(self.resumed))
            self.print(f"nothing was left to measure; its tables:\n{COMMAND}{again}")
        conclusions = conclusions_of(run, outcome.records)
        if run.contrast == "implementations" and not self.progress.quiet:
            changed = changed_since(outcome.folder)
            if changed:
                conclusions.append(comparison_table.since(*changed))
        if conclusions:
            self.print("")
        for text in conclusions:
            self.print(text)


def conclusions_of(run: Run, records: Sequence[Record]) -> list[RenderableType]:
    """What all cases say together; for a run that compares settings, which setting to take."""
    # Each record of a finished case has `case`, but the class Record does not.
    by_case = grouped(records, lambda record: getattr(record, "case", ""))
    cases = [CaseResult.of(of_case) for of_case in by_case.values()]
    return [conclusion(cases, run)] if run.contrast == "settings" else [*summary(cases, run)]


class RaceTables(TerminalDisplay):
    """A `harness.tune.race.RaceDisplay`. Tables go to stdout, progress and log to stderr."""

    def __init__(self) -> None:
        super().__init__(quiet=False, file=sys.stdout)

    def case(self, run: Run, case: Case, records: Sequence[Record]) -> None:
        to_print = [record for record in records if not _was_eliminated(record)]
        self.print("")
        self.print(case_table.case_table(to_print, run))
        search = next(record for record in records if isinstance(record, CaseDone)).search
        if search:
            pruned = ", ".join(f"{count} {why}" for why, count in search.pruned.items())
            self.print(
                f"of {search.considered} configurations {search.raced} were raced, "
                f"{len(records) - len(to_print)} of them beaten in the eliminations"
                + (f"; not raced: {pruned}" if pruned else "")
            )

    def stored(self, file: Path | None, choice: Mapping[str, Any] | None) -> None:
        """file: None where the configuration that was used before stays; choice: None without a verdict"""
        if choice is None:
            self.print("nothing stored: there is no verdict on the configuration that was used before\n")
            return
        where = f"stored in {file}" if file else f"leave it: {choice['before']} stays, nothing is written"
        config, against = text_of(choice["config"]), text_of(choice["against"])
        ratio = f"{choice['ratio']}x ({choice['low']} to {choice['high']})"
        self.print(f"{where}: {config}, {choice['verdict']} against {against}: {ratio}\n")

    def end(self, run: Run, outcome: Outcome) -> None:
        self.print(end_text(outcome))


def _was_eliminated(record: Record) -> bool:
    """Whether it is a configuration that an elimination of a race beat: it has a time, but no samples."""
    return isinstance(record, Cell) and record.status == "ok" and not record.samples.seconds


def end_text(outcome: Outcome) -> str:
    """The text at the end of a run: what was measured in what time, where it is, and what was left out."""
    cells = [record for record in outcome.records if isinstance(record, Cell)]
    done = [record for record in outcome.records if isinstance(record, CaseDone)]
    measured_s, setup_s = sum(case.measured_s for case in done), sum(case.setup_s for case in done)
    lines = [
        f"{counted(outcome.cases)}: {notes.time_spent(measured_s, setup_s + outcome.before_s)}",
        f"recorded in {outcome.folder}",
        f"as pictures:\n{COMMAND}{command('report', outcome.folder, '--open')}",
    ]
    left_out = notes.left_out(outcome.left_out, cells, outcome.budget_s)
    if left_out:
        to_resume = command("run", "--resume", outcome.folder, "--budget", "5m")
        lines.append(f"{left_out}; to measure more:\n{COMMAND}{to_resume}")
    lines += notes.spread_lines(spreads(outcome.calibrations))
    return "\n".join(line for line in [*lines, notes.disturbance(done)] if line)


def print_note(line: str) -> None:
    show(f"note: {line}", sys.stderr)
