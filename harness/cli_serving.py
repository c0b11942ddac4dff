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
    python -m harness serving trace FILE         a profiler's trace by kernel, class and step
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


@serving.command("trace")
@click.argument("file", metavar="FILE")
@click.option(
    "--phase",
    type=click.Choice(["prefill", "decode", "mixed", "training", "other"]),
    help="Of these steps only.",
)
@click.option("--steps", "each_step", is_flag=True, help="List each step.")
@click.option(
    "--top", type=click.IntRange(min=0), default=15, show_default=True, help="How many kernels to list."
)
@click.option("--partial", is_flag=True, help="Of a file that breaks off, take what there is, and flag it.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write everything there as JSON instead.")
def trace_command(**options: Any) -> None:
    """A trace of torch.profiler or rocprofv3 (JSON, or its kernel trace as CSV; plain or gzip) by op class
    and kernel, prefill and decode steps apart, with what overlaps and what is exposed. Exit code 1 where
    events could not be read or, with --partial, the file breaks off; 2 where it cannot be read."""
    from harness.serving.trace_command import show

    sys.exit(show(**options))
