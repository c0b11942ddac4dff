"""Experiments: their files, their stages under kills, the order of prediction and run, what follows."""

import math
import shutil
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from harness.cli.serving.ledger import print_ledgers
from harness.errors import HarnessError, UsageError
from harness.serving.experiment.engine import engine_live, paired
from harness.serving.experiment.predictions import require_earlier
from harness.serving.experiment.report import replays_held
from harness.serving.experiment.run import LEDGER
from harness.serving.experiment.spec import FILES, read_experiment
from harness.serving.experiment.stages import PLAN, Stages
from harness.serving.ledger.ledger import ObservationEntry, read
from harness.serving.ledger.report import ledger_lines
from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.live_engine import LiveEngine
from harness.serving.replay.schema import CONFIDENCE
from harness.statistics.intervals import mean_half_width
from tests.support.paths import SERVING_DATA
from tests.support.serving_experiments import TEXT, Doubles, Killed, conduct, experiment, ledger
from tests.support.serving_processes import client_command, engine_command


def test_predictions_stand_before_the_runs_and_follow_from_the_steps(tmp_path, capsys):
    doubles = Doubles(tmp_path)
    conduct(tmp_path, doubles).run()
    row = ledger(tmp_path)["tiny linears"]
    by = {(p.prediction.method, p.prediction.quantity): p.prediction for p in row.predictions}
    assert len(by) == 4 * 3 and ("isolated-cold", "tpot") in by
    for key, change in {
        ("replay", "itl"): 8.0, ("replay", "ttft"): 40 + 0.75 * 100, ("replay", "tpot"): 8 + (100 - 8) / 40,
        ("isolated-warm", "itl"): 24.0, ("serving-mode", "ttft"): 1.75 * 7,
    }.items():  # fmt: skip
        assert by[key].change == pytest.approx(change, abs=0.05), key
    assert by["replay", "itl"].before == pytest.approx(60.075)
    half = mean_half_width([0.0, 0.01], CONFIDENCE)  # of two blocks; one prefill and 3/4 of another
    for quantity, times in (("itl", 1.0), ("ttft", math.hypot(1, 0.75))):
        one = by["replay", quantity]
        assert [one.change - one.low, one.high - one.change] == pytest.approx([times * half] * 2)
    assert sum(part.value for part in by["replay", "tpot"].parts) == by["replay", "tpot"].change
    entries = read(tmp_path / "out" / LEDGER)
    for name in ("tiny linears", "tiny mla"):
        seen = [isinstance(one, ObservationEntry) for one in entries if one.row == name]
        assert seen[-3:] == [True] * 3 and not any(seen[:-3]), "predictions, then what was seen"
    verdicts = {(one.method, one.quantity): one for one in ledger_lines(row)}
    assert verdicts["replay", "itl"].verdict == "explained" and verdicts["replay", "itl"].blind
    assert replays_held(experiment(tmp_path), tmp_path / "out", ["linears", "mla"])
    print_ledgers([str(tmp_path / "out")])
    assert "replay: " in capsys.readouterr().out


ENGINE = '[engine]\nkernels = ["_C::mla_decode_kvcache"]\n\n[load]'


@pytest.mark.parametrize(("text", "said"), [
    (TEXT + "[rules]\nprefill_pattern = [1, 1, 1, 1]\n",
     r"rejected: the base prefills 1\+3 and 2\+2 .*_pattern is 1\+1\+1\+1$"),
    (TEXT.replace("[load]", ENGINE), r"no kernel _C::mla_decode_kvcache: replay\.base stands for other"),
])  # fmt: skip
def test_a_base_other_than_the_file_says_ends_it_before_anything_is_replayed(tmp_path, text, said):
    doubles = Doubles(tmp_path)
    with pytest.raises(HarnessError, match=said):
        conduct(tmp_path, doubles, text).run(["mla"])
    assert doubles.asked == ["look base"] and not (tmp_path / "out" / LEDGER).exists()


def test_runs_before_their_prediction_are_refused(tmp_path):
    early = Doubles(tmp_path, clock=lambda: datetime.now(timezone.utc) - timedelta(hours=1))
    with pytest.raises(HarnessError, match=r"refused: runs began at .* before their prediction"):
        conduct(tmp_path, early).run(["mla"])
    # Nor are they taken at a second try.
    with pytest.raises(HarnessError, match="refused"):
        conduct(tmp_path, Doubles(tmp_path), resume=True).run(["mla"])
    assert not ledger(tmp_path)["tiny mla"].observations
    assert not replays_held(experiment(tmp_path), tmp_path / "out", ["mla"])
    # The order is of times, and not of texts.
    require_earlier(["2026-01-01T12:00:00.000+00:00"], "2026-01-01T11:00:00.001-02:00")
    for predicted in (["2026-01-01T12:00:00.000+00:00"], []):
        with pytest.raises(HarnessError, match="refused"):
            require_earlier(predicted, "2026-01-01T13:00:00.000+01:00")


def test_a_kill_at_any_stage_loses_nothing_finished(tmp_path):
    def counts(folder):
        return {name: (len(row.predictions), len(row.observations)) for name, row in ledger(folder).items()}

    doubles = Doubles(tmp_path)
    conduct(tmp_path, doubles).run()
    for at in range(1, len(doubles.asked) + 1, 3):
        folder = tmp_path / f"killed-{at}"
        folder.mkdir()
        first, second = Doubles(folder, kill_at=at), Doubles(folder)
        with pytest.raises(Killed):
            conduct(folder, first).run()
        conduct(folder, second, resume=True).run()
        # What was under way is made again; all before it is not.
        assert first.asked[:-1] + second.asked == doubles.asked
        assert counts(folder) == counts(tmp_path)


def test_a_folder_is_of_one_experiment(tmp_path):
    conduct(tmp_path, Doubles(tmp_path)).run(["mla"])
    with pytest.raises(UsageError, match="already holds tiny: --resume goes on"):
        conduct(tmp_path, Doubles(tmp_path))
    with pytest.raises(UsageError, match="begun with another load"):
        conduct(tmp_path, Doubles(tmp_path), TEXT.replace("pairs = 3", "pairs = 4"), resume=True)
    with pytest.raises(UsageError, match="holds no experiment to resume"):
        Stages.begin(tmp_path / "nothing", experiment(tmp_path), resume=True)


def test_pairs_of_a_journal():
    def run(pair, arm, attempt, status="ok", **more):
        return {"kind": "run", "pair": pair, "arm": arm, "attempt": attempt, "status": status, "reasons": [],
                "started": f"2026-01-01T00:0{pair}:0{attempt}+00:00", "result": "runs/x.json",
                "steady_itl_ms": 10.0 * pair + attempt + 5 * (arm == "x"), "prefill_1_ms": 1.0,
                "prefill_2_ms": 2.0, "prefill_pattern": [1, 3]} | more  # fmt: skip

    found = paired([
        {"kind": "plan"}, run(0, "base", 0, "rejected", reasons=["prefilled 2+2"]), run(0, "base", 1),
        run(0, "x", 0), {"kind": "pair", "pair": 0, "attempts": {"base": 1, "x": 0}},
        run(1, "x", 0, "failed", reasons=["died"]), {"kind": "given_up", "pair": 1, "reasons": ["died"]},
    ], "base", "x", "live/x")  # fmt: skip
    assert found.begun == "2026-01-01T00:00:00+00:00"  # the rejected one too
    [(a, b)] = found.pairs
    assert (a.itl, b.itl, a.pattern, a.file) == (1.0, 5.0, (1, 3), "live/x/runs/x.json")
    assert a.prefills == (1.0, 2.0)
    assert found.given_up == ("pair 1: died",) and found.rejected == {"prefilled 2+2": 1, "died": 1}


def test_what_a_live_engine_is_asked(tmp_path, model_folder, monkeypatch):
    """With doubles of an engine and a client; with vLLM's it is tests/harness/serving/live/engine."""
    engine = f"""[engine]
kind = "{engine_command()}"
client = "{client_command()}"
[rules]
disturbed = false
least_steady = 1
[load]"""
    text = TEXT.replace("[load]", engine)
    made = experiment(
        tmp_path, text.replace('swap = ["mla_decode=torch.naive"]', 'environment = { X = "1" }')
    )
    trace, out = SERVING_DATA / "traces" / "vllm_cpu_deepseek_v3.json.gz", tmp_path / "out"
    (out / "observed").mkdir(parents=True)
    shutil.copy(trace, out / "observed")
    files = SimpleNamespace(trace=out / "observed" / trace.name, routing=None)
    monkeypatch.setattr(LiveEngine, "observe", lambda *_, **__: files)
    with engine_live(made, model_folder, out, print) as live:
        (out / "observed" / "base").mkdir()
        seen = live.look()
        found = live.pairs(made.swap("mla"), (1, 3), ("the digest of a prediction",))
    assert [run.pattern for run in seen.runs] == [(1, 3)] * 3 and seen.trace == f"observed/{trace.name}"
    assert seen.classes["block_scale_gemm"] > 0 and "_C::mla_decode_kvcache" in seen.kernels
    assert len(found.pairs) == 3 and not found.given_up
    for base, swapped in found.pairs:  # the same seed gives the client the same step
        assert base.itl == pytest.approx(swapped.itl) == pytest.approx(10, rel=0.1)
    [plan, *lines] = LiveJournal(out / "live/mla").lines()
    assert plan["predicted"] == ["the digest of a prediction"]
    assert found.begun == min(line["started"] for line in lines if line["kind"] == "run")


def test_a_miss_is_explained_by_the_trace_of_the_swapped_arm(tmp_path):
    doubles = Doubles(tmp_path, off=4.0)
    conduct(tmp_path, doubles).run(["linears"])
    [one] = ledger(tmp_path)["tiny linears"].explanations
    assert doubles.asked[-2:] == ["trace linears-base", "trace linears"]
    assert one.evidence == ("linears-base.gz", "linears.gz")
    # Replayed: +12, no copies left (-1); traced: 5 and 4 ms after 8 and 2 at half the speed.
    for text in ("itl -3.99 ms", "(-50%)", "the base's trace times 0.50", "of 1 +44 and +40 ms",
                 "block_scale_gemm and glue +11.00 and +4.00 ms", "of 3 +104 and +100 ms"):  # fmt: skip
        assert text in one.text
    assert "mla_decode" not in one.text, "the same but for the machine's pace"
    assert not replays_held(experiment(tmp_path), tmp_path / "out", ["linears"])


# Experiments as files: those that come with the harness, mistakes, what a dry run says


@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("*.toml")))
def test_files_that_come_with_the_harness_are_right(name):
    found = read_experiment(name)
    assert found.name == name and found.replay.threads == 1


@pytest.mark.parametrize(("old", "new", "said"), [
    ("pairs = 3", "pairs = 1", r"tiny\.toml: load\.pairs: .*greater than or equal to 2"),
    ("pairs = 3", "pairs = 1\nrenew = -1", r"load\.pairs: .*to 2 \(and 1 more\)"),
    ("pairs = 3", "pears = 3", r"tiny\.toml: load\.pears: no such key; allowed: input_len, .*pairs"),
    ('op = "mla_decode"', 'op = "mla"', r"tiny\.toml: swaps\.1\.op: takes one of block_scale_gemm"),
    ('"mla_decode=torch.naive"', '"mla=torch"', r"swaps\.mla\.swap: no 'mla=torch'; swaps: "),
    ('replay = { mla_decode = "vllm.amx" }', "glue = 7", r"swaps\.1\.glue"),
    ('"vllm.onednn"', '"vllm.oneapi"', r"replay\.block_scale_gemm: no implementation 'vllm.oneapi'"),
    ('name = "mla"', 'name = "linears"', "two swaps are called linears"),
    ('mla_decode = "vllm.vec"\n', "", r"replay\.base\.mla_decode is missing"),
    ("prompts = 4", "prompts = 2", r"load: 2 prompts are never 4 at once"),
    ("pairs = 3", "pairs = ", r"no TOML: .*line 7"),
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
    plan.write_text("[]")
    with pytest.raises(UsageError, match=r"experiment\.json: "):
        read_experiment(str(plan))
    with pytest.raises(UsageError, match=r"cannot read nothing: .*cpu-decode, cpu-default, cpu-long"):
        read_experiment("nothing")
    with pytest.raises(UsageError, match="no swap 'x' in experiment tiny; swaps: linears, mla"):
        experiment(tmp_path).swap("x")
