"""Requests one by one: against hand counts, the closed form, and percentiles that nothing was fitted to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.errors import UsageError
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.model import link
from harness.serving.link.predictions import open_outlook, outlook
from harness.serving.link.simulation import OpenLoop, simulate

DECODE = [10.0 + batch for batch in range(1, 65)]
PROMPTS, PREFILL = np.log([1.0, 2.0, 8.0]), np.array([100.0, 180.0, 600.0])


def run(load, prefill=PREFILL, **how):
    return simulate(load, DECODE, PROMPTS, prefill, 50.0, **how)


@pytest.fixture(scope="module")
def h200():
    return link()


def test_one_request_by_hand():
    found = run(ClosedLoop(isl=1000, osl=101, concurrency=1, range_ratio=1.0, waves=1))
    assert found.ttft == pytest.approx([50.0 + 100.0])
    assert found.tpot == pytest.approx([11.0])
    assert found.duration == pytest.approx(150 + 100 * 11) and found.tokens == 101 and found.batch == 1


def test_two_that_come_at_once_share_a_prefill():
    found = run(ClosedLoop(isl=1000, osl=101, concurrency=2, range_ratio=1.0, waves=1))
    assert found.ttft == pytest.approx([50.0 + 180.0] * 2)
    assert found.tpot == pytest.approx([12.0] * 2)


def test_a_step_holds_no_more_than_its_tokens():
    load = ClosedLoop(isl=1000, osl=101, concurrency=2, range_ratio=1.0, waves=1, prefill_tokens=1500)
    assert run(load).ttft == pytest.approx([150.0, 250.0])


def test_what_memory_does_not_hold_waits():
    load = ClosedLoop(isl=1000, osl=101, concurrency=2, range_ratio=1.0, waves=1)
    assert run(load, most=1).ttft == pytest.approx([150.0, 150.0 + 100 * 11 + 100.0])


def test_a_cold_first_wave_is_later():
    load = ClosedLoop(isl=1000, osl=101, concurrency=1, range_ratio=1.0, waves=3)
    found = run(load, cold_ms=900.0, cold_prefill=2.0)
    assert found.ttft == pytest.approx([50 + 900 + 200, 150.0, 150.0])


def test_who_is_looked_for_seldom_waits_half_as_many_steps():
    load = ClosedLoop(isl=1000, osl=1000, concurrency=8, waves=40)
    often, seldom = (np.mean(run(replace(load, recv_interval=n), PREFILL / 100).ttft[8:]) for n in (1, 31))
    assert seldom - often == pytest.approx(15 * 18.0, rel=0.2)


@pytest.mark.parametrize("load", [
    ClosedLoop(1024, 1024, 4, waves=30), ClosedLoop(1024, 1024, 64, waves=30),
    ClosedLoop(8192, 1024, 16, waves=30), ClosedLoop(1024, 8192, 32, waves=30),
])  # fmt: skip
def test_the_closed_form_is_the_steady_state(h200, load):
    world = h200.world(1)
    draws = h200.draws(load, world, h200.fitted(world))
    steps = h200.steps(load)
    (found,), form = steps.simulated(draws), steps.serving(draws)
    steady = slice(2 * load.concurrency, -load.concurrency)
    assert found.tpot[steady].mean() == pytest.approx(float(form.tpot[0]), rel=0.03)
    assert np.median(found.ttft[steady]) == pytest.approx(float(form.ttft[0]), rel=0.1)


# At a rate of their own


def test_few_requests_are_alone():
    found = run(OpenLoop(1000, 101, 64, range_ratio=1.0, rate=0.01, requests=50))
    assert np.median(found.ttft) == pytest.approx(150.0)
    assert not found.falls_behind and found.batch == pytest.approx(1.0, abs=0.05)


def test_more_than_is_served_falls_behind(h200):
    most = outlook(h200, ClosedLoop(1024, 1024, 64)).output.value
    look = open_outlook(h200, OpenLoop(1024, 1024, 64, rate=2 * most / 922, requests=1000))
    assert look.falls_behind == 1
    assert look.output.value == pytest.approx(most, rel=0.1)


def test_bursts_make_a_longer_tail():
    load = OpenLoop(1000, 101, 64, rate=4.0, requests=2000)
    even, poisson, bursts = (
        np.percentile(run(replace(load, burstiness=shape)).ttft, 99) for shape in (50.0, 1.0, 0.2)
    )
    assert even < poisson < bursts


def test_a_ramp_begins_slowly():
    load = OpenLoop(1000, 101, 64, rate=8.0, requests=400)
    assert run(replace(load, ramp_from=1.0)).duration > 1.5 * run(load).duration


@pytest.mark.parametrize(
    "how",
    [{"rate": 0.0}, {"burstiness": -1.0}, {"requests": 0}, {"requests": 10_001}, {"ramp_from": -1.0}],
)
def test_a_rate_that_is_none_is_refused(how):
    with pytest.raises(UsageError):
        OpenLoop(1000, 101, 64, **how)
