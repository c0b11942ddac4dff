"""`python -m harness serving replay`: a decode step rebuilt from kernels, with one op swapped."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import Command, json_option, target_device
from harness.errors import FAILED, OK, NothingRan
from harness.files import require_writable, write

if TYPE_CHECKING:
    from harness.serving.replay.replay import Replay


def _as_json(replays: list[Replay]) -> str:
    return "[" + ",\n".join(replay.model_dump_json(indent=1) for replay in replays) + "]\n"


@click.command("replay", cls=Command)
@click.option("--model", default="deepseek-r1", show_default=True, metavar="NAME|DIR",
              help="Replay deepseek-r1, deepseek-v3 or that of a folder with a config.json.")  # fmt: skip
@click.option("--tp", type=click.IntRange(1), metavar="N", default=1, show_default=True,
              help="Replay one of N ranks.")  # fmt: skip
@click.option("--batch", default="4", show_default=True, metavar="N[,N...]", help="Give the step N requests.")
@click.option("--ctx", type=click.IntRange(1), metavar="N", default=1024, show_default=True,
              help="Give each request N tokens in the cache.")  # fmt: skip
@click.option("--case", metavar='"NAME=V ..."',
              help="Set page (16 on CPUs, else 64), kv (bf16, fp8), routing (zipf:0.8 ...).")  # fmt: skip
@click.option("--layers", metavar="DENSE,MOE",
              help="Replay so many layers.  [default: all, or what memory holds]")  # fmt: skip
@click.option("--base", multiple=True, metavar="OP=IMPL[,...]", help="Run this in the base.")
@click.option("--swap", multiple=True, metavar="OP[:PLACE]=IMPL[,...]",
              help="Measure an arm that runs this instead.")  # fmt: skip
@target_device
@click.option("--budget", default="60s", show_default=True, metavar="60s",
              help="Measure for so long; set-up comes on top.")  # fmt: skip
@json_option("Write the replays there as JSON, with every round.")
def replay_command(device: str | None, json_to: str | None, **options: Any) -> None:
    """Replay a decode step with one op swapped. The step of one rank is rebuilt from the suite's
    implementations in the engine's order with weights for every layer, on a GPU as one graph; one op is
    swapped at a time, all arms in interleaved rounds. It shows what a kernel that is faster alone is worth in
    the step. Exit code 1: an arm is wrong or broke; one that cannot run here is shown with the reason."""
    from harness.machine.device import choose_device
    from harness.report.terminal import show
    from harness.run.device import own_device
    from harness.serving.replay.replay import plans, replay

    require_writable(json_to, None)
    platform = choose_device(device)
    planned = list(plans(platform, **options))
    replays: list[Replay] = []
    with own_device(platform) as own:
        for line in own.busy:
            print(f"note: {line}", file=sys.stderr)
        for plan in planned:
            replays.append(replay(plan, platform, own.monitor))
            show(replays[-1].table(), sys.stderr if json_to == "-" else sys.stdout)
            if json_to not in (None, "-"):  # after each: replaying takes minutes, and a later plan may fail
                write(json_to, _as_json(replays))
    if json_to == "-":
        write("-", _as_json(replays))
    for replayed in replays:
        if not replayed.rounds:
            raise NothingRan(
                f"no round counted ({replayed.stopped}), {replayed.disturbed} were disturbed: give a "
                "longer --budget, or quiet the machine"
            )
    arms = [arm for replayed in replays for arm in replayed.arms.values()]
    sys.exit(FAILED if any(arm.failed and not arm.unsupported for arm in arms) else OK)
