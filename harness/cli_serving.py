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
    python -m harness serving audit              what does not hold or is not alike in published documents
    python -m harness serving audit FILE...      the same of your own results
    python -m harness serving compare A B        one result beside another, normalised or refused
    python -m harness serving recipe [NAME]      the published set-ups, ready to run on your own machine
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


@serving.command("ledger")
@click.argument("files", nargs=-1, metavar="[LEDGER...]")
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of a table.")
def ledger_command(**options: Any) -> None:
    """Kernel changes: what was predicted of serving, what was observed, the residual, and whether the one
    explains the other. Default: all ledgers under results/, and the published before/after points."""
    from harness.serving.ledger_command import show

    sys.exit(show(**options))


@serving.command("audit")
@click.argument("names", nargs=-1, metavar="[DOCUMENT|FILE...]")
@click.option("--rules", is_flag=True, help="Only list the rules, each with why it matters.")
@click.option("--notes", is_flag=True, help="Show notes too: what is to be known, and claims that hold.")
@click.option(
    "--fail-on",
    type=click.Choice(["wrong", "suspect", "never"]),
    default="wrong",
    show_default=True,
    help="The mildest finding that makes the exit code 1.",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of text.")
def audit_command(**options: Any) -> None:
    """What does not hold, or is not alike, in published documents (all of them where none is named) or in
    your own results: found by rules over the data. Exit code 1 where something is `wrong` (see --fail-on), 2
    where a name or file cannot be read."""
    from harness.serving.audit_command import show

    sys.exit(show(**options))


@serving.command("compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--metric",
    metavar="NAME[:WHICH]",
    help="`throughput:output`, `tpot:median`, ...; else the throughput, or the first that both have.",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Write JSON there instead of text.")
def compare_command(**options: Any) -> None:
    """Set one result beside another, if they are alike. A and B: FILE, FILE:ROW, or the id of a published run
    or claim. What can be normalised is (over all GPUs, output tokens alone), and said; else it is refused
    with every reason. Exit code 0 where they compare, 1 where not, 2 where a name is not understood."""
    from harness.serving.comparing_command import show

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
