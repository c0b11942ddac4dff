"""A worker that has lost its GPU says so and is replaced, rather than fail everybody who sits in it."""

import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from harness.workers.child import main


class Served:
    def ask(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def lost() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("torch", "kind"),
    [
        (None, "error"),
        (SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False, synchronize=lost)), "error"),
        (SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, synchronize=int)), "error"),
        (SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, synchronize=lost)), "crashed"),
    ],
    ids=["no torch", "no GPU", "sound", "lost"],
)
def test_an_error_that_costs_the_gpu_is_a_crash(monkeypatch, torch, kind):
    monkeypatch.setitem(main.sys.modules, "torch", torch)
    ours, theirs = Pipe()
    serving = threading.Thread(target=main.serve, args=(theirs, Served()))
    serving.start()
    ours.send(("ask", {}))
    answer = ours.recv()
    ours.close()
    serving.join()
    assert answer == (kind, "RuntimeError: CUDA error: an illegal memory access was encountered")
