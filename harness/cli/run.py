"""`python -m harness run` checks, times and ranks the implementations of an op; `python -m harness toggle`
says what environment flags do to each. How a run goes on from here is told at the head of
harness/run/execute.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import RECORDED, interruptible, measuring

if TYPE_CHECKING:
    from harness.run.plan import Request
    from kernels.platform import Platform


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
@measuring
def toggle(request: Request, **options: Any) -> None:  # click passes untyped values
    """Show what environment flags do to each implementation, and whether they changed which kernels ran.
    `list flags` says what each flag acts on."""
    from harness.cli.run_display import RunDisplay
    from harness.machine.device import choose_device
    from harness.run.execute import run

    request_of = toggle_request(request, **options)
    with interruptible(RECORDED), RunDisplay(request) as display:
        if request.cluster:
            from harness.cluster.execute import run_on_cluster

            sys.exit(run_on_cluster(request, request_of, display))
        sys.exit(run(request_of(choose_device(request.device)), display))


def toggle_request(
    request: Request,
    flag_texts: Sequence[str],
    design: str,
    recipe: str | None,
    leave_one_out: bool,
    force: bool,
    **_: object,
) -> Callable[[Platform], Request]:
    """Returns a function that makes the request for a platform from the options of the command."""
    from harness.cli.run_display import print_note
    from harness.plan.toggle import MARGIN, ToggleRequest, plan_toggle

    request = replace(request, margin=MARGIN)
    toggled = ToggleRequest(
        request.op, request.launch, flag_texts, request.set, design, recipe, leave_one_out, force
    )

    def request_of(platform: Platform) -> Request:
        if request.resume:
            return request
        plan = plan_toggle(toggled, platform, print_note)
        if names := plan.implementations:
            return replace(request, impl=",".join(names), baseline=names[0])
        return replace(request, settings=plan.settings, flags=plan.flags)

    return request_of
