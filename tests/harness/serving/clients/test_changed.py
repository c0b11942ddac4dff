"""What is read of a client's file after a change of it: each row a file, the change, and what follows."""

from __future__ import annotations

import json
import math
import re
from functools import partial

import pytest

from harness.paths import PUBLISHED
from harness.serving import load
from tests.support.serving_files import DATA, GONE, VLLM_ROW, changed, look, of, rules, written

SG9, SG23, SG4 = (f"sglang_bench_serving_{version}.jsonl" for version in ("0.5.9", "0.5.23", "0.4.3"))
VLLM = "vllm_serve_0.32.json"
AIPERF, GUIDE, PERF = "aiperf_0.13.0.json", "guidellm_0.7.3.json", "inference_perf_0.7.0.json"
BENCH, TRT, AGG, API = "trtllm_bench.json", "trtllm_serve.json", "inferencex_agg.json", "inferencex_api.json"
G_TTFT = "benchmarks/0/metrics/time_to_first_token_ms/successful"
STRATEGY, P_TTFT = "benchmarks/0/config/strategy", "successes/latency/time_to_first_token"
ZERO = {"mean": 0.0, "median": 0.0, "count": 0, "total_sum": 0.0, "percentiles": {"p50": 0.0}}
ONE = {"tp_size": 8, "pp_size": 1, "dp_size": 1, "nnodes": 1, "version": "0.5.9"}
OLD_CONFIG = {
    "endpoint": {"model_names": ["a/b"], "streaming": True},
    "input": {"prompt": {"input_tokens": {"mean": 550}, "output_tokens": {"mean": 100}}},
    "loadgen": {"concurrency": 8, "request_rate": 3.5, "request_count": 80},
}


def times(factor, number):
    return number * factor


def by(factor):
    return partial(times, factor)


def in_unit(unit, scale=1.0):
    """The statistics of AIPerf's TTFT in another unit."""
    return lambda old: {key: value * scale for key, value in old.items() if key != "unit"} | {"unit": unit}


def server(**degrees):
    return {"server_info": degrees}


CHANGES = [
    # GPUs are counted only where the server says all degrees.
    (SG9, server(tp_size=8, pp_size=2, dp_size=1), {"gpus": 16}),
    (SG9, server(tp_size=8, pp_size=1, dp_size=8, enable_dp_attention=True), {"gpus": 8}),
    (SG9, server(tp_size=8, pp_size=1, dp_size=8), {"gpus": None}),
    (SG9, server(tp_size=8, dp_size=1), {"gpus": None}),
    (SG9, server(tp_size="8", pp_size=1, dp_size=1), {"gpus": None}),
    (SG9, server(prefill=[ONE, ONE], decode=[ONE | {"tp_size": 16, "nnodes": 2}]),
     {"parallelism.prefill_gpus": 16, "parallelism.decode_gpus": 16, "gpus": 32, "nodes": 4,
      "parallelism.tp": 16}),
    # Lengths hold for random data only.
    (SG23, {"random_range_ratio": 0.0}, {"workload.input_len": 32.5, "workload.output_len": 8.5}),
    (SG23, {"random_range_ratio": 0.5}, {"workload.input_len": 48, "workload.output_len": 12}),
    (SG23, {"dataset_name": "sharegpt", "sharegpt_output_len": 99},
     {"workload.input_len": None, "workload.output_len": 99}),
    (SG23, {"dataset_name": "generated-shared-prefix"}, {"workload.input_len": None}),
    *[(name, {"request_rate": rate}, {"workload.request_rate": read_as})
      for name in (SG4, VLLM)
      for rate, read_as in (("inf", 0.0), (math.inf, 0.0), (4, 4.0), (None, None), ("trace", None))],
    (VLLM, {"request_rate": "4"}, {"workload.request_rate": None, "findings": "'request_rate' is"}),
    (SG23, {"goodput_slos_ms": {"ttft": 60.0}, "request_goodput": 20.5, "slo_attainment": 0.75},
     {"goodput": 20.5, "slo_attainment": 0.75, "extra.goodput_slos_ms": {"ttft": 60.0}}),
    (VLLM, {"something_new": list(range(65)), "short": [1, 2]},
     {"extra.something_new": None, "extra.short": [1, 2], "notes": "something_new (65 entries)"}),
    (VLLM, {"completed": 0, "failed": 32, "latencies": [0.0] * 32},
     {"ttft mean": None, "notes": "no request completed"}),
    # vLLM 0.8: 2 of 5 are counted as completed, with a TTFT of 0.
    (VLLM_ROW,
     {"num_prompts": 5, "completed": 5, "total_input_tokens": 500, "total_output_tokens": 30, "failed": GONE,
      "input_lens": [100] * 5, "output_lens": [10, 0, 10, 10, 0], "ttfts": [2.0, 0.0, 2.4, 2.6, 0.0],
      "itls": [[0.1] * 9, [], [0.1] * 9, [0.1] * 9, []], "generated_texts": ["a"] * 5, "errors": [""] * 5,
      "mean_ttft_ms": 1400.0},
     {"findings": "counts 2 of 5 requests that returned nothing as 0: of those that answered it is 2333.33"}),
    # InferenceX's copy of vLLM's client writes seconds, without a suffix.
    (VLLM_ROW, {"mean_ttft_ms": GONE, "mean_tpot_ms": GONE, "median_ttft": 0.2, "p99_tpot": 0.0131},
     {"ttft median": 200.0, "tpot p99": 13.1}),
    # Failures are counted from errors where answers were not kept.
    (VLLM, {"failed": GONE, "latencies": GONE, "errors": ["", "reset"] * 16}, {"totals.failed": 16}),
    # A number that is none, and one that nothing depends on
    (VLLM, {"mean_ttft_ms": "12.5"},
     {"ttft mean": None, "findings": "'mean_ttft_ms'", "rules": ["unreadable"]}),
    (VLLM, {"mean_ttft_ms": -1.5}, {"ttft mean": None, "rules": ["unreadable"]}),
    # AIPerf: each metric in the unit that stands beside it
    *[(AIPERF, {"time_to_first_token": in_unit(unit, scale)},
       {"ttft mean": 44.321247799999995, "ttft std": 3.6191378103829868})
      for unit, scale in (("ns", 1e6), ("us", 1e3), ("s", 1e-3), ("sec", 1e-3))],
    *[(AIPERF, {"time_to_first_token/unit": unit},
       {"ttft": None, "e2e mean": 221.6233708, "findings": "time_to_first_token: 'unit' is"})
      for unit in ("fortnights", None, "tokens/sec", "")],
    *[(AIPERF, {"total_usage_completion_tokens/avg": tokens, "total_usage_prompt_tokens/avg": 640.0,
                "input_config/datasets/0/prompts/osl/mean": 111}, {"rules": rules})
      for tokens, rules in ((1109.0, []), (1150.0, ["tokens_counted"]))],
    (AIPERF, {"input_config": OLD_CONFIG},
     {"model": "a/b", "workload.input_len": 550, "workload.output_len": 100, "workload.concurrency": 8,
      "workload.request_rate": 3.5, "workload.num_prompts": 80}),
    (AIPERF, {"request_count/avg": 9.5, "was_cancelled": True},
     {"totals.completed": None, "notes": "cancelled"}),
    # guidellm
    (GUIDE, {G_TTFT: ZERO}, {"ttft": None}),
    (GUIDE, {"benchmarks/0/metrics/request_totals/incomplete": 4,
             "benchmarks/0/metrics/request_totals/errored": 2,
             "benchmarks/0/metrics/request_totals/total": 9},
     {"totals.failed": 2, "notes": "4 incomplete and 2 errored"}),
    (GUIDE, {STRATEGY: {"type_": "synchronous"}}, {"workload.concurrency": 1, "workload.request_rate": None}),
    (GUIDE, {STRATEGY: {"type_": "throughput", "max_concurrency": 512}},
     {"workload.concurrency": 512, "workload.request_rate": 0}),
    (GUIDE, {STRATEGY: {"type_": "constant", "rate": 4.5, "max_concurrency": None}},
     {"workload.concurrency": None, "workload.request_rate": 4.5}),
    (GUIDE, {STRATEGY: "odd"}, {"workload.concurrency": None}),
    (GUIDE, {"benchmarks/0/requests/successful/0/output_tokens": "many"},
     {"samples.output_lens": (), "rules": ["unreadable"]}),
    # inference-perf
    (PERF, {"successes/throughput/output_tokens_per_sec": 56 / 1.609,
            "successes/throughput/total_tokens_per_sec": 462 / 1.609},
     {"totals.output_tokens": 56, "rules": ["failed"]}),
    (PERF, {"successes/throughput/output_tokens_per_sec": by(3)}, {"findings": "throughput"}),
    (PERF, {"load_summary/concurrency": 2, "load_summary/requested_rate": 5},
     {"workload.concurrency": 2, "workload.request_rate": None}),
    *[(PERF, {"load_summary/count": count, "load_summary/achieved_rate": rate},
       {"rules": ["failed", "completed", *rules]})
      for count, rate, rules in ((100, 2.5, ["rate_not_sent"]), (100, 3.9, []), (10, 2.5, []))],  # chance
    (PERF, {"load_summary/schedule_delay/mean": 4.0, "load_summary/schedule_delay/max": 30.0},
     {"rules": ["failed"]}),
    (PERF, {f"load_summary/{key}": GONE for key in ("requested_rate", "achieved_rate", "send_duration")},
     {"workload.request_rate": None, "sent_rate": None}),
    (PERF, {P_TTFT: None}, {"ttft": None, "e2e mean": 631.5, "rules": ["failed"]}),
    # TensorRT-LLM
    (BENCH, {"machine": {"name": "NVIDIA GB10", "memory.total": 119.7}, "engine/quantization": "NVFP4",
             "world_info/world_size": 4}, {"hardware": "NVIDIA GB10", "precision": "NVFP4", "gpus": 4}),
    (BENCH, {"streaming_metrics": GONE}, {"ttft": None, "e2e p99": 1137.6817}),
    (TRT, {"p50_ttft_ms": 1.0, "p99.9_ttft_ms": 3.0, "request_goodput:": 2.0, "p99_user_ms": 4.0},
     {"ttft p50": 1, "ttft p99.9": 3, "goodput": 2, "extra.p99_user_ms": 4.0}),
    # InferenceX
    (AGG, {"mean_e2el": None},
     {"workload.input_len": None, "workload.longest_output_len": 1024,
      "notes": "from which on they are drawn is not said"}),
    (AGG, {"tp": GONE, "precision": GONE, "disagg": "perhaps", "conc": "many", "p99_itl": "fast"},
     {"gpus": None, "precision": "", "workload.concurrency": None, "itl p99": None, "tpot median": 33.2,
      "rules": ["unreadable"] * 3}),
    # Numbers of one file that contradict each other
    ("vllm_throughput_0.32.json", {"tokens_per_second": by(1.5)}, {"findings": "total throughput"}),
    ("vllm_throughput_0.32.json", {"requests_per_second": by(1.5)}, {"findings": "request_throughput"}),
    ("vllm_latency_0.32.json", {"avg_latency": by(1.3)}, {"findings": "batch_latency mean"}),
    ("vllm_latency_0.32.json", {"percentiles": [1.0]}, {"findings": "'percentiles' is not an object"}),
    (BENCH, {"streaming_metrics/avg_ttft_ms": by(1.3)}, {"findings": "the average of its distribution"}),
    (AGG, {"osl": by(0.5)}, {"findings": "osl is 512, but 1 + (E2E - TTFT) / TPOT are 922.1 tokens"}),
    (AGG, {"osl": by(8)}, {"findings": "osl is 8192"}),
    (AGG, {"conc": by(4)}, {"findings": "the client allows 256"}),
    (AGG, {"median_intvty": by(2.0)}, {"findings": "median_intvty is 60.241, but 1 / median_tpot"}),
    ("genai_perf.json", {"output_token_throughput/avg": by(1.4)},
     {"findings": "tokens a request, but output_len is"}),
    (AIPERF, {"output_sequence_length/avg": by(1.1)}, {"findings": "their mean is said to be 122.1"}),
    (GUIDE, {f"{G_TTFT}/total_sum": by(2.0)}, {"findings": "which total_sum is"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "expected"), CHANGES, ids=lambda one: one if isinstance(one, str) else "..."
)
def test_a_changed_file(tmp_path, name, changes, expected):
    (run,) = changed(tmp_path, name, changes)
    for what, value in expected.items():
        found = look(run, what)
        if what in ("notes", "findings"):
            assert value in found
            untouched = of(name) if isinstance(name, str) else written(tmp_path, json.dumps(name), "a.json")
            assert all(value not in look(one, what) for one in untouched)  # it is of the change
        else:
            assert found == (pytest.approx(value) if isinstance(value, float) else value), what


def test_vllm_lists_stand_in_for_means_that_were_not_asked_for(tmp_path):
    row = json.loads((DATA / VLLM).read_text())
    short = {k: v for k, v in row.items() if "e2el" not in k}
    (run,) = written(tmp_path, json.dumps(short), "a.json")
    assert run.value("e2e", "mean") == pytest.approx(row["mean_e2el_ms"])
    assert run.metric("e2e").derived == "mean of latencies"
    assert run.value("client_queue_time", "mean") == pytest.approx(sum(row["queue_times"]) / 32 * 1e3)
    lost = short | {"latencies": [0.0, *row["latencies"][1:]], "completed": 31, "failed": 1}
    (run,) = written(tmp_path, json.dumps(lost), "a.json")
    assert (len(run.samples.e2es_ms), run.value("client_queue_time")) == (31, None)


def test_each_benchmark_of_guidellm_is_a_run(tmp_path):
    content = json.loads((DATA / GUIDE).read_text())
    metrics = content["benchmarks"][0]["metrics"]
    content["benchmarks"].append(
        {"metrics": {"time_per_output_token_ms": metrics["time_per_output_token_ms"]}}
    )
    first, second = written(tmp_path, json.dumps(content), "a.json")
    assert second.id.endswith("benchmarks[1]")
    assert second.value("time_per_output_token", "mean") == first.value("time_per_output_token", "mean")
    assert (second.value("throughput"), second.totals.completed) == (None, None)


@pytest.mark.parametrize(("strategy", "concurrency", "rate"), [
    ("synchronous", 1, None), ("throughput@512", 512, 0), ("throughput@unlimited", None, 0),
    ("constant@4.50", None, 4.5), ("poisson@fast", None, None),
])  # fmt: skip
def test_strategies_of_guidellms_csv(tmp_path, strategy, concurrency, rate):
    text = (DATA / "guidellm_0.8.1.csv").read_text().replace("concurrent@2", strategy)
    run = written(tmp_path, text, "a.csv")[0]
    assert (run.workload.concurrency, run.workload.request_rate) == (concurrency, rate)


def test_cells_of_guidellms_csv_that_are_wrong(tmp_path):
    for new, why in (("[1.0, ", "entries, not 11"), ("(", "is no list in JSON")):
        for run in written(tmp_path, (DATA / "guidellm_0.8.1.csv").read_text().replace("[", new), "a.csv"):
            assert run.value("ttft", "p99") is None and run.value("ttft", "mean") is not None
            assert why in look(run, "findings")


@pytest.mark.parametrize(("changes", "scopes", "adds_up"), [
    ({}, {"gpu", "prefill_gpu", "decode_gpu"}, True),
    ({"tput_per_gpu": 30.0, "output_tput_per_gpu": 10.0, "input_tput_per_gpu": 20.0}, {"gpu"}, True),
    ({"output_tput_per_gpu": 999.0}, {"gpu", "unknown"}, False),
])  # fmt: skip
def test_over_which_gpus_a_disaggregated_throughput_is(tmp_path, changes, scopes, adds_up):
    row = json.loads((DATA / API).read_text())[2]
    row["metrics"] |= changes
    (run,) = written(tmp_path, json.dumps([row]), "a.json")
    assert {one.scope for one in run.metrics if one.name == "throughput"} == scopes
    assert ("denominator" not in rules(run)) == adds_up
    (run,) = written(tmp_path, json.dumps([row | {"num_prefill_gpu": None}]), "a.json")
    assert (run.gpus, run.metric("throughput", tokens="output").scope) == (None, "unknown")


def test_a_short_wait_of_the_client_is_no_finding(tmp_path):
    row = VLLM_ROW | {"mean_client_queue_time_ms": 0.05, "p99_client_queue_time_ms": 0.08}
    assert "client_queue_time" not in look(written(tmp_path, json.dumps(row), "a.json")[0], "findings")


def test_the_mean_of_a_data_set_is_no_single_length(tmp_path):
    """Its requests are of many lengths, so the fastest token is of no longest request."""
    (run,) = changed(tmp_path, BENCH, {
        "dataset/osl_stats/minimum": 64.0, "dataset/osl_stats/maximum": 192.0,
        "dataset/osl_stats/average": 128.13, "request_info/avg_output_length": 128.13,
        "performance/system_output_throughput_tok_s": by(128.13 / 128),
        "streaming_metrics/tpot_percentiles/minimum": by(1.3),
    })  # fmt: skip
    assert "longer than e2e" not in look(run, "findings")


def test_the_same_run_again(tmp_path):
    rows = (VLLM_ROW, VLLM_ROW | {"mean_tpot_ms": 12.5}, VLLM_ROW)
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = [[one.message for one in run.findings if one.rule == "repeated"] for run in load(path)]
    assert found == [[], [], [f"{path}:3: every number is that of {path}:1: the same run again"]]


def test_a_table_of_a_spreadsheet(tmp_path):
    for delimiter in (";", "\t"):
        text = (DATA / "dstack_online.csv").read_text().replace(",", delimiter)
        found = [run.metrics for run in written(tmp_path, text, "a.csv")]
        assert found == [run.metrics for run in of("dstack_online.csv")]


# TensorRT-LLM's printed report

PRINTED, OVERVIEW = ((DATA / f"trtllm_bench_{name}.txt").read_text() for name in ("console", "overview"))


def test_reports_and_blocks_in_one_log(tmp_path):
    other = PRINTED.replace("11076.7700", "5000.0000")
    found = written(tmp_path, "INFO [TRT-LLM] start\n" + PRINTED + "\n> ".join(other.splitlines()))
    assert [run.value("throughput", tokens="output", scope="instance") for run in found] == [11076.77, 5000]
    assert len(written(tmp_path, OVERVIEW * 3)) == 3
    block = (DATA / "console_trtllm_serve.txt").read_text()
    clients = [run.client for run in written(tmp_path, block + PRINTED + block)]
    assert clients == ["tensorrt_llm.serve.console", "trtllm-bench.console", "tensorrt_llm.serve.console"]


def test_a_report_cut_off_and_numbers_that_do_not_make_it_whole(tmp_path):
    (run,) = written(tmp_path, PRINTED[: PRINTED.index("[TTFT] MAXIMUM")])
    assert (run.value("ttft", "min"), run.value("ttft", "max")) == (93.921, None)
    assert run.value("tpot", "p99") == 8.1306
    (run,) = written(tmp_path, OVERVIEW.replace("5393.2755", "5000.0000"))
    assert run.gpus is None and "make 8.629 GPUs" in look(run, "findings")
    many = PRINTED.replace("Number of requests:             100", "Number of requests:             20000")
    assert written(tmp_path, many)[0].totals.output_tokens is None  # of rounded means none are made up


# dstack's tables

ONLINE = PUBLISHED / "serving" / "dstack" / "online_results.csv"


def test_defaults_that_a_dataset_does_not_use_are_not_its_lengths():
    shared = [run for run in load(ONLINE) if run.workload.dataset == "generated-shared-prefix"]
    assert len(shared) == 9
    assert {(run.workload.input_len, run.workload.output_len) for run in shared} == {(3200, 800)}
    assert all(any("1024 / 1024" in note for note in run.notes) for run in shared)


@pytest.mark.parametrize(("columns", "factor"), [("concurrency", 1e3), (".*_ms", 1e-3)])
def test_what_only_looks_like_a_shift_is_not_mended(tmp_path, columns, factor):
    """A concurrency that could not be a p99 of ITL; latencies in s, which break Little's law as well."""
    header, row = (line.split(",") for line in ONLINE.read_text(encoding="utf-8-sig").splitlines()[:2])
    row = [
        repr(float(cell) * factor) if re.fullmatch(columns, name) else cell
        for name, cell in zip(header, row, strict=True)
    ]
    (run,) = written(tmp_path, f"{','.join(header)}\n{','.join(row)}", "row.csv")
    assert "littles_law" in rules(run) and "column_shift" not in rules(run)
    assert run.value("itl", "p99") == float(row[header.index("p99_itl_ms")])
