"""Published changes: each is predicted by the command beside its prediction, or says what it lacks."""

from __future__ import annotations

import json
import shlex

import pytest

from harness.errors import UsageError
from harness.page.serving.ledger_lines import ledger_lines
from harness.paths import ROOT
from harness.serving.ledger import published
from harness.serving.ledger.link_predictions import (
    ABOUT,
    STORED,
    StoredPrediction,
    of_document,
    stored,
)
from harness.serving.ledger.published import published_changes, published_rows
from harness.serving.ledger.report import as_text, published_summary
from harness.serving.ledger.residuals import residuals


def test_each_publication_says_what_it_lacks():
    changes, rows = published_changes(), published_rows()
    assert len({row.id for row in rows}) == len(rows) >= 25
    assert len({change.source for change in changes}) >= 12
    assert [change.id for change in changes if not change.lacks] == []
    assert {change.row(p) for change in changes if change.link for p in change.points} == set(stored())


def test_the_model_still_predicts_what_is_stored(request, cli):
    """--golden=write stores what it predicts of all points."""
    anew, kept = request.config.getoption("golden") == "write", stored()
    made = []
    for change, point in [(c, p) for c in published_changes() if c.link for p in c.points]:
        row, command = change.row(point), change.command(point)
        if anew or row in ("sglang-5432", "aiter-1930 c=4"):
            done = cli(*shlex.split(command)[3:])
            found = of_document(json.loads(done.stdout), point.quantity, relative=point.unit == "1")
            made.append(StoredPrediction(row=row, command=command, prediction=found))
    if anew:
        document = {"about": ABOUT, "predictions": [entry.model_dump() for entry in made]}
        STORED.write_text(json.dumps(document, indent=1) + "\n")
        return
    for entry in made:
        assert entry.command == kept[entry.row].command
        for name in ("change", "low", "high", "before"):
            before = getattr(kept[entry.row].prediction, name)
            assert getattr(entry.prediction, name) == pytest.approx(before, rel=1e-4)


def test_a_prediction_of_another_command_is_refused(monkeypatch):
    known = stored()
    known["sglang-5432"] = known["sglang-5432"].model_copy(
        update={"command": "python -m harness serving link"}
    )
    monkeypatch.setattr(published, "stored", lambda: known)
    with pytest.raises(UsageError, match=r"no prediction of sglang-5432 .* --golden=write"):
        published_rows()


def test_a_ratio_is_predicted_as_a_part_of_the_links_own_value():
    record = {"unit": "tok/s", "method": "link", "change": 5.0, "low": 4.0, "high": 8.0}
    found = {"quantity": "output_throughput", **record, "before": 100.0, "after": 105.0}
    document = {"workloads": [{"changes": [found]}]}
    whole = of_document(document, "output_throughput", relative=False)
    part = of_document(document, "output_throughput", relative=True)
    assert (whole.unit, whole.change, whole.before) == ("tok/s", 5.0, 100.0)
    assert (part.unit, part.change, part.low, part.high, part.before) == ("1", 0.05, 0.04, 0.08, 1.0)
    with pytest.raises(UsageError, match="predicts no duration"):
        of_document(document, "duration", relative=False)


def test_a_faster_kernel_bounds_a_rate_from_above():
    [row] = [row for row in published_rows() if row.id == "trtllm-blog3 grouped-gemm"]
    [bound] = residuals(row)
    assert (bound.low, bound.verdict) == (0.0, "bound holds") and bound.high == pytest.approx(0.13)
    # 1 - 1/1.013 of the time was saved, 1 - 1/1.13 of the kernel's
    assert "share of at least 11%" in row.explanations[0].text


def test_a_ratio_is_called_the_same_in_the_table_and_on_the_page():
    rows = [row for row in published_rows() if row.id == "trtllm-blog3 grouped-gemm"]
    [line] = ledger_lines(rows)
    assert f"1 -> 1.013 {line.unit}, +0.013 {line.unit}" in as_text(rows)


def test_the_document_counts_as_the_ledger_does():
    [summary] = published_summary(published_rows())
    assert summary in (ROOT / "docs" / "serving-link.md").read_text()
    assert list(published_summary([])) == []
