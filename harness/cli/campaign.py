"""`python -m harness campaign`: all that a machine, or a cluster, can tell in a given time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli import options
from harness.errors import HarnessError, NothingRan, UsageError, one_line
from harness.paths import RESULTS, command

if TYPE_CHECKING:
    from harness.campaign.execute import CampaignRequest
    from harness.campaign.plan import Step
    from harness.cli.campaign_display import CampaignTables
    from harness.cluster.driver import Pool
    from harness.run.plan import Request
    from harness.tune.race import TuneRequest
    from kernels.platform import Platform

PLANS = ("steps", "node", "slurm", "kuberay", "dstack")


@click.command(cls=options.Command)
@click.argument("file", required=False, metavar="[FILE.toml]")
@click.option("--budget", default="25m", show_default=True, metavar="25m", help="End within this wall-clock.")
@options.cases_file
@options.cluster_option
@options.target_device
@click.option("--out", metavar="DIR", help="Write it there.  [default: results/<machine>, results/cluster]")
@click.option("--resume", metavar="DIR", help="Go on with the campaign there, for another --budget.")
@click.option("--plan", type=options.OneOf(PLANS), is_flag=False, flag_value="steps",
              help="Measure nothing: print what would be done when, or the file that starts it on such a "
              "cluster.")  # fmt: skip
@click.option("--devices", multiple=True, metavar="TYPE=N",
              help="With --plan: plan for N such GPUs, not here: H200=8.")  # fmt: skip
@options.threads_option
@options.quiet_option
@options.gathered("harness.campaign.execute:CampaignRequest")
def campaign(request: CampaignRequest) -> None:
    """Measure all that this machine can tell in a given time. The most valuable comes first. Without a file:
    the machine and its limits, each op at `smoke`, then at `r1-tp8`, races of the Triton kernels, flags, the
    replay of a step. It ends with what `decide` says of each engine. The result is a folder and one zip file
    to carry home, which `report` and `harness.results.load` read as it is."""
    from harness.campaign.execute import run_campaign
    from harness.campaign.plan import planned_job, steps_of
    from harness.cli.campaign_display import CampaignTables, print_plan
    from harness.cli.run_display import print_note
    from harness.cluster.agent import ThisMachine
    from harness.cluster.ray_cluster import RayPool
    from harness.machine.device import choose_device
    from harness.run.device import device_type, machine_name

    began = time.monotonic()
    require_consistent(request)
    request = replace(request, file=request.file or request.cases)
    cluster, budget_s = request.cluster, request.budget_s
    here = choose_device(None if cluster else request.device)
    type = device_type(here)
    print_once = cache(print_note)  # the steps of all ops may have the same note
    read = partial(read_step, log=print_once)
    measures_here = not cluster and not request.devices and request.plan in (None, "steps")
    # Reading a step, and planning one for this machine, raises for a mistake before a device is waited for.
    for step in steps_of(request.file, kinds=()):
        read(step)
        if measures_here and step.is_for(type, here.kind):
            with suppress(NothingRan):
                planned_job(step, step.name, type, here, budget_s, read)
    if request.plan:
        print_plan(request, here, read)
        return
    default = RESULTS / ("cluster" if cluster else machine_name(here))
    folder = Path(request.resume or request.out or default)
    display = CampaignTables(request.quiet, budget_s)
    what_next = f"finished cases are recorded; the rest:\n  {command('campaign', '--resume', folder)}"
    with options.interruptible(what_next), display:
        pool: Pool = RayPool(cluster, request.device) if cluster else ThisMachine(type, here.device)
        sys.exit(run_campaign(pool, request, folder, began, read, display, partial(conclude, display)))


def require_consistent(request: CampaignRequest) -> None:
    """Raises UsageError for options that contradict each other."""
    if request.cases and request.file:
        raise UsageError("give FILE.toml or --cases, not both; a step may have the option cases")
    if request.plan and request.cluster and not request.devices:
        raise UsageError("--plan joins no cluster: say what it has, as --devices H200=8")
    if request.devices and not request.plan:
        raise UsageError("--devices is for --plan; a campaign measures this machine, or what --cluster has")
    if request.resume and (request.out or request.file or request.cases):
        raise UsageError("--resume goes on with the campaign's own steps; leave out FILE and --out")
    if request.resume and request.plan:
        raise UsageError("--plan is of a campaign from its start; --resume prints what is left and measures")


def conclude(display: CampaignTables, folder: Path, runs: Sequence[Path]) -> None:
    """Writes decision/ENGINE.json and .html, and prints the answer, for each engine that knows the device."""
    from harness.decide.measured import read_measured
    from harness.decide.text import answer, facts
    from harness.decide.worth import decision_and_worth
    from kernels.engines import SPELLED, archs

    if not runs:
        return
    for engine, spelled in SPELLED.items():
        target = folder / "decision" / engine
        try:
            measured = read_measured([*map(str, runs)])
            if measured.arch not in archs(engine):
                continue
            decision, worth = decision_and_worth(engine, measured, user_fields={}, settings={})
            target.parent.mkdir(exist_ok=True)
            options.write_json(f"{target}.json", facts(decision, worth))
            display.print(f"{spelled}: {answer(decision, worth)}")
            with suppress(ModuleNotFoundError):  # a node may lack what draws
                from harness.page.decision import decision_page
                from harness.page.html import write_page

                write_page(decision_page(decision, worth), f"{target}.html", str(folder))
        except Exception as error:  # without a decision the campaign still packs what it measured
            why = str(error) if isinstance(error, HarnessError) else one_line(error)
            display.log(f"no decision for {spelled}: {why}")


def read_step(
    step: Step, log: Callable[[str], None] = lambda _: None
) -> Callable[[Platform], Request] | TuneRequest | None:
    """Reads a step's arguments by its command: a `harness.campaign.plan.ReadStep`, once `log` is given."""
    from harness.cli.run import run, toggle, toggle_request
    from harness.cli.tune import tune
    from harness.run.plan import Request
    from harness.tune.race import TuneRequest

    if not step.casewise:
        return None
    command = {"run": run, "toggle": toggle, "tune": tune}[step.command]
    try:
        params = command.make_context(step.command, list(step.arguments)).params
    except click.ClickException as error:
        raise UsageError(f"step {step.name}: {error.format_message()}") from None
    if step.command == "tune":
        tune_request, _ = options.object_of(TuneRequest, params)
        return tune_request
    request, design = options.object_of(Request, params)
    if step.command == "toggle":
        return toggle_request(request, log, **design)
    return lambda platform: request
