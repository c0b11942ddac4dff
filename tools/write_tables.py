"""Writes the tables of documents, and evidence.json, from the data. Run it after runs, configurations or
engines changed.

    python -m tools.write_tables

harness/catalogue/evidence.json says what is known of each of the suite's own kernels, from recorded runs and
stored configurations. kernels/tuned/README.md has its table, kernels/engines/README.md that of the engines.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import kernels
from harness import results
from harness.catalogue.architectures import KINDS
from harness.compile.launches import implementations
from harness.paths import DATA, ROOT
from kernels import engines
from kernels.tuning import TUNED

FILE = DATA / "evidence.json"
TUNING, ENGINES = (ROOT / "kernels" / name / "README.md" for name in ("tuned", "engines"))
STATUS = {"checked": "interpreted", "ok": "measured"}


def evidence() -> dict[str, dict[str, dict[str, int]]]:
    """Implementation -> its evidence (see harness/catalogue/architectures.py)."""
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
        known[path.name.removesuffix(".jsonl.gz")].setdefault(path.parts[-3], {})["compiled"] = fitting
    for arch, by_op in read()["emulated"]["cases"].items():
        for name, op in own.items():
            known[name].setdefault(arch, {})["emulated"] = by_op[op]
    return {
        name: {arch: {k: at[arch][k] for k in KINDS if k in at[arch]} for arch in sorted(at)}
        for name, at in sorted(known.items())
    }


def read() -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(FILE.read_text())
    return whole


def with_evidence(text: str) -> str:
    """Replaces the table of the document by that of the stored file."""
    kernels_of = read()["kernels"]
    archs = sorted({arch for at in kernels_of.values() for arch in at})
    lines = [row(("kernel", *archs)), row(["---"] * (1 + len(archs)))]
    for name, at in kernels_of.items():
        cells = [", ".join(f"{kind} {count}" for kind, count in at.get(arch, {}).items()) for arch in archs]
        lines.append(row((f"`{name}`", *cells)))
    return re.sub(r"\| kernel \|.*?\n(?=\n)", "".join(lines), text, flags=re.DOTALL)


def with_engines(text: str) -> str:
    """Replaces everything from the heading of the first table on by the tables of kernels/engines."""
    return text.partition("\n## `")[0].rstrip() + "\n" + "".join(of_engines())


def of_engines() -> Iterator[str]:
    entries = [entry for engine in engines.engines() for entry in engines.defaults(engine)]
    for op in kernels.OPS:
        if of_op := [entry for entry in entries if entry.op == op]:
            yield (
                f"\n## `{op}`\n\n"
                + row(("engine", "architecture", "case", "runs", "decided in"))
                + row(["---"] * 5)
            )
        for entry in of_op:
            flags = f", with `{entry.flags}`" if entry.flags else ""
            yield row((
                f"{entry.engine} {entry.version}",
                ", ".join(entry.archs),
                (" or ".join(entry.when) or "all") + flags,
                f"`{entry.row}`" if entry.row else f"no row: {entry.why}",
                f"`{entry.file}:{entry.line}` `{entry.function}`",
            ))  # fmt: skip


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    FILE.write_text(json.dumps(read() | {"kernels": evidence()}, indent=1) + "\n")
    for page, made in ((TUNING, with_evidence), (ENGINES, with_engines)):
        page.write_text(made(page.read_text()))
