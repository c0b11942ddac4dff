"""`python -m harness serving ...`. Imports nothing heavy."""

from __future__ import annotations

import sys
from typing import Any

import click


@click.group()
def serving() -> None:
    """What a kernel is worth in a serving run: results, traces, the model and the ledger.

    \b
    python -m harness serving load FILE...       any client's results, in one schema, with what does not hold
    """


@serving.command("load")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of a table.")
@click.option("--csv", "csv_to", metavar="FILE|-", help="Write one line for each metric there.")
def load_command(**options: Any) -> None:
    """Results of serving clients in one schema, each row held to what must hold between its numbers. Exit
    code 1 where something does not hold, 2 where a file cannot be read."""
    from harness.serving.load_command import show

    sys.exit(show(**options))


@serving.command("ledger")
@click.argument("files", nargs=-1, metavar="[LEDGER...]")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of a table.")
def ledger_command(**options: Any) -> None:
    """Kernel changes: what was predicted of serving, what was observed, the residual, and whether the one
    explains the other. Default: all ledgers under results/, and the published before/after points."""
    from harness.serving.ledger_command import show

    sys.exit(show(**options))


@serving.command("replay")
@click.option("--model", "model_name", default="deepseek-r1", show_default=True, metavar="NAME|DIR",
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
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there.")
def replay_command(**options: Any) -> None:
    """One step of one rank, rebuilt from the suite's implementations in the engine's order with weights for
    every layer; one op swapped at a time, all arms in interleaved rounds."""
    from harness.serving.replay.command import show

    sys.exit(show(**options))
