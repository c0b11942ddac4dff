"""How far devices of one type lie apart: made-up ones, so that it is known."""

import random
from pathlib import Path

import pytest

from harness.report.notes import spread_lines
from harness.results.comparison import Spread, spreads
from tests.support.calibrated import HEAVY, calibrations

ALIKE = {"a": 100.0, "b": 100.3, "c": 99.8}
ONE_LAGS = {"a": 100.0, "b": 105.0, "c": 99.8}
TWO = {"a": 100.0, "b": 110.0}


def scaled(times: dict[str, float], by: float, *names: str) -> dict[str, float]:
    return {name: us * by if name in names or not names else us for name, us in times.items()}


def passes(first: dict[str, float], last: dict[str, float]) -> list:
    return calibrations(first) + calibrations(last, when="last")


MADE = {
    "alike": passes(ALIKE, ALIKE),
    "one lags": passes(ONE_LAGS, ONE_LAGS),
    "one is faster: no other lags": calibrations(ALIKE | {"d": 90.0, "e": 100.1}),
    "of two the faster is the median": calibrations({"a": 106.0, "b": 100.0}),
    "too noisy to tell": calibrations(ONE_LAGS, half=0.06),
    "two in one pass": calibrations(TWO),
    "two in both passes": passes(TWO, TWO),
    "passes that disagree": passes(TWO, {"a": 100.0, "b": 130.0}),
    "what all drift by is between none": passes(ALIKE, scaled(ALIKE, 1.1)),
    "one drifts up": passes(ALIKE, scaled(ALIKE, 1.08, "c")),
    "one drifts down": passes(ALIKE, scaled(ALIKE, 0.92, "c")),
    "one drifts up in a case and further down in another": passes(ALIKE, scaled(ALIKE, 1.08, "c"))
    + calibrations(ALIKE, case=HEAVY)
    + calibrations(scaled(ALIKE, 0.8, "c"), when="last", case=HEAVY),
    "one drifts too little": passes(ALIKE, scaled(ALIKE, 1.01, "c")),
    "apart in one case only": calibrations(ALIKE)
    + calibrations({"a": 500.0, "b": 560.0, "c": 501.0}, case=HEAVY),
    "one went before the end": passes(ONE_LAGS, {"a": 100.0, "c": 99.8}),
    "two types": calibrations(ALIKE) + calibrations({"m": 300.0, "n": 330.0}, type="MI300X"),
    "one device of each type": calibrations({"a": 100.0}) + calibrations({"m": 300.0}, type="MI300X"),
    "no case in common": calibrations({"a": 100.0}) + calibrations({"b": 100.0}, case=HEAVY),
    "a resumed run has passes twice": calibrations(ONE_LAGS) + calibrations(scaled(ONE_LAGS, 1.001)),
}


def spread(made: list) -> Spread:
    (found,) = spreads(made)
    return found


def facts(found: Spread) -> str:
    at = found.widest
    lags = ", ".join(
        f"{ratio.device} at {ratio.case} {ratio.comparison.ratio:.4f}" for ratio in found.lagging
    )
    drifts = ", ".join(f"{ratio.device} {ratio.comparison.ratio:.4f}" for ratio in found.drifts)
    return (
        f"{found.type} {found.verdict}: {at.low:.4f} {at.ratio:.4f} {at.high:.4f}, "
        f"most {found.max_difference:.4f}; "
        f"lagging: {lags}; drifts: {drifts}"
    )


def test_spreads_are_as_committed(snapshot):
    lines = []
    for name, made in MADE.items():
        found = spreads(made)
        lines += [f"=== {name}", *map(facts, found), *spread_lines(found), ""]
    snapshot(Path(__file__).parent / "snapshots" / "spreads.txt", "\n".join(lines))


def test_many_equal_devices_are_seldom_said_to_differ():
    """Of 100 fleets of 16 equal ones, as noisy as their intervals say; in most some pair differs at 95 %."""
    draw, apart = random.Random(0), 0
    for _ in range(100):
        found = spread(calibrations({f"d{i}": 100 * draw.gauss(1, 0.005 / 1.96) for i in range(16)}))
        apart += found.verdict == "apart"
        assert not found.lagging
    assert apart <= 10


def test_an_interval_is_the_quotient_s():
    """Two devices, one case: one ratio, so that nothing is adjusted. 1.01 / 0.99 in logs, times root two."""
    found = spread(calibrations({"a": 100.0, "b": 110.0}, half=0.01))
    half = (1.01 / 0.99) ** (2**0.5 / 2)
    assert (found.widest.low, found.widest.high) == pytest.approx((1.1 / half, 1.1 * half))
