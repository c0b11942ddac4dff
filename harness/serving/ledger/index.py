"""The rows of all ledgers: those under results/, and the published before/after points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import archive
from harness.errors import UsageError
from harness.paths import RESULTS
from harness.serving.ledger.ledger import LedgerRow, read, rows
from harness.serving.ledger.published import published_rows

NAME = "ledger.jsonl"


def known_rows(files: Sequence[str]) -> Iterator[LedgerRow]:
    """Those of the files, or folders, named; without names all that there are. Raises UsageError."""
    paths = [Path(name) for name in files] or sorted(RESULTS.glob(f"**/{NAME}"))
    for path in paths:
        path = path / NAME if path.is_dir() else path
        if not path.exists():
            raise UsageError(f"cannot read {path}: no such ledger")
        shown = path.relative_to(RESULTS.parent) if path.is_relative_to(RESULTS.parent) else path
        archive.verify(path.parent)
        yield from rows(read(path), str(shown))
    if not files:
        yield from published_rows()
