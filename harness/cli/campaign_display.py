"""What a campaign prints: its plan, a line for each case, and the results in the end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.cli.run_display import TerminalDisplay
from harness.report import case_table
from harness.report.notes import spread_lines
from harness.report.rows import CaseResult
from harness.report.terminal import plain
from harness.results.comparison import spreads
from harness.results.schema import Record, Run
from shapes.case import Case

if TYPE_CHECKING:
    from harness.campaign.execute import CampaignOutcome
    from harness.campaign.plan import PlannedJob
    from harness.cluster.driver import Driver, Task


class CampaignTables(TerminalDisplay):
    """A `harness.campaign.execute.CampaignDisplay`: results on stdout, progress on stderr."""

    def __init__(self, quiet: bool, budget_s: float) -> None:
        super().__init__(quiet, sys.stdout)
        self.began = time.monotonic()
        self.budget_s = budget_s

    def begin(self, driver: Driver, counts: Mapping[str, int]) -> None:
        """Prints when each job is expected to begin and end, and what will not fit."""
        from harness.campaign.plan import simulated

        left_s = driver.ends - driver.clock()
        self.log(plan_text(simulated(list(driver.dispatcher.jobs.values()), counts, left_s), left_s))

    def task(self, task: Task, device: str, driver: Driver) -> None:
        expected = minutes(driver.dispatcher.jobs[task.job].expected_s(task))
        what = task.job if task.key == task.job else f"{task.job}: {task.key}"
        where = f" on {device}" if len(driver.members) > 1 else ""
        self.log(f"{self._clock()}  {what}{where}, about {expected} ...")

    def case(self, step: str, run: Run, case: Case, records: Sequence[Record]) -> None:
        result = CaseResult.of(records)
        headline = plain(case_table.headline(result), 1000)
        bad = Counter(c.status for c in result.cells if c.status not in ("ok", "checked", "unsupported"))
        failed = "".join(f"; {n} {status}" for status, n in bad.items())
        self.print(f"{self._clock()}  {step}: {case.text}: {headline}{failed}")

    def command(self, step: str, code: int | None, output: str) -> None:
        how = "was stopped at its time" if code is None else f"ended with exit code {code}"
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        self.print(f"{self._clock()}  {step} {how}{f': {last}' if code else ''}")

    def end(self, outcome: CampaignOutcome) -> None:
        from tabulate import tabulate

        rows = [
            [job.name, f"{job.done} of {job.cases}", ", ".join(f"{n} {s}" for s, n in job.statuses.items())]
            for job in outcome.jobs
        ]
        self.print("")
        self.print(tabulate(rows, ["step", "done", "rows"], tablefmt="simple"))
        self.print(f"\n{minutes(outcome.wall_s)} of {minutes(self.budget_s)}; recorded in {outcome.folder}")
        for line in spread_lines(spreads(outcome.calibrations)):
            self.print(line)
        archive = outcome.archive
        self.print(f"to carry home: {archive.file}, {archive.size / 1e6:.1f} MB")
        if archive.left_out:
            self.print(f"left out of it, as it would be too large: {', '.join(archive.left_out)}")
        if any(job.done < job.cases for job in outcome.jobs):
            self.print(f"the rest: python -m harness campaign --resume {outcome.folder}")
        self.print(f"as pictures: python -m harness report {outcome.folder} --open")

    def _clock(self) -> str:
        return f"[{minutes(time.monotonic() - self.began)}]"


def plan_text(jobs: Sequence[PlannedJob], left_s: float) -> str:
    """The table of when each job would begin and end, and of what does not fit the time."""
    from tabulate import tabulate

    rows = [
        [
            job.name,
            f"{job.fit} of {job.cases}",
            "" if job.begins_s is None else minutes(job.begins_s),
            "does not fit" if job.ends_s is None else minutes(job.ends_s),
        ]
        for job in sorted(jobs, key=lambda job: (job.begins_s is None, job.begins_s))
        if job.cases
    ]
    table = tabulate(rows, ["step", "fits", "begins", "ends"], tablefmt="simple", disable_numparse=True)
    last = max((job.ends_s or 0.0 for job in jobs), default=0.0)
    return f"{table}\nabout {minutes(last)} of {minutes(left_s)}\n"


def minutes(seconds: float) -> str:
    """`3:20`"""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
