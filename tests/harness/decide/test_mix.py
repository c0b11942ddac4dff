"""By which calls of a server measured cases are weighed."""

import math

import pytest

from harness.decide.measured import read_measured, whole_sizes
from harness.decide.mix import WeighedCase, mix_of, request_of, stand_ins
from harness.decide.worth import decision_and_worth
from harness.errors import UsageError
from shapes.case import Case, Size
from shapes.deployment import Call, served
from shapes.scheduler import Workload
from shapes.suites import suite
from tests.support.decision_runs import MLA, PLACE, cases_file, gemm, mla, run
from tests.support.decision_worlds import ARCH, ENGINE, set_rules

ROWS = {"mla.default": 100.0, "mla.a": 80.0}


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    set_rules(monkeypatch)


@pytest.fixture
def mixed(tmp_path):
    """The mix of a run of these cases."""

    def mix(times, engine=ENGINE, **told):
        measured = read_measured([str(run(tmp_path / "run", times))])
        return mix_of(measured, request_of(engine, measured, told, {}))

    return mix


def weighed(**sizes: Size) -> WeighedCase:
    return WeighedCase(("mla_decode", str(sizes)), whole_sizes("mla_decode", {**MLA, **sizes}, ARCH))


def call(**sizes: Size) -> Call:
    return Call("mla_decode", {**MLA, **sizes}, "", 1.0, "")


def found(of: Call, *cases: WeighedCase) -> dict[Size, float]:
    """By the batch of the cases that stand for a call, their parts."""
    return {case.sizes["batch"]: part for case, part in stand_ins(of, cases, ARCH)}


def test_a_call_between_two_cases_is_of_both_by_their_distance_in_logarithms():
    cases = [weighed(batch=16), weighed(batch=64), weighed(batch=128)]
    assert found(call(batch=32), *cases) == pytest.approx({16: 0.5, 64: 0.5})
    assert found(call(batch=20), *cases) == pytest.approx({16: 0.839, 64: 0.161}, abs=1e-3)
    assert found(call(batch=64), *cases) == {64: 1.0}


def test_beyond_the_last_case_it_stands_for_up_to_twice_the_work():
    cases = [weighed(batch=16), weighed(batch=64)]
    assert found(call(batch=96), *cases) == pytest.approx({64: 1.5})
    assert found(call(batch=10), *cases) == {16: 1.0}
    assert found(call(batch=200), *cases) == {}
    assert found(call(batch=4), *cases) == {}


def test_only_cases_of_the_same_layer_stand_for_a_call():
    assert found(call(batch=16), weighed(batch=16, heads=128)) == {}
    assert found(call(batch=16), weighed(batch=16, kv="fp8")) == {}
    assert found(call(batch=16, q=4), weighed(batch=16)) == {}
    assert found(call(batch=16, page=1), weighed(batch=16)) == {16: 1.0}  # which the engine chooses


def test_of_several_contexts_the_nearest_counts():
    near, far = weighed(batch=16, ctx="3000..3600"), weighed(batch=16, ctx=1800)
    assert [case for case, _ in stand_ins(call(batch=16, ctx=3300), [near, far], ARCH)] == [near]
    assert not stand_ins(call(batch=16, ctx=12000), [near, far], ARCH)


def test_the_calls_of_a_load_are_shared_among_cases(tmp_path):
    cases = [(mla(batch, PLACE, ctx="3201..3999"), ROWS) for batch in (1, 8, 64)]
    measured = read_measured([str(run(tmp_path / "run", cases))])
    request = request_of(ENGINE, measured, {}, {})
    loads = [Workload(3200, 800, 8, 8), Workload(3200, 800, 64, 64)]
    both = mix_of(measured, request, loads)
    calls = [
        [each for each in served(request.deployed(ARCH), load) if each.op == "mla_decode"] for load in loads
    ]
    of_both = sum(each.times for of in calls for each in of) / 2
    assert sum(case.decode for case in both.cases) == pytest.approx(of_both)
    by_batch = {case.sizes["batch"]: case.decode for case in both.cases}
    assert by_batch[8] == pytest.approx(by_batch[64], rel=0.05)
    assert 0.9 < both.decode_share < 1
    assert {case.op for case in both.uncovered} == {"block_scale_gemm", "fused_moe", "mha_prefill"}
    assert both.covered < 0.5


def test_prefills_are_told_from_decode_steps(mixed):
    rows = {"gemm.default": 10.0, "gemm.a": 8.0}
    cases = [(gemm(m, "deepseek-r1 tp8 " + kind), rows) for m, kind in ((64, "decode"), (8192, "prefill"))]
    phases = {case.sizes["m"]: (case.decode > 0, case.prefill > 0) for case in mixed(cases).cases}
    assert phases == {64: (True, False), 8192: (False, True)}


def test_contexts_that_are_about_alike_count_as_one():
    cases = [weighed(batch=1, ctx=3592), weighed(batch=64, ctx=3600)]
    assert found(call(batch=64, ctx=3594), *cases) == {64: 1.0}


@pytest.mark.parametrize("order", [(64, 128), (128, 64)])
def test_of_cases_at_one_place_that_counts_in_which_the_engine_has_a_row(mixed, monkeypatch, order):
    """As the page that a backend needs: the order of the runs does not matter."""
    set_rules(monkeypatch, mla_default={"when": ["page = 128"]})
    cases = [(mla(64, PLACE, ctx="3201..3999", page=page), ROWS) for page in order]
    assert [case.sizes["page"] for case in mixed(cases).cases] == [128]


@pytest.mark.parametrize(("told", "words"), [
    ({"tp": 8, "dp_attention": True, "ep": 8}, ["--suite", "r1-dp-ep8"]),
    ({"tp": 16}, ["--suite", "deepseek-r1-tp16"]),
    ({"kv": "fp8"}, []),
])  # fmt: skip
def test_the_suite_of_a_deployment_is_one_that_run_takes(mixed, told, words):
    assert mixed([(mla(64, PLACE, ctx="3201..3999"), ROWS)], **{"tp": 8, **told}).run_options == words
    if words:
        assert suite(words[1]).cases("block_scale_gemm")


@pytest.mark.parametrize(("engine", "told", "flags"), [
    ("vllm", {"tp": 4}, ["--tensor-parallel-size 4"]),
    ("vllm", {"tp": 8, "ep": 8, "kv": "fp8"},
     ["--tensor-parallel-size 8", "--enable-expert-parallel", "--kv-cache-dtype fp8"]),
    ("sglang", {"tp": 8, "ep": 8, "kv": "fp8"},
     ["--tp-size 8", "--ep-size 8", "--kv-cache-dtype fp8_e4m3"]),
    ("sglang", {"tp": 8, "dp_attention": True}, []),
])  # fmt: skip
def test_the_flags_of_a_deployment(mixed, engine, told, flags):
    assert mixed([(mla(64, PLACE, ctx="3201..3999"), ROWS)], engine, **told).server_flags == flags


def test_the_deployment_of_most_cases_is_taken(tmp_path):
    """A campaign has small cases, several splits, and steps with drafts."""
    rows = {"mla.default": 100.0, "mla.a": 80.0}
    places = ["smoke", "deepseek-r1 dp8 ep8 decode", *3 * ["deepseek-r1 tp4 decode with 1 draft"]]
    others = [(mla(batch, place), rows) for batch, place in enumerate(places, 1)]
    own = [(mla(batch, PLACE, ctx="3201..3999"), rows) for batch in (32, 64)]
    measured = read_measured([str(run(tmp_path / "run", [*others, *own]))])
    request = request_of(ENGINE, measured, {}, {})
    assert request and (request.tp, request.ep, request.dp_attention) == (8, 1, False)
    assert {case.sizes["ctx"] for case in mix_of(measured, request).cases} == {"3201..3999"}
    smoke = read_measured([str(run(tmp_path / "smoke", others[:1]))])
    assert request_of(ENGINE, smoke, {}, {}) is None


def test_a_file_of_cases_says_its_calls(mixed, tmp_path):
    file = cases_file(tmp_path / "mine.json", (mla(32), 61))
    mix = mixed([(mla(16), ROWS), (mla(64), ROWS)], cases=file)
    assert [case.decode for case in mix.cases] == pytest.approx([30.5, 30.5])
    assert (mix.covered, mix.run_options, mix.server_flags) == (1.0, ["--cases", file], [])


def test_without_a_model_each_op_has_the_same_part_of_the_time(mixed):
    mix = mixed([(mla(64), ROWS), (gemm(64), {"gemm.default": 1.0, "gemm.a": 0.5})])
    fastest = {"mla_decode": 80.0, "block_scale_gemm": 0.5}
    assert [case.calls * fastest[case.op] for case in mix.cases] == pytest.approx([1.0, 1.0])
    assert not mix.counts_calls


def test_a_load_without_a_model_is_a_mistake(tmp_path):
    measured = read_measured([str(run(tmp_path / "run", [(mla(64), ROWS)]))])
    with pytest.raises(UsageError, match="--workload needs a model"):
        decision_and_worth(ENGINE, measured, {}, {}, loads=[Workload(100, 10, 4, 4)])


def test_what_it_is_worth(tmp_path):
    """Of R1 on a GPU whose times are known: per token and prompt by the calls, and by the model."""
    cases = [(mla(64, PLACE, ctx="3201..3999"), ROWS)]
    decision, worth = decision_and_worth(ENGINE, read_measured([str(run(tmp_path / "run", cases))]), {}, {})
    assert worth and decision.chosen == {"attention-backend": "A"}
    (case,) = decision.mix.cases
    assert worth.step_ms == pytest.approx(case.decode * 0.020, rel=1e-3)
    assert worth.token_ms == pytest.approx(worth.step_ms / decision.mix.decode_share)
    assert worth.prompt_ms == 0
    (change,) = worth.changes
    assert (change.op, change.phase) == ("mla_decode", "decode")
    assert change.factor == pytest.approx(1.25, rel=1e-3)
    tpot = next(each for each in worth.predicted[64] if each.quantity == "tpot")
    assert tpot.change and tpot.change < 0
    assert math.isfinite(tpot.low or math.inf)


def test_what_a_prompt_gains_and_what_a_part_of_an_op_gains(tmp_path):
    """One product of several: the factor of the op is smaller than its own."""
    rows = {"gemm.default": 1000.0, "gemm.a": 500.0}
    folder = run(tmp_path / "run", [(gemm(8192, "deepseek-r1 tp8 prefill"), rows)])
    decision, worth = decision_and_worth(ENGINE, read_measured([str(folder)]), {}, {}, margin=0.0)
    assert worth
    (case,) = decision.mix.cases
    assert worth.step_ms == pytest.approx(case.prefill * 0.5, rel=1e-3)
    assert worth.prompt_ms == pytest.approx(worth.step_ms / decision.mix.prompts)
    (change,) = worth.changes
    assert change.phase == "prefill"
    assert change.factor and 1 < change.factor < 1.6


def test_the_op_or_the_place_of_a_case_says_that_it_prefills_and_not_the_name_of_the_file(mixed, tmp_path):
    attention = Case("mha_prefill", {"batch": 1, "new": 3200, "prefix": 0, "heads": 16})
    file = cases_file(tmp_path / "prefill.json", (attention, 61), (gemm(64), 61))
    cases = mixed([(attention, {"torch.sdpa": 10.0}), (gemm(64), {"gemm.default": 1.0})], cases=file).cases
    phases = {case.op: (case.decode, case.prefill) for case in cases}
    assert phases == {"mha_prefill": (0, 61), "block_scale_gemm": (61, 0)}
