"""Any supported client's file, as runs of one schema, each held to the integrity tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from harness.errors import mistake
from harness.serving.clients import FORMATS, Known
from harness.serving.clients.fields import plain
from harness.serving.clients.files import Document, UnreadableError, read
from harness.serving.integrity import examined
from harness.serving.schema import Finding, Metric, ServingRun, Totals


def load(path: str | Path) -> list[ServingRun]:
    """The runs in a file, in its order, with what the integrity tests find in `findings`.

    Raises UnreadableError (a UsageError) where the file cannot be read or is of no known client.
    """
    document = read(Path(path))
    return list(_repeated(run for part, known in _parts(document) for run in _runs(part, known)))


def _repeated(runs: Iterable[ServingRun]) -> Iterator[ServingRun]:
    """The runs; one whose measured numbers are all those of a run before it is said to be that one again."""
    seen: dict[tuple[Totals, tuple[Metric, ...]], str] = {}
    for run in runs:
        first = seen.setdefault((run.totals, run.metrics), run.id)
        if first != run.id:
            message = f"{run.id}: every number is that of {first}: the same run again"
            finding = Finding(rule="repeated", severity="suspect", message=message)
            run = run.model_copy(update={"findings": (*run.findings, finding)})
        yield run


def _parts(document: Document) -> list[tuple[Document, Known]]:
    """The document with its format; where lines of several clients were appended to one file, each run of
    lines with its own."""
    if document.kind == "jsonl":
        lines = [replace(document, content=[row]) for row in document.content]
        owned = [(line, _format(line)) for line in lines]
        if len({known for _, known in owned if known}) > 1:
            stray = next((line.content[0][0] for line, known in owned if known is None), None)
            if stray is not None:
                raise UnreadableError(f"cannot read {document.path}, line {stray}: of no known client")
            return [(line, known) for line, known in owned if known]
    known = _format(document)
    if known is None and document.not_json:
        raise UnreadableError(document.not_json)
    if known is None:
        names = ", ".join(format_.name for format_ in FORMATS)
        raise UnreadableError(
            f"cannot read {document.path}: of no known client{_nearest(document)}; known: {names}"
        )
    return [(document, known)]


def _format(document: Document) -> Known | None:
    return next((format_ for format_ in FORMATS if format_.recognises(document)), None)


def _nearest(document: Document) -> str:
    """The client most of whose own keys the file has, with two of them; empty where it has none of any."""
    keys = {key for row in document.candidates() for key in row}
    shared = {f.name: sorted(f.own & keys) for f in FORMATS}
    name = max(shared, key=lambda each: len(shared[each]))
    if not shared[name]:
        return ""
    return f", nearest to {name} ({', '.join(shared[name][:2])})"


def _runs(document: Document, known: Known) -> list[ServingRun]:
    try:
        runs = known.runs(document)
    except ValidationError as error:
        raise UnreadableError(f"cannot read {document.path} as {known.name}: {mistake(error)}") from None
    if not runs:
        raise UnreadableError(f"cannot read {document.path} as {known.name}: no run in it")
    return [examined(run.model_copy(update={"extra": plain(run.extra)})) for run in runs]
