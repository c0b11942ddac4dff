"""Charts of measured cases show what the records say, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.page.document import Chart
from harness.page.measured.arms import arm_charts
from harness.page.measured.case import MeasuredCase, measured_cases
from harness.page.measured.machine import machine_section
from harness.page.measured.ranking import ranking
from harness.page.measured.roofline import roofline
from harness.page.measured.rounds import rounds
from harness.page.measured.sizes import sweep_charts, sweeps, winners
from harness.page.specification import specification
from harness.paths import RESULTS
from harness.results.schema import CaseDone, DisturbedRound
from tests.support.written_runs import case, cell, finished, ranked, write

COMMITTED = RESULTS / "epyc-zen4-2core"
THREE = {"torch.sdpa": 200.0, "vllm.amx": 100.0, "vllm.vec": 150.0}


def layers(chart: Chart) -> list[dict[str, Any]]:
    """Of a picture, each with its data."""
    whole = specification(chart)
    parts = whole.get("layer", [whole])
    data = whole.get("datasets", {})
    for part in parts:
        given = part.get("data") or whole.get("data") or {"values": []}
        part["values"] = data[given["name"]] if "name" in given else given["values"]
    return parts


def points(chart: Chart) -> list[dict[str, Any]]:
    """What has a tooltip."""
    return next(
        part["values"] for part in layers(chart) if "name" in str(part.get("encoding", {}).get("tooltip", ""))
    )


def measured(folder: Path, *cases: Any, **times: Any) -> list[MeasuredCase]:
    records = [record for of in cases for record in ranked(of, times.get("times", THREE))]
    return measured_cases(write(folder, records, cases))


@pytest.mark.parametrize("run", ["mla_decode-r1-tp8", "fused_moe-r1-tp8", "block_scale_gemm-smoke"])
def test_a_ranking_has_every_time_with_its_interval(run):
    for of in measured_cases(COMMITTED / run):
        chart = ranking([of])
        assert len(chart.table.rows) == len(of.cells)
        if not of.timed:
            assert chart.picture is None
            continue
        dots = points(chart)
        size = of.timed[0].time_us / dots[0]["time"]
        assert [dot["name"] for dot in dots] == [c.name for c in of.timed]
        for dot, timed in zip(dots, of.timed, strict=True):
            for key, us in (("time", timed.time_us), ("low", timed.low_us), ("high", timed.high_us)):
                assert dot[key] * size == pytest.approx(us)
        assert chart.marks == len(of.timed)
        if of.limit_us:
            (limit,) = next(part["values"] for part in layers(chart) if "limit" in str(part["values"]))
            assert limit["limit"] * size == pytest.approx(of.limit_us)
            assert of.limit_us == pytest.approx(of.timed[0].time_us * of.timed[0].percent_of_ceiling / 100)


def test_who_has_no_time_is_in_the_table_and_failures_in_the_picture(tmp_path):
    of = case()
    records = [
        cell(of, "torch.sdpa", 100.0, 1.0),
        cell(of, "aiter.asm", None),
        cell(of, "vllm.amx", None, status="wrong", reason="row 3 is off"),
        finished(of),
    ]
    (only,) = measured_cases(write(tmp_path / "run", records, [of]))
    chart = ranking([only])
    assert {row.cells[0]: row.cells[1] for row in chart.table.rows} == {
        "torch.sdpa": "ok", "aiter.asm": "unsupported", "vllm.amx": "wrong"
    }  # fmt: skip
    drawn = str(specification(chart))
    assert "'wrong'" in drawn and "aiter.asm" not in drawn


def test_a_sweep_varies_in_one_size_alone(tmp_path):
    cases = [case(1), case(8), case(8, ctx=900), case(64, boundary="with_quant")]
    found = list(sweeps(measured(tmp_path / "run", *cases)))
    assert [(s.size, [c.planned.sizes[s.size] for c in s.cases]) for s in found] == [
        ("batch", [1, 8]), ("ctx", [100, 900])
    ]  # fmt: skip
    time, speedup, share = sweep_charts(found[0])
    assert {(p["x"], p["name"], p["time"]) for p in points(time)} == {
        (batch, name, us) for batch in (1, 8) for name, us in THREE.items()
    }
    assert {(p["name"], p["speedup"]) for p in points(speedup)} == {
        ("vllm.amx", 2.0),
        ("vllm.vec", 200 / 150),
    }
    assert {p["share"] for p in points(share)} == {1000 / us for us in THREE.values()}


@pytest.mark.parametrize(
    ("word", "provider", "margin"),
    [
        ("faster", "vllm", "1.500x vllm.vec"),
        ("same", "not told apart", "same as vllm.vec"),
        ("unclear", "not told apart", "not told from vllm.vec"),
    ],
)
def test_the_winner_is_one_only_where_the_verdict_says_so(tmp_path, word, provider, margin):
    of = case()
    chart = winners(measured_cases(write(tmp_path / "run", ranked(of, THREE, word), [of])))
    ((field,),) = [points(chart)]
    assert (field["name"], field["provider"], field["margin"]) == ("vllm.amx", provider, margin)


def test_rounds_are_all_there_with_the_pair_and_what_disturbed_them(tmp_path):
    of = case()
    disturbed = [
        DisturbedRound(block=0, round=1, reason="other processes", counted=True),
        DisturbedRound(block=7, round=0, reason="heat", counted=False, seconds={"vllm.amx": 9e-4}),
    ]
    (only,) = measured_cases(write(tmp_path / "run", ranked(of, THREE, disturbed=disturbed), [of]))
    ticks = points(rounds(only, 10_000))
    names = [tick["name"] for tick in ticks]
    assert {name: names.count(name) for name in names} == {
        "vllm.amx": 13, "vllm.vec": 12, "torch.sdpa": 12, "torch.sdpa (again)": 12
    }  # fmt: skip
    assert [t["time"] for t in ticks if t["kind"] == "left out"] == [900.0]
    assert {(t["block"], t["round"]) for t in ticks if t["kind"] == "disturbed"} == {(0, 1)}
    thinned = rounds(only, 20)
    assert len(points(thinned)) < 25 and "1 in 3 is drawn" in thinned.reading
    assert {t["kind"] for t in points(thinned)} == {"quiet", "disturbed", "left out"}
    assert len(thinned.table.rows) == 49


def test_a_row_can_be_chosen_of_those_that_have_a_baseline(tmp_path):
    (only,) = measured(tmp_path / "run", case())
    (param,) = specification(rounds(only, 10_000))["params"]
    assert param["bind"]["options"] == [None, ["vllm.amx", "torch.sdpa"], ["vllm.vec", "torch.sdpa"]]
    (pair,) = measured(tmp_path / "pair", case(), times={"torch.sdpa": 200.0, "vllm.amx": 100.0})
    assert "params" not in specification(rounds(pair, 10_000))
    assert "chosen" not in rounds(pair, 10_000).reading


def test_a_roofline_s_corner_is_where_the_ceilings_meet(tmp_path):
    chart = roofline(measured(tmp_path / "run", case()))
    lines = next(part["values"] for part in layers(chart) if "roof" in str(part["values"]))
    assert (100.0, 1.0) in {(round(p["intensity"], 6), p["tflops"]) for p in lines}
    assert {(p["intensity"], p["tflops"]) for p in points(chart)} == {
        (10.0, 10 / us) for us in THREE.values()
    }


def test_arms_have_their_verdicts_and_say_what_ran():
    (of,) = measured_cases(COMMITTED / "toggle" / "threads")
    chart, grid = arm_charts(of)
    recorded = {(v.a, v.ratio, v.low, v.high, v.verdict) for v in of.verdicts if v.about == "baseline"}
    shown = {
        (p["name"].replace(" · ", " @ "), p["ratio"], p["low"], p["high"], p["verdict"])
        for p in points(chart)
    }
    assert shown == recorded
    assert {p["name"] for p in points(chart) if p["ran"] == "other kernels"} == {
        f"torch.bf16 · OMP_NUM_THREADS={n}, ONEDNN_MAX_CPU_ISA=AVX2" for n in (1, 2)
    }
    assert any(p["what"].startswith("interaction") for p in points(grid))


def test_blocks_are_shown_by_what_became_of_their_rounds(tmp_path):
    disturbed = [
        DisturbedRound(block=1, round=0, reason="other processes", counted=True),
        DisturbedRound(block=1, round=2, reason="heat", counted=False, seconds={"vllm.amx": 9e-4}),
    ]
    first, second = case(1), case(2)
    records = [*ranked(first, THREE), *ranked(second, THREE, disturbed=disturbed)]
    cases = measured_cases(write(tmp_path / "run", records, [first, second]))
    section = machine_section(cases[0].run, cases, "")
    (chart,) = [chart for chart in section.charts if chart.title == "Disturbed rounds"]
    (layer,) = layers(chart)
    shown = {(v["place"], v["case"], v["state"]): v["rounds"] for v in layer["values"]}
    assert shown == {
        **{(1 + block, "batch=1 core", "quiet"): 2 for block in range(6)},
        **{(7 + block, "batch=2 core", "quiet"): 2 for block in range(6) if block != 1},
        **{(8, "batch=2 core", state): 1 for state in ("quiet", "counted", "left out")},
    }
    quiet = machine_section(cases[0].run, cases[:1], "")
    assert [chart.title for chart in quiet.charts] == ["What it was measured on"], "nothing was recorded"


def test_what_monitors_read_is_shown_case_after_case(tmp_path):
    read = [{"min": 1.0, "median": 2.0, "max": 4.0}, {"min": 3.0, "median": 3.5, "max": 3.5}]
    cases = [case(1), case(2)]
    records = [
        record
        for of, reading in zip(cases, read, strict=True)
        for record in ranked(of, THREE, conditions=[{"sm_clock_mhz": reading, "not_read": {"heat": "?"}}])
    ]
    measured_ones = measured_cases(write(tmp_path / "run", records, cases))
    chart = machine_section(measured_ones[0].run, measured_ones, "").charts[0]
    (values,) = [layer["values"] for layer in layers(chart)]
    assert [{name: v[name] for name in ("min", "median", "max")} for v in values] == read
    assert [(v["place"], v["what"]) for v in values] == [(1, "sm_clock_mhz"), (2, "sm_clock_mhz")]
    assert chart.marks == 2


def test_cases_that_were_not_finished_are_no_cases(tmp_path):
    of, other = case(1), case(2)
    records = [*ranked(of, THREE), *[r for r in ranked(other, THREE) if not isinstance(r, CaseDone)]]
    assert [c.planned.key for c in measured_cases(write(tmp_path / "run", records, [of, other]))] == [of.key]
