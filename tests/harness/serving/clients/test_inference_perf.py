"""inference-perf: what its words mean, in two versions of its report."""

from __future__ import annotations

import pytest

from tests.support.serving_files import changed, of, rules, shapes

MADE, OF_2025 = "inference_perf_0.7.0.json", "inference_perf_2025.json"


def test_every_value_of_0_7():
    (run,) = of(MADE)
    assert (run.client, run.mode, run.workload.request_rate) == ("inference-perf", "online", 4)
    assert (run.workload.concurrency, run.workload.num_prompts) == (None, 5)
    assert run.totals.model_dump() == {
        "duration_s": pytest.approx(1.609), "completed": 4, "failed": 1, "input_tokens": 406,
        "output_tokens": 60,
    }  # fmt: skip
    values = shapes(run)
    expected = {
        ("throughput", "total", "output"): (60 / 1.609, "tok/s", "instance"),
        ("throughput", "total", "input"): (406 / 1.609, "tok/s", "instance"),
        ("throughput", "total", "total"): (466 / 1.609, "tok/s", "instance"),
        ("request_throughput", "total", "none"): (4 / 1.609, "req/s", "instance"),
        ("sent_rate", "total", "none"): (5 / 1.1, "req/s", "instance"),
        ("e2e", "mean", "none"): (631.5, "ms", "request"),
        ("e2e", "p99.9", "none"): (858.529, "ms", "request"),
        ("ttft", "median", "none"): (215, "ms", "request"),
        ("tpot", "min", "none"): (26.25, "ms", "request"),
        ("itl", "max", "none"): (33, "ms", "request"),
        ("normalized_time_per_output_token", "max", "none"): (45.77777777777787, "ms", "request"),
        ("schedule_delay", "max", "none"): (3, "ms", "request"),
        ("input_len", "max", "input"): (103, "tokens", "request"),
        ("output_len", "min", "output"): (9, "tokens", "request"),
    }
    assert {key: values[key][0] for key in expected} == pytest.approx({k: v[0] for k, v in expected.items()})
    assert {key: values[key][1:] for key in expected} == {key: value[1:] for key, value in expected.items()}
    assert rules(run) == ["failed"]
    assert any("60 by the client's count, 56 by the server's" in note for note in run.notes)
    assert run.extra["failures"]["by_label"]["503 - Service Unavailable"]["count"] == 1


def test_the_servers_count_where_the_throughput_rests_on_it(tmp_path):
    def change(content):
        rates = content["successes"]["throughput"]
        rates["output_tokens_per_sec"] = 56 / content["benchmark_time_seconds"]
        rates["total_tokens_per_sec"] = rates["input_tokens_per_sec"] + rates["output_tokens_per_sec"]

    (run,) = changed(tmp_path, MADE, change)
    assert run.totals.output_tokens == 56
    assert rules(run) == ["failed"]


def test_a_throughput_of_neither_count_is_wrong(tmp_path):
    def change(content):
        content["successes"]["throughput"]["output_tokens_per_sec"] *= 3

    (run,) = changed(tmp_path, MADE, change)
    assert "throughput" in rules(run)


def test_tokens_of_2025_were_counted_twice():
    """Each piece of a stream was a token and one that opens a text: TPOT is half of what a token took."""
    (run,) = of(OF_2025)
    assert run.totals.model_dump() == {
        "duration_s": pytest.approx(58.987, abs=1e-3), "completed": 60, "failed": 0,
        "input_tokens": 12246, "output_tokens": 3789,
    }  # fmt: skip
    assert rules(run) == ["e2e_identity"]
    ttft, e2e, tpot = (run.value(name, "mean") for name in ("ttft", "e2e", "tpot"))
    assert (e2e - ttft) / (3789 / 60 - 1) == pytest.approx(2 * tpot, rel=0.05)
    assert any("before 0.6" in note for note in run.notes)
    assert run.value("schedule_delay", "min") < 0  # it may be early


def test_a_stage_with_a_concurrency_has_no_rate(tmp_path):
    def change(content):
        content["load_summary"] |= {"concurrency": 2, "requested_rate": 5}

    (run,) = changed(tmp_path, MADE, change)
    assert (run.workload.concurrency, run.workload.request_rate) == (2, None)


@pytest.mark.parametrize(("count", "sent", "rule"), [(100, 2.5, True), (100, 3.9, False), (10, 2.5, False)])
def test_a_client_that_did_not_keep_up(tmp_path, count, sent, rule):
    """Of ten requests with random gaps between, 2.5 a second may be chance."""

    def change(content):
        content["load_summary"] |= {"count": count, "achieved_rate": sent}

    (run,) = changed(tmp_path, MADE, change)
    assert ("rate_not_sent" in rules(run)) == rule


def test_a_few_requests_that_left_late_are_no_other_unit(tmp_path):
    def change(content):
        content["load_summary"]["schedule_delay"] |= {"mean": 4.0, "max": 30.0}

    (run,) = changed(tmp_path, MADE, change)
    assert rules(run) == ["failed"]


def test_all_stages_together_have_no_rate(tmp_path):
    def change(content):
        for key in ("requested_rate", "achieved_rate", "send_duration"):
            del content["load_summary"][key]

    (run,) = changed(tmp_path, MADE, change)
    assert run.workload.request_rate is None
    assert run.value("sent_rate") is None


def test_answers_that_were_not_streamed(tmp_path):
    def change(content):
        for key in ("time_to_first_token", "time_per_output_token", "inter_token_latency"):
            content["successes"]["latency"][key] = None

    (run,) = changed(tmp_path, MADE, change)
    assert run.value("ttft") is None
    assert run.value("e2e", "mean") == pytest.approx(631.5)
    assert rules(run) == ["failed"]
