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
    python -m harness serving recipe [NAME]      the published set-ups, ready to run on your own machine
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


@serving.command("recipe")
@click.argument("name", required=False)
@click.option(
    "--part",
    type=click.Choice(["docker", "task", "manifests", "server", "client"]),
    help="Only that part of the recipe.",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead.")
def recipe_command(**options: Any) -> None:
    """A published configuration as a shell script: docker, server and client commands, dstack tasks and
    Kubernetes manifests, as far as its document gives them. What was mended is marked. Without NAME: the
    list."""
    from harness.serving.recipe_command import show

    sys.exit(show(**options))
