"""A page of recorded results: which records a path names, and a section for each op, for what moved between
two runs, for serving, and for each machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import archive
from harness.errors import UsageError, one_line
from harness.page.case import measured_cases
from harness.page.document import Chart, Page, PageSection, Table, TableRow, anchor, distinct
from harness.page.machine import machine_section
from harness.page.op_section import op_section
from harness.page.serving.ab import ab_section
from harness.page.serving.forecast import forecast_section
from harness.page.serving.ledger import ledger_section
from harness.page.serving.replay import replay_section, replays
from harness.page.settings import moved_section
from harness.page.style import coded
from harness.report.compile_table import HEADERS, compile_lines
from harness.results.comparison import compared
from harness.results.journal import Journal
from harness.results.read import read, run_folders
from harness.results.schema import Run
from harness.serving.ab.record import PLAN as AB
from harness.serving.ledger import NAME as LEDGER
from harness.serving.ledger import known_rows

RECORDS = ("run.json", "cells.jsonl", LEDGER, AB)
"""Files that stand for the folder that they are in."""
EXPERIMENT = "experiment.json"
"""A file of earlier releases: the ledger of its folder is shown, but not the runs of its predictions."""
COMPILED = {"ok": "#0072B2", "must not be shipped": "#D55E00"}


@dataclass
class Inputs:
    """Paths, each once."""

    runs: list[Path] = field(default_factory=list)
    """Folders with run.json that are not parts of an earlier release's experiment."""
    abs: list[Path] = field(default_factory=list)
    """Folders with ab.json."""
    ledgers: list[Path] = field(default_factory=list)
    """Files with the lines of a ledger."""
    documents: list[Path] = field(default_factory=list)
    """Files that a command wrote with --json."""


def inputs(names: Iterable[str]) -> Inputs:
    """What the names stand for; a folder, or its archive, stands for all records below it. Raises UsageError
    where a name is no record."""
    found = Inputs()
    for name in names:
        path = Path(name)
        path = path.parent if path.name in RECORDS else path
        if path.is_dir() or (path.suffix == ".zip" and archive.is_folder(path)):
            _add_folder(found, path)
        elif path.is_file() and path.suffix == ".jsonl":
            _add(found.ledgers, [path])
        elif archive.is_file(path) and path.suffix == ".json":
            _add(found.documents, [path])
        elif path.is_file():
            raise UsageError(f"{path} is no record: name a run's folder, a ledger, a --json file")
        else:
            _add(found.runs, run_folders(name))
    return found


def _add_folder(found: Inputs, folder: Path) -> None:
    ledgers = archive.below(folder, LEDGER)
    experiments = {file.parent for file in archive.below(folder, EXPERIMENT)}
    runs = [file.parent for file in archive.below(folder, "run.json") if not experiments & {*file.parents}]
    abs = [file.parent for file in archive.below(folder, AB)]
    if not (ledgers or runs or abs):
        documents = sorted(folder.glob("*.json"))
        runs = [] if documents else run_folders(folder)
        _add(found.documents, documents)
    _add(found.abs, abs)
    _add(found.ledgers, ledgers)
    _add(found.runs, runs)


def _add(known: list[Path], paths: Iterable[Path]) -> None:
    known += [path for path in dict.fromkeys(paths) if path not in known]


def assemble(inputs: Inputs, title: str = "") -> Page:
    """Raises UsageError where a record cannot be read, or there is nothing to show."""
    runs = {folder: Journal(folder).run() for folder in inputs.runs}
    labels = _labels(runs)
    cases = {folder: measured_cases(folder, labels[folder]) for folder in runs}
    ops = dict.fromkeys(run.op for run in runs.values())
    sections = []
    for op in ops:
        of_op = [case for folder, run in runs.items() if run.op == op for case in cases[folder]]
        empty = PageSection(anchor(op), op, "No case was finished.")
        sections.append(op_section(op, of_op) if of_op else empty)
    sections += _moved(runs)
    sections += [ab_section(folder) for folder in inputs.abs]
    sections += [ledger_section(list(known_rows([str(path)])), str(path)) for path in inputs.ledgers]
    sections += [written_section(path) for path in inputs.documents]
    sections += [
        machine_section(run, cases[folder], labels[folder] or (folder.name if len(runs) > 1 else ""))
        for folder, run in runs.items()
    ]
    if not sections:
        raise UsageError("nothing to show: name a run's folder, a ledger, or a --json file")
    devices = dict.fromkeys(_device(run) for run in runs.values())
    names = [*ops, *(path.name for path in (*inputs.abs, *inputs.ledgers, *inputs.documents))]
    return Page(title or ", ".join(names) or "Recorded results", ", ".join(devices), distinct(sections))


def _device(run: Run) -> str:
    return str(run.provenance.get("machine", {}).get("device", "an unknown device"))


def _labels(runs: dict[Path, Run]) -> dict[Path, str]:
    """The shortest text that tells a run apart from the other runs of its op: empty for a single run, else
    the device, the run's id, or the folder."""
    labels = {}
    for folder, run in runs.items():
        same_op = [other for other in runs.values() if other.op == run.op]
        if len(same_op) == 1:
            labels[folder] = ""
        elif [_device(other) for other in same_op].count(_device(run)) == 1:
            labels[folder] = _device(run)
        elif [other.id for other in same_op].count(run.id) == 1:
            labels[folder] = run.id
        else:
            labels[folder] = str(folder)
    return labels


def _moved(runs: dict[Path, Run]) -> Sequence[PageSection]:
    """A section for each op of which there are exactly two runs that can be compared."""
    sections = []
    for op in dict.fromkeys(run.op for run in runs.values()):
        pair = [folder for folder, run in runs.items() if run.op == op]
        if len(pair) == 2:
            a, b = (read(str(folder)) for folder in sorted(pair, key=lambda folder: runs[folder].created))
            comparison = compared(a, b)
            if comparison.rows and not comparison.incompatible:
                sections.append(moved_section(a, b, comparison))
    return sections


def written_section(path: Path) -> PageSection:
    """The section for a file of `serving predict`, `what-if`, `replay` or `compile`. Raises UsageError."""
    try:
        document = json.loads(archive.read_bytes(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from None
    if isinstance(document, dict) and "compiles" in document:
        return _compiled(document, path.name)
    if isinstance(document, dict) and "workloads" in document:
        return forecast_section(document, path.name)
    if not document:
        raise UsageError(f"{path} is empty")
    return replay_section(replays(document, str(path)), path.name)


def _compiled(document: Mapping[str, Any], title: str) -> PageSection:
    """How much of a target's resources each configuration of a Triton kernel takes."""
    import altair as alt

    try:
        rows = document["compiles"]
        values = [
            {
                "kernel": f"{row['op']} {row['kernel']}",
                "target": row["target"],
                "registers": row["registers"],
                "spills": row["spills"],
                "config": str(row["config"]),
                "verdict": "ok" if row["ok"] else "must not be shipped",
                "reason": row["reason"],
            }
            for row in rows
        ]
        lines = compile_lines(rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{title} is not what `compile --json` writes: {one_line(error)}") from None
    bad = sum(value["verdict"] != "ok" for value in values)
    picture = (
        alt.Chart({"values": values})
        .mark_point(filled=True, size=40, opacity=0.6)
        .encode(
            x=alt.X("registers:Q", title="registers of a thread"),
            y=alt.Y("kernel:N", title=None),
            color=alt.Color("verdict:N", scale=coded(COMPILED), title=None),
            shape=alt.Shape("target:N"),
            tooltip=["kernel:N", "target:N", "registers:Q", "spills:Q", "config:N", "verdict:N", "reason:N"],
        )
        .properties(width=520, height=alt.Step(24))
    )
    chart = Chart(
        anchor("compiled", title),
        "Registers",
        "Each dot is a configuration, placed by its registers; what spills must not be shipped.",
        picture if values else None,
        Table(HEADERS, [TableRow(line) for line in lines], frozenset(HEADERS[4:11])),
        len(values),
    )
    headline = f"{len(values)} configurations compiled, {bad} must not be shipped"
    return PageSection(anchor("compile", title), f"Compiled: {title}", headline, [chart])
