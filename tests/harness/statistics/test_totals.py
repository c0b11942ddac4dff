"""The ratio of total times: of simulated times whose true ratio is known, and of one case."""

import math
import random

import pytest

from harness.statistics.paired import compare
from harness.statistics.totals import total_ratio

BLOCKS, ROUNDS = 6, 6
TRUTH = [(0.5, 1.0, 1.3), (0.3, 4.0, 1.05), (0.2, 30.0, 1.6)]
"""Weight, time of a, ratio of the times of b to it."""


def simulated(random, time, ratio, preparing=0.02, noise=0.01, drift=0.2):
    """Rounds in blocks; a drift that both share; each preparation of each entry has a speed of its own."""
    a, b = {}, {}
    for block in range(BLOCKS):
        shift_a, shift_b = random.gauss(0, preparing), random.gauss(0, preparing)
        for number in range(ROUNDS):
            shared = random.uniform(-drift, drift)
            a[block, number] = time * math.exp(shared + shift_a + random.gauss(0, noise))
            b[block, number] = time * ratio * math.exp(shared + shift_b + random.gauss(0, noise))
    return a, b


def test_the_interval_holds_the_true_ratio_as_often_as_it_says():
    """And is not twice as wide as it needs to be: the paired rounds cancel the drift."""
    source, trials = random.Random(1), 300
    truth = sum(w * t * r for w, t, r in TRUTH) / sum(w * t for w, t, _ in TRUTH)
    found = [
        total_ratio([(w, *simulated(source, t, r)) for w, t, r in TRUTH], confidence=0.9)
        for _ in range(trials)
    ]
    held = sum(each.low <= truth <= each.high for each in found) / trials
    assert 0.89 < held < 0.995
    half = sum(math.log(each.high / each.low) / 2 for each in found) / trials
    shares = [w * t * r for w, t, r in TRUTH]
    known = math.hypot(*(share / sum(shares) * 0.02 * math.sqrt(2 / BLOCKS) for share in shares))
    assert 1.645 * known < half < 4 * known


def test_the_ratio_of_one_case_is_that_of_compare():
    a, b = simulated(random.Random(2), 3.0, 1.2)
    blocks = [block for block, _ in a]
    alone = compare(list(a.values()), list(b.values()), blocks=blocks)
    total = total_ratio([(0.1, a, b)])
    assert (total.ratio, total.low, total.high) == pytest.approx((alone.ratio, alone.low, alone.high))


def test_a_case_of_one_block_leaves_the_interval_open():
    a, b = simulated(random.Random(3), 3.0, 1.2)
    alone = ({(0, 0): 1.0}, {(0, 0): 2.0})
    assert total_ratio([(1.0, a, b), (1.0, *alone)]).high == math.inf


def test_cases_count_by_weight_and_time():
    fast, slow = {(i, 0): 1.0 for i in range(6)}, {(i, 0): 3.0 for i in range(6)}
    light, long = (1.0, fast, slow), (1.0, dict.fromkeys(fast, 9.0), dict.fromkeys(fast, 9.0))
    assert total_ratio([light, long]).ratio == pytest.approx(1.2)
    assert total_ratio([(9.0, *light[1:]), long]).ratio == pytest.approx(2.0)
