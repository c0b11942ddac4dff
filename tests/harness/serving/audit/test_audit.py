"""`serving audit`: what is unlike or broken in the published documents is found by rules over the data,
each with its numbers; of the same data made good the rule says nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.serving.schema import Parallelism, Totals
from tests.support.audits import ALL, ARTICLE, MI350X, MOAI, ONLINE, metric_of, of, one, with_claim, with_run

# One denominator, one kind of token, one mode: the table of the first document


def test_per_gpu_and_node_in_one_table():
    found = one("table_mixes_scope", MI350X, "mi350x-cmp-h200-vllm")
    assert found.severity == "wrong"
    assert "of one GPU: 2,200" in found.message and "of 8 GPUs: 2,656, 4,176, 6,311, 4,574" in found.message


def test_a_table_of_one_scope_is_silent():
    good = replace(MI350X, claims=tuple(c for c in MI350X.claims if c.id not in (
        "mi350x-cmp-h200-vllm", "mi350x-cmp-h200-nim")))  # fmt: skip
    assert not of("table_mixes_scope", good, "mi350x-cmp-h200-trtllm")


@pytest.mark.parametrize(
    "claim, row, total, output",
    [
        ("mi350x-cmp-mi300x-vllm", "dstack.online:2", 4574, 914.738),
        ("mi350x-cmp-h200-trtllm", "dstack.online:31", 4176, 835.200),
        ("mi350x-cmp-h200-sglang", "dstack.offline:18", 6311, 1262.208),
    ],
)
def test_total_tokens_read_as_output(claim, row, total, output):
    found = one("total_read_as_output", MI350X, claim)
    assert found.severity == "wrong" and row in found.subjects
    assert found.numbers["claimed"] == total
    assert found.numbers["total"] == pytest.approx(total, rel=1e-3)
    assert found.numbers["output"] == pytest.approx(output, rel=1e-5)
    assert found.numbers["input"] == pytest.approx(4 * output, rel=1e-5)  # 3200 in, 800 out


def test_it_is_the_number_that_finds_the_row_not_the_reference():
    alone = with_claim(MI350X, "mi350x-cmp-h200-sglang", refers_to=())
    assert "dstack.offline:18" in one("total_read_as_output", alone, "mi350x-cmp-h200-sglang").subjects


@pytest.mark.parametrize("changes", [{"tokens": "total"}, {"value": 1262.2}])
def test_a_total_that_says_so_and_an_output_are_silent(changes):
    good = metric_of(MI350X, "mi350x-cmp-h200-sglang", **changes)
    assert not of("total_read_as_output", good, "mi350x-cmp-h200-sglang")


def test_a_round_number_is_no_rows():
    """2,200 is within its last digit of a dozen rows."""
    assert not of("total_read_as_output", MI350X, "mi350x-cmp-h200-vllm")


def test_online_and_offline_in_one_table():
    found = one("table_mixes_mode", MI350X)
    assert "offline: 6,311" in found.message and "online: 2,656, 4,176, 4,574" in found.message
    assert "dstack-methodology" not in found.message
    good = replace(MI350X, claims=tuple(c for c in MI350X.claims if c.id != "mi350x-cmp-h200-sglang"))
    assert not of("table_mixes_mode", good)


def test_a_sentence_that_says_its_mode_only_notes():
    assert {found.severity for found in of("table_mixes_mode", ARTICLE)} == {"note"}


def test_what_nobody_says():
    lengths = next(f for f in of("circumstances_unknown", MI350X) if f.message.startswith("lengths"))
    assert lengths.numbers["unknown"] == lengths.numbers["of"]  # the document gives no length at all
    assert "mi350x-cmp-h200-nim" in lengths.subjects
    scope = next(f for f in of("circumstances_unknown", MI350X) if f.message.startswith("scope"))
    assert "mi350x-cmp-h200-nim" in scope.subjects and "mi350x-cmp-h200-vllm" not in scope.subjects


# Cold and warm, sweeps


def test_a_cold_single_request_against_a_warm_one():
    found = one("single_request_differs", MI350X)
    assert found.severity == "wrong" and (found.numbers["slow"], found.numbers["fast"]) == (22.0, 46.0)
    assert not of("single_request_differs", metric_of(MI350X, "mi350x-single-tput", value=23.0))
    rises = one("rate_of_a_request_rises", MI350X)
    assert rises.numbers["alone"] == 22.0 and rises.numbers["among_many"] == pytest.approx(386.49 / 8)


def test_throughput_that_falls_with_concurrency():
    found = one("throughput_falls", MI350X)
    assert (found.numbers["before"], found.numbers["after"], found.numbers["load"]) == (1770.06, 1023.99, 128)
    assert "2,655.89 tok/s at 256" in found.message


def test_unequal_answers_and_single_waves():
    found = one("output_lengths_differ", MI350X)
    assert found.numbers == {"shortest": pytest.approx(17510 / 256), "longest": 512.0}
    assert "68.4 at 256" in found.message
    assert one("single_wave", MI350X).numbers["runs"] == 8
    short = one("short_run", MI350X)
    assert short.numbers["fastest_s"] == 6.59


def test_tokens_over_time_hold_and_are_found_where_they_do_not():
    assert not of("tokens_over_time", MI350X)
    bad = with_run(MI350X, "mi350x-vllm-c128", totals=Totals(duration_s=16.0))
    assert one("tokens_over_time", bad).numbers["recomputed"] == 2048


def test_an_optimum_with_a_hole():
    found = one("optimum_is_uneven", MI350X)
    assert found.numbers == {"lowest": 1023.99, "highest": 2655.89}


def test_client_peak_and_server_peak():
    found = one("peaks_differ", MI350X)
    assert (found.numbers["first"], found.numbers["second"]) == (2656, 2339) and "13.6%" in found.message
    assert not of("peaks_differ", metric_of(MI350X, "mi350x-peak-server", value=2600.0))


# What decodes, what is counted


def test_concurrency_128_whose_decoding_batch_was_53():
    found = one("batch_below_concurrency", ONLINE, "dstack.online:20")
    assert found.numbers["concurrency"] == 128 and found.numbers["batch"] == pytest.approx(53.45, abs=0.05)
    assert "53 decode at a time" in found.message
    assert not of("batch_below_concurrency", ONLINE, "dstack.online:21")  # 64 in flight, 49.7 decode


def test_requests_counted_in_a_window_only():
    found = one("counted_in_a_window", MOAI, "moai-512-512-sharegpt")
    assert found.severity == "wrong"
    assert (found.numbers["counted"], found.numbers["sent"]) == (4333, 32400)
    assert found.numbers["tokens_each"] == pytest.approx(7667539 / 4333)
    assert found.numbers["total_with_all_input"] == pytest.approx(132389.6)
    assert len(of("counted_in_a_window", MOAI)) == 7
    run = next(run for run in MOAI.runs if run.id == "moai-512-512-sharegpt")
    counted = run.totals.model_copy(update={"completed": round(7667539 / 512)})
    assert not of("counted_in_a_window", with_run(MOAI, run.id, totals=counted), run.id)


def test_itl_of_a_streamed_chunk_is_no_tpot():
    found = of("itl_beside_tpot", ALL["inferencex-870"])
    assert len(found) == 4
    assert all(f.numbers["ratio"] == pytest.approx(10, abs=0.1) for f in found)
    assert not of("itl_beside_tpot", ONLINE)  # where ITL is TPOT within 7 %


def test_decode_nodes_leave_the_prefill_nodes_out():
    found = one("prefill_left_out", MOAI, "moai-512-512-sharegpt")
    assert found.severity == "wrong" and "moai-per-decode-node" in found.subjects
    assert found.numbers["per_decode_node"] == pytest.approx(66194.8 / 3)
    assert found.numbers["per_gpu"] == pytest.approx(66194.8 / 40)
    assert "1,654.9 a GPU over all 40" in found.message
    aggregated = with_run(MOAI, "moai-512-512-sharegpt", parallelism=Parallelism(tp=1, dp=8))
    assert not of("prefill_left_out", aggregated, "moai-512-512-sharegpt")


def test_decode_alone_beside_end_to_end():
    mixed = of("table_mixes_end_to_end", MOAI)
    assert any("decode alone: 22,300, 14,300" in found.message for found in mixed)
    assert any(f.subjects[0] == "moai-on-par" for f in of("compared_unlike", MOAI))
