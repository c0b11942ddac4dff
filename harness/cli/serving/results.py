"""`python -m harness serving load`, `compare`, `ledger`, `observe` and `trace`: what servers showed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import OneOf, answer, json_option, write_json
from harness.errors import FAILED, OK, USAGE, UnreadableError, UsageError
from harness.files import require_writable, write

if TYPE_CHECKING:
    from harness.serving.trace.classify import Phase


@click.command("load")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@json_option("Write JSON there instead of a table.")
@click.option("--csv", "csv_to", metavar="FILE|-", help="Write one line for each metric there.")
def load(files: tuple[str, ...], json_to: str | None, csv_to: str | None) -> None:
    """Read the results of serving clients, and check them. Every run is held to what must be true between its
    numbers. Latencies that were not measured are left out. Exit code 1: a number is wrong; 2: a file cannot
    be read."""
    from harness.cli.serving.load_display import as_csv, runs_table
    from harness.report.terminal import show
    from harness.serving.clients.load import beside_each_other, load_each

    require_writable(json_to, csv_to)
    inputs = {Path(name).resolve() for name in files}
    for target in filter(None, (json_to, csv_to)):
        if Path(target).resolve() in inputs:
            raise UsageError(f"cannot write {target}: it is one of the files to read")
    runs, unreadable = [], []
    for name in files:
        try:
            runs += load_each(name)
        except UnreadableError as error:
            unreadable.append(" ".join(str(error).split()))
            click.echo(f"error: {unreadable[-1]}", err=True)
    runs = beside_each_other(runs)
    if json_to:
        facts = {"runs": [run.model_dump() for run in runs], "unreadable": unreadable}
        write_json(json_to, facts, allow_nan=False)
    if csv_to:
        write(csv_to, as_csv(runs))
    if runs and not json_to and not csv_to:
        show(runs_table(runs, len(files), len(unreadable)), sys.stdout)
    if unreadable:
        sys.exit(USAGE)
    sys.exit(FAILED if any(finding.severity == "wrong" for run in runs for finding in run.findings) else OK)


@click.command("compare")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--metric", metavar="NAME[:WHICH]",
              help="Compare this: `throughput:output`, `tpot:median` ...  [default: throughput, or the first "
              "of both]")  # fmt: skip
@click.option("--engine", "engines", multiple=True, metavar="[A=|B=]NAME",
              help="Name the engine that answered, where a file does not say it, or says it "
              "wrong.")  # fmt: skip
@click.option("--assume", multiple=True, metavar="NAME",
              help="Take this to be alike where a result does not say it: hardware, engine, model, ..., "
              "all.")  # fmt: skip
@click.option("--despite", multiple=True, metavar="NAME",
              help="Compare although this differs: speculative decoding, prefix caching, precision, KV "
              "cache.")  # fmt: skip
@json_option("Write JSON there instead of text.")
def compare(
    a: str, b: str, metric: str | None, engines: Sequence[str], assume: Sequence[str], despite: Sequence[str],
    json_to: str | None,
) -> None:  # fmt: skip
    """Compare two serving results, if they are alike. A and B: FILE, FILE:ROW, or the id of a published run
    (dstack.online:2). Throughput is normalised to one GPU and to output tokens; what else differs refuses the
    comparison, with every reason, or is named beside it. Exit code 0: compared, 1: not alike."""
    from harness.cli.serving.results_display import comparison_text
    from harness.serving.clients.load import beside_each_other
    from harness.serving.compare.alike import compare as compare_quantities
    from harness.serving.compare.alike import default_metric, find, quantity_of
    from harness.serving.compare.identity import FIELDS, SERVER, require_names, with_engine

    require_writable(json_to, None)
    require_names("--assume", assume, ("all", *FIELDS))
    require_names("--despite", despite, SERVER)
    engine_of = engines_of(engines)
    runs = [with_engine(find(a), engine_of["A"]), with_engine(find(b), engine_of["B"])]
    run_a, run_b = beside_each_other(runs)
    metric = metric or default_metric(run_a, run_b)
    quantities = quantity_of(run_a, a, metric), quantity_of(run_b, b, metric)
    comparison = compare_quantities(*quantities, assume, despite)
    answer(json_to, asdict(comparison), lambda: comparison_text(*quantities, comparison))
    sys.exit(OK if comparison.verdict != "refused" else FAILED)


def engines_of(texts: Sequence[str]) -> dict[str, str]:
    """The engines of A and B. A text is `A=NAME`, `B=NAME` or, for both, `NAME`. Raises UsageError."""
    from harness.serving.names import known_engine

    engines = {"A": "", "B": ""}
    for text in texts:
        side, _, name = text.rpartition("=")
        if side not in ("", "A", "B") or name.startswith(("A:", "B:")):  # `A:NAME` is a slip
            raise UsageError(f"cannot read --engine {text!r}; write NAME, A=NAME or B=NAME")
        for named_side in [side] if side else ["A", "B"]:
            engines[named_side] = known_engine(name)
    return engines


@click.command("ledger")
@click.argument("files", nargs=-1, metavar="[LEDGER...]")
@json_option("Write JSON there instead of a table.")
def ledger(files: tuple[str, ...], json_to: str | None) -> None:
    """Show what was predicted of serving beside what was observed. It does so for each change of kernels, and
    says whether the prediction explains it. Without LEDGER it counts those of all ledgers under results/."""
    require_writable(json_to, None)
    print_ledgers(files, json_to)


def print_ledgers(files: Sequence[str], json_to: str | None) -> None:
    """Prints the rows of ledgers or writes them as JSON; without files it prints counts over all ledgers."""
    from harness.cli.serving.results_display import ledger_json, ledger_text
    from harness.serving.ledger import known_rows

    rows = list(known_rows(files))
    answer(json_to, ledger_json(rows), lambda: ledger_text(rows, bool(files)))


@click.command("observe")
@click.argument("ledger", metavar="LEDGER")
@click.argument("row", metavar="ROW")
@click.option("--before", multiple=True, required=True, metavar="FILE", help="Read this client's result.")
@click.option("--after", multiple=True, required=True, metavar="FILE",
              help="Pair it with this one; as many as --before, in order.")  # fmt: skip
@click.option("--assume", "assumed", multiple=True, metavar="NAME",
              help="Take a run to be as the row says where its file does not say it: hardware, version, ..., "
              "all.")  # fmt: skip
@click.option("--engine", default="", metavar="NAME", help="Name the engine of runs that do not say it.")
@click.option("--explain", "explanation", default="", metavar="TEXT",
              help="Explain the difference, if it is known.")  # fmt: skip
@json_option("Write the ledger as JSON there instead of a table.")
def observe(ledger: str, row: str, json_to: str | None, **observed: Any) -> None:  # click's are untyped
    """Add serving results to a ledger's prediction. They are of before and after the change of ROW: TPOT,
    TTFT and output throughput, as far as they were predicted, with a 90 % t-interval over the pairs. Runs of
    another machine, engine, model or load than the row's are refused; server flags that differ are listed."""
    from harness.serving.ledger import observe as add_observation

    require_writable(json_to, None)
    add_observation(Path(ledger), row, **observed)
    print_ledgers([ledger], json_to)


@click.command("trace")
@click.argument("file", metavar="FILE")
@click.option("--phase", type=OneOf(["prefill", "decode", "mixed", "training", "other"]),
              help="Count only these steps.")  # fmt: skip
@click.option("--top", type=click.IntRange(min=0), metavar="N", default=15, show_default=True,
              help="List N kernels.")  # fmt: skip
@click.option("--partial", is_flag=True, help="Take what there is of a file that breaks off, and flag it.")
@json_option("Write everything there as JSON instead.")
def trace(file: str, phase: Phase | None, top: int, partial: bool, json_to: str | None) -> None:
    """Show where a step's time goes in a profiler's trace. FILE is a trace of torch.profiler, rocprofv3
    (JSON, or its kernel trace as CSV) or nsys stats (CSV of cuda_gpu_trace), plain or gzip. It is shown by op
    class and kernel, prefill and decode steps apart, with what overlaps and what is exposed. --json has each
    step. Exit code 1 where something in it is wrong or, with --partial, it breaks off; 2 where it cannot be
    read."""
    from harness.cli.serving.trace_display import as_json, trace_text
    from harness.report.terminal import show
    from harness.serving.trace import decompose

    decomposed = decompose(file, partial=partial)
    if phase and phase not in decomposed.phases():
        raise UsageError(f"{file} has no {phase} steps; it has: {', '.join(decomposed.phases())}")
    if json_to:
        write_json(json_to, as_json(decomposed, phase), allow_nan=False)
    else:
        show(trace_text(decomposed, phase, top), sys.stdout)
    sys.exit(FAILED if any(finding.severity == "wrong" for finding in decomposed.findings) else OK)
