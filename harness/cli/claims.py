"""`python -m harness claims`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from tabulate import tabulate

from harness.catalogue.published import CLAIMS, read
from harness.files import write
from harness.paths import PUBLISHED, RESULTS
from harness.report.claims import claims_text
from harness.results.claims import EXPLAINED, _cells, _matches, examine
from kernels.platform import detect


def show(runs: Sequence[str], json_to: str | None = None) -> None:
    """Prints the table, or JSON. Raises UsageError where a run cannot be read."""
    document = read(PUBLISHED / CLAIMS)
    here = detect()
    cells = [cell for run in runs or [RESULTS] for cell in _cells(run)]
    tests = examine(document, here, cells)
    if json_to:
        whole = {**{k: document[k] for k in ("source", "device", "arch", "unknown")}}
        text = json.dumps(whole | {"tests": [asdict(t) for t in tests]}, indent=1, allow_nan=False) + "\n"
        write(json_to, text)
        return
    print(f"{document['source']}\nunknown: {document['unknown']}\n")
    headers = ["claim", "against", f"on {document['device']}", "verdict", f"any kernel on {here.arch}"]
    rows = [
        [f"{t.op} {t.factor:g}x", t.against, claims_text(t.claimed), t.verdict, claims_text(t.here)]
        for t in tests
    ]
    print(tabulate(rows, headers, disable_numparse=True))
    print(EXPLAINED)
    for op in dict.fromkeys(t.op for t in tests):
        able = dict.fromkeys(name for t in tests if t.op == op for name in t.runs)
        ours = [name for name in able if _matches(name, document["kernels"])]
        rivals = [name for name in able if name not in ours]
        print(f"  python -m harness run --op {op} --suite r1-tp8 --budget 5m")
        print(f"    here: {', '.join(ours) or 'none of the claim'}, against {', '.join(rivals) or 'nothing'}")
