"""`python -m harness serving observe LEDGER ROW`: serving runs as an observation in a ledger."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("observe")
@click.argument("ledger", metavar="LEDGER")
@click.argument("row", metavar="ROW")
@click.option("--before", multiple=True, required=True, metavar="FILE", help="Any client's results.")
@click.option("--after", multiple=True, required=True, metavar="FILE", help="As many; paired in order.")
@click.option(
    "--assume",
    multiple=True,
    metavar="NAME",
    help="Take a run to be as the row says where its file does not say it: hardware, version, ..., all.",
)
@click.option(
    "--engine", default="", metavar="NAME", help="The engine of all runs, where files do not say it."
)
@click.option("--explain", default="", metavar="TEXT", help="What is known of the difference, if anything.")
def observe(
    ledger: str,
    row: str,
    before: tuple[str, ...],
    after: tuple[str, ...],
    assume: tuple[str, ...],
    engine: str,
    explain: str,
) -> None:
    """Add to a row of a ledger what serving runs showed before and after its change: TPOT, TTFT and output
    throughput, as far as they were predicted, with a 90 % t-interval over the pairs. Runs of another machine,
    engine, model or load than the row's are refused; server flags that differ are listed."""
    from harness.cli.serving.ledger import print_ledgers
    from harness.serving.ledger.observe import observe as record

    record(Path(ledger), row, before, after, assumed=assume, engine=engine, explanation=explain)
    print_ledgers([ledger])
