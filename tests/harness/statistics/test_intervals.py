"""Intervals and verdicts of time ratios."""

import math
import random
import statistics

import pytest

from harness.statistics.intervals import LOOK_WIDENING, MIN_BLOCKS, Centre, centre, interval
from harness.statistics.paired import MAX_NOISE, compare, noise_of, verdict

BLOCKS = [block for block in range(5) for _ in range(4)]


def noisy(mean: float, seed: int, spread: float = 0.001) -> list[float]:
    """Seconds of 20 rounds about a mean."""
    rng = random.Random(seed)
    return [mean * math.exp(rng.gauss(0, spread)) for _ in BLOCKS]


def test_ratio_is_the_time_of_b_over_the_time_of_a():
    found = compare([1.0] * 20, [2.0] * 20, blocks=BLOCKS)
    assert (found.ratio, found.low, found.high) == pytest.approx((2, 2, 2))
    assert found.verdict == "faster", "a is"
    found = compare(noisy(1, 1), noisy(2, 2), blocks=BLOCKS)
    assert found.ratio == pytest.approx(2, rel=0.002)
    assert found.low < 2 < found.high
    assert found.high - found.low < 0.01


@pytest.mark.parametrize("true_ratio", [1.0, 1.002, 1.02, 1.5, 30])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_swapping_a_and_b_swaps_the_verdict(true_ratio, noise):
    a, b = noisy(1, 1), noisy(true_ratio, 2)
    there, back = (compare(*pair, blocks=BLOCKS, floor=noise) for pair in ((a, b), (b, a)))
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.low == pytest.approx(1 / back.high)
    assert there.high == pytest.approx(1 / back.low)
    opposite = {"faster": "slower", "slower": "faster", "same": "same", "unclear": "unclear"}
    assert there.verdict == opposite[back.verdict]


@pytest.mark.parametrize(("low", "high", "noise", "margin", "wanted"), [
    (1.01, 1.02, 0.0, 0.005, "faster"),
    (0.98, 0.99, 0.0, 0.005, "slower"),
    (1.001, 1.003, 0.0, 0.005, "same"),  # told apart, but by less than anyone cares about
    (0.996, 1.004, 0.0, 0.001, "unclear"),
    (1.0, 1.02, 0.0, 0.005, "unclear"),  # the edge is not outside
    (1.001, 1.02, 0.0, 0.005, "faster"),
    # A noise above the margin takes its place, and an effect has to clear it whole.
    (0.98, 1.02, 0.03, 0.005, "same"),
    (1.02, 1.05, 0.03, 0.005, "unclear"),
    (1.04, 1.05, 0.03, 0.005, "faster"),
    (0.95, 0.96, 0.03, 0.005, "slower"),
    # A noise below the margin leaves the margin as it is.
    (0.996, 1.004, 0.001, 0.005, "same"),
    # The A/A pair found nothing out, or the pair did not.
    (1.5, 1.6, math.inf, 0.005, "unclear"),
    (0.999, 1.001, math.inf, 0.005, "unclear"),
    (0.999, 1.001, math.nan, 0.005, "unclear"),
    (0.0, math.inf, 0.0, 0.005, "unclear"),
])  # fmt: skip
def test_verdict(low, high, noise, margin, wanted):
    assert verdict(low, high, noise=noise, margin=margin) == wanted


@pytest.mark.parametrize(
    ("options", "wanted"), [({}, "faster"), ({"floor": 0.05}, "same"), ({"margin": 0.05}, "same")]
)
def test_floor_and_margin_reach_the_verdict(options, wanted):
    a, b = noisy(1, 1), noisy(1.02, 2)
    assert compare(a, b, blocks=BLOCKS, **options).verdict == wanted


def test_what_both_share_cancels_and_one_outlier_in_a_block_moves_little():
    """Rounds drift by a factor of 10, blocks jump; the ratio is 1.03 in every round."""
    rng = random.Random(3)
    drift = [10 ** (i / len(BLOCKS)) * (1 + block) for i, block in enumerate(BLOCKS)]
    a = [d * math.exp(rng.gauss(0, 0.001)) for d in drift]
    b = [1.03 * d * math.exp(rng.gauss(0, 0.001)) for d in drift]
    found = compare(a, b, blocks=BLOCKS)
    assert found.verdict == "faster"
    assert 1.027 < found.low < 1.03 < found.high < 1.033
    b[3] *= 50
    found = compare(a, b, blocks=BLOCKS)
    assert (found.verdict, found.ratio) == ("faster", pytest.approx(1.03, rel=0.002))


@pytest.mark.parametrize("missing", [math.nan, 0.0, -1.0, math.inf, None])
def test_pairs_with_a_missing_time_are_left_out(missing):
    a, b = noisy(1, 1), noisy(1.1, 2)
    keep = [i for i in range(20) if i not in (2, 9)]
    wanted = compare([a[i] for i in keep], [b[i] for i in keep], blocks=[BLOCKS[i] for i in keep])
    a[2] = b[9] = missing
    assert compare(a, b, blocks=BLOCKS) == wanted


@pytest.mark.parametrize(("a", "b", "blocks", "confidence", "ratio"), [
    ([], [], None, 0.95, math.nan),
    ([math.nan] * 3, [1.0] * 3, None, 0.95, math.nan),
    ([0.0] * 3, [1.0] * 3, None, 0.95, math.nan),
    ([1.0], [2.0], None, 0.95, 2.0),
    ([1.0] * 4, [2.0] * 4, [0] * 4, 0.95, 2.0),  # one block is no interval
    ([1.0, 1.0], [1.0, 2.0], [0, 1], 0.9999, math.sqrt(2)),  # Student's t is 6366: no float holds that
])  # fmt: skip
def test_nothing_is_clear_without_an_interval(a, b, blocks, confidence, ratio):
    found = compare(a, b, blocks=blocks, confidence=confidence)
    assert found.ratio == pytest.approx(ratio, nan_ok=True)
    assert (found.low, found.high, found.verdict) == (0.0, math.inf, "unclear")
    assert noise_of(found) == math.inf


def test_without_blocks_each_round_counts_by_itself():
    a, b = noisy(1, 1), noisy(1.1, 2)
    assert compare(a, b) == compare(a, b, blocks=range(20))


@pytest.mark.parametrize(
    ("a", "b", "blocks"), [([1.0], [1.0, 2.0], None), ([1.0, 1.0], [1.0, 2.0], [0]), ([], [1.0], None)]
)
def test_lengths_must_match(a, b, blocks):
    with pytest.raises(ValueError, match="one entry per round"):
        compare(a, b, blocks=blocks)


def test_interval_is_students_over_groups_that_differ_by_more_than_they_scatter():
    found = interval([(0, 2.0), (0, 2.0), (1, 4.0), (1, 4.0), (2, 3.0), (2, 3.0)])
    half = 4.302653 / math.sqrt(3)  # t at 97.5 % with two degrees of freedom; the groups' deviation is 1
    assert (found.mean, found.low, found.high) == pytest.approx((3, 3 - half, 3 + half), abs=1e-5)
    assert found.groups == 3


def test_interval_is_no_narrower_than_scatter_within_groups_explains():
    """Groups that agree by luck, with rounds that do not."""
    group = [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]
    found = interval([(g, x) for g in range(5) for x in group])
    assert found.mean == 0
    assert found.high == pytest.approx(1.959964 * centre(tuple(group)).error / math.sqrt(5))


def test_looking_has_its_price():
    """As many blocks as looking begins with, and the interval is wider than Student's."""
    values = [(g, float(g)) for g in range(MIN_BLOCKS) for _ in range(2)]
    found = interval(values)
    t, deviation = 2.570582, math.sqrt(3.5)
    assert found.high - found.mean == pytest.approx(LOOK_WIDENING * t * deviation / math.sqrt(MIN_BLOCKS))
    assert LOOK_WIDENING <= 1.3


def test_how_much_blocks_count():
    """Longer ones more, but alike where preparations differ by far more than rounds; a disturbed one less."""
    rng = random.Random(4)
    short = [(block, rng.gauss(1, 1)) for block in range(5) for _ in range(4)]
    long = [(block, rng.gauss(0, 1)) for block in range(5, 10) for _ in range(40)]
    assert abs(interval(short + long).mean) < 0.35
    apart = [(0, x) for x in (0.99, 1, 1.01)] + [(1, x) for x in (2.99, 3, 3.01) * 30]
    assert interval(apart).mean == pytest.approx(2, abs=0.01)
    assert interval([*apart, (2, 9.0)]).mean == pytest.approx(13 / 3), "one round is a block, too"
    calm = [(block, x) for block in range(6) for x in (-0.01, 0, 0.01)]
    found = interval([*calm, *((6, x) for x in (-3.0, 2.0, 9.0))])
    assert abs(found.mean) < 0.01
    assert found.high < 0.05


@pytest.mark.parametrize(
    ("values", "value"),
    [((1.0, 2.0, 6.0), 2.75), ((1.0, 3.0), 2.0), ((5.0,), 5.0)],  # the first of 1, 1.5, 2, 3.5, 4, 6
)
def test_centre_is_the_median_of_walsh_averages(values, value):
    assert centre(values).value == value
    assert centre((5.0,)) == Centre(5.0, 0.0, 1)


def test_the_error_of_a_centre_is_its_standard_deviation():
    rng = random.Random(5)
    for n in (5, 10, 20):
        found = [centre(tuple(rng.gauss(0, 1) for _ in range(n))) for _ in range(1000)]
        deviation = statistics.stdev(c.value for c in found)
        assert math.sqrt(statistics.fmean(c.error**2 for c in found)) == pytest.approx(deviation, rel=0.12)
        assert deviation < 1.1 / math.sqrt(n), "a median has 1.25"


def test_the_interval_holds_what_it_says_and_an_effect_that_is_not_there_is_seldom_called():
    """1000 sessions of 5 blocks: each preparation (buffers, pages, clocks) shifts a whole block by more than
    rounds differ within it. Rounds taken as independent would cover far less. Verdicts are fewer yet,
    since what lies within the margin is `same`."""
    rng = random.Random(20)
    sessions, true = 1000, 1.04
    covered = naive = called = 0
    for _ in range(sessions):
        offsets = [rng.gauss(0, 0.02) for _ in range(5)]
        common = [rng.gauss(0, 0.3) for _ in BLOCKS]
        a = [math.exp(c + rng.gauss(0, 0.01)) for c in common]
        b = [math.exp(c + offsets[k] + rng.gauss(0, 0.01)) for c, k in zip(common, BLOCKS, strict=True)]
        found = compare(a, [true * s for s in b], blocks=BLOCKS)
        covered += found.low <= true <= found.high
        called += compare(a, b, blocks=BLOCKS).verdict in ("faster", "slower")
        found = compare(a, b)
        naive += found.low <= 1 <= found.high
    assert 0.93 < covered / sessions < 0.97
    assert called / sessions <= 0.065
    assert naive / sessions < 0.8


def test_noise_floor_is_what_the_interval_of_the_pair_does_not_explain():
    slower, faster, alike = (
        compare(noisy(a, 1), noisy(b, 2), blocks=BLOCKS) for a, b in ((1, 1.02), (1.02, 1), (1, 1))
    )
    assert (noise_of(slower), noise_of(faster)) == pytest.approx((slower.low - 1, 1 - faster.high))
    assert noise_of(alike) == 0


def test_noise_floor_of_a_disturbed_pair_is_all_that_it_may_be():
    """What a busy machine hides is not called the same; what differs by far more still has a verdict."""
    found = compare(noisy(1, 1, spread=0.5), noisy(1, 2, spread=0.5), blocks=BLOCKS)
    noise = noise_of(found)
    assert noise == pytest.approx(max(found.high, 1 / found.low) - 1)
    assert MAX_NOISE < noise < 2
    assert compare(noisy(1, 3), noisy(1, 4), blocks=BLOCKS, floor=noise).verdict == "unclear"
    assert compare(noisy(1, 3), noisy(4, 4), blocks=BLOCKS, floor=noise).verdict == "faster"
    assert compare(noisy(4, 3), noisy(1, 4), blocks=BLOCKS, floor=noise).verdict == "slower"
