"""`python -m harness serving ledger [LEDGER...]`: predictions beside observations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from harness.cli.options import json_option


@click.command("ledger")
@click.argument("files", nargs=-1, metavar="[LEDGER...]")
@click.option(
    "--seal", is_flag=True, help="Print of each ledger what a commit or somebody else can hold: LINES:DIGEST."
)
@click.option(
    "--sealed", metavar="LINES:DIGEST", help="Check that the ledger begins with the lines that were sealed."
)
@json_option("Write JSON there instead of a table.")
def ledger(files: tuple[str, ...], seal: bool, sealed: str | None, json_to: str | None) -> None:
    """Kernel changes: what was predicted of serving, what was observed, the residual, and whether the one
    explains the other. Default: all ledgers under results/, and the published before/after points. Exit
    code 1 where a ledger is not as it was sealed."""
    from harness.errors import UsageError
    from harness.serving.ledger.ledger import require_sealed
    from harness.serving.ledger.ledger import seal as sealed_as

    if seal or sealed:
        if json_to or (seal and sealed):
            raise UsageError("--seal, --sealed and --json are three answers: give one of them")
        if not files or (sealed and len(files) > 1):
            raise UsageError("name the ledger" + (", one" if sealed else "s to seal"))
        for name in files:
            if sealed:
                print(f"{name}: as it was sealed, and {require_sealed(Path(name), sealed)} lines since")
            else:
                print(f"{sealed_as(Path(name))}  {name}")
        return
    print_ledgers(files, json_to)


def print_ledgers(files: Sequence[str], json_to: str | None = None) -> None:
    """The rows of the ledgers named, or of all under results/ and the published points."""
    from harness.files import require_writable, write
    from harness.serving.ledger.index import known_rows
    from harness.serving.ledger.report import as_json, as_text

    require_writable(json_to, None)
    rows = list(known_rows(files))
    if json_to:
        write(json_to, as_json(rows))
    else:
        print(as_text(rows))
