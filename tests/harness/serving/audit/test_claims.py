"""What documents say of set-ups and claim of their rows is held against the rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.serving.schema import OfferedLoad
from tests.support.audits import ALL, ARTICLE, MI350X, MOAI, ONLINE, metric_of, of, one, with_claim, with_run

# Set-ups


def test_a_precision_that_is_not_the_checkpoints():
    assert "ds_fp8_per_token" in one("precision_differs", MOAI).message
    assert "bfloat16" in one("precision_differs", ALL["dstack-methodology"]).message
    assert not of("precision_differs", MI350X)  # --dtype auto


def test_a_command_and_a_log_that_disagree():
    found = one("command_and_log_disagree", MOAI)
    assert found.subjects == ("moai-2000-2000-sharegpt",)
    assert found.numbers == {
        "warmup_s_command": 250, "warmup_s_log": 300, "cooldown_s_command": 290, "cooldown_s_log": 230
    }  # fmt: skip
    run = next(run for run in MOAI.runs if run.id == "moai-2000-2000-sharegpt")
    asked = run.workload.model_copy(update={"warmup_s": 250.0, "cooldown_s": 290.0})
    assert not of("command_and_log_disagree", with_run(MOAI, run.id, workload=asked))


def test_a_prefix_cache_that_the_server_turns_off():
    assert one("prefix_cache_contradicted", MOAI).subjects == ("moai-2000-100-prefix-cached",)
    assert one("prefix_cache_on", ALL["dstack-methodology"]).subjects == ("dstack-h200-vllm",)


def test_a_date_before_its_image():
    found = one("date_before_image", MI350X)
    assert found.numbers["days"] == 324 and "20251210" in found.message
    assert not of("date_before_image", replace(MI350X, date="2025-12-20"))
    assert not of("date_before_image", replace(MI350X, date=""))


def test_flags_that_nothing_reads():
    messages = " ".join(found.message for found in of("flag_not_read", MI350X))
    assert "VLLM_USE_V1=1" in messages and "0.11.2 does not read it" in messages
    assert "VLLM_ROCM_USE_AITER_PAGED_ATTN=0" in messages
    assert "VLLM_ROCM_USE_AITER=1" not in messages and "NCCL_MIN_NCHANNELS" not in messages


def test_recommendations_contradicted():
    assert "VLLM_ROCM_USE_AITER_PAGED_ATTN=1" in one("advised_without_effect", MI350X).message
    found = one("ranked", MI350X, "mi350x-sglang-on-amd")
    assert found.severity == "wrong" and found.numbers["fails"] > found.numbers["holds"]
    assert "stands for aiter" in of("notes_against_settings", MI350X)[0].message
    assert "offline" in one("cited_from_another_mode", MI350X, "mi350x-dstack-batch").message


def test_set_ups_of_two_machines_differ():
    versions = one("setups_differ", ALL["dstack-methodology"], "dstack-mi300x-sglang").message
    assert "0.4.3.post2 against 0.4.2.post4" in versions and "--enable-dp-attention on H200 alone" in versions
    assert "--mem-fraction-static 0.9" in one("setups_differ", ALL["amd-sglang"]).message
    unpinned = {s for found in of("image_not_pinned", ALL["dstack-methodology"]) for s in found.subjects}
    assert unpinned == {"dstack-h200-sglang", "dstack-h200-tensorrt-llm", "dstack-h200-vllm"}


# Claims


def test_up_to_without_a_baseline_or_a_shape():
    found = one("up_to", ALL["amd-sglang"], "amd-aiter-mla")
    assert "up to 17x without what it is over, its shape or load" in found.message
    said = with_claim(
        ALL["amd-sglang"], "amd-aiter-mla", baseline="Triton",
        workload=OfferedLoad(input_len=1, output_len=1), refers_to=("dstack.online:2",),
    )  # fmt: skip
    assert not of("up_to", said, "amd-aiter-mla")


def test_memory_labels():
    found = one("memory_label", MI350X)
    assert (found.numbers["smaller"], found.numbers["larger"]) == (288, 309)


@pytest.mark.parametrize(
    "document, claim, claimed, true",
    [
        ("mi350x", "mi350x-per-gpu", 332, 332.0),
        ("mi350x", "mi350x-peak-client", 2656, 2655.89),
        ("mi350x", "mi350x-single-tput", 46, 1024 / 22),
        ("moai", "moai-throughput", 50892, 50892.65),
        ("moai", "moai-per-decode-node", 17000, 50892.65 / 3),
        ("moai", "moai-18000", 18000, 53776.62 / 3),
        ("moai", "moai-85-percent", 85, 100 * 53776.62 / 3 / 21224),
        ("dstack-article", "dstack-4574", 4574, 4573.6916),
    ],
)
def test_numbers_that_hold_when_computed_again(document, claim, claimed, true):
    found = one("recomputed", ALL[document], claim)
    assert found.severity == "note" and found.numbers["holds"] == 1
    assert found.numbers["claimed"] == claimed and found.numbers["recomputed"] == pytest.approx(
        true, rel=1e-4
    )


@pytest.mark.parametrize("claim, value", [("mi350x-per-gpu", 340.0), ("mi350x-peak-client", 2700.5)])
def test_numbers_that_do_not(claim, value):
    found = one("recomputed", metric_of(MI350X, claim, value=value), claim)
    assert found.severity == "wrong" and found.numbers["holds"] == 0


def test_every_published_number_that_rests_on_rows_holds():
    wrong = [f.message for audited in ALL.values() for f in of("recomputed", audited) if f.severity != "note"]
    assert wrong == []


def test_rankings_are_held_against_every_row():
    both = one("ranked", ARTICLE, "dstack-mi300x-vllm-over-sglang")
    assert both.numbers["fails"] == 8 and "at 4 in flight" in both.message  # where the next sentence says so
    assert one("ranked", ARTICLE, "dstack-mi300x-sglang-below-32").numbers["fails"] == 0
    everywhere = one("ranked", ARTICLE, "dstack-tpot-h200-vllm")
    assert everywhere.numbers["fails"] == 2 and "6400 out: 133.12" in everywhere.message


def test_trends_are_numbers_too():
    plateau = one("trends", ALL["dstack-methodology"], "dstack-raw-plateau")
    assert (plateau.severity, plateau.numbers) == ("suspect", {"series": 4, "breaks": 3})
    assert "590.78 at 64 to 802.54 at 128, 36% up" in plateau.message
    rises = one("trends", ARTICLE, "dstack-ttft-length-h200-others")
    assert (rises.severity, rises.numbers) == ("note", {"series": 2, "breaks": 0})
    said = next(claim for claim in ARTICLE.claims if claim.id == "dstack-ttft-length-h200-others").trend
    falls = with_claim(
        ARTICLE, "dstack-ttft-length-h200-others", trend=said.model_copy(update={"says": "falls"})
    )
    assert one("trends", falls, "dstack-ttft-length-h200-others").numbers["breaks"] == 2


def test_a_ranking_by_total_tokens_alone():
    found = one("highest_of_total_alone", ARTICLE, "dstack-4176")
    assert found.numbers["own_output"] == pytest.approx(835.2, abs=0.01)
    assert found.numbers["highest_output"] == pytest.approx(1196.58, abs=0.01)


def test_a_latency_limit_that_others_did_not_meet():
    found = one("limit_not_met", ALL["amd-sglang"], "amd-itl50-mi300x")
    assert found.numbers["measured_ms"] == pytest.approx(135.736, abs=1e-3)


def test_shifted_columns_and_a_lost_request_stand_in_the_audit():
    assert len(of("column_shift", ONLINE)) == 9
    assert of("completed", ONLINE)
