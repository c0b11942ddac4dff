"""Loads the file of any supported client: runs of one schema, each examined by the integrity rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from harness.errors import UnreadableError, mistake
from harness.serving.clients.console import Console
from harness.serving.clients.fields import plain
from harness.serving.clients.files import Document, read
from harness.serving.clients.format import Format, formats, table_file
from harness.serving.integrity import examined
from harness.serving.schema import Finding, Metric, ServingRun, Totals

FASTER = 3.0  # how much faster the first token is if the prefix cache has the prompts
SAME = 0.2  # the most by which TPOT of both runs may differ


def load(path: str | Path) -> list[ServingRun]:
    """The runs in a file, in its order, with what the integrity rules find in `findings`. Raises
    UnreadableError (a UsageError) if the file cannot be read or is of no known client."""
    return beside_each_other(load_each(path))


def load_each(path: str | Path) -> list[ServingRun]:
    """As `load`, but each run by itself."""
    document = read(Path(path))
    return [run for part, known in _parts(document) for run in _runs(part, known)]


def beside_each_other(runs: Iterable[ServingRun]) -> list[ServingRun]:
    """The runs, with findings on those that repeat an earlier run, or find its prompts in the cache."""
    seen: dict[tuple[Totals, tuple[Metric, ...]], str] = {}
    alike: dict[object, ServingRun] = {}
    marked = []
    for run in runs:
        first = seen.get((run.totals, run.metrics))
        seen.setdefault((run.totals, run.metrics), run.id)
        system = (run.client, run.model, run.hardware, run.gpus, run.engine, run.version, run.parallelism)
        before = alike.setdefault((*system, run.workload, run.totals.input_tokens), run)
        rule, message = "prefix_cache", _cached(before, run)
        if first:
            rule, message = "repeated", f"{run.id}: every number is that of {first}: the same run again"
        finding = Finding(rule=rule, severity="suspect", message=message)
        is_new = message and finding not in run.findings
        marked.append(run.model_copy(update={"findings": (*run.findings, finding)}) if is_new else run)
    return marked


def _cached(first: ServingRun, again: ServingRun) -> str:
    """Whether a run found another one's prompts in the cache: a seed gives the same prompts again."""
    was, now = (run.value("ttft", "median") or run.value("ttft", "mean") for run in (first, again))
    tpots = [run.value("tpot", "mean") for run in (first, again)]
    if first is again or first.totals.input_tokens is None or not was or not now or None in tpots:
        return ""
    if was / now < FASTER or abs((tpots[1] or 0) / (tpots[0] or 1) - 1) > SAME:
        return ""
    return (
        f"{again.id}: TTFT is {now:.4g} ms where {first.id}, with as many tokens in, took {was:.4g} ms: the "
        "same prompts again, from the prefix cache (flush it, or use another --seed)"
    )


def _parts(document: Document) -> list[tuple[Document, Format]]:
    """The document with its format, or each line with its own if a file has lines of several clients."""
    if document.kind == "jsonl":
        lines = [replace(document, content=[row]) for row in document.content]
        owned = [(line, format_of(line)) for line in lines]
        if len({known.name for _, known in owned if known}) > 1:
            stray = next((line.content[0][0] for line, known in owned if known is None), None)
            if stray is not None:
                raise UnreadableError(f"cannot read {document.path}, line {stray}: of no known client")
            return [(line, known) for line, known in owned if known]
    if known := format_of(document):
        return [(document, known)]
    if what := _other(document):
        raise UnreadableError(f"cannot read {document.path}: {what}")
    unknown = f"of no known client{_nearest(document)}; known: {', '.join(formats())}"
    raise UnreadableError(document.broken or f"cannot read {document.path}: {unknown}")


def format_of(document: Document) -> Format | None:
    every = (*formats().values(), Console(name="console"))
    return next((known for known in every if known.recognises(document)), None)


def _nearest(document: Document) -> str:
    """The client of whose own keys the file has the most, at least two; empty if there is none."""
    rows = document.candidates()
    shared = {
        one.name: sorted({key for row in rows for key in one.keys_in(row)}) for one in formats().values()
    }
    name = max(shared, key=lambda each: len(shared[each]))
    return f", nearest to {name} ({', '.join(shared[name][:2])})" if shared[name] else ""


def _other(document: Document) -> str:
    """What a file is that is not read, and what to give instead; empty if that is not known."""
    keys, text = set(document.header), document.text.lower() if document.kind == "text" else ""
    for row in document.candidates():
        inner = (value[0] if isinstance(value, list) and value else value for value in row.values())
        keys |= set(row).union(*(value for value in inner if isinstance(value, Mapping)))
    for instead, tools in table_file("others").items():
        for what, marks in tools.items():
            if any({*mark.split("|")} <= keys or mark.lower() in text for mark in marks):
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
