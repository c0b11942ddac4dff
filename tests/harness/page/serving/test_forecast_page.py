"""The forecast's section: its bands and parts are the document's."""

from __future__ import annotations

import json

import pytest

from harness.page.serving.forecast import forecast_section
from harness.serving.ledger.prediction import KernelChange
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.forecast import forecast
from harness.serving.link.model import link
from harness.serving.link.report import as_json
from tests.harness.page.serving.specs import charts, compiled, data, expressions, require_valid


@pytest.fixture(scope="module")
def document():
    model = link("h200", "sglang")
    changes = [KernelChange(op="fused_moe", factor=1.3, low=1.2, high=1.4)]
    loads = [ClosedLoop(1024, 1024, concurrency) for concurrency in (4, 64)]
    return json.loads(
        as_json(model, [forecast(model, load, changes, 20.0) for load in loads], [], ["fused_moe=1.3x"], 20.0)
    )


def by_title(section):
    return {chart.title: chart for chart in charts(section)}


def test_bands_are_the_documents(document):
    section = forecast_section(document, "sweep")
    require_valid(section)
    for title, key, quantity in (
        ("TPOT by concurrency", "tpot", "tpot"),
        ("mean TTFT by concurrency", "ttft_mean", "ttft"),
        ("output throughput by concurrency", "output", "output_throughput"),
    ):
        points = [mark for mark in data(by_title(section)[title]) if "side" in mark]
        expected = set()
        for workload in document["workloads"]:
            concurrency, value = workload["load"]["concurrency"], workload[key]
            change = next(c for c in workload["changes"] if c["quantity"] == quantity)
            expected.add((concurrency, value["value"], value["low"], value["high"]))
            ends = (change["before"] + change["low"], change["before"] + change["high"])
            expected.add((concurrency, change["after"], *ends))
        assert {(p["concurrency"], p["value"], p["low"], p["high"]) for p in points} == expected


def test_parts_sum_to_tpot(document):
    segments = data(by_title(forecast_section(document, "sweep"))["Where the time of a token goes"])
    for workload in document["workloads"]:
        of_load = [s for s in segments if s["concurrency"] == workload["load"]["concurrency"]]
        assert sum(s["ms"] for s in of_load) == pytest.approx(workload["tpot"]["value"])
        stalls = sum(s["ms"] for s in of_load if s["phase"] != "decode step")
        assert stalls == pytest.approx(workload["stall_ms"])


def test_what_the_target_needs(document):
    marks = data(by_title(forecast_section(document, "sweep"))["What the target needs"])
    answers = {(m["concurrency"], m["op"]): m["answer"] for m in marks if "op" in m}
    assert answers[4, "fused_moe"] == "reached already"
    assert answers[64, "mla_decode"] == "not reachable"
    assert answers[64, "fused_moe"].endswith("x")


def test_a_single_load_without_changes(document):
    alone = document["workloads"][0] | {"changes": [], "needs": [], "shares": []}
    section = forecast_section(document | {"workloads": [alone], "target_tpot_ms": None}, "alone")
    require_valid(section)
    assert [mark["side"] for mark in data(section.charts[0])] == ["as it is"]


def test_hostile_names_stay_data(document):
    text = "<script>alert(1)</script>'\""
    share = document["workloads"][0]["shares"][0] | {"name": text, "origin": text}
    workload = document["workloads"][0] | {"shares": [share]}
    section = forecast_section(document | {"workloads": [workload], "engine": text}, text)
    require_valid(section)
    for chart in section.charts:
        assert not [e for e in expressions(compiled(chart)) if "alert" in e]


def test_the_headline_says_what_was_changed(document):
    assert "fused_moe=1.3x: " in forecast_section(document, "x").headline


def test_no_workload_is_said():
    assert forecast_section({"bounds": []}, "x").headline == "No workload is forecast in this document."
