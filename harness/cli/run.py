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


@click.command(cls=options.Command)
@options.measuring
@click.option(
    "--baseline",
    metavar="IMPL|sglang|vllm",
    help="Compare the others with it; an engine stands for what it runs by default.  [default: torch's best]",
)
@click.option("--published", is_flag=True, help="Show what others published of these cases, unranked.")
def run(request: Request) -> None:
    """Check and rank the implementations of an op. Each is checked against a reference, then all are timed in
    interleaved rounds."""
    measure(request, lambda _: request)


@click.command(cls=options.Command)
@click.option(
    "--flag",
    "flag_texts",
    multiple=True,
    metavar="NAME=A[,B...]",
    help="Set this variable to each value in turn; `NAME=` is an empty value, `unset` removes it.",
)
@click.option(
    "--design",
    type=options.OneOf(["factorial", "one-at-a-time"]),
    default="factorial",
    show_default=True,
    help="Measure all combinations of the flags' values, or each value alone.",
)
@click.option(
    "--recipe", metavar="NAME", help="Set all variables of a published environment: see `list recipes`."
)
@click.option("--leave-one-out", is_flag=True, help="Leave each variable out of the recipe in turn, too.")
@click.option("--force", is_flag=True, help="Also set flags that are unknown, or can have no effect here.")
@options.measuring
def toggle(request: Request, **design: Any) -> None:  # click passes untyped values
    """Measure what environment flags do to each implementation. It also says whether a flag changed which
    kernels ran. `list flags` says what each flag acts on."""
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
    from kernels.engines import engines
    from kernels.platform import detect

    # Of a cluster the folder is not known here.
    recorded = "finished cases are recorded, --resume RUN measures the rest"
    with options.interruptible(recorded if request.cluster else ""), RunDisplay(request) as display:
        if request.cluster:
            from harness.cluster.execute import run_on_cluster

            if request.resume:
                Journal(Path(request.resume)).run()
            else:  # what depends on its devices is known when it is joined
                named = request.baseline if request.baseline not in engines() else None
                select_all(replace(request, launch=None, baseline=named), detect())
            sys.exit(run_on_cluster(request, request_of, display))
        platform = choose_device(request.device)
        sys.exit(execute.run(request_of(platform), platform, display))


def toggle_request(
    request: Request, log: Callable[[str], None], **design: Any
) -> Callable[[Platform], Request]:
    """Returns what makes the request for a platform. design: options of `toggle`, as plan_toggle has them"""
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


@click.command(cls=options.Command)
@options.gathered("harness.run.plan:Request")
@click.option("--op", required=True, metavar="OP", help="Check an implementation of this op.")
@click.option("--impl", required=True, metavar="NAME", help="Check this implementation.")
@click.option("--case", required=True, metavar='"NAME=V ..."', help="Check this case.", callback=_as_tuple)
@click.option("--boundary", metavar="NAME", help="Check core, with_quant or with_routing.  [default: core]")
@options.target_device
@options.cache_option
@options.launch_option
@options.set_option
@click.option("--config", metavar='"NAME=V ..."', help="Make a tunable kernel use this configuration.")
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
    """Check one implementation on one case, untimed. It says whether the implementation is right there, and
    where and how it is wrong. `run` checks small uneven cases, too."""
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
