"""The device of a worker made ready for use, and the memory of its process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.machine.cpu_threads import MAIN_THREAD, pinned
from kernels.platform import available_memory
from kernels.triton_runtime import target_of

GIB = 1 << 30
MEMORY_DIFFERS = 1.25  # two figures for one memory, torch's and the driver's, differ by less than this factor
MOST_HELD = 0.5
"""A process that holds more than this share of the free memory gives unused memory of its heap back. Freed
memory is not always used again, as an aligned block needs more room than its size."""

Identity = Mapping[str, Any]  # what the parent knows of a device (Platform.identity)


class OnDevice:
    """What a worker serves: it computes on one device."""

    def hello(self, kind: str, device: str, threads: int, planned: Identity | None = None) -> dict[str, Any]:
        """See `ready_device`."""
        self.kind, self.device, self.threads = kind, device, threads
        return ready_device(kind, device, threads, planned)


def ready_device(kind: str, device: str, threads: int, planned: Identity | None) -> dict[str, Any]:
    """Makes torch compute on `device`, with so many threads. Raises RuntimeError where this torch cannot
    use the device, or uses another one than planned (None: any). Returns the version of torch, the number of
    threads, `pinned`: the CPU that each thread is bound to, or why none is, and `target`: the fields of the
    `kernels.tuning.Target` that configurations are chosen for."""
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
    cpus: list[int] | str = "no: the device computes"
    if kind == "cpu":
        with MAIN_THREAD.bound_again():
            cpus = pinned(threads)
        MAIN_THREAD.release()  # a library that was loaded meanwhile may have bound it
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "pinned": cpus,
        "target": asdict(target_of(torch.device(device))),
    }


def empty_cache(kind: str) -> None:
    """Gives back the device memory that torch keeps for later use: other processes of the run need it."""
    if kind != "cpu":
        import torch

        torch.cuda.empty_cache()


def other_device(gpu: Any, planned: Identity) -> str:
    """How torch's device differs from the one that the parent locked, watches and plans memory for; empty
    where the known properties agree. By default CUDA numbers the fastest device first, and a slice (MIG, CPX)
    is easily taken for the whole.

    gpu: torch's device properties; older releases have fewer
    """
    on_amd = planned["arch"].startswith("gfx")
    arch = getattr(gpu, "gcnArchName", "").split(":")[0] if on_amd else f"sm_{gpu.major}{gpu.minor}"
    # Only torch names the profile of a slice that was chosen by its UUID.
    name = re.sub(r" MIG-.*", "", planned["name"])
    is_named_so = gpu.name.startswith(name) or name.startswith(gpu.name)
    uuid = _uuid(gpu, on_amd)
    is_other_gpu = planned["uuid"].startswith("GPU-") and uuid not in ("", planned["uuid"].lower())
    smaller, larger = sorted([gpu.total_memory, planned["memory"]])
    differing: list[tuple[str, str]] = []  # what torch says, and what the driver says
    if arch != planned["arch"]:
        differing.append((arch, planned["arch"]))
    if not on_amd and not is_named_so:  # ROCm gives no product names
        differing.append((gpu.name, planned["name"]))
    if is_other_gpu:
        differing.append((uuid, planned["uuid"]))
    if smaller > 0 and larger > MEMORY_DIFFERS * smaller:  # 0: unknown
        differing.append((f"{gpu.total_memory / GIB:.1f} GiB", f"{planned['memory'] / GIB:.1f} GiB"))
    if not differing:
        return ""
    to_torch, to_driver = (", ".join(said) for said in zip(*differing, strict=True))
    order = os.environ.get("CUDA_DEVICE_ORDER", "")
    how = "name it by its UUID in CUDA_VISIBLE_DEVICES"
    if order not in ("", "PCI_BUS_ID"):
        how = f"unset CUDA_DEVICE_ORDER={order}"
    return f"to torch it is {to_torch}, to the driver {to_driver}; {how}"


def _uuid(gpu: Any, on_amd: bool) -> str:
    """The UUID in the driver's form; empty where torch has none. HIP's bytes are ASCII codes of 16 digits."""
    text = str(getattr(gpu, "uuid", "")).lower()
    if on_amd:
        text = bytes.fromhex(text.replace("-", "")).decode(errors="replace")
        return f"gpu-{text}" if re.fullmatch("[0-9a-f]{16}", text) else ""
    return f"gpu-{text}" if text else ""


def load_openmp() -> None:
    """Loads the library that torch loads first, and with it OpenMP, which binds this thread to a CPU, the
    same one in all workers. Then the thread can be released before the slow import of the rest of torch."""
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(Path(spec.origin).parent / "lib/libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)


def give_back_heap() -> None:
    """Gives back unused memory of the heap, which would stay (environment.ALLOCATOR), if it is much."""
    if _pages(1) > MOST_HELD * available_memory():
        trim_heap()


def _pages(field: int) -> int:
    """A field of /proc/self/statm in bytes: 0 is what is mapped, 1 what is resident."""
    return int(Path("/proc/self/statm").read_text("utf-8").split()[field]) * os.sysconf("SC_PAGE_SIZE")


def trim_heap() -> None:
    """Gives all unused memory back, where the allocator is glibc's."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@contextlib.contextmanager
def memory_at_most(nbytes: int) -> Iterator[None]:
    """Limits this process to mapping `nbytes` more, so that a larger allocation fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (_pages(0) + nbytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
