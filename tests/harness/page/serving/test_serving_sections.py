"""Sections of serving whose records are broken, begun or hostile; of whole ones: ../test_pages.py."""

import json

import pytest

from harness import archive
from harness.errors import UsageError
from harness.page.assemble import written_section
from harness.page.document import Page
from harness.page.serving.forecast import forecast_section
from harness.page.serving.ledger import ledger_section
from harness.page.serving.replay import replay_section
from harness.serving.ledger import LedgerRow
from tests.harness.page.serving.entries import expressions, observation, prediction
from tests.harness.page.test_pages import require_valid
from tests.support.paths import DATA, ROOT

FOLDER = ROOT / "results" / "epyc-zen4-2core" / "serving"
REPLAY = FOLDER / "cpu-default" / "stages" / "experts-grouped" / "replay-decode-0.json"
HOSTILE = "<script>alert('x')</script>\"]'datum.y.z[0]\\"


def require_harmless(section) -> None:
    require_valid(Page("", sections=[section]))
    assert not [text for text in expressions(section) if "alert" in text]


# Ledgers


def test_a_ledger_s_text_stays_data_and_nothing_is_said():
    row = LedgerRow(
        id=HOSTILE, predictions=(prediction(of=HOSTILE), prediction()), observations=(observation(),)
    )
    require_harmless(ledger_section([row, row], HOSTILE))
    assert ledger_section([], "none").headline == "Nothing was predicted or observed."
    assert not ledger_section([LedgerRow(id="a")], "none").charts


# Forecasts


def test_a_forecast_s_text_stays_data_and_loads_may_be_one_or_none():
    document = json.loads((DATA / "page/forecast.json").read_text())
    share = document["workloads"][0]["shares"][0] | {"name": HOSTILE, "origin": HOSTILE}
    workload = document["workloads"][0] | {"shares": [share]}
    require_harmless(forecast_section(document | {"workloads": [workload], "engine": HOSTILE}, HOSTILE))
    alone = document["workloads"][0] | {"changes": [], "needs": [], "shares": []}
    section = forecast_section(document | {"workloads": [alone], "target_tpot_ms": None}, "alone")
    require_harmless(section)
    assert section.headline.count("at concurrency") == 1
    assert forecast_section({"workloads": []}, "x").headline == "No load is predicted in this document."
    with pytest.raises(UsageError, match="no prediction of serving"):
        forecast_section({"workloads": [{"load": {}}]}, "x")


# Replays


def test_replays_that_failed_or_are_broken(tmp_path):
    document = json.loads(archive.read_bytes(REPLAY))["replays"][0]
    arms = {"base": {"chosen": {}, "failed": "<script>"}}
    file = tmp_path / "a.json"
    file.write_text(json.dumps(document | {"arms": arms, "twin": None, "step": {}}))
    section = written_section(file)
    assert not list(Page("", sections=[section]).charts())
    assert "base failed: <script>" in section.sections[0].headline
    assert replay_section([], "none").headline == "Nothing was replayed."
    for content in ("", "3", "{}"):
        file.write_text(content)
        with pytest.raises(UsageError, match=r"a\.json"):
            written_section(file)
    assert written_section(REPLAY).title == REPLAY.name, "it is found in an archive"
