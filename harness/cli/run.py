"""The commands `run`, `toggle` and `check`: they rank the implementations of an op, measure what flags do to
them, and check one alone. The head of harness/run/execute.py says how a run continues."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from harness.cli import options

if TYPE_CHECKING:
    from harness.run.plan import Request
    from kernels.platform import Platform


@click.command(cls=options.Command)
@options.measuring
@click.option("--baseline", metavar="IMPL|sglang|vllm",
              help="Compare the others with it; an engine stands for what it runs by default.  [default: "
              "torch's best]")  # fmt: skip
@click.option("--published", is_flag=True, help="Show what others published of these cases, unranked.")
def run(request: Request) -> None:
    """Check and rank the implementations of an op. Each is checked against a reference, then all are timed in
    interleaved rounds."""
    measure_and_exit(request, lambda platform: request)


@click.command(cls=options.Command)
@click.option("--flag", "flag_texts", multiple=True, metavar="NAME=A[,B...]",
              help="Set this variable to each value in turn; `NAME=` is an empty value, `unset` removes "
              "it.")  # fmt: skip
@click.option("--design", type=options.OneOf(["factorial", "one-at-a-time"]), default="factorial",
              show_default=True,
              help="Measure all combinations of the flags' values, or each value alone.")  # fmt: skip
@click.option("--recipe", metavar="NAME",
              help="Set all variables of a published environment: see `list recipes`.")  # fmt: skip
@click.option("--leave-one-out", is_flag=True, help="Leave each variable out of the recipe in turn, too.")
@click.option("--force", is_flag=True, help="Also set flags that look misspelt, or can have no effect here.")
@options.measuring
def toggle(request: Request, **design: Any) -> None:  # click passes untyped values
    """Measure what environment flags do to each implementation. It also says whether a flag changed which
    kernels ran. `list flags` says what each flag acts on."""
    from harness.cli.run_display import print_note

    measure_and_exit(request, toggle_request(request, print_note, **design))


def measure_and_exit(request: Request, request_of: Callable[[Platform], Request]) -> NoReturn:
    """Measures a request on this machine or a cluster. `request_of` completes the request for a platform."""
    from harness.cli.run_display import RunDisplay
    from harness.machine.device import choose_device
    from harness.results.journal import Journal
    from harness.run import execute
    from harness.run.folder import plan_run
    from kernels.engines import engines
    from kernels.platform import detect

    # A run on this machine names its folder itself when it is interrupted.
    what_next = "finished cases are recorded, --resume RUN measures the rest" if request.cluster else ""
    with options.interruptible(what_next), RunDisplay(request) as display:
        if request.cluster:
            from harness.cluster.execute import run_on_cluster

            # Before the cluster is joined, the run is read or planned here: this raises for a mistake in the
            # request. The launch mode and an engine as the baseline are left out, as they depend on devices.
            if request.resume:
                Journal(Path(request.resume)).run()
            else:
                baseline = None if request.baseline in engines() else request.baseline
                plan_run(replace(request, launch=None, baseline=baseline), detect())
            code = run_on_cluster(request, request_of, display)
        else:
            platform = choose_device(request.device)
            code = execute.run(request_of(platform), platform, display)
    sys.exit(code)


def toggle_request(
    request: Request, log: Callable[[str], None], **design: Any
) -> Callable[[Platform], Request]:
    """Returns a function that completes a request for a platform, by the other options of `toggle`."""
    from harness.plan.toggle import MARGIN, plan_toggle

    request = replace(request, margin=MARGIN)

    def request_of(platform: Platform) -> Request:
        if request.resume:
            return request
        plan = plan_toggle(platform, log, op=request.op, launch=request.launch, common=request.set, **design)
        if plan.implementations:  # an engine chooses between them by the flag
            baseline = plan.implementations[0]
            return replace(request, impl=",".join(plan.implementations), baseline=baseline)
        return replace(request, settings=plan.settings, flags=plan.flags)

    return request_of


def _only_case(context: click.Context, option: click.Parameter, value: str) -> tuple[str]:
    """The cases of a request, of which `check` takes one."""
    return (value,)


@click.command(cls=options.Command)
@options.gathered("harness.run.plan:Request")
@click.option("--op", required=True, metavar="OP", help="Check an implementation of this op.")
@click.option("--impl", required=True, metavar="NAME", help="Check this implementation.")
@click.option("--case", required=True, metavar='"NAME=V ..."', help="Check this case.", callback=_only_case)
@click.option("--boundary", metavar="NAME", help="Check core, with_quant or with_routing.  [default: core]")
@options.target_device
@options.cache_option
@options.launch_option
@options.set_option
@click.option("--config", metavar='"NAME=V ..."', help="Make a tunable kernel use this configuration.")
@click.option("--save", metavar="DIR",
              help="Write output.pt, whole; reference.pt and sigma.pt, of the rows that were compared; "
              "check.json, with those rows and the seeds of the operands; and traceback.txt, of an "
              "exception.")  # fmt: skip
@options.seed_option
@options.threads_option
@options.prepare_timeout
@options.call_timeout
def check(request: Request, config: str | None, save: str | None) -> None:
    """Check one implementation on one case, untimed. It says whether the implementation is right there, and
    where and how it is wrong. `run` checks small uneven cases, too."""
    from harness.run.execute import code_of
    from harness.run.single import check as check_one

    with options.interruptible(""):
        checked = check_one(request, config, save, partial(click.echo, err=True))
    click.echo(f"{checked.case.key}: {checked.entry.name} is {checked.entry.status or 'right'}")
    if checked.entry.reason:
        click.echo(checked.entry.reason)
    if checked.saved:
        click.echo(f"saved: {', '.join(map(str, checked.saved))}")
    sys.exit(code_of({checked.entry.status or "checked"}))
