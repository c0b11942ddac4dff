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
