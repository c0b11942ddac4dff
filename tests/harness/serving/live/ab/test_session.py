"""Pairs of runs with a fake engine and client: what is recorded, rejected, made again, resumed, reported."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from harness.errors import UsageError
from harness.paths import ROOT
from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.checkpoint.directory import check_model
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine.launch import _room
from harness.serving.live.engine.servers import Servers
from tests.support.serving_processes import MARK, client_command, comes, engine_command, gone


def command(model, out, *more, mode="ok", client_mode="ok", pairs=2):
    """`serving run` with doubles, in the modes that they have."""
    return [
        *("serving", "run", "--model", str(model), "--out", str(out), "--engine", engine_command(mode)),
        *("--client", client_command(client_mode), "--arm", "a", "--arm", "b:X=1", "--isl", "16"),
        *("--osl", "32", "--pairs", str(pairs), "--keep-disturbed", *more),
    ]


@pytest.fixture
def run(here):
    return lambda *arguments, **named: here(*command(*arguments, **named))


@pytest.fixture
def beside(model_folder, tmp_path, monkeypatch):
    """The same in a process that can be killed, once it has recorded a line of a kind."""

    def begun(kind, **named):
        out = tmp_path / "out"
        monkeypatch.setenv(MARK, str(tmp_path))
        whole = [sys.executable, "-m", "harness", *command(model_folder, out, pairs=50, **named)]
        process = subprocess.Popen(whole, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert comes(lambda: (out / "live.jsonl").exists() and LiveJournal(out).of(kind))
        return process

    return begun


def test_pairs_are_mirrored_recorded_and_reported_and_a_rejected_run_alone_is_made_again(
    model_folder, tmp_path, run
):
    out, summary = tmp_path / "out", tmp_path / "summary.json"
    done = run(model_folder, out, "--json", str(summary), client_mode="race-once")
    assert done.returncode == 0, done.stderr
    lines = LiveJournal(out).lines()
    assert [(line["kind"], line.get("pair"), line.get("arm"), line.get("status")) for line in lines] == [
        ("plan", None, None, None), ("calibration", -1, "a", "ok"), ("run", 0, "a", "ok"),
        ("run", 0, "b", "rejected"), ("run", 0, "b", "ok"), ("pair", 0, None, None),
        ("run", 1, "b", "ok"), ("run", 1, "a", "ok"), ("pair", 1, None, None),
    ]  # fmt: skip
    runs = LiveJournal(out).of("run")
    first = runs[0]
    assert [run["seed"] for run in runs] == [1, 1, 1, 2, 2]
    assert first["prefill_pattern"] == [1, 3] and (out / first["result"]).exists()
    assert 9 < first["steady_itl_ms"] < 11
    assert first["decoding_batch"] == pytest.approx(4, rel=0.05)
    # The same seed gives the fake client the same step: nothing between the arms.
    effect = json.loads(summary.read_text())["effects"]["b"]["steady_itl_ms"]
    assert effect["change"] == pytest.approx(0, abs=1e-6) and effect["resolved"] is False
    assert "2 of 2 pairs, 5 runs" in done.stdout
    assert "1 not counted: prefilled 4, not 1+3" in done.stdout


def test_an_engine_that_dies_mid_run_fails_that_run_only(model_folder, tmp_path, run):
    done = run(model_folder, tmp_path / "out", "--prefill-pattern", "1+3", mode="dies-mid-run", pairs=1)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    runs = LiveJournal(tmp_path / "out").of("run")
    assert [line["status"] for line in runs] == ["failed"] * 4  # on a new engine each
    assert "ended with exit code 9" in runs[0]["reasons"][0] and "KV cache is gone" in runs[0]["reasons"][0]


def test_an_engine_is_warmed_up_with_requests_as_it_will_be_sent(tmp_path):
    """First uses of memory by long prompts are no part of a run that counts."""
    asked = []
    client = SimpleNamespace(run=lambda url, name, load, **_: asked.append(load))
    engine = SimpleNamespace(url="", launch=SimpleNamespace(model_name="m"))
    for load in (ClientLoad(1040, 128, concurrency=4, prompts=8), ClientLoad(16, 3, 4, prompts=2)):
        Servers(None, tmp_path, tmp_path, client, load)._warm_up(engine, tmp_path)
    assert asked == [ClientLoad(1040, 12, 4, 4), ClientLoad(16, 3, 2, 2)]


def test_mistakes_are_one_line(model_folder, tmp_path, run):
    (tmp_path / "file").write_text("")
    assert run(model_folder, tmp_path / "none yet", pairs=0, mode="dies-at-start").returncode == 0
    # None of them leaves anything that had to be resumed.
    for code, text, more, named in (
        (3, "the engine did not come up", (), {"mode": "dies-at-start"}),
        (3, "a could not be warmed up: the client ended with exit code 1", (), {"client_mode": "fails"}),
        (2, "cannot write to", (), {"out": tmp_path / "file" / "out"}),
        (2, "swap", ("--arm", "x:nothing=1"), {}),
        (2, "made by a plug-in of vLLM", ("--arm", "x:mla_decode=torch.naive"), {}),
        (2, "config.json: No such file", (), {"model": tmp_path}),
        (2, "no model directory", (), {"model": tmp_path / "none"}),
        (2, "write how many are prefilled together", ("--prefill-pattern", "many"), {}),
    ):
        places = {"model": model_folder, "out": tmp_path / "out"} | named
        done = run(places.pop("model"), places.pop("out"), *more, **places)
        assert done.returncode == code and text in done.stderr, done.stderr
        assert len([line for line in done.stderr.splitlines() if "rror" in line]) == 1


def test_kill_nine_loses_nothing_and_resume_goes_on(model_folder, tmp_path, run, beside, monkeypatch):
    out = tmp_path / "out"
    first = beside("pair")
    first.kill()
    first.communicate()
    finished = {line["pair"] for line in LiveJournal(out).of("pair")}
    assert finished and gone(str(tmp_path))
    with (out / "live.jsonl").open("ab") as file:
        file.write(b'{"kind": "run", "pa')  # as a write that was cut off leaves it
    more = max(finished) + 2
    done = run(model_folder, out, "--resume", pairs=more)
    assert done.returncode == 0, done.stderr
    assert [line["pair"] for line in LiveJournal(out).of("pair")] == list(range(more))
    assert f"{more} of {more} pairs" in done.stdout
    for text, options in (("already holds live runs", ()), ("another arms", ("--resume", "--arm", "c"))):
        done = run(model_folder, out, *options)
        assert done.returncode == 2 and text in done.stderr
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    done = run(model_folder, out, "--resume", pairs=more)
    assert done.returncode == 2 and "begun with another environment" in done.stderr


def test_an_interrupt_leaves_no_process(tmp_path, beside):
    process = beside("run", mode="spawns")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in errors
    assert gone(str(tmp_path))  # a guard that was just being started ends with our pipe


def test_a_model_that_lacks_a_shard_or_does_not_reach_is_refused(model_folder):
    config = {"architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 64}
    (model_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"70 tokens in a request; .* reaches 64: smaller --isl or --osl"):
        _room(model_folder, ClientLoad(60, 10, 4, 4))
    assert _room(model_folder, ClientLoad(54, 10, 4, 4))[:2] == ["--max-model-len", "64"]
    assert [_room(model_folder, ClientLoad(8, 8, n, n))[-1] for n in (4, 40)] == ["16", "40"]
    index = {"weight_map": {"a": "1.safetensors"}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"1\.safetensors is missing \(1 of 1"):
        check_model(model_folder)
    (model_folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json: Expecting"):
        check_model(model_folder)
