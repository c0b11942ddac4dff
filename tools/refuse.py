"""Adds what another version of Triton must not ship to refused.json, for `tune` to pass over.

PYTHONPATH=.other-triton/3.6.0-cp311 python -m harness compile --json bad.json
python tools/refuse.py bad.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "harness" / "catalogue" / "refused.json"
NAMES = ("kernel", "target", "config", "arguments", "reason")


def refuse(compiled: Path, data: Path = DATA) -> int:
    """compiled: what `compile --json` gave. Returns how many were not known."""
    found, known = json.loads(compiled.read_text()), json.loads(data.read_text())
    entries = {_key(entry): entry for entry in known["refused"]}
    before = len(entries)
    for row in (row for row in found["compiles"] if not row["ok"]):
        entry = {"triton": found["triton"]} | {name: row[name] for name in NAMES}
        entries[_key(entry)] = entry
    known["refused"] = [entries[key] for key in sorted(entries)]
    data.write_text(json.dumps(known, indent=1) + "\n")
    return len(entries) - before


def _key(entry: dict[str, str]) -> tuple[str, ...]:
    return tuple(entry[name] for name in ("triton", "target", "kernel", "config", "arguments"))


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(f"{path}: {refuse(Path(path))} more refused", file=sys.stderr)
