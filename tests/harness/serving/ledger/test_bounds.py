"""Amdahl's law both ways."""

import pytest

from harness.errors import UsageError
from harness.serving.ledger.bounds import least_share, most_worth


def test_amdahl_both_ways():
    for factor, share in ((3.0, 0.70), (2.0, 0.93)):
        assert least_share(53.19, 28.37, factor) == pytest.approx(share, abs=0.005)
    assert least_share(1.0, 0.9 / 1.5 + 0.1, 1.5) == pytest.approx(0.9)
    assert (most_worth(0.75), most_worth(1.0)) == (4.0, float("inf"))
    for wrong in ((1.0, 1.0, 1.0), (0.0, 1.0, 2.0), (1.0, 1.0, -2.0)):
        with pytest.raises(UsageError):
            least_share(*wrong)
