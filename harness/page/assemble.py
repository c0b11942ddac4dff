"""A page of recorded results: the records that paths name, and the sections on them. And that of `engine`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import altair as alt

from harness import archive
from harness.engine import EngineView
from harness.errors import UsageError, one_line
from harness.page.case import MeasuredCase, four_digits, measured_cases, shared_sizes, short_keys
from harness.page.document import Chart, Columns, Page, PageSection, Table, TableRow, anchor, table
from harness.page.machine import machine_section
from harness.page.ranking import ranking, rounds
from harness.page.serving.ab import ab_section
from harness.page.serving.forecast import forecast_section
from harness.page.serving.ledger import ledger_section
from harness.page.serving.replay import replay_section, replays
from harness.page.settings import moved_section, setting_charts, settings_over_cases
from harness.page.sizes import sweep_charts, winners
from harness.page.style import COLOURS, colour_by
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

all_digits = partial(significant, digits=9)
SHAPE_COLUMNS: Columns = {
    "share": ("share", four_digits), "op": "op", "layer": "layer", "sizes": "sizes", "runs": "row",
    "decided in": "decided_in", "state": "state", "table": "table", "as": ("entry_m", all_digits),
    "kernel": "entry_kernel", "us": ("entry_us", four_digits), "entry in": "entry_file",
    "line": ("entry_line", all_digits), "falls back to": "fallback", "defects": "defects",
}  # fmt: skip
SHOWN = "runs, A/B tests, ledgers, and what serving predict, what-if, replay or compile wrote with --json"
"""The records that a page can show, in the words of an error."""


def engine_page(view: EngineView) -> Page:
    title = f"{view.release} on {view.device}"
    return Page(title, "; ".join(heading(view)), [engine_section(view)])


def engine_section(view: EngineView) -> PageSection:
    """The map of the shapes that an engine runs, and its notes."""
    values = [
        {**flat(shape), "layer": f"{shape.call.place} {layer_text(shape)}", "tokens": shape.tokens,
         "state": "defect" if shape.defects else shape.state}
        for shape in by_share(view.shapes)
    ]  # fmt: skip
    of_layer = grouped(values, lambda value: str(value["layer"]))
    layers = sorted(of_layer, key=lambda layer: -sum(value["share"] for value in of_layer[layer]))
    picture = (
        alt.Chart({"values": values})
        .mark_rect(stroke="#FFFFFF", strokeWidth=1)
        .encode(
            x=alt.X("tokens:O", title="tokens"),
            y=alt.Y("layer:N", sort=layers, title=None, axis=alt.Axis(labelLimit=320)),
            color=colour_by("state", COLOURS["states of shapes"]),
            tooltip=["layer:N", "tokens:Q", "state:N", alt.Tooltip("share:Q", format=".2%"), "row:N",
                     "entry_kernel:N", "fallback:N", "defects:N"],
        )
        .properties(width=520, height=alt.Step(22))
    )  # fmt: skip
    chart = Chart(
        anchor("shapes", view.release), "Shapes by tokens",
        "Each cell is a shape that the deployment calls; layers with the largest share of the time come "
        "first. Green: its table has an entry; orange: it has none, and a fallback runs; red: the kernel has "
        "a known defect; grey: no table decides; dark grey: the engine runs what no row here does.",
        picture if values else None, table(values, SHAPE_COLUMNS), marks=len(values),
    )  # fmt: skip
    labelled = [(title, note.replace("\n  ", "; ")) for title, lines in notes(view).items() for note in lines]
    headline = "; ".join(engine_summary(view))
    return PageSection(anchor("engine", view.release), view.release, headline, [chart], labelled)


RECORDS = ("run.json", "cells.jsonl", LEDGER, AB)  # files that stand for the folder that they are in
EXPERIMENT = "experiment.json"
"""A file of earlier releases: the ledger of its folder is shown, but not the runs of its predictions."""
MOST_CASES = 40  # cases with charts of their own: more would make a page slow to open
MOST_ROUNDS = 4000  # rounds that a chart draws one by one
MOST_INPUTS = 8  # records whose charts stand together; a page of more has an index, and no charts of rounds

RecordKind = Literal["run", "A/B", "ledger", "document"]
Records = Sequence[tuple[RecordKind, Path]]
"""In the order of their kinds. The path of a run or an A/B test is its folder. A document is a file that a
command wrote with --json."""


def inputs(names: Iterable[str]) -> Records:
    """The records that paths name, each once. A folder, or its archive, stands for all records below it.
    Raises UsageError where a name is no record."""
    records: list[tuple[RecordKind, Path]] = []
    for name in names:
        path = Path(name)
        if path.name in RECORDS:
            path = path.parent
        if path.is_dir() or (path.suffix == ".zip" and archive.is_folder(path)):
            records += _records_below(path)
        elif path.is_file() and path.suffix == ".jsonl":
            records.append(("ledger", path))
        elif archive.is_file(path) and path.suffix == ".json":
            records.append(("document", path))
        elif path.is_file():
            raise UsageError(f"{path} is nothing that report shows; it shows {SHOWN}")
        else:
            records += [("run", folder) for folder in run_folders(name)]
    return sorted(dict.fromkeys(records), key=lambda record: get_args(RecordKind).index(record[0]))


def _records_below(folder: Path) -> Iterator[tuple[RecordKind, Path]]:
    """Yields runs, A/B tests and ledgers at any depth, or else the JSON files in the folder itself."""
    experiments = {file.parent for file in archive.below(folder, EXPERIMENT)}
    runs = [f.parent for f in archive.below(folder, "run.json") if not experiments & set(f.parents)]
    abs, ledgers = archive.below(folder, AB), archive.below(folder, LEDGER)
    documents = [] if runs or abs or ledgers else sorted(folder.glob("*.json"))
    if not (runs or abs or ledgers or documents):
        runs = run_folders(folder)  # there may be those of an EXPERIMENT; raises UsageError without any
    yield from (("run", path) for path in runs)
    yield from (("A/B", file.parent) for file in abs)
    yield from (("ledger", path) for path in ledgers)
    yield from (("document", path) for path in documents)


def assemble(records: Records, title: str = "", progress: Callable[[str], None] = lambda _: None) -> Page:
    """The page of records. With up to MOST_INPUTS records, runs of one op share a section. A page of more
    begins with a table of the records, and has a folded section for each; `progress` is then told which run
    is being read. Raises UsageError where a record cannot be read, or there is none."""
    runs = {path: Journal(path).run() for kind, path in records if kind == "run"}
    ops = dict.fromkeys(run.op for run in runs.values())
    if len(records) > MOST_INPUTS:
        subtitle = f"{len(runs)} runs of {', '.join(ops)}" if runs else ""
        sections = _index_and_folded_sections(records, runs, progress)
        return Page(title or f"{len(records)} records", subtitle, sections)

    sections = []
    by_op = list(grouped(runs, lambda folder: runs[folder].op).values())
    all_machines: list[PageSection] = []
    for folders in by_op:
        section, machines = _sections_of_runs(folders, runs, _labels(runs), with_rounds=True)
        sections.append(section)
        all_machines += machines
    for folders in by_op:
        if len(folders) == 2:  # the newer is compared with the older
            a, b = (read(str(folder)) for folder in sorted(folders, key=lambda folder: runs[folder].created))
            comparison = compare_runs(a, b)
            if comparison.rows and not comparison.incompatible:
                sections.append(moved_section(a, b, comparison))
    others = [(kind, path) for kind, path in records if kind != "run"]
    sections += [_section_of_other(kind, path) for kind, path in others]
    if not sections:
        raise UsageError("nothing to show: name a run's folder, a ledger, or a --json file")
    names = ", ".join([*ops, *(path.name for _, path in others)])
    origins = dict.fromkeys(", ".join(filter(None, _origin(run))) for run in runs.values())
    return Page(title or names or "Recorded results", "; ".join(origins), [*sections, *all_machines])


def _sections_of_runs(
    folders: Sequence[Path], runs: Mapping[Path, Run], labels: Mapping[Path, str], with_rounds: bool
) -> tuple[PageSection, list[PageSection]]:
    """The section of some runs of one op, and those of their machines; `runs` has all runs of the page."""
    op = runs[folders[0]].op
    all_cases, machines = [], []
    for folder in folders:
        cases = measured_cases(folder, labels[folder])
        label = labels[folder] or (folder.name if len(runs) > 1 else "")
        machines.append(machine_section(runs[folder], cases, label))
        all_cases += cases
    if not all_cases:
        return PageSection(anchor(op), op, "No case was finished."), machines
    return op_section(op, all_cases, with_rounds), machines


def _section_of_other(kind: RecordKind, path: Path) -> PageSection:
    """The section of a record that is no run. Raises UsageError."""
    if kind == "A/B":
        return ab_section(path)
    if kind == "ledger":
        return ledger_section(list(known_rows([str(path)])), str(path))
    return written_section(path)


def _index_and_folded_sections(
    records: Records, runs: Mapping[Path, Run], progress: Callable[[str], None]
) -> list[PageSection]:
    """A section with a table of the records, and a folded section for each, to which the table has a link."""
    rows, sections = [], []
    for number, (kind, path) in enumerate(records, 1):
        if kind == "run":
            progress(f"{number} of {len(runs)} runs: {path}")
            section, machines = _sections_of_runs([path], runs, {path: ""}, with_rounds=False)
            name, origin = runs[path].op, _origin(runs[path])
            section.title = f"{name} · {origin.device} · {origin.date}"
            section.sections = [*section.sections, *machines]
            section.notes = [*section.notes, ("rounds", f"python -m harness report {shlex.quote(str(path))}")]
        else:
            section = _section_of_other(kind, path)
            name, origin = section.title, Origin()
        section.folded, section.anchor = True, anchor(str(path))
        sections.append(section)
        rows.append(TableRow([name, section.headline, *origin, str(path)], link=section.anchor))
    columns = ("record", "result", "device", "architecture", "host", "date", "commit", "path")
    reading = "Choose a record to open its section, which draws its charts then."
    chart = Chart("records", "Records", reading, table=Table(columns, rows))
    return [PageSection("index", "Index", charts=[chart]), *sections]


class Origin(NamedTuple):
    """Where a run comes from, in texts; what is not known is empty."""

    device: str = ""
    arch: str = ""
    cores: str = ""  # `16 CPU cores`
    date: str = ""
    commit: str = ""  # `commit a74c80b+`; with `+` if files were changed


def _origin(run: Run) -> Origin:
    machine, git = run.provenance.get("machine", {}), run.provenance.get("git", {})
    cores = f"{machine['cpus']} CPU cores" if machine.get("cpus") else ""
    changed = "+" if git.get("dirty") else ""
    commit = f"commit {git['commit'][:7]}{changed}" if git.get("commit") else ""
    return Origin(device(run), machine.get("arch", ""), cores, run.created[:10], commit)


def _labels(runs: dict[Path, Run]) -> dict[Path, str]:
    """What tells each run apart from the others of its op: nothing, the device, the id, or the folder."""
    labels = {}
    for folder, run in runs.items():
        others = [other for path, other in runs.items() if other.op == run.op and path != folder]
        if not others:
            labels[folder] = ""
        elif device(run) not in map(device, others):
            labels[folder] = device(run)
        else:
            labels[folder] = str(folder) if run.id in [other.id for other in others] else run.id
    return labels


def op_section(op: str, cases: Sequence[MeasuredCase], with_rounds: bool) -> PageSection:
    """The section for the cases of one op in all runs of a page, ordered by size."""
    cases = sorted(cases, key=lambda case: case.size_order)
    of_implementations = [case for case in cases if case.run.contrast == "implementations"]
    of_settings = [case for case in cases if case.run.contrast == "settings"]
    runs = list(grouped(of_implementations, lambda case: case.folder).values())
    setting_runs = list(grouped(of_settings, lambda case: case.folder).values())
    charts = [winners(of_implementations), *sweep_charts(of_implementations)]
    charts += [settings_over_cases(cases_of_run) for cases_of_run in setting_runs]
    # A case that several runs measured has one section: each list has the results of one case in these runs.
    by_key = list(grouped(cases, lambda case: (case.run.contrast, case.planned.key)).values())
    heaviest = sorted(by_key, key=lambda in_runs: -in_runs[0].planned.weight)[:MOST_CASES]
    heaviest.sort(key=lambda in_runs: in_runs[0].size_order)
    case_sections = [_case_section(in_runs, with_rounds) for in_runs in heaviest]
    notes = []
    if without_charts := len(by_key) - len(heaviest):
        notes.append(("not shown", f"{without_charts} cases of less weight have no charts of their own"))
    if len(case_sections) > 1:
        notes += _fold_case_sections(case_sections, cases)
        confidence = cases[0].run.confidence
        together = f"those of a case hold together with {100 * confidence:.0f} % confidence"
        false = f"expect one case with a false verdict in {1 / (1 - confidence):.0f}"
        notes.append(("verdicts", f"{together}: {false}; these are {len(by_key)}"))
    headlines = " ".join(_op_headlines(runs, setting_runs))
    return PageSection(anchor(op), op, headlines, list(filter(None, charts)), notes, case_sections)


def _op_headlines(
    runs: Sequence[Sequence[MeasuredCase]], setting_runs: Sequence[Sequence[MeasuredCase]]
) -> Iterator[str]:
    """Yields sentences on the runs that compare implementations (`runs`) or settings: the summary of each
    run. Runs of one case have no summary; those of the same case share a sentence of their headlines."""
    of_one_case = [cases[0] for cases in runs if len(cases) == 1 and not summary(cases, cases[0].run)]
    for key, in_runs in grouped(of_one_case, lambda case: case.planned.key).items():
        yield f"{key}: {_headline(in_runs)}."
    for cases in runs:
        if sentences := summary(cases, cases[0].run):
            yield _labelled(cases[0], ". ".join(sentences) + ".")
    for cases in setting_runs:
        title, lines = conclusion_lines(cases, cases[0].run)
        yield _labelled(cases[0], f"{title} {'. '.join(lines)}.".replace(" .", "."))


def _fold_case_sections(
    sections: Sequence[PageSection], cases: Sequence[MeasuredCase]
) -> list[tuple[str, str]]:
    """Folds the sections of an op's cases, removes from them what is the same in all (sizes in their titles,
    and notes), and returns that as notes of the op."""
    short, shared = short_keys(cases), text_of(shared_sizes(cases))
    in_all = [note for note in sections[0].notes if all(note in section.notes for section in sections)]
    for section in sections:
        section.folded, section.title = True, short[section.title]
        section.notes = [note for note in section.notes if note not in in_all]
    return [("sizes", f"all have {shared}"), *in_all] if shared else in_all


def _labelled(case: MeasuredCase, text: str) -> str:
    return f"{case.label}: {text}" if case.label else text


def _headline(in_runs: Sequence[MeasuredCase]) -> str:
    """The headlines of one case in several runs."""
    return "; ".join(_labelled(case, str(headline(case))) for case in in_runs)


def _case_section(in_runs: Sequence[MeasuredCase], with_rounds: bool) -> PageSection:
    """The section of one case in several runs."""
    planned, contrast = in_runs[0].planned, in_runs[0].run.contrast
    charts: list[Chart | None] = []
    if contrast == "settings":
        charts += [chart for case in in_runs for chart in setting_charts(case)]
    else:
        charts.append(ranking(in_runs))
    if with_rounds:
        charts += [rounds(case, MOST_ROUNDS) for case in in_runs]
    share = "" if planned.place == "ad hoc" else f", {100 * planned.weight:.1f} % of the suite"
    notes = [("place", planned.place + share)]
    for case in in_runs:
        notes += [(case.named(label), text) for label, text in case_notes(case, case.run)]
    result = _headline(in_runs) if contrast == "implementations" else ""
    name = anchor("case", contrast, planned.key)
    return PageSection(name, planned.key, result, list(filter(None, charts)), notes)


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
    """The section for a file of `compile --json`: which resources of a target each Triton kernel takes."""
    try:
        rows = document["compiles"]
        lines, bad = compile_lines(rows), len([row for row in rows if not row["ok"]])
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{title} is not what `compile --json` writes: {one_line(error)}") from None
    names = list(lines[0]) if lines else []
    numbers = Table(names, [TableRow(list(line.values())) for line in lines], set(names) - TEXT_COLUMNS)
    reading = "The registers of a thread; what spills must not be shipped."
    chart = Chart(anchor("compiled", title), "Registers", reading, table=numbers)
    headline = f"{len(rows)} configurations compiled, {bad} must not be shipped"
    return PageSection(anchor("compile", title), f"Compiled: {title}", headline, [chart])
