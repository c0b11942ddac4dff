"""Runs of vLLM's client, with a double of it: one import, a process of its own for each run, none left."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from harness.machine.monitor.cpu import CpuMonitor
from harness.machine.monitor.procfs import Counters
from harness.paths import ROOT
from harness.serving.live.client import client as module
from harness.serving.live.client.client import Client, ClientFailed
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.process import client_processes
from tests.support.serving_processes import MARK, comes, gone, marked

DOUBLE = ROOT / "tests" / "doubles" / "vllm_client"
LOAD = ClientLoad(16, 32, 4, 4)


@pytest.fixture
def mark(tmp_path, monkeypatch):
    mark = f"{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(DOUBLE))
    monkeypatch.setenv("DOUBLE_NOTES", str(tmp_path / "notes"))
    yield mark
    left = marked(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.fixture
def client(tmp_path, mark, monkeypatch):
    monkeypatch.setattr(module, "require_client", lambda kind: None)
    monkeypatch.setattr(module, "broken_modules", lambda: ())
    with Client("vllm", "vllm", tmp_path, tmp_path) as client:
        yield client


def run(client, how, seed=1, deadline_s=120.0, **named):
    """What the run found out about itself."""
    result = client.folder / f"run-{seed}.json"
    client.run(how, "model", LOAD, seed=seed, result=result, deadline_s=deadline_s, **named)
    return json.loads(result.read_text())


def notes(client):
    return (client.folder / "notes").read_text().split("\n")[:-1]


def test_runs_are_processes_of_their_own_and_vllm_is_imported_once(client):
    first, second = run(client, "ok", 1), run(client, "ok", 2)
    assert notes(client) == ["import", "run 1", "run 2"]
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"] != os.getpid()
    assert [first["seed"], first["stdin"], second["seed"]] == ["1", "", "2"]
    assert (client.folder / "run-1.client.log").read_text() == "run 1 with ok\n"
    assert (client.folder / "run-2.client.log").read_text() == "run 2 with ok\n"


def test_nothing_is_started_before_the_first_run_or_left_after_the_last(client, mark):
    assert client.pids() == marked(mark) == []
    run(client, "ok")
    assert sorted(client.pids()) == sorted(marked(mark))
    assert len(client.pids()) == 2  # the guard and the program that stays
    client.close()
    assert client.pids() == marked(mark) == []
    run(client, "ok", 2)  # a closed one begins anew
    client.close()


@pytest.mark.parametrize(("how", "said"), [
    ("fails", r"exit code 1; it said: \"KeyError: 'choices'\" \(log: .*run-2\.client\.log"),
    ("exits", r"exit code 7; it said: 'run 2 with exits'"),
    ("dies", r"died of SIGSEGV; it said"),
])  # fmt: skip
def test_a_run_that_fails_is_one_line_and_the_next_is_well(client, how, said):
    run(client, "ok", 1)
    with pytest.raises(ClientFailed, match=f"the client (ended with )?{said}"):
        run(client, how, 2)
    run(client, "ok", 3)
    assert notes(client).count("import") == 1


def test_the_program_that_stays_may_die_during_a_run(client, mark):
    def kill():
        if notes(client)[-1] == "run 2":
            os.kill(parent, signal.SIGKILL)

    parent = run(client, "ok", 1)["parent"]
    with pytest.raises(ClientFailed, match=r"the process that runs are forked from died of SIGKILL; it said"):
        run(client, "hangs", 2, watch=kill)
    assert client.pids() == marked(mark) == []
    run(client, "ok", 3)


def test_a_run_that_takes_too_long_ends_alone(client, mark):
    stays = run(client, "ok", 1)["parent"]
    with pytest.raises(ClientFailed, match=r"over 0\.05 s \(longer: --run-timeout\)"):
        run(client, "hangs", 2, deadline_s=0.05)
    assert stays in marked(mark)
    assert len(marked(mark)) == 2
    assert run(client, "ok", 3)["parent"] == stays


def test_a_program_that_does_not_end_its_run_is_ended(client, mark, monkeypatch):
    monkeypatch.setattr(client_processes, "END_S", 0.2)
    stays = run(client, "ok", 1)["parent"]
    with pytest.raises(ClientFailed, match=r"over 0\.05 s"):
        run(client, "hangs", 2, deadline_s=0.05, watch=lambda: os.kill(stays, signal.SIGSTOP))
    assert client.pids() == marked(mark) == []
    assert run(client, "ok", 3)["parent"] != stays


def test_what_an_ended_run_used_is_ours(client):
    """Of the first run, which starts the program, and of the next, which finds it there."""
    counters = Counters()
    for seed in (1, 2):
        monitor = CpuMonitor(client.pids, counters)
        start = monitor._read()
        ends = []
        run(client, "computes", seed, ended=lambda read=monitor._read, ends=ends: ends.append(read()))
        (end,) = ends
        assert not start.ours.keys() - end.ours.keys()
        own = {os.getpid()}
        used = sum(s - start.ours.get(pid, 0.0) for pid, s in end.ours.items() if pid not in own)
        used += sum(s - start.reaped.get(pid, 0.0) for pid, s in end.reaped.items())
        assert used >= 0.5 - 0.02  # ticks


def test_nothing_outlives_a_killed_harness(tmp_path, mark):
    code = f"""
        from pathlib import Path
        from harness.serving.live.client import client
        from harness.serving.live.client.load import ClientLoad
        client.require_client, client.broken_modules = lambda kind: None, lambda: ()
        at = Path({str(tmp_path)!r})
        load = ClientLoad(1, 2, 1, 1)
        vllm = client.Client("vllm", "vllm", at, at)
        vllm.run("hangs", "m", load, seed=1, result=at / "r.json", deadline_s=600)
    """
    harness = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=os.environ)
    notes = tmp_path / "notes"
    assert comes(lambda: notes.exists() and "run 1" in notes.read_text())
    assert len(marked(mark)) == 4  # the harness, the guard, the program, the run
    harness.kill()
    harness.wait(timeout=120)
    assert gone(mark)
