"""Experiments: their files, their stages under kills, the order of prediction and run, what follows."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest

from harness.errors import FAILED, OK, HarnessError, UsageError
from harness.serving.experiment.engine import paired
from harness.serving.experiment.predictions import require_earlier
from harness.serving.experiment.report import replays_held
from harness.serving.experiment.run import LEDGER
from harness.serving.experiment.spec import FILES
from harness.serving.experiment.stages import Stages
from harness.serving.ledger.ledger import ObservationEntry, PredictionEntry, read, rows
from harness.serving.ledger.residuals import residuals
from harness.serving.live.checkpoint.directory import default_model
from tests.support.serving_experiments import TEXT, Doubles, Killed, conduct, experiment, ledger
from tests.support.serving_processes import MARK, TINY, marked, needs_vllm


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
        require_earlier(["2026-01-01T12:00:00.000+00:00"], "2026-01-01T13:00:00.000+02:00")
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


@pytest.mark.parametrize("keep", [1, 9, 17, 29])
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


@pytest.mark.slow
@needs_vllm
def test_one_swap_end_to_end_with_vllm(tmp_path):
    """A short experiment of a tiny model: predicted first, then run; nothing is left running."""
    text = (FILES / "cpu-short.toml").read_text()
    for old, new in (
        ('model = "default"', f'model = "{default_model(TINY)}"'),
        ("budget_s = 20", "budget_s = 1"),
        ("output_len = 96", "output_len = 32"),
        ("pairs = 4", "pairs = 2"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "tiny.toml").write_text(text.replace("cpu-short", "tiny"))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "harness", "serving", "experiment", str(tmp_path / "tiny.toml")]
    environment = os.environ | {MARK: str(tmp_path)}
    done = subprocess.run(
        [*command, "--out", str(out)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (OK, FAILED), done.stderr[-2000:]
    [row] = rows(read(out / LEDGER))
    assert {p.prediction.method for p in row.predictions} == {"replay", "isolated-cold", "isolated-warm"}
    journal = [json.loads(line) for line in next(out.glob("live/*/live.jsonl")).read_text().splitlines()]
    runs = [line for line in journal if line["kind"] == "run"]
    written = max(datetime.fromisoformat(one.at) for one in row.predictions)
    assert min(datetime.fromisoformat(run["started"]) for run in runs) > written
    assert journal[0]["predicted"] == [one.digest for one in row.predictions]
    by = {one.observation.quantity: one.observation for one in row.observations}
    assert by["itl"].pairs in (1, 2)  # one may be given up
    assert next(h for h in residuals(row) if (h.method, h.quantity) == ("replay", "itl")).blind
    assert not marked(str(tmp_path))
