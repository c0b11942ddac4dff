"""The serving link as a whole: calibration, predictions of changes, the inverse question, bounds."""

import math
from dataclasses import replace

import numpy as np
import pytest

from harness.errors import UsageError
from harness.serving.ledger.prediction import KernelChange
from harness.serving.link import calibration
from harness.serving.link.calibration import PRIOR_SCATTER
from harness.serving.link.changes import parse_change
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.inverse import INFINITE, needs, tpot
from harness.serving.link.model import link
from harness.serving.link.predictions import outlook, predict
from harness.serving.link.step_times import BESIDE_GB
from harness.serving.link.times.tables import read_tables
from harness.serving.link.uncertainty import World, interval, sources
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


# Predictions


ONE = ClosedLoop(isl=100, osl=1000, concurrency=1)


@pytest.mark.parametrize(("text", "saved_us"), [
    ("mla_decode=2x", 61 * US["decode"] / 2),
    ("block_scale_gemm:qkv_a@decode=saved:4us", 61 * 4),
    ("block_scale_gemm:qkv_a@decode=saved:100us", 61 * 100),  # more than it takes
])  # fmt: skip
def test_a_change_is_what_its_calls_save_times_kappa(tiny, text, saved_us):
    change, plain = parse_change(text), central(tiny, ONE)[0]
    before, after = central(tiny, ONE, [change])
    assert before - after == pytest.approx(calibration.ASSUMED_KAPPA * saved_us / 1e3, rel=1e-6)
    slower = any(
        "the server before was slower" in line for line in predict(tiny, ONE, [change])[0].assumptions
    )
    assert (after if slower else before) == pytest.approx(plain)
    assert slower == ("100us" in text)


def test_a_predicted_difference_is_the_difference_of_predictions(h200):
    """Of the model with the changed kernel's times written into its structure."""
    change = parse_change("fused_moe=1.3x")

    def faster(term):
        time = term.time if term.op != change.op else lambda load: term.time(load).times(1 / change.factor)
        return replace(term, time=time)

    whole = h200.structure
    other = replace(whole, **{p: tuple(map(faster, getattr(whole, p))) for p in ("decode", "prefill")})
    constants = h200.fitted(World(count=1)).named
    steps = replace(h200, structure=other, skewed=None, kept={}).steps(LOAD)
    drawn = World(count=1).draws(steps)
    drawn = replace(drawn, **{name: constants[name] for name in ("kappa", "slope", "host_ms")},
                    gap_us=drawn.gap_us + 1e3 * constants["step_ms"])  # fmt: skip
    found = steps.serving(drawn)
    names = {"output_throughput": "output", "decode_step": "decode"}
    for one in predict(h200, LOAD, [change]):
        expected = getattr(found, names.get(one.quantity, one.quantity))
        assert one.after == pytest.approx(float(expected[0]), rel=1e-5)
        assert one.change == pytest.approx(one.after - one.before, rel=1e-9)
        assert one.low <= one.change <= one.high


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


def test_a_prompt_in_chunks_calls_all_but_its_attention_once_a_chunk(tiny):
    loads = [ClosedLoop(8000, 100, 1, range_ratio=1.0, prefill_tokens=budget) for budget in (8000, 2000)]
    whole, chunked = (
        dict(zip([t.op for t in steps.prefill.terms], steps.prefill.us[:, 0], strict=True))
        for steps in map(tiny.steps, loads)
    )
    for op, times in (("mha_prefill", 1.0), ("block_scale_gemm", 4.0), ("all_reduce", 4.0)):
        assert chunked[op] / whole[op] == pytest.approx(times)


def test_the_cache_holds_no_more_than_memory_has(h200):
    load = ClosedLoop(isl=8192, osl=8192, concurrency=256)
    look = outlook(h200, load)
    room = 140 * 2**30 / 1e9 * 0.82 - h200.structure.weights_gb - BESIDE_GB
    assert look.capacity == pytest.approx(room * 1e9 / 70272 / load.mean_context)
    assert look.batch == pytest.approx(look.capacity, rel=1e-3)
    with pytest.raises(UsageError, match="no request of"):
        h200.steps(ClosedLoop(isl=2_000_000, osl=2, concurrency=1))


# The inverse question and bounds.


def test_the_factor_that_a_target_needs_reaches_it(h200):
    target = 20.0
    for need in needs(h200, LOAD, target):
        if need.factor is None:
            assert need.limit_ms > target
        else:
            assert tpot(h200, LOAD, need.ops, need.factor) == pytest.approx(target, rel=1e-4)
        assert need.limit_ms == pytest.approx(tpot(h200, LOAD, need.ops, INFINITE))
    by_ops = {need.ops: need for need in needs(h200, LOAD, target)}
    assert by_ops[("mha_prefill",)].factor is None
    together = by_ops[("block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill")]
    assert 1 < together.factor < by_ops[("fused_moe",)].factor
    assert all(need.factor == 1.0 for need in needs(h200, LOAD, 1000.0))  # which is met already


def test_exposure_of_a_trace_scales_an_op(tiny):
    seen = replace(tiny, exposure={("decode", "all_reduce"): 0.25}, kept={})
    world = seen.world(count=1)
    hidden = central(tiny, ONE)[0] - float(seen.serving(ONE, (), world)[0].tpot[0])
    assert hidden == pytest.approx(calibration.ASSUMED_KAPPA * 0.75 * 122 * US["reduce"] / 1e3, rel=1e-6)


def test_changes_as_they_are_written(h200):
    for text in ("mla_decode=2", "mla_decode=0x", "mla_decode=2x(3..4)", "fused_moe=saved:-1us", "=2x"):
        with pytest.raises(UsageError):
            parse_change(text)
    assert parse_change("fused_moe=1.3x(1.2..1.4)") == KernelChange(
        op="fused_moe", factor=1.3, low=1.2, high=1.4
    )
    assert parse_change("block_scale_gemm:qkv_a@decode=saved:100us(90..110us)") == KernelChange(
        op="block_scale_gemm", part="qkv_a", phase="decode", saved_us=100, low=90, high=110
    )
    with pytest.raises(UsageError, match=r"no kernel 'mla_decode' in a step of prefill"):
        central(h200, LOAD, [parse_change("mla_decode@prefill=2x")])
