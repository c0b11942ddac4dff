"""`python -m harness serving ledger` and `observe`: predictions beside observations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from harness.cli.options import answer, json_option
from harness.files import require_writable


@click.command("ledger")
@click.argument("files", nargs=-1, metavar="[LEDGER...]")
@json_option("Write JSON there instead of a table.")
def ledger(files: tuple[str, ...], json_to: str | None) -> None:
    """Show what was predicted of serving beside what was observed. For each change of kernels, and whether
    the prediction explains it. Without LEDGER it counts those of all ledgers under results/."""
    require_writable(json_to, None)
    print_ledgers(files, json_to)


def print_ledgers(files: Sequence[str], json_to: str | None) -> None:
    from harness.serving.ledger import as_json, known_rows, ledger_text

    rows = list(known_rows(files))
    answer(json_to, as_json(rows), lambda: ledger_text(rows, bool(files)))


@click.command("observe")
@click.argument("ledger", metavar="LEDGER")
@click.argument("row", metavar="ROW")
@click.option("--before", multiple=True, required=True, metavar="FILE", help="Read this client's result.")
@click.option("--after", multiple=True, required=True, metavar="FILE",
              help="Pair it with this one; as many as --before, in order.")  # fmt: skip
@click.option(
    "--assume",
    "assumed",
    multiple=True,
    metavar="NAME",
    help="Take a run to be as the row says where its file does not say it: hardware, version, ..., all.",
)
@click.option("--engine", default="", metavar="NAME", help="Name the engine of runs that do not say it.")
@click.option(
    "--explain", "explanation", default="", metavar="TEXT", help="Explain the difference, if it is known."
)
@json_option("Write the ledger as JSON there instead of a table.")
def observe(
    ledger: str, row: str, before: tuple[str, ...], after: tuple[str, ...], json_to: str | None, **told: Any
) -> None:
    """Add serving results to a ledger's prediction. They are of before and after the change of ROW: TPOT,
    TTFT and output throughput, as far as they were predicted, with a 90 % t-interval over the pairs. Runs of
    another machine, engine, model or load than the row's are refused; server flags that differ are listed."""
    from harness.serving.ledger import observe as record

    require_writable(json_to, None)
    record(Path(ledger), row, before, after, **told)
    print_ledgers([ledger], json_to)
