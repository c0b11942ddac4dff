"""Experiments: their files, their stages under kills, the order of prediction and run, what follows."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec

import numpy
import pytest
from click.testing import CliRunner

from harness.cli_serving import serving
from harness.errors import FAILED, OK, HarnessError, UsageError
from harness.serving.experiment import bench as benches
from harness.serving.experiment.command import outcome, plan
from harness.serving.experiment.experiment import LEDGER, Conduct
from harness.serving.experiment.live import paired
from harness.serving.experiment.predictions import prediction, replayed, require_earlier
from harness.serving.experiment.records import Paired, Replays, Run, Seen, Served
from harness.serving.experiment.routing import decode_picks, prefill_picks
from harness.serving.experiment.schedule import DECODE, schedule
from harness.serving.experiment.spec import FILES, Experiment, read_experiment
from harness.serving.experiment.stages import Stages
from harness.serving.experiment.steps import changed_places, choices, prefill_step
from harness.serving.ledger import Explained, Observed, Predicted, read, rows
from harness.serving.ledger_command import show as show_ledger
from harness.serving.replay.records import Arm, Replay, Timed
from harness.serving.verdicts import held
from shapes.models import model
from shapes.routing import Routing

R1 = model("deepseek-r1")
RANK = replace(R1, name="small", num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=8, n_group=8)
TEXT = """\
name = "tiny"

[load]
input_len = 32
output_len = 11
prompts = 4
concurrency = 4
pairs = 3

[replay]
routings = 1

[replay.base]
block_scale_gemm = "vllm.amx"
fused_moe = "vllm.amx"
mla_decode = "vllm.vec"
mha_prefill = "torch.naive"

[[swaps]]
name = "linears"
op = "block_scale_gemm"
swap = ["linears=bf16"]
replay = { block_scale_gemm = "vllm.onednn", "block_scale_gemm:kv_b" = "vllm.amx" }

[[swaps]]
name = "mla"
op = "mla_decode"
swap = ["mla_decode=torch"]
replay = { mla_decode = "vllm.amx" }
"""
STEP_MS = {"linears": {DECODE: 8.0, 1: 40.0, 3: 100.0}, "mla": {DECODE: 1.0, 1: 0.0, 3: 0.0}}


def experiment(tmp_path, text=TEXT) -> Experiment:
    path = tmp_path / "tiny.toml"
    path.write_text(text)
    return read_experiment(str(path))


class Killed(BaseException):
    """As control-C or the end of the process: nothing may catch it."""


class Doubles:
    """Bench and engine that know what each swap does, count what they are asked, and may be killed."""

    def __init__(self, folder, off=0.0, clock=None, kill_at=None):
        self.folder, self.off, self.asked, self.kill_at = folder, off, [], kill_at
        self.opened = 0
        self.clock = clock or (lambda: datetime.now(timezone.utc) + timedelta(seconds=1))

    def _ask(self, what):
        self.asked.append(what)
        if len(self.asked) == self.kill_at:
            raise Killed(what)

    @contextlib.contextmanager
    def live(self):
        self.opened += 1
        yield self

    def replay(self, step, name, base, chosen):
        kind = DECODE if step.phase == "decode" else len(step.contexts)
        self._ask(f"replay {name} {kind}")
        change = STEP_MS[name][kind] + self.off
        samples = tuple(
            {"block": b, "round": r, "base": 0.1, name: 0.1 + (change + 0.01 * (b + r % 2)) / 1e3}
            for b, r in itertools.product(range(2), range(3))
        )
        arms = {
            "base": Arm(chosen=dict(base), classes={"mla_decode": 5.0, "copy": 1.0}),
            name: Arm(
                chosen=dict(chosen), cold=change, warm=3 * change, classes={"mla_decode": 5.0 + change}
            ),
        }
        return Replay(
            created="",
            command=(),
            step={},
            launch="eager",
            threads=1,
            base="base",
            arms=arms,
            samples=samples,
        )

    def serving(self, step, base, chosen, budget_s, folder):
        self._ask("serving")
        return Served(change=Timed(ms=7.0, low=6.0, high=8.0))

    def look(self, swap, pattern):
        self._ask(f"look {swap.name if swap else 'base'}")
        runs = tuple(self._run("base", n, [1, 3] if n else [2, 2]) for n in (0, 1, 2))
        return Seen(
            runs=runs,
            classes={"mla_decode": 6.0 if swap else 5.0, "copy": 4.0 if swap else 1.0},
            prefill={"mla_decode": 90.0 if swap else 70.0},
        )

    def rest(self):
        pass

    def pairs(self, swap, pattern, predicted):
        self._ask(f"pairs {swap.name}")
        self.predicted = predicted
        runs = [(self._run("base", n, pattern), self._run(swap.name, n, pattern)) for n in range(3)]
        return Paired(begun=self.clock().isoformat(timespec="milliseconds"), pairs=tuple(runs))

    def _run(self, arm, number, pattern):
        step = STEP_MS.get(arm, {})
        decode = 60.0 + step.get(DECODE, 0.0) + 0.05 * number + (0.01 * number**2 if arm != "base" else 0.0)
        prefills = [1000.0 * size + step.get(size, 0.0) for size in pattern]
        ttft = prefills[0] + 0.75 * prefills[1]
        return Run(
            started="", itl=decode, ttft=ttft, tpot=decode + (prefills[1] - decode) / 40,
            pattern=tuple(pattern), prefills=tuple(prefills), kv_len=37.0,
        )  # fmt: skip


def conduct(tmp_path, doubles, text=TEXT, resume=False):
    made = experiment(tmp_path, text)
    folder = tmp_path / "out"
    stages = Stages.begin(folder, made, resume)
    return Conduct(made, RANK, folder, stages, doubles, doubles.live)


def ledger(tmp_path):
    return {row.id: row for row in rows(read(tmp_path / "out" / LEDGER))}


def test_predictions_stand_before_the_runs_and_follow_from_the_steps(tmp_path):
    doubles = Doubles(tmp_path)
    conduct(tmp_path, doubles).run()
    row = ledger(tmp_path)["tiny linears"]
    by = {(p.prediction.method, p.prediction.quantity): p.prediction for p in row.predictions}
    assert set(by) == set(
        itertools.product(
            ["replay", "isolated-cold", "isolated-warm", "serving-mode"], ["itl", "ttft", "tpot"]
        )
    )
    assert by["replay", "itl"].change == pytest.approx(8.0, abs=0.03)
    assert by["replay", "ttft"].change == pytest.approx(40 + 0.75 * 100, abs=0.05)
    assert by["replay", "tpot"].change == pytest.approx(8 + (100 - 8) / 40, abs=0.05)
    assert by["isolated-warm", "itl"].change == pytest.approx(24.0)
    assert by["serving-mode", "ttft"].change == pytest.approx(1.75 * 7)
    assert by["replay", "itl"].before == pytest.approx(60.075)
    assert by["replay", "ttft"].low < by["replay", "ttft"].change < by["replay", "ttft"].high
    assert sum(part.value for part in by["replay", "tpot"].parts) == by["replay", "tpot"].change
    entries = read(tmp_path / "out" / LEDGER)
    for name in ("tiny linears", "tiny mla"):
        kinds = [type(one) for one in entries if one.row == name]
        assert kinds.index(Observed) > max(i for i, kind in enumerate(kinds) if kind is Predicted)
    assert doubles.predicted == tuple(one.digest for one in ledger(tmp_path)["tiny mla"].predictions)
    verdicts = {(one.method, one.quantity): one for one in held(row)}
    assert verdicts["replay", "itl"].verdict == "explained" and verdicts["replay", "itl"].blind
    assert outcome(experiment(tmp_path), tmp_path / "out", ["linears", "mla"]) == OK


def test_a_step_without_the_swapped_call_is_not_replayed_and_changes_by_nothing(tmp_path):
    doubles = Doubles(tmp_path)
    conduct(tmp_path, doubles).run(["mla"])
    assert [one for one in doubles.asked if one.startswith("replay")] == ["replay mla 0"]
    row = ledger(tmp_path)["tiny mla"]
    ttft = next(p.prediction for p in row.predictions if p.prediction.quantity == "ttft")
    assert (ttft.change, ttft.low, ttft.high) == (0.0, 0.0, 0.0)


def test_a_change_under_the_threshold_is_not_resolved(tmp_path):
    conduct(tmp_path, Doubles(tmp_path)).run(["mla"])
    [itl] = [
        one for one in held(ledger(tmp_path)["tiny mla"]) if (one.method, one.quantity) == ("replay", "itl")
    ]
    assert itl.observed_low > 0 and itl.verdict == "not resolved"  # 1 ms of 60, though told from 0
    finer = TEXT + "\n[thresholds]\nresolved = 0.01\n"
    other = tmp_path / "finer"
    other.mkdir()
    conduct(other, Doubles(other), finer).run(["mla"])
    [itl] = [
        one for one in held(ledger(other)["tiny mla"]) if (one.method, one.quantity) == ("replay", "itl")
    ]
    assert itl.verdict == "explained"


def test_runs_before_their_prediction_are_refused(tmp_path):
    early = Doubles(tmp_path, clock=lambda: datetime.now(timezone.utc) - timedelta(hours=1))
    with pytest.raises(HarnessError, match=r"refused: runs began at .* before their prediction"):
        conduct(tmp_path, early).run(["mla"])
    assert not ledger(tmp_path)["tiny mla"].observations
    # Nor are they taken at a second try.
    with pytest.raises(HarnessError, match="refused"):
        conduct(tmp_path, Doubles(tmp_path), resume=True).run(["mla"])
    assert outcome(experiment(tmp_path), tmp_path / "out", ["mla"]) == FAILED


def test_the_order_is_of_times_and_not_of_texts():
    require_earlier(["2026-01-01T12:00:00.000+00:00"], "2026-01-01T11:00:00.001-02:00")
    with pytest.raises(HarnessError, match="refused"):
        require_earlier(["2026-01-01T12:00:00.000+00:00"], "2026-01-01T13:00:00.000+02:00")
    with pytest.raises(HarnessError, match="refused: runs without a prediction"):
        require_earlier([], "2026-01-01T13:00:00.000+02:00")


def stages_of(tmp_path):
    doubles = Doubles(tmp_path)
    conduct(tmp_path, doubles).run()
    return doubles.asked


def test_a_kill_at_any_stage_loses_nothing_finished(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    asked = stages_of(whole)
    wanted = {name: (len(row.predictions), len(row.observations)) for name, row in ledger(whole).items()}
    assert len(asked) > 8
    for at in range(1, len(asked) + 1):
        folder = tmp_path / f"killed-{at}"
        folder.mkdir()
        first = Doubles(folder, kill_at=at)
        with pytest.raises(Killed):
            conduct(folder, first).run()
        second = Doubles(folder)
        conduct(folder, second, resume=True).run()
        # What was under way is made again; all before it is not.
        assert first.asked[:-1] + second.asked == asked
        found = ledger(folder)
        assert {n: (len(r.predictions), len(r.observations)) for n, r in found.items()} == wanted


@pytest.mark.parametrize("keep", range(1, 30, 4))
def test_a_ledger_cut_short_is_filled_in(tmp_path, keep):
    conduct(tmp_path, Doubles(tmp_path)).run()
    path = tmp_path / "out" / LEDGER
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) > 29
    if not any('"kind":"observation"' in line for line in lines[:keep]):
        # Runs that were made before a prediction that is gone do not count for a new one.
        for one in (tmp_path / "out" / "stages").glob("*/pairs.json"):
            one.unlink()
    path.write_text("".join(lines[:keep]) + lines[keep][:20])
    before = ledger(tmp_path)
    again = Doubles(tmp_path)
    conduct(tmp_path, again, resume=True).run()
    after = ledger(tmp_path)
    assert {n: len(r.observations) for n, r in after.items()} == {"tiny linears": 3, "tiny mla": 3}
    assert all(
        after[name].predictions[: len(row.predictions)] == row.predictions for name, row in before.items()
    )
    assert not [one for one in again.asked if not one.startswith("pairs")]


def test_a_finished_experiment_starts_no_engine(tmp_path):
    conduct(tmp_path, Doubles(tmp_path)).run()
    again = Doubles(tmp_path)
    text = (tmp_path / "out" / LEDGER).read_text()
    conduct(tmp_path, again, resume=True).run()
    assert not again.asked and not again.opened
    assert (tmp_path / "out" / LEDGER).read_text() == text


def test_a_swap_of_which_pairs_are_missing_is_not_observed_yet(tmp_path):
    class Given(Doubles):
        def pairs(self, swap, pattern, predicted):
            found = super().pairs(swap, pattern, predicted)
            return (
                found.model_copy(update={"given_up": ("pair 2: disturbed",)}) if swap.name == "mla" else found
            )

    said = []
    first = conduct(tmp_path, Given(tmp_path))
    first.say = said.append
    first.run()
    assert said[-1] == "mla: pair 2: disturbed; --resume tries again"
    assert {n: len(r.observations) for n, r in ledger(tmp_path).items()} == {"tiny linears": 3, "tiny mla": 0}
    assert outcome(experiment(tmp_path), tmp_path / "out", ["linears", "mla"]) == FAILED
    again = Doubles(tmp_path)
    conduct(tmp_path, again, resume=True).run()
    assert again.asked == ["pairs mla"] and len(ledger(tmp_path)["tiny mla"].observations) == 3


def test_a_folder_is_of_one_experiment(tmp_path):
    conduct(tmp_path, Doubles(tmp_path)).run(["mla"])
    with pytest.raises(UsageError, match="already holds tiny: --resume goes on"):
        conduct(tmp_path, Doubles(tmp_path))
    with pytest.raises(UsageError, match="begun with another load"):
        conduct(tmp_path, Doubles(tmp_path), TEXT.replace("pairs = 3", "pairs = 4"), resume=True)
    with pytest.raises(UsageError, match="holds no experiment to resume"):
        Stages.begin(tmp_path / "nothing", experiment(tmp_path), resume=True)


def test_a_miss_is_explained_by_the_trace_of_the_swapped_arm(tmp_path):
    doubles = Doubles(tmp_path, off=4.0)
    conduct(tmp_path, doubles).run(["linears"])
    row = ledger(tmp_path)["tiny linears"]
    [one] = row.explanations
    assert isinstance(one, Explained) and doubles.asked[-1] == "look linears"
    assert "itl -3.99 ms" in one.text and "(-50%)" in one.text
    # Replayed: mla_decode +12, no copies left (-1); traced: mla_decode +1, copies +3.
    assert "mla_decode +12.00 and +1.00 ms" in one.text
    assert "block_scale_gemm and glue -1.00 and +3.00 ms" in one.text
    assert "of 1 +44 and +40 ms" in one.text and "of 3 +104 and +100 ms" in one.text
    assert outcome(experiment(tmp_path), tmp_path / "out", ["linears"]) == FAILED
    again = Doubles(tmp_path)
    conduct(tmp_path, again, resume=True).run(["linears"])
    assert not again.asked and len(ledger(tmp_path)["tiny linears"].explanations) == 1


def test_prefills_that_are_alike_are_set_beside_the_traced_ones(tmp_path):
    text = TEXT.replace("[replay]", "[rules]\nprefill_pattern = [1, 1, 1, 1]\n\n[replay]")
    conduct(tmp_path, Doubles(tmp_path, off=4.0), text).run(["linears"])
    [one] = ledger(tmp_path)["tiny linears"].explanations
    assert "prefill step by class, replayed and traced change: mla_decode +44.00 and +20.00 ms" in one.text


def test_an_engine_with_other_kernels_than_the_base_stands_for_is_refused(tmp_path):
    text = TEXT.replace("[load]", '[engine]\nkernels = ["_C::mla_decode_kvcache"]\n\n[load]')
    with pytest.raises(
        HarnessError, match=r"no kernel _C::mla_decode_kvcache: replay\.base stands for other"
    ):
        conduct(tmp_path, Doubles(tmp_path), text).run()
    assert not (tmp_path / "out" / LEDGER).exists()


# --- scheduling ---


def simulated(pattern, prompts, concurrency, outputs, prefill_s, decode_s):
    """TTFT and TPOT means of an engine that is played through in seconds, for numbers of its own."""
    clock, sent, tokens, groups = 0.0, [], {}, list(pattern)
    while True:
        busy = sum(len(tokens.get(i, ())) < outputs for i in range(len(sent)))
        while busy < concurrency and len(sent) < prompts:
            sent.append(clock)
            busy += 1
        waiting = [i for i in range(len(sent)) if i not in tokens]
        running = [i for i, times in tokens.items() if len(times) < outputs]
        new = waiting[: groups[0]] if groups and len(waiting) >= groups[0] else []
        if not new and not running:
            break
        clock += prefill_s[len(new)] if new else decode_s
        if new:
            groups.pop(0)
        for i in running:
            tokens[i].append(clock)
        for i in new:
            tokens[i] = [clock]
    assert len(tokens) == prompts
    ttft = sum(times[0] - sent[i] for i, times in tokens.items()) / prompts
    tpot = sum((times[-1] - times[0]) / (outputs - 1) for times in tokens.values()) / prompts
    return ttft, tpot


@pytest.mark.parametrize(
    ("pattern", "prompts", "concurrency", "outputs"),
    [((1, 3), 4, 4, 96), ((4,), 4, 4, 20), ((2, 2), 4, 4, 7), ((1, 1, 1, 1), 4, 4, 5),
     ((1, 3, 1, 3), 8, 4, 9), ((1,), 1, 1, 2)],
)  # fmt: skip
def test_weights_give_what_a_simulated_engine_shows(pattern, prompts, concurrency, outputs):
    weights = schedule(pattern, prompts, concurrency, outputs)
    prefill_s, decode_s = {n: 0.31 * n + 0.17 * n**2 for n in range(1, 9)}, 0.0613
    times = {DECODE: decode_s, **prefill_s}
    ttft, tpot = simulated(pattern, prompts, concurrency, outputs, prefill_s, decode_s)
    assert sum(w * times[k] for k, w in weights.ttft.items()) == pytest.approx(ttft)
    assert sum(w * times[k] for k, w in weights.tpot.items()) == pytest.approx(tpot)


def test_one_alone_then_the_others_together_is_the_formula_on_the_page():
    c, out = 4, 96
    weights = schedule((1, c - 1), c, c, out)
    assert weights.ttft == pytest.approx({1: 1.0, c - 1: (c - 1) / c})
    assert weights.tpot == pytest.approx({DECODE: 1 - 1 / (c * (out - 1)), c - 1: 1 / (c * (out - 1))})
    assert weights.of("itl") == {DECODE: 1.0}


@pytest.mark.parametrize("pattern", [(1, 2), (), (0, 4), (5,)])
def test_a_pattern_that_no_run_can_have_is_said(pattern):
    with pytest.raises(ValueError, match=r"not prefilled|never prefilled"):
        schedule(pattern, 4, 4, 8)


def test_prefills_larger_than_the_concurrency_are_never():
    with pytest.raises(ValueError, match="never prefilled 3 together"):
        schedule((3, 1), 4, 2, 8)


# --- what is replayed ---


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
    assert len(decode_picks(tmp_path / "r.npz", 4, 50)) == 5
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


def test_a_swap_is_taken_only_where_the_step_has_its_places(tmp_path):
    made = experiment(tmp_path)
    step = prefill_step(made, RANK, Seen(), tmp_path, 3)
    base, chosen = choices(made, made.swap("linears"), step)
    changed = changed_places(step, base, chosen)
    assert "kv_b" not in changed and changed.count("o_proj") == 2
    assert step.contexts == step.new == (32, 32, 32)
    assert not changed_places(step, *choices(made, made.swap("mla"), step))


def test_a_routing_pattern_hits_as_many_experts_as_were_recorded(tmp_path):
    sizes = {"tokens": 4, "experts": 256, "topk": 8}
    made = experiment(tmp_path)
    step = prefill_step(made, RANK, Seen(), tmp_path, 1)
    for pattern in ("balanced", "one"):
        picks = (Routing(**sizes, pattern=pattern).picks(),)
        step = replace(step, new=(1,) * 4, contexts=(1,) * 4, picks=picks)
        hit = Routing(**sizes, pattern=benches.like(step, sizes)).hit
        nearest = min(abs(Routing(**sizes, pattern=p).hit - len({e for r in picks[0] for e in r})) for p in benches.PATTERNS)  # fmt: skip  # noqa: E501
        assert abs(hit - len({e for r in picks[0] for e in r})) == nearest


def test_the_suite_s_own_runs_are_summed_over_the_swapped_calls(tmp_path, monkeypatch):
    made = experiment(tmp_path)
    step = prefill_step(made, RANK, Seen(), tmp_path, 1)
    asked = []

    def ran(self, op, names, cases, budget_s, out):
        asked.append((op, names, cases))
        cells = [
            {"case": f"{op} {case} fp8=e4m3fn", "impl": name, "status": "ok", "reason": "",
             "time_us": 1000.0 * (1 + i), "low_us": 1000.0 * (1 + i) - 10, "high_us": 1000.0 * (1 + i) + 10}
            for case in cases for i, name in enumerate(sorted(names))
        ]  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"cells": cells}))

    monkeypatch.setattr(benches.LocalBench, "_run", ran)
    bench = benches.LocalBench(made.replay, False, lambda line: None)
    found = bench.serving(step, *choices(made, made.swap("linears"), step), 1.0, tmp_path / "k")
    [(op, names, cases)] = asked
    assert op == "block_scale_gemm" and names == {"vllm.amx", "vllm.onednn"}
    calls = len(changed_places(step, *choices(made, made.swap("linears"), step)))
    assert calls == 10 and len(cases) == 7
    assert found.change.ms == pytest.approx(1.0 * calls)  # onednn is 2 ms, amx 1 ms
    assert 0 < found.change.high - found.change.ms < 0.014 * calls


def test_a_kernel_of_too_few_rounds_is_a_prediction_without_an_interval(tmp_path, monkeypatch):
    made = experiment(tmp_path)
    step = prefill_step(made, RANK, Seen(), tmp_path, 1)

    def ran(self, op, names, cases, budget_s, out):
        cells = [
            {"case": f"{op} {case} fp8=e4m3fn", "impl": name, "status": "ok", "reason": "",
             "time_us": 1000.0 * (1 + i), "low_us": None, "high_us": None}
            for case in cases for i, name in enumerate(sorted(names))
        ]  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"cells": cells}))

    monkeypatch.setattr(benches.LocalBench, "_run", ran)
    bench = benches.LocalBench(made.replay, False, lambda line: None)
    change = bench.serving(step, *choices(made, made.swap("linears"), step), 1.0, tmp_path / "k").change
    assert change.ms == pytest.approx(10.0) and (change.low, change.high) == (None, None)


def test_a_kernel_that_was_not_timed_leaves_no_prediction(tmp_path, monkeypatch):
    made = experiment(tmp_path)
    step = prefill_step(made, RANK, Seen(), tmp_path, 1)

    def ran(self, op, names, cases, budget_s, out):
        cells = [
            {"case": f"{op} {case}", "impl": name, "status": "wrong", "reason": "far off", "time_us": None}
            for case in cases for name in names
        ]  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"cells": cells}))

    monkeypatch.setattr(benches.LocalBench, "_run", ran)
    bench = benches.LocalBench(made.replay, False, lambda line: None)
    found = bench.serving(step, *choices(made, made.swap("linears"), step), 1.0, tmp_path / "k")
    assert found.change is None and "wrong far off" in found.missing[0]
    changes = {DECODE: found.change}
    weights = schedule((1, 3), 4, 4, 8)
    assert prediction("serving-mode", "itl", changes, weights, [], made.swap("linears")) is None


def test_a_prefill_is_replayed_in_all_its_blocks_however_long_it_takes(tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr("harness.serving.replay.replay.replay", lambda plan, *_: plans.append(plan))
    monkeypatch.setattr("harness.run_command.watched", lambda platform: contextlib.nullcontext((None, [])))
    made = experiment(tmp_path)
    step = prefill_step(made, RANK, Seen(), tmp_path, 3)
    settings = made.replay.model_copy(update={"device": "cpu"})
    bench = benches.LocalBench(settings, True, lambda line: None)
    bench.replay(step, "linears", *choices(made, made.swap("linears"), step))
    [plan] = plans
    assert (plan.budget_s, plan.blocks, plan.rounds, plan.threads) == (math.inf, 3, 1, 1)
    assert plan.keep_disturbed and list(plan.arms) == ["base", "linears"]


def test_blocks_of_several_replays_are_so_many_more(tmp_path):
    def one(change):
        samples = tuple(
            {"block": b, "round": r, "base": 0.1, "x": 0.1 + change / 1e3} for b in (0, 1) for r in (0, 1)
        )
        return Replay(created="", command=(), step={}, launch="eager", threads=1, base="base", arms={},
                      samples=samples)  # fmt: skip

    found = replayed(Replays(replays=(one(2.0), one(4.0))), "x")
    assert found.ms == pytest.approx(3.0) and found.low < 2.0 < 4.0 < found.high
    assert replayed(Replays(replays=(one(2.0),)), "y") is None


# --- the file ---


@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("*.toml")))
def test_files_that_come_with_the_harness_are_right(name):
    found = read_experiment(name)
    assert found.name == name and found.replay.threads == 1


def test_the_default_experiment_has_each_op_and_eight_pairs():
    found = read_experiment("cpu-default")
    assert {swap.op for swap in found.swaps} >= {"block_scale_gemm", "fused_moe", "mla_decode", "mha_prefill"}
    assert len(found.swaps) >= 5 and found.load.pairs == 8


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("pairs = 3", "pairs = 1", r"tiny\.toml, line 8: load\.pairs: .*greater than or equal to 2"),
        ("pairs = 3", 'pairs = "many"', r"line 8: load\.pairs: .*valid integer"),
        ("pairs = 3", "pears = 3", r"line 8: load\.pears: no such key; allowed: input_len, .*pairs"),
        ('op = "mla_decode"', 'op = "mla"', r"line 27: swaps\.1\.op: takes one of block_scale_gemm"),
        ('swap = ["mla_decode=torch"]', "", r"line 25: swaps\.1: says nothing that differs from the base"),
        ('swap = ["mla_decode=torch"]', 'swap = ["mla=torch"]', r"swaps\.mla\.swap: no 'mla=torch'; swaps: "),
        ('"vllm.onednn"', '"vllm.oneapi"', r"replay\.block_scale_gemm: no implementation 'vllm.oneapi'"),
        ('name = "mla"', 'name = "linears"', "two swaps are called linears"),
        ('name = "mla"', 'name = "base"', r"line 26: swaps\.1\.name: takes letters"),
        ('name = "tiny"', "", "name: is missing"),
        ('mla_decode = "vllm.vec"\n', "", r"replay\.base\.mla_decode is missing"),
        ("prompts = 4", "prompts = 2", r"load: 2 prompts are never 4 at once"),
        ("pairs = 3", "pairs = ", r"no TOML: .*line 8"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_one_line_that_says_where(tmp_path, old, new, said):
    assert old in TEXT
    with pytest.raises(UsageError, match=said) as error:
        experiment(tmp_path, TEXT.replace(old, new, 1))
    assert "\n" not in str(error.value)


def test_what_there_is_not_is_said_with_what_there_is(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read nothing: .*cpu-default, cpu-short"):
        read_experiment("nothing")
    with pytest.raises(UsageError, match="no swap 'x' in experiment tiny; swaps: linears, mla"):
        experiment(tmp_path).swap("x")


def test_a_dry_run_says_what_is_done(tmp_path):
    made = experiment(tmp_path)
    assert "done" not in plan(made, tmp_path / "out", ["mla"])
    conduct(tmp_path, Doubles(tmp_path)).run(["mla"])
    text = plan(made, tmp_path / "out", ["linears", "mla"])
    assert text.count("done") == 4 and text.count("to do") == 3


def test_the_command_says_what_it_would_do(tmp_path):
    answer = CliRunner().invoke(
        serving, ["experiment", "cpu-short", "--dry-run", "--pairs", "6", "--out", str(tmp_path)]
    )
    assert answer.exit_code == OK and "6 mirrored pairs" in answer.output


# --- the ledger's table ---


def test_the_methods_stand_beside_each_other(tmp_path, capsys):
    conduct(tmp_path, Doubles(tmp_path)).run()
    capsys.readouterr()
    show_ledger([str(tmp_path / "out")])
    text = capsys.readouterr().out
    line = next(one for one in text.splitlines() if one.startswith("tiny linears"))
    assert (
        "+8.02 ms (" in line and "+24 (+199%)" in line and "+7 (-13%)" in line and "explained, blind" in line
    )
    assert next(one for one in text.splitlines() if one.startswith("tiny mla")).endswith(
        "not resolved, blind"
    )
    # Of mla nothing is resolved.
    assert "replay: off by 0% in the median of 3" in text
    assert "warm: off by 200% in the median of 3, at worst 200% (tiny linears, " in text


def test_without_an_observation_the_table_has_the_predictions(tmp_path, capsys):
    doubles = Doubles(tmp_path, kill_at=8)
    with pytest.raises(Killed):
        conduct(tmp_path, doubles).run()
    capsys.readouterr()
    show_ledger([str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert "not observed yet" in text and "+24" in text and "off by" not in text


# --- the journal of live runs ---


def test_pairs_of_a_journal(tmp_path):
    def run(pair, arm, attempt, status="ok", **more):
        return {"kind": "run", "pair": pair, "arm": arm, "attempt": attempt, "status": status,
                "started": f"2026-01-01T00:0{pair}:0{attempt}+00:00", "reasons": [], "result": "runs/x.json",
                "steady_itl_ms": 10.0 * pair + attempt + 5 * (arm == "x"), "prefill_1_ms": 1.0,
                "prefill_2_ms": 2.0, "prefill_pattern": [1, 3]} | more  # fmt: skip

    lines = [
        {"kind": "plan"},
        run(0, "base", 0, "rejected", reasons=["prefilled 2+2"]),
        run(0, "base", 1),
        run(0, "x", 0),
        {"kind": "pair", "pair": 0, "attempts": {"base": 1, "x": 0}},
        run(1, "x", 0, "failed", reasons=["died"]),
        {"kind": "given_up", "pair": 1, "reasons": ["died"]},
    ]
    found = paired(lines, "base", "x", "live/x")
    assert found.begun == "2026-01-01T00:00:00+00:00"  # the rejected one too
    [(a, b)] = found.pairs
    assert a.prefills == (1.0, 2.0)
    assert (a.itl, b.itl, a.pattern, a.file) == (1.0, 5.0, (1, 3), "live/x/runs/x.json")
    assert found.given_up == ("pair 1: died",) and found.rejected == {"prefilled 2+2": 1, "died": 1}


# --- the whole of it, with a real engine ---


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM")
def test_one_swap_end_to_end_with_vllm(tmp_path):
    """The short experiment: predicted first, then run, on any machine; nothing is left running."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "harness", "serving", "experiment", "cpu-short", "--out", str(out)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (OK, FAILED), done.stderr[-2000:]
    print(f"{time.monotonic() - started:.0f} s\n{done.stdout}")
    [row] = rows(read(out / LEDGER))
    assert {p.prediction.method for p in row.predictions} == {"replay", "isolated-cold", "isolated-warm"}
    journal = [json.loads(line) for line in next(out.glob("live/*/live.jsonl")).read_text().splitlines()]
    runs = [line for line in journal if line["kind"] == "run"]
    written = max(datetime.fromisoformat(one.at) for one in row.predictions)
    assert min(datetime.fromisoformat(run["started"]) for run in runs) > written
    assert journal[0]["predicted"] == [one.digest for one in row.predictions]
    by = {one.observation.quantity: one.observation for one in row.observations}
    assert by["itl"].pairs == 4
    replayed_itl = next(h for h in held(row) if (h.method, h.quantity) == ("replay", "itl"))
    assert replayed_itl.blind
    if replayed_itl.verdict != "not resolved":  # a busy machine may hide it, and may not turn it round
        assert replayed_itl.predicted * replayed_itl.observed > 0
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(out) not in left
