"""All published results of the tree: the five documents, other points, and the raw rows behind them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from harness.serving.clients.load import load
from harness.serving.published.documents import FOLDER, Claim, Configuration, PublishedDocument, documents
from harness.serving.schema import ServingRun

OTHERS = FOLDER / "others"


@functools.cache
def published_documents() -> list[PublishedDocument]:
    """The five documents, then points that others published elsewhere."""
    return [*documents(FOLDER), *(documents(OTHERS) if OTHERS.is_dir() else ())]


def published_configurations() -> dict[str, Configuration]:
    return {
        configuration.name: configuration
        for document in published_documents()
        for configuration in document.configurations
    }


@functools.cache
def raw_files() -> dict[str, list[ServingRun]]:
    """The raw rows that documents' numbers are held against, by file: each by the name that `refers_to` has
    for it, as `dstack.online:31`, and with the documented configuration of its machine and version."""
    setups = list(published_configurations().values())
    return {
        str(path.relative_to(FOLDER)): [_named(run, setups) for run in load(path)]
        for path in sorted(FOLDER.glob("*/*.csv"))
    }


def _named(run: ServingRun, setups: Iterable[Configuration]) -> ServingRun:
    key = (run.hardware, run.engine, run.version)
    alike = [
        setup for setup in setups if run.version and (setup.hardware, setup.engine, setup.version) == key
    ]
    update: dict[str, object] = {"id": f"{run.client}:{run.source.rpartition(':')[2]}"}
    if len(alike) == 1:
        update |= {name: getattr(alike[0], name) for name in ("image", "flags", "environment", "parallelism")}
        update["configuration"] = alike[0].name
    return run.model_copy(update=update)


def known_by_id() -> dict[str, ServingRun | Claim]:
    """Runs, rows and claims."""
    known: dict[str, ServingRun | Claim] = {}
    for document in published_documents():
        known |= {run.id: run for run in document.runs}
        known |= {claim.id: claim for claim in document.claims}
    for runs in raw_files().values():
        known |= {run.id: run for run in runs}
    return known
