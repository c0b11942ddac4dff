"""The device of a worker, readied for use."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.machine.cpu_threads import MAIN_THREAD, pinned
from kernels.triton_runtime import target_of

# Of the same memory torch and the driver give figures that differ by a few percent.
MEMORY_DIFFERS = 1.25


def ready_device(
    kind: str, device: str, threads: int, planned: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Makes torch compute on `device`, and on so many threads. Raises RuntimeError where this torch cannot
    reach it, or reaches another than was planned for.

    planned: what the parent knows of it, see `Platform.identity`
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
        if planned and (wrong := other_device(torch.cuda.get_device_properties(device), planned)):
            raise RuntimeError(f"{device} is not the device that was planned for: {wrong}")
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


def other_device(gpu: Any, planned: Mapping[str, Any]) -> str:
    """By what torch's device differs from the one that the parent locked, watches and plans memory for; empty
    where nothing does, as far as both tell. CUDA numbers the fastest first unless it is told otherwise, and a
    slice (MIG, CPX) is easily taken for the whole.

    gpu: torch's properties, of which older releases have fewer
    """
    arch = getattr(gpu, "gcnArchName", "").split(":")[0]
    on_amd = planned["arch"].startswith("gfx")
    # The profile of a slice that is known by its UUID alone is torch's to tell.
    name = re.sub(r" MIG-.*", "", planned["name"])
    seen = {
        "arch": arch if on_amd else f"sm_{gpu.major}{gpu.minor}",
        "name": gpu.name,
        "uuid": _uuid(gpu, on_amd),
        "memory": gpu.total_memory,
    }
    sizes = sorted((seen["memory"], planned["memory"]))
    differs = {
        "arch": seen["arch"] != planned["arch"],
        # ROCm's own names are not of products.
        "name": not on_amd and not (seen["name"].startswith(name) or name.startswith(seen["name"])),
        "uuid": seen["uuid"]
        and planned["uuid"].startswith("GPU-")
        and seen["uuid"] != planned["uuid"].lower(),
        "memory": sizes[0] and sizes[1] > MEMORY_DIFFERS * sizes[0],
    }
    if not any(differs.values()):
        return ""
    said = [
        ", ".join(
            f"{facts[fact] / (1 << 30):.1f} GiB" if fact == "memory" else str(facts[fact])
            for fact, other in differs.items()
            if other
        )
        for facts in (seen, planned)
    ]
    order = os.environ.get("CUDA_DEVICE_ORDER", "")
    how = "name it by its UUID in CUDA_VISIBLE_DEVICES"
    if order not in ("", "PCI_BUS_ID"):
        how = f"unset CUDA_DEVICE_ORDER={order}"
    return f"to torch it is {said[0]}, to the driver {said[1]}; {how}"


def _uuid(gpu: Any, on_amd: bool) -> str:
    """In the driver's form; empty where torch does not tell it. HIP gives the 16 digits as characters."""
    text = str(getattr(gpu, "uuid", "")).lower()
    if on_amd:
        text = bytes.fromhex(text.replace("-", "")).decode(errors="replace")
        return f"gpu-{text}" if re.fullmatch("[0-9a-f]{16}", text) else ""
    return f"gpu-{text}" if text else ""


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
