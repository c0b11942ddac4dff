"""What of an experiment is replayed and benched, and how steps make up what a client sees."""

import contextlib
import json
import math

import numpy
import pytest

from harness.errors import UsageError
from harness.machine.monitor.base import Blind
from harness.run.device import OwnDevice
from harness.serving.experiment import kernels as benches
from harness.serving.experiment.predictions import prediction, replayed
from harness.serving.experiment.routing import decode_picks, prefill_picks
from harness.serving.experiment.schedule import DECODE, schedule
from harness.serving.experiment.schema import ObservedArm, Replays
from harness.serving.experiment.steps import changed_places, choices, decode_steps, prefill_step
from harness.serving.replay.schema import Replay
from harness.workers.environment import ALLOCATOR
from tests.support.serving_experiments import RANK, experiment


def test_what_of_its_steps_a_client_sees():
    """Played through by hand: four at once, one prefilled alone, then three together, 96 tokens each."""
    weights = schedule((1, 3), 4, 4, 96)
    assert weights.ttft == pytest.approx({1: 1.0, 3: 3 / 4})
    assert weights.tpot == pytest.approx({DECODE: 1 - 1 / (4 * 95), 3: 1 / (4 * 95)})
    assert weights.of("itl") == {DECODE: 1.0}
    assert schedule((4,), 4, 4, 20).ttft == pytest.approx({4: 1.0})
    # Two waves: all of the first wait for its prefill of one, and one of the second.
    assert schedule((1, 3, 1, 3), 8, 4, 9).ttft == pytest.approx({1: 5 / 8, 3: 6 / 8})

    for pattern in ((1, 2), (), (0, 4), (5,)):
        with pytest.raises(ValueError, match=r"not prefilled|never prefilled"):
            schedule(pattern, 4, 4, 8)


def test_recorded_picks_are_what_is_replayed(tmp_path):
    """Of a log of one layer, with a prefill of three tokens and two steps of two."""
    file, ids = tmp_path / "r.npz", [[0, 1], [2, 3], [4, 5], [2, 3], [4, 5], [0, 1], [0, 1]]
    numpy.savez(file, step=[0, 1, 2], layer=[0, 0, 0], tokens=[3, 2, 2], ids=ids, prefill_step=[9],
                prefill_layer=[0], prefill_counts=[[3, 2, 1]])  # fmt: skip
    one, other = (((0, 1), (0, 1)),), (((2, 3), (4, 5)),)
    assert decode_picks(file, 2, 50) == [one, other], "those with few experts first"
    assert decode_picks(file, 2, 1) == [other]
    # A prefill loads the experts as the logged one did, less what decoded with it.
    assert prefill_picks(file, 2, slack=1) == (((0, 1), (1, 2)),)
    assert prefill_picks(file, 2, slack=0) == prefill_picks(file, 9, slack=3) == ()
    with pytest.raises(UsageError, match="no decode step of 4 tokens"):
        decode_picks(file, 4, 1)
    with pytest.raises(UsageError, match="cannot read routing log"):
        decode_picks(tmp_path / "none.npz", 3, 1)


@pytest.mark.parametrize(("cell", "missing"), [
    ({}, ""),
    ({"low_us": None, "high_us": None},
     ": ok, one block gives no interval: a larger predict.serving_budget_s"),
    ({"status": "wrong", "reason": "far off", "time_us": None, "low_us": None, "high_us": None},
     ": wrong, far off"),
])  # fmt: skip
def test_the_suite_s_own_runs_are_summed_over_the_swapped_calls(tmp_path, monkeypatch, cell, missing):
    """Of a swap of the linears in a prefill; a kernel that was not timed leaves no prediction."""
    made, asked = experiment(tmp_path), []

    def ran(self, op, names, cases, budget_s, out):
        asked.append((op, names, len(cases)))
        cells = [
            {"case": f"{op} {case} fp8=e4m3fn", "impl": name, "status": "ok", "reason": "",
             "time_us": us, "low_us": us - 10, "high_us": us + 10} | cell
            for case in cases for name, us in (("vllm.amx", 1000.0), ("vllm.onednn", 2000.0))
        ]  # fmt: skip
        out.parent.mkdir(parents=True)
        out.write_text(json.dumps({"cells": cells}))

    monkeypatch.setattr(benches.LocalBench, "_run", ran)
    step, swap = prefill_step(made, RANK, ObservedArm(), tmp_path, 1), made.swap("linears")
    chosen = choices(made, swap, step)
    bench = benches.LocalBench(made.replay, "refuse", lambda line: None)
    found = bench.serving(step, *chosen, 1.0, tmp_path / "k")
    calls = len(changed_places(step, *chosen))
    assert (calls, asked) == (10, [("block_scale_gemm", {"vllm.amx", "vllm.onednn"}, 7)])
    if missing:
        assert found.change is None and found.missing[0].endswith(missing)
        weights = schedule((1, 3), 4, 4, 8)
        assert prediction("serving-mode", "itl", swap, {DECODE: None}, weights=weights, before=[]) is None
    else:
        assert found.change.ms == pytest.approx(1.0 * calls)
        assert 0 < found.change.high - found.change.ms < 0.014 * calls


def test_a_step_is_replayed_as_long_as_the_file_says_in_the_engines_environment(tmp_path, monkeypatch):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    plans, made = [], experiment(tmp_path)
    monkeypatch.setattr("harness.serving.replay.replay.replay", lambda plan, *_: plans.append(plan))
    own = contextlib.nullcontext(OwnDevice(None, Blind("a test")))
    monkeypatch.setattr("harness.run.device.own_device", lambda platform: own)
    told = {"device": "cpu", "budget_s": 7.0, "blocks": 5, "rounds": 11}
    bench = benches.LocalBench(made.replay.model_copy(update=told), "keep", lambda line: None, {"KMP_X": "1"})
    [decode] = decode_steps(made, RANK, ObservedArm(), tmp_path)
    assert decode.contexts == (32 + 11 // 2,) * 4  # as no run was seen
    for step in (decode, prefill_step(made, RANK, ObservedArm(), tmp_path, 3)):
        bench.replay(step, "linears", *choices(made, made.swap("linears"), step))
    # A prefill in all its blocks, however long it takes.
    assert [(p.budget_s, p.blocks, p.rounds) for p in plans] == [(7.0, 5, 11), (math.inf, 3, 1)]
    for plan in plans:
        assert (plan.threads, plan.disturbed, list(plan.arms)) == (1, "keep", ["base", "linears"])
        # The engine's allocator: not our workers', which keep freed memory.
        assert plan.environment == {**dict.fromkeys(ALLOCATOR), "KMP_X": "1"}


def test_blocks_of_several_replays_are_so_many_more():
    def one(change):
        samples = tuple(
            {"block": b, "round": r, "base": 0.099, "base again": 0.101, "x": 0.1 + change / 1e3}
            for b in (0, 1) for r in (0, 1)
        )  # fmt: skip
        return Replay(created="", command=(), step={}, launch="eager", threads=1, base="base", arms={},
                      samples=samples)  # fmt: skip

    found = replayed(Replays(replays=(one(2.0), one(4.0))), "x")  # both replays of the base are one
    assert found.ms == pytest.approx(3.0) and found.low < 2.0 < 4.0 < found.high
    assert replayed(Replays(replays=(one(2.0),)), "y") is None
