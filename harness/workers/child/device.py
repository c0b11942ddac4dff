"""The device of a worker, readied for use."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.machine.cpu_threads import MAIN_THREAD, pinned
from kernels.triton_runtime import target_of


def ready_device(kind: str, device: str, threads: int) -> dict[str, Any]:
    """Makes torch compute on `device`, and on so many threads. Raises RuntimeError where this torch cannot
    reach it.

    pinned: the CPU that each thread is bound to, or why none is
    target: what configurations are chosen for, the fields of `kernels.tuning.Target`
    """
    load_openmp()
    MAIN_THREAD.release()
    import torch

    torch.set_num_threads(threads)
    if kind != "cpu":
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no GPU; {device} needs its {kind} build")
        torch.cuda.set_device(device)
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "pinned": _pinned(threads) if kind == "cpu" else "no: the device computes",
        "target": asdict(target_of(torch.device(device))),
    }


def empty_cache(kind: str) -> None:
    """Gives the device memory that torch keeps for later back: other processes of the run wait for it."""
    if kind != "cpu":
        import torch

        torch.cuda.empty_cache()


def load_openmp() -> None:
    """Loads what torch loads first, and with it OpenMP, which binds this thread. Importing the rest takes
    seconds, on the CPU that all workers' main threads are bound to."""
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(Path(spec.origin).parent / "lib/libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)


def _pinned(threads: int) -> list[int] | str:
    with MAIN_THREAD.in_place():
        answer = pinned(threads)
    MAIN_THREAD.release()  # a library that was loaded since may bind it now
    return answer
