"""Makes harness/catalogue/evidence.json: what is known of each of the suite's own kernels.

python -m tools.evidence           write it, after runs or configurations were added
python -m tools.evidence --table   print it as docs/compiling-and-tuning.md has it
"""

from __future__ import annotations

import argparse
import gzip
import json
from typing import Any

import kernels
from harness import results
from harness.catalogue.evidence import KINDS
from harness.compile.launches import implementations
from harness.paths import DATA, ROOT
from kernels.tuning import TUNED

FILE = DATA / "evidence.json"
STATUS = {"checked": "interpreted", "ok": "measured"}


def gathered() -> dict[str, dict[str, dict[str, int]]]:
    """By implementation, architecture and kind: see harness/catalogue/evidence.py."""
    own = {i.name: i.op for op in kernels.OPS for i in implementations(op)}
    known: dict[str, dict[str, dict[str, int]]] = {name: {} for name in own}
    frame = results.load(ROOT / "results" / "*" / "*")
    for (name, kind, arch, status), rows in frame.groupby(["impl", "platform", "arch", "status"]):
        if name in own and status in STATUS:
            cases = rows.assign(sizes=rows["case"] + rows["boundary"]).sizes.nunique()
            at = known[name].setdefault("cpu" if kind == "cpu" else arch, {})
            at[STATUS[status]] = at.get(STATUS[status], 0) + int(cases)
    for path in sorted(TUNED.glob("*/compiled/*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            fitting = sum(not json.loads(line)["refused"] for line in lines)
        name = path.name.removesuffix(".jsonl.gz")
        known[name].setdefault(path.parts[-3], {})["compiled"] = fitting
    emulated = read()["emulated"]["cases"]
    for arch, by_op in emulated.items():
        for name, op in own.items():
            known[name].setdefault(arch, {})["emulated"] = by_op[op]
    return {
        name: {arch: {k: at[arch][k] for k in KINDS if k in at[arch]} for arch in sorted(at)}
        for name, at in sorted(known.items())
    }


def read() -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(FILE.read_text())
    return whole


def table() -> str:
    """Of the stored file, in Markdown."""
    kernels_of = read()["kernels"]
    architectures = sorted({arch for at in kernels_of.values() for arch in at})
    lines = ["| kernel | " + " | ".join(architectures) + " |", "|---" * (1 + len(architectures)) + "|"]
    for name, at in kernels_of.items():
        cells = [
            ", ".join(f"{kind} {count}" for kind, count in at.get(arch, {}).items()) for arch in architectures
        ]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--table", action="store_true")
    if parser.parse_args().table:
        print(table())
        return
    whole = read() | {"kernels": gathered()}
    FILE.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
