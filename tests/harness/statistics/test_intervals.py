"""Intervals and verdicts of time ratios, and of quotients and means of independent measurements."""

import math
import random
import statistics

import pytest

from harness.statistics.intervals import LOOK_WIDENING, MIN_BLOCKS, Centre, centre, interval
from harness.statistics.paired import (
    MAX_NOISE,
    compare,
    measured,
    noise_of,
    pooled,
    quotient,
    verdict,
    widened,
)

BLOCKS = [block for block in range(5) for _ in range(4)]


def noisy(mean: float, seed: int, spread: float = 0.001) -> list[float]:
    """Seconds of 20 rounds about a mean."""
    rng = random.Random(seed)
    return [mean * math.exp(rng.gauss(0, spread)) for _ in BLOCKS]


def test_ratio_is_the_time_of_b_over_the_time_of_a():
    result = compare([1.0] * 20, [2.0] * 20, blocks=BLOCKS)
    assert (result.ratio, result.low, result.high) == pytest.approx((2, 2, 2))
    assert result.verdict == "faster", "a is"
    result = compare(noisy(1, 1), noisy(2, 2), blocks=BLOCKS)
    assert result.ratio == pytest.approx(2, rel=0.002)
    assert result.low < 2 < result.high
    assert result.high - result.low < 0.01


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
    (1.001, 1.003, 0.0, 0.005, "same"),  # they differ, but by less than the margin
    (0.996, 1.004, 0.0, 0.001, "unclear"),
    (1.0, 1.02, 0.0, 0.005, "unclear"),  # an end at 1 is not beyond it
    (1.001, 1.02, 0.0, 0.005, "faster"),
    # A noise above the margin takes the margin's place, and the whole interval has to lie beyond it.
    (0.98, 1.02, 0.03, 0.005, "same"),
    (1.02, 1.05, 0.03, 0.005, "unclear"),
    (1.04, 1.05, 0.03, 0.005, "faster"),
    (0.95, 0.96, 0.03, 0.005, "slower"),
    # A noise below the margin leaves the margin as it is.
    (0.996, 1.004, 0.001, 0.005, "same"),
    # The noise or the interval is infinite or unknown.
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


def test_drift_that_both_share_cancels_and_one_outlier_in_a_block_moves_little():
    """Rounds drift by a factor of 10, blocks jump; the ratio is 1.03 in every round."""
    rng = random.Random(3)
    drift = [10 ** (i / len(BLOCKS)) * (1 + block) for i, block in enumerate(BLOCKS)]
    a = [d * math.exp(rng.gauss(0, 0.001)) for d in drift]
    b = [1.03 * d * math.exp(rng.gauss(0, 0.001)) for d in drift]
    result = compare(a, b, blocks=BLOCKS)
    assert result.verdict == "faster"
    assert 1.027 < result.low < 1.03 < result.high < 1.033
    b[3] *= 50
    result = compare(a, b, blocks=BLOCKS)
    assert (result.verdict, result.ratio) == ("faster", pytest.approx(1.03, rel=0.002))


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
def test_without_an_interval_the_verdict_is_unclear(a, b, blocks, confidence, ratio):
    result = compare(a, b, blocks=blocks, confidence=confidence)
    assert result.ratio == pytest.approx(ratio, nan_ok=True)
    assert (result.low, result.high, result.verdict) == (0.0, math.inf, "unclear")
    assert noise_of(result) == math.inf


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
    result = interval([(0, 2.0), (0, 2.0), (1, 4.0), (1, 4.0), (2, 3.0), (2, 3.0)])
    half = 4.302653 / math.sqrt(3)  # t at 97.5 % with two degrees of freedom; the groups' deviation is 1
    assert (result.mean, result.low, result.high) == pytest.approx((3, 3 - half, 3 + half), abs=1e-5)
    assert result.groups == 3


def test_interval_is_no_narrower_than_scatter_within_groups_explains():
    """Groups that agree by chance, with rounds that do not."""
    group = [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]
    result = interval([(g, x) for g in range(5) for x in group])
    assert result.mean == 0
    assert result.high == pytest.approx(1.959964 * centre(tuple(group)).error / math.sqrt(5))


def test_looks_at_the_results_make_the_interval_wider():
    """From MIN_BLOCKS blocks on it is wider than Student's."""
    values = [(g, float(g)) for g in range(MIN_BLOCKS) for _ in range(2)]
    result = interval(values)
    t, deviation = 2.570582, math.sqrt(3.5)
    assert result.high - result.mean == pytest.approx(LOOK_WIDENING * t * deviation / math.sqrt(MIN_BLOCKS))
    assert LOOK_WIDENING <= 1.3


def test_the_weights_of_blocks():
    """Long ones count more, unless preparations differ far more than rounds; disturbed ones count less."""
    rng = random.Random(4)
    short = [(block, rng.gauss(1, 1)) for block in range(5) for _ in range(4)]
    long = [(block, rng.gauss(0, 1)) for block in range(5, 10) for _ in range(40)]
    assert abs(interval(short + long).mean) < 0.35
    apart = [(0, x) for x in (0.99, 1, 1.01)] + [(1, x) for x in (2.99, 3, 3.01) * 30]
    assert interval(apart).mean == pytest.approx(2, abs=0.01)
    assert interval([*apart, (2, 9.0)]).mean == pytest.approx(13 / 3), "one round is a block, too"
    calm = [(block, x) for block in range(6) for x in (-0.01, 0, 0.01)]
    result = interval([*calm, *((6, x) for x in (-3.0, 2.0, 9.0))])
    assert abs(result.mean) < 0.01
    assert result.high < 0.05


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
        result = [centre(tuple(rng.gauss(0, 1) for _ in range(n))) for _ in range(1000)]
        deviation = statistics.stdev(c.value for c in result)
        assert math.sqrt(statistics.fmean(c.error**2 for c in result)) == pytest.approx(deviation, rel=0.12)
        assert deviation < 1.1 / math.sqrt(n), "a median has 1.25"


def test_95_percent_of_intervals_cover_the_truth_and_false_verdicts_are_rare():
    """1000 sessions of 5 blocks: each preparation (buffers, pages, clocks) shifts a whole block by more than
    rounds differ within it. Intervals over independent rounds (`naive`) would cover far less. False verdicts
    are rarer than 5 %, because differences within the margin are `same`."""
    rng = random.Random(20)
    sessions, true = 1000, 1.04
    covered = naive = called = 0
    for _ in range(sessions):
        offsets = [rng.gauss(0, 0.02) for _ in range(5)]
        common = [rng.gauss(0, 0.3) for _ in BLOCKS]
        a = [math.exp(c + rng.gauss(0, 0.01)) for c in common]
        b = [math.exp(c + offsets[k] + rng.gauss(0, 0.01)) for c, k in zip(common, BLOCKS, strict=True)]
        result = compare(a, [true * s for s in b], blocks=BLOCKS)
        covered += result.low <= true <= result.high
        called += compare(a, b, blocks=BLOCKS).verdict in ("faster", "slower")
        result = compare(a, b)
        naive += result.low <= 1 <= result.high
    assert 0.93 < covered / sessions < 0.97
    assert called / sessions <= 0.065
    assert naive / sessions < 0.8


def test_noise_is_the_distance_of_the_pair_s_interval_from_1():
    slower, faster, alike = (
        compare(noisy(a, 1), noisy(b, 2), blocks=BLOCKS) for a, b in ((1, 1.02), (1.02, 1), (1, 1))
    )
    assert (noise_of(slower), noise_of(faster)) == pytest.approx((slower.low - 1, 1 - faster.high))
    assert noise_of(alike) == 0


def test_the_noise_of_a_disturbed_pair_is_the_farther_end_of_its_interval():
    """Then no small difference is called `same`, and a far larger one still has a verdict."""
    result = compare(noisy(1, 1, spread=0.5), noisy(1, 2, spread=0.5), blocks=BLOCKS)
    noise = noise_of(result)
    assert noise == pytest.approx(max(result.high, 1 / result.low) - 1)
    assert MAX_NOISE < noise < 2
    assert compare(noisy(1, 3), noisy(1, 4), blocks=BLOCKS, floor=noise).verdict == "unclear"
    assert compare(noisy(1, 3), noisy(4, 4), blocks=BLOCKS, floor=noise).verdict == "faster"
    assert compare(noisy(4, 3), noisy(1, 4), blocks=BLOCKS, floor=noise).verdict == "slower"


def test_a_quotient_s_half_width_is_the_root_of_the_squares():
    ratio = quotient(measured(200.0, 200 / 1.03, 200 * 1.03), measured(100.0, 100 / 1.04, 100 * 1.04))
    half = math.exp(math.hypot(math.log(1.03), math.log(1.04)))
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((2.0, 2 / half, 2 * half))


@pytest.mark.parametrize(("low", "high"), [(None, 110.0), (90.0, None), (0.0, 110.0), (90.0, math.inf)])
def test_an_interval_with_an_open_end_stays_open(low, high):
    one, other = measured(100.0, low, high), measured(100.0, 99.0, 101.0)
    for ratio in (quotient(one, other), quotient(other, one), pooled([one, other])):
        assert (ratio.low, ratio.high) == (0.0, math.inf)
    assert quotient(one, other).ratio == 1.0
    assert widened(one, 2.0) == one


def test_the_mean_of_values_that_agree_has_a_narrower_interval():
    one = measured(100.0, 98.0, 100 / 0.98)
    assert pooled([one]).low == pytest.approx(98.0)
    half = math.log(1 / 0.98) / math.sqrt(4)
    assert pooled([one] * 4).high == pytest.approx(100 * math.exp(half))


def test_the_interval_of_the_mean_of_values_that_disagree_covers_both():
    pool = pooled([measured(100.0, 99.0, 101.0), measured(121.0, 120.0, 122.0)])
    assert (pool.ratio, pool.low, pool.high) == pytest.approx((110.0, 100.0, 121.0))
