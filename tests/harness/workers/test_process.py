"""A worker of its own process: it rests when told to, dies with its parent, and tells how it ended."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT
from harness.workers.process import WorkerFailure, WorkerProcess, worker_pids
from tests.support.serving_processes import comes

SERVED = '''
import multiprocessing, os, signal, sys, threading
from types import SimpleNamespace as Fake

class Served:
    def work(self):
        """Threads and a process that go on after the answer."""
        multiprocessing.get_context("fork").Process(target=forever, daemon=True).start()
        threading.Thread(target=forever, daemon=True).start()
        return os.getpid()

    def large(self):
        import torch
        from harness.workers.child.outputs import Blob

        return {"one": Blob.of(torch.full((1 << 20,), -7, dtype=torch.int32)), "count": 3,
                "two": Blob.of(torch.arange(10, dtype=torch.int16))}

    def total(self, one, two, count):
        import torch

        return int(one.tensor(torch.int32, (1 << 20,)).sum()), two.tensor(torch.int16, (2, 5)).tolist(), count

    def greet(self):
        print("no last words", flush=True)

    def crash(self):
        print("out of luck".ljust(200, "!"), flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)

    def refuse(self):
        raise RuntimeError("an illegal access")

    def fail(self, used=True, sound=True):
        cuda = Fake(is_initialized=lambda: used, synchronize=int if sound else None)
        sys.modules["torch"] = Fake(cuda=cuda)
        self.refuse()

    def leave(self):
        os._exit(3)

    prepare = leave

    def hang(self):
        forever()

def forever():
    while True:
        pass

'''


@pytest.fixture
def served(tmp_path) -> tuple[str, dict[str, str]]:
    """What a worker serves, and the environment that finds it."""
    (tmp_path / "served.py").write_text(SERVED)
    return "served:Served", {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def states(group: int) -> set[str]:
    """Of each living thread of a group what /proc says of it: T where the signal to rest has arrived."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            found |= {fields[0]} if int(fields[2]) == group else set()
    return found - {"Z"}


def test_all_that_a_worker_started_rests_with_it_and_goes_with_it(served, tmp_path):
    worker = WorkerProcess(*served, tmp_path / "log")
    try:
        group = worker.ask("work", 120)
        assert states(group) != {"T"}
        worker.pause()
        assert comes(lambda: states(group) == {"T"})
        assert worker.ask("work", 120) == group
    finally:
        worker.kill()
    assert comes(lambda: not states(group))


WORDS = "out of luck".ljust(120, "!")
ILLEGAL = "served.py:32 in refuse, served.py:37 in fail: RuntimeError: an illegal access"


@pytest.mark.parametrize(("request_", "given", "status", "reason"), [
    ("crash", {}, "crashed", f"the worker died of SIGSEGV while in crash; its last words: {WORDS}"),
    ("prepare", {}, "crashed", "the worker ended with exit code 3 while in prepare or its first call"),
    ("leave", {}, "crashed", "the worker ended with exit code 3 while in leave"),
    ("hang", {"deadline": 0.1}, "timeout", "no answer within 0.1 s while in hang"),
    ("fail", {"sound": False}, "crashed", ILLEGAL),  # the GPU is lost, and the worker with it
    ("fail", {}, "error", ILLEGAL),
    ("fail", {"used": False, "sound": False}, "error", ILLEGAL),
    ("refuse", {}, "error", ILLEGAL.replace(", served.py:37 in fail", "")),  # without torch
])  # fmt: skip
def test_a_worker_that_is_gone_says_how(served, tmp_path, request_, given, status, reason):
    worker, stays = WorkerProcess(*served, tmp_path / "log"), status == "error"
    try:
        worker.ask("greet", 120)
        with pytest.raises(WorkerFailure) as failure:
            worker.ask(request_, **{"deadline": 120} | given)
        assert (failure.value.status, failure.value.reason) == (status, reason)
        assert failure.value.fatal is not stays
        assert (worker.alive, worker.process.pid in worker_pids()) == (stays, stays)
    finally:
        worker.kill()


PARENT = """
import pathlib, sys, time
from harness.workers.process import WorkerProcess
worker = WorkerProcess(sys.argv[1], {"PYTHONPATH": sys.argv[2]}, pathlib.Path(sys.argv[3]))
worker.pause()
print(worker.process.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_parent_takes_a_paused_worker_with_it(served, tmp_path):
    serves, environment = served
    command = [sys.executable, "-c", PARENT, serves, environment["PYTHONPATH"], str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    assert comes(lambda: not Path(f"/proc/{pid}").exists())


def test_large_outputs_come_from_a_worker_and_go_to_one(served, tmp_path):
    """To the same one, which spares another that imports torch."""
    worker = WorkerProcess(*served, tmp_path / "log")
    try:
        for _ in range(2):
            large = worker.ask("large", 30)
            assert os.fstat(large["two"].descriptor).st_size == large["two"].size == 20
            given = worker.ask("total", 30, **large)
            assert given == (-7 << 20, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], 3)
    finally:
        worker.kill()
