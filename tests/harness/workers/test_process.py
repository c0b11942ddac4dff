"""A worker of its own process: it rests when told to, dies with its parent, answers plain values."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.paths import ROOT
from harness.workers.process import Worker, WorkerFailure, worker_pids

SERVED = '''
import multiprocessing, os, signal, threading

class Served:
    def work(self):
        """Threads and a process that go on after the answer."""
        multiprocessing.get_context("fork").Process(target=forever, daemon=True).start()
        threading.Thread(target=forever, daemon=True).start()
        return os.getpid()

    def large(self):
        import torch
        from harness.workers.child.blob import Blob

        return {"output": Blob.of(torch.arange(1 << 10))}

    def total(self, output):
        import torch

        return int(output.tensor(torch.int64, (1 << 10,)).sum())

    def gadget(self):
        return Gadget()

    def crash(self):
        print("out of luck", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self):
        os._exit(3)

    def hang(self):
        forever()

def forever():
    while True:
        pass

class Gadget:
    def __reduce__(self):
        return os.system, ("touch reached",)
'''


@pytest.fixture
def served(tmp_path) -> tuple[str, dict[str, str]]:
    """What a worker serves, and the environment that finds it."""
    (tmp_path / "served.py").write_text(SERVED)
    return "served:Served", {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def living(group: int) -> list[list[str]]:
    """Of each living thread of a group what /proc says behind its name."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(fields)
    return found


def stands(group: int) -> bool:
    """Whether the signal has arrived, at every thread."""
    return {fields[0] for fields in living(group)} == {"T"}


def until(comes: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not comes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_all_that_a_worker_started_rests_with_it_and_goes_with_it(served, tmp_path):
    worker = Worker(*served, tmp_path / "log")
    try:
        group = worker.ask("work", 120)
        assert not stands(group)
        worker.pause()
        until(lambda: stands(group))
        assert worker.ask("work", 120) == group
    finally:
        worker.kill()
    until(lambda: not living(group))


@pytest.mark.parametrize(
    ("request_", "deadline", "status", "reason"),
    [
        ("crash", 120, "crashed", "the worker died of SIGSEGV while in crash; its last words: out of luck"),
        ("leave", 120, "crashed", "the worker ended with exit code 3 while in leave"),
        ("hang", 0.1, "timeout", "no answer within 0.1 s while in hang"),
    ],
)
def test_a_worker_that_is_gone_says_how(served, tmp_path, request_, deadline, status, reason):
    worker = Worker(*served, tmp_path / "log")
    with pytest.raises(WorkerFailure) as failure:
        worker.ask(request_, deadline)
    assert (failure.value.status, failure.value.reason, failure.value.fatal) == (status, reason, True)
    assert not worker.alive
    assert worker.pid not in worker_pids()


def test_a_killed_parent_takes_a_paused_worker_with_it(served, tmp_path):
    serves, environment = served
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, sys, time\n"
            "from harness.workers.process import Worker\n"
            f"worker = Worker({serves!r}, {environment!r}, pathlib.Path({str(tmp_path / 'log')!r}))\n"
            "worker.pause()\n"
            "print(worker.process.pid, flush=True)\n"
            "time.sleep(600)",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_large_outputs_go_from_one_worker_to_another(served, tmp_path):
    one, other = (Worker(*served, tmp_path / name) for name in ("one", "other"))
    try:
        for _ in range(2):
            assert other.ask("total", 30, **one.ask("large", 30)) == sum(range(1 << 10))
    finally:
        one.kill()
        other.kill()


def test_an_answer_that_would_run_code_here_is_an_error(served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    worker = Worker(*served, tmp_path / "log")
    with pytest.raises(WorkerFailure, match="its answer to gadget is no plain value") as failure:
        worker.ask("gadget", 120)
    assert failure.value.status == "error"
    assert not (tmp_path / "reached").exists()
    assert not worker.alive
