"""Engines and clients as guarded processes: whatever happens, one line and no process left behind."""

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
from harness.serving.live.client.client import Client, ClientFailed
from harness.serving.live.client.load import ClientLoad
from harness.serving.live.engine.engine import Engine
from harness.serving.live.engine.launch import EngineLaunch, kind_for
from harness.serving.live.process.guarded import Guarded
from harness.serving.live.process.launching import free_port
from tests.support.serving_processes import comes, gone, marked

ENGINE, CLIENT = (ROOT / "tests" / "doubles" / f"fake_{name}.py" for name in ("engine", "client"))
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def mark(tmp_path):
    mark = f"{os.getpid()}-{tmp_path.name}"
    yield mark
    left = marked(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def engine(tmp_path, mark, mode, name="model", kind="command"):
    port = free_port()
    command = (sys.executable, str(ENGINE), mode, str(port), name)
    environment = dict(os.environ) | {"KERNEL_BENCH_TEST": mark}
    return Engine(EngineLaunch(kind, command, environment, "/health", "model"), port, tmp_path / "server.log")


def test_an_engine_that_dies_at_start_says_why(tmp_path, mark):
    one = engine(tmp_path, mark, "dies-at-start")
    with pytest.raises(NothingRan, match=r"exit code 3 after .*RuntimeError: no such layer.*server\.log"):
        one.wait_healthy(120)


def test_an_engine_that_is_never_healthy_is_ended_at_its_deadline(tmp_path, mark):
    one = engine(tmp_path, mark, "never-healthy")
    with pytest.raises(NothingRan, match=r"not healthy after 0 s .*--start-timeout.*server\.log"):
        one.wait_healthy(0)
    assert not marked(mark)


def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path, mark):
    one = engine(tmp_path, mark, "ok", name="somebody-elses", kind="vllm")
    with pytest.raises(NothingRan, match=r"another server answers .* somebody-elses"):
        one.wait_healthy(120)


def test_grandchildren_in_sessions_of_their_own_end_too(tmp_path, mark):
    with engine(tmp_path, mark, "ignores-sigterm") as one:
        one.wait_healthy(120)
        assert one.process.alive()
        assert len(marked(mark)) == 5  # the guard, the engine, two children, an orphan
        one.process.end(0.05)
    assert not marked(mark)


def test_a_paused_tree_stands_still_and_can_be_ended(tmp_path, mark):
    with engine(tmp_path, mark, "spawns") as one:
        one.wait_healthy(120)
        one.pause()

        def states():
            pids = [pid for pid in marked(mark) if pid != one.process.guard.pid]
            return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}

        assert comes(lambda: states() == {"T"})
        assert states() == {"T"}
        one.resume()
        one.wait_healthy(120)
        one.pause()
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
    harness = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=dict(os.environ) | {"KERNEL_BENCH_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert harness.stdout.readline() == b"up\n"
    assert comes(lambda: len(marked(mark)) >= 6)  # a seventh starts the orphan, and ends
    harness.send_signal(how)
    harness.wait(timeout=120)
    assert gone(mark)


def test_an_exit_code_and_a_signal_are_told_apart(tmp_path):
    with Guarded([sys.executable, "-c", "exit(7)"], dict(os.environ), tmp_path / "log", tmp_path) as one:
        assert one.wait(120) == 7
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    with Guarded([sys.executable, "-c", code], dict(os.environ), tmp_path / "log", tmp_path) as one:
        assert one.wait(120) == -signal.SIGSEGV


def test_a_taken_port_is_refused():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is taken"):
            free_port(port)
    assert free_port() > 0


def client(tmp_path, mode="10"):
    parts = "{url} {result} {seed} {concurrency} {output_len}"
    return Client(f"{sys.executable} {CLIENT} {parts} {mode}", "command", tmp_path, tmp_path)


def test_a_client_that_fails_or_hangs_is_one_line(tmp_path, mark):
    with engine(tmp_path, mark, "ok") as one:
        one.wait_healthy(120)
        arguments = one.url, "model", ClientLoad(16, 32, 4, 4)
        named = {"seed": 1, "result": tmp_path / "result.json"}
        client(tmp_path).run(*arguments, **named, deadline_s=120)
        assert (tmp_path / "result.json").exists()
        with pytest.raises(ClientFailed, match=r"exit code 1; it said: \"KeyError: 'choices'\""):
            client(tmp_path, "fails").run(*arguments, **named, deadline_s=120)
        with pytest.raises(ClientFailed, match=r"over 0\.05 s"):
            client(tmp_path, "hangs").run(*arguments, **named, deadline_s=0.05)


def test_a_missing_client_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NothingRan, match=r"client sglang is missing in .*: install sglang"):
        Client("sglang", "sglang", tmp_path, tmp_path)
    with pytest.raises(UsageError, match="unknown client 'wrk': one of vllm, sglang, or a command"):
        Client("wrk", "vllm", tmp_path, tmp_path)


@pytest.mark.parametrize(("ask", "what"), [
    (lambda command: Client(command, "vllm", Path(), Path()), "client"),
    (kind_for, "engine"),
])  # fmt: skip
def test_a_command_whose_program_is_missing_is_one_line_before_anything_starts(ask, what):
    with pytest.raises(NothingRan, match=rf"^{what} no-such-program is missing here: install it"):
        ask("no-such-program {url} {result} {port}")
    with pytest.raises(UsageError, match=rf"^{what} .* cannot be read: No closing quotation"):
        ask("'program {url} {result} {port}")
