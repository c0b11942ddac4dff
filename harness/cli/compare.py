"""`python -m harness compare RUN_A RUN_B`: what became faster or slower between two recorded runs."""

from __future__ import annotations

from dataclasses import replace

from harness.cli.run import RunDisplay
from harness.errors import FAILED, OK, NothingRan, UsageError
from harness.files import write
from harness.plan import revisions
from harness.report.comparison_table import comparison_table
from harness.results.comparison import compared
from harness.results.recorded import incompatibilities, read
from harness.run.execute import run
from harness.run.request import Request


def compare(run_a: str, run_b: str, force: bool, markdown: str | None) -> int:
    """Prints a table; exit code 1 on a regression. Raises UsageError for runs that are not comparable."""
    a, b = read(run_a), read(run_b)
    reasons = incompatibilities(a, b)
    if reasons and not force:
        raise UsageError(
            f"{run_a} and {run_b} cannot be compared: {'; '.join(reasons)} (--force marks it only)"
        )
    found = compared(a, b)
    if not found.rows:
        raise NothingRan(
            f"no cell has a time in both runs: {'; '.join(found.missing[:3]) or 'both are empty'}"
        )
    found.notes[:0] = [f"NOT COMPARABLE, {reason}" for reason in reasons]
    print(comparison_table(a, b, found, "simple"))
    if markdown:
        write(markdown, comparison_table(a, b, found, "github") + "\n")
    return FAILED if found.regressions else OK


def compare_revisions(names: tuple[str, str], request: Request) -> int:
    """Each revision's kernels are an arm of a run. Raises UsageError for one that git does not know."""
    request = replace(request, arms=revisions.arms(names))
    return run(request, RunDisplay(request))
