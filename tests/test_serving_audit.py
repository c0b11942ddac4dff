"""`serving audit`: what is unlike or broken in the published documents is found by rules over the data,
each with its numbers; of the same data made good the rule says nothing."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_mutations import DATA, examples

from harness.cli_serving import serving
from harness.serving.audit import RULES, Audited, audit
from harness.serving.audit.corpus import Corpus, printed, same_engine, same_hardware
from harness.serving.audit.rows import by_kind
from harness.serving.audit_command import of_document
from harness.serving.comparable import compare
from harness.serving.documents import Claim, Configuration
from harness.serving.figure import of_run
from harness.serving.loading import load
from harness.serving.publications import published_corpus, published_documents, raw_files
from harness.serving.schema import Metric, Parallelism, Scope, ServingRun, Tokens, Totals, Workload

ALL = {one.id: of_document(one) for one in published_documents()}
RAW = {name: Audited(name, runs=tuple(runs)) for name, runs in raw_files().items()}
CORPUS = published_corpus()
MI350X, MOAI, ARTICLE = ALL["mi350x"], ALL["moai"], ALL["dstack-article"]
ONLINE = RAW["dstack/online_results.csv"]


def of(rule: str, audited: Audited, about: str = "", corpus: Corpus = CORPUS):
    """The findings of a rule, those that a run or claim is among the subjects of."""
    return [one for one in audit(audited, corpus) if one.rule == rule and about in ("", *one.subjects)]


def one(rule: str, audited: Audited, about: str = "", corpus: Corpus = CORPUS):
    """The only one, or the only one that is first of all about it."""
    found = of(rule, audited, about, corpus)
    (only,) = [f for f in found if f.subjects[:1] == (about,)] or found
    return only


def with_run(audited: Audited, name: str, **changes) -> Audited:
    assert any(run.id == name for run in audited.runs)
    return replace(
        audited, runs=tuple(r.model_copy(update=changes) if r.id == name else r for r in audited.runs)
    )


def with_claim(audited: Audited, name: str, **changes) -> Audited:
    assert any(claim.id == name for claim in audited.claims)
    claims = tuple(c.model_copy(update=changes) if c.id == name else c for c in audited.claims)
    return replace(audited, claims=claims)


def metric_of(audited: Audited, name: str, **changes) -> Audited:
    claim = next(claim for claim in audited.claims if claim.id == name)
    return with_claim(audited, name, metric=claim.metric.model_copy(update=changes))


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
        ALL["amd-sglang"], "amd-aiter-mla", baseline="Triton", workload=Workload(input_len=1, output_len=1),
        refers_to=("dstack.online:2",),
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


# What is good is left alone


def clean_run(load: float, **changes) -> ServingRun:
    rate = 10 * load**0.8
    tpot, ttft, length = 1e3 * load / rate / 1.05, 100.0, 800
    tpot = (load / (rate / length) * 1e3 - ttft) / (length - 1)
    tokens = round(length * 64 * load)
    return ServingRun(
        id=f"run-{load:g}", client="sglang.bench_serving", source="file", mode="online", hardware="H200",
        gpus=8, nodes=1, engine="sglang", version="0.5.7", model="deepseek-ai/DeepSeek-R1",
        workload=Workload(dataset="random", input_len=3200, output_len=length, concurrency=load,
                          num_prompts=round(64 * load)),
        totals=Totals(duration_s=tokens / rate, completed=round(64 * load), output_tokens=tokens,
                      input_tokens=4 * tokens),
        metrics=(
            Metric(name="throughput", value=rate, unit="tok/s", scope="instance", tokens="output"),
            Metric(name="ttft", value=ttft, unit="ms", scope="request", statistic="mean"),
            Metric(name="tpot", value=tpot, unit="ms", scope="request", statistic="mean"),
            Metric(name="itl", value=tpot, unit="ms", scope="request", statistic="mean"),
        ),
    ).model_copy(update=changes)  # fmt: skip


GOOD = Audited("good", runs=tuple(clean_run(2.0**n) for n in range(8)))


def test_a_clean_sweep_is_silent():
    assert audit(GOOD, CORPUS) == []


def test_a_clean_document_is_silent():
    setup = Configuration(name="good", hardware="H200", gpus=8, nodes=1, engine="sglang", version="0.5.7",
                          image="lmsysorg/sglang:v0.5.7-20260101", mode="online")  # fmt: skip
    best = max(GOOD.runs, key=lambda run: run.metrics[0].value)
    claim = Claim(id="best", quote="the best was 486 output tok/s over 8 GPUs", where="table", kind="derived",
                  metric=Metric(name="throughput", value=float(round(best.metrics[0].value)), unit="tok/s",
                                scope="instance", tokens="output"), hardware="H200", gpus=8, nodes=1,
                  engine="sglang", mode="online", workload=best.workload, refers_to=(best.id,))  # fmt: skip
    good = replace(GOOD, date="2026-02-01", configurations=(setup,), claims=(claim,))
    rows = Corpus({run.id: run for run in GOOD.runs}, {"best": claim})
    assert [(f.rule, f.severity) for f in audit(good, rows)] == [("recomputed", "note")]


SLOW = Metric(name="throughput", value=100.0, unit="tok/s", scope="instance", tokens="output")


@pytest.mark.parametrize(
    "rule, changes",
    [
        ("throughput_falls", {"metrics": (SLOW,)}),
        ("output_lengths_differ", {"totals": Totals(completed=4096, output_tokens=4096 * 68)}),
        ("unlike_runs", {"mode": "offline"}),
        ("unlike_runs", {"workload": Workload(output_len=800, concurrency=64, warmup_s=10.0)}),
        ("rate_not_served", {"workload": Workload(output_len=800, concurrency=64, request_rate=50.0)}),
    ],
)
def test_one_unlike_run_in_a_clean_sweep_is_found(rule, changes):
    assert of(rule, with_run(GOOD, "run-64", **changes))


def test_a_sweep_sent_in_single_waves():
    runs = tuple(
        run.model_copy(update={"workload": run.workload.model_copy(update={"num_prompts": int(2.0**n)})})
        for n, run in enumerate(GOOD.runs)
    )
    assert one("single_wave", replace(GOOD, runs=runs)).numbers["runs"] == 8


def test_repeats_and_other_lengths_are_no_fall_and_no_cold_start():
    slow = (SLOW.model_copy(update={"value": 150.0}),)
    again = clean_run(64.0, id="again", metrics=slow)
    assert not of("throughput_falls", Audited("good", runs=(clean_run(64.0), again)))
    alone = clean_run(1.0, id="alone", metrics=(SLOW,))
    assert of("single_request_differs", Audited("good", runs=(clean_run(1.0), alone)))
    longer = alone.workload.model_copy(update={"input_len": 128000.0})
    other = alone.model_copy(update={"workload": longer})
    assert not of("single_request_differs", Audited("good", runs=(clean_run(1.0), other)))
    machine = alone.model_copy(update={"hardware": "B200"})
    assert not of("single_request_differs", Audited("good", runs=(clean_run(1.0), machine)))


# Whatever a file holds


ODD = st.sampled_from([None, 0, 1, 7, 128, 10**15])
ODD_METRICS = st.lists(
    st.builds(
        Metric,
        name=st.sampled_from(["throughput", "tpot", "itl", "ttft", "tokens", "e2e", "concurrency"]),
        value=st.sampled_from([-1.0, 0.0, 1e-12, 1.0, 46.0, 1e15]),
        unit=st.sampled_from(["tok/s", "ms", "s", "1", "tokens"]),
        scope=st.sampled_from(get_args(Scope)),
        tokens=st.sampled_from(get_args(Tokens)),
        statistic=st.sampled_from(["total", "mean", "median"]),
    ),
    max_size=4,
).map(tuple)
ODD_RUNS = st.builds(
    ServingRun,
    id=st.uuids().map(str),
    client=st.sampled_from(["", "c"]),
    source=st.just("s"),
    mode=st.sampled_from(["online", "offline", "unknown"]),
    gpus=ODD, nodes=ODD, flags=st.sampled_from([(), ("--tp 8",), ("",)]),
    parallelism=st.builds(Parallelism, prefill_gpus=ODD, decode_gpus=ODD),
    workload=st.builds(Workload, input_len=ODD, output_len=ODD, concurrency=ODD, request_rate=ODD,
                       num_prompts=ODD, warmup_s=ODD),
    totals=st.builds(Totals, duration_s=ODD, completed=ODD, input_tokens=ODD, output_tokens=ODD),
    metrics=ODD_METRICS,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(ODD_RUNS, min_size=1, max_size=4))
def test_odd_runs_are_audited_and_compared(runs):
    assert isinstance(audit(Audited("odd", runs=tuple(runs)), CORPUS), list)
    figures = [of_run(run, metric) for run in runs for metric in run.metrics[:2]]
    for a, b in itertools.product(figures, figures):
        found = compare(a, b)
        assert found.verdict == "refused" or found.ratio is not None or b.metric.value == 0


# Helpers


def test_how_a_text_prints_a_number():
    assert printed(2656, 2655.89) and printed(66194, 66194.8) and printed(17000, 16964.2)
    assert not printed(2656, 2658) and not printed(46.0, 48.5)


def test_names_of_machines_and_engines():
    assert same_hardware("8x AMD Instinct MI300X", "mi300") and not same_hardware("MI300X", "MI350X")
    assert not same_hardware("H200", "H100") and not same_hardware("", "H200")
    assert (
        same_engine("TensorRT-LLM", "trt-llm")
        and not same_engine("vllm", "sglang")
        and not same_engine("", "vllm")
    )


def test_every_rule_says_why():
    assert all(len(rule.__doc__ or "") > 60 for rule in RULES)


# The command


def run(*arguments: str):
    return CliRunner().invoke(serving, ["audit", *arguments])


def test_the_command_on_the_documents():
    result = run()
    assert result.exit_code == 1 and "total_read_as_output" in result.stdout
    assert '"| H200 x8 | SGLang | 6,311 tok/s | dstack |"' in result.stdout
    assert "notes are not shown" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize("fail_on, code", [("wrong", 0), ("suspect", 1), ("never", 0)])
def test_what_fails_is_chosen(fail_on, code):
    assert run("amd-sglang", "--fail-on", fail_on).exit_code == code


def test_json_has_every_finding_with_its_quotes():
    result = run("mi350x", "--json", "-", "--fail-on", "never")
    whole = json.loads(result.stdout)
    (document,) = whole["audited"]
    found = next(f for f in document["findings"] if f["rule"] == "memory_label")
    assert len(found["quotes"]) == 2 and whole["counts"]["wrong"] >= 10


def test_a_users_own_file(tmp_path):
    row = {
        "backend": "sglang", "dataset_name": "random", "request_rate": "inf", "random_input_len": 3200,
        "random_output_len": 800, "random_range_ratio": 1.0, "total_output_tokens_retokenized": 400000,
        "mean_e2e_latency_ms": 1.0,
    }  # fmt: skip
    lines = []
    for limit, seconds in ((32, 400.0), (64, 300.0), (128, 500.0)):
        tpot = (limit * seconds / 500 * 1e3 - 1000) / 799
        lines.append({**row, "max_concurrency": limit, "duration": seconds, "completed": 500,
                      "total_input_tokens": 1600000, "total_output_tokens": 400000,
                      "output_throughput": 400000 / seconds, "mean_tpot_ms": tpot, "mean_ttft_ms": 1000.0,
                      "mean_e2e_latency_ms": 1000 + 799 * tpot})  # fmt: skip
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    result = run(str(path))
    assert result.exit_code == 0 and "throughput falls by 40%" in result.stdout


def test_files_of_one_point_each_are_one_sweep(tmp_path):
    """As vllm bench serve writes them."""
    names = []
    for limit, out in ((32, 900.0), (64, 1500.0), (128, 800.0)):
        tokens = round(out * 100)
        whole = {
            "date": "20260101-000000", "endpoint_type": "vllm", "backend": "vllm", "label": None,
            "model_id": "deepseek-ai/DeepSeek-R1", "tokenizer_id": "x", "num_prompts": 2000,
            "request_rate": "inf", "max_concurrency": limit, "duration": 100.0, "completed": 2000,
            "total_input_tokens": 2000000, "total_output_tokens": tokens, "request_throughput": 20.0,
            "output_throughput": out, "total_token_throughput": out + 20000.0,
        }  # fmt: skip
        names.append(str(tmp_path / f"c{limit}.json"))
        (tmp_path / f"c{limit}.json").write_text(json.dumps(whole))
    result = run(*names)
    assert "3 files" in result.stdout and "throughput falls by 47%" in result.stdout
    assert "throughput falls" not in run(names[2]).stdout
    other = Path(names[2])
    other.write_text(other.read_text().replace("deepseek-ai/DeepSeek-R1", "a/b"))
    assert "throughput falls" not in run(*names).stdout


@pytest.mark.parametrize("path", examples(), ids=lambda path: path.name)
def test_every_clients_file_is_audited(path):
    assert run(str(path), "--fail-on", "never").exit_code == 0


def test_kinds_of_unlike_scopes_are_not_added():
    run = load(DATA / "inferencex_api.json")[2]
    assert {m.scope for m in run.metrics if m.name == "throughput"} == {"gpu", "decode_gpu", "prefill_gpu"}
    assert by_kind(run) == {"total": run.value("throughput", tokens="total")}


def test_dstacks_shifted_rows_in_a_users_own_copy():
    copy = DATA / "dstack_online.csv"
    result = run(str(copy))
    assert result.exit_code == 1 and "wrong column_shift" in result.stdout


def test_what_is_neither_file_nor_document():
    result = run("nothing-of-the-kind")
    assert result.exit_code != 0 and "neither a file nor a document" in str(result.exception)


def test_a_broken_file_costs_itself_only(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    result = run(str(tmp_path / "bad.json"), "inferencex-870")
    assert result.exit_code == 2 and "inferencex-870" in result.stdout


def test_the_rules_are_listed():
    assert "batch_below_concurrency" in run("--rules").stdout
