"""`serving link` with files of a user's own: results, runs, traces. What it prints: cli/transcripts."""

import json
import re
import sys
import types
from dataclasses import replace

import pytest
from click.testing import CliRunner

from harness.cli.serving import serving
from harness.errors import UsageError
from harness.paths import ROOT
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.experts import shared_expert_factor
from harness.serving.link.model import link
from harness.serving.link.structure import StepLoad
from harness.serving.link.times.interpolation import Surface
from harness.serving.link.times.measured_times import MeasuredTimes, _take, read_measured_times
from harness.serving.link.times.tables import read_tables
from shapes.models import model
from tests.support.paths import SERVING_DATA
from tests.support.serving_link_tables import written


def run(*words):
    return CliRunner().invoke(serving, ["link", *words])


def document(*words):
    done = run(*words, "--json", "-")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_validation_is_near():
    """What the documents promise of InferenceX's points, which are predicted from the others or from nothing.
    What the command prints is held by that transcript."""
    text = (ROOT / "tests/harness/cli/transcripts/serving_link.txt").read_text()
    text = text.partition("$ serving link --validate\n")[2].partition("\n$ ")[0]
    *alike, dstack = (float(error) for error in re.findall(r"TPOT: mean error ([\d.]+)%", text))
    assert len(alike) == 4 and max(alike) <= 8 and dstack > 50  # of DP attention, and an older engine
    assert re.findall(r"TPOT: .*; (\d) of (\d)", text)[:4] == [("5", "5")] * 3 + [("4", "4")]
    assert max(float(error) for error in re.findall(r"mean TTFT: mean error ([\d.]+)%", text)[:4]) <= 20
    assert max(float(error) for error in re.findall(r"p99 TTFT: mean error ([\d.]+)%", text)) <= 25


def test_json_holds_every_number_with_its_interval():
    own, change = str(SERVING_DATA / "link" / "c4.jsonl"), "fused_moe=1.3x(1.2..1.4)"
    found = document("--calibrate", own, "--concurrency", "8", "--what-if", change, "--target-tpot", "20ms")
    for row in found["workloads"]:
        assert row["load"]["concurrency"] == 8
        for name in ("tpot", "ttft", "output"):
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]
        change = row["changes"][0]
        assert (change["quantity"], change["method"]) == ("tpot", "link")
        assert change["low"] < change["change"] < change["high"] < 0
        assert {part["origin"] for part in change["uncertainty"]} >= {"table", "assumed", "calibration"}
        assert row["needs"][-1]["ops"] == ["block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill"]
    assert found["target_tpot_ms"] == 20.0
    assert found["calibration"] == [own] and found["settled"]


def test_bounds_do_not_swallow_a_prediction(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    words = "--hardware mi300x --assumed --observed 53ms..28ms --what-if fused_moe=3x --concurrency 4 --row a"
    assert run(*words.split(), "--ledger", str(ledger)).exit_code == 0
    assert ledger.read_text().count("prediction") > 0


# Own runs


def cell(case, us, op="mla_decode", boundary="core", launch="graph"):
    return {"op": op, "case": f"{op} {case} {boundary}", "boundary": boundary, "launch": launch,
            "status": "ok", "time_us": us}  # fmt: skip


def test_which_time_of_own_runs_is_taken():
    """The fastest in a graph; with quantisation before one without."""
    best = {}
    for us, launch in ((50.0, "graph"), (40.0, "graph"), (30.0, "eager"), (45.0, "graph")):
        _take(best, cell("batch=64 ctx=1000..2000 heads=16 page=64 kv=bf16", us, launch=launch))
    for us, boundary in ((5.0, "core"), (9.0, "with_quant")):
        _take(best, cell("m=64 n=2112 k=7168 fp8=e4m3fn", us, op="block_scale_gemm", boundary=boundary))
    assert best == {
        ("mla_decode", (16, "bf16")): {(64.0, 1500.0): ((0, 0), 40.0)},
        ("block_scale_gemm", (2112, 7168)): {(64.0,): ((0, 0), 9.0)},
    }


def test_own_times_replace_the_tables_where_they_are_near(tmp_path):
    tables = read_tables(written(tmp_path))
    surface = Surface([((1.0, 8.0, 150.0), 200.0)])
    own = MeasuredTimes("NVIDIA X1", "runs", {("mla_decode", (16, "bf16")): surface})
    load = ClosedLoop(isl=100, osl=100, concurrency=8, range_ratio=0.999)
    plain, measured = (link("x1", tables=tables, measured_times=one) for one in (None, own))
    term = next(t for t in measured.structure.decode if t.op == "mla_decode")
    assert term.origin == "measured"
    difference = [float(m.steps(load).decode.us.sum(axis=0)[-1]) for m in (measured, plain)]
    assert difference[0] - difference[1] == pytest.approx(61 * (200.0 - 20.0), rel=0.01)
    far = replace(load, concurrency=512)
    beyond = [m.steps(far).decode.us[:, -1].sum() for m in (measured, plain)]
    assert beyond[0] == pytest.approx(beyond[1])


def test_what_own_runs_lack_is_named():
    own = read_measured_times(["results/epyc-zen4-2core"])
    with pytest.raises(UsageError, match=r"absorbed_bmm.*all_reduce.* without tables") as caught:
        link("epyc", measured_times=own)
    named = str(caught.value).partition(" in ")[0]
    assert not any(op in named for op in ("qkv_a", "fused_moe", "mla_decode", "mha_prefill"))


def test_own_times_without_the_shared_expert_get_its_share(tmp_path):
    surface = Surface([((1.0, 8.0), 300.0)])
    own = MeasuredTimes("NVIDIA X1", "runs", {("fused_moe", (256, 8, 7168, 256, 1, 0)): surface})
    linked = link("x1", tables=read_tables(written(tmp_path)), measured_times=own)
    term = next(t for t in linked.structure.decode if t.op == "fused_moe")
    factor = shared_expert_factor(model("deepseek-r1"), 8)
    assert term.time(StepLoad(8, 8, 1)).us == pytest.approx(300.0 * factor)


DEEPSEEK = {"mla_decode": 1.0, "fused_moe": 1.0}


@pytest.fixture
def traced_as(monkeypatch):
    """A trace of one device, of these exposures in decode."""

    def traced(decode=DEEPSEEK, device="NVIDIA H200", engine="sglang"):
        trace = types.SimpleNamespace(
            path="some.json", engine=engine, devices=(types.SimpleNamespace(model=device),),
            exposure=lambda phase: decode if phase == "decode" else {},
        )  # fmt: skip
        reader = types.ModuleType("harness.serving.trace")
        reader.decompose = lambda path: trace
        monkeypatch.setitem(sys.modules, "harness.serving.trace", reader)

    return traced


@pytest.mark.parametrize(("of", "said"), [
    ({"device": "AMD Instinct MI300X"}, "is a trace of AMD Instinct MI300X, not h200"),
    ({"device": "NVIDIA GH200 480GB"}, "is a trace of NVIDIA GH200 480GB, not h200"),
    ({"engine": "vllm"}, r"some\.json is a trace of vllm, not sglang"),
    ({"decode": {"mha_prefill": 1.0, "fused_moe": 1.0}}, "no trace of DeepSeek-R1: .* no mla_decode"),
    ({"decode": {"mla_decode": 1.0}}, "no trace of DeepSeek-R1: .* no fused_moe"),
    ({"decode": {}}, "no decode step was found"),
])  # fmt: skip
def test_a_trace_of_something_else_is_refused(traced_as, of, said):
    traced_as(**of)
    with pytest.raises(UsageError, match=said):
        raise run("--trace", "some.json").exception


def test_a_trace_says_what_is_on_the_critical_path_and_whether_its_engine_is_known(traced_as):
    traced_as(DEEPSEEK | {"all_reduce": 0.0}, engine="")
    found = document("--concurrency", "4", "--trace", "some.json")
    assert "nothing in some.json tells its engine: taken to be sglang" in found["notes"]
    decode_ms = {share["name"]: share["decode_ms"] for share in found["workloads"][0]["shares"]}
    assert decode_ms["all_reduce"] == 0.0 < decode_ms["fused_moe"]
