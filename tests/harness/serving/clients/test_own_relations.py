"""Files whose numbers contradict each other, of single clients."""

from __future__ import annotations

import csv
import json

import pytest

from harness.errors import UsageError
from harness.serving import load
from tests.support.serving_files import DATA, VLLM_ROW


def loaded(tmp_path, row):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(row))
    [run] = load(path)
    return run


def messages(run, severity):
    return [one.message for one in run.findings if one.severity == severity]


@pytest.mark.parametrize(
    ("key", "says"),
    [("tokens_per_second", "total throughput"), ("requests_per_second", "request_throughput")],
)
def test_rates_of_vllms_throughput(tmp_path, key, says):
    row = json.loads((DATA / "vllm_throughput_0.32.json").read_text())
    assert not messages(loaded(tmp_path, row), "wrong")
    found = loaded(tmp_path, row | {key: row[key] * 1.5})
    assert any(text.startswith(says) for text in messages(found, "wrong"))


def test_the_mean_of_vllms_latencies(tmp_path):
    row = json.loads((DATA / "vllm_latency_0.32.json").read_text())
    assert not messages(loaded(tmp_path, row), "wrong")
    found = loaded(tmp_path, row | {"avg_latency": row["avg_latency"] * 1.3})
    assert any("batch_latency mean" in text for text in messages(found, "wrong"))


def test_latencies_in_seconds_without_a_suffix(tmp_path):
    """As InferenceX's copy of vLLM's client writes them."""
    row = {k: v for k, v in VLLM_ROW.items() if not k.endswith("_ms")}
    run = loaded(
        tmp_path, row | {"mean_ttft": 0.3, "median_ttft": 0.2, "p99_tpot": 0.0131, "mean_tpot": 0.012}
    )
    assert run.value("ttft", "median") == pytest.approx(200.0)
    assert run.value("tpot", "p99") == pytest.approx(13.1)
    assert not set(run.extra) & {"mean_ttft", "p99_tpot"}


def test_a_short_wait_of_the_client_is_no_finding(tmp_path):
    run = loaded(tmp_path, VLLM_ROW | {"mean_client_queue_time_ms": 0.05, "p99_client_queue_time_ms": 0.08})
    assert not any("client_queue_time" in one.message for one in run.findings)


def test_requests_that_returned_nothing_are_zeros_in_the_mean(tmp_path):
    """vLLM 0.8: 2 of 5 are counted as completed, with a TTFT of 0."""
    ttfts = [2.0, 0.0, 2.4, 2.6, 0.0]
    row = VLLM_ROW | {
        "num_prompts": 5, "completed": 5, "total_input_tokens": 500, "total_output_tokens": 30,
        "input_lens": [100] * 5, "output_lens": [10, 0, 10, 10, 0], "ttfts": ttfts,
        "itls": [[0.1] * 9, [], [0.1] * 9, [0.1] * 9, []], "generated_texts": ["a"] * 5, "errors": [""] * 5,
        "mean_ttft_ms": 1400.0,
    }  # fmt: skip
    row.pop("failed")
    found = [text for text in messages(loaded(tmp_path, row), "wrong") if "as 0" in text]
    assert found == [
        "mean ttft 1400 ms counts 2 of 5 requests that returned nothing as 0: of those that answered it is "
        f"{1e3 * (2.0 + 2.4 + 2.6) / 3:g} ms"
    ]


def test_the_nearest_client_is_named(tmp_path):
    path = tmp_path / "half.json"
    path.write_text(json.dumps({"model_id": "x", "tokenizer_id": "x", "speed": 3.0}))
    with pytest.raises(UsageError, match=r"nearest to vllm.serve \(model_id, tokenizer_id"):
        load(path)
    path.write_text(json.dumps({"speed": 3.0}))
    with pytest.raises(UsageError, match=r"of no known client; known: "):
        load(path)


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_table_of_a_spreadsheet(tmp_path, delimiter):
    lines = list(csv.reader((DATA / "dstack_online.csv").read_text().splitlines()))
    path = tmp_path / "online.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(lines)
    plain = [run.metrics for run in load(DATA / "dstack_online.csv")]
    assert [run.metrics for run in load(path)] == plain != []


@pytest.mark.parametrize(
    ("name", "place", "factor", "says"),
    [
        ("trtllm_bench.json", ("streaming_metrics", "avg_ttft_ms"), 1.3, "the average of its distribution"),
        ("inferencex_agg.json", ("osl",), 0.5, "osl is 512, but 1 + (E2E - TTFT) / TPOT are 922.1 tokens"),
        ("inferencex_agg.json", ("osl",), 8, "osl is 8192"),
        ("inferencex_agg.json", ("conc",), 4, "the client allows 256"),
        ("inferencex_agg.json", ("median_intvty",), 2.0, "median_intvty is 60.241, but 1 / median_tpot"),
        ("genai_perf.json", ("output_token_throughput", "avg"), 1.4, "tokens a request, but output_len is"),
        ("aiperf_0.13.0.json", ("output_sequence_length", "avg"), 1.1, "their mean is said to be 122.1"),
        (
            "guidellm_0.7.3.json",
            ("benchmarks", 0, "metrics", "time_to_first_token_ms", "successful", "total_sum"),
            2.0,
            "which total_sum is",
        ),
    ],
)
def test_numbers_of_one_client(tmp_path, name, place, factor, says):
    content = json.loads((DATA / name).read_text())
    (tmp_path / name).write_text(json.dumps(content))
    assert not any(says in one.message for one in load(tmp_path / name)[0].findings)
    inside = content
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] *= factor
    (tmp_path / name).write_text(json.dumps(content))
    found = [one for one in load(tmp_path / name)[0].findings if one.severity != "note"]
    assert any(says in one.message for one in found), found


def test_the_mean_of_a_data_set_is_no_single_length(tmp_path):
    """Its requests are of many lengths, so the fastest token is of no longest request."""
    content = json.loads((DATA / "trtllm_bench.json").read_text())
    lengths = {"minimum": 64.0, "maximum": 192.0, "average": 128.13}
    content["dataset"]["osl_stats"] |= lengths
    content["request_info"]["avg_output_length"] = 128.13
    content["performance"]["system_output_throughput_tok_s"] *= 128.13 / 128
    content["streaming_metrics"]["tpot_percentiles"]["minimum"] *= 1.3
    assert not any("longer than e2e" in text for text in messages(loaded(tmp_path, content), "wrong"))


def test_gpus_that_a_printed_report_does_not_make_whole(tmp_path):
    text = (DATA / "trtllm_bench_overview.txt").read_text().replace("5393.2755", "5000.0000")
    (tmp_path / "log.txt").write_text(text)
    (run,) = load(tmp_path / "log.txt")
    assert any("make 8.629 GPUs" in one for one in messages(run, "suspect"))


def test_the_same_run_again(tmp_path):
    path = tmp_path / "results.jsonl"
    other = VLLM_ROW | {"mean_tpot_ms": 12.5}
    path.write_text("\n".join(json.dumps(row) for row in (VLLM_ROW, other, VLLM_ROW)))
    found = [[one.message for one in run.findings if one.rule == "repeated"] for run in load(path)]
    assert found[:2] == [[], []]
    assert found[2] == [f"{path}:3: every number is that of {path}:1: the same run again"]


def test_percentiles_of_vllms_latencies_that_are_no_object(tmp_path):
    row = json.loads((DATA / "vllm_latency_0.32.json").read_text())
    found = loaded(tmp_path, row | {"percentiles": list(row["percentiles"].values())})
    assert any("'percentiles' is not an object" in text for text in messages(found, "wrong"))
