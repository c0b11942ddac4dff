"""Commands on recorded runs: `report`, `show`, `compare` (which can also measure), `claims`, `export`."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.options import Command, OneOf, answer, json_option, measuring
from harness.errors import FAILED, NOTHING_RAN, OK, NothingRan, UsageError
from harness.files import JsonObject, require_writable, require_writable_folder, write
from harness.paths import PUBLISHED, RESULTS
from harness.report.text import counted

if TYPE_CHECKING:
    from harness.results.read import RecordedRun
    from harness.results.schema import Cell, Run
    from harness.run.plan import Request


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("-o", "--output", default="report.html", show_default=True, metavar="FILE",
              help="Write the page there; - is stdout.")  # fmt: skip
@click.option("--title", default="", help="Give the page this title.  [default: what it shows]")
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
@click.option("--svg", metavar="DIR", help="Write the charts there as SVG files, and no page.")
@click.option("--png", metavar="DIR", help="Write the charts there as PNG files, and no page.")
@click.option("--chart", multiple=True, metavar="PATTERN",
              help="With --svg or --png: write only charts with such a file name.")  # fmt: skip
@click.option("--decide", "engine", type=OneOf(["sglang", "vllm"]), metavar="sglang|vllm",
              help="Begin with how to launch this engine, by all RUNS together: see `decide`.")  # fmt: skip
def report(
    runs: tuple[str, ...], output: str, title: str, show: bool, svg: str | None, png: str | None,
    chart: tuple[str, ...], engine: str | None,
) -> None:  # fmt: skip
    """Write recorded RUNS as a page for the browser. It shows rankings, sizes, rounds, flags, what moved
    between two runs, serving. RUNS are folders of runs or A/B tests, ledgers, and files that `serving
    predict`, `serving replay` or `compile` wrote with --json; a folder stands for all records below it."""
    if chart and not (svg or png):
        raise click.UsageError("--chart is for --svg and --png; a page has all")
    from harness.page.assemble import assemble, inputs
    from harness.page.html import pictures, write_page

    known = inputs(runs)
    for charts_to in filter(None, (svg, png)):
        require_writable_folder(Path(charts_to))
    if not (svg or png):
        require_writable(output, None)
    decisions = []
    if engine:
        from harness.decide.measured import read_measured
        from harness.decide.worth import decision_and_worth
        from harness.page.decision import decision_section

        decided = decision_and_worth(engine, read_measured(runs), user_fields={}, settings={})
        decisions = [decision_section(*decided)]
    page = assemble(known, title, progress=lambda line: click.echo(line, err=True))
    page = replace(page, sections=[*decisions, *page.sections])
    for target, as_png in ((svg, False), (png, True)):
        if target:
            folder = Path(target)
            click.echo(f"{len(pictures(page, folder, as_png, chart))} charts in {folder}")
    if svg or png:
        return
    write_page(page, output, ", ".join(runs))
    if output != "-":
        click.echo(f"{len(list(page.charts()))} charts in {output}", err=True)
    if show:
        click.launch(Path(output).resolve().as_uri())


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--markdown", is_flag=True, help="Print GitHub's tables for a pull request, the summary first.")
def show(runs: tuple[str, ...], markdown: bool) -> None:
    """Print the tables of recorded RUNS again. They are as the run printed them, and last comes what all
    cases say together."""
    from harness.cli.run_display import RaceTables, RunDisplay, conclusions_of
    from harness.report.case_table import case_markdown
    from harness.report.rows import device
    from harness.report.terminal import plain_text
    from harness.results.journal import Journal
    from harness.results.read import run_folders
    from harness.run.plan import Request, case_of

    folders = dict.fromkeys(folder for run in runs for folder in run_folders(run))
    loaded = []  # (folder, run, finished cases)
    for folder in folders:
        journal = Journal(folder)
        run = journal.run()
        planned = {case.key: case_of(case) for case in run.cases}
        cases = [
            (planned[key], records)
            for key, records in journal.finished().items()
            if key in planned and len(records) > 1  # one record alone is that of the end of the case
        ]
        loaded.append((folder, run, cases))
    if not any(cases for _, _, cases in loaded):
        raise NothingRan(f"no case was finished in {', '.join(map(str, folders))}")
    for folder, run, cases in loaded:
        all_records = [record for _, records in cases for record in records]
        conclusions = conclusions_of(run, all_records) if cases else []
        when = run.created.replace("T", " ")[:16]  # to the minute
        title = f"{run.op} on {device(run)}, {when} ({folder})"
        if markdown:
            lines = [line for text in conclusions for line in plain_text(text, columns=10_000).splitlines()]
            parts = [f"## {title}", "\n".join(f"- {line.strip()}" for line in lines)]
            parts += [case_markdown(records, run) for _, records in cases]
            click.echo("\n\n".join(part for part in parts if part) + "\n")
            continue
        display = RaceTables() if run.race else RunDisplay(Request())
        display.print(title)
        for case, records in cases:
            display.case(run, case, records)
        for text in conclusions:
            display.print(text)
        if not cases:
            display.print("no case was finished")


@click.command(cls=Command)
@click.argument("runs", nargs=-1, metavar="[RUN_A RUN_B]")
@click.option("--revisions", nargs=2, metavar="A B", help="Measure two commits' kernels now, interleaved.")
@click.option("--force", is_flag=True, help="Compare runs of different machines or terms too, and mark it.")
@click.option("--markdown", metavar="FILE|-", help="Also write the report there, for a pull request.")
@measuring
def compare(
    request: Request, runs: tuple[str, ...], revisions: tuple[str, str] | None, force: bool,
    markdown: str | None,
) -> None:  # fmt: skip
    """Show what is faster or slower in RUN_B than in RUN_A. Or between two revisions of this repository,
    which the other options are for. The exit code is 1 if something regressed, 3 if nothing can be
    judged."""
    if revisions and not runs:
        from harness.cli.run import measure_and_exit
        from harness.plan.settings import revision_settings

        if request.cluster:
            raise click.UsageError("--revisions measures on this machine: leave out --cluster")
        # The kernels of each revision are a setting.
        request = replace(request, settings=revision_settings(revisions))
        measure_and_exit(request, lambda platform: request)
    if len(runs) != 2 or revisions:
        raise click.UsageError("name two runs, or --revisions A B and an --op")
    from harness.report.comparison_table import comparison_markdown, comparison_table
    from harness.report.terminal import show
    from harness.results.comparison import compare_runs
    from harness.results.read import read

    a, b = map(read, runs)
    comparison = compare_runs(a, b)
    if comparison.incompatible and not force:
        reasons = "; ".join(comparison.incompatible)
        raise UsageError(f"{runs[0]} and {runs[1]} cannot be compared: {reasons} (--force marks it only)")
    if not comparison.rows:
        raise NothingRan(f"no cell has a time in both runs: {_without_common(a, b, comparison.missing)}")
    if markdown != "-":
        show(comparison_table(a, b, comparison), sys.stdout)
    if markdown:
        write(markdown, comparison_markdown(a, b, comparison) + "\n")
    if comparison.regressions or comparison.lost:
        sys.exit(FAILED)
    sys.exit(OK if any(row.baseline for row in comparison.rows) else NOTHING_RAN)


def _without_common(a: RecordedRun, b: RecordedRun, missing: Sequence[str]) -> str:
    """How many cells of each run have a time, and why the first and the last have none in the other run."""
    counts = []
    for name, run in (("A", a), ("B", b)):
        timed = [cell for cell in run.cells.values() if cell.status == "ok" and cell.time_us]
        counts.append(f"{counted(len(timed), 'cell')} in {name}")
    examples = dict.fromkeys([*missing[:1], *missing[-1:]])
    return "; ".join([", ".join(counts), *(textwrap.shorten(text, 120) for text in examples)])


@click.command()
@click.argument("runs", nargs=-1)
@json_option("Write JSON there instead of a table.")
def claims(runs: tuple[str, ...], json_to: str | None) -> None:
    """Compare AITER's headline claims with recorded RUNS. AITER claims 2x for GEMM, 3x for MoE, 17x for MLA
    decode and 14x for MHA prefill. Without RUNS, all under results/ are looked at."""
    from harness.catalogue.published import CLAIMS, read
    from harness.report.comparison_table import claims_table
    from harness.results.claims import examine, recorded_cells
    from kernels.platform import detect

    document, machine = read(PUBLISHED / CLAIMS), detect()
    cells = [cell for run in runs or [str(RESULTS)] for cell in recorded_cells(run)]
    tests = examine(document, machine, cells)
    about = {name: document[name] for name in ("source", "device", "arch", "unknown")}
    facts = about | {"tests": [asdict(test) for test in tests]}
    answer(json_to, facts, lambda: claims_table(document, tests))


@click.command()
@click.argument("run")
@click.option("-o", "--output", metavar="FILE|-", help="Write it there.  [default: RUN/benchmark.json]")
def export(run: str, output: str | None) -> None:
    """Write a recorded RUN for `pytest-benchmark compare`."""
    from harness.results.read import read

    recorded = read(run)
    cells = [cell for cell in recorded.cells.values() if cell.samples.seconds]
    if not cells:
        raise NothingRan(f"{recorded.folder} holds no time")
    target = output or str(recorded.folder / "benchmark.json")
    write(target, json.dumps(session(recorded.run, cells), indent=4) + "\n")
    if target != "-":
        print(f"wrote {target}", file=sys.stderr)


def session(run: Run, cells: list[Cell]) -> JsonObject:
    """The object that pytest-benchmark 5 saves: its rounds are the run's, in seconds per call."""
    import pytest_benchmark

    machine = run.provenance.get("machine", {})
    git = run.provenance.get("git", {})
    return {
        "machine_info": machine
        | {"node": machine.get("host", ""), "versions": run.provenance.get("versions", {})},
        "commit_info": {"id": git.get("commit", "unknown"), "dirty": git.get("dirty", False)},
        "benchmarks": [_benchmark(cell) for cell in cells],
        "datetime": run.created,
        "version": pytest_benchmark.__version__,
    }


def _benchmark(cell: Cell) -> JsonObject:
    from pytest_benchmark.stats import Stats

    stats = Stats()
    for seconds in cell.samples.seconds:
        stats.update(seconds)
    in_stats = {"samples", "kind", "time_us", "low_us", "high_us"}
    return {
        "group": cell.case,
        "name": f"{cell.name}[{cell.case}]",
        "fullname": f"{cell.op}::{cell.name}[{cell.case}]",
        "params": {
            "op": cell.op, "implementation": cell.impl, "case": cell.case, "arm": cell.setting,
            "launch": cell.launch,
        },
        "param": cell.case,
        "extra_info": cell.model_dump(exclude=in_stats),
        "options": {"timer": "device", "warmup": True},
        "stats": stats.as_dict() | {"iterations": 1, "data": cell.samples.seconds},
    }  # fmt: skip
