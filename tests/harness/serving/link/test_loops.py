"""A closed loop's steady state and requests one by one: by hand, and each against the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.errors import HarnessError, UsageError
from harness.serving.link.closed_loop import ClosedLoop, closed_loop
from harness.serving.link.simulation import OpenLoop, simulate

HOST_MS = 12.0
TOGETHER = np.arange(1, 65)


def decode_ms(batch):
    return 5.0 + 0.2 * batch


def prefill_ms(together):
    return 15.0 + 10.0 * together


def closed(load, most=np.inf, decode=decode_ms, cold_ms=0.0, cold_prefill=1.0):
    return closed_loop(load, decode, prefill_ms, np.array([HOST_MS]), most, cold_ms, cold_prefill)


def simulated(load, **how):
    return simulate(load, list(decode_ms(TOGETHER)), np.log(TOGETHER), prefill_ms(TOGETHER), HOST_MS, **how)


# Requests one by one, by hand


def one_length(osl=101, **more):
    return ClosedLoop(isl=1000, osl=osl, **{"concurrency": 2, "range_ratio": 1.0, "waves": 1} | more)


@pytest.mark.parametrize(("load", "how", "ttft"), [
    (one_length(), {}, [HOST_MS + prefill_ms(2)] * 2),  # they share a prefill
    (one_length(prefill_tokens=1500), {}, [HOST_MS + prefill_ms(1), HOST_MS + 2 * prefill_ms(1)]),
    *[(one_length(), {"most": most},  # memory holds one, the other waits
       [HOST_MS + prefill_ms(1), HOST_MS + 2 * prefill_ms(1) + 100 * decode_ms(1)]) for most in (1, 1.5)],
    (one_length(concurrency=1, waves=2), {"cold_ms": 900.0, "cold_prefill": 2.0},
     [HOST_MS + 900 + 2 * prefill_ms(1), HOST_MS + prefill_ms(1)]),
])  # fmt: skip
def test_times_to_the_first_token(load, how, ttft):
    assert simulated(load, **how).ttft == pytest.approx(ttft)


def test_one_request_by_hand():
    found = simulated(one_length(concurrency=1))
    assert found.tpot == pytest.approx([decode_ms(1)])
    assert found.duration == pytest.approx(HOST_MS + prefill_ms(1) + 100 * decode_ms(1))
    assert found.tokens == 101 and found.batch == 1


def test_who_is_looked_for_seldom_waits_half_as_many_steps():
    load = ClosedLoop(isl=1000, osl=1000, concurrency=8, waves=40)
    often, seldom = (np.mean(simulated(replace(load, recv_interval=n)).ttft[8:]) for n in (1, 31))
    assert seldom - often == pytest.approx(15 * decode_ms(8), rel=0.2)


# The steady state


@pytest.mark.parametrize(("load", "most"), [
    *[(ClosedLoop(512, osl, concurrency, 0.5, prefill_tokens=4096, waves=40), np.inf)
      for concurrency in (1, 4, 48) for osl in (150, 600)],
    (ClosedLoop(512, 300, 32, 0.5, prefill_tokens=4096, waves=30), 8),  # the others wait
    (ClosedLoop(512, 200, 16, 1.0, prefill_tokens=4096, waves=25), np.inf),  # one length stays in step
    (ClosedLoop(1000, 1000, 8, waves=40, recv_interval=31), np.inf),
])  # fmt: skip
def test_it_is_what_requests_one_by_one_come_to(load, most):
    found, run = closed(load, most), simulated(load, most=most)
    steady = slice(2 * load.concurrency, -2 * load.concurrency)
    assert float(found.tpot[0]) == pytest.approx(run.tpot[steady].mean(), rel=0.05)
    assert float(found.ttft[0]) == pytest.approx(run.ttft[steady].mean(), rel=0.15)
    assert float(found.output[0]) == pytest.approx(1e3 * run.tokens / run.duration, rel=0.1)


def test_stall_is_the_batch_over_the_output_times_a_prefill():
    """TPOT = t_dec + (B / OSL) T_pf, but for the request's own prefill and its first token."""
    found = closed(ClosedLoop(1000, 2000, 10, range_ratio=0.999999, prefill_tokens=1000))
    batch = float(found.batch[0])
    assert float(found.stall[0]) == pytest.approx(batch / 1999 * 0.9 * prefill_ms(1), rel=1e-3)
    assert float(found.tpot[0] - found.stall[0]) == pytest.approx(decode_ms(batch), rel=1e-6)
    alone = closed(ClosedLoop(isl=100, osl=101, concurrency=1, recv_interval=30))
    assert float(alone.stall[0]) == 0.0 and float(alone.ttft[0]) == pytest.approx(HOST_MS + prefill_ms(1))


def test_the_first_wave_waits_for_its_own_prefills():
    load = ClosedLoop(isl=1000, osl=500, concurrency=4, range_ratio=0.999999, prefill_tokens=2000, waves=2)
    found, pairs = closed(load), prefill_ms(2)
    first, steady = HOST_MS + (pairs + pairs + 2 * pairs + 2 * pairs) / 4, float(found.ttft[0])
    assert float(found.ttft_mean[0]) == pytest.approx((first + steady) / 2, rel=1e-3)
    assert float(closed(replace(load, waves=0)).ttft_mean[0]) == steady
    cold = closed(replace(load, range_ratio=1.0, waves=5), cold_ms=900.0, cold_prefill=2.0)
    later = float(cold.ttft_mean[0] - cold.ttft[0])
    assert later == pytest.approx((900.0 + float(cold.first_wave[0])) / 5)


@pytest.mark.parametrize("range_ratio", [0.8, 1.0])
def test_each_draw_is_as_alone(range_ratio):
    load = ClosedLoop(1024, 256, 32, range_ratio, waves=10)
    held = np.array([np.inf, 20.0, 8.0, 32.0])
    together = closed_loop(load, decode_ms, prefill_ms, np.full(4, HOST_MS), held)
    for i, most in enumerate(held):
        alone = closed(load, most)
        for name in ("tpot", "ttft", "output", "batch", "stall"):
            assert getattr(together, name)[i] == pytest.approx(float(getattr(alone, name)[0]), rel=1e-4)


def test_what_does_not_settle_is_said_in_one_line():
    turn = iter(range(10**6))
    with pytest.raises(HarnessError, match=r"^[^\n]*concurrency 64 does not settle: after \d+ iterations"):
        closed(ClosedLoop(512, 300, 64), decode=lambda b: 5.0 + 4 * (next(turn) % 2) + 0 * b)


# At a rate of their own


def test_few_requests_are_alone_and_bursts_make_a_longer_tail_and_a_ramp_a_longer_run():
    found = simulated(OpenLoop(1000, 101, 64, range_ratio=1.0, rate=0.01, requests=50))
    assert np.median(found.ttft) == pytest.approx(HOST_MS + prefill_ms(1))
    assert not found.falls_behind and found.batch == pytest.approx(1.0, abs=0.05)
    load = OpenLoop(1000, 101, 64, rate=8.0, requests=1000)
    even, poisson, bursts = (
        np.percentile(simulated(replace(load, burstiness=shape)).ttft, 99) for shape in (50.0, 1.0, 0.2)
    )
    assert even < poisson < bursts
    assert simulated(replace(load, ramp_from=1.0)).duration > 1.5 * simulated(load).duration


@pytest.mark.parametrize(("kind", "wrong"), [
    *[(ClosedLoop, one) for one in ({"isl": 0}, {"osl": 1}, {"concurrency": 0}, {"range_ratio": -0.1},
                                    {"range_ratio": 1.5}, {"waves": -1})],
    *[(OpenLoop, one) for one in ({"rate": 0.0}, {"burstiness": -1.0}, {"requests": 0}, {"requests": 10_001},
                                  {"ramp_from": -1.0})],
])  # fmt: skip
def test_a_workload_of_no_sense_is_refused(kind, wrong):
    with pytest.raises(UsageError):
        kind(**{"isl": 10, "osl": 10, "concurrency": 1} | wrong)
