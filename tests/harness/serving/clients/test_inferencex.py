"""InferenceX: seconds, and over which GPUs each throughput is."""

from __future__ import annotations

import pytest

from harness.serving.clients.report import as_text
from tests.support.serving_files import changed, noted, of, rules, shapes


def test_every_value_of_an_aggregate():
    (run,) = of("inferencex_agg.json")
    assert (run.client, run.engine, run.hardware, run.precision) == ("inferencex", "sglang", "h200", "fp8")
    assert (run.model, run.image, run.mode) == (
        "deepseek-ai/DeepSeek-R1-0528",
        "lmsysorg/sglang:v0.5.9",
        "online",
    )
    asked = run.workload
    assert (asked.longest_input_len, asked.longest_output_len, asked.concurrency) == (1024, 1024, 64)
    assert (asked.input_len, asked.output_len) == (922, 922)
    assert run.notes[-1].startswith("lengths: the longest are 1024 / 1024; means are 0.901 of them")
    assert run.gpus == 8
    assert run.parallelism.model_dump() == {
        "tp": 8, "pp": 1, "dp": None, "ep": 1, "dp_attention": False,
        "prefill_gpus": None, "decode_gpus": None,
    }  # fmt: skip
    assert shapes(run) == {
        ("throughput", "total", "total"): (435.5, "tok/s", "gpu"),
        ("throughput", "total", "output"): (217.9, "tok/s", "gpu"),
        ("throughput", "total", "input"): (217.6, "tok/s", "gpu"),
    } | {
        (name, statistic, "none"): (pytest.approx(seconds * 1e3), "ms", "request")
        for name, values in {
            "ttft": (0.512, 0.121, 1.01, 3.9),
            "tpot": (0.03299, 0.0332, 0.0011, 0.0351),
            "itl": (0.03301, 0.0288, 0.021, 0.11),
            "e2e": (30.9, 31.0, 2.1, 36.2),
        }.items()
        for statistic, seconds in zip(("mean", "median", "std", "p99"), values, strict=True)
    }
    assert run.extra["mean_intvty"] == pytest.approx(30.31, abs=0.01)
    assert run.extra["spec_decoding"] == "none"
    assert rules(run) == []
    assert noted(run) == ["unsaid"]  # no totals


def test_the_apis_rows():
    runs = of("inferencex_api.json")
    assert [run.gpus for run in runs] == [4, 4, 40, 36]
    assert [run.parallelism.disaggregated for run in runs] == [False, False, True, True]
    assert "the same GPUs" in runs[0].notes[0]
    assert [run.hardware for run in runs] == ["mi355x", "mi355x", "h200", "b300"]
    assert [run.date for run in runs] == ["2026-02-27", "2025-10-06", "2026-02-07", "2026-02-12"]
    assert (
        runs[0].source == "https://github.com/SemiAnalysisAI/InferenceX/actions/runs/22469096331/attempts/1"
    )
    assert runs[0].value("tpot", "mean") == pytest.approx(10.644555535103583)
    assert runs[0].value("e2e", "p99") == pytest.approx(11459.643041286615)
    assert (runs[0].parallelism.tp, runs[0].parallelism.dp_attention) == (4, False)
    assert [one.tokens for one in runs[1].metrics if one.name == "throughput"] == ["total"]


def test_denominators_of_a_disaggregated_row():
    run = of("inferencex_api.json")[2]
    assert (run.parallelism.prefill_gpus, run.parallelism.decode_gpus) == (16, 24)
    assert run.metric("throughput", tokens="total").scope == "gpu"
    into, out = run.metric("throughput", tokens="input"), run.metric("throughput", tokens="output")
    assert (into.scope, out.scope) == ("prefill_gpu", "decode_gpu")
    total = run.value("throughput", tokens="total")
    assert into.value * 16 + out.value * 24 == pytest.approx(total * 40, rel=1e-6)
    assert "24 of decode" in run.notes[0]
    assert (run.parallelism.tp, run.parallelism.ep) == (8, 1)
    different = of("inferencex_api.json")[3]
    assert (different.parallelism.tp, different.parallelism.ep) == (None, None)
    assert (different.extra["prefill_tp"], different.extra["decode_tp"]) == (4, 8)


def test_a_fork_that_divides_all_by_all_gpus(tmp_path):
    def change(rows):
        rows[2]["metrics"] |= {"tput_per_gpu": 30.0, "output_tput_per_gpu": 10.0, "input_tput_per_gpu": 20.0}
        return rows[2:3]

    (run,) = changed(tmp_path, "inferencex_api.json", change)
    assert {one.scope for one in run.metrics if one.name == "throughput"} == {"gpu"}


def test_throughputs_that_do_not_add_up(tmp_path):
    def change(rows):
        rows[2]["metrics"] |= {"output_tput_per_gpu": 999.0}
        return rows[2:3]

    (run,) = changed(tmp_path, "inferencex_api.json", change)
    assert run.metric("throughput", tokens="output").scope == "unknown"
    assert rules(run) == ["denominator"]


def test_a_half_of_a_disaggregated_row_has_no_known_denominator(tmp_path):
    (run,) = changed(tmp_path, "inferencex_api.json", lambda rows: [{**rows[2], "num_prefill_gpu": None}])
    assert (run.gpus, run.metric("throughput", tokens="output").scope) == (None, "unknown")


def test_lengths_that_no_latency_tells(tmp_path):
    (run,) = changed(tmp_path, "inferencex_agg.json", lambda row: row | {"mean_e2el": None})
    assert (run.workload.input_len, run.workload.longest_output_len) == (None, 1024)
    assert "from which on they are drawn is not said" in run.notes[-1]
    assert "<=1024/<=1024" in as_text([run], 1, 0)


def test_device_and_truth_as_text():
    (run,) = of("inferencex_device.json")
    assert (run.hardware, run.gpus, run.parallelism.dp_attention) == ("mi300x", 8, False)
    assert run.value("itl", "p99") == pytest.approx(181.08138488605616)
    assert run.value("throughput", tokens="total", scope="gpu") == 260.43053275981913


def test_missing_and_odd(tmp_path):
    def change(row):
        for key in ("tp", "mean_ttft", "precision"):
            del row[key]
        row |= {"disagg": "perhaps", "conc": "many", "mean_tpot": None, "p99_itl": "fast"}

    (run,) = changed(tmp_path, "inferencex_agg.json", change)
    assert (run.gpus, run.precision, run.workload.concurrency) == (None, "", None)
    assert run.value("ttft", "mean") is run.value("tpot", "mean") is run.value("itl", "p99") is None
    assert run.value("tpot", "median") == pytest.approx(33.2)
    assert rules(run) == ["unreadable"] * 3
