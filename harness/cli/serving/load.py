"""`python -m harness serving load FILE...`."""

from __future__ import annotations

import csv
import io
import json
import os
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

import click
from tabulate import tabulate

from harness.errors import FAILED, OK, USAGE, UsageError
from harness.files import require_writable, write
from harness.serving.clients.files import UnreadableError
from harness.serving.clients.load import load
from harness.serving.schema import SCOPES, Finding, ServingRun

LATENCIES = {
    "TTFT ms": ("ttft", "mean"), "TPOT ms": ("tpot", "mean"), "ITL ms": ("itl", "mean"),
    "p99 ITL": ("itl", "p99"), "prefill ms": ("prefill", ""), "step ms": ("decode_step", ""),
    "batch ms": ("batch_latency", "mean"),
}  # fmt: skip
NUMERIC = ("output tok/s", *LATENCIES)
OTHER = "else"
HEADERS = ("run", "hardware", "engine", "in/out", "load", "mode", *NUMERIC, OTHER, "found")
STATISTICS = {"total": "", "unknown": "?"}
BOUNDS = {"max": "up to", "min": "down to"}
TITLES = {"wrong": "wrong", "suspect": "suspect", "note": "to be known"}
TAKEN = "taken for granted, or repaired"
DERIVED = " *"
UNBROKEN = {"break_long_words": False, "break_on_hyphens": False}
NAMED = 3  # runs that a line names before it counts the rest
WIDTH = 150
ABOUT = ("client", "label", "model", "hardware", "gpus", "nodes", "engine", "version", "mode")
ASKED = ("input_len", "output_len", "request_rate")
COLUMNS = ("run", *ABOUT, *ASKED, "max_concurrency", "metric", "statistic", "value", "unit", "scope",
           "tokens", "derived", "findings")  # fmt: skip


def show(files: Sequence[str], json_to: str | None, csv_to: str | None) -> int:
    """Prints the runs, then what was found in them; a file that cannot be read costs itself only.

    Raises UsageError where an output cannot be written, before anything is read. Returns the exit code.
    """
    require_writable(json_to, csv_to)
    _require_not_input(files, filter(None, (json_to, csv_to)))
    runs, unread = [], []
    for name in files:
        try:
            runs += load(name)
        except UnreadableError as error:
            unread.append(" ".join(str(error).split()))
            click.echo(f"error: {unread[-1]}", err=True)
    if json_to:
        whole = {"runs": [run.model_dump() for run in runs], "unreadable": unread}
        write(json_to, json.dumps(whole, indent=1, allow_nan=False) + "\n")
    if csv_to:
        write(csv_to, _csv(runs))
    if not (json_to or csv_to) and runs:
        click.echo("\n\n".join(_report(runs, len(files), len(unread))))
    if unread:
        return USAGE
    return FAILED if any(one.severity == "wrong" for run in runs for one in run.findings) else OK


def _require_not_input(files: Sequence[str], targets: Iterator[str]) -> None:
    read = {Path(name).resolve(): name for name in files}
    for target in targets:
        if target != "-" and Path(target).resolve() in read:
            raise UsageError(f"cannot write {target}: it is one of the files to read")


def _report(runs: Sequence[ServingRun], files: int, unread: int) -> Iterator[str]:
    """A table a client, what was found, what was taken for granted, and how many of each."""
    folder = _common_folder(runs)
    runs = [run.model_copy(update={"id": run.id.removeprefix(folder)}) for run in runs]
    if folder:
        yield f"in {folder}"
    clients = dict.fromkeys(run.client for run in runs)
    tables = [f"{one}\n{_table([_row(run) for run in runs if run.client == one])}" for one in clients]
    yield from tables
    if any(DERIVED in table for table in tables):
        yield f"{DERIVED.strip()} derived from other numbers of the row"
    for severity, title in TITLES.items():
        same = ((run, one) for run in runs for one in run.findings if one.severity == severity)
        yield from _section(title, [(run, _finding(run, one)) for run, one in same], len(runs))
    yield from _section(TAKEN, [(run, note) for run in runs for note in run.notes], len(runs))
    counts = Counter(one.severity for run in runs for one in run.findings)
    touched = sum(any(one.severity != "note" for one in run.findings) for run in runs)
    said = _said(counts)
    conclusion = f"{_count(len(runs), 'run')} in {_count(files - unread, 'file')}"
    conclusion += f"; found {said} ({_count(touched, 'run')} wrong or suspect)" if said else "; nothing found"
    yield conclusion + (f"; {_count(unread, 'file')} not read" if unread else "")


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Without the columns that no row fills."""
    used = [i for i in range(len(HEADERS)) if any(row[i] for row in rows)]
    return tabulate(
        [[row[i] for i in used] for row in rows],
        [HEADERS[i] for i in used],
        disable_numparse=True,
        colalign=["right" if HEADERS[i] in NUMERIC else "left" for i in used],
    )


def _row(run: ServingRun) -> list[str]:
    counts = Counter(one.severity for one in run.findings if one.severity != "note")
    numbers = [_output(run), *(_latency(run, *which) for which in LATENCIES.values())]
    cells = [
        run.id,
        f"{run.gpus}x {run.hardware or '?'}" if run.gpus else run.hardware,
        f"{run.engine} {run.version.partition('+')[0]}".strip(),
        _lengths(run),
        _load(run),
        run.mode if run.mode != "unknown" else "",
        *numbers,
        "" if any(numbers) else _other(run),
        _said(counts),
    ]
    return [" ".join(cell.split()) for cell in cells]


def _lengths(run: ServingRun) -> str:
    sizes = (run.workload.input_len, run.workload.output_len)
    return "" if sizes == (None, None) else "/".join("?" if one is None else f"{one:g}" for one in sizes)


def _load(run: ServingRun) -> str:
    asked = run.workload
    parts = [f"c{asked.concurrency:g}"] if asked.concurrency is not None else []
    if asked.request_rate:
        parts.append(f"{asked.request_rate:g} req/s")
    elif asked.request_rate == 0 and not parts:
        parts.append(f"{asked.num_prompts} at once" if asked.num_prompts else "all at once")
    return ", ".join(parts)


def _output(run: ServingRun) -> str:
    """Output throughput with what it is of; that of all tokens where there is no other, and named so."""
    for tokens in ("output", "total", "unknown"):
        if found := run.metric("throughput", tokens=tokens):
            kind = "" if tokens == "output" else " in+out" if tokens == "total" else " of ?"
            scope = SCOPES.get(found.scope, "?")
            return f"{found.value:.5g}{kind} / {scope}" + DERIVED * bool(found.derived)
    return ""


def _latency(run: ServingRun, name: str, statistic: str) -> str:
    """The statistic of the column; for a mean that the run lacks another one, named."""
    found = run.metric(name, statistic)
    named = ""
    if found is None and statistic == "mean" and (found := run.metric(name)):
        named = f" {STATISTICS.get(found.statistic, found.statistic)}"
    if found is None:
        return ""
    shown = f"{found.value:.0f}" if found.value >= 1e3 else f"{found.value:.4g}"
    return shown + named + DERIVED * bool(found.derived)


def _other(run: ServingRun) -> str:
    """The first number of a run that has none of the columns', and how many more there are."""
    if not run.metrics:
        return ""
    first, more = run.metrics[0], len(run.metrics) - 1
    bound = f"{BOUNDS[first.statistic]} " if first.statistic in BOUNDS else ""
    unit = f" {first.unit}" if first.unit != "1" else ""
    return f"{first.name} {bound}{first.value:.5g}{unit}" + (f", {more} more" if more else "")


def _finding(run: ServingRun, one: Finding) -> str:
    return f"{one.rule}: {one.message.removeprefix(f'{run.source}: ')}"


def _section(title: str, said: Sequence[tuple[ServingRun, str]], runs: int) -> Iterator[str]:
    """Each text once, behind the runs that it is said of; nothing where there is none."""
    ids: dict[str, list[str]] = {}
    for run, text in said:
        ids.setdefault(text, []).append(run.id)
    if ids:
        yield "\n".join([f"{title}:", *(_line(text, who, runs) for text, who in ids.items())])


def _line(text: str, ids: Sequence[str], runs: int) -> str:
    who = "all" if len(ids) == runs > 1 else ", ".join(ids[:NAMED])
    who += f" and {len(ids) - NAMED} more" if len(ids) > NAMED and who != "all" else ""
    whole = f"{who}: {' '.join(text.split())}"
    return textwrap.fill(whole, WIDTH, initial_indent="  ", subsequent_indent="    ", **UNBROKEN)


def _said(counts: Counter[str]) -> str:
    words = {"note": "notes"}
    return ", ".join(
        f"{counts[one]} {words.get(one, one) if counts[one] > 1 else one}" for one in TITLES if counts[one]
    )


def _common_folder(runs: Sequence[ServingRun]) -> str:
    """The folder that all runs stand in, with its slash."""
    if len({run.id.startswith("/") for run in runs}) > 1:
        return ""  # some are absolute
    shared = os.path.commonpath([str(PurePath(run.id).parent) for run in runs])
    return f"{shared}/" if shared and all(run.id.startswith(f"{shared}/") for run in runs) else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _csv(runs: Sequence[ServingRun]) -> str:
    """One line for each metric, with all that it is of; lengths and limits as asked for."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for run in runs:
        findings = sorted({f"{f.severity}:{f.rule}" for f in run.findings if f.severity != "note"})
        about = {
            "run": run.id,
            "max_concurrency": run.workload.concurrency,
            "findings": " ".join(findings),
            **{name: getattr(run, name) for name in ABOUT},
            **{name: getattr(run.workload, name) for name in ASKED},
        }
        for one in run.metrics:
            table.writerow(about | one.model_dump(exclude={"name"}) | {"metric": one.name})
    return text.getvalue()
