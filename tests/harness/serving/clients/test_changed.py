"""What is read of a client's file after a change of it."""

import difflib
import json
import math
from functools import partial
from pathlib import Path

import pytest

from harness.errors import UnreadableError
from harness.serving import load
from tests.support.serving_files import DATA, GONE, VLLM_ROW, as_lines, changed, content_of, written

SG9, SG23, SG4 = (f"sglang_bench_serving_{version}.jsonl" for version in ("0.5.9", "0.5.23", "0.4.3"))
VLLM, VLLM8 = "vllm_serve_0.32.json", "vllm_serve_0.8.json"
AIPERF, GUIDE, PERF = "aiperf_0.13.0.json", "guidellm_0.7.3.json", "inference_perf_0.7.0.json"
BENCH, TRT, AGG, API = "trtllm_bench.json", "trtllm_serve.json", "inferencex_agg.json", "inferencex_api.json"
G_TTFT = "benchmarks/0/metrics/time_to_first_token_ms/successful"
G_TOTALS = "benchmarks/0/metrics/request_totals"
ZERO = {"mean": 0.0, "median": 0.0, "count": 0, "total_sum": 0.0, "percentiles": {"p50": 0.0}}
ONE = {"tp_size": 8, "pp_size": 1, "dp_size": 1, "nnodes": 1, "version": "0.5.9"}
NO_MS = {key: GONE for key in content_of(VLLM) if key.endswith("_ms")}
E2EL = {key: GONE for key in NO_MS if "e2el" in key}
OLD_CONFIG = {
    "endpoint": {"model_names": ["a/b"], "streaming": True},
    "input": {"prompt": {"input_tokens": {"mean": 550}, "output_tokens": {"mean": 100}}},
    "loadgen": {"concurrency": 8, "request_rate": 3.5, "request_count": 80},
}


def times(factor, number):
    return number * factor


def statistics_in(unit, scale, old):
    return {key: value * scale for key, value in old.items() if key != "unit"} | {"unit": unit}


def by(factor):
    return partial(times, factor)


def in_unit(unit, scale):
    return partial(statistics_in, unit, scale)


def server(**degrees):
    return {"server_info": degrees}


CHANGES = [
    # GPUs are counted only where the server says all degrees.
    (SG9, server(tp_size=8, pp_size=2, dp_size=1)), (SG9, server(tp_size=8, dp_size=1)),
    (SG9, server(tp_size=8, pp_size=1, dp_size=8, enable_dp_attention=True)),
    (SG9, server(tp_size=8, pp_size=1, dp_size=8)), (SG9, server(tp_size="8", pp_size=1, dp_size=1)),
    (SG9, server(prefill=[ONE, ONE], decode=[ONE | {"tp_size": 16, "nnodes": 2}])),
    # Lengths hold for random data only.
    (SG23, {"random_range_ratio": 0.0}), (SG23, {"random_range_ratio": 0.5}),
    (SG23, {"dataset_name": "sharegpt", "sharegpt_output_len": 99}),
    (SG23, {"dataset_name": "generated-shared-prefix"}),
    *[(name, {"request_rate": rate}) for name in (SG4, VLLM)
      for rate in ("inf", math.inf, -math.inf, 4, None, "trace", "4")],
    (SG23, {"goodput_slos_ms": {"ttft": 60.0}, "request_goodput": 20.5, "slo_attainment": 0.75}),
    (VLLM, {"something_new": list(range(65)), "short": [1, 2]}),
    (VLLM, {"completed": 0, "failed": 32, "latencies": [0.0] * 32}),
    # vLLM 0.8 counts requests that returned nothing as completed, with a TTFT of 0.
    (VLLM8, {"num_prompts": 5, "completed": 5, "total_input_tokens": 500, "total_output_tokens": 30,
             "input_lens": [100] * 5, "output_lens": [10, 0, 10, 10, 0], "ttfts": [2.0, 0.0, 2.4, 2.6, 0.0],
             "itls": [[0.1] * 9, [], [0.1] * 9, [0.1] * 9, []], "generated_texts": ["a"] * 5,
             "errors": [""] * 5, "mean_ttft_ms": 1400.0}),
    # InferenceX's copy of vLLM's client writes seconds, without a suffix.
    (VLLM, NO_MS | {"median_ttft": 0.2, "p99_tpot": 0.0131}),
    # Failures are counted from errors where answers were not kept.
    (VLLM, {"failed": GONE, "latencies": GONE, "errors": ["", "reset"] * 16}),
    # Lists stand in for means that were not asked for.
    (VLLM, E2EL), (VLLM, E2EL | {"latencies/0": 0.0, "completed": 31, "failed": 1}),
    # A number that is none, and one that nothing depends on
    (VLLM, {"mean_ttft_ms": "12.5"}), (VLLM, {"mean_ttft_ms": -1.5}),
    *[(VLLM, {"model_id": f"half {half}"}) for half in ("\ud83d", "\udce9")],  # of a character
    # A short wait of the client is none.
    (VLLM, {"mean_client_queue_time_ms": 0.05, "p99_client_queue_time_ms": 0.08, "queue_times": GONE}),
    # AIPerf: each metric in the unit that stands beside it
    *[(AIPERF, {"time_to_first_token": in_unit(unit, scale)})
      for unit, scale in (("ns", 1e6), ("us", 1e3), ("s", 1e-3), ("sec", 1e-3))],
    (AIPERF, {"request_throughput/unit": "requests/s", "output_token_throughput/unit": "tokens/s"}),
    *[(AIPERF, {"time_to_first_token/unit": unit}) for unit in ("fortnights", None, "tokens/sec", "")],
    *[(AIPERF, {"total_usage_completion_tokens/avg": tokens, "total_usage_prompt_tokens/avg": 640.0,
                "input_config/datasets/0/prompts/osl/mean": 111}) for tokens in (1109.0, 1150.0)],
    (AIPERF, {"input_config": OLD_CONFIG}), (AIPERF, {"request_count/avg": 9.5, "was_cancelled": True}),
    # guidellm
    (GUIDE, {G_TTFT: ZERO}),
    (GUIDE, {f"{G_TOTALS}/incomplete": 4, f"{G_TOTALS}/errored": 2, f"{G_TOTALS}/total": 9}),
    *[(GUIDE, {"benchmarks/0/config/strategy": strategy})
      for strategy in ({"type_": "synchronous"}, {"type_": "throughput", "max_concurrency": 512},
                       {"type_": "constant", "rate": 4.5, "max_concurrency": None}, "odd")],
    *[(GUIDE, {"benchmarks/0/requests/successful/0/output_tokens": tokens}) for tokens in ("many", GONE)],
    # inference-perf
    (PERF, {"successes/throughput/output_tokens_per_sec": 56 / 1.609,
            "successes/throughput/total_tokens_per_sec": 462 / 1.609}),
    (PERF, {"successes/throughput/output_tokens_per_sec": by(3)}),
    (PERF, {"load_summary/concurrency": 2, "load_summary/requested_rate": 5}),
    *[(PERF, {"load_summary/count": count, "load_summary/achieved_rate": rate})
      for count, rate in ((100, 2.5), (100, 3.9), (10, 2.5))],  # the others may be chance
    (PERF, {"load_summary/schedule_delay/mean": 4.0, "load_summary/schedule_delay/max": 30.0}),
    (PERF, {f"load_summary/{key}": GONE for key in ("requested_rate", "achieved_rate", "send_duration")}),
    (PERF, {"successes/latency/time_to_first_token": None}), (PERF, {"successes/latency": GONE}),
    # TensorRT-LLM
    (BENCH, {"machine": {"name": "NVIDIA GB10", "memory.total": 119.7}, "engine/quantization": "NVFP4",
             "world_info/world_size": 4}), (BENCH, {"streaming_metrics": GONE}),
    (TRT, {"p50_ttft_ms": 1.0, "p99.9_ttft_ms": 3.0, "request_goodput:": 2.0, "p99_user_ms": 4.0}),
    # The mean of a data set is no single length: the fastest token is of no longest request.
    (BENCH, {"dataset/osl_stats/minimum": 64.0, "dataset/osl_stats/maximum": 192.0,
             "dataset/osl_stats/average": 128.13, "request_info/avg_output_length": 128.13,
             "performance/system_output_throughput_tok_s": by(128.13 / 128),
             "streaming_metrics/tpot_percentiles/minimum": by(1.3)}),
    # InferenceX
    (AGG, {"mean_e2el": None}),
    (AGG, {"tp": GONE, "precision": GONE, "disagg": "perhaps", "conc": "many", "p99_itl": "fast"}),
    # Of prefill and decode apart: over which GPUs a throughput is
    (API, {f"2/metrics/{kind}tput_per_gpu": n for n, kind in enumerate(("output_", "input_", ""), 1)}),
    (API, {"2/metrics/output_tput_per_gpu": 999.0}), (API, {"2/metrics/input_tput_per_gpu": None}),
    (API, {"2/num_prefill_gpu": None}),
    # Numbers of one file that contradict each other
    *[("vllm_throughput_0.32.json", {key: by(1.5)}) for key in ("tokens_per_second", "requests_per_second")],
    ("vllm_latency_0.32.json", {"avg_latency": by(1.3)}), ("vllm_latency_0.32.json", {"percentiles": [1.0]}),
    ("vllm_latency_0.32.json", {"latencies/0": -1.0}),
    (BENCH, {"streaming_metrics/avg_ttft_ms": by(1.3)}), (AGG, {"osl": by(0.5)}), (AGG, {"osl": by(8)}),
    (AGG, {"conc": by(4)}), (AGG, {"median_intvty": by(2.0)}),
    ("genai_perf.json", {"output_token_throughput/avg": by(1.4)}),
    (AIPERF, {"output_sequence_length/avg": by(1.1)}), (GUIDE, {f"{G_TTFT}/total_sum": by(2.0)}),
]  # fmt: skip


TEXTS = [
    *[("guidellm_0.8.1.csv", "concurrent@2", strategy)
      for strategy in ("synchronous", "throughput@512", "throughput@unlimited", "constant@4.5", "poisson@x")],
    *[("guidellm_0.8.1.csv", "[22.562742233276367", new) for new in ("[1.0, 22.56", "(22.56")],
    ("guidellm_0.8.1.csv", str([32.0] * 11), ""),
    ("dstack_online.csv", ",random,,8,,3200,", ",generated-shared-prefix,,8,,,"),
    ("dstack_online.csv", "125.0837618", ""), ("dstack_online.csv", "mi300x,vllm", "mi355x,lmdeploy"),
    ("dstack_offline.csv", "4096000", "4096001"),
    # What only looks like a shift: no p99 of ITL is so large; E2E in s, which breaks Little's law as well
    ("dstack_online.csv", "112.5012396", "9112.5"), ("dstack_online.csv", "46466.08171", "46.466"),
    ("dstack_online.csv", ",", ";"), ("dstack_online.csv", ",", "\t"),  # of a spreadsheet
    ("trtllm_bench_overview.txt", "5393.2755", "5000.0000"),
    # Of rounded means no tokens are made up.
    ("trtllm_bench_console.txt", "of requests:             100", "of requests:             20000"),
    ("console_vllm.txt", "Mean TTFT (ms):                          233.84", "Mean TTFT (s): 0.23384"),
    ("console_vllm.txt", "duration (s):                  274.44", "duration (min): 4.574"),
    ("console_vllm.txt", "Median ITL (ms)", "Median ITL (ticks)"),
    ("console_vllm.txt", "Median ITL", "Std Dev ITL"), ("console_vllm.txt", "1049.39", "1.049,39"),
    ("console_vllm.txt", "Output token throughput", "Steady output token throughput"),
]  # fmt: skip


def said(value):
    if isinstance(value, partial):
        return f"{value.func.__name__} {' '.join(map(str, value.args))}"
    text = "gone" if value is GONE else json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def test_what_follows_from_a_change(snapshot, tmp_path):
    """Of each change the lines of as_read.txt that it takes away and those that come."""
    cases = [
        (name, ", ".join(f"{where} = {said(value)}" for where, value in changes.items()),
         json.dumps(content_of(name)), json.dumps(changed(name, changes)))
        for name, changes in CHANGES
    ]  # fmt: skip
    for name, old, new in TEXTS:
        text = (DATA / name).read_text()
        assert old in text
        cases.append((name, f"{old!r} = {new!r}", text, text.replace(old, new)))
    lines = []
    for name, change, *texts in cases:
        runs = [written(tmp_path, text, name) for text in texts]
        before, after = ([line for run in of for line in as_lines(run)] for of in runs)
        differ = difflib.unified_diff(before, after, n=0, lineterm="")
        lines += [f"$ {name} {change}", *(line for line in differ if line[:3] in ("-  ", "+  ")), ""]
    snapshot(Path(__file__).with_name("changed.txt"), "\n".join(lines).replace(f"{tmp_path}/", ""))


def test_each_benchmark_of_guidellm_is_a_run(tmp_path):
    content = json.loads((DATA / GUIDE).read_text())
    metrics = content["benchmarks"][0]["metrics"]
    per_token = "time_per_output_token_ms"
    content["benchmarks"].append({"metrics": {per_token: metrics[per_token]}})
    first, second = written(tmp_path, json.dumps(content), "a.json")
    assert second.id.endswith("benchmarks[1]")
    assert second.value("time_per_output_token", "mean") == first.value("time_per_output_token", "mean")
    assert (second.value("throughput"), second.totals.completed) == (None, None)
    content["benchmarks"].append(3)
    with pytest.raises(UnreadableError, match=r"benchmarks\[2\] is no object"):
        written(tmp_path, json.dumps(content), "a.json")


def test_the_same_run_again(tmp_path):
    rows = (VLLM_ROW, VLLM_ROW | {"mean_tpot_ms": 12.5}, VLLM_ROW)
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = [[one.message for one in run.findings if one.rule == "repeated"] for run in load(path)]
    assert found == [[], [], [f"{path}:3: every number is that of {path}:1: the same run again"]]


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


def test_a_report_cut_off(tmp_path):
    (run,) = written(tmp_path, PRINTED[: PRINTED.index("[TTFT] MAXIMUM")])
    assert (run.value("ttft", "min"), run.value("ttft", "max")) == (93.921, None)
    assert run.value("tpot", "p99") == 8.1306
