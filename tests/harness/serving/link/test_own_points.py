"""Calibration on a user's own results: few points are enough, and intervals are honest about how few."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness.cli.serving import serving
from harness.errors import UsageError
from harness.serving.link.calibration import MeasuredPoint, measured
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.model import link
from tests.support.serving_files import DATA, SGLANG_ROW, VLLM_ROW

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
    ({"backend": "vllm", "endpoint_type": "vllm"}, "engine vllm, not sglang"),
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
    (row(FIRST) | {"server_info": {"chunked_prefill_size": -1}}, {"prefill_tokens": 2048},
     {"prefill_tokens": 2048}, "tokens of a prefill step"),
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
