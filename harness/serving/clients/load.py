"""Loads the file of any supported client: runs of one schema, each examined by the integrity rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from harness.errors import UnreadableError, mistake
from harness.serving.clients.fields import plain
from harness.serving.clients.files import Document, read
from harness.serving.clients.format import Format, formats, table_file
from harness.serving.integrity import examined
from harness.serving.schema import Finding, Metric, ServingRun, Totals

FASTER = 3.0  # how much faster the first token is if the prefix cache has the prompts
SAME = 0.2  # relative: the most by which TPOT of both runs may differ


def load(path: str | Path) -> list[ServingRun]:
    """The runs in a file, in its order, with what the integrity rules find in `findings`. Raises
    UnreadableError (a UsageError) if the file cannot be read or is of no known client."""
    return beside_each_other(load_each(path))


def load_each(path: str | Path) -> list[ServingRun]:
    """As `load`, but without the findings that come of comparing a run with those before it."""
    document = read(Path(path))
    return [run for part, known in _with_formats(document) for run in _runs(part, known)]


def beside_each_other(runs: Iterable[ServingRun]) -> list[ServingRun]:
    """The runs, with findings on those that repeat an earlier run, or find its prompts in the cache."""
    by_numbers: dict[tuple[Totals, tuple[Metric, ...]], str] = {}  # the id of the first run
    by_load: dict[object, ServingRun] = {}  # the first run of each load on each system
    marked = []
    for run in runs:
        system = (run.client, run.model, run.hardware, run.gpus, run.engine, run.version, run.parallelism)
        first_of_load = by_load.setdefault((*system, run.workload, run.totals.input_tokens), run)
        numbers = (run.totals, run.metrics)
        if numbers in by_numbers:
            rule, same = "repeated", f"every number is that of {by_numbers[numbers]}"
            message = f"{run.id}: {same}: the same run again"
        else:
            by_numbers[numbers] = run.id
            rule, message = "prefix_cache", _cached(first_of_load, run)
        finding = Finding(rule=rule, severity="suspect", message=message)
        if message and finding not in run.findings:
            run = run.model_copy(update={"findings": (*run.findings, finding)})
        marked.append(run)
    return marked


def _cached(first: ServingRun, again: ServingRun) -> str:
    """A message if the TTFT of a run shows that the prefix cache had its prompts, which one seed makes the
    same as those of the first run; empty: it does not."""
    was = first.value("ttft", "median") or first.value("ttft", "mean")
    now = again.value("ttft", "median") or again.value("ttft", "mean")
    tpot_was, tpot_now = first.value("tpot", "mean"), again.value("tpot", "mean")
    if first is again or first.totals.input_tokens is None or not was or not now:
        return ""
    if not tpot_was or tpot_now is None or was / now < FASTER or abs(tpot_now / tpot_was - 1) > SAME:
        return ""
    return (
        f"{again.id}: TTFT is {now:.4g} ms where {first.id}, with as many tokens in, took {was:.4g} ms: the "
        "same prompts again, from the prefix cache (flush it, or use another --seed)"
    )


def _with_formats(document: Document) -> list[tuple[Document, Format]]:
    """The document with its format; or, of a file with lines of several clients, each line with its own.
    Raises UnreadableError if the document or such a line is of no known client."""
    lines: list[tuple[int, Document, Format | None]] = []
    for number, row in document.content if document.kind == "jsonl" else ():
        line = replace(document, content=[(number, row)])
        lines.append((number, line, format_of(line)))
    if len({known.name for _, _, known in lines if known}) > 1:
        for number, _, known in lines:
            if known is None:
                raise UnreadableError(f"cannot read {document.path}, line {number}: of no known client")
        return [(line, known) for _, line, known in lines if known]
    if known := format_of(document):
        return [(document, known)]
    if what := _of_other_tool(document):
        raise UnreadableError(f"cannot read {document.path}: {what}")
    unknown = f"of no known client{_nearest(document)}; known: {', '.join(formats())}"
    raise UnreadableError(document.broken or f"cannot read {document.path}: {unknown}")


def format_of(document: Document) -> Format | None:
    """The first format that recognises the document."""
    return next((known for known in formats().values() if known.recognises(document)), None)


def _nearest(document: Document) -> str:
    """The client of whose own keys the file has the most, at least two; empty if there is none."""
    rows = document.candidates()
    shared = {}
    for known in formats().values():
        shared[known.name] = sorted({key for row in rows for key in known.keys_in(row)})
    name = max(shared, key=lambda name: len(shared[name]))
    return f", nearest to {name} ({', '.join(shared[name][:2])})" if shared[name] else ""


def _of_other_tool(document: Document) -> str:
    """A message if the file is one of formats/others.toml: what it is, and what to give instead."""
    keys = set(document.header)
    text = document.text.lower() if document.kind == "text" else ""
    for row in document.candidates():
        keys |= set(row)
        for value in row.values():
            inner = value[0] if isinstance(value, list) and value else value
            keys |= set(inner) if isinstance(inner, Mapping) else set()
    for instead, tools in table_file("others").items():
        for what, marks in tools.items():
            if any(set(mark.split("|")) <= keys or mark.lower() in text for mark in marks):
                return f"it is {what}, which is not read: {instead}"
    return ""


def _runs(document: Document, known: Format) -> list[ServingRun]:
    try:
        runs = known.runs(document)
    except ValidationError as error:
        raise UnreadableError(f"cannot read {document.path} as {known.name}: {mistake(error)}") from None
    if not runs:
        raise UnreadableError(f"cannot read {document.path} as {known.name}: no run in it")
    return [examined(run.model_copy(update={"extra": plain(run.extra)})) for run in runs]
