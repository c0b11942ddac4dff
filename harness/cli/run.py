"""`python -m harness run` checks, times and ranks the implementations of an op; `python -m harness toggle`
says what environment flags do to each; `python -m harness check` checks one implementation alone. How a run
goes on from here is told at the head of harness/run/execute.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli import options

if TYPE_CHECKING:
    from harness.run.plan import Request
    from kernels.platform import Platform


@click.command()
@options.measuring
@click.option(
    "--baseline",
    metavar="IMPL|sglang|vllm",
    help="Compare the others with it; an engine stands for what it runs by default.  [default: torch's best]",
)
@click.option("--published", is_flag=True, help="Show what others published of these cases, unranked.")
def run(request: Request) -> None:
    """Rank implementations of an op: each checked against a reference, then timed in interleaved rounds."""
    measure(request, lambda _: request)


@click.command()
@click.option(
    "--flag",
    "flag_texts",
    multiple=True,
    metavar="NAME=A[,B...]",
    help="A variable and its values; `NAME=` is an empty value, `unset` removes the variable.",
)
@click.option(
    "--design",
    type=click.Choice(["factorial", "one-at-a-time"]),
    default="factorial",
    show_default=True,
    help="All combinations of the flags' values, or each value alone.",
)
@click.option(
    "--recipe", metavar="NAME", help="All variables of a documented environment; see `list recipes`."
)
@click.option("--leave-one-out", is_flag=True, help="The recipe without each of its variables in turn.")
@click.option("--force", is_flag=True, help="Also set flags that are unknown, or can have no effect here.")
@options.measuring
def toggle(request: Request, **design: Any) -> None:  # click passes untyped values
    """Show what environment flags do to each implementation, and whether they changed which kernels ran.
    `list flags` says what each flag acts on."""
    from harness.cli.run_display import print_note

    measure(request, toggle_request(request, print_note, **design))


def measure(request: Request, request_of: Callable[[Platform], Request]) -> None:
    """Measures on this machine or a cluster, and exits.

    request_of: makes the request for a platform from the one that the command was given
    """
    from harness.cli.run_display import RunDisplay
    from harness.machine.device import choose_device
    from harness.results.journal import Journal
    from harness.run import execute
    from harness.run.folder import select_all
    from kernels.platform import detect

    with options.interruptible(options.RECORDED if request.cluster else ""), RunDisplay(request) as display:
        if request.cluster:
            from harness.cluster.execute import run_on_cluster

            if request.resume:
                Journal(Path(request.resume)).run()
            else:  # launch modes depend on its devices, which are known when it is joined
                select_all(replace(request, launch=None), detect())
            sys.exit(run_on_cluster(request, request_of, display))
        platform = choose_device(request.device)
        sys.exit(execute.run(request_of(platform), platform, display))


def toggle_request(
    request: Request, log: Callable[[str], None], **design: Any
) -> Callable[[Platform], Request]:
    """Returns a function that makes the request for a platform. design: the options of `toggle` alone, as
    plan_toggle takes them"""
    from harness.plan.toggle import MARGIN, plan_toggle

    request = replace(request, margin=MARGIN)

    def request_of(platform: Platform) -> Request:
        if request.resume:
            return request
        plan = plan_toggle(platform, log, op=request.op, launch=request.launch, common=request.set, **design)
        if names := plan.implementations:
            return replace(request, impl=",".join(names), baseline=names[0])
        return replace(request, settings=plan.settings, flags=plan.flags)

    return request_of


def _as_tuple(_: click.Context, __: click.Parameter, value: str) -> tuple[str]:
    return (value,)


@click.command()
@options.gathered("harness.run.plan:Request")
@click.option("--op", required=True, help="The op.")
@click.option("--impl", required=True, metavar="NAME", help="The implementation to check.")
@click.option("--case", required=True, metavar='"NAME=V ..."', help="One case.", callback=_as_tuple)
@click.option("--boundary", help="What the call covers: core (default), with_quant, with_routing.")
@options.target_device
@options.cache_option
@click.option("--launch", type=click.Choice(["graph", "eager"]), help="On GPUs (default: graph).")
@options.set_option
@click.option("--config", metavar='"NAME=V ..."', help="Configuration of a tunable implementation.")
@click.option(
    "--save",
    metavar="DIR",
    help="Write output.pt, whole; reference.pt and sigma.pt, of the rows that were compared; check.json, "
    "with those rows and the seeds of the operands; and traceback.txt, of an exception.",
)
@options.seed_option
@options.threads_option
@options.prepare_timeout
@options.call_timeout
def check(request: Request, config: str | None, save: str | None) -> None:
    """Check one implementation on one case, untimed: is it right, and where and how is it wrong?"""
    from harness.run.execute import code_of
    from harness.run.single import check as checked

    with options.interruptible(""):
        found = checked(request, config, save, partial(click.echo, err=True))
    click.echo(f"{found.case.key}: {found.entry.name} is {found.entry.status or 'right'}")
    if found.entry.reason:
        click.echo(found.entry.reason)
    if found.saved:
        click.echo(f"saved: {', '.join(map(str, found.saved))}")
    sys.exit(code_of({found.entry.status or "checked"}))
