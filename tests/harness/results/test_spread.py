"""How far devices of one type lie apart: made-up ones, so that it is known."""

from __future__ import annotations

import random

import pytest

from harness.report.spread_text import spread_lines
from harness.results.spread import LAG, NOISY, Spread, spreads
from tests.support.calibrated import HEAVY, LIGHT, calibrations

ALIKE = {"a": 100.0, "b": 100.3, "c": 99.8}
ONE_LAGS = {"a": 100.0, "b": 105.0, "c": 99.8}


def spread(made) -> Spread:
    (found,) = spreads(made)
    return found


def test_equal_devices_are_alike_within_what_their_intervals_leave_open():
    found = spread(calibrations(ALIKE) + calibrations(ALIKE, when="last"))
    assert found.verdict == "alike"
    assert found.widest.low == 1.0 and 1.005 < found.widest.ratio < 1.0051
    assert found.most == found.widest.high - 1 and 0.005 < found.most < 0.02
    assert found.lagging == found.drifted == []
    assert spread_lines([found]) == [f"3 devices of type H200 are alike within {found.most:.1%}"]


def test_a_device_that_is_slower_lags_and_is_named():
    found = spread(calibrations(ONE_LAGS) + calibrations(ONE_LAGS, when="last"))
    assert found.verdict == "apart"
    assert found.widest.ratio == pytest.approx(105 / 99.8)
    assert 1.04 < found.widest.low < found.widest.ratio < found.widest.high < 1.07
    (lagging,) = found.lagging
    assert (lagging.device, lagging.case) == ("b", LIGHT)
    assert lagging.comparison.ratio == pytest.approx(1.05)
    assert lagging.comparison.low > 1 + LAG
    whole, lags = spread_lines([found])
    assert whole.startswith("3 devices of type H200 lie apart: the slowest takes 1.052x (1.0")
    assert lags.startswith("b lags: 1.050x (1.0") and lags.endswith(f"the median device's time of {LIGHT}")
    resumed = spread(
        calibrations(ONE_LAGS) + calibrations({name: us * 1.001 for name, us in ONE_LAGS.items()})
    )
    assert ([ratio.device for ratio in resumed.lagging], resumed.devices) == (["b"], ["a", "b", "c"])
    faster = spread(calibrations(ALIKE | {"d": 90.0, "e": 100.1}))
    assert (faster.verdict, faster.lagging) == ("apart", []), "one that is faster makes no other lag"
    of_two = spread(calibrations({"a": 106.0, "b": 100.0}))
    ratios = {ratio.device: ratio.comparison.ratio for ratio in of_two.to_median}
    assert ratios == {"a": pytest.approx(1.06), "b": 1.0}, "of two the faster is the median"


def test_what_is_too_noisy_to_tell_says_so_and_its_upper_end_counts():
    found = spread(calibrations(ONE_LAGS, half=0.06))
    assert found.verdict == "noisy" and found.lagging == []
    assert found.widest.low == 1.0
    assert found.most > max(NOISY, 0.06 + 0.05)
    assert spread_lines([found]) == [
        "3 devices of type H200 were measured too noisily to tell apart: they may differ by up to "
        f"{found.most:.1%}"
    ]


def test_an_interval_is_the_quotient_s():
    """Two devices, one case: one ratio, so that nothing is adjusted. 1.01 / 0.99 in logs, times root two."""
    found = spread(calibrations({"a": 100.0, "b": 110.0}, half=0.01))
    half = (1.01 / 0.99) ** (2**0.5 / 2)
    assert (found.widest.low, found.widest.high) == pytest.approx((1.1 / half, 1.1 * half))


def test_both_passes_make_it_surer_and_passes_that_disagree_less_sure():
    first = calibrations({"a": 100.0, "b": 110.0})
    once = spread(first)
    twice = spread(first + calibrations({"a": 100.0, "b": 110.0}, when="last"))
    assert twice.widest.ratio == pytest.approx(once.widest.ratio)
    assert twice.most < once.most
    unlike = spread(first + calibrations({"a": 100.0, "b": 130.0}, when="last"))
    assert (unlike.widest.low, unlike.widest.high) == pytest.approx((1.1, 1.3))


def test_what_all_devices_drift_by_is_between_none_of_them():
    """The room became warm: each takes 10 % more in the end, and they are as alike as before."""
    later = {name: us * 1.1 for name, us in ALIKE.items()}
    found = spread(calibrations(ALIKE) + calibrations(later, when="last"))
    assert found.verdict == "alike" and found.most < 0.02
    assert {ratio.device for ratio in found.drifted} == set(ALIKE)


@pytest.mark.parametrize(("by", "word"), [(1.08, "1.080x"), (0.92, "0.920x"), (1.01, "")])
def test_a_device_that_drifted_is_named(by, word):
    made = calibrations(ALIKE) + calibrations(ALIKE | {"c": ALIKE["c"] * by}, when="last")
    drifted = [line for line in spread_lines(spreads(made)) if "drifted" in line]
    assert len(drifted) == bool(word)
    if word:
        assert drifted[0].startswith(f"c drifted: {word} (")
        assert drifted[0].endswith(f"its first time of {LIGHT} at the end")


def test_the_case_in_which_they_differ_most_counts():
    found = spread(calibrations(ALIKE) + calibrations({"a": 500.0, "b": 560.0, "c": 501.0}, case=HEAVY))
    assert found.widest.ratio == pytest.approx(560 / 500)
    assert [(ratio.device, ratio.case) for ratio in found.lagging] == [("b", HEAVY)]
    assert f"time of {HEAVY}" in spread_lines([found])[1]


def test_a_device_that_went_before_the_end_has_its_first_pass():
    found = spread(calibrations(ONE_LAGS) + calibrations({"a": 100.0, "c": 99.8}, when="last"))
    assert [ratio.device for ratio in found.lagging] == ["b"]
    assert {ratio.device for ratio in found.drifts} == {"a", "c"}


def test_types_are_apart_and_one_device_has_no_spread():
    made = calibrations(ALIKE) + calibrations({"m": 300.0, "n": 330.0}, type="MI300X")
    assert [(s.type, s.verdict) for s in spreads(made)] == [("H200", "alike"), ("MI300X", "apart")]
    assert spreads(calibrations({"a": 100.0}) + calibrations({"m": 300.0}, type="MI300X")) == []
    assert spreads([]) == []
    different_cases = calibrations({"a": 100.0}) + calibrations({"b": 100.0}, case=HEAVY)
    assert spreads(different_cases) == [], "nothing was measured alike"


def test_many_equal_devices_are_seldom_said_to_differ():
    """Of 100 fleets of 16 equal ones, as noisy as their intervals say; in most some pair differs at 95 %."""
    draw = random.Random(0)
    apart = 0
    for _ in range(100):
        times = {f"d{i}": 100 * draw.gauss(1, 0.005 / 1.96) for i in range(16)}
        found = spread(calibrations(times))
        apart += found.verdict == "apart"
        assert not found.lagging
    assert apart <= 10
