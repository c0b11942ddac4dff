"""`serving predict` with files of a user's own: results to calibrate on, runs. Its texts: cli/transcripts."""

import json
import re
import warnings
from dataclasses import replace
from functools import partial

import pandas
import pytest
from click.testing import CliRunner

from harness.cli.serving import serving
from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.link.calibration import PRIOR, ModelledPoint, Point
from harness.serving.link.kernel_times import MeasuredTimes, Surface, read_measured_times, read_tables
from harness.serving.link.load import Load
from harness.serving.link.model import CACHED_SHARE, System, link, own_points, require_plausible, uncalibrated
from harness.serving.link.structure import StepLoad, shared_expert_factor
from harness.serving.link.validation import stored_series
from tests.support.serving_files import DATA, SGLANG_ROW, VLLM_ROW
from tests.support.serving_link_tables import written


def points_of(*files, engine="sglang", engine_given=False):
    setting = link(System(engine=engine)).setting
    return own_points([run for file in files for run in load(str(file))], setting, engine_given=engine_given)


def test_json_holds_every_number_with_its_interval():
    own = str(DATA / "link" / "c4.jsonl")
    words = ("what-if", "fused_moe=1.3x(1.2..1.4)", "--calibrate", own, "--concurrency", "8", "--json", "-")
    done = CliRunner().invoke(serving, [*words, "--target-tpot", "20ms"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    for row in found["workloads"]:
        assert row["load"]["concurrency"] == 8
        for name in ("tpot", "ttft", "ttft_mean", "output"):
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]
        change = row["changes"][0]
        assert (change["quantity"], change["method"]) == ("tpot", "link")
        assert change["low"] < change["change"] < change["high"] < 0
        assert row["needs"][-1]["ops"] == ["block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill"]
    assert found["target_tpot_ms"] == 20.0 and found["calibration"] == [own]
    assert set(found["constants"]) == {"a", "k", "p", "h", "q", "cold", "each"}


@pytest.mark.parametrize(("words", "says"), [
    (("predict", "--engine", "vlm"), r"unknown engine 'vlm'; did you mean vllm"),
    (("what-if", "--engine", "tgi"), r"unknown engine 'tgi'; engines: .*, atom; others need --times"),
    (("predict", "--parallel", "8"), r"cannot read --parallel '8'; write tp8, or tp8,ep8"),
    (("predict", "--parallel", "tp8,ep4"), r"ep4 is not modelled with tp8; give ep8, or none"),
    (("predict", "--lengths", "1024"), r"cannot read --lengths '1024'; write 8192/1024"),
    (("predict", "--lengths", "1024/1024/2"), r"--lengths 1024/1024/2: .* a ratio from 0 to 1"),
    (("predict", "--concurrency", "4;8"), r"cannot read --concurrency '4;8'"),
    (("predict", "--concurrency", "0"), r"concurrency=0 must be at least 1"),
    (("predict", "--hardware", "mi300x", "--engine", "trtllm"), r"TensorRT-LLM does not run on mi300x"),
    (("predict", "--hardware", "x1"), r"unknown machine 'x1'; machines: .*H200.*; others need --times"),
    (("what-if", "mla_decode=2x", "mla_decode=3x"), r"two changes are of mla_decode in decode: give"),
    (("what-if", "fused_moe=2x", "fused_moe@decode=2x"), r"two changes are of fused_moe in decode: give"),
    (("predict", "--times", "nowhere"), r"no folder nowhere on disk: .* SYSTEM/ENGINE/VERSION, .* run\.json"),
    (("predict", "--times", "results/published"), r"it has sets of tables: give .* kernel-tables/h200"),
    (("predict", "--hardware", "h20", "--times", "results/published/kernel-tables/h200-sglang-0.5.9"),
     r"are of NVIDIA H200, not h20: kernels of one machine"),
    (("what-if", "mla_decode=2x", "--target-tpot", "20 apples"), r"cannot read --target-tpot '20 apples'"),
    (("what-if", "--ledger", "some.jsonl"), r"--ledger takes predictions of changes: name one"),
    (("predict", "--lengths", "900000/1024", "--concurrency", "2"), r"no request of .* tokens fits"),
])  # fmt: skip
def test_a_mistake_is_one_line(here, words, says):
    done = here("serving", *words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert re.search(says, done.stderr), done.stderr


# Own runs


def cell(case, us, op="mla_decode", boundary="core", launch="graph"):
    return {"op": op, "case": f"{op} {case} {boundary}", "boundary": boundary, "launch": launch,
            "status": "ok", "time_us": us}  # fmt: skip


def test_which_time_of_own_runs_is_taken(monkeypatch):
    """The fastest in a graph; with quantisation before one without."""
    attention = partial(cell, "batch=64 ctx=1000..2000 heads=16 page=64 kv=bf16")
    product = partial(cell, "m=64 n=2112 k=7168 fp8=e4m3fn", op="block_scale_gemm")
    cells = [attention(50.0), attention(40.0), attention(30.0, launch="eager"), attention(45.0)]
    cells += [product(5.0), product(9.0, boundary="with_quant"), product(7.0)]
    monkeypatch.setattr("harness.results.read.load", lambda _: pandas.DataFrame(cells).assign(machine="A"))
    surfaces = read_measured_times(["a"]).surfaces
    assert surfaces.keys() == {("mla_decode", (16, "bf16", 1)), ("block_scale_gemm", (2112, 7168))}
    assert surfaces["mla_decode", (16, "bf16", 1)].us_at(64, 1500) == pytest.approx(40.0)
    assert surfaces["block_scale_gemm", (2112, 7168)].us_at(64) == pytest.approx(9.0)


def test_times_of_own_runs_are_right_ones_of_one_machine(monkeypatch):
    where = "batch=8 ctx=100 heads=16 kv=bf16"
    wrong, nan = cell(where, 1.0) | {"status": "wrong"}, cell(where, float("nan"))
    other = cell(where, 1.0, op="another")
    runs = {"a": [cell(where, 9.0), wrong, nan, other], "wrong": [wrong, nan], "b": [nan]}

    def load(run):
        return pandas.DataFrame(runs[run]).assign(machine="B" if run == "b" else "A")

    monkeypatch.setattr("harness.results.read.load", load)
    found = read_measured_times(["a", "wrong"])
    assert (found.device, found.source, len(found.surfaces)) == ("A", "a, wrong", 1)
    assert found.surfaces["mla_decode", (16, "bf16", 1)].us_at(8, 100) == pytest.approx(9.0)
    for given, says in ((["a", "b"], r"of 2 machines \(A, B\)"), (["wrong"], "no correct .* in wrong")):
        with pytest.raises(UsageError, match=says):
            read_measured_times(given)


def test_own_times_replace_the_tables_where_they_are_near(tmp_path):
    tables = read_tables(written(tmp_path))
    surface = Surface({(8.0, 150.0): 200.0})
    own = MeasuredTimes("NVIDIA X1", "runs", {("mla_decode", (16, "bf16", 1)): surface})
    load = Load(isl=100, osl=100, concurrency=8, range_ratio=1.0)
    plain, measured = (uncalibrated(System(), tables, one) for one in (None, own))
    term = next(t for t in measured.structure.decode if t.op == "mla_decode")
    assert term.origin == "measured"
    difference = measured.sums(load).decode.ms(8) - plain.sums(load).decode.ms(8)
    assert difference == pytest.approx(61 * (200.0 - 20.0) / 1e3, rel=0.01)
    far = replace(load, isl=1000)
    assert measured.sums(far).decode.ms(8) == pytest.approx(plain.sums(far).decode.ms(8))


@pytest.mark.parametrize("shared", [0, 1])
def test_own_times_without_the_shared_expert_get_its_share(tmp_path, shared):
    surface = Surface({(8.0,): 300.0})
    own = MeasuredTimes("NVIDIA X1", "runs", {("fused_moe", (256, 8, 7168, 256, 1, shared)): surface})
    built = uncalibrated(System(), read_tables(written(tmp_path)), own).structure
    term = next(t for t in built.decode if t.op == "fused_moe")
    factor = 1.0 if shared else shared_expert_factor(8)
    assert term.time(StepLoad(8, 8, 1)) == pytest.approx(300.0 * factor)


# Calibration on a user's own results


SERIES = {series.name: series for series in stored_series()}
FIRST = SERIES["inferencex-0.5.9-1k1k"].points[0]


def row(point: Point) -> dict[str, object]:
    """The point as SGLang's client writes it, with numbers that fit together."""
    load, tokens = point.load, point.load.concurrency * point.load.waves
    out = round(tokens * load.mean_osl)
    return SGLANG_ROW | {
        "max_concurrency": load.concurrency, "num_prompts": tokens, "completed": tokens,
        "random_input_len": load.isl, "random_output_len": load.osl, "random_range_ratio": load.range_ratio,
        "total_input_tokens": round(tokens * load.mean_isl), "total_output_tokens": out,
        "total_output_tokens_retokenized": out, "output_throughput": 8 * point.output_tok_s_gpu,
        "duration": out / (8 * point.output_tok_s_gpu), "mean_tpot_ms": point.tpot_ms,
        "mean_ttft_ms": point.ttft_ms, "median_ttft_ms": point.ttft_median_ms,
        "mean_e2e_latency_ms": point.ttft_ms + (out / tokens - 1) * point.tpot_ms,
    }  # fmt: skip


def test_files_calibrate_as_the_points_in_them(tmp_path):
    points, files = SERIES["inferencex-0.5.9-1k1k"].points, []
    for number, point in enumerate(points):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row(point)))
        files.append(str(path))
    found = link(System(calibrate=tuple(files)))
    plain = [replace(p, output_tok_s_gpu=None, load=replace(p.load, prefill_tokens=16384)) for p in points]
    wanted = PRIOR.fitted(found.modelled(plain))
    assert found.constants.tpot.mean == pytest.approx(wanted.tpot.mean)
    assert found.constants.ttft.mean == pytest.approx(wanted.ttft.mean)
    assert "calibrated on 5 at 1024 in, 1024 out: 4, 8, 16, 32, 64 in flight" in found.notes
    assert any(note.startswith("the points do not say their hardware, GPUs, ") for note in found.notes)
    warm = link(System(calibrate=tuple(files), warm=True))
    assert warm.constants.ttft.mean[1] > found.constants.ttft.mean[1]  # nothing else makes it late


@pytest.mark.parametrize(("changes", "says"), [
    ({"model_id": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}, "model deepseek-r1-distill-qwen-7b"),
    ({"tensor_parallel_size": "4"}, "tensor parallelism 4, not 8"),
    ({"pipeline_parallel_size": "2"}, "pipeline parallelism 2, not 1"),
    ({"request_rate": 4.0}, "does not calibrate this: load 16 in flight, 4 requests a second"),
    ({"failed": 10, "completed": 150}, "failed requests 10 of 160"),
    ({"max_concurrency": None}, "does not say its concurrency"),
    ({"mean_tpot_ms": None}, "does not say its mean TPOT"),
    ({"median_ttft_ms": 0.0}, "does not say its .*mean TTFT: cannot calibrate; ttft .* is 0"),
    ({"mean_tpot_ms": 1e-9}, "cannot calibrate; mean ttft .* not streamed"),
    ({"mean_tpot_ms": 2.0}, "TPOT of 2 ms, and its kernels' times make it .*: no constant brings them"),
    ({"mean_tpot_ms": 200.0}, "no constant brings them"),
    ({"mean_ttft_ms": 9.0, "median_ttft_ms": 9.0}, "cannot calibrate: prompts of .* prefix cache"),
])  # fmt: skip
def test_a_run_that_does_not_calibrate_is_refused(tmp_path, changes, says):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(VLLM_ROW | changes))
    with warnings.catch_warnings(), pytest.raises(UsageError, match=says):
        warnings.simplefilter("error")
        link(System(calibrate=(str(path),)))


@pytest.mark.parametrize("share", [0.98, 1.02])
def test_a_ttft_below_the_prefill_s_kernels_is_of_cached_prompts(share):
    found = link()
    load = Load(8192, 1024, 16)
    prefill = found.sums(load).prefill.ms(1)
    point = Point(load, tpot_ms=20.0, ttft_ms=900.0, ttft_median_ms=share * CACHED_SHARE * prefill)
    measured = ModelledPoint(point, found.sums(load))
    if share > 1:
        require_plausible(measured, 20.0)
        return
    with pytest.raises(UsageError, match=r"kernels of one prefill take .* were found in a cache"):
        require_plausible(measured, 20.0)


def test_the_engine_that_a_user_names_goes_before_a_client_s_protocol(tmp_path):
    """InferenceX's client says `backend: vllm` of an SGLang server."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(VLLM_ROW | {"backend": "lmdeploy", "endpoint_type": "lmdeploy"}))
    with pytest.raises(UsageError, match="engine lmdeploy, not sglang; --engine says it where a file is"):
        points_of(path)
    [point], notes = points_of(path, engine_given=True)
    assert point.load.concurrency == 16
    assert any("--engine: sglang; the file says lmdeploy" in note for note in notes)
    path.write_text(json.dumps(VLLM_ROW | {"backend": "vllm", "endpoint_type": "vllm"}))
    assert points_of(path)[0] == points_of(path, engine_given=True)[0] == (point,)


UNTIMED = dict.fromkeys(("duration", "concurrency", *(f"{of}_throughput" for of in (
    "request", "input", "output", "total", "total_token"))))  # fmt: skip
AGG = json.loads((DATA / "inferencex_agg.json").read_text())


@pytest.mark.parametrize(("given", "expected", "unsaid"), [
    (row(FIRST), {"recv_interval": 1, "prefill_tokens": 16384, "waves": 10}, "tokens of a prefill step"),
    (row(FIRST) | {"server_info": {"scheduler_recv_interval": 30}}, {"recv_interval": 30}, ""),
    *[(row(FIRST) | {"server_info": {"chunked_prefill_size": uncut}}, {"prefill_tokens": 16384},
       "tokens of a prefill step") for uncut in (-1, 0)],
    (row(FIRST) | {"server_info": {"chunked_prefill_size": 4096}}, {"prefill_tokens": 4096},
     "-tokens of a prefill step"),
    (AGG, {"isl": 1024, "osl": 1024, "range_ratio": 0.8}, "-range of lengths"),  # as long as InferenceX's
    *[(row(replace(FIRST, load=Load(1024, 1024, 16, range_ratio=r))), {"isl": isl, "range_ratio": r}, "")
      for r, isl in ((0.0, 1024), (0.5, 1024), (1.0, 1024))],
    *[(VLLM_ROW | {"model_id": name}, {"concurrency": 16}, "")  # the same layers by another name
      for name in ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3.1", "dsr1")],
    (VLLM_ROW | {"num_prompts": 64, "completed": 64, "total_input_tokens": 64 * 922,
                 "total_output_tokens": 64 * 922} | UNTIMED, {"waves": 4, "isl": 1024}, ""),
    # Many stopped early.
    (row(FIRST) | {"total_output_tokens": 40 * 461} | UNTIMED, {"isl": 1024, "osl": 512}, ""),
])  # fmt: skip
def test_the_load_of_a_point(tmp_path, given, expected, unsaid):
    (tmp_path / "run.json").write_text(json.dumps(given))
    [point], notes = points_of(tmp_path / "run.json")
    assert {name: getattr(point.load, name) for name in expected} == pytest.approx(expected, abs=1)
    if unsaid:
        said = any(unsaid.lstrip("-") in note for note in notes if note.startswith("the points do not say"))
        assert said != unsaid.startswith("-")


def test_a_range_that_is_none_is_refused(tmp_path):
    (tmp_path / "run.jsonl").write_text(json.dumps(row(FIRST) | {"random_range_ratio": 2.0}))
    with pytest.raises(UsageError, match=r"run\.jsonl cannot calibrate: range_ratio is 2, which cannot be"):
        points_of(tmp_path / "run.jsonl")
