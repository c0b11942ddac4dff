"""The closure of the serving link against a simulation of a serving loop, and by hand."""

import heapq
import random
from dataclasses import replace

import numpy as np
import pytest

from harness.errors import HarnessError, UsageError
from harness.serving.link.closed_loop import ClosedLoop, closed_loop

HOST_MS = 12.0


def decode_ms(batch):
    return 5.0 + 0.2 * batch


def prefill_ms(together):
    return 15.0 + 10.0 * together


def closed(load, most=np.inf, decode=decode_ms, prefill=prefill_ms):
    return closed_loop(load, decode, prefill, np.array([HOST_MS]), most)


def simulated(load, prompts, most=10**9, seed=1):
    """(TPOT, TTFT, output tokens/s) of a loop that prefills first, without its first and its last wave.

    Each request has tokens to make; a place whose request ended sends the next at once, which reaches the
    engine HOST_MS later. Prefill time depends on the number of prompts only, as in the closure.
    """
    draw = random.Random(seed)
    now, sent, waiting, running, done = 0.0, 0, [], [], []
    arriving = []

    def send(at):
        nonlocal sent
        if sent < prompts:
            osl = round(draw.uniform(load.range_ratio, 1.0) * load.osl)
            heapq.heappush(arriving, (at + HOST_MS, sent, at, max(osl, 2)))
            sent += 1

    for _ in range(load.concurrency):
        send(0.0)
    while arriving or waiting or running:
        while arriving and arriving[0][0] <= now:
            waiting.append(heapq.heappop(arriving))
        room = int(min(most - len(running), load.most_together))
        if waiting and room >= 1:
            batch, waiting = waiting[:room], waiting[room:]
            now += prefill_ms(len(batch))
            for _, number, at, osl in batch:
                running.append([number, at, now, osl, osl - 1])
        elif running:
            now += decode_ms(len(running))
            for one in running:
                one[4] -= 1
            for one in [one for one in running if one[4] == 0]:
                done.append((one[0], one[1], one[2], now, one[3]))
                send(now)
            running = [one for one in running if one[4]]
        else:
            now = arriving[0][0]
    kept = [d for d in done if 2 * load.concurrency <= d[0] < prompts - 2 * load.concurrency]
    tpot = np.mean([(end - first) / (osl - 1) for _, _, first, end, osl in kept])
    ttft = np.mean([first - at for _, at, first, _, _ in kept])
    # Between two ends well inside the run.
    ends = sorted(d[3] for d in done)
    a, b = len(ends) // 5, 4 * len(ends) // 5
    rate = (b - a) / (ends[b] - ends[a])
    return tpot, ttft, rate * np.mean([d[4] for d in done]) * 1e3


@pytest.mark.parametrize("concurrency", [1, 4, 16, 48])
@pytest.mark.parametrize("osl", [150, 600])
def test_closure_agrees_with_a_simulated_loop(concurrency, osl):
    load = ClosedLoop(isl=512, osl=osl, concurrency=concurrency, range_ratio=0.5, prefill_tokens=4096)
    found = closed(load)
    tpot, ttft, output = simulated(load, prompts=40 * concurrency + 40)
    assert float(found.tpot[0]) == pytest.approx(tpot, rel=0.04)
    assert float(found.ttft[0]) == pytest.approx(ttft, rel=0.15)
    assert float(found.output[0]) == pytest.approx(output, rel=0.04)


def test_where_memory_holds_fewer_than_come_the_loop_decodes_so_many_and_the_others_wait():
    load = ClosedLoop(isl=512, osl=300, concurrency=32, range_ratio=0.5, prefill_tokens=4096)
    found = closed(load, most=8)
    tpot, ttft, output = simulated(load, prompts=1000, most=8)
    assert float(found.batch[0]) == pytest.approx(8)
    assert float(found.tpot[0]) == pytest.approx(tpot, rel=0.05)
    assert float(found.output[0]) == pytest.approx(output, rel=0.05)
    assert float(found.ttft[0]) == pytest.approx(ttft, rel=0.1)


def test_stall_is_the_batch_over_the_output_times_a_prefill():
    """TPOT = t_dec + (B / OSL) T_pf, but for the request's own prefill and its first token."""
    load = ClosedLoop(isl=1000, osl=2000, concurrency=10, range_ratio=0.999999, prefill_tokens=1000)
    found = closed(load)
    expected = float(found.batch[0]) / 1999 * 0.9 * prefill_ms(1)
    assert float(found.stall[0]) == pytest.approx(expected, rel=1e-3)
    assert float(found.tpot[0] - found.stall[0]) == pytest.approx(decode_ms(float(found.batch[0])), rel=1e-6)


def test_throughput_and_batch_follow_littles_law():
    load = ClosedLoop(isl=512, osl=300, concurrency=24, range_ratio=0.8, prefill_tokens=8192)
    found = closed(load)
    n = load.mean_osl - 1
    life = float(found.ttft[0] + n * found.tpot[0])
    assert float(found.output[0]) == pytest.approx(24 * load.mean_osl / life * 1e3, rel=1e-4)
    assert float(found.batch[0]) == pytest.approx(24 * n * float(found.tpot[0]) / life, rel=1e-4)


def test_the_first_wave_waits_for_its_own_prefills():
    load = ClosedLoop(isl=1000, osl=500, concurrency=4, range_ratio=0.999999, prefill_tokens=2000, waves=2)
    found = closed(load)
    pairs = prefill_ms(2)
    first = HOST_MS + (pairs + pairs + 2 * pairs + 2 * pairs) / 4
    steady = float(found.ttft[0])
    assert float(found.ttft_mean[0]) == pytest.approx((first + steady) / 2, rel=1e-3)
    assert float(closed(replace(load, waves=0)).ttft_mean[0]) == steady


def test_what_does_not_settle_is_said_in_one_line():
    load = ClosedLoop(isl=512, osl=300, concurrency=64, range_ratio=0.8)
    turn = iter(range(10**6))
    with pytest.raises(HarnessError, match=r"concurrency 64 does not settle: after \d+ iterations") as caught:
        closed(load, decode=lambda b: 5.0 + 4 * (next(turn) % 2) + 0 * b)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"isl": 0}, {"osl": 1}, {"concurrency": 0}, {"range_ratio": -0.1}, {"range_ratio": 1.5}, {"waves": -1}],
)
def test_a_workload_of_no_sense_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ClosedLoop(**{"isl": 10, "osl": 10, "concurrency": 1} | wrong)


@pytest.mark.parametrize("range_ratio", [0.8, 1.0])
def test_draws_in_which_memory_holds_more_or_fewer_are_each_as_alone(range_ratio):
    load = ClosedLoop(1024, 256, 32, range_ratio, waves=10)
    held = np.array([np.inf, 20.0, 8.0, 32.0])
    together = closed_loop(load, decode_ms, prefill_ms, np.full(4, HOST_MS), held)
    for i, most in enumerate(held):
        alone = closed_loop(load, decode_ms, prefill_ms, np.array([HOST_MS]), most)
        for name in ("tpot", "ttft", "output", "batch", "stall"):
            assert getattr(together, name)[i] == pytest.approx(float(getattr(alone, name)[0]), rel=1e-4)


def test_one_request_alone_waits_for_no_step_of_others():
    load = ClosedLoop(isl=100, osl=101, concurrency=1, recv_interval=30)
    assert float(closed(load).ttft[0]) == pytest.approx(HOST_MS + prefill_ms(1))


def test_requests_of_one_length_have_a_cold_first_wave_too():
    load = ClosedLoop(isl=1000, osl=500, concurrency=4, range_ratio=1.0, prefill_tokens=2000, waves=5)
    found = closed_loop(load, decode_ms, prefill_ms, np.array([HOST_MS]), np.inf, 900.0, 2.0)
    later = float(found.ttft_mean[0] - found.ttft[0])
    assert later == pytest.approx((900.0 + float(found.first_wave[0])) / 5)
