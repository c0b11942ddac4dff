"""A page of recorded results: a section for each op, for what moved between two runs, for serving, and for
each machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.page.document import Page, PageSection, anchor, distinct
from harness.page.inputs import Inputs
from harness.page.measured.case import measured_cases
from harness.page.measured.machine import machine_section
from harness.page.measured.moved import moved
from harness.page.measured.op_section import op_section
from harness.page.serving.ab import ab_section
from harness.page.serving.ledger import ledger_section
from harness.page.written import written_section
from harness.results.comparison import compared
from harness.results.journal import Journal
from harness.results.recorded import incompatibilities, read
from harness.results.schema import Run
from harness.serving.ledger.ledger import known_rows


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
    sections += _serving(inputs)
    sections += [
        machine_section(run, cases[folder], labels[folder] or (folder.name if len(runs) > 1 else ""))
        for folder, run in runs.items()
    ]
    if not sections:
        raise UsageError("nothing to show: name a run's folder, a ledger, or a --json file")
    devices = dict.fromkeys(_device(run) for run in runs.values())
    return Page(title or _title(list(ops), inputs), ", ".join(devices), distinct(sections))


def _title(ops: Sequence[str], inputs: Inputs) -> str:
    serving = [path.name for path in (*inputs.abs, *inputs.ledgers, *inputs.documents)]
    return ", ".join([*ops, *serving]) or "Recorded results"


def _device(run: Run) -> str:
    return str(run.provenance.get("machine", {}).get("device", "an unknown device"))


def _labels(runs: dict[Path, Run]) -> dict[Path, str]:
    """What tells the runs of an op apart, in the fewest words: nothing for a lone one, else the device, the
    name, or the folder."""
    labels = {}
    for folder, run in runs.items():
        alike = [other for other in runs.values() if other.op == run.op]
        names = [
            name(run)
            for name in (_device, lambda r: r.id)
            if [name(other) for other in alike].count(name(run)) == 1
        ]
        labels[folder] = "" if len(alike) == 1 else (*names, str(folder))[0]
    return labels


def _moved(runs: dict[Path, Run]) -> list[PageSection]:
    """Where exactly two runs are of one op, and may be compared."""
    sections = []
    for op in dict.fromkeys(run.op for run in runs.values()):
        pair = [folder for folder, run in runs.items() if run.op == op]
        if len(pair) == 2:
            a, b = (read(str(folder)) for folder in sorted(pair, key=lambda folder: runs[folder].created))
            if not incompatibilities(a, b) and (comparison := compared(a, b)).rows:
                sections.append(moved(a, b, comparison))
    return sections


def _serving(inputs: Inputs) -> list[PageSection]:
    sections = [ab_section(folder) for folder in inputs.abs]
    sections += [ledger_section(list(known_rows([str(path)])), str(path)) for path in inputs.ledgers]
    return sections + [written_section(path) for path in inputs.documents]
