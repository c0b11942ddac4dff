"""The calls of a rank, as in the suites and as engines split a model."""

from dataclasses import replace

import pytest

from shapes.attention import Parallel
from shapes.deployment import Deployment, served, sweep
from shapes.models import model
from shapes.scheduler import Workload
from shapes.suites import suites
from shapes.workloads import documented

R1 = model("deepseek-r1")
TP8 = Deployment(R1, Parallel(tp=8), dense_tp=8, shared_tp=8)
DP_EP8 = Deployment(R1, Parallel(dp=8, ep=8), dispatched=True)
# SGLang: `--tp 8 --enable-dp-attention --dp 8`, experts and dense MLPs split over all ranks.
GATHERED = Deployment(R1, Parallel(dp=8), dense_tp=8, shared_tp=8)


def sizes(calls, op):
    return [tuple(call.sizes.items()) for call in calls if call.op == op]


@pytest.mark.parametrize("deployment, suite", [
    (TP8, "r1-tp8"),
    (Deployment(R1, Parallel(tp=4), dense_tp=4, shared_tp=4), "r1-tp4"),
    (DP_EP8, "r1-dp-ep8"),
    (replace(TP8, drafts=3), "r1-tp8-mtp3"),
    (replace(DP_EP8, drafts=1), "r1-dp-ep8-mtp1"),
])  # fmt: skip
def test_a_sweep_is_of_the_suites_cases(deployment, suite):
    calls = sweep(deployment)
    for op in ("block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill"):
        of_suite = {tuple(case.sizes.items()) for case in suites()[suite].cases(op)}
        assert set(sizes(calls, op)) <= of_suite
        assert op != "block_scale_gemm" or set(sizes(calls, op)) == of_suite


def test_calls_of_a_step_are_those_of_61_layers():
    step = [call for call in sweep(TP8) if call.step == "decode, 64 requests"]
    assert {call.place: call.times for call in step} == {
        "qkv_a": 61, "q_b": 61, "o_proj": 61, "dense gate_up": 3, "dense down": 3, "shared gate_up": 58,
        "shared down": 58, "experts": 58, "MLA decode": 61,
    }  # fmt: skip


def test_a_linear_that_all_ranks_share_gets_the_tokens_of_all():
    """Each of 8 ranks has 128 requests. The linears of attention are whole and get 128 tokens, the others
    1024."""
    calls = [call for call in sweep(GATHERED) if call.step == "decode, 128 requests"]
    step = {call.place: call.sizes for call in calls}
    assert step["o_proj"] == {"m": 128, "n": 7168, "k": 16384}
    assert step["dense down"] == {"m": 1024, "n": 7168, "k": 18432 // 8}
    assert step["shared gate_up"] == {"m": 1024, "n": 2 * 2048 // 8, "k": 7168}
    assert (step["experts"]["tokens"], step["experts"]["inter"], step["experts"]["ep"]) == (1024, 256, 1)
    assert {call.place: call.rows for call in calls if call.rows} == {"experts": 1024}


def test_a_rank_with_a_whole_linear_gets_its_part_of_the_groups_tokens():
    """SGLang's `--tp 8 --moe-a2a-backend deepep`."""
    calls = sweep(Deployment(R1, Parallel(tp=8, ep=8), dense_tp=8, shared_tp=1, dispatched=True))
    ms = {c.step: c.sizes["m"] for c in calls if c.place == "shared down"}
    assert [ms["decode, 128 requests"], ms["decode, 1 requests"]] == [16, 1]


def test_experts_get_all_tokens_or_those_that_chose_them():
    gathered = replace(DP_EP8, dispatched=False)
    of = {d.dispatched: next(c for c in sweep(d) if c.op == "fused_moe") for d in (DP_EP8, gathered)}
    assert of[False].sizes["tokens"] == 8 * 128
    assert of[True].sizes["tokens"] == of[True].rows == of[False].rows < 8 * 128
    assert of[False].sizes["inter"] == 2048


def test_a_fused_shared_expert_is_no_linear():
    calls = sweep(replace(TP8, shared=1))
    assert not [call for call in calls if call.place.startswith("shared")]
    assert {call.sizes["shared"] for call in calls if call.op == "fused_moe"} == {1}


@pytest.mark.parametrize("suite", ["serving-3200-800-c16", "serving-3200-800-c16-mixed"])
def test_a_workload_has_its_own_steps(suite):
    calls = served(TP8, documented()[suite].workload)
    for op in ("block_scale_gemm", "mla_decode", "mha_prefill"):
        of_suite = {tuple(case.sizes.items()) for case in suites()[suite].cases(op)}
        assert set(sizes(calls, op)) == of_suite
    experts = sum(call.times for call in calls if call.place == "experts")
    assert experts == pytest.approx(58)
    assert sum(call.times for call in calls if call.place == "qkv_a") == pytest.approx(61)


def test_calls_of_a_workload_count_by_all_steps():
    """One request has one step with its prompt and seven that decode. Only the prompt calls kv_b."""
    calls = served(TP8, Workload(64, 8, 1, 1))
    times = {place: sum(call.times for call in calls if call.place == place) for place in
             ("MHA prefill", "kv_b", "MLA decode", "qkv_a")}  # fmt: skip
    assert times == pytest.approx(
        {"MHA prefill": 61 / 8, "kv_b": 61 / 8, "MLA decode": 61 * 7 / 8, "qkv_a": 61}
    )


def test_data_parallel_ranks_share_a_workload():
    calls = served(replace(GATHERED, kv="fp8"), Workload(64, 8, 32, 64))
    decode = [call.sizes for call in calls if call.op == "mla_decode"]
    assert max(int(each["batch"]) for each in decode) == 4
    assert {each["kv"] for each in decode} == {"fp8"}
