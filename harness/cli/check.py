"""`python -m harness check`: whether one implementation is right on one case, and where and how it is
wrong."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from harness.cli import options

if TYPE_CHECKING:
    from harness.run.single import CheckRequest


@click.command()
@options.gathered("harness.run.single:CheckRequest")
@click.option("--op", required=True, help="The op.")
@click.option("--impl", required=True, metavar="NAME", help="The implementation to check.")
@click.option("--case", required=True, metavar='"NAME=V ..."', help="One case.")
@options.boundary_option
@options.target_device
@options.cache_option
@click.option("--launch", type=click.Choice(["graph", "eager"]), help="On GPUs (default: graph).")
@options.set_option
@click.option("--config", metavar='"NAME=V ..."', help="Configuration of a tunable implementation.")
@click.option(
    "--save",
    metavar="DIR",
    help="Write output.pt, whole; reference.pt and sigma.pt, of the rows that were compared; and check.json, "
    "with those rows and the seeds of the operands.",
)
@options.seed_option
@options.threads_option
@options.prepare_timeout
@options.call_timeout
def check(request: CheckRequest) -> None:
    """Check one implementation on one case, untimed: is it right, and where and how is it wrong?"""
    from harness.run.single import check as checked

    with options.interruptible(""):
        found = checked(request, partial(click.echo, err=True))
    click.echo(f"{found.case.key}: {found.entry.name} is {found.verdict}")
    if found.entry.reason:
        click.echo(found.entry.reason)
    if found.saved:
        click.echo(f"saved: {', '.join(map(str, found.saved))}")
    sys.exit(found.exit_code)
