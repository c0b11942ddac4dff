"""Selection of what is audited: published documents by id, a user's files by path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import archive
from harness.errors import UsageError
from harness.serving.audit.corpus import Audited
from harness.serving.clients.files import UnreadableError
from harness.serving.clients.load import load
from harness.serving.integrity import examined
from harness.serving.published.documents import PublishedDocument
from harness.serving.published.index import published_documents, raw_files
from harness.serving.schema import ServingRun


def published_audits() -> list[Audited]:
    """All published documents, and the raw files behind them."""
    files = (Audited(name, runs=tuple(runs)) for name, runs in raw_files().items())
    return [*map(of_document, published_documents()), *files]


def of_document(document: PublishedDocument) -> Audited:
    runs = tuple(run if run.findings else examined(run) for run in document.runs)
    return Audited(document.id, document.title, document.date, document.configurations, runs, document.claims)


def select(names: Sequence[str], published: Sequence[Audited]) -> tuple[list[Audited], list[UnreadableError]]:
    """Those of the names, all published where there is none; and why a file could not be read, which costs
    itself only. All files make one set, as many clients write one for each point of a sweep.

    Raises UsageError where a name is neither a document's nor a file's.
    """
    if not names:
        return list(published), []
    known = {audited.name: audited for audited in published}
    files: dict[str, tuple[ServingRun, ...]] = {}
    unreadable: list[UnreadableError] = []
    for name in dict.fromkeys(names):
        if name in known:
            continue
        if not (Path(name).exists() or archive.is_file(Path(name))):
            raise UsageError(f"{name!r} is neither a file nor a document; documents: {', '.join(known)}")
        try:
            files[name] = tuple(load(name))
        except UnreadableError as error:
            unreadable.append(error)
    selected = [known[name] for name in dict.fromkeys(names) if name in known]
    if files:
        title = next(iter(files)) if len(files) == 1 else f"{len(files)} files"
        selected.append(Audited(title, runs=tuple(run for runs in files.values() for run in runs)))
    return selected, unreadable
