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
"""Status of a recorded cell -> the kind of evidence that it is."""


Evidence = dict[str, dict[str, int]]
"""Architecture -> kind of evidence, one of KINDS -> number of cases or configurations."""


def evidence() -> dict[str, Evidence]:
    """The evidence of each of the suite's own kernels."""
    op_of = {kernel.name: kernel.op for op in kernels.OPS for kernel in implementations(op)}
    known: dict[str, Evidence] = {name: {} for name in op_of}
    frame = results.load(ROOT / "results" / "*" / "*")
    for (name, kind, arch, status), rows in frame.groupby(["impl", "platform", "arch", "status"]):
        if name in op_of and status in STATUS:
            cases = (rows["case"] + rows["boundary"]).nunique()
            of_arch = known[name].setdefault("cpu" if kind == "cpu" else arch, {})
            of_arch[STATUS[status]] = of_arch.get(STATUS[status], 0) + int(cases)
    for path in sorted(TUNED.glob("*/compiled/*.jsonl.gz")):  # ARCH/compiled/IMPLEMENTATION.jsonl.gz
        with gzip.open(path, "rt") as lines:
            fitting = sum(not json.loads(line)["refused"] for line in lines)
        arch = path.parent.parent.name
        known[path.name.removesuffix(".jsonl.gz")].setdefault(arch, {})["compiled"] = fitting
    for arch, by_op in read()["emulated"]["cases"].items():  # written by hand: the file says how it was done
        for name, op in op_of.items():
            known[name].setdefault(arch, {})["emulated"] = by_op[op]
    return {name: _in_order(of_kernel) for name, of_kernel in sorted(known.items())}


def _in_order(found: Evidence) -> Evidence:
    """The evidence with architectures by name, and with kinds in the order of KINDS."""
    archs = sorted(found)
    return {arch: {kind: found[arch][kind] for kind in KINDS if kind in found[arch]} for arch in archs}


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def with_evidence(text: str) -> str:
    """Replaces the table of the document by that of the stored file."""
    by_kernel: dict[str, Evidence] = read()["kernels"]
    archs = sorted({arch for found in by_kernel.values() for arch in found})
    lines = [row(("kernel", *archs)), row(["---"] * (1 + len(archs)))]
    for name, found in by_kernel.items():
        cells = [", ".join(f"{kind} {n}" for kind, n in found.get(arch, {}).items()) for arch in archs]
        lines.append(row((f"`{name}`", *cells)))
    return re.sub(r"\| kernel \|.*?\n(?=\n)", "".join(lines), text, flags=re.DOTALL)


def with_engines(text: str) -> str:
    """Replaces everything from the heading of the first table on by the tables of kernels/engines."""
    return text.partition("\n## `")[0].rstrip() + "\n" + "".join(of_engines())


def of_engines() -> Iterator[str]:
    """A heading and a table for each op that an engine decides."""
    entries = [entry for engine in engines.engines() for entry in engines.defaults(engine)]
    for op in kernels.OPS:
        of_op = [entry for entry in entries if entry.op == op]
        if of_op:
            yield f"\n## `{op}`\n\n"
            yield row(("engine", "architecture", "case", "runs", "decided in")) + row(["---"] * 5)
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
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    FILE.write_text(json.dumps(read() | {"kernels": evidence()}, indent=1) + "\n")
    for page, made in ((TUNING, with_evidence), (ENGINES, with_engines)):
        page.write_text(made(page.read_text()))
