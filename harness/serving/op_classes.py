"""Op classes, into which a step's time is split: the suite's ops, and all that stands between them.

Traces, the model, replay and the ledger use these names, so that a share of one can be set beside another's.
"""

from __future__ import annotations

import json

from harness.paths import DATA

OP_CLASSES: dict[str, dict[str, str]] = json.loads((DATA / "op_classes.json").read_text())["classes"]
"""By name: what it is, and its colour in charts."""
COMMUNICATION = ("all_reduce", "all_to_all")
