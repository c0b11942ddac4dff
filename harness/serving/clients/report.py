"""Tables of serving runs: as text a table a client, with what was found in them; as JSON; as CSV."""

from __future__ import annotations

import csv
import io
import json
import os
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from harness.report.text import WIDTH, filled_columns, table
from harness.serving.schema import SCOPES, ServingRun, Severity

LATENCIES = {
    "TTFT ms": ("ttft", "mean"), "TPOT ms": ("tpot", "mean"), "ITL ms": ("itl", "mean"),
    "p99 ITL": ("itl", "p99"), "prefill ms": ("prefill", ""), "step ms": ("decode_step", ""),
    "batch ms": ("batch_latency", "mean"),
}  # fmt: skip
NUMERIC = ("output tok/s", *LATENCIES)
OTHER = "else"
HEADERS = ("run", "hardware", "engine", "speculation", "in/out", "load", "mode", *NUMERIC, OTHER, "found")
STATISTICS = {"total": "", "unknown": "?"}
SPREAD = ("std", "min")
BOUNDS = {"max": "up to", "min": "down to"}
TITLES: dict[Severity, str] = {"wrong": "wrong", "suspect": "suspect", "note": "to be known"}
ASSUMED = "taken for granted, or repaired"
DERIVED = " *"
NAMED = 3  # runs that a line names before it counts the rest
ABOUT = ("client", "label", "model", "hardware", "gpus", "nodes", "engine", "version", "mode")
REQUESTED = ("input_len", "output_len", "request_rate")
COLUMNS = ("run", *ABOUT, *REQUESTED, "max_concurrency", "metric", "statistic", "value", "unit", "scope",
           "tokens", "derived", "findings")  # fmt: skip


def as_json(runs: Sequence[ServingRun], unreadable: Sequence[str]) -> str:
    """unreadable: why a file could not be read, one line for each"""
    whole = {"runs": [run.model_dump() for run in runs], "unreadable": unreadable}
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def as_text(runs: Sequence[ServingRun], files: int, unread: int) -> str:
    """A table a client, what was found, what was taken for granted, and how many of each."""
    return "\n\n".join(_blocks(runs, files, unread))


def _blocks(runs: Sequence[ServingRun], files: int, unread: int) -> Iterator[str]:
    folder = _common_folder(runs)
    runs = [run.model_copy(update={"id": run.id.removeprefix(folder)}) for run in runs]
    if folder:
        yield f"in {folder}"
    clients = dict.fromkeys(run.client for run in runs)
    tables = [
        f"{client}\n{_table([_row(run) for run in runs if run.client == client])}" for client in clients
    ]
    yield from tables
    if any(DERIVED in table for table in tables):
        yield f"{DERIVED.strip()} derived from other numbers of the row"
    for severity, title in TITLES.items():
        texts = [
            (run, f"{finding.rule}: {finding.message.removeprefix(f'{run.source}: ')}")
            for run in runs
            for finding in run.findings
            if finding.severity == severity
        ]
        yield from _section(title, texts, len(runs))
    yield from _section(ASSUMED, [(run, note) for run in runs for note in run.notes], len(runs))
    severities: Counter[Severity] = Counter(finding.severity for run in runs for finding in run.findings)
    touched = sum(any(finding.severity != "note" for finding in run.findings) for run in runs)
    counts = _counts(severities)
    conclusion = f"{_count(len(runs), 'run')} in {_count(files - unread, 'file')}"
    conclusion += (
        f"; found {counts} ({_count(touched, 'run')} wrong or suspect)" if counts else "; nothing found"
    )
    yield conclusion + (f"; {_count(unread, 'file')} not read" if unread else "")


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Without the columns that no row fills."""
    return table(*filled_columns(rows, HEADERS), right=NUMERIC)


def _row(run: ServingRun) -> list[str]:
    severities: Counter[Severity] = Counter(
        finding.severity for finding in run.findings if finding.severity != "note"
    )
    numbers = [_output(run), *(_latency(run, *which) for which in LATENCIES.values())]
    cells = [
        run.id,
        f"{run.gpus}x {run.hardware or '?'}" if run.gpus else run.hardware,
        f"{run.engine} {run.version.partition('+')[0]}".strip(),
        run.speculation if run.speculation != "none" else "",
        _lengths(run),
        _load(run),
        run.mode if run.mode != "unknown" else "",
        *numbers,
        "" if any(numbers) else _other(run),
        _counts(severities),
    ]
    return [" ".join(cell.split()) for cell in cells]


def _lengths(run: ServingRun) -> str:
    """Mean tokens of a request, in and out: as counted, unless the client keeps a window of the run."""
    load, totals = run.workload, run.totals
    counted = totals.completed if not (load.warmup_s or load.cooldown_s) else None
    into = _length(totals.input_tokens, counted, load.input_len, load.longest_input_len)
    out = _length(totals.output_tokens, counted, load.output_len, load.longest_output_len)
    return "" if into == out == "?" else f"{into}/{out}"


def _length(tokens: int | None, completed: int | None, asked: float | None, longest: float | None) -> str:
    if tokens is not None and completed:
        return f"{tokens / completed:.4g}" if tokens / completed < 1e4 else f"{tokens / completed:.0f}"
    if asked is not None:
        return f"{asked:g}"
    return "?" if longest is None else f"<={longest:g}"


def _load(run: ServingRun) -> str:
    load = run.workload
    parts = [f"c{load.concurrency:g}"] if load.concurrency is not None else []
    if load.request_rate:
        parts.append(f"{load.request_rate:g} req/s")
    elif load.request_rate == 0 and not parts:
        parts.append(f"{load.num_prompts} at once" if load.num_prompts else "all at once")
    return ", ".join(parts)


def _output(run: ServingRun) -> str:
    """Output throughput with what it is of; that of all tokens where there is no other, and named so."""
    for tokens in ("output", "total", "unknown"):
        if metric := run.metric("throughput", tokens=tokens):
            kind = "" if tokens == "output" else " in+out" if tokens == "total" else " of ?"
            scope = SCOPES.get(metric.scope, "?")
            return f"{metric.value:.5g}{kind} / {scope}" + DERIVED * bool(metric.derived)
    return ""


def _latency(run: ServingRun, name: str, statistic: str) -> str:
    """The statistic of the column; for a mean that the run lacks its median or another value, named."""
    metric = run.metric(name, statistic)
    label = ""
    if metric is None and statistic == "mean":
        others = [one for one in run.metrics if one.name == name and one.statistic not in SPREAD]
        metric = min(others, key=lambda one: one.statistic not in ("median", "p50"), default=None)
        label = f" {STATISTICS.get(metric.statistic, metric.statistic)}" if metric else ""
    if metric is None:
        return ""
    number = f"{metric.value:.0f}" if metric.value >= 1e3 else f"{metric.value:.4g}"
    return number + label + DERIVED * bool(metric.derived)


def _other(run: ServingRun) -> str:
    """The first number of a run that has none of the columns', and how many more there are."""
    if not run.metrics:
        return ""
    first, more = run.metrics[0], len(run.metrics) - 1
    bound = f"{BOUNDS[first.statistic]} " if first.statistic in BOUNDS else ""
    unit = f" {first.unit}" if first.unit != "1" else ""
    return f"{first.name} {bound}{first.value:.5g}{unit}" + (f", {more} more" if more else "")


def _section(title: str, texts: Sequence[tuple[ServingRun, str]], runs: int) -> Iterator[str]:
    """Each text once, behind the runs that it is about; nothing where there is none."""
    ids: dict[str, list[str]] = {}
    for run, text in texts:
        ids.setdefault(text, []).append(run.id)
    if ids:
        yield "\n".join([f"{title}:", *(_line(text, of, runs) for text, of in ids.items())])


def _line(text: str, ids: Sequence[str], runs: int) -> str:
    subjects = "all" if len(ids) == runs > 1 else ", ".join(ids[:NAMED])
    subjects += f" and {len(ids) - NAMED} more" if len(ids) > NAMED and subjects != "all" else ""
    whole = f"{subjects}: {' '.join(text.split())}"
    return textwrap.fill(
        whole,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _counts(severities: Counter[Severity]) -> str:
    plurals = {"note": "notes"}
    return ", ".join(
        f"{count} {plurals.get(severity, severity) if count > 1 else severity}"
        for severity in TITLES
        if (count := severities[severity])
    )


def _common_folder(runs: Sequence[ServingRun]) -> str:
    """The folder that all runs stand in, with its slash."""
    if len({run.id.startswith("/") for run in runs}) > 1:
        return ""  # some are absolute
    shared = os.path.commonpath([str(PurePath(run.id).parent) for run in runs])
    return f"{shared}/" if shared and all(run.id.startswith(f"{shared}/") for run in runs) else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def as_csv(runs: Sequence[ServingRun]) -> str:
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
            **{name: getattr(run.workload, name) for name in REQUESTED},
        }
        for metric in run.metrics:
            table.writerow(about | metric.model_dump(exclude={"name"}) | {"metric": metric.name})
    return text.getvalue()
