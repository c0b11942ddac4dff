"""`python -m harness serving compare A B`: two serving results side by side, if they are alike."""

from __future__ import annotations

import sys

import click

from harness.cli.options import json_option


@click.command("compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--metric",
    metavar="NAME[:WHICH]",
    help="`throughput:output`, `tpot:median`, ...; else the throughput, or the first that both have.",
)
@click.option(
    "--assume",
    multiple=True,
    type=click.Choice(["hardware", "engine", "model", "all"]),
    help="Take it to be alike where a result does not say it.",
)
@json_option("Write JSON there instead of text.")
def compare(a: str, b: str, metric: str | None, assume: tuple[str, ...], json_to: str | None) -> None:
    """Set one result beside another, if they are alike. A and B: FILE, FILE:ROW, or the id of a published run
    or claim. What can be normalised is (over all GPUs, output tokens alone), and said; else it is refused
    with every reason. Exit code 0 where they compare, 1 where not, 2 where a name is not understood."""
    from harness.errors import FAILED, OK
    from harness.files import write
    from harness.serving.compare.alike import compare as compare_quantities
    from harness.serving.compare.report import as_json, as_text
    from harness.serving.compare.select import default_metric, find, quantity_of

    left, right = find(a), find(b)
    wanted = metric or default_metric(left, right)
    quantities = quantity_of(left, a, wanted), quantity_of(right, b, wanted)
    comparison = compare_quantities(*quantities, assume)
    if json_to:
        write(json_to, as_json(comparison))
    else:
        print(as_text(*quantities, comparison))
    sys.exit(OK if comparison.verdict != "refused" else FAILED)
