"""Published runs by their ids: those of the documents, of other sources, and of the raw files behind them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from harness.serving.clients.load import load
from harness.serving.integrity import examined
from harness.serving.published.documents import FOLDER, Configuration, documents
from harness.serving.schema import ServingRun


@functools.cache
def published_runs() -> dict[str, ServingRun]:
    """With what `serving load` finds in each."""
    every = [*documents(FOLDER), *documents(FOLDER / "others")]
    known = {run.id: examined(run) for document in every for run in document.runs}
    setups = [setup for document in every for setup in document.configurations]
    raw = [run for path in sorted(FOLDER.glob("*/*.csv")) for run in load(path)]
    return known | {run.id: run for run in (_named(run, setups) for run in raw)}


def _named(run: ServingRun, setups: Iterable[Configuration]) -> ServingRun:
    """By the name that documents have for it, as `dstack.online:31`, and with the documented configuration of
    its machine, engine and version where there is one."""
    key = (run.hardware, run.engine, run.version)
    alike = [
        setup for setup in setups if run.version and (setup.hardware, setup.engine, setup.version) == key
    ]
    update: dict[str, object] = {"id": f"{run.client}:{run.source.rpartition(':')[2]}"}
    if len(alike) == 1:
        update |= {name: getattr(alike[0], name) for name in ("image", "flags", "environment", "parallelism")}
        update["configuration"] = alike[0].name
    return run.model_copy(update=update)
