"""The device of a worker, readied for use."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from harness.machine import cpu_threads
from kernels.triton_runtime import target_of


def ready_device(kind: str, device: str, threads: int) -> dict[str, Any]:
    """Makes torch compute on `device`, and on so many threads. Raises RuntimeError where this torch cannot
    reach it.

    pinned: the CPU that each thread is bound to, or why none is
    target: what configurations are chosen for, the fields of `kernels.tuning.Target`
    """
    import torch

    torch.set_num_threads(threads)
    if kind != "cpu":
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} sees no GPU; {device} needs its {kind} build")
        torch.cuda.set_device(device)
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "pinned": cpu_threads.pinned(threads) if kind == "cpu" else "no: the device computes",
        "target": asdict(target_of(torch.device(device))),
    }
