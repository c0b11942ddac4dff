"""`serving link` with files of a user's own: results, runs, traces. What it prints: cli/transcripts."""

import json
import re
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from click.testing import CliRunner
from harness.serving.link.experts import shared_expert_factor

from harness.cli.serving import serving
from harness.errors import UsageError
from harness.serving.link.calibration import MeasuredPoint, measured
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.model import link
from harness.serving.link.structure import StepLoad
from harness.serving.link.times.interpolation import Surface
from harness.serving.link.times.measured_times import MeasuredTimes, _take, read_measured_times
from harness.serving.link.times.tables import read_tables
from shapes.models import model
from tests.support.serving_files import DATA, SGLANG_ROW, VLLM_ROW
from tests.support.serving_link_tables import written


def run(*words):
    return CliRunner().invoke(serving, ["link", *words])


def document(*words):
    done = run(*words, "--json", "-")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_json_holds_every_number_with_its_interval():
    own, change = str(DATA / "link" / "c4.jsonl"), "fused_moe=1.3x(1.2..1.4)"
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


def test_validation_is_near():
    """What documents promise of InferenceX's points, which are predicted from each other or from nothing."""
    text = run("--validate").output
    *alike, dstack = (float(error) for error in re.findall(r"TPOT: mean error ([\d.]+)%", text))
    assert len(alike) == 4 and max(alike) <= 8 and dstack > 50  # of DP attention, and an older engine
    assert re.findall(r"TPOT: .*; (\d) of (\d)", text)[:4] == [("5", "5")] * 3 + [("4", "4")]
    assert max(float(error) for error in re.findall(r"mean TTFT: mean error ([\d.]+)%", text)[:4]) <= 20
    assert max(float(error) for error in re.findall(r"p99 TTFT: mean error ([\d.]+)%", text)) <= 25


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


def test_times_of_own_runs_are_right_ones_of_one_machine(monkeypatch):
    where = "batch=8 ctx=100 heads=16 kv=bf16"
    wrong, nan = cell(where, 1.0) | {"status": "wrong"}, cell(where, float("nan"))
    other = cell(where, 1.0, op="another")
    runs = {"a": [cell(where, 9.0), wrong, nan, other], "wrong": [wrong, nan], "b": [nan]}

    def load(run):
        return pandas.DataFrame(runs[run]).assign(machine="B" if run == "b" else "A")

    monkeypatch.setattr("harness.results.read.load", load)
    found = read_measured_times(iter(["a", "wrong"]))
    assert (found.device, found.where, found.ops()) == ("A", "a, wrong", ["mla_decode"])
    assert found.at("mla_decode", (16, "bf16"), 8, 100).us == pytest.approx(9.0)
    for given, says in ((["a", "b"], r"of 2 machines \(A, B\)"), (["wrong"], "no correct .* in wrong")):
        with pytest.raises(UsageError, match=says):
            read_measured_times(given)


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


@pytest.mark.parametrize("shared", [0, 1])
def test_own_times_without_the_shared_expert_get_its_share(tmp_path, shared):
    surface = Surface([((1.0, 8.0), 300.0)])
    own = MeasuredTimes("NVIDIA X1", "runs", {("fused_moe", (256, 8, 7168, 256, 1, shared)): surface})
    linked = link("x1", tables=read_tables(written(tmp_path)), measured_times=own)
    term = next(t for t in linked.structure.decode if t.op == "fused_moe")
    factor = 1.0 if shared else shared_expert_factor(model("deepseek-r1"), 8)
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
    traced_as()
    found = document("--concurrency", "4", "--trace", "some.json", "--what-if", "all_reduce=2x")
    parts = {part["what"]: part for part in found["workloads"][0]["changes"][0]["uncertainty"]}
    assert parts["exposure"]["origin"] == "assumed"  # of what is not in the trace
    traced_as(DEEPSEEK | {"all_reduce": 0.0}, engine="")
    found = document("--concurrency", "4", "--trace", "some.json")
    assert "nothing in some.json tells its engine: taken to be sglang" in found["notes"]
    parts = {share["name"]: share for share in found["workloads"][0]["shares"]}
    for time in ("decode_ms", "stall_ms"):  # what no step of it tells of prefills is as in decode
        assert parts["all_reduce"][time] == 0.0 < parts["fused_moe"][time]


# Calibration on a user's own results: few points are enough, and intervals are honest about how few


SERIES = {series.name: series for series in measured("h200", "sglang")}


def row(point: MeasuredPoint) -> dict[str, object]:
    """The point as SGLang's client writes it."""
    load = point.load
    count = load.concurrency * load.waves
    return SGLANG_ROW | {
        "max_concurrency": load.concurrency, "num_prompts": count, "completed": count,
        "random_input_len": load.isl, "random_output_len": load.osl,
        "total_input_tokens": round(count * load.mean_isl),
        "total_output_tokens": round(count * load.mean_osl),
        "output_throughput": 8 * point.output_tok_s_gpu, "mean_tpot_ms": point.tpot_ms,
        "mean_ttft_ms": point.ttft_ms, "median_ttft_ms": point.ttft_median_ms,
    }  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("own")
    paths = []
    for number, point in enumerate(SERIES["inferencex-0.5.9-1k1k"].points):
        path = folder / f"{number}.jsonl"
        path.write_text(json.dumps(row(point)))
        paths.append(str(path))
    return paths


def test_a_file_calibrates_as_what_is_known_does(files):
    own = link(own=files, prefill_tokens=32768)
    known = tuple(replace(point, ttft_p99_ms=None) for point in link().calibration)
    assert own.calibration == known
    assert "calibrated on 5 own points: 1024 in, 1024 out, [4, 8, 16, 32, 64] in flight" in own.notes
    assert any(note.startswith("the points do not say their hardware, GPUs, ") for note in own.notes)


@pytest.mark.parametrize(("changes", "says"), [
    ({"backend": "lmdeploy", "endpoint_type": "lmdeploy"}, "engine lmdeploy, not sglang"),
    ({"model_id": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}, "model deepseek-r1-distill-qwen-7b"),
    ({"tensor_parallel_size": "4"}, "tensor parallelism 4, not 8"),
    ({"request_rate": 4.0}, "request rate 4, not all at once"),
    ({"failed": 10, "completed": 150}, "failed requests 10 of 160"),
    ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9}, "ramp-up linear"),
    ({"max_concurrency": None}, "does not say its concurrency"),
    ({"mean_tpot_ms": None}, "does not say its mean TPOT"),
    # Far from its kernels' times: refused before a fit, in which such numbers overflow.
    ({"mean_tpot_ms": 1e-9}, "no constant brings them"),
    ({"mean_tpot_ms": 1e9}, "no constant brings them"),
])  # fmt: skip
def test_a_run_that_does_not_calibrate_is_refused(tmp_path, changes, says):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(VLLM_ROW | changes))
    with warnings.catch_warnings(), pytest.raises(UsageError, match=says):
        warnings.simplefilter("error")
        link(own=[str(path)])


FIRST = SERIES["inferencex-0.5.9-1k1k"].points[0]
AGG = json.loads((DATA / "inferencex_agg.json").read_text())


@pytest.mark.parametrize(("given", "options", "expected", "unsaid"), [
    # What the file says of its run goes before what is given.
    (row(FIRST), {"recv_interval": 10}, {"recv_interval": 10}, ""),
    (row(FIRST) | {"server_info": {"scheduler_recv_interval": 30}}, {"recv_interval": 10},
     {"recv_interval": 30}, ""),
    (row(FIRST), {"prefill_tokens": 2048}, {"prefill_tokens": 2048}, "tokens of a prefill step"),
    *[(row(FIRST) | {"server_info": {"chunked_prefill_size": uncut}}, {"prefill_tokens": 2048},
       {"prefill_tokens": 2048}, "tokens of a prefill step") for uncut in (-1, 0)],
    (row(FIRST) | {"server_info": {"chunked_prefill_size": 4096}}, {"prefill_tokens": 2048},
     {"prefill_tokens": 4096}, "-tokens of a prefill step"),
    # As long as InferenceX's are
    (AGG, {"range_ratio": 0.7}, {"isl": 1024, "osl": 1024, "range_ratio": 0.8}, "-range of lengths"),
    (AGG | {"mean_e2el": None}, {"range_ratio": 0.7}, {"range_ratio": 0.7}, "range of lengths"),
    # Of the run's own range the mean is known
    *[(row(replace(FIRST, load=ClosedLoop(1024, 1024, 16, range_ratio=ratio, waves=10)))
       | {"random_range_ratio": ratio}, {}, {"isl": isl, "range_ratio": ratio}, "")
      for ratio, isl in ((0.0, 1025), (0.5, 1024), (1.0, 1024))],
    *[(VLLM_ROW | {"model_id": name}, {}, {"concurrency": 16}, "")  # the same layers by another name
      for name in ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3.1", "dsr1")],
    (VLLM_ROW | {"num_prompts": 64, "completed": 64, "total_input_tokens": 64 * 922,
                 "total_output_tokens": 64 * 922}, {}, {"waves": 4, "isl": 1024, "concurrency": 16}, ""),
    (row(FIRST) | {"total_output_tokens": 40 * 461}, {}, {"isl": 1024, "osl": 512}, ""),  # many stopped early
])  # fmt: skip
def test_the_load_of_a_point(tmp_path, given, options, expected, unsaid):
    (tmp_path / "run.json").write_text(json.dumps(given))
    model = link(own=[str(tmp_path / "run.json")], **options)
    [point] = model.calibration
    assert {name: getattr(point.load, name) for name in expected} == expected
    if unsaid:
        assert (unsaid.lstrip("-") in model.unsaid) != unsaid.startswith("-")
    if given is AGG:
        assert point.output_tok_s_gpu == AGG["output_tput_per_gpu"]


def test_a_range_that_is_none_is_refused(tmp_path):
    (tmp_path / "run.jsonl").write_text(json.dumps(row(FIRST) | {"random_range_ratio": 2.0}))
    with pytest.raises(UsageError, match=r"run\.jsonl.* range of lengths of 2, not from 0 to 1"):
        link(own=[str(tmp_path / "run.jsonl")])


# A calibration that was stored is taken again for its own system, and for no other


NAN = {"load": {"isl": 1, "osl": 2, "concurrency": 1}, "tpot_ms": float("nan")}


@pytest.fixture(scope="module")
def kept(files, tmp_path_factory) -> str:
    """Of the first two results."""
    file = str(tmp_path_factory.mktemp("kept") / "h200.json")
    done = CliRunner().invoke(serving, [*calibrate(*files[:2]), "--store-calibration", file])
    assert (done.exit_code, done.stderr) == (0, "")
    return file


def calibrate(*paths: object) -> list[str]:
    given = [word for path in paths for word in ("--calibrate", str(path))]
    return ["link", "--concurrency", "16", *given]


def test_it_calibrates_as_the_results_do_and_says_what_they_leave_out(files, kept, here, tmp_path):
    stored, results = link(own=[kept]), link(own=files[:2])
    assert stored.calibration == results.calibration
    assert stored.calibrated_versions == results.calibrated_versions
    assert link(own=[kept, files[0]]).calibration == results.calibration  # what is in both counts once
    again = tmp_path / "again.json"
    done = here("serving", *calibrate(kept), "--store-calibration", str(again))
    assert "the points do not say their hardware, GPUs, " in done.stdout
    assert again.read_text() == Path(kept).read_text()
    assert json.loads(again.read_text())["runs"] == files[:2]


@pytest.mark.parametrize(
    "options", [("--kv-dtype", "fp8"), ("--ep", "8"), ("--hardware", "h100", "--assumed")]
)
def test_it_is_of_its_own_system_alone(kept, here, options):
    done = here("serving", *calibrate(kept), *options)
    assert done.returncode == 2
    assert f"{kept} is a calibration of h200 with sglang" in done.stderr


@pytest.mark.parametrize(("change", "says"), [
    ({"points": []}, "wants points"),
    ({"points": [{"tpot_ms": 1}]}, "points.0.load: is missing"),
    ({"calibration_of": {"hardware": "h200"}}, "calibration_of.engine: is missing"),
    ({"more": 1}, "more: no such key"),
    ({"points": [NAN]}, "h200.json"),
])  # fmt: skip
def test_a_broken_one_is_one_line(kept, here, tmp_path, change, says):
    broken = tmp_path / "h200.json"
    broken.write_text(json.dumps(json.loads(Path(kept).read_text()) | change))
    done = here("serving", *calibrate(broken))
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


def test_it_takes_the_place_of_nothing_else_and_is_of_one_version(files, here, tmp_path):
    given = Path(files[0]).read_text()
    done = here("serving", *calibrate(files[0]), "--store-calibration", files[0])
    assert done.returncode == 2 and "no stored calibration" in done.stderr
    assert Path(files[0]).read_text() == given
    other, target = tmp_path / "other.jsonl", tmp_path / "kept.json"
    other.write_text(json.dumps(json.loads(given) | {"server_info": {"version": "0.5.7"}}))
    done = here("serving", *calibrate(*files[:2], other), "--store-calibration", str(target))
    assert done.returncode == 2 and "a calibration is of one version" in done.stderr
    assert not target.exists()
