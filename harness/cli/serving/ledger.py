"""`python -m harness serving ledger [LEDGER...]`: predictions beside observations."""

from __future__ import annotations

from collections.abc import Sequence

import click

from harness.cli.options import json_option


@click.command("ledger")
@click.argument("files", nargs=-1, metavar="[LEDGER...]")
@json_option("Write JSON there instead of a table.")
def ledger(files: tuple[str, ...], json_to: str | None) -> None:
    """Show changes of kernels: what was predicted of serving, what was observed, and whether the prediction
    explains it. Default: all ledgers under results/."""
    print_ledgers(files, json_to)


def print_ledgers(files: Sequence[str], json_to: str | None = None) -> None:
    """The rows of the ledgers named, or of all under results/."""
    from harness.files import require_writable, write
    from harness.serving.ledger.ledger import known_rows
    from harness.serving.ledger.report import as_json, as_text

    require_writable(json_to, None)
    rows = list(known_rows(files))
    if json_to:
        write(json_to, as_json(rows))
    else:
        print(as_text(rows))
