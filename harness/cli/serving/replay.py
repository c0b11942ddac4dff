"""`python -m harness serving replay`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import json_option
from harness.errors import FAILED, OK, NothingRan
from harness.files import require_writable, write

if TYPE_CHECKING:
    from harness.serving.replay.request import ReplayRequest


def show(request: ReplayRequest, out: str | None = None, json_to: str | None = None) -> int:
    """Replays one step for each batch size and prints what each swap changes."""
    from harness.machine.device import choose_device
    from harness.run.device import own_device
    from harness.serving.replay.replay import replay
    from harness.serving.replay.report import keep, table

    require_writable(json_to, None)
    platform = choose_device(request.device)
    plans, replays = list(request.plans(platform)), []
    with own_device(platform) as own:
        for line in own.busy:
            print(f"note: {line}", file=sys.stderr)
        for name, plan, notes in plans:
            measured = replay(plan, platform, own.monitor)
            measured = measured.model_copy(update={"notes": (*notes, *measured.notes)})
            replays.append(measured)
            print("\n" + table(measured), file=sys.stderr if json_to == "-" else sys.stdout, flush=True)
            if out:
                keep(measured, Path(out), name)
    if json_to:
        write(json_to, "[" + ",\n".join(r.model_dump_json(indent=1) for r in replays) + "]\n")
    if unmeasured := next((r for r in replays if not r.rounds), None):
        raise NothingRan(
            f"no round counted ({unmeasured.stopped}), {unmeasured.disturbed} were disturbed: give a "
            "longer --budget, or quiet the machine"
        )
    return FAILED if any(arm.failed for r in replays for arm in r.arms.values()) else OK


@click.command("replay")
@click.option("--model", default="deepseek-r1", show_default=True, metavar="NAME|DIR",
              help="A model of `shapes`, or a folder with a config.json.")  # fmt: skip
@click.option(
    "--tp", type=click.IntRange(1), default=1, show_default=True, help="The rank is one of so many."
)
@click.option("--phase", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True)
@click.option("--batch", default="4", show_default=True, metavar="N[,N...]", help="Requests in the step.")
@click.option("--ctx", default="1024", show_default=True, help="Decode: tokens cached of each request.")
@click.option("--new", default="1024", show_default=True, help="Prefill: new tokens of each request.")
@click.option("--layers", metavar="DENSE,MOE", help="Replay so many (default: all, or what memory holds).")
@click.option("--base", multiple=True, metavar="OP=IMPL[,...]", help="What the engine runs.")
@click.option("--swap", multiple=True, metavar="OP[:PLACE]=IMPL", help="An arm: the base with this instead.")
@click.option("--routing", default="balanced", show_default=True, help="A pattern: balanced, zipf:0.8 ...")
@click.option("--page", type=click.IntRange(1), help="Tokens of a KV page (default: 16 on CPUs, else 64).")
@click.option("--kv", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option("--device", help="cpu, cuda, cuda:1 ... (default: the first GPU, else the CPU).")
@click.option("--launch", type=click.Choice(["graph", "eager"]), help="On GPUs (default: graph).")
@click.option("--threads", type=click.IntRange(1), help="CPU threads, as the engine has them.")
@click.option("--budget", default="60s", show_default=True, help="Time for measuring, set-up apart.")
@click.option(
    "--blocks", type=click.IntRange(2), default=6, show_default=True, help="Prepared anew so often."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", metavar="DIR", help="Keep the replay there, with every round.")
@json_option("Write JSON there.")
def replay_command(out: str | None, json_to: str | None, **options: Any) -> None:
    """One step of one rank, rebuilt from the suite's implementations in the engine's order with weights for
    every layer; one op swapped at a time, all arms in interleaved rounds."""
    from harness.serving.replay.request import ReplayRequest

    sys.exit(show(ReplayRequest(**options), out, json_to))
