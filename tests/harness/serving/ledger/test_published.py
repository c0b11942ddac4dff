"""Published changes: each is predicted by the command beside its prediction, or says what it lacks."""

from __future__ import annotations

import pytest
from predict_changes import predicted

from harness.errors import UsageError
from harness.paths import ROOT
from harness.serving.ledger import published
from harness.serving.ledger.link_predictions import of_document, stored
from harness.serving.ledger.published import published_changes, published_rows
from harness.serving.ledger.report import published_summary
from harness.serving.ledger.residuals import residuals


def test_each_publication_says_what_it_lacks():
    changes, rows = published_changes(), published_rows()
    assert len({row.id for row in rows}) == len(rows) >= 25
    assert len({change.source for change in changes}) >= 12
    assert [change.id for change in changes if not change.lacks] == []
    assert {change.row(p) for change in changes if change.link for p in change.points} == set(stored())


@pytest.mark.parametrize("row", ["sglang-5432", "aiter-1930 c=4"])
def test_the_model_still_predicts_what_is_stored(row):
    [(change, point)] = [(c, p) for c in published_changes() for p in c.points if c.row(p) == row]
    made, kept = predicted(change, point), stored()[row]
    assert made.command == kept.command
    for name in ("change", "low", "high", "before"):
        assert getattr(made.prediction, name) == pytest.approx(getattr(kept.prediction, name), rel=1e-4)


def test_a_prediction_of_another_command_is_refused(monkeypatch):
    known = stored()
    known["sglang-5432"] = known["sglang-5432"].model_copy(
        update={"command": "python -m harness serving link"}
    )
    monkeypatch.setattr(published, "stored", lambda: known)
    with pytest.raises(UsageError, match=r"no prediction of sglang-5432 .* tools.predict_changes"):
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


def test_the_document_counts_as_the_ledger_does():
    [summary] = published_summary(published_rows())
    assert summary in (ROOT / "docs" / "serving-link.md").read_text()
    assert list(published_summary([])) == []
