"""What a run's token times say about the engine's steps; rules over it, the order of runs, effects."""

import json
import math

import pytest

from harness.errors import UsageError
from harness.serving.live.ab.agreement import Agreement, agreement
from harness.serving.live.ab.arms import parse_arm, parse_arms
from harness.serving.live.ab.effect import effect
from harness.serving.live.ab.rejection import RejectionRules
from harness.serving.live.ab.schedule import mirrored_runs
from harness.serving.live.ab.steps import steps
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.client.request_times import NoDetail, TimedRequest, request_times
from harness.serving.live.engine.time_slices import OwnClock, require_cpu
from kernels.platform import Platform


def lockstep(groups=((0, 1.0), (1, 2.0), (2, 2.0), (3, 2.0)), step=0.05, length=40):
    """Requests sent at 0 that get their first token when their group's prefill ends; those already there
    wait meanwhile, then all decode in lockstep."""
    last = max(at for _, at in groups)
    found = []
    for _, at in groups:
        tokens = [at, last + 0.0001] if at < last else [at]
        while len(tokens) < length:
            tokens.append(max(last, tokens[-1]) + step)
        found.append(TimedRequest(0.0, tuple(tokens)))
    return found


def test_the_step_is_seen_without_prefills_and_ramp():
    seen = steps(lockstep(), 4, [100] * 4)
    assert (seen.itl_ms, seen.itl_median_ms) == pytest.approx((50, 50), rel=1e-6)
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
    # After another run is over, with which its engine took turns, no step is steady.
    alone = TimedRequest(0.0, tuple(1.0 + 0.1 * i for i in range(50)))
    assert (steps([alone], 1).steady, steps([alone], 1, until=3.05).steady) == (47, 18)


def test_the_clock_of_an_engine_in_turns_stands_still_with_it():
    clock = OwnClock(((10.0, 12.0), (20.0, 25.0)))
    assert [clock(at) for at in (5, 10, 11, 12, 13, 22, 30)] == [5, 10, 10, 10, 11, 18, 23]
    with pytest.raises(UsageError, match="slices need engines on the CPU, this is cuda sm_90"):
        require_cpu(Platform("cuda", "sm_90"))


def test_steps_during_another_requests_prefill_do_not_count():
    """A fifth request arrives when one has ended: until its first token the batch is not full."""

    def tokens(begin, end, after):
        return tuple(1.0 + 0.05 * n + (0.4 if n > after else 0) for n in range(begin, end))

    old = [TimedRequest(0.0, tokens(0, 60, 20))] * 3
    ended = TimedRequest(0.0, tokens(0, 20, 20))
    new = TimedRequest(ended.tokens[-1], tokens(21, 60, 20))
    assert steps([*old, ended, new], 4).itl_ms == pytest.approx(50, rel=1e-6)


def written(file, **changes):
    whole = {"start_times": [1.0, 1.0], "ttfts": [0.5, 0.6], "itls": [[0.1, 0.1], [0.1]]}
    whole |= {"input_lens": [7, 8], "errors": ["", ""]}
    file.write_text(json.dumps(whole | changes))
    return file


def test_means_are_of_each_requests_own_times(tmp_path):
    means = request_times(written(tmp_path / "r.json")).means()
    assert means == pytest.approx(
        means | {"mean_ttft_ms": 550, "mean_tpot_ms": 100, "mean_e2e_ms": 700, "duration_s": 0.7}
    )


def test_answers_agree_up_to_their_first_word_that_differs(tmp_path):
    said = {"base": ["a b c", "x y"], "near": ["a b d", "x z"], "far": ["a c", "z y"], "none": []}
    base, *others = (written(tmp_path / name, generated_texts=texts) for name, texts in said.items())
    near, far, none = (agreement([(base, other)]) for other in others)
    assert near == Agreement(2, prefix=1.5, first=1.0, second=0.5) and not near.suspect
    assert far == Agreement(2, prefix=0.5, first=0.5, second=0.0) and far.suspect
    assert none is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"ttfts": 3, "itls": 4}', '{"ttfts": [1, 2], "itls": [[1]]}']
)
def test_a_result_without_details_is_one_line(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(NoDetail, match="no request's times in"):
        request_times(tmp_path / "r.json")


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


def test_an_effect_is_the_mean_of_the_pairs_differences_with_students_interval():
    one = effect([100.0, 110.0, 90.0, 104.0], [110.0, 121.0, 99.0, 115.0])
    # t(0.975, 3) = 3.1824; the differences are 10, 11, 9, 11 with standard deviation 0.9574.
    assert one.high - one.change == pytest.approx(3.18245 * 0.957427 / 2, rel=1e-4)
    assert one.change == pytest.approx(10.25) and one.share == pytest.approx(10.25 / 101)
    assert one.resolved and effect([110.0, 121.0], [100.0, 110.0]).resolved
    assert not effect([100.0, 100.0, 100.0], [102.0, 102.1, 101.9]).resolved, "small"
    assert not effect([100.0, 100.0, 100.0], [130.0, 80.0, 150.0]).resolved, "uncertain"
    assert effect([100.0], [150.0]).high == math.inf
    assert effect([], []) is None


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
