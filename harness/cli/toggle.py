"""`python -m harness toggle`: what environment flags do to each implementation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from harness.cli.interrupt import RECORDED, interruptible
from harness.cli.options import measuring

if TYPE_CHECKING:
    from harness.run.plan import Request
    from kernels.platform import Platform


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
def toggle(
    request: Request,
    flag_texts: tuple[str, ...],
    design: str,
    recipe: str | None,
    leave_one_out: bool,
    force: bool,
) -> None:
    """Show what environment flags do to each implementation, and whether they changed which kernels ran.
    `list flags` says what each flag acts on."""
    from harness.cli.run_display import RunDisplay
    from harness.machine.device import choose_device
    from harness.run.execute import run

    request_of = toggle_request(request, flag_texts, design, recipe, leave_one_out, force)
    with interruptible(RECORDED):
        if request.cluster:
            from harness.cluster.execute import run_on_cluster

            with RunDisplay(request) as display:
                sys.exit(run_on_cluster(request, request_of, display))
        request = request_of(choose_device(request.device))
        with RunDisplay(request) as display:
            sys.exit(run(request, display))


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
    from dataclasses import replace

    from harness.cli.run_display import print_note
    from harness.plan.toggle import MARGIN, ToggleRequest, plan_toggle

    request = replace(request, margin=MARGIN)

    def request_of(platform: Platform) -> Request:
        if request.resume:
            return request
        toggled = ToggleRequest(
            op=request.op,
            launch=request.launch,
            flags=flag_texts,
            common=request.set,
            design=design,
            recipe=recipe,
            leave_one_out=leave_one_out,
            force=force,
        )
        plan = plan_toggle(toggled, platform, print_note)
        if names := plan.implementations:
            return replace(request, impl=",".join(names), baseline=names[0])
        return replace(request, settings=plan.settings, flags=plan.flags)

    return request_of
