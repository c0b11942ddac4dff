"""What `serving load` writes of runs: a table for each client, with what was found in them, or a CSV."""

from __future__ import annotations

import csv
import io
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from rich.console import Group, RenderableType

from harness.report.fitting_table import table_of
from harness.report.notes import printed_notes
from harness.report.text import counted, grouped
from harness.serving.compare.identity import length
from harness.serving.schema import SCOPES, ServingRun, Severity

MAIN_LATENCIES = {"TTFT ms": ("ttft", "mean"), "TPOT ms": ("tpot", "mean")}
LATENCIES = {
    "ITL ms": ("itl", "mean"), "p99 ITL": ("itl", "p99"), "prefill ms": ("prefill", ""),
    "step ms": ("decode_step", ""), "batch ms": ("batch_latency", "mean"),
}  # fmt: skip
"""Column -> the metric and the statistic that it shows; an empty statistic is any."""
NOT_TYPICAL = ("std", "min")  # statistics that do not stand for a mean
STATISTICS = {"total": "", "unknown": "?"}
"""Statistic -> what stands beside its value; others are named as they are."""
BOUNDS = {"max": "up to ", "min": "down to "}
SEVERITIES: tuple[Severity, ...] = ("wrong", "suspect", "note")  # the worst first
ASSUMED = "assumed"  # the label of what a reader took for granted, or repaired
DERIVED = " *"
MOST_NAMED = 3  # the most runs that a line names; it counts the others
ABOUT = ("client", "label", "model", "hardware", "gpus", "nodes", "engine", "version", "mode")
COLUMNS = ("run", *ABOUT, "input_len", "output_len", "request_rate", "max_concurrency", "metric", "statistic",
           "value", "unit", "scope", "tokens", "derived", "findings")  # fmt: skip
"""The columns of the CSV."""


def runs_table(runs: Sequence[ServingRun], files: int, unread: int) -> RenderableType:
    """How many findings there are, a table for each client, and what was found or taken for granted. Of the
    `files` that were named, `unread` could not be read."""
    counts = _counts(Counter(finding.severity for run in runs for finding in run.findings))
    head = f"{counted(len(runs), 'run')} in {counted(files - unread, 'file')}; "
    if counts:
        not_sound = {run.id for run in runs for finding in run.findings if finding.severity != "note"}
        head += f"found {counts} ({counted(len(not_sound), 'run')} wrong or suspect)"
    else:
        head += "nothing found"
    if unread:
        head += f"; {counted(unread, 'file')} not read"
    parts: list[RenderableType] = [head]
    folder = _common_folder(runs)
    if folder:
        parts.append(f"in {folder}")
    for client, runs_of_client in grouped(runs, lambda run: run.client).items():
        rows = [_row(run, folder) for run in runs_of_client]
        parts += [f"\n{client}", table_of(rows)]
        if any(cell.endswith(DERIVED) for row in rows for cell in row.values()):
            parts.append(f"{DERIVED.strip()} derived from other numbers of the row")
    notes: list[tuple[str, str, ServingRun]] = []  # (label, text, run)
    for run in runs:
        for finding in run.findings:
            message = finding.message.removeprefix(f"{run.source}: ")
            notes.append((finding.severity, f"{finding.rule}: {message}", run))
    notes.sort(key=lambda note: SEVERITIES.index(note[0]))
    notes += [(ASSUMED, note, run) for run in runs for note in run.notes]
    lines = []
    for (label, text), equal_notes in grouped(notes, lambda note: note[:2]).items():
        ids = [run.id.removeprefix(folder) for _, _, run in equal_notes]
        names = ", ".join(ids[:MOST_NAMED])
        if len(ids) == len(runs) > 1:
            names = "all"
        elif len(ids) > MOST_NAMED:
            names += f" and {len(ids) - MOST_NAMED} more"
        lines.append((label, f"{names}: {' '.join(text.split())}"))
    if lines:
        parts += ["", printed_notes(lines)]
    return Group(*parts)


def _row(run: ServingRun, folder: str) -> dict[str, str]:
    """A line of a table: a text for each column, the most important first. folder: see `_common_folder`"""
    severities = Counter[Severity](f.severity for f in run.findings if f.severity != "note")
    output = _output(run)
    main = {header: _latency(run, *metric) for header, metric in MAIN_LATENCIES.items()}
    others = {header: _latency(run, *metric) for header, metric in LATENCIES.items()}
    has_number = any([output, *main.values(), *others.values()])
    cells = {
        "run": run.id.removeprefix(folder),
        "output tok/s": output,
        **main,
        "load": _load(run),
        "in/out": _lengths(run),
        "found": _counts(severities),
        **others,
        "else": "" if has_number else _other(run),
        "speculation": "" if run.speculation == "none" else run.speculation,
        "hardware": f"{run.gpus}x {run.hardware or '?'}" if run.gpus else run.hardware,
        "engine": f"{run.engine} {run.version.partition('+')[0]}",
        "mode": "" if run.mode == "unknown" else run.mode,
    }
    return {header: " ".join(cell.split()) for header, cell in cells.items()}


def _lengths(run: ServingRun) -> str:
    """Mean tokens of a request, in and out: `3200/<=800`. They are those that were counted, or those that
    were asked for where the client leaves the beginning or the end of the run out of its totals."""
    load, completed, lengths = run.workload, run.totals.completed, []
    for side in ("input", "output"):
        tokens = getattr(run.totals, f"{side}_tokens")
        asked, longest = getattr(load, f"{side}_len"), getattr(load, f"longest_{side}_len")
        if tokens is not None and completed and not (load.warmup_s or load.cooldown_s):
            mean = tokens / completed
            lengths.append(f"{mean:.4g}" if mean < 1e4 else f"{mean:.0f}")
        elif asked is not None:
            lengths.append(f"{asked:g}")
        else:
            lengths.append("?" if longest is None else f"<={longest:g}")
    return "" if lengths == ["?", "?"] else "/".join(lengths)


def _load(run: ServingRun) -> str:
    """`c32, 4 req/s`; a rate of 0 is no limit."""
    load = run.workload
    parts = [f"c{load.concurrency:g}"] if load.concurrency is not None else []
    if load.request_rate:
        parts.append(f"{load.request_rate:g} req/s")
    elif load.request_rate == 0 and not parts:
        parts.append(f"{load.num_prompts} at once" if load.num_prompts else "all at once")
    return ", ".join(parts)


def _output(run: ServingRun) -> str:
    """Output throughput and its scope; where the run has none, the throughput of other tokens, named so."""
    for tokens, kind in (("output", ""), ("total", " in+out"), ("unknown", " of ?")):
        if metric := run.metric("throughput", tokens=tokens):
            number = f"{metric.value:.5g}{kind} / {SCOPES.get(metric.scope, '?')}"
            return number + (DERIVED if metric.derived else "")
    return ""


def _latency(run: ServingRun, name: str, statistic: str) -> str:
    """The statistic of the column; where the run lacks the mean, its median or another value, named."""
    metric, label = run.metric(name, statistic), ""
    if metric is None and statistic == "mean":
        others = [other for other in run.metrics if other.name == name and other.statistic not in NOT_TYPICAL]
        medians = [other for other in others if other.statistic in ("median", "p50")]
        metric = next(iter(medians or others), None)
        label = f" {STATISTICS.get(metric.statistic, metric.statistic)}" if metric else ""
    if metric is None:
        return ""
    number = f"{metric.value:.0f}" if metric.value >= 1e3 else f"{metric.value:.4g}"
    return number + label + (DERIVED if metric.derived else "")


def _other(run: ServingRun) -> str:
    """The first metric of a run without a number in the columns, and how many other metrics it has."""
    if not run.metrics:
        return ""
    first, others = run.metrics[0], len(run.metrics) - 1
    unit = f" {first.unit}" if first.unit != "1" else ""
    number = f"{first.name} {BOUNDS.get(first.statistic, '')}{first.value:.5g}{unit}"
    return f"{number}, {others} more" if others else number


def _counts(severities: Counter[Severity]) -> str:
    """`1 wrong, 2 notes`"""
    parts = []
    for severity in SEVERITIES:
        if count := severities[severity]:
            parts.append(f"{count} notes" if severity == "note" and count > 1 else f"{count} {severity}")
    return ", ".join(parts)


def _common_folder(runs: Sequence[ServingRun]) -> str:
    """The folder that all runs stand in, with its slash; empty if there is none."""
    if len({run.id.startswith("/") for run in runs}) > 1:  # commonpath takes no mix of absolute and relative
        return ""
    shared = os.path.commonpath([str(PurePath(run.id).parent) for run in runs])
    return f"{shared}/" if shared and all(run.id.startswith(f"{shared}/") for run in runs) else ""


def as_csv(runs: Sequence[ServingRun]) -> str:
    """A line for each metric. Lengths are as served, else as asked for; a rate of `inf` is no limit."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for run in runs:
        findings = sorted({f"{f.severity}:{f.rule}" for f in run.findings if f.severity != "note"})
        row = {name: getattr(run, name) for name in ABOUT}
        row |= {f"{side}_len": length(run, side) for side in ("input", "output")}
        row["request_rate"] = math.inf if run.workload.request_rate == 0 else run.workload.request_rate
        row |= {"run": run.id, "max_concurrency": run.workload.concurrency, "findings": " ".join(findings)}
        for metric in run.metrics:
            table.writerow(row | metric.model_dump(exclude={"name"}) | {"metric": metric.name})
    return text.getvalue()
