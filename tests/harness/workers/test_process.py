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
from harness.workers.process import Worker, WorkerFailure

SERVED = '''
import multiprocessing, os, pickle, threading

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


def living(group: int, each: str = "[0-9]*/stat") -> list[list[str]]:
    """Of each living process of a group what /proc says behind its name."""
    found = []
    for stat in Path("/proc").glob(each):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(fields)
    return found


def cpu_ticks(group: int) -> int:
    """Of all of them so far."""
    return sum(int(fields[11]) + int(fields[12]) for fields in living(group))


def stands(group: int) -> bool:
    """Whether the signal has arrived, at every thread."""
    return {fields[0] for fields in living(group, "[0-9]*/task/[0-9]*/stat")} == {"T"}


def until(comes: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not comes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_paused_worker_left_running_takes_no_cpu(served, tmp_path):
    worker = Worker(*served, tmp_path / "log")
    try:
        group = worker.ask("work", 120)
        before = cpu_ticks(group)
        until(lambda: cpu_ticks(group) > before + 5)
        worker.pause()
        until(lambda: stands(group))
        before = cpu_ticks(group)
        time.sleep(0.5)
        assert cpu_ticks(group) == before
        assert worker.ask("work", 120) == group
    finally:
        worker.kill()
    until(lambda: cpu_ticks(group) == 0)


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
