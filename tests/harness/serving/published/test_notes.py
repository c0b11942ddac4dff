"""Readers' notes of published numbers: the data that commands read agrees with them."""

from __future__ import annotations

import json
from collections.abc import Iterator

from harness.paths import PUBLISHED
from harness.serving.ledger.published import NOTED, published_rows
from harness.serving.published.documents import PublishedDocument, documents
from harness.serving.schema import Metric

NOTES = PUBLISHED / "notes"
SECONDS = {"s": 1e3}  # of the notes; the schema has latencies in ms


def metrics_by_id(document: PublishedDocument) -> Iterator[tuple[str, tuple[Metric, ...]]]:
    yield from ((run.id, run.metrics) for run in document.runs)
    yield from ((claim.id, (claim.metric,)) for claim in document.claims if claim.metric)


def numbers(entry: object) -> Iterator[float]:
    if isinstance(entry, (dict, list)):
        for value in entry.values() if isinstance(entry, dict) else entry:
            yield from numbers(value)
    elif isinstance(entry, (int, float)):
        yield entry


def test_what_was_noted_of_a_run_is_what_its_document_holds():
    rows = json.loads((NOTES / "document_runs.json").read_text())["runs"]
    assert len(rows) == 51
    known = dict(pair for document in documents() for pair in metrics_by_id(document))
    shared = [row for row in rows if row["id"] in known]
    assert len(shared) == 29
    for row in shared:
        values = {
            metric.value / (SECONDS.get(row["unit"], 1.0) if metric.unit == "ms" else 1.0)
            for metric in known[row["id"]]
        }
        assert row["value"] in values, row["id"]


def test_every_published_point_was_noted():
    noted = {entry["id"]: set(numbers(entry)) for entry in json.loads((NOTES / "ab_points.json").read_text())}
    for row in published_rows([NOTED]):
        (observed,) = row.observations
        entry = noted[next(name for name in noted if row.id.startswith(name))]
        for value in (observed.observation.before, observed.observation.after):
            assert {value, round(value / 1e3, 9)} & entry, row.id
