"""Commands on recorded runs: `report`, `compare`, `claims`, `export`. `compare --revisions` measures one."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from harness.cli.options import Command, OneOf, answer, json_option, measuring
from harness.errors import FAILED, NOTHING_RAN, OK, NothingRan, UsageError
from harness.files import JsonObject, require_writable, require_writable_folder, write
from harness.paths import PUBLISHED, RESULTS

if TYPE_CHECKING:
    from harness.results.schema import Cell, Run
    from harness.run.plan import Request


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="Write the page there; - is stdout.",
)
@click.option("--title", default="", help="Give the page this title.  [default: what it shows]")
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
@click.option("--svg", metavar="DIR", help="Write the charts there as SVG files, and no page.")
@click.option("--png", metavar="DIR", help="Write the charts there as PNG files, and no page.")
@click.option(
    "--chart",
    multiple=True,
    metavar="PATTERN",
    help="With --svg or --png: write only charts with such a file name.",
)
@click.option("--decide", "engine", type=OneOf(["sglang", "vllm"]), metavar="sglang|vllm",
              help="Begin with how to launch this engine, by all RUNS together: see `decide`.")  # fmt: skip
def report(
    runs: tuple[str, ...],
    output: str,
    title: str,
    show: bool,
    svg: str | None,
    png: str | None,
    chart: tuple[str, ...],
    engine: str | None,
) -> None:
    """Write recorded RUNS as a page for the browser. It shows rankings, sizes, rounds, flags, what moved
    between two runs, serving. RUNS are folders of runs or A/B tests, ledgers, and files that `serving
    predict`, `serving replay` or `compile` wrote with --json; a folder stands for all records below it."""
    from pathlib import Path

    if chart and not (svg or png):
        raise click.UsageError("--chart is for --svg and --png; a page has all")
    from harness.page.assemble import assemble, inputs
    from harness.page.html import pictures, write_page

    known = inputs(runs)
    folders = [(Path(folder), is_png) for folder, is_png in ((svg, False), (png, True)) if folder]
    for folder, _ in folders:
        require_writable_folder(folder)
    if not folders:
        require_writable(output, None)
    decisions = []
    if engine:
        from harness.decide.measured import read_measured
        from harness.decide.worth import decided
        from harness.page.decision import decision_section

        decisions = [decision_section(*decided(engine, read_measured(runs), {}, {}))]
    page = assemble(known, title, progress=lambda line: click.echo(line, err=True))
    page = replace(page, sections=[*decisions, *page.sections])
    for folder, is_png in folders:
        click.echo(f"{len(pictures(page, folder, is_png, chart))} charts in {folder}")
    if folders:
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
    from harness.cli.run_display import RaceTables, RunDisplay, answers
    from harness.report.case_table import case_markdown
    from harness.report.rows import device
    from harness.report.terminal import plain
    from harness.results.journal import Journal
    from harness.results.read import run_folders
    from harness.run.plan import Request, case_of

    journals = [Journal(folder) for folder in dict.fromkeys(f for run in runs for f in run_folders(run))]
    found = []
    for journal in journals:
        run, finished = journal.run(), journal.finished().items()
        known = {case.key for case in run.cases}
        found.append((journal.folder, run, {key: of for key, of in finished if key in known and len(of) > 1}))
    if not any(cases for *_, cases in found):
        raise NothingRan(f"no case was finished in {', '.join(str(folder) for folder, *_ in found)}")
    for folder, run, cases in found:
        records = [record for of_case in cases.values() for record in of_case]
        answer = answers(run, records) if cases else []
        when = run.created.replace("T", " ")[:16]
        title = f"{run.op} on {device(run)}, {when} ({folder})"
        if markdown:
            sections = [case_markdown(of_case, run) for of_case in cases.values()]
            said = [f"- {line.strip()}" for each in answer for line in plain(each, 10_000).splitlines()]
            click.echo("\n\n".join(filter(None, [f"## {title}", "\n".join(said), *sections])) + "\n")
            continue
        display = RaceTables() if run.race else RunDisplay(Request())
        display.print(title)
        planned = {case.key: case_of(case) for case in run.cases}
        for key, of_case in cases.items():
            display.case(run, planned[key], of_case)
        for each in answer if cases else ["no case was finished"]:
            display.print(each)


@click.command(cls=Command)
@click.argument("runs", nargs=-1, metavar="[RUN_A RUN_B]")
@click.option("--revisions", nargs=2, metavar="A B", help="Measure two commits' kernels now, interleaved.")
@click.option("--force", is_flag=True, help="Compare runs of different machines or terms too, and mark it.")
@click.option("--markdown", metavar="FILE|-", help="Also write the report there, for a pull request.")
@measuring
def compare(
    request: Request,
    runs: tuple[str, ...],
    revisions: tuple[str, str] | None,
    force: bool,
    markdown: str | None,
) -> None:
    """Show what is faster or slower in RUN_B than in RUN_A. Or between two revisions of this repository,
    which the other options are for. The exit code is 1 if something regressed, 3 if nothing can be
    judged."""
    if revisions and not runs:
        from harness.cli.run import measure
        from harness.plan.settings import revision_settings

        if request.cluster:
            raise click.UsageError("--revisions measures on this machine: leave out --cluster")
        # The kernels of each revision are a setting.
        request = replace(request, settings=revision_settings(revisions))
        measure(request, lambda _: request)
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
        missing = "; ".join(comparison.missing[:3]) or "both are empty"
        raise NothingRan(f"no cell has a time in both runs: {missing}")
    if markdown != "-":
        show(comparison_table(a, b, comparison), sys.stdout)
    if markdown:
        write(markdown, comparison_markdown(a, b, comparison) + "\n")
    if comparison.regressions or comparison.lost:
        sys.exit(FAILED)
    sys.exit(OK if any(row.baseline for row in comparison.rows) else NOTHING_RAN)


@click.command()
@click.argument("runs", nargs=-1)
@json_option("Write JSON there instead of a table.")
def claims(runs: tuple[str, ...], json_to: str | None) -> None:
    """Compare AITER's headline claims with recorded RUNS. AITER claims 2x for GEMM, 3x for MoE, 17x for MLA
    decode and 14x for MHA prefill. Without RUNS, all under results/ are looked at."""
    from dataclasses import asdict

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
    import json

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
    hidden = {"samples", "kind", "time_us", "low_us", "high_us"}
    return {
        "group": cell.case,
        "name": f"{cell.name}[{cell.case}]",
        "fullname": f"{cell.op}::{cell.name}[{cell.case}]",
        "params": {
            "op": cell.op,
            "implementation": cell.impl,
            "case": cell.case,
            "arm": cell.setting,
            "launch": cell.launch,
        },
        "param": cell.case,
        "extra_info": cell.model_dump(exclude=hidden),
        "options": {"timer": "device", "warmup": True},
        "stats": stats.as_dict() | {"iterations": 1, "data": cell.samples.seconds},
    }
