"""The order of cases within a budget."""

from __future__ import annotations

from harness.plan.budget import TYPICAL, well_measured_first
from harness.timing.rounds import Policy
from shapes.case import Case


def cases(*weights: float) -> list[Case]:
    return [Case("mla_decode", {"batch": i}, weight=weight) for i, weight in enumerate(weights)]


def order(found: list[Case], least_s: list[float], contenders: int, case_s: float) -> list[int]:
    ordered = well_measured_first(found, lambda case: least_s[case.sizes["batch"]], contenders, case_s)
    return [case.sizes["batch"] for case in ordered]


def test_among_equal_weights_those_come_first_whose_opening_blocks_fit():
    policy = Policy()
    fits_s = 20 / (2 * 4 * policy.opening * policy.first_rounds * TYPICAL)
    least_s = [1.01 * fits_s, 0.1 * fits_s, 0.99 * fits_s, 5 * fits_s]
    assert order(cases(0.25, 0.25, 0.25, 0.25), least_s, 4, 20) == [1, 2, 0, 3]
    assert order(cases(0.25, 0.25, 0.25, 0.25), least_s, 5, 20) == [1, 0, 2, 3]


def test_weight_goes_before_what_is_well_measured():
    assert order(cases(0.5, 0.3, 0.2), [9.0, 9.0, 1e-6], 4, 20) == [0, 1, 2]


def test_where_none_fits_the_order_is_the_suites():
    assert order(cases(0.5, 0.5), [9.0, 1.0], 4, 20) == [0, 1]
