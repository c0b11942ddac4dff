"""The ledger's section: its charts and tables hold the ledgers' numbers, misses included."""

from __future__ import annotations

import pytest

from harness.page.serving.ledger import ledger_section
from harness.page.serving.ledger_lines import ledger_lines, row_names
from harness.serving.ledger.index import known_rows
from harness.serving.ledger.ledger import (
    ExplanationEntry,
    LedgerRow,
    Observation,
    ObservationEntry,
    PredictionEntry,
)
from harness.serving.ledger.prediction import Prediction
from harness.serving.ledger.residuals import residuals
from tests.harness.page.serving.specs import compiled, data, expressions, require_valid
from tests.support.paths import ROOT

FOLDER = ROOT / "results" / "epyc-zen4-2core" / "serving"
HOSTILE = "<script>alert('x')</script>\"]'datum.y.z[0]\\"


def prediction(row="a", change=-8.0, low=-9.0, high=-7.0, method="replay", **more):
    record = Prediction(quantity="itl", unit="ms", method=method, change=change, low=low, high=high, **more)
    return PredictionEntry(row=row, at="2026-01-01", prediction=record)


def observation(row="a", change=-8.2, low=-9.1, high=-7.3):
    record = Observation(
        quantity="itl", unit="ms", before=64.0, after=64.0 + change, change=change, low=low, high=high
    )
    return ObservationEntry(row=row, at="2026-01-02", observation=record)


@pytest.mark.parametrize("name", ["cpu-default", "cpu-short", "cpu-long"])
def test_numbers_are_the_ledgers(name):
    rows = list(known_rows([str(FOLDER / name)]))
    section = ledger_section(rows, name)
    require_valid(section)
    drawn = [mark for chart in section.charts for mark in data(chart)]
    predicted = {(m["row"], m["line"], m["value"], m["low"], m["high"]) for m in drawn if m.get("upper")}
    observed = {(m["row"], m["value"], m["low"], m["high"]) for m in drawn if m.get("upper") is False}
    judged = [residual for row in rows for residual in residuals(row)]
    assert predicted == {(r.row, r.method, r.predicted, r.low, r.high) for r in judged}
    assert observed == {(r.row, r.observed, r.observed_low, r.observed_high) for r in judged}
    off = [m["relative"] for m in drawn if "relative" in m]
    assert sorted(off) == sorted(r.relative for r in judged if r.verdict != "not resolved")


def test_every_row_and_every_miss_is_there():
    rows = list(known_rows([]))
    section = ledger_section(rows, "all")
    require_valid(section)
    names = row_names(rows)
    assert len(set(names)) == len(rows) > 30
    drawn = {mark["row"] for chart in section.charts for mark in data(chart) if "row" in mark}
    assert drawn | {label for label, _ in section.notes} >= set(names)
    judged = [residual.verdict for row in rows for residual in residuals(row)]
    lines = ledger_lines(rows)
    for verdict in ("missed", "bound broken"):
        assert sum(line.verdict == verdict for line in lines) == judged.count(verdict) > 0
    of_each = [chart.table for chart in section.charts if chart.title != "How far off"]
    tabled = [row for table in of_each if table for row in table.rows]
    assert len(tabled) == len(lines)
    assert {table.columns[2] for table in of_each if table} == {
        "predicted, ms",
        "predicted, s",
        "predicted, tok/s",
        "predicted, x before",
    }


def test_what_was_not_observed_or_has_no_interval_says_so():
    rows = [
        LedgerRow(id="a", predictions=(prediction(low=None, high=None),)),
        LedgerRow(id="b", observations=(observation(low=None, high=None),)),
        LedgerRow(id="c"),
        LedgerRow(
            id="d", predictions=(prediction(change=None, high=None, method="bound"),),
            observations=(observation(),), explanations=(ExplanationEntry(row="d", text="why"),),
        ),
    ]  # fmt: skip
    section = ledger_section(rows, "partial")
    require_valid(section)
    verdicts = {m["row"]: m["verdict"] for m in data(section.charts[0])}
    assert verdicts == {"a": "not observed yet", "b": "no prediction", "d": "bound holds, blind"}
    assert "Not observed yet: a." in section.charts[0].reading
    assert ("c", "nothing predicted, nothing observed") in section.notes and ("d", "why") in section.notes


def test_nothing_is_said():
    assert ledger_section([], "none").headline == "Nothing was predicted or observed."
    assert not ledger_section([LedgerRow(id="a")], "none").charts


def test_text_stays_data():
    row = LedgerRow(
        id=HOSTILE, predictions=(prediction(of=HOSTILE), prediction()), observations=(observation(),)
    )
    section = ledger_section([row, row], HOSTILE)
    require_valid(section)
    assert len({mark["row"] for mark in data(section.charts[0])}) == 2
    for chart in section.charts:
        assert not [text for text in expressions(compiled(chart)) if "alert" in text]
