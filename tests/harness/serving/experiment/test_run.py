"""Experiments: their files, their stages under kills, the order of prediction and run, what follows."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cli.serving.ledger import print_ledgers
from harness.errors import HarnessError, UsageError
from harness.paths import ROOT
from harness.serving.experiment.engine import engine_live, paired
from harness.serving.experiment.explain import by_class
from harness.serving.experiment.predictions import require_earlier
from harness.serving.experiment.report import replays_held
from harness.serving.experiment.run import LEDGER
from harness.serving.experiment.schema import Replays
from harness.serving.experiment.spec import FILES, read_experiment
from harness.serving.experiment.stages import PLAN, Stages
from harness.serving.ledger.ledger import ExplanationEntry, ObservationEntry, PredictionEntry, read
from harness.serving.ledger.residuals import residuals
from harness.serving.live.live_engine import LiveEngine
from harness.serving.replay.schema import CONFIDENCE, Replay, ReplayArm
from harness.statistics.intervals import mean_half_width
from tests.support.paths import SERVING_DATA
from tests.support.serving_experiments import TEXT, Doubles, Killed, conduct, experiment, ledger


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
    half = mean_half_width([0.0, 0.01], CONFIDENCE)  # of two blocks; one prefill and 3/4 of another
    for quantity, times in (("itl", 1.0), ("ttft", math.hypot(1, 0.75))):
        one = by["replay", quantity]
        assert [one.change - one.low, one.high - one.change] == pytest.approx([times * half] * 2)
    assert sum(part.value for part in by["replay", "tpot"].parts) == by["replay", "tpot"].change
    entries = read(tmp_path / "out" / LEDGER)
    for name in ("tiny linears", "tiny mla"):
        kinds = [type(one) for one in entries if one.row == name]
        assert kinds.index(ObservationEntry) > max(
            i for i, kind in enumerate(kinds) if kind is PredictionEntry
        )
    assert doubles.predicted == tuple(one.digest for one in ledger(tmp_path)["tiny mla"].predictions)
    verdicts = {(one.method, one.quantity): one for one in residuals(row)}
    assert verdicts["replay", "itl"].verdict == "explained" and verdicts["replay", "itl"].blind
    assert replays_held(experiment(tmp_path), tmp_path / "out", ["linears", "mla"])


def test_a_pattern_that_the_base_never_has_is_said_before_anything_is_replayed(tmp_path):
    doubles, rules = Doubles(tmp_path), "[rules]\nprefill_pattern = {}\n"
    assert "[rules]" not in TEXT
    with pytest.raises(
        HarnessError, match=r"rejected: the base prefills 1\+3 and 2\+2 .*_pattern is 1\+1\+1\+1$"
    ):
        conduct(tmp_path, doubles, TEXT + rules.format([1, 1, 1, 1])).run(["mla"])
    assert doubles.asked == ["look base"]
    decode = '[predict]\nquantities = ["itl"]\n'  # which any pattern will do for
    for number, more in enumerate((rules.format([2, 2]), rules.format([1, 1, 1, 1]) + decode)):
        other = tmp_path / str(number)
        other.mkdir()
        conduct(other, Doubles(other), TEXT + more).run(["mla"])
        assert ledger(other)["tiny mla"].observations


def test_runs_before_their_prediction_are_refused(tmp_path):
    early = Doubles(tmp_path, clock=lambda: datetime.now(timezone.utc) - timedelta(hours=1))
    with pytest.raises(HarnessError, match=r"refused: runs began at .* before their prediction"):
        conduct(tmp_path, early).run(["mla"])
    assert not ledger(tmp_path)["tiny mla"].observations
    # Nor are they taken at a second try.
    with pytest.raises(HarnessError, match="refused"):
        conduct(tmp_path, Doubles(tmp_path), resume=True).run(["mla"])
    assert not replays_held(experiment(tmp_path), tmp_path / "out", ["mla"])


def test_the_order_is_of_times_and_not_of_texts():
    require_earlier(["2026-01-01T12:00:00.000+00:00"], "2026-01-01T11:00:00.001-02:00")
    with pytest.raises(HarnessError, match="refused"):
        require_earlier(["2026-01-01T12:00:00.000+00:00"], "2026-01-01T13:00:00.000+01:00")
    with pytest.raises(HarnessError, match="refused: runs without a prediction"):
        require_earlier([], "2026-01-01T13:00:00.000+02:00")


def test_a_kill_at_any_stage_loses_nothing_finished(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    doubles = Doubles(whole)
    conduct(whole, doubles).run()
    asked = doubles.asked
    wanted = {name: (len(row.predictions), len(row.observations)) for name, row in ledger(whole).items()}
    assert len(asked) > 8
    for at in range(1, len(asked) + 1, 3):
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
    assert not replays_held(experiment(tmp_path), tmp_path / "out", ["linears", "mla"])
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


def test_an_engine_with_other_kernels_than_the_base_stands_for_is_refused(tmp_path):
    text = TEXT.replace("[load]", '[engine]\nkernels = ["_C::mla_decode_kvcache"]\n\n[load]')
    with pytest.raises(
        HarnessError, match=r"no kernel _C::mla_decode_kvcache: replay\.base stands for other"
    ):
        conduct(tmp_path, Doubles(tmp_path), text).run()
    assert not (tmp_path / "out" / LEDGER).exists()


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


def test_what_a_live_engine_is_asked(tmp_path, model_folder, monkeypatch):
    """With doubles of an engine and a client; with vLLM's it is tests/harness/serving/live/engine."""
    doubles = f"{sys.executable} {ROOT}/tests/doubles"
    lines = [
        f'[engine]\nkind = "{doubles}/fake_engine.py ok {{port}} {{name}}"',
        f'client = "{doubles}/fake_client.py {{url}} {{result}} {{seed}} {{concurrency}} {{output_len}}"',
        "[rules]\ndisturbed = false\nleast_steady = 1\n\n[load]",
    ]
    text = TEXT.replace("[load]", "\n".join(lines))
    made = experiment(
        tmp_path, text.replace('swap = ["mla_decode=torch.naive"]', 'environment = { X = "1" }')
    )
    out = tmp_path / "out"

    def observe(self, arm, at, **asked):
        at.mkdir(parents=True)
        trace = shutil.copy(SERVING_DATA / "traces" / "vllm_cpu_deepseek_v3.json.gz", at)
        return SimpleNamespace(trace=Path(trace), routing=None)

    monkeypatch.setattr(LiveEngine, "observe", observe)
    with engine_live(made, model_folder, out, print) as live:
        seen = live.look()
        found = live.pairs(made.swap("mla"), (1, 3), ("the digest of a prediction",))
    assert [run.pattern for run in seen.runs] == [(1, 3)] * 3 and seen.trace.startswith("observed/base/")
    assert seen.classes["block_scale_gemm"] > 0 and "_C::mla_decode_kvcache" in seen.kernels
    assert len(found.pairs) == 3 and not found.given_up
    for base, swapped in found.pairs:  # the same seed gives the client the same step
        assert base.itl == pytest.approx(swapped.itl) == pytest.approx(10, rel=0.1)
    journal = [json.loads(line) for line in (out / "live/mla/live.jsonl").read_text().splitlines()]
    assert journal[0]["predicted"] == ["the digest of a prediction"]
    assert found.begun == min(line["started"] for line in journal if line["kind"] == "run")


# What is said of an experiment: its misses explained by the trace, its methods beside each other


def test_a_miss_is_explained_by_the_trace_of_the_swapped_arm(tmp_path):
    doubles = Doubles(tmp_path, off=4.0)
    conduct(tmp_path, doubles).run(["linears"])
    row = ledger(tmp_path)["tiny linears"]
    [one] = row.explanations
    assert isinstance(one, ExplanationEntry) and doubles.asked[-2:] == ["trace linears-base", "trace linears"]
    assert one.evidence == ("linears-base.gz", "linears.gz")
    assert "itl -3.99 ms" in one.text and "(-50%)" in one.text
    # Replayed: +12, no copies left (-1); traced: 5 and 4 ms after 8 and 2 at half the speed.
    assert "the base's trace times 0.50" in one.text
    assert "block_scale_gemm and glue +11.00 and +4.00 ms" in one.text
    assert "mla_decode" not in one.text, "the same but for the machine's pace"
    assert "of 1 +44 and +40 ms" in one.text and "of 3 +104 and +100 ms" in one.text
    assert not replays_held(experiment(tmp_path), tmp_path / "out", ["linears"])
    again = Doubles(tmp_path)
    conduct(tmp_path, again, resume=True).run(["linears"])
    assert not again.asked and len(ledger(tmp_path)["tiny linears"].explanations) == 1


def test_a_kernel_swapped_in_is_no_other_op_s_for_its_name(tmp_path):
    """Torch's products for MLA decode stand in a trace as absorbed products."""
    arms = {
        "base": ReplayArm(chosen={}, classes={"mla_decode": 5.0, "absorbed_bmm": 3.0, "fused_moe": 9.0}),
        "mla": ReplayArm(chosen={}, classes={"mla_decode": 9.0, "absorbed_bmm": 3.0, "fused_moe": 9.5}),
    }
    replay = Replay(created="", command=(), step={}, launch="eager", threads=1, base="base", arms=arms,
                    samples=())  # fmt: skip
    traced = {"absorbed_bmm": 12.0, "fused_moe": 9.0}
    found = by_class(
        experiment(tmp_path).swap("mla"), Replays(replays=(replay,)), arms["base"].classes, traced
    )
    assert found == [
        ("fused_moe", pytest.approx(0.5), pytest.approx(0.0)),
        ("mla_decode and glue", pytest.approx(4.0), pytest.approx(4.0)),
    ]


def test_the_methods_stand_beside_each_other(tmp_path, capsys):
    conduct(tmp_path, Doubles(tmp_path)).run()
    capsys.readouterr()
    print_ledgers([str(tmp_path / "out")])
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


# Experiments as files: those that come with the harness, mistakes, what a dry run says


@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("*.toml")))
def test_files_that_come_with_the_harness_are_right(name):
    found = read_experiment(name)
    assert found.name == name and found.replay.threads == 1


@pytest.mark.parametrize(("old", "new", "said"), [
    ("pairs = 3", "pairs = 1", r"tiny\.toml: load\.pairs: .*greater than or equal to 2"),
    ("pairs = 3", "pairs = 1\nrenew = -1", r"load\.pairs: .*to 2 \(and 1 more\)"),
    ("pairs = 3", 'pairs = "many"', r"tiny\.toml: load\.pairs: .*valid integer"),
    ("pairs = 3", "pears = 3", r"tiny\.toml: load\.pears: no such key; allowed: input_len, .*pairs"),
    ('op = "mla_decode"', 'op = "mla"', r"tiny\.toml: swaps\.1\.op: takes one of block_scale_gemm"),
    ('swap = ["mla_decode=torch.naive"]', "", r"tiny\.toml: swaps\.1: says nothing that differs"),
    ('"mla_decode=torch.naive"', '"mla=torch"', r"swaps\.mla\.swap: no 'mla=torch'; swaps: "),
    ('replay = { mla_decode = "vllm.amx" }', "glue = 7", r"swaps\.1\.glue"),
    ('"vllm.onednn"', '"vllm.oneapi"', r"replay\.block_scale_gemm: no implementation 'vllm.oneapi'"),
    ('name = "mla"', 'name = "linears"', "two swaps are called linears"),
    ('name = "mla"', 'name = "base"', r"tiny\.toml: swaps\.1\.name: takes letters"),
    ('name = "tiny"', "", "name: is missing"),
    ('mla_decode = "vllm.vec"\n', "", r"replay\.base\.mla_decode is missing"),
    ("prompts = 4", "prompts = 2", r"load: 2 prompts are never 4 at once"),
    ("pairs = 3", "pairs = ", r"no TOML: .*line 8"),
])  # fmt: skip
def test_a_mistake_in_the_file_is_one_line_that_says_where(tmp_path, old, new, said):
    assert old in TEXT
    with pytest.raises(UsageError, match=said) as error:
        experiment(tmp_path, TEXT.replace(old, new, 1))
    assert "\n" not in str(error.value)


def test_a_recorded_experiment_can_be_made_again(tmp_path):
    asked = experiment(tmp_path).with_pairs(5)
    Stages.begin(tmp_path / "done", asked, resume=False)
    plan = tmp_path / "done" / PLAN
    assert read_experiment(str(plan)) == asked
    for text in ("{", "[]"):
        plan.write_text(text)
        with pytest.raises(UsageError, match=r"experiment\.json: ") as error:
            read_experiment(str(plan))
        assert "\n" not in str(error.value)


def test_what_there_is_not_is_said_with_what_there_is(tmp_path):
    with pytest.raises(
        UsageError, match=r"cannot read nothing: .*cpu-decode, cpu-default, cpu-long, cpu-short"
    ):
        read_experiment("nothing")
    with pytest.raises(UsageError, match="no swap 'x' in experiment tiny; swaps: linears, mla"):
        experiment(tmp_path).swap("x")
