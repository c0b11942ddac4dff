"""AIPerf and genai-perf: each metric in the unit that stands beside it."""

from __future__ import annotations

import pytest

from tests.support.serving_files import changed, noted, of, rules, shapes

STATISTICS = ("mean", "median", "std", "min", "max", "p1", "p5", "p10", "p25", "p75", "p90", "p95", "p99")


def test_every_value():
    (run,) = of("aiperf_0.13.0.json")
    assert (run.client, run.model, run.mode) == ("aiperf", "mock", "online")
    assert run.extra["aiperf_version"] == "0.13.0"
    asked = run.workload
    assert (asked.dataset, asked.input_len, asked.output_len) == ("synthetic", 64, 32)
    assert (asked.concurrency, asked.num_prompts) == (2, 10)
    assert run.totals.model_dump() == {
        "duration_s": pytest.approx(1.143693312), "completed": 10, "failed": None,
        "input_tokens": 640, "output_tokens": 1110,
    }  # fmt: skip
    values = shapes(run)
    expected = {
        ("request_throughput", "total", "none"): (8.692163222737868, "req/s", "instance"),
        ("goodput", "total", "none"): (8.692163222737868, "req/s", "instance"),
        ("throughput", "total", "output"): (964.8301177239033, "tok/s", "instance"),
        ("throughput", "total", "input"): (556.2984462552236, "tok/s", "instance"),
        ("throughput", "total", "total"): (1521.1285639791267, "tok/s", "instance"),
        ("concurrency", "mean", "none"): (1.9294475667619273, "1", "instance"),
        ("throughput_per_user", "mean", "output"): (623.1996208594294, "tok/s", "request"),
        ("input_len", "mean", "input"): (64.0, "tokens", "request"),
        ("output_len", "max", "output"): (111.0, "tokens", "request"),
        ("ttft", "mean", "none"): (44.321247799999995, "ms", "request"),
        ("ttft", "median", "none"): (44.5704785, "ms", "request"),
        ("ttft", "p1", "none"): (39.61600154999999, "ms", "request"),
        ("ttft", "p99", "none"): (49.522713509999996, "ms", "request"),
        ("ttft", "std", "none"): (3.6191378103829868, "ms", "request"),
        ("e2e", "mean", "none"): (221.6233708, "ms", "request"),
        ("e2e", "max", "none"): (238.71168899999998, "ms", "request"),
        ("tpot", "mean", "none"): (1.6118374818181818, "ms", "request"),
        ("itl", "mean", "none"): (5.719423322580645, "ms", "request"),
        ("itl", "p95", "none"): (9.31711925, "ms", "request"),
    }
    assert {key: values[key] for key in expected} == expected
    for name in ("ttft", "e2e", "tpot", "itl"):
        assert {key[1] for key in values if key[0] == name} == set(STATISTICS)
    assert run.value("e2e", "mean") == pytest.approx(
        run.value("ttft", "mean") + 110 * run.value("tpot", "mean")
    )


def test_two_counts_of_tokens():
    (run,) = of("aiperf_0.13.0.json")
    # The mock server sent 32 tokens, as asked; by the client's tokenizer its text has 111.
    assert rules(run) == ["tokens_counted", "tokens_counted", "output_length"]
    assert run.findings[0].numbers == {"client": 1110, "server": 320}
    assert "1110 output tokens, the server 320" in run.findings[0].message


def test_one_count_of_tokens_is_fine(tmp_path):
    def change(content):
        content["total_usage_completion_tokens"]["avg"] = 1109.0
        content["total_usage_prompt_tokens"]["avg"] = 640.0
        content["input_config"]["datasets"][0]["prompts"]["osl"]["mean"] = 111

    (run,) = changed(tmp_path, "aiperf_0.13.0.json", change)
    assert rules(run) == []
    assert noted(run) == ["clock", "itl_beside_tpot"]


def test_genai_perf():
    (run,) = of("genai_perf.json")
    assert (run.client, run.model) == ("genai-perf", "deepseek-ai/DeepSeek-R1")
    assert run.totals.completed == 64
    assert run.workload.concurrency == 16
    assert run.value("tpot", "mean") == 29.1
    assert run.metric("throughput").model_dump() == {
        "name": "throughput", "value": 320.0, "unit": "tok/s", "scope": "instance", "tokens": "output",
        "statistic": "total", "derived": "", "label": "",
    }  # fmt: skip


@pytest.mark.parametrize(("unit", "scale"), [("ns", 1e6), ("us", 1e3), ("ms", 1), ("s", 1e-3), ("sec", 1e-3)])
def test_units_are_those_given(tmp_path, unit, scale):
    def change(content):
        ttft = content["time_to_first_token"]
        content["time_to_first_token"] = {k: v if k == "unit" else v * scale for k, v in ttft.items()} | {
            "unit": unit
        }

    (run,) = changed(tmp_path, "aiperf_0.13.0.json", change)
    assert run.value("ttft", "mean") == pytest.approx(44.321247799999995)
    assert run.value("ttft", "std") == pytest.approx(3.6191378103829868)


@pytest.mark.parametrize("unit", ["fortnights", None, "tokens/sec", ""])
def test_an_unknown_unit_is_left_out(tmp_path, unit):
    (run,) = changed(tmp_path, "aiperf_0.13.0.json", lambda c: c["time_to_first_token"].update(unit=unit))
    assert run.value("ttft") is None
    assert run.value("e2e", "mean") == 221.6233708
    assert "unreadable" in rules(run)


def test_missing_and_odd(tmp_path):
    def change(content):
        del content["request_latency"], content["input_config"], content["benchmark_duration"]
        content["time_to_first_token"] = [1, 2]
        content["inter_token_latency"]["avg"] = "fast"
        content["request_count"]["avg"] = 9.5
        content["was_cancelled"] = True

    (run,) = changed(tmp_path, "aiperf_0.13.0.json", change)
    assert run.value("e2e") is run.value("ttft") is run.value("tpot", "mean") is None
    assert run.value("tpot", "median") == pytest.approx(1.6362388227272726)
    assert (run.totals.completed, run.totals.duration_s, run.model) == (None, None, "")
    assert any("cancelled" in note for note in run.notes)
    assert rules(run).count("unreadable") == 3


def test_the_config_of_0_1(tmp_path):
    def change(content):
        content["input_config"] = {
            "endpoint": {"model_names": ["a/b"], "streaming": True},
            "input": {"prompt": {"input_tokens": {"mean": 550}, "output_tokens": {"mean": 100}}},
            "loadgen": {"concurrency": 8, "request_rate": 3.5, "request_count": 80},
        }

    (run,) = changed(tmp_path, "aiperf_0.13.0.json", change)
    assert run.model == "a/b"
    assert (run.workload.input_len, run.workload.output_len, run.workload.concurrency) == (550, 100, 8)
    assert (run.workload.request_rate, run.workload.num_prompts) == (3.5, 80)
