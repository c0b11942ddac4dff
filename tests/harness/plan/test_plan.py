"""Which cases are measured: their order, and what the budget gives them."""

import pytest

import kernels
from harness.errors import UsageError
from harness.plan import budget as budget_module
from harness.plan import select
from shapes.case import Case

OP = kernels.OPS["mla_decode"]


def cases(*weights: float) -> list[Case]:
    return [OP.case({"batch": i + 1, "ctx": 10}, weight=w) for i, w in enumerate(weights)]


def test_heaviest_case_first_and_equal_ones_in_suite_order():
    chosen = select.choose_cases(OP, "r1-tp8", (), None)
    assert [case.sizes["batch"] for case in chosen[:3]] == [64, 128, 32]
    served = select.choose_cases(OP, "serving-3200-800-c64", (), None)
    assert [c.weight for c in served] == sorted((c.weight for c in served), reverse=True)


def test_cases_that_are_the_same_measurement_are_merged():
    found = select.choose_cases(OP, None, ("batch=1,1 ctx=8", "batch=1 ctx=8 heads=16"), None)
    assert len(found) == 1
    assert found[0].weight == pytest.approx(1)


@pytest.mark.parametrize(("budget", "weights", "reached", "share"), [
    *((budget, (0.5, 0.3, 0.2), reached, None) for budget, reached in ((5, 1), (29, 1), (31, 2))),
    *((budget, (0.5, 0.3, 0.2), 3, 0.5) for budget in (60, 600)),
    (45, (0.3, 0.2), 2, 0.6),  # weights need not add up to 1
])  # fmt: skip
def test_a_budget_reaches_as_many_cases_as_can_get_their_least_time(budget, weights, reached, share):
    allowed_s, count = budget_module.allowance(budget, cases(*weights), min_s=15)
    assert count == reached and 0 < allowed_s <= budget
    assert share is None or allowed_s == pytest.approx(share * budget)


def test_seconds_are_read_and_mistakes_refused():
    read = [budget_module.parse_seconds(text, "--budget") for text in ("60", "60s", "1.5m", "2h")]
    assert read == [60, 60, 90, 7200]
    for text in ("", "s", "inf"):  # others: transcripts of ../cli
        with pytest.raises(UsageError, match="--budget"):
            budget_module.parse_seconds(text, "--budget")
