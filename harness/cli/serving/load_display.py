"""Tables of serving runs: one for each client, with what was found in them; as CSV."""

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
from harness.report.notes import noted
from harness.report.text import counted, grouped
from harness.serving.compare.identity import length
from harness.serving.schema import SCOPES, ServingRun, Severity

LATENCIES = {
    "TTFT ms": ("ttft", "mean"), "TPOT ms": ("tpot", "mean"), "ITL ms": ("itl", "mean"),
    "p99 ITL": ("itl", "p99"), "prefill ms": ("prefill", ""), "step ms": ("decode_step", ""),
    "batch ms": ("batch_latency", "mean"),
}  # fmt: skip
STATISTICS = {"total": "", "unknown": "?"}
SPREAD = ("std", "min")
BOUNDS = {"max": "up to ", "min": "down to "}
TITLES: dict[Severity, str] = {"wrong": "wrong", "suspect": "suspect", "note": "note"}
ASSUMED = "assumed"  # taken for granted, or repaired
DERIVED = " *"
NAMED = 3  # runs that a line names before it counts the rest
ABOUT = ("client", "label", "model", "hardware", "gpus", "nodes", "engine", "version", "mode")
REQUESTED = ("input_len", "output_len", "request_rate")
COLUMNS = ("run", *ABOUT, *REQUESTED, "max_concurrency", "metric", "statistic", "value", "unit", "scope",
           "tokens", "derived", "findings")  # fmt: skip


def runs_table(runs: Sequence[ServingRun], files: int, unread: int) -> RenderableType:
    """How many findings there are, a table for each client, and what was found or taken for granted."""
    found = [(run, finding) for run in runs for finding in run.findings]
    touched = len({run.id for run, finding in found if finding.severity != "note"})
    counts = _counts(Counter(finding.severity for _, finding in found))
    result = f"found {counts} ({counted(touched, 'run')} wrong or suspect)" if counts else "nothing found"
    read = f"{counted(len(runs), 'run')} in {counted(files - unread, 'file')}; {result}"
    parts: list[RenderableType] = [read + (f"; {counted(unread, 'file')} not read" if unread else "")]
    if folder := _common_folder(runs):
        parts.append(f"in {folder}")
    for client, own in grouped(runs, lambda run: run.client).items():
        rows = [_row(run) | {"run": run.id.removeprefix(folder)} for run in own]
        parts += [f"\n{client}", table_of(rows)]
        if any(cell.endswith(DERIVED) for row in rows for cell in row.values()):
            parts.append(f"{DERIVED.strip()} derived from other numbers of the row")
    told = [(TITLES[one.severity], f"{one.rule}: {one.message.removeprefix(f'{run.source}: ')}", run)
            for severity in TITLES for run, one in found if one.severity == severity]  # fmt: skip
    told += [(ASSUMED, note, run) for run in runs for note in run.notes]
    notes = []
    for (title, text), each in grouped(told, lambda one: one[:2]).items():
        ids = [run.id.removeprefix(folder) for *_, run in each]
        about = ", ".join(ids[:NAMED]) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")
        notes.append((title, f"{'all' if len(ids) == len(runs) > 1 else about}: {' '.join(text.split())}"))
    return Group(*parts, *(["", noted(notes)] if notes else []))


def _row(run: ServingRun) -> dict[str, str]:
    severities = Counter[Severity](one.severity for one in run.findings if one.severity != "note")
    latencies = {header: _latency(run, *which) for header, which in LATENCIES.items()}
    cells = {
        "run": run.id, "output tok/s": _output(run), "TTFT ms": "", "TPOT ms": "", "load": _load(run),
        "in/out": _lengths(run), "found": _counts(severities), **latencies,
        "else": "" if _output(run) or any(latencies.values()) else _other(run),
        "speculation": "" if run.speculation == "none" else run.speculation,
        "hardware": f"{run.gpus}x {run.hardware or '?'}" if run.gpus else run.hardware,
        "engine": f"{run.engine} {run.version.partition('+')[0]}",
        "mode": "" if run.mode == "unknown" else run.mode,
    }  # fmt: skip
    return {header: " ".join(cell.split()) for header, cell in cells.items()}


def _lengths(run: ServingRun) -> str:
    """Mean tokens of a request, in and out: as counted, unless the client keeps a window of the run."""
    load, completed, sides = run.workload, run.totals.completed, []
    for side in ("input", "output"):
        tokens = getattr(run.totals, f"{side}_tokens")
        asked, longest = getattr(load, f"{side}_len"), getattr(load, f"longest_{side}_len")
        if tokens is not None and completed and not (load.warmup_s or load.cooldown_s):
            each = tokens / completed
            sides.append(f"{each:.4g}" if each < 1e4 else f"{each:.0f}")
        else:
            most = "?" if longest is None else f"<={longest:g}"
            sides.append(most if asked is None else f"{asked:g}")
    return "" if sides == ["?", "?"] else "/".join(sides)


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
    for tokens, kind in (("output", ""), ("total", " in+out"), ("unknown", " of ?")):
        if metric := run.metric("throughput", tokens=tokens):
            number = f"{metric.value:.5g}{kind} / {SCOPES.get(metric.scope, '?')}"
            return number + (DERIVED if metric.derived else "")
    return ""


def _latency(run: ServingRun, name: str, statistic: str) -> str:
    """The statistic of the column; for a mean that the run lacks its median or another value, named."""
    metric, label = run.metric(name, statistic), ""
    if metric is None and statistic == "mean":
        others = [one for one in run.metrics if one.name == name and one.statistic not in SPREAD]
        metric = min(others, key=lambda one: one.statistic not in ("median", "p50"), default=None)
        label = f" {STATISTICS.get(metric.statistic, metric.statistic)}" if metric else ""
    if metric is None:
        return ""
    number = f"{metric.value:.0f}" if metric.value >= 1e3 else f"{metric.value:.4g}"
    return number + label + (DERIVED if metric.derived else "")


def _other(run: ServingRun) -> str:
    """The first number of a run that has none of the columns', and how many more there are."""
    if not run.metrics:
        return ""
    first, more = run.metrics[0], len(run.metrics) - 1
    unit = f" {first.unit}" if first.unit != "1" else ""
    number = f"{first.name} {BOUNDS.get(first.statistic, '')}{first.value:.5g}{unit}"
    return number + (f", {more} more" if more else "")


def _counts(severities: Counter[Severity]) -> str:
    named = [(severities[one], "notes" if one == "note" and severities[one] > 1 else one) for one in TITLES]
    return ", ".join(f"{count} {name}" for count, name in named if count)


def _common_folder(runs: Sequence[ServingRun]) -> str:
    """The folder that all runs stand in, with its slash."""
    if len({run.id.startswith("/") for run in runs}) > 1:
        return ""  # some are absolute
    shared = os.path.commonpath([str(PurePath(run.id).parent) for run in runs])
    return f"{shared}/" if shared and all(run.id.startswith(f"{shared}/") for run in runs) else ""


def as_csv(runs: Sequence[ServingRun]) -> str:
    """A line for each metric; lengths as served, else as asked for. A rate of `inf` is no limit."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for run in runs:
        findings = sorted({f"{f.severity}:{f.rule}" for f in run.findings if f.severity != "note"})
        about = {name: getattr(run, name) for name in ABOUT}
        about |= {f"{side}_len": length(run, side) for side in ("input", "output")}
        about["request_rate"] = math.inf if run.workload.request_rate == 0 else run.workload.request_rate
        about |= {"run": run.id, "max_concurrency": run.workload.concurrency, "findings": " ".join(findings)}
        for metric in run.metrics:
            table.writerow(about | metric.model_dump(exclude={"name"}) | {"metric": metric.name})
    return text.getvalue()
