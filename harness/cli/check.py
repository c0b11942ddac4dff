"""`python -m harness check`: whether one implementation is right on one case, and where and how it is
wrong."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from harness.cli.options import gathered, interruptible, seconds_option, target_device

if TYPE_CHECKING:
    from harness.run.plan import Request


def as_tuple(_: click.Context, __: click.Parameter, value: str) -> tuple[str]:
    return (value,)


@click.command()
@gathered("harness.run.plan:Request")
@click.option("--op", required=True, help="The op.")
@click.option("--impl", required=True, metavar="NAME", help="The implementation to check.")
@click.option("--case", required=True, metavar='"NAME=V ..."', help="One case.", callback=as_tuple)
@click.option("--boundary", help="What the call covers: core (default), with_quant, with_routing.")
@target_device
@click.option(
    "--cache",
    type=click.Choice(["serving", "cold", "warm"]),
    help="Which sets of operands the calls rotate over, as in `run` (default: serving).",
)
@click.option("--launch", type=click.Choice(["graph", "eager"]), help="On GPUs (default: graph).")
@click.option("--set", multiple=True, metavar="NAME=VALUE", help="An environment variable of the worker.")
@click.option("--config", metavar='"NAME=V ..."', help="Configuration of a tunable implementation.")
@click.option(
    "--save",
    metavar="DIR",
    help="Write output.pt, whole; reference.pt and sigma.pt, of the rows that were compared; and check.json, "
    "with those rows and the seeds of the operands.",
)
@click.option("--seed", type=int, help="The seed of operands (default: 0).")
@click.option("--threads", type=click.IntRange(1), help="CPU threads, as in `run`.")
@seconds_option(
    "--prepare-timeout", "900s", "The most time to prepare the implementation.", show_default=True
)
@seconds_option("--call-timeout", "120s", "The most time for one request to the worker.", show_default=True)
def check(request: Request, config: str | None, save: str | None) -> None:
    """Check one implementation on one case, untimed: is it right, and where and how is it wrong?"""
    from harness.run.execute import code_of
    from harness.run.single import check as checked

    with interruptible(""):
        found = checked(request, config, save, partial(click.echo, err=True))
    click.echo(f"{found.case.key}: {found.entry.name} is {found.entry.status or 'right'}")
    if found.entry.reason:
        click.echo(found.entry.reason)
    if found.saved:
        click.echo(f"saved: {', '.join(map(str, found.saved))}")
    sys.exit(code_of({found.entry.status or "checked"}))
