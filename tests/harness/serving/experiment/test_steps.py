"""What of an experiment is replayed and benched, and how steps make up what a client sees."""

from __future__ import annotations

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


@pytest.mark.parametrize("pattern", [(1, 2), (), (0, 4), (5,)])
def test_a_pattern_that_no_run_can_have_is_said(pattern):
    with pytest.raises(ValueError, match=r"not prefilled|never prefilled"):
        schedule(pattern, 4, 4, 8)


def log(path, batch=4, layers=2, steps=6, experts=8, topk=2):
    rng = numpy.random.default_rng(0)
    entries = [(s, layer, 64 if s == 0 else batch) for s in range(steps) for layer in range(layers)]
    ids = [rng.permuted(numpy.tile(numpy.arange(experts), (n, 1)), axis=1)[:, :topk] for _, _, n in entries]
    counts = numpy.zeros((layers, experts), int)
    for layer in range(layers):
        rows = rng.permuted(numpy.tile(numpy.arange(experts), (97, 1)), axis=1)[:, :topk]
        counts[layer] = numpy.bincount(rows.ravel(), minlength=experts)
    numpy.savez(
        path,
        step=[e[0] for e in entries],
        layer=[e[1] for e in entries],
        tokens=[e[2] for e in entries],
        ids=numpy.concatenate(ids),
        prefill_step=[99] * layers,
        prefill_layer=list(range(layers)),
        prefill_counts=counts,
    )
    return ids, counts


def test_recorded_picks_are_those_of_the_steps_with_the_batch(tmp_path):
    ids, _ = log(tmp_path / "r.npz")
    found = decode_picks(tmp_path / "r.npz", 4, 2)
    assert len(found) == 2 and found[0] != found[1]
    logged = [
        tuple(tuple(map(tuple, ids[2 * s + layer].tolist())) for layer in range(2)) for s in range(1, 6)
    ]
    assert all(one in logged for one in found)
    assert sorted(decode_picks(tmp_path / "r.npz", 4, 50)) == sorted(logged)
    with pytest.raises(UsageError, match="no decode step of 3 tokens"):
        decode_picks(tmp_path / "r.npz", 3, 1)
    with pytest.raises(UsageError, match="cannot read routing log"):
        decode_picks(tmp_path / "none.npz", 3, 1)


def test_a_prefill_loads_the_experts_as_the_logged_one_did(tmp_path):
    _, counts = log(tmp_path / "r.npz")
    found = prefill_picks(tmp_path / "r.npz", 96, slack=1)
    assert len(found) == 2
    for picks, wanted in zip(found, counts, strict=True):
        assert len(picks) == 96 and all(len(set(row)) == 2 for row in picks)
        loads = numpy.bincount(numpy.array(picks).ravel(), minlength=8)
        assert loads.sum() == 192 and numpy.abs(loads - wanted).sum() == 2
    assert prefill_picks(tmp_path / "r.npz", 96, slack=0) == ()
    assert prefill_picks(tmp_path / "r.npz", 500, slack=3) == ()


@pytest.fixture
def benched(tmp_path, monkeypatch):
    """What the suite's own runs make of a swap of the linears in a prefill, their cells as told: n-th
    implementation (from 0) -> what its cell says. Gives (served, what was asked, the calls changed)."""

    def bench(said):
        made = experiment(tmp_path)
        step = prefill_step(made, RANK, ObservedArm(), tmp_path, 1)
        asked = []

        def ran(self, op, names, cases, budget_s, out):
            asked.append((op, names, cases))
            cells = [
                {"case": f"{op} {case} fp8=e4m3fn", "impl": name, "status": "ok", "reason": ""} | said(i)
                for case in cases
                for i, name in enumerate(sorted(names))
            ]
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({"cells": cells}))

        monkeypatch.setattr(benches.LocalBench, "_run", ran)
        chosen = choices(made, made.swap("linears"), step)
        local = benches.LocalBench(made.replay, "refuse", lambda line: None)
        served = local.serving(step, *chosen, 1.0, tmp_path / "k")
        return served, asked, len(changed_places(step, *chosen))

    return bench


def test_the_suite_s_own_runs_are_summed_over_the_swapped_calls(benched):
    def said(i):
        time_us = 1000.0 * (1 + i)
        return {"time_us": time_us, "low_us": time_us - 10, "high_us": time_us + 10}

    found, [(op, names, cases)], calls = benched(said)
    assert op == "block_scale_gemm" and names == {"vllm.amx", "vllm.onednn"}
    assert calls == 10 and len(cases) == 7
    assert found.change.ms == pytest.approx(1.0 * calls)  # onednn is 2 ms, amx 1 ms
    assert 0 < found.change.high - found.change.ms < 0.014 * calls


def test_a_kernel_of_one_block_leaves_no_prediction(benched):
    found, _, _ = benched(lambda i: {"time_us": 1000.0 * (1 + i), "low_us": None, "high_us": None})
    assert found.change is None
    assert found.missing[0].endswith(": ok, one block gives no interval: a larger predict.serving_budget_s")


def test_a_kernel_that_was_not_timed_leaves_no_prediction(tmp_path, benched):
    untimed = dict.fromkeys(("time_us", "low_us", "high_us"))
    found, _, _ = benched(lambda i: {"status": "wrong", "reason": "far off", **untimed})
    assert found.change is None and found.missing[0].endswith(": wrong, far off")
    changes, weights = {DECODE: found.change}, schedule((1, 3), 4, 4, 8)
    swap = experiment(tmp_path).swap("linears")
    assert prediction("serving-mode", "itl", swap, changes, weights=weights, before=[]) is None


@pytest.mark.parametrize(("phase", "wanted"), [("prefill", (math.inf, 3, 1)), ("decode", (7.0, 5, 11))])
def test_a_step_is_replayed_as_long_as_the_file_says(tmp_path, monkeypatch, phase, wanted):
    """A prefill in all its blocks, however long it takes."""
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    plans = []
    monkeypatch.setattr("harness.serving.replay.replay.replay", lambda plan, *_: plans.append(plan))
    monkeypatch.setattr(
        "harness.run.device.own_device",
        lambda platform: contextlib.nullcontext(OwnDevice(platform, Blind("a test"))),
    )
    made = experiment(tmp_path)
    if phase == "prefill":
        step = prefill_step(made, RANK, ObservedArm(), tmp_path, 3)
    else:
        [step] = decode_steps(made, RANK, ObservedArm(), tmp_path)
        assert step.contexts == (32 + 11 // 2,) * 4  # as no run was seen
    told = {"device": "cpu", "budget_s": 7.0, "blocks": 5, "rounds": 11}
    bench = benches.LocalBench(made.replay.model_copy(update=told), "keep", lambda line: None, {"KMP_X": "1"})
    bench.replay(step, "linears", *choices(made, made.swap("linears"), step))
    [plan] = plans
    assert (plan.budget_s, plan.blocks, plan.rounds) == wanted and plan.threads == 1
    assert plan.disturbed == "keep" and list(plan.arms) == ["base", "linears"]
    # The engine's environment, and its allocator: not our workers', which keep freed memory.
    assert plan.environment == {**dict.fromkeys(ALLOCATOR), "KMP_X": "1"}


def test_blocks_of_several_replays_are_so_many_more(tmp_path):
    def one(change):
        samples = tuple(
            {"block": b, "round": r, "base": 0.099, "base again": 0.101, "x": 0.1 + change / 1e3}
            for b in (0, 1)
            for r in (0, 1)
        )  # both replays of the base are one
        return Replay(created="", command=(), step={}, launch="eager", threads=1, base="base", arms={},
                      samples=samples)  # fmt: skip

    found = replayed(Replays(replays=(one(2.0), one(4.0))), "x")
    assert found.ms == pytest.approx(3.0) and found.low < 2.0 < 4.0 < found.high
    assert replayed(Replays(replays=(one(2.0),)), "y") is None
