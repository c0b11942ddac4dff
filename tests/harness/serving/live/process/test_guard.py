"""Engines as guarded processes: whatever happens, one line and no process left behind."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness.errors import NothingRan, UsageError
from harness.paths import ROOT
from harness.serving.live.client.client import Client
from harness.serving.live.engine.engine import Engine
from harness.serving.live.engine.launch import EngineLaunch, kind_for
from harness.serving.live.process.launching import free_port
from tests.support.serving_processes import DOUBLES, comes, gone, marked

ENGINE = DOUBLES / "fake_engine.py"


@pytest.fixture
def engine(tmp_path, mark):
    def started(mode, name="model", kind="command"):
        port = free_port()
        command = (sys.executable, str(ENGINE), mode, str(port), name)
        launch = EngineLaunch(kind, command, dict(os.environ), "/health", "model")
        return Engine(launch, port, tmp_path / "server.log")

    return started


@pytest.mark.parametrize(("mode", "named", "wait_s", "said"), [
    ("dies-at-start", {}, 120, r"exit code 3 after .*RuntimeError: no such layer.*server\.log"),
    ("never-healthy", {}, 0, r"not healthy after 0 s .*--start-timeout.*server\.log"),
    ("ok", {"name": "somebody-elses", "kind": "vllm"}, 120, r"another server answers .* somebody-elses"),
])  # fmt: skip
def test_an_engine_that_does_not_come_up_is_ended_and_says_why(engine, mark, mode, named, wait_s, said):
    with pytest.raises(NothingRan, match=said):
        engine(mode, **named).wait_healthy(wait_s)
    assert not marked(mark)


def test_grandchildren_in_sessions_of_their_own_are_paused_and_end_too(engine, mark):
    def states():
        pids = [pid for pid in marked(mark) if pid != one.process.guard.pid]
        return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]

    with engine("ignores-sigterm") as one:
        one.wait_healthy(120)
        assert one.process.alive()
        one.pause()
        assert comes(lambda: states() == ["T"] * 4)  # the engine, two children, an orphan
        one.resume()
        one.wait_healthy(120)
        one.pause()
        one.process.end(0.05)
    assert not marked(mark)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_harness(tmp_path, mark, how):
    code = f"""
        import os, sys, time
        from pathlib import Path
        from harness.serving.live.process.guarded import Guarded
        command = [sys.executable, {str(ENGINE)!r}, "spawns", "0"]
        process = Guarded(command, dict(os.environ), Path({str(tmp_path / "log")!r}), Path("."))
        print("up", flush=True)
        time.sleep(600)
    """
    program = [sys.executable, "-c", textwrap.dedent(code)]
    harness = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert harness.stdout.readline() == b"up\n"
    assert comes(lambda: len(marked(mark)) >= 6)  # a seventh starts the orphan, and ends
    harness.send_signal(how)
    harness.wait(timeout=120)
    assert gone(mark)


def test_a_taken_port_is_refused():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is taken"):
            free_port(port)
    assert free_port() > 0


@pytest.mark.parametrize(("ask", "what"), [
    (lambda command: Client(command, "vllm", Path(), Path()), "client"),
    (kind_for, "engine"),
])  # fmt: skip
def test_what_is_missing_or_cannot_be_read_is_one_line_before_anything_starts(ask, what, monkeypatch):
    with pytest.raises(NothingRan, match=rf"^{what} no-such-program is missing here: install it"):
        ask("no-such-program {url} {result} {port}")
    with pytest.raises(UsageError, match=rf"^{what} .* cannot be read: No closing quotation"):
        ask("'program {url} {result} {port}")
    with pytest.raises(UsageError, match=f"unknown {what} 'wrk': one of vllm, sglang, .*or a command"):
        ask("wrk")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NothingRan, match=rf"sglang .*{sys.executable}: .*install .*sglang"):
        ask("sglang")
