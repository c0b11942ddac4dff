"""Runs of vLLM's client, with a double of it: one import, a process of its own for each run, none left."""

import json
import os
import signal

import pytest

from harness.serving.live.client import client as module
from harness.serving.live.client.client import Client, ClientFailed
from harness.serving.live.client.load import ClientLoad
from tests.support.serving_processes import DOUBLES, marked


@pytest.fixture
def client(tmp_path, mark, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(DOUBLES / "vllm_client"))
    monkeypatch.setenv("DOUBLE_NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr(module, "require_client", lambda kind: None)
    monkeypatch.setattr(module, "broken_modules", lambda: ())
    with Client("vllm", "vllm", tmp_path, tmp_path) as client:
        yield client


def run(client, how, seed=1, deadline_s=120.0, **named):
    """What the run found out about itself."""
    result = client.folder / f"run-{seed}.json"
    load = ClientLoad(16, 32, 4, 4)
    client.run(how, "model", load, seed=seed, result=result, deadline_s=deadline_s, **named)
    return json.loads(result.read_text())


def notes(client):
    return (client.folder / "notes").read_text().split("\n")[:-1]


def test_runs_are_processes_of_their_own_vllm_is_imported_once_and_nothing_is_left(client, mark):
    assert client.pids() == []
    first, second = run(client, "ok", 1), run(client, "ok", 2)
    assert notes(client) == ["import", "run 1", "run 2"]
    assert first["pid"] != second["pid"]
    assert first["parent"] == second["parent"] != os.getpid()
    assert [first["seed"], first["stdin"], second["seed"]] == ["1", "", "2"]
    assert (client.folder / "run-2.client.log").read_text() == "run 2 with ok\n"
    assert sorted(client.pids()) == sorted(marked(mark))
    assert len(client.pids()) == 2  # the guard and the program that stays
    client.close()
    assert client.pids() == marked(mark) == []
    run(client, "ok", 3)  # a closed one begins anew


@pytest.mark.parametrize(("how", "deadline_s", "said"), [
    ("fails", 120.0, r"ended with exit code 1; it said: \"KeyError: 'choices'\" \(log: .*run-2\.client\.log"),
    ("exits", 120.0, r"ended with exit code 7; it said: 'run 2 with exits'"),
    ("dies", 120.0, r"died of SIGSEGV; it said"),
    ("hangs", 0.05, r"took over 0\.05 s \(longer: --run-timeout\)"),
])  # fmt: skip
def test_a_run_that_fails_is_one_line_and_the_next_is_well(client, mark, how, deadline_s, said):
    stays = run(client, "ok", 1)["parent"]
    with pytest.raises(ClientFailed, match=f"the client {said}"):
        run(client, how, 2, deadline_s)
    assert stays in marked(mark) and len(marked(mark)) == 2
    assert run(client, "ok", 3)["parent"] == stays


def test_the_program_that_stays_may_die_during_a_run(client, mark):
    def kill():
        if notes(client)[-1] == "run 2":
            os.kill(parent, signal.SIGKILL)

    parent = run(client, "ok", 1)["parent"]
    with pytest.raises(ClientFailed, match=r"the process that runs are forked from died of SIGKILL; it said"):
        run(client, "hangs", 2, watch=kill)
    assert client.pids() == marked(mark) == []
    run(client, "ok", 3)
