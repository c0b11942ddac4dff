"""What public bug reports look like as files: what `serving load` says of them, and what it does not show."""

import json
import subprocess
import sys

import pytest

from harness.cli.serving.load_display import runs_table
from harness.errors import UnreadableError
from harness.paths import ROOT
from harness.report.terminal import plain_text
from harness.serving import load
from harness.serving.clients.load import beside_each_other
from harness.serving.compare.identity import of_run
from harness.serving.schema import Metric, OfferedLoad, ServingRun
from tests.support.serving_files import DATA, SGLANG_ROW, VLLM_ROW, changed, content_of, of, rules, written

CASES = DATA / "cases"
UNMEASURED = ("ttft", "tpot")
SPARE = [f"{statistic}_{key}_ms" for key in ("ttft", "tpot", "itl") for statistic in ("mean", "median")]


def case(name):
    (path,) = CASES.glob(f"{name}*")
    return load(path)


@pytest.mark.parametrize(("name", "found", "gone", "kept", "says"), [
    ("s01", ["zero", "zero", "retokenised"], ("ttft", "tpot", "itl"), {"e2e": 2756.76},
     "ttft mean, ttft median, ttft p90, ttft p95, ttft p99 are 0"),
    ("s02", ["zero"], UNMEASURED, {"itl": 10.467, "e2e": 2756.76}, "ttft median is 0"),
    ("s03", ["zero", "retokenised"], ("itl",), {"ttft": 201.006, "tpot": 10.0226},
     "is 2560, the server counted"),
    ("s04b", [], (), {"tpot": 10.0226, "accept_length": 2.1}, "divides a step's time by them"),
    ("s06", ["not_streamed"], ("ttft", "tpot", "itl"), {"e2e": 2756.76}, "ms is 99.99 % of E2E"),
    ("s32", ["zero"], ("tpot",), {"ttft": 201.644}, "ttft is 0 in 2 of 16 requests"),
    ("s33", [], (), {"tpot": 10.0226}, ""),
    ("s35_", ["prefix_cache"], (), {}, "4080000 tok/s of one request is more than GPUs compute"),
    ("s36", ["one_request"], (), {"ttft": 3001.3}, "without it the mean 3001 is 201.4 ms"),
    ("s37", [], (), {"tpot": 10.0}, "200.92 counted (12859 of 64), 1024 asked for; they stopped early"),
    ("s40", ["concurrency_not_reached"], (), {}, "at most 100 were in any second, 93.27 on average"),
    ("s41", ["one_wave"], (), {}, "the run is one wave of 32, never 64 at once"),
    ("l04", ["prefix_cache"], (), {}, "0.89 of a decode step (13.5 ms)"),
    ("n02", ["zero"], UNMEASURED, {"e2e": 2756.76}, "ttft median is 0"),
    # These must stay as they are.
    ("n04", ["moments"], (), {"itl": 10.0226}, "tokens come in bursts"),
    ("s00", [], (), {"ttft": 201.006, "tpot": 10.0226}, ""),
    ("s09", ["itl_beside_tpot"], (), {"itl": 5.01129}, "more pieces than tokens"),
    ("s30", [], (), {"ttft": 201.006}, ""), ("s34", [], (), {"ttft": 2001.01}, ""),
    ("s35b", [], (), {"ttft": 904.529}, ""),
])  # fmt: skip
def test_a_case(name, found, gone, kept, says):
    (run,) = case(name)
    assert rules(run) == found
    assert says in "\n".join(one.message for one in run.findings)
    assert not any(run.metric(latency) for latency in gone)
    assert {latency: run.value(latency, "mean") for latency in kept} == pytest.approx(kept, rel=1e-4)


@pytest.mark.parametrize(("name", "cells"), [
    ("s33", ("2.84 tokens a step",)), ("s04b", ("2.1 tokens a step",)), ("s37", ("1024/200.9",)),
    ("s32", ("201.6 *",)), ("s01", ("1463.2 / instance", "3 suspect")),
])  # fmt: skip
def test_the_table_shows_what_was_measured_and_nothing_else(name, cells):
    text = plain_text(runs_table(case(name), files=1, unread=0))
    assert all(cell in text for cell in cells) and "1024/1024" not in text


def test_a_sweep_is_a_run_a_line():
    runs = case("s45")
    assert [run.workload.concurrency for run in runs] == [4, 16, 64] and not any(map(rules, runs))
    assert [run.value("tpot", "mean") for run in runs] == pytest.approx([10.677, 12.506, 19.985], rel=1e-4)
    assert {run.workload.request_rate for run in runs} == {0.0}


def test_a_log_of_trtllm_bench_begins_as_json_does(tmp_path):
    text = (CASES / "trtllm_bench_0.16.log").read_text()
    for name in ("a.log", "a.json"):
        (run,) = written(tmp_path, text, name)
        assert run.value("throughput", tokens="output") == 6895.2 and run.version == "0.16.0"
        assert (run.totals.duration_s, run.totals.output_tokens) == (pytest.approx(18.56365), 128000)
        assert rules(run) == []
    older = text.replace("Total Latency (ms):             18563.6500", "Total Latency (seconds): 18.56365")
    (run,) = written(tmp_path, older)
    assert run.totals.duration_s == 18.56365


OTHERS = {
    '{"num_concurrent_requests": 8, "results_ttft_s_mean": 0.2}': "LLMPerf's",
    '{"Number of concurrency": 8, "Total requests": 80}': "evalscope's",
    '{"traceEvents": []}': "`serving trace FILE`",
    '{"metadata": {"x": 1}, "metrics": {"request_latency": {"value": 3}}}': "give profile_export_aiperf.json",
    '[{"conversation_id": "a", "ttft_ms": 3.0}]': "vLLM's multi_turn benchmark",
    "# HELP sglang:num_running_reqs The number\nsglang:num_running_reqs 3\n": "a server's Prometheus metrics",
}


@pytest.mark.parametrize(("text", "says"), OTHERS.items())
def test_a_file_of_another_tool_is_named(tmp_path, text, says):
    with pytest.raises(UnreadableError, match=r"which is not read: ") as caught:
        written(tmp_path, text, "a.txt")
    assert says in str(caught.value)
    for name, of_case in (("s47", "genai-bench's, which is not read: measure with `vllm bench serve"),
                          ("s51", "give profile_export_aiperf.json, which stands beside it")):  # fmt: skip
        with pytest.raises(UnreadableError) as caught:
            case(name)
        assert of_case in str(caught.value)


# Others of the same kinds


def test_zeros_of_single_requests_in_other_clients(tmp_path):
    row = content_of("sglang_bench_serving_0.5.9_details.jsonl")
    (run,) = written(tmp_path, json.dumps(row | {"ttfts": [0.0, *row["ttfts"][1:]]}), "a.json")
    assert "zero" in rules(run) and not run.metric("tpot")
    assert "of the 6 requests" in run.metric("ttft").derived
    gone = changed("aiperf_0.13.0.json", {"time_to_first_token/min": 0.0})
    (run,) = written(tmp_path, json.dumps(gone), "a.json")
    assert "zero" in rules(run) and not run.metric("ttft")


def test_single_requests_that_came_in_one_piece(tmp_path):
    row = json.loads((CASES / "s36_vllm_first_call_jit.json").read_text())
    row["itls"][3] = [0.0004] + [0.0] * 15
    (run,) = written(tmp_path, json.dumps(row), "a.json")
    assert "not_streamed" in rules(run) and "1 of 16 requests" in "".join(one.message for one in run.findings)


def test_one_request_is_found_without_lists(tmp_path):
    row = json.loads((CASES / "s36_vllm_first_call_jit.json").read_text())
    for key in ("ttfts", "itls", "input_lens", "output_lens", "errors", "generated_texts"):
        del row[key]
    for gone in ((), ("std_ttft_ms",)):  # by the deviation; by the p99 between the two longest
        (run,) = written(tmp_path, json.dumps({k: v for k, v in row.items() if k not in gone}), "a.json")
        assert "one_request" in rules(run) and " is 20" in "".join(one.message for one in run.findings)
    wide, narrow = {"std_ttft_ms": 6e3, "median_ttft_ms": 700.0}, {"p99_ttft_ms": 9e3, "std_ttft_ms": None}
    for few in (wide, narrow):
        (run,) = written(tmp_path, json.dumps(row | few), "a.json")
        assert "few_requests" in rules(run)


def test_no_wave_and_one_wave(tmp_path):
    waves = {"num_prompts": 16, "completed": 16, "total_output_tokens": 14_740, "total_input_tokens": 14_750}
    (run,) = written(tmp_path, json.dumps(VLLM_ROW | waves), "a.json")
    assert any(one.rule == "one_wave" and one.severity == "note" for one in run.findings)


def test_the_servers_own_limit(tmp_path):
    server = {"server_info": {"tp_size": 8, "pp_size": 1, "dp_size": 1, "max_running_requests": 4}}
    (run,) = written(tmp_path, json.dumps(SGLANG_ROW | server), "a.json")
    assert "server_limit" in {one.rule for one in run.findings}
    assert of_run(run)["load"] == "4 in flight of 16 allowed"


def test_tokens_that_the_server_says_were_cached(tmp_path):
    (run,) = written(tmp_path, json.dumps(SGLANG_ROW | {"cached_tokens": [0, 512]}), "a.json")
    assert of_run(run)["prefix caching"] == "hits"
    assert "512 tokens of prompts" in "".join(f.message for f in run.findings)


def test_the_same_prompts_again(tmp_path):
    cold = {"mean_ttft_ms": 900.0, "median_ttft_ms": 900.0}
    rows = [VLLM_ROW | cold, VLLM_ROW | {"median_ttft_ms": 120.0}, VLLM_ROW | cold | {"max_concurrency": 8}]
    runs = written(tmp_path, "\n".join(map(json.dumps, rows)), "a.jsonl")
    assert ["prefix_cache" in rules(run) for run in runs] == [False, True, False]
    assert "prefix_cache" in rules(beside_each_other([runs[0], runs[1]])[1])


def test_a_run_of_which_nothing_completed_is_said_once(tmp_path):
    counts = ("completed", "total_input_tokens", "total_output_tokens", "request_throughput",
              "output_throughput", "total_token_throughput")  # fmt: skip
    nothing = dict.fromkeys(SPARE, float("nan")) | dict.fromkeys(counts, 0) | {"failed": 160}
    (run,) = written(tmp_path, json.dumps(VLLM_ROW | nothing), "a.json")
    assert rules(run) == ["failed", "completed"] and not run.metric("ttft")


# InferenceX's rows without E2E: Little's law with the longest length, input beside output

DEVICE = "inferencex_device.json"


@pytest.mark.parametrize(("name", "changes", "rule"), [
    (DEVICE, {"tp": 16}, "littles_law"), (DEVICE, {"conc": 64}, "littles_law"),
    (DEVICE, {"conc": 512}, "littles_law"), (DEVICE, {"isl": 8192}, "lengths"),
    (DEVICE, {"osl": 128}, "littles_law"), (DEVICE, {}, None),
    ("inferencex_agg.json", {"isl": 8192}, "lengths"), ("inferencex_agg.json", {}, None),
    ("inferencex_api.json", {"0/num_decode_gpu": 16}, "denominator"),
    ("inferencex_api.json", {"0/decode_tp": 16}, "denominator"),
])  # fmt: skip
def test_rows_of_inferencex(tmp_path, name, changes, rule):
    runs = written(tmp_path, json.dumps(changed(name, changes)), "a.json")
    assert rules(runs[0]) == [] if rule is None else rule in rules(runs[0])


def test_a_protocol_is_no_engine():
    assert [(run.protocol, run.engine) for run in of("vllm_serve_0.32.json")] == [("vllm", "")]
    (told,) = of("sglang_bench_serving_0.5.9.jsonl")
    assert (told.engine, told.speculation, of_run(told)["prefix caching"]) == ("sglang", "none", "off")


@pytest.mark.parametrize(("changes", "found"), [
    ({}, []), ({"conc": 2}, ["littles_law"]),
    ({"num_prefill_gpu": 8, "num_decode_gpu": 8}, ["littles_law"]),
])  # fmt: skip
def test_an_early_row_has_total_throughput_alone(tmp_path, changes, found):
    row = content_of("inferencex_api.json")[1]
    (run,) = written(tmp_path, json.dumps(row | changes), "a.json")
    assert rules(run) == found


def test_reading_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from harness.serving import load; load(sys.argv[1])"
    read = [sys.executable, "-c", code, str(DATA / "vllm_serve_0.32.json")]
    done = subprocess.run(read, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_what_has_no_column_is_shown_with_its_bound():
    for said, metric in {
        "speedup up to 17": Metric(name="speedup", value=17, unit="1", statistic="max"),
        "28.76 median": Metric(name="tpot", value=28.76, unit="ms", statistic="median"),
        "12.8 of ? / ?": Metric(name="throughput", value=12.8, unit="tok/s", tokens="unknown"),
    }.items():
        run = ServingRun(id="made", client="test", source="made", metrics=(metric,))
        assert said in plain_text(runs_table([run], files=1, unread=0))
    longest = OfferedLoad(longest_input_len=1024, longest_output_len=512)
    run = run.model_copy(update={"workload": longest})
    assert "<=1024/<=512" in plain_text(runs_table([run], files=1, unread=0))
