"""What the link predicts of published changes, stored so that `serving ledger` need not run the model.

`pytest tests/harness/serving/ledger --golden=write` writes the file. Each prediction holds
the command that made it. Neither an observation's value before nor its value after goes into a prediction.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.errors import UsageError, mistake, one_line
from harness.paths import PUBLISHED
from harness.serving.ledger.prediction import Prediction
from harness.serving.schema import StrictRecord

STORED = PUBLISHED / "changes" / "link_predictions.json"
DIGITS = 6
ABOUT = (
    "What `serving link` predicts of the published changes whose setting and kernel factor are known. "
    "Each command made it; the model was neither fitted to these points nor changed for them."
)
REMAKE = "`pytest tests/harness/serving/ledger --golden=write` makes it again"


class StoredPrediction(StrictRecord):
    """row: of the ledger; command: made it, and prints more of it"""

    row: str
    command: str
    prediction: Prediction


def stored(path: Path = STORED) -> dict[str, StoredPrediction]:
    """By row. Raises UsageError where the file cannot be read."""
    try:
        known = [StoredPrediction(**entry) for entry in json.loads(path.read_text())["predictions"]]
    except ValidationError as error:
        raise UsageError(f"cannot read {path}: {error.title} {mistake(error)}") from None
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from None
    return {entry.row: entry for entry in known}


def command(options: str, concurrency: float) -> str:
    """Of one setting, for a shell."""
    words = ["python", "-m", "harness", "serving", "link", *shlex.split(options)]
    return shlex.join([*words, "--concurrency", f"{concurrency:g}", "--json", "-"])


def of_document(document: Mapping[str, Any], quantity: str, relative: bool) -> Prediction:
    """A quantity's prediction in what `serving link --json` wrote for one concurrency.

    relative: as a part of the link's own value before, with the unit 1. Raises UsageError where the link has
    none.
    """
    [workload] = document["workloads"]
    found = [change for change in workload["changes"] if change["quantity"] == quantity]
    if not found:
        names = ", ".join(change["quantity"] for change in workload["changes"])
        raise UsageError(f"the link predicts no {quantity}; it does: {names}")
    made = Prediction(**found[0] | {"parts": (), "uncertainty": ()})
    whole = made.before if relative else 1.0
    values = {
        name: _rounded(value / whole)
        for name in ("change", "low", "high", "before", "after")
        if (value := getattr(made, name)) is not None and whole
    }
    return made.model_copy(update=values | ({"unit": "1"} if relative else {}))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
