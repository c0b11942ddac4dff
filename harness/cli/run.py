"""`python -m harness run`: checks, times and ranks the implementations of an op. How a run goes on from
here is told at the head of harness/run/execute.py."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from harness.cli.options import RECORDED, interruptible, measuring

if TYPE_CHECKING:
    from harness.run.plan import Request


@click.command()
@measuring
@click.option("--baseline", help="Compare with this one (default: the op's best torch implementation).")
@click.option("--published", is_flag=True, help="Show what others published of these cases, unranked.")
def run(request: Request) -> None:
    """Rank implementations of an op: each checked against a reference, then timed in interleaved rounds."""
    from harness.cli.run_display import RunDisplay
    from harness.run import execute

    with interruptible(RECORDED), RunDisplay(request) as display:
        if request.cluster:
            from harness.cluster.execute import run_on_cluster

            sys.exit(run_on_cluster(request, lambda _: request, display))
        sys.exit(execute.run(request, display))
