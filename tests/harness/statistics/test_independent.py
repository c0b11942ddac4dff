"""The intervals of quotients and means of independent measurements."""

import math

import pytest

from harness.statistics.paired import measured, pooled, quotient, widened


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
