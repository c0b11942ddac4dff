"""What the link predicts of published changes, stored so that `serving ledger` need not run the model.

`pytest tests/harness/serving/ledger --golden=write` writes the file. Each prediction holds
the command that made it. Neither an observation's value before nor its value after goes into a prediction.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from pydantic import ValidationError

from harness.errors import UsageError, mistake, one_line
from harness.paths import PUBLISHED
from harness.serving.ledger.prediction import Prediction
from harness.serving.schema import StrictRecord

STORED = PUBLISHED / "changes" / "link_predictions.json"
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
