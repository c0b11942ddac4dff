"""A page of recorded results: which records a path names, and a section for each op, for what moved between
two runs, for serving, and for each machine. Also a page of what an engine runs: its shapes by tokens."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import altair as alt

from harness import archive
from harness.engine import EngineView
from harness.errors import UsageError, one_line
from harness.page.case import MeasuredCase, measured_cases, shared_sizes, short_keys, us_text
from harness.page.document import Chart, Columns, Page, PageSection, Table, TableRow, anchor, table
from harness.page.machine import machine_section
from harness.page.ranking import ranking, rounds
from harness.page.serving.ab import ab_section
from harness.page.serving.forecast import forecast_section
from harness.page.serving.ledger import ledger_section
from harness.page.serving.replay import replay_section, replays
from harness.page.settings import moved_section, setting_charts, settings_over_cases
from harness.page.sizes import sweep_charts, winners
from harness.page.style import COLOURS, coloured
from harness.report.case_table import headline
from harness.report.compile_table import TEXT_COLUMNS, compile_lines
from harness.report.conclusion import conclusion_lines
from harness.report.engine_table import by_share, flat, heading, layer_text, notes
from harness.report.engine_table import summary as engine_summary
from harness.report.notes import case_notes
from harness.report.rows import device
from harness.report.summary import summary
from harness.report.text import grouped, significant
from harness.results.comparison import compare_runs
from harness.results.journal import Journal
from harness.results.read import read, run_folders
from harness.results.schema import Run
from harness.serving.ab.record import PLAN as AB
from harness.serving.ledger import NAME as LEDGER
from harness.serving.ledger import known_rows
from shapes.case import text_of

WHOLE = partial(significant, digits=9)
COLUMNS: Columns = {
    "share": ("share", us_text), "op": "op", "layer": "layer", "sizes": "sizes", "runs": "row",
    "decided in": "decided_in", "state": "state", "table": "table", "as": ("entry_m", WHOLE),
    "kernel": "entry_kernel", "us": ("entry_us", us_text), "entry in": "entry_file",
    "line": ("entry_line", WHOLE), "falls back to": "fallback", "defects": "defects",
}  # fmt: skip
SHOWN = "runs, A/B tests, ledgers, and what serving predict, what-if, replay or compile wrote with --json"


def engine_page(view: EngineView) -> Page:
    title = f"{view.release} on {view.device}"
    return Page(title, "; ".join(heading(view)), [engine_section(view)])


def engine_section(view: EngineView) -> PageSection:
    values = [
        {
            **flat(shape),
            "layer": f"{shape.call.place} {layer_text(shape)}",
            "tokens": shape.tokens,
            "state": "defect" if shape.defects else shape.state,
        }
        for shape in by_share(view.shapes)
    ]
    shares = Counter[str]()
    for value in values:
        shares[value["layer"]] += value["share"]
    layers = [layer for layer, _ in shares.most_common()]
    picture = (
        alt.Chart({"values": values})
        .mark_rect(stroke="#FFFFFF", strokeWidth=1)
        .encode(
            x=alt.X("tokens:O", title="tokens"),
            y=alt.Y("layer:N", sort=layers, title=None, axis=alt.Axis(labelLimit=320)),
            color=coloured("state", COLOURS["states of shapes"]),
            tooltip=[
                "layer:N", "tokens:Q", "state:N", alt.Tooltip("share:Q", format=".2%"), "row:N",
                "entry_kernel:N", "fallback:N", "defects:N",
            ],
        )
        .properties(width=520, height=alt.Step(22))
    )  # fmt: skip
    chart = Chart(
        anchor("shapes", view.release),
        "Shapes by tokens",
        "Each cell is a shape that the deployment calls; layers with the largest share of the time come "
        "first. Green: its table has an entry; orange: it has none, and a fallback runs; red: the kernel has "
        "a known defect; grey: no table decides; dark grey: the engine runs what no row here does.",
        picture if values else None,
        table(values, COLUMNS),
        len(values),
    )
    said = [(label, note.replace("\n  ", "; ")) for label, lines in notes(view).items() for note in lines]
    return PageSection(
        anchor("engine", view.release), view.release, "; ".join(engine_summary(view)), [chart], said
    )


RECORDS = ("run.json", "cells.jsonl", LEDGER, AB)  # files that stand for the folder that they are in
EXPERIMENT = "experiment.json"
"""A file of earlier releases: the ledger of its folder is shown, but not the runs of its predictions."""
MOST_CASES = 40  # the number of cases with charts of their own: more would make a page slow to open
MOST_ROUNDS = 4000  # the number of rounds that a chart draws one by one
MOST_INPUTS = 8
"""The number of records whose charts stand together; a page of more has an index, and no rounds."""


@dataclass
class Inputs:
    """Paths, each once."""

    runs: list[Path]  # folders with run.json that are not parts of an earlier release's experiment
    abs: list[Path]  # folders with ab.json
    ledgers: list[Path]  # files with the lines of a ledger
    documents: list[Path]  # files that a command wrote with --json


def inputs(names: Iterable[str]) -> Inputs:
    """A folder, or its archive, stands for all records below it. UsageError where a name is no record."""
    found = Inputs([], [], [], [])
    for name in names:
        path = Path(name)
        path = path.parent if path.name in RECORDS else path
        if path.is_dir() or (path.suffix == ".zip" and archive.is_folder(path)):
            experiments = {file.parent for file in archive.below(path, EXPERIMENT)}
            files = [file for file in archive.below(path, "run.json") if not experiments & {*file.parents}]
            abs, ledgers = archive.below(path, AB), archive.below(path, LEDGER)
            found.runs += [file.parent for file in files]
            found.abs += [file.parent for file in abs]
            found.ledgers += ledgers
            if not (files or abs or ledgers):
                written = sorted(path.glob("*.json"))
                found.documents += written
                found.runs += [] if written else run_folders(path)
        elif path.is_file() and path.suffix == ".jsonl":
            found.ledgers.append(path)
        elif archive.is_file(path) and path.suffix == ".json":
            found.documents.append(path)
        elif path.is_file():
            raise UsageError(f"{path} is nothing that report shows; it shows {SHOWN}")
        else:
            found.runs += run_folders(name)
    for paths in (found.runs, found.abs, found.ledgers, found.documents):
        paths[:] = dict.fromkeys(paths)
    return found


def assemble(inputs: Inputs, title: str = "", progress: Callable[[str], None] = lambda _: None) -> Page:
    """The page of all inputs; that of many begins with a table of them, and has a folded section for each.
    Raises UsageError where a record cannot be read, or there is nothing to show.

    progress: is told which of many runs is being read
    """
    runs = {folder: Journal(folder).run() for folder in inputs.runs}
    named = [*inputs.runs, *inputs.abs, *inputs.ledgers, *inputs.documents]
    many = len(named) > MOST_INPUTS
    labels = dict.fromkeys(runs, "") if many else _labels(runs)
    sections: list[PageSection] = []
    machines: list[PageSection] = []
    by_op = grouped(runs, lambda folder: str(folder) if many else runs[folder].op)
    for folders in by_op.values():
        of_op, op = [], runs[folders[0]].op
        for folder in folders:
            if many:
                progress(f"{len(machines) + 1} of {len(runs)} runs: {folder}")
            cases = measured_cases(folder, labels[folder])
            label = labels[folder] or (folder.name if len(runs) > 1 else "")
            machines.append(machine_section(runs[folder], cases, label))
            of_op += cases
        empty = PageSection(anchor(op), op, "No case was finished.")
        sections.append(op_section(op, of_op, with_rounds=not many) if of_op else empty)
    for folders in by_op.values():
        if len(folders) == 2:
            a, b = (read(str(folder)) for folder in sorted(folders, key=lambda folder: runs[folder].created))
            comparison = compare_runs(a, b)
            if comparison.rows and not comparison.incompatible:
                sections.append(moved_section(a, b, comparison))
    sections += [ab_section(folder) for folder in inputs.abs]
    sections += [ledger_section(list(known_rows([str(path)])), str(path)) for path in inputs.ledgers]
    sections += [written_section(path) for path in inputs.documents]
    if not sections:
        raise UsageError("nothing to show: name a run's folder, a ledger, or a --json file")
    ops = dict.fromkeys(run.op for run in runs.values())
    names = [*ops, *(path.name for path in (*inputs.abs, *inputs.ledgers, *inputs.documents))]
    about = "; ".join(dict.fromkeys(", ".join(filter(None, _origin(run))) for run in runs.values()))
    if many:
        names, about = [f"{len(named)} records"], f"{len(runs)} runs of {', '.join(ops)}" if runs else ""
        for section, machine in zip(sections, machines, strict=False):
            section.sections = [*section.sections, machine]
        sections = [_index(named, runs, sections), *sections]
    else:
        sections += machines
    return Page(title or ", ".join(names) or "Recorded results", about, sections)


def _index(named: Sequence[Path], runs: Mapping[Path, Run], sections: Sequence[PageSection]) -> PageSection:
    """A table of the records `named`, with links to their sections, which it folds and names apart."""
    rows = []
    for path, section in zip(named, sections, strict=True):
        section.folded, section.anchor = True, anchor(str(path))
        what, facts = section.title, [""] * 5
        if run := runs.get(path):
            what, facts = run.op, _origin(run)
            section.title = " · ".join([run.op, facts[0], facts[3]])
            section.notes = [*section.notes, ("rounds", f"python -m harness report {shlex.quote(str(path))}")]
        rows.append(TableRow([what, section.headline, *facts, str(path)], link=section.anchor))
    columns = ("record", "result", "device", "architecture", "host", "date", "commit", "path")
    reading = "Choose a record to open its section, which draws its charts then."
    chart = Chart("records", "Records", reading, table=Table(columns, rows))
    return PageSection("index", "Index", charts=[chart])


def _origin(run: Run) -> list[str]:
    """`NVIDIA H200`, `sm_90`, `16 CPU cores`, `2026-11-26`, `commit a74c80b+` (`+`: files were changed)."""
    machine, git = (run.provenance.get(of, {}) for of in ("machine", "git"))
    cores = f"{machine['cpus']} CPU cores" if machine.get("cpus") else ""
    commit = f"commit {git['commit'][:7]}{'+' * bool(git.get('dirty'))}" if git.get("commit") else ""
    return [device(run), machine.get("arch", ""), cores, run.created[:10], commit]


def _labels(runs: dict[Path, Run]) -> dict[Path, str]:
    """What tells each run apart from the others of its op: nothing, the device, the id, or the folder."""
    labels = {}
    for folder, run in runs.items():
        same_op = [other for other in runs.values() if other.op == run.op]
        labels[folder] = str(folder)
        if len(same_op) == 1:
            labels[folder] = ""
        elif [device(other) for other in same_op].count(device(run)) == 1:
            labels[folder] = device(run)
        elif [other.id for other in same_op].count(run.id) == 1:
            labels[folder] = run.id
    return labels


def op_section(op: str, cases: Sequence[MeasuredCase], with_rounds: bool = True) -> PageSection:
    """The section for the cases of one op in all runs of a page, ordered by size."""
    cases = sorted(cases, key=lambda case: case.size_order)
    ranked = [case for case in cases if case.run.contrast == "implementations"]
    toggled = [case for case in cases if case.run.contrast == "settings"]
    under_settings = grouped(toggled, lambda case: case.folder).values()
    charts: list[Chart | None] = [winners(ranked), *sweep_charts(ranked)]
    charts += [settings_over_cases(of_run) for of_run in under_settings]
    by_key = list(grouped(cases, lambda case: (case.run.contrast, case.planned.key)).values())
    heaviest = sorted(by_key, key=lambda same: -same[0].planned.weight)[:MOST_CASES]
    inner = [
        _case_section(same, with_rounds) for same in sorted(heaviest, key=lambda same: same[0].size_order)
    ]
    left = len(by_key) - len(inner)
    notes = [("not shown", f"{left} cases of less weight have no charts of their own")] if left else []
    headlines = []
    runs = list(grouped(ranked, lambda case: case.folder).values())
    alone = [case for case, *more in runs if not (more or summary([case], case.run))]
    for key, same in grouped(alone, lambda case: case.planned.key).items():
        headlines.append(f"{key}: {_headline(same)}.")
    for of_run in runs:
        if said := summary(of_run, of_run[0].run):
            headlines.append(_labelled(of_run[0], ". ".join(said) + "."))
    for of_run in under_settings:
        title, lines = conclusion_lines(of_run, of_run[0].run)
        headlines.append(_labelled(of_run[0], f"{title} {'. '.join(lines)}.".replace(" .", ".")))
    if len(inner) > 1:
        short, shared = short_keys(cases), text_of(shared_sizes(cases))
        everywhere = [note for note in inner[0].notes if all(note in one.notes for one in inner)]
        for section in inner:
            section.folded, section.title = True, short[section.title]
            section.notes = [note for note in section.notes if note not in everywhere]
        sure = cases[0].run.confidence
        together = (
            f"those of a case hold together with {100 * sure:.0f} % confidence: expect one case with a false "
            f"verdict in {1 / (1 - sure):.0f}; these are {len(by_key)}"
        )
        notes += [("sizes", f"all have {shared}")] if shared else []
        notes += [*everywhere, ("verdicts", together)]
    return PageSection(
        anchor(op), op, " ".join(headlines), [chart for chart in charts if chart], notes, inner
    )


def _labelled(case: MeasuredCase, text: str) -> str:
    return f"{case.label}: {text}" if case.label else text


def _headline(same: Sequence[MeasuredCase]) -> str:
    return "; ".join(_labelled(case, str(headline(case))) for case in same)


def _case_section(same: Sequence[MeasuredCase], with_rounds: bool) -> PageSection:
    first = same[0]
    charts: list[Chart | None] = []
    if first.run.contrast == "settings":
        for case in same:
            charts += setting_charts(case)
    else:
        charts.append(ranking(same))
    charts += [rounds(case, MOST_ROUNDS) for case in same if with_rounds]
    planned = first.planned
    share = "" if planned.place == "ad hoc" else f", {100 * planned.weight:.1f} % of the suite"
    notes = [("place", planned.place + share)]
    for case in same:
        for label, text in case_notes(case, case.run):
            notes.append((case.named(label), text))
    return PageSection(
        anchor("case", first.run.contrast, first.planned.key),
        first.planned.key,
        _headline(same) if first.run.contrast == "implementations" else "",
        [chart for chart in charts if chart],
        notes,
    )


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
    if isinstance(document, dict) and not {"step", "replays"} & document.keys():
        raise UsageError(f"{path} is nothing that report shows; it shows {SHOWN}")
    return replay_section(replays(document, str(path)), path.name)


def _compiled(document: Mapping[str, Any], title: str) -> PageSection:
    """How much of a target's resources each configuration of a Triton kernel takes."""
    try:
        rows = document["compiles"]
        lines, bad = compile_lines(rows), sum(not row["ok"] for row in rows)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{title} is not what `compile --json` writes: {one_line(error)}") from None
    names = list(lines[0]) if lines else []
    chart = Chart(
        anchor("compiled", title),
        "Registers",
        "The registers of a thread; what spills must not be shipped.",
        table=Table(names, [TableRow(list(line.values())) for line in lines], frozenset({*names} - TEXT_COLUMNS)),
    )
    headline = f"{len(rows)} configurations compiled, {bad} must not be shipped"
    return PageSection(anchor("compile", title), f"Compiled: {title}", headline, [chart])
