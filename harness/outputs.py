"""`--json` and `--csv` of a run: one object, and one table of cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.records import Cell, Record, Run, Verdict
from harness.writing import write

RECORDED = "; the run itself is recorded"


def require_writable(json_to: str | None, csv_to: str | None) -> None:
    """Raises UsageError before anything is measured if either could not be written after."""
    if json_to == csv_to == "-":
        raise UsageError("give --json - or --csv -, not both: stdout holds one of them")
    for target in filter(None, (json_to, csv_to)):
        path = Path(target)
        if target == "-" or path.is_fifo():
            continue
        try:
            is_new = not path.exists()
            path.open("a").close()
            if is_new:
                path.unlink()
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror}") from None


def write_outputs(json_to: str | None, csv_to: str | None, settings: Run, records: Sequence[Record]) -> None:
    """`-` is stdout. Raises UsageError where one cannot be written."""
    cells = [r.model_dump(exclude={"kind"}) for r in records if isinstance(r, Cell)]
    if json_to:
        verdicts = [r.model_dump(exclude={"kind"}) for r in records if isinstance(r, Verdict)]
        whole = {"run": settings.model_dump(), "cells": cells, "verdicts": verdicts}
        write(json_to, json.dumps(whole, indent=1, allow_nan=False) + "\n", RECORDED)
    if csv_to:
        import pandas

        columns = [n for n in Cell.model_fields if n not in ("kind", "samples")]
        write(csv_to, pandas.DataFrame(cells, columns=columns).to_csv(index=False), RECORDED)
