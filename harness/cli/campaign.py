"""`python -m harness campaign`: all that a machine, or a cluster, can tell in a given time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.interrupt import interruptible
from harness.cli.options import cluster_option, target_device

if TYPE_CHECKING:
    from harness.campaign.spec import Step
    from harness.run.request import Request
    from harness.tune.race import RaceRequest, TuneRequest
    from kernels.platform import Platform

PLANS = ("steps", "node", "slurm", "kuberay", "dstack")


@click.command()
@click.argument("file", required=False, metavar="[FILE.toml]")
@click.option("--budget", default="25m", show_default=True, metavar="25m", help="Wall-clock, all in all.")
@cluster_option
@target_device
@click.option("--out", metavar="DIR", help="Its folder (default: results/<machine>, or results/cluster).")
@click.option("--resume", metavar="DIR", help="Go on with the campaign there, for another --budget.")
@click.option(
    "--plan",
    type=click.Choice(PLANS),
    is_flag=False,
    flag_value="steps",
    help="Measure nothing: print what would be done when, or the file that starts it on such a cluster.",
)
@click.option(
    "--devices", multiple=True, metavar="TYPE=N", help="With --plan: so many of a type that is not here."
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads, as of `run`.")
@click.option("--quiet", is_flag=True, help="No tables and no progress.")
def campaign(
    file: str | None,
    budget: str,
    cluster: str | None,
    device: str | None,
    out: str | None,
    resume: str | None,
    plan: str | None,
    devices: tuple[str, ...],
    threads: int | None,
    quiet: bool,
) -> None:
    """Measure what this machine can tell, the most valuable first, within a budget of wall-clock.

    Without a file: the machine and its ceilings, the engine itself, each op at `smoke`, then at `r1-tp8`,
    races of the Triton kernels, flags, the replay of a step. Ends with a folder and one zip file to carry
    home, which `report` and `harness.results.load` read as it is.
    """
    from harness.campaign.execute import CampaignRequest, run_campaign
    from harness.campaign.spec import steps_of
    from harness.cli.campaign_display import CampaignTables
    from harness.cluster.local import LocalPool
    from harness.errors import UsageError
    from harness.machine.device import choose_device
    from harness.paths import RESULTS
    from harness.plan.budget import parse_seconds
    from harness.run.device import device_type, machine_name

    began = time.monotonic()
    if plan and cluster and not devices:
        raise UsageError("--plan joins no cluster: say what it has, as --devices H200=8")
    if resume and (out or file):
        raise UsageError("--resume goes on with the campaign's own steps; leave out FILE and --out")
    if resume and plan:
        raise UsageError("--plan is of a campaign from its start; --resume prints what is left and measures")
    budget_s = parse_seconds(budget, "--budget")
    here = choose_device(None if cluster else device)
    commands = StepCommands()
    for step in steps_of(file, ()):  # what is wrong with a file is said before a cluster is joined
        commands.check(step)
    if plan:
        from harness.cli.campaign_plan import print_plan

        print_plan(plan, file, devices, here, budget_s, commands)
        return
    folder = Path(resume or out or RESULTS / ("cluster" if cluster else machine_name(here)))
    request = CampaignRequest(file, budget_s, folder, bool(resume), began, threads)
    display = CampaignTables(quiet, budget_s)
    with interruptible(f"finished cases are recorded, campaign --resume {folder} measures the rest"), display:
        if cluster:
            from harness.cluster.ray_pool import RayPool

            pool: Any = RayPool(cluster, [device] if device else [])
        else:
            pool = LocalPool(device_type(here), here.device)
        sys.exit(run_campaign(pool, request, commands, display))


class StepCommands:
    """A `harness.campaign.jobs.Commands`: steps read by the commands that they name."""

    def check(self, step: Step) -> None:
        """Raises UsageError, which names the step, for options that its command does not take."""
        if step.command in ("run", "toggle", "tune"):
            self._options(step)

    def request(self, step: Step) -> Callable[[Platform], Request]:
        from harness.cli.toggle import toggle_request
        from harness.run.request import Request

        options = self._options(step)
        request = _gathered(Request, options)
        if step.command == "run":
            return lambda platform: request
        return toggle_request(request, **options)

    def race(self, step: Step, folder: Path) -> tuple[TuneRequest, RaceRequest]:
        from harness.tune.race import RaceRequest, TuneRequest

        options = self._options(step)
        race = _gathered(RaceRequest, options)
        tuned = TuneRequest(options["op"], options["impl"], options["suite"], options["case"], (1, 1), folder)
        return tuned, race

    def _options(self, step: Step) -> dict[str, Any]:
        from harness.cli.run import run
        from harness.cli.toggle import toggle
        from harness.cli.tune import tune
        from harness.errors import UsageError

        command = {"run": run, "toggle": toggle, "tune": tune}[step.command]
        try:
            return command.make_context(step.command, list(step.arguments)).params
        except click.ClickException as error:
            raise UsageError(f"step {step.name}: {error.format_message()}") from None


def _gathered(kind: type[Any], options: dict[str, Any]) -> Any:
    """An object of a dataclass from those options that are its fields; the others stay."""
    from dataclasses import fields

    names = {field.name for field in fields(kind)} & options.keys()
    return kind(**{name: options[name] for name in names})
