"""Statistics of A/Bs, by seeded simulation: false verdicts stay under 5 %, known effects are found."""

import math
from pathlib import Path

import numpy as np
import pytest

from harness.cli.serving.ab_display import planned
from harness.serving.ab import effect as module
from harness.serving.ab.effect import (
    LOOKS,
    confidence,
    effect,
    looks,
    more_pairs,
    pairs_for,
    power,
    usual_spread,
)
from harness.serving.ab.plan import read_plan


def experiment(draw, change, launch_sd, pairs=None, arms=1, trend=0.0, margin=1e-6):
    """The verdict on the first arm, and after how many pairs: as a session takes its looks."""
    first = np.cumsum(np.full((LOOKS[-1] + 1, arms + 1), trend).ravel()).reshape(-1, arms + 1)
    mirrored = np.where(np.arange(len(first))[:, None] % 2, first, first[:, ::-1])
    times = np.exp(draw.normal(0, launch_sd, first.shape) + mirrored)
    times[:, 1] *= 1 + change
    for n in looks(pairs):
        level = confidence(pairs, arms)
        about = {"higher": False, "level": level, "margin": 100 * margin}
        found = [effect(times[:n, 0], times[:n, arm], **about).verdict for arm in range(1, arms + 1)]
        if "unclear" not in found:
            break
    return found, n


@pytest.mark.parametrize(
    ("options", "trials"), [({}, 2000), ({"pairs": 6}, 2000), ({"arms": 2}, 500), ({"trend": 0.002}, 500)]
)
def test_arms_that_do_not_differ_get_a_verdict_in_less_than_five_of_a_hundred(options, trials):
    """The first two are near five."""
    draw = np.random.default_rng(1)
    verdicts = [experiment(draw, 0, 0.005, **options)[0] for _ in range(trials)]
    assert sum(bool({"faster", "slower"} & {*found}) for found in verdicts) / trials < 0.05


@pytest.mark.parametrize(("change", "pairs", "least", "mean"), [
    (0.02, None, 0.97, 7.5), (0.05, None, 0.99, 4.3), (0.02, 6, 0.95, 6), (0.01, 12, 0.85, 12),
    (0.05, 3, 0.9, 3),
])  # fmt: skip
def test_effects_are_found_as_often_as_the_plan_says(change, pairs, least, mean):
    """Launches 0.53 % apart, as measured on 8 MI355X at 32 and more in flight."""
    draw = np.random.default_rng(2)
    outcomes = [experiment(draw, change, 0.0053, pairs) for _ in range(400)]
    assert sum(found == ["slower"] for found, _ in outcomes) / len(outcomes) > least
    assert np.mean([n for _, n in outcomes]) <= mean


def test_more_in_less_time_is_faster_and_less_throughput_is_slower():
    times = [10.0, 10.1, 9.9, 10.0], [9.0, 9.1, 8.9, 9.0]
    assert effect(*times, higher=False, level=0.95, margin=1).verdict == "faster"
    assert effect(*times, higher=True, level=0.95, margin=1).verdict == "slower"
    found = effect(times[0], times[0], higher=False, level=0.95, margin=1)
    assert (found.verdict, found.ratio, found.low, found.high) == ("same", 1, 1, 1)
    alone = effect([10.0], [9.0], higher=False, level=0.95, margin=1)
    assert (alone.verdict, alone.high, alone.launch_spread) == ("unclear", math.inf, None)
    assert more_pairs(alone, 1) is None


def test_pairs_needed_are_those_that_find_it_four_times_in_five():
    few = range(2, 99)
    for *known, among in ((1, 0.53, 0.95, few), (2, 1.2, 0.95, few), (2, 0.53, 0.9875, (2, *LOOKS))):
        change, sd, level = known
        n = pairs_for(change, sd, level, among)
        fewer = max(m for m in among if m < n)
        assert power(change, n, sd, level) >= 0.8 > power(change, fewer, sd, level)
    assert pairs_for(1, 1.2, confidence(None, 1), LOOKS) is None
    assert pairs_for(1, module.usual_spread("ttft", 1), 0.95) is None


def plan_of(option=""):
    client = f"bench {{url}} {{seed}} {{result}}{option}"
    return read_plan({"launch": "serve {port}", "client": client, "arms": {"a": {}, "b": {}}}, "a test")


@pytest.mark.parametrize(("option", "says"), [
    (" --max-concurrency 64", "differ by 0.53 %, as on"), (" --max-concurrency 4", "differ by 1.2 %, as on"),
    ("", "differ by 1.2 %, as on 8 MI355X with DeepSeek-R1; the client command names no concurrency"),
])  # fmt: skip
def test_launches_differ_more_where_few_requests_are_in_flight(option, says):
    assert says in planned(plan_of(option), None, Path("/ab"), [], [])


@pytest.mark.parametrize(("budget_s", "pairs"), [(3, 0), (53 * 60, 0), (3 * 3600, 2), (1e6, 12)])
def test_the_plan_says_how_many_pairs_the_budget_reaches(budget_s, pairs):
    """Launches of 10 and two runs of 8 minutes: 52 minutes a pair, and as long for those thrown away."""
    says = planned(plan_of(), None, Path("/ab"), [], [], budget_s)
    assert f"; pairs that would end within it: {pairs}\n" in says
    assert "budget" not in planned(plan_of(), None, Path("/ab"), [], [])


def test_more_pairs_would_decide_what_stays_as_it_is():
    arm = 10.05 * np.exp([0.01, -0.01, 0.012, -0.012, 0.008, -0.008])
    found = effect(np.full(6, 10.0), arm, higher=False, level=0.95, margin=0.1)
    assert found.verdict == "unclear"
    more, half = more_pairs(found, 0.1)
    n = found.pairs + more
    exact = found.launch_spread * math.sqrt(2 / n) * module.students_t(n - 1, 0.95)
    assert half == pytest.approx(exact) and half / 100 < abs(math.log(found.ratio)) and more > 5


def test_launches_scatter_less_than_their_pairs_and_less_where_many_requests_are_in_flight():
    found = effect(np.ones(2), np.exp([0.01, -0.01]), higher=False, level=0.95, margin=1)
    assert found.launch_spread == pytest.approx(1.0)  # per cent; that of the pairs is sqrt(2) times as large
    assert usual_spread("tpot", 32) == usual_spread("tpot", 64) < usual_spread("tpot", 31)
    assert usual_spread("tpot", None) == usual_spread("tpot", 1)
