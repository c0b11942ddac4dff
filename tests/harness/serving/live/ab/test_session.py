"""Pairs of runs with a fake engine and client: what is recorded, rejected, made again, resumed, reported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from harness.errors import UsageError
from harness.files import JournalFull
from harness.paths import ROOT
from harness.serving.experiment.run import LiveWhenAsked
from harness.serving.live import live_engine as module
from harness.serving.live.ab.journal import LiveJournal
from harness.serving.live.checkpoint.directory import check_model
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine.launch import _room
from harness.serving.live.engine.servers import Servers
from harness.serving.live.live_engine import LiveSetup, live_engine
from tests.support.serving_experiments import Doubles
from tests.support.serving_processes import comes, gone

ENGINE, CLIENT = (ROOT / "tests" / "doubles" / f"fake_{name}.py" for name in ("engine", "client"))


def command(model, out, *more, mode="ok", client_mode="10", pairs=2):
    """`serving run` with doubles; an arm's environment may give the client another mode."""
    parts = "{url} {result} {seed} {concurrency} {output_len}"
    return [
        *(sys.executable, "-m", "harness", "serving", "run", "--model", str(model), "--out", str(out)),
        *("--engine", f"{sys.executable} {ENGINE} {mode} {{port}} {{name}}"),
        *("--client", f"{sys.executable} {CLIENT} {parts} {client_mode}"),
        *("--isl", "16", "--osl", "32", "--pairs", str(pairs), "--keep-disturbed", *more),
    ]


@pytest.fixture
def run(here):
    """In this process, which starts sooner."""
    return lambda *arguments, **named: here(*command(*arguments, **named)[3:])


def kinds(out):
    return [(line["kind"], line.get("pair"), line.get("arm")) for line in LiveJournal(out).lines()]


def has(out, kind):
    return (out / "live.jsonl").exists() and bool(LiveJournal(out).of(kind))


def test_pairs_are_mirrored_recorded_and_reported(model_folder, tmp_path, run):
    out, summary = tmp_path / "out", tmp_path / "summary.json"
    done = run(model_folder, out, "--arm", "a", "--arm", "b:X=1", "--json", str(summary))
    assert done.returncode == 0, done.stderr
    assert kinds(out) == [
        ("plan", None, None),
        ("calibration", -1, "a"),
        ("run", 0, "a"),
        ("run", 0, "b"),
        ("pair", 0, None),
        ("run", 1, "b"),
        ("run", 1, "a"),
        ("pair", 1, None),
    ]
    runs = LiveJournal(out).of("run")
    assert {run["status"] for run in runs} == {"ok"}
    assert [run["seed"] for run in runs] == [1, 1, 2, 2]
    assert runs[0]["prefill_pattern"] == [1, 3]
    assert 9 < runs[0]["steady_itl_ms"] < 11
    assert runs[0]["decoding_batch"] == pytest.approx(4, rel=0.05)
    assert (out / runs[0]["result"]).exists()
    found = json.loads(summary.read_text())
    # The same seed gives the fake client the same step: nothing between the arms.
    assert found["effects"]["b"]["steady_itl_ms"]["change"] == pytest.approx(0, abs=1e-6)
    assert found["effects"]["b"]["steady_itl_ms"]["resolved"] is False
    assert "2 of 2 pairs, 4 runs" in done.stdout


def test_a_rejected_run_alone_is_made_again_at_once(model_folder, tmp_path, run):
    out = tmp_path / "out"
    done = run(model_folder, out, "--arm", "a", "--arm", "b:X=1", client_mode="race-once")
    assert done.returncode == 0, done.stderr
    runs = [(line["pair"], line["arm"], line["status"]) for line in LiveJournal(out).of("run")]
    assert runs == [(0, "a", "ok"), (0, "b", "rejected"), (0, "b", "ok"), (1, "b", "ok"), (1, "a", "ok")]
    assert "2 of 2 pairs, 5 runs" in done.stdout
    assert "1 not counted: prefilled 4, not 1+3" in done.stdout


def test_an_engine_that_dies_mid_run_fails_that_run_only(model_folder, tmp_path, run):
    out = tmp_path / "out"
    done = run(model_folder, out, mode="dies-mid-run", pairs=1)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    runs = LiveJournal(out).of("run")
    assert [line["status"] for line in runs] == ["failed"] * 4  # on a new engine each
    assert "ended with exit code 9" in runs[0]["reasons"][0] and "KV cache is gone" in runs[0]["reasons"][0]


def test_an_engine_is_warmed_up_with_requests_as_it_will_be_sent(tmp_path):
    """First uses of memory by long prompts are no part of a run that counts."""
    asked = []
    client = SimpleNamespace(run=lambda url, name, load, **_: asked.append(load))
    engine = SimpleNamespace(url="", launch=SimpleNamespace(model_name="m"))
    for load in (
        ClientLoad(1040, 128, concurrency=4, prompts=8),
        ClientLoad(16, 3, concurrency=4, prompts=2),
    ):
        Servers(None, tmp_path, tmp_path, client, load)._warm_up(engine, tmp_path)
    assert asked == [ClientLoad(1040, 12, 4, 4), ClientLoad(16, 3, 2, 2)]


def test_mistakes_are_one_line(model_folder, tmp_path, run):
    out = tmp_path / "out"  # none of them leaves anything that had to be resumed

    def fails(code, text, *more, where=model_folder, out=out, **named):
        done = run(where, out, *more, **named)
        assert done.returncode == code, done.stderr
        assert text in done.stderr
        assert "Traceback" not in done.stderr
        assert len([line for line in done.stderr.splitlines() if "rror" in line]) == 1

    fails(3, "the engine did not come up", mode="dies-at-start")
    fails(3, "base could not be warmed up: the client ended with exit code 1", client_mode="fails")
    (tmp_path / "file").write_text("")
    fails(2, "cannot write to", out=tmp_path / "file" / "out")
    fails(2, "swap", "--arm", "x:nothing=1")
    fails(2, "made by a plug-in of vLLM", "--arm", "x:mla_decode=torch.naive")
    fails(2, "config.json: No such file", where=tmp_path)
    fails(2, "no model directory", where=tmp_path / "none")
    fails(2, "write how many are prefilled together", "--prefill-pattern", "many")


def test_kill_nine_loses_nothing_and_resume_goes_on(model_folder, tmp_path, run, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("KERNEL_BENCH_TEST", str(tmp_path))
    first = subprocess.Popen(
        command(model_folder, out, "--arm", "a", "--arm", "b:X=1", pairs=50),
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    assert comes(lambda: has(out, "pair"))
    first.kill()
    first.wait()
    finished = {line["pair"] for line in LiveJournal(out).of("pair")}
    assert finished
    assert gone(str(tmp_path))
    with (out / "live.jsonl").open("ab") as file:
        file.write(b'{"kind": "run", "pa')  # as a write that was cut off leaves it
    more = max(finished) + 2
    done = run(model_folder, out, "--arm", "a", "--arm", "b:X=1", "--resume", pairs=more)
    assert done.returncode == 0, done.stderr
    pairs = [line["pair"] for line in LiveJournal(out).of("pair")]
    assert pairs == list(range(more))
    assert f"{more} of {more} pairs" in done.stdout
    refused = run(model_folder, out, "--arm", "a", "--arm", "c", "--resume")
    assert refused.returncode == 2
    assert "was begun with another arms" in refused.stderr
    again = run(model_folder, out, "--arm", "a")
    assert again.returncode == 2
    assert "already holds live runs" in again.stderr
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    done = run(model_folder, out, "--arm", "a", "--arm", "b:X=1", "--resume", pairs=more)
    assert done.returncode == 2 and "begun with another environment" in done.stderr


def test_an_interrupt_leaves_no_process(model_folder, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(model_folder, out, mode="spawns", pairs=50),
        cwd=ROOT,
        env=dict(os.environ) | {"KERNEL_BENCH_TEST": str(tmp_path)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert comes(lambda: has(out, "run"))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert gone(str(tmp_path))  # a guard that was just being started ends with our pipe


def test_a_full_disk_is_one_line_and_keeps_what_was_written(tmp_path, monkeypatch):
    journal = LiveJournal.create(tmp_path / "out", {"pairs": 1})
    before = journal.path.read_bytes()
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(JournalFull, match=r"cannot write to .*live\.jsonl: No space left on device"):
        journal.append("run", {"pair": 0})
    assert journal.path.read_bytes() == before


def _full(descriptor):
    raise OSError(28, "No space left on device")


def test_a_model_directory_with_a_shard_missing_is_refused(model_folder):
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (model_folder / "1.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"2\.safetensors is missing \(1 of 2"):
        check_model(model_folder)
    (model_folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json: Expecting"):
        check_model(model_folder)


def test_a_request_is_no_longer_than_the_model_reaches(model_folder):
    config = {"architectures": ["DeepseekV3ForCausalLM"], "max_position_embeddings": 64}
    (model_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"70 tokens in a request; .* reaches 64: smaller --isl or --osl"):
        _room(model_folder, ClientLoad(60, 10, 4, 4))
    assert _room(model_folder, ClientLoad(54, 10, 4, 4))[:2] == ["--max-model-len", "64"]


# Servers and client of a live engine: entered before they are used, ended however it ends


def recorded(name, events, fails_at_exit=False):
    class Recorded:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            events.append(f"{name} entered")
            return self

        def __exit__(self, kind, error, trace):
            events.append(f"{name} ended, {error}")
            if fails_at_exit:
                raise OSError("a server that does not end")

    return Recorded


@pytest.fixture
def setup(tmp_path):
    return LiveSetup("server {port}", "client {url} {result}", tmp_path, tmp_path, ClientLoad())


def test_the_client_ends_too_where_servers_fail_to(setup, monkeypatch):
    events = []
    monkeypatch.setattr(LiveSetup, "kind", None)
    monkeypatch.setattr(module, "Client", recorded("client", events))
    monkeypatch.setattr(module, "Servers", recorded("servers", events, fails_at_exit=True))
    with pytest.raises(OSError, match="does not end"), live_engine(setup, print):
        pass
    ended = ["servers ended, None", "client ended, a server that does not end"]
    assert events == ["client entered", "servers entered", *ended]


def test_an_experiment_opens_its_engine_when_it_is_first_asked_and_closes_it_with_the_error(tmp_path):
    doubles, events = Doubles(tmp_path), []
    with LiveWhenAsked(recorded("engine", events)) as live:
        live.rest()
    assert not events
    with pytest.raises(ValueError), LiveWhenAsked(doubles.live) as live:
        live.look()
        live.trace(None, "base")
        raise ValueError("mid-experiment")
    assert doubles.opened == 1
    with pytest.raises(ValueError), LiveWhenAsked(recorded("engine", events)) as live:
        live._opened()
        raise ValueError("mid-experiment")
    assert events == ["engine entered", "engine ended, mid-experiment"]
