"""`python -m harness compare`: what became faster or slower between two recorded runs, or two commits."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from harness.cli.options import RECORDED, interruptible, measuring

if TYPE_CHECKING:
    from harness.run.plan import Request


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN_A RUN_B]")
@click.option("--revisions", nargs=2, metavar="A B", help="Measure two commits' kernels now, interleaved.")
@click.option("--force", is_flag=True, help="Compare runs of different machines or terms too, and mark it.")
@click.option("--markdown", metavar="FILE|-", help="Also write the report there, for a pull request.")
@measuring
def compare(
    request: Request,
    runs: tuple[str, ...],
    revisions: tuple[str, str] | None,
    force: bool,
    markdown: str | None,
) -> None:
    """Show what became faster or slower between two recorded runs, or between two revisions of this
    repository (the options from --op on are for revisions). The exit code is 1 if something regressed."""
    if revisions and not runs:
        from harness.cli.run_display import RunDisplay
        from harness.plan.settings import revision_settings
        from harness.run.execute import run

        # The kernels of each revision are a setting.
        request = replace(request, settings=revision_settings(revisions))
        with interruptible(RECORDED), RunDisplay(request) as display:
            sys.exit(run(request, display))
    if len(runs) != 2 or revisions:
        raise click.UsageError("name two runs, or --revisions A B and an --op")
    sys.exit(compare_runs(runs[0], runs[1], force, markdown))


def compare_runs(run_a: str, run_b: str, force: bool, markdown: str | None) -> int:
    """Prints the table; returns the exit code, FAILED on a regression. Raises UsageError for runs that cannot
    be compared, NothingRan where no cell has a time in both."""
    from harness.errors import FAILED, OK, NothingRan, UsageError
    from harness.files import write
    from harness.report.comparison_table import comparison_markdown, comparison_table
    from harness.report.terminal import show
    from harness.results.comparison import compared
    from harness.results.read import read

    a, b = read(run_a), read(run_b)
    comparison = compared(a, b)
    if comparison.incompatible and not force:
        reasons = "; ".join(comparison.incompatible)
        raise UsageError(f"{run_a} and {run_b} cannot be compared: {reasons} (--force marks it only)")
    if not comparison.rows:
        missing = "; ".join(comparison.missing[:3]) or "both are empty"
        raise NothingRan(f"no cell has a time in both runs: {missing}")
    show(comparison_table(a, b, comparison), sys.stdout)
    if markdown:
        write(markdown, comparison_markdown(a, b, comparison) + "\n")
    return FAILED if comparison.regressions else OK
