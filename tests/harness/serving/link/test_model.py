"""The serving link as a whole: calibration, changes, the inverse question, requests in a loop."""

import math
from dataclasses import replace

import numpy as np
import pytest
from harness.serving.link.simulation import OpenLoop, simulate
from harness.serving.link.uncertainty import World, interval, sources

from harness.errors import HarnessError
from harness.serving.ledger.prediction import KernelChange
from harness.serving.link import calibration, predictions
from harness.serving.link.calibration import PRIOR_SCATTER
from harness.serving.link.changes import parse_change
from harness.serving.link.closed_loop import ClosedLoop, closed_loop
from harness.serving.link.model import link
from harness.serving.link.predictions import outlook, predict
from harness.serving.link.times.tables import read_tables
from tests.support.serving_link_tables import US, written

LOAD = ClosedLoop(isl=1024, osl=1024, concurrency=32)


@pytest.fixture(scope="module")
def h200():
    return link()


@pytest.fixture
def tiny(tmp_path):
    return link("x1", tables=read_tables(written(tmp_path)))


def central(model, load, changes=()):
    return [float(one.tpot[0]) for one in model.serving(load, changes, World(count=1))]


def planted(model, gap_us=0.0, **constants):
    """What the fit finds in points that the model itself made with these constants."""
    world, points = World(count=1), []
    for point in model.calibration:
        steps = model.steps(point.load)
        drawn = world.draws(steps)
        drawn = replace(drawn, **{name: np.array([value]) for name, value in constants.items()})
        found = steps.serving(replace(drawn, gap_us=drawn.gap_us + gap_us))
        ttft, mean = float(found.ttft[0]), float(found.ttft_mean[0])
        points.append(replace(point, tpot_ms=float(found.tpot[0]), ttft_median_ms=ttft, ttft_ms=mean))
    fitted = replace(model, calibration=tuple(points), kept={}).fit(world)
    return fitted, {name: float(draws[0]) for name, draws in fitted.named.items()}


def test_constants_are_found_again(h200):
    """But for what the priors pull: 0.97, no slope, 0 ms more a step, 60 and 1300 ms, 1.6 times. Which of
    kappa and step it is the points hardly say; together they give what was planted."""
    fitted, found = planted(h200, gap_us=1500.0, kappa=0.7, host_ms=50.0, cold_ms=700.0, cold_prefill=2.4)
    assert found["kappa"] == pytest.approx(0.7, rel=0.15) and found["step_ms"] == pytest.approx(1.5, abs=1.5)
    assert abs(found["slope"]) < 0.04 and max(map(abs, fitted.residuals)) < 0.015
    assert found["host_ms"] == pytest.approx(50.0, rel=0.1)
    assert found["cold_ms"] == pytest.approx(700.0, rel=0.25) and 1.8 < found["cold_prefill"] < 2.5
    assert fitted.scatter < PRIOR_SCATTER
    fitted, found = planted(h200, kappa=0.97, slope=0.1, host_ms=60.0)
    assert found["slope"] == pytest.approx(0.1, abs=0.035) and max(map(abs, fitted.residuals)) < 0.025
    own, other = (model.fit(World(count=1)).scatter for model in (h200, link(kv="fp8")))
    assert other == pytest.approx(math.hypot(own, 0.1)), "of another cache they are less sure"


# Predictions


ONE = ClosedLoop(isl=100, osl=1000, concurrency=1)


@pytest.mark.parametrize(("text", "saved_us"), [
    ("mla_decode=2x", 61 * US["decode"] / 2),
    ("block_scale_gemm:qkv_a@decode=saved:4us", 61 * 4),
    *[(f"block_scale_gemm:qkv_a@decode=saved:{us}us", 61 * us) for us in (8.9, 9.1, 100)],  # of 10
])  # fmt: skip
def test_a_change_is_what_its_calls_save_times_kappa(tiny, text, saved_us):
    change, plain = parse_change(text), central(tiny, ONE)[0]
    before, after = central(tiny, ONE, [change])
    assert before - after == pytest.approx(calibration.ASSUMED_KAPPA * saved_us / 1e3, rel=1e-6)
    slower = any(
        "the server before was slower" in line for line in predict(tiny, ONE, [change])[0].assumptions
    )
    assert (after if slower else before) == pytest.approx(plain)
    assert slower == ("saved" in text and saved_us > 61 * 9)


def test_of_a_prompt_in_chunks_attention_is_the_whole_s_and_all_else_is_called_for_each(tiny):
    whole, chunked, chunk = (
        tiny.steps(ClosedLoop(isl, 100, 1, 1.0, prefill_tokens=most)).prefill
        for isl, most in ((4096, 4096), (4096, 1024), (1024, 1024))
    )
    for op, wanted in (("mha_prefill", whole.us), ("block_scale_gemm", 4 * chunk.us)):
        rows = whole.indices(op)
        assert rows and chunked.us[rows, 0] == pytest.approx(wanted[rows, 0])


def test_parts_sum_to_the_change_and_its_uncertainty_to_the_interval(h200):
    changes = [parse_change("fused_moe=1.3x(1.2..1.4)"), parse_change("mla_decode=2x")]
    one = predict(h200, LOAD, changes)[0]
    assert sum(part.value for part in one.parts) == pytest.approx(one.change, rel=1e-9)
    assert sum(s.share.value for s in outlook(h200, LOAD).shares) == pytest.approx(1.0)
    named = {part.what: part for part in one.uncertainty}
    assert set(named) <= set(sources(h200.steps(LOAD)))
    origins = {"MoE table": "table", "kappa": "calibration", "glue": "assumed"}
    assert {what: named[what].origin for what in origins} == origins
    assert one.uncertainty[0].what == "kernel change"  # the widest
    assert named["kernel change"].high - named["kernel change"].low <= one.high - one.low
    root = math.sqrt(sum((part.high - part.low) ** 2 for part in one.uncertainty))
    assert one.high - one.low == pytest.approx(root, rel=0.35)


def test_an_interval_comes_out_as_it_went_in(tiny):
    """A factor's 90 % interval, where nothing else is uncertain."""
    world = tiny.world(active=["kernel change"], count=4000)
    before, after = tiny.serving(ONE, [parse_change("mla_decode=2x(1.6..2.5)")], world)
    taken = calibration.ASSUMED_KAPPA * 61 * US["decode"] / 1e3
    expected = (-taken * (1 - 1 / 2.5), -taken * (1 - 1 / 1.6))
    assert interval(after.tpot - before.tpot) == pytest.approx(expected, rel=0.05)
    assert all(central in interval([central, *[1.0] * 99]) for central in (-9.0, 9.0)), "it lies inside"


@pytest.mark.parametrize("most", [31, 32])
def test_a_run_of_too_many_requests_is_not_simulated(tiny, monkeypatch, most):
    monkeypatch.setattr(predictions, "MOST_REQUESTS", most)
    one = outlook(tiny, ClosedLoop(100, 100, concurrency=16, waves=2))
    assert (one.ttft_p99 is None) == (one.tpot_one_by_one is None) == (most < 32)


def test_a_change_as_it_is_written():
    assert parse_change("block_scale_gemm:qkv_a@decode=saved:100us(90..110us)") == KernelChange(
        op="block_scale_gemm", part="qkv_a", phase="decode", saved_us=100, low=90, high=110
    )


# A closed loop's steady state and requests one by one: by hand, and each against the other


HOST_MS = 12.0
TOGETHER = np.arange(1, 65)


def decode_ms(batch):
    return 5.0 + 0.2 * batch


def prefill_ms(together):
    return 15.0 + 10.0 * together


def closed(load, decode=decode_ms, most=np.inf):
    return closed_loop(load, decode, prefill_ms, np.array([HOST_MS]), most)


def simulated(load, **how):
    return simulate(load, list(decode_ms(TOGETHER)), np.log(TOGETHER), prefill_ms(TOGETHER), HOST_MS, **how)


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


@pytest.mark.parametrize(("load", "most"), [
    *[(ClosedLoop(512, osl, concurrency, 0.5, prefill_tokens=4096, waves=40), np.inf)
      for concurrency in (1, 4, 48) for osl in (150, 600)],
    (ClosedLoop(1000, 300, 48, 0.5, prefill_tokens=1000, waves=30, recv_interval=10), np.inf),  # one or two
    (ClosedLoop(512, 300, 32, 0.5, prefill_tokens=4096, waves=30), 8),  # the others wait
    (ClosedLoop(512, 200, 16, 1.0, prefill_tokens=4096, waves=25), np.inf),  # one length stays in step
    (ClosedLoop(1000, 1000, 8, waves=40, recv_interval=31), np.inf),
])  # fmt: skip
def test_it_is_what_requests_one_by_one_come_to(load, most):
    found, run = closed(load, most=most), simulated(load, most=most)
    steady = slice(2 * load.concurrency, -2 * load.concurrency)
    assert float(found.tpot[0]) == pytest.approx(run.tpot[steady].mean(), rel=0.05)
    assert float(found.ttft[0]) == pytest.approx(run.ttft[steady].mean(), rel=0.15)
    assert float(found.output[0]) == pytest.approx(1e3 * run.tokens / run.duration, rel=0.1)
    short = replace(load, waves=2)  # half of its requests come at once and find the memory empty
    whole = simulated(short, most=most).ttft.mean()
    assert float(closed(short, most=most).ttft_mean[0]) == pytest.approx(
        whole, rel=0.32 if most == np.inf else 0.05
    )


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_cold_first_wave_is_a_part_of_the_mean(ratio):
    load = ClosedLoop(1000, 101, 8, ratio, waves=4)
    warm, cold = closed(load), closed_loop(load, decode_ms, prefill_ms, np.array([HOST_MS]), np.inf, 900, 2)
    assert cold.ttft_mean - warm.ttft_mean == pytest.approx((900 + warm.first_wave) / 4)


def test_what_does_not_settle_is_said_in_one_line():
    turn = iter(range(10**6))
    with pytest.raises(HarnessError, match=r"^[^\n]*concurrency 64 does not settle: after \d+ iterations"):
        closed(ClosedLoop(512, 300, 64), decode=lambda b: 5.0 + 4 * (next(turn) % 2) + 0 * b)


def test_few_requests_are_alone_and_bursts_make_a_longer_tail_and_a_ramp_a_longer_run():
    found = simulated(OpenLoop(1000, 101, 64, range_ratio=1.0, rate=0.01, requests=50), cold_ms=900.0)
    assert found.ttft == pytest.approx(np.full(50, HOST_MS + prefill_ms(1)))  # none is of a first wave
    assert simulated(ClosedLoop(100, 2, 4, range_ratio=0.0)).tpot == pytest.approx(np.full(40, decode_ms(4)))
    assert found.tpot == pytest.approx(np.full(50, decode_ms(1))) and not found.falls_behind
    load = OpenLoop(1000, 101, 64, rate=8.0, requests=1000)
    tails = [np.percentile(simulated(replace(load, burstiness=b)).ttft, 99) for b in (50.0, 0.2)]
    assert tails[0] < tails[1]
    assert simulated(replace(load, ramp_from=1.0)).duration > 1.5 * simulated(load).duration
