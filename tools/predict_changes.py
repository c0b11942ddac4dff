"""Writes what `serving link` predicts of the published changes, for the ledger to show.

python -m tools.predict_changes

The file is results/published/changes/link_predictions.json. Each prediction is that of its own command, which
stands beside it.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

from harness.errors import HarnessError
from harness.paths import ROOT
from harness.serving.ledger.link_predictions import ABOUT, STORED, StoredPrediction, of_document
from harness.serving.ledger.published import PublishedChange, PublishedPoint, published_changes


def predicted(change: PublishedChange, point: PublishedPoint) -> StoredPrediction:
    """Of one point, by its command. Raises HarnessError where that fails."""
    command = change.command(point)
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise HarnessError(f"{command}: {done.stderr.strip()}")
    prediction = of_document(json.loads(done.stdout), point.quantity, relative=point.unit == "1")
    return StoredPrediction(row=change.row(point), command=command, prediction=prediction)


def main() -> None:
    made = [
        predicted(change, point) for change in published_changes() if change.link for point in change.points
    ]
    document = {"about": ABOUT, "predictions": [entry.model_dump() for entry in made]}
    STORED.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(made)} predictions in {STORED.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
