"""TensorRT-LLM's bench report, as JSON and as printed, and its serving client's JSON."""

from __future__ import annotations

import pytest

from harness.serving.clients.files import UnreadableError
from tests.support.serving_files import DATA, changed, of, rules, shapes, written

PRINTED = (DATA / "trtllm_bench_console.txt").read_text()
LATENCIES = {
    "ttft": (162.6706, 159.7857, 220.053, 226.9148, 232.4339, 93.921, 232.4339),
    "tpot": (7.3272, 7.6079, 8.1246, 8.1289, 8.1306, 6.645, 8.1306),
    "e2e": (1093.2284, 1091.7905, 1130.72, 1133.0074, 1137.6817, 1050.1519, 1137.6817),
}
SPEEDS = (137.1475, 131.4444, 150.4112, 150.4606, 150.4894, 122.9921, 150.4894)
STATISTICS = ("mean", "median", "p90", "p95", "p99", "min", "max")


@pytest.mark.parametrize("name", ["trtllm_bench.json", "trtllm_bench_console.txt"])
def test_every_value_of_a_bench_report(name):
    (run,) = of(name)
    assert run.client == ("trtllm-bench" if name.endswith(".json") else "trtllm-bench.console")
    assert (run.engine, run.version) == ("tensorrt-llm", "0.21.0rc0")
    assert (run.model, run.precision, run.mode) == ("meta-llama/Llama-3.1-8B-Instruct", "bfloat16", "offline")
    assert (run.gpus, run.hardware) == (1, "")
    assert (run.parallelism.tp, run.parallelism.pp, run.parallelism.ep) == (1, 1, None)
    assert run.totals.duration_s == pytest.approx(1.1555715)
    assert (run.totals.completed, run.totals.input_tokens, run.totals.output_tokens) == (100, 12800, 12800)
    assert run.workload.input_len == 128
    expected = {
        ("throughput", "total", "output"): (11076.77, "tok/s", "instance"),
        ("throughput", "total", "output", "gpu"): (11076.77, "tok/s", "gpu"),
        ("throughput", "total", "total"): (22153.5399, "tok/s", "instance"),
        ("request_throughput", "total", "none"): (86.5373, "req/s", "instance"),
        ("throughput_per_user", "mean", "output"): (117.1544, "tok/s", "request"),
        ("concurrency", "mean", "none"): (94.605, "1", "instance"),
    }
    for latency, values in LATENCIES.items():
        for statistic, value in zip(STATISTICS, values, strict=True):
            expected[(latency, statistic, "none")] = (value, "ms", "request")
    for statistic, value in zip(STATISTICS, SPEEDS, strict=True):
        expected[("generation_speed_per_user", statistic, "output")] = (value, "tok/s", "request")
    assert shapes(run) == expected
    assert run.findings == ()


def test_lengths_asked_for_are_the_datasets():
    assert of("trtllm_bench.json")[0].workload.output_len == 128
    assert of("trtllm_bench_console.txt")[0].workload.output_len is None


def test_gpus_of_a_printed_report_follow_from_its_throughputs(tmp_path):
    (run,) = of("trtllm_bench_overview.txt")
    assert run.gpus == 8
    assert "8.0000" in run.notes[0]
    assert run.value("throughput", scope="gpu") == 5393.2755
    assert run.value("e2e", "mean") == 332826.9898
    assert (run.totals.duration_s, run.totals.completed) == (5443.839814, None)
    text = (DATA / "trtllm_bench_overview.txt").read_text().replace("5393.2755", "5000.0000")
    assert written(tmp_path, text)[0].gpus is None


def test_two_reports_in_one_log(tmp_path):
    other = PRINTED.replace("11076.7700", "5000.0000")
    first, second = written(tmp_path, "INFO [TRT-LLM] start\n" + PRINTED + "\n> ".join(other.splitlines()))
    assert first.value("throughput", tokens="output", scope="instance") == 11076.77
    assert second.value("throughput", tokens="output", scope="instance") == 5000
    overview = (DATA / "trtllm_bench_overview.txt").read_text()
    assert len(written(tmp_path, overview * 3)) == 3


def test_a_report_and_a_block_in_one_text(tmp_path):
    block = (DATA / "console_trtllm_serve.txt").read_text()
    clients = [run.client for run in written(tmp_path, block + PRINTED + block)]
    assert clients == ["tensorrt_llm.serve.console", "trtllm-bench.console", "tensorrt_llm.serve.console"]


def test_a_report_cut_off(tmp_path):
    (run,) = written(tmp_path, PRINTED[: PRINTED.index("[TTFT] MAXIMUM")])
    assert (run.value("ttft", "mean"), run.value("ttft", "min"), run.value("ttft", "max")) == (
        162.6706,
        93.921,
        None,
    )
    assert run.value("tpot", "p99") == 8.1306


def test_a_report_with_parts_missing(tmp_path):
    def keep_performance(content):
        return {"performance": {"system_output_throughput_tok_s": 5.0, "total_latency_ms": "soon"}}

    (run,) = changed(tmp_path, "trtllm_bench.json", keep_performance)
    assert shapes(run) == {("throughput", "total", "output"): (5.0, "tok/s", "instance")}
    assert run.totals.duration_s is None
    assert rules(run) == ["unreadable"]
    (run,) = changed(tmp_path, "trtllm_bench.json", lambda c: c.pop("streaming_metrics") and None)
    assert run.value("ttft") is None
    assert run.value("e2e", "p99") == 1137.6817


def test_machine_and_quantisation(tmp_path):
    def change(content):
        content["machine"] = {"name": "NVIDIA GB10", "memory.total": 119.7}
        content["engine"] |= {"quantization": "NVFP4"}
        content["world_info"]["world_size"] = 4

    (run,) = changed(tmp_path, "trtllm_bench.json", change)
    assert (run.hardware, run.precision, run.gpus) == ("NVIDIA GB10", "NVFP4", 4)
    assert run.extra["machine"] == {"memory.total": 119.7}


def test_tokens_of_rounded_means_are_not_made_up(tmp_path):
    text = PRINTED.replace("Number of requests:             100", "Number of requests:             20000")
    assert written(tmp_path, text)[0].totals.output_tokens is None


def test_every_value_of_the_serving_client():
    (run,) = of("trtllm_serve.json")
    assert (run.client, run.engine, run.model) == (
        "tensorrt_llm.serve",
        "tensorrt-llm",
        "deepseek-ai/DeepSeek-R1",
    )
    assert (run.mode, run.gpus, run.date) == ("online", None, "20261101-101112")
    assert (run.workload.concurrency, run.workload.request_rate, run.workload.num_prompts) == (4, 0, 4)
    assert run.totals.model_dump() == {
        "duration_s": 0.5, "completed": 3, "failed": 1, "input_tokens": 3004, "output_tokens": 11,
    }  # fmt: skip
    values = shapes(run)
    assert values[("throughput", "total", "output")] == (22.0, "tok/s", "instance")
    assert values[("throughput", "total", "total")] == (6030.0, "tok/s", "instance")
    assert values[("request_throughput", "total", "none")] == (6.0, "req/s", "instance")
    assert values[("throughput_per_user", "mean", "output")][1:] == ("tok/s", "request")
    assert values[("ttft", "mean", "none")] == (pytest.approx(110), "ms", "request")
    assert values[("e2e", "mean", "none")][0] == pytest.approx((170 + 161 + 170) / 3)
    assert len(values) == 5 + 4 * 4
    assert run.samples.output_lens == (4, 3, 4)
    assert run.samples.ttfts_ms == pytest.approx((100, 120, 110))
    assert run.samples.e2es_ms == pytest.approx((170, 161, 170))
    assert run.samples.itls_ms[1] == pytest.approx((20, 21))
    assert "generated_texts" not in run.extra
    assert values[("accept_length", "mean", "none")] == (1.0, "1", "instance")
    assert run.extra["avg_decoded_tokens_per_iter"]["std"] == 0.0
    assert rules(run) == ["failed"]


def test_percentiles_of_the_serving_client(tmp_path):
    def change(content):
        content |= {"p50_ttft_ms": 1.0, "p99.9_ttft_ms": 3.0, "request_goodput:": 2.0, "p99_user_ms": 4.0}

    (run,) = changed(tmp_path, "trtllm_serve.json", change)
    assert (run.value("ttft", "p50"), run.value("ttft", "p99.9"), run.value("goodput")) == (1, 3, 2)
    assert run.extra["p99_user_ms"] == 4.0


@pytest.mark.parametrize(
    ("key", "value"),
    [("ttfts", [0.1, "x", 0.2]), ("output_lens", [4, 3.5, 4]), ("itls", [[0.1], 3]), ("itls", [[None]])],
)
def test_samples_that_are_none(tmp_path, key, value):
    (run,) = changed(tmp_path, "trtllm_serve.json", lambda c: c.update({key: value}))
    assert rules(run) == ["unreadable", "failed"]
    assert run.value("ttft", "mean") == pytest.approx(110)


def test_a_vllm_file_is_not_ours(tmp_path):
    def change(content):
        del content["user_throughput"], content["avg_decoded_tokens_per_iter"]

    try:
        (run,) = changed(tmp_path, "trtllm_serve.json", change)
    except UnreadableError as error:
        assert "of no known client" in str(error)
    else:
        assert not run.client.startswith("tensorrt_llm")
