"""What a run's token times say about the engine's steps; rules over it, the order of runs, effects."""

import json
import math

import pytest

from harness.errors import UsageError
from harness.serving import load
from harness.serving.live.ab.agreement import Agreement, agreement
from harness.serving.live.ab.arms import parse_arm, parse_arms
from harness.serving.live.ab.effect import effect
from harness.serving.live.ab.rejection import RejectionRules
from harness.serving.live.ab.schedule import mirrored_runs
from harness.serving.live.ab.steps import steps
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.client.request_times import NoDetail, TimedRequest, request_times
from harness.statistics.intervals import mean_half_width
from tests.support.paths import SERVING_DATA


def lockstep(groups=((0, 1.0), (1, 2.0), (2, 2.0), (3, 2.0)), step=0.05, length=40):
    """Requests sent at 0 that get their first token when their group's prefill ends; those already there
    wait meanwhile, then all decode in lockstep."""
    last = max(at for _, at in groups)
    found = []
    for _, at in groups:
        tokens = [at]
        if at < last:
            tokens.append(last + 0.0001)
        while len(tokens) < length:
            tokens.append(max(last, tokens[-1]) + step)
        found.append(TimedRequest(0.0, tuple(tokens)))
    return found


def test_the_step_is_seen_without_prefills_and_ramp():
    seen = steps(lockstep(), 4, [100] * 4)
    assert seen.itl_ms == pytest.approx(50, rel=1e-6)
    assert seen.itl_median_ms == pytest.approx(50, rel=1e-6)
    assert seen.pattern == (1, 3)
    assert seen.prefill_ms == pytest.approx((1000, 1000), abs=0.2)
    assert seen.kv_len > 100
    # The first request's wait for the others' prefill, a second long, is no step of decode.
    assert seen.steady < 4 * 39
    # The batch counts tokens of a step: the first one's first of them came alone, in the prefill's step.
    assert seen.batch == pytest.approx(4 * 39 / 40)
    together = steps(lockstep([(i, 2.0) for i in range(4)]), 4)
    assert together.pattern == (4,) and together.batch == pytest.approx(4.0)
    assert together.steady == 4 * (39 - 2)  # of 40 tokens, but at either end
    never_full = steps(lockstep()[:3], 4)
    assert (never_full.steady, never_full.itl_ms, never_full.itl_median_ms) == (0, None, None)
    assert steps([], 4).pattern == ()


def test_steps_during_another_requests_prefill_do_not_count():
    """A fifth request arrives when one has ended: until its first token the batch is not full."""
    step, slow = 0.05, 0.4
    old = [
        TimedRequest(0.0, tuple(1.0 + step * n + (slow if n > 20 else 0) for n in range(60)))
        for _ in range(3)
    ]
    ended = TimedRequest(0.0, tuple(1.0 + step * n for n in range(20)))
    new = TimedRequest(ended.tokens[-1], tuple(1.0 + step * n + slow for n in range(21, 60)))
    seen = steps([*old, ended, new], 4)
    assert seen.itl_ms == pytest.approx(50, rel=1e-6)


def content(**changes):
    whole = {
        "start_times": [1.0, 1.0],
        "ttfts": [0.5, 0.6],
        "itls": [[0.1, 0.1], [0.1]],
        "input_lens": [7, 8],
        "errors": ["", ""],
    }
    return whole | changes


def test_means_are_of_each_requests_own_times(tmp_path):
    file = tmp_path / "r.json"
    file.write_text(json.dumps(content()))
    means = request_times(file).means()
    assert means["mean_ttft_ms"] == pytest.approx(550)
    assert means["mean_tpot_ms"] == pytest.approx(100)
    assert means["mean_e2e_ms"] == pytest.approx(700)
    assert means["duration_s"] == pytest.approx(0.7)


def test_answers_agree_up_to_their_first_word_that_differs(tmp_path):
    said = {"base": ["a b c", "x y"], "near": ["a b d", "x z"], "far": ["a c", "z y"], "none": []}
    files = {name: tmp_path / name for name in said}
    for name, texts in said.items():
        files[name].write_text(json.dumps(content(generated_texts=texts)))
    near, far = (agreement([(files["base"], files[arm])]) for arm in ("near", "far"))
    assert near == Agreement(2, prefix=1.5, first=1.0, second=0.5) and not near.suspect
    assert far == Agreement(2, prefix=0.5, first=0.5, second=0.0) and far.suspect
    assert agreement([(files["base"], files["none"])]) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"ttfts": 3, "itls": 4}', json.dumps(content(itls=[[1]]))]
)
def test_a_result_without_details_is_one_line(tmp_path, text):
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(NoDetail, match="no request's times in"):
        request_times(file)


@pytest.mark.parametrize(
    "name", ["vllm_serve_0.32_detailed.json", "sglang_bench_serving_0.5.9_details.jsonl"]
)
def test_each_requests_times_are_those_that_the_loader_has(name):
    file = SERVING_DATA / name
    samples, found = load(file)[-1].samples, request_times(file)
    assert len(found.requests) == len(found.texts) == 7
    assert found.dated == name.startswith("vllm")
    for request, ttft, gaps in zip(found.requests, samples.ttfts_ms, samples.itls_ms, strict=True):
        assert 1e3 * (request.tokens[0] - request.sent) == pytest.approx(ttft)
        assert 1e3 * (request.tokens[-1] - request.tokens[0]) == pytest.approx(sum(gaps))
    assert not {"starts_s", "texts"} & samples.model_dump().keys()


LOAD = ClientLoad(16, 40, 4, 4)


@pytest.mark.parametrize(("changes", "reason"), [
    ({}, None),
    ({"completed": 3}, "3 of 4 requests completed"),
    ({"tokens": [40, 40, 40, 38]}, "1 requests gave other than 40 tokens (38)"),
    ({"pattern": (4,)}, "prefilled 1+3, not 4 (arrival race)"),
    ({"disturbance": "other processes took 30% of a CPU"}, "other processes took 30% of a CPU"),
    ({"found": lockstep(length=7)}, "steady inter-token times are fewer than 24"),
])  # fmt: skip
def test_each_rule_rejects_what_it_is_for(changes, reason):
    seen = steps(changes.get("found", lockstep()), 4)
    rules = RejectionRules(changes.get("pattern", (1, 3)))
    completed, tokens = changes.get("completed", 4), changes.get("tokens", [40] * 4)
    found = rules.reasons(LOAD, completed, tokens, seen, changes.get("disturbance", ""))
    assert (reason is None) == (found == [])
    if reason:
        assert reason in found[0]


def test_the_order_is_mirrored_and_pairs_share_a_seed():
    order = mirrored_runs(["a", "b", "c"], 4, 10)
    assert ["".join(turn.arm for turn in pair) for pair in order] == ["abc", "cba", "abc", "cba"]
    assert [{turn.seed for turn in pair} for pair in order] == [{10}, {11}, {12}, {13}]
    # A drift that grows evenly takes from each arm alike.
    places = dict.fromkeys("abc", 0)
    for place, turn in enumerate(turn for pair in order for turn in pair):
        places[turn.arm] += place
    assert len(set(places.values())) == 1


def test_an_effect_is_the_mean_of_the_pairs_differences_with_students_interval():
    one = effect([100.0, 110.0, 90.0, 104.0], [110.0, 121.0, 99.0, 115.0])
    assert one.change == pytest.approx(10.25)
    # t(0.975, 3) = 3.1824; the differences are 10, 11, 9, 11 with standard deviation 0.9574.
    assert one.high - one.change == pytest.approx(3.18245 * 0.957427 / 2, rel=1e-4)
    assert one.resolved
    assert one.share == pytest.approx(10.25 / 101)


def test_small_or_uncertain_effects_are_not_resolved():
    assert not effect([100.0, 100.0, 100.0], [102.0, 102.1, 101.9]).resolved
    assert not effect([100.0, 100.0, 100.0], [130.0, 80.0, 150.0]).resolved
    assert effect([100.0], [150.0]).high == math.inf
    assert effect([], []) is None
    assert mean_half_width([1.0]) == math.inf


def test_arms_are_read():
    arm = parse_arm("x:A_B=1 C=unset --max-num-seqs 8 --foo=bar mla_decode=torch.naive experts=bf16_vec")
    assert arm.environment == (("A_B", "1"), ("C", None))
    assert arm.flags == ("--max-num-seqs", "8", "--foo=bar")
    assert arm.swaps == ("mla_decode=torch.naive", "fused_moe=vllm.vec"), "a name of old too"
    assert [arm.name for arm in parse_arms([])] == ["base"]


@pytest.mark.parametrize(("texts", "message"), [
    (["x:mla_decode=nothing"], "'mla_decode=nothing' is no variable .* swaps: .*mla_decode=torch.naive"),
    (["../x"], "cannot read --arm"),
    (["x:'A=1"], "No closing quotation"),
    (["a", "a"], "two arms are called a"),
])  # fmt: skip
def test_arms_that_make_no_sense_are_refused(texts, message):
    with pytest.raises(UsageError, match=message):
        parse_arms(texts)
