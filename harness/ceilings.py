"""How fast a device can be at best: measured here for percentages, looked up in datasheets for what is
impossible."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from harness.workers import Worker, cache_environment
from kernels.op import Work
from kernels.platform import Platform, version

DATA = Path(__file__).parent / "data" / "devices.json"


@dataclass(frozen=True)
class Ceilings:
    """flops: floating-point operations per second, bf16 inputs; bytes: bytes read per second."""

    flops: float
    bytes: float
    measured: str = ""

    def least_time(self, work: Work, from_memory: bool) -> float:
        """Seconds below which the work cannot be done; bytes count only where they come from memory."""
        return max(work.flops / self.flops, work.bytes / self.bytes if from_memory else 0.0)


def datasheet(platform: Platform) -> dict[str, Any] | None:
    """The datasheet entry whose name and architecture the platform has, if there is one."""
    entries = json.loads(DATA.read_text())["devices"]
    return next((d for d in entries if d["arch"] == platform.arch and d["name"] in platform.name), None)


def peaks(platform: Platform) -> Ceilings | None:
    """The datasheet's peaks; fp8 peak as bound of the flops, so that nothing right is ever beyond it."""
    entry = datasheet(platform)
    if entry is None:
        return None
    return Ceilings(max(entry["tflops"].values()) * 1e12, entry["tbps"] * 1e12)


def last_level(platform: Platform) -> int:
    """Bytes of the last-level cache by the system or the datasheet, 0 if neither knows. Not what torch
    reports: on AMD that is the L2, before the last level."""
    entry = datasheet(platform)
    return max(platform.last_level, (entry["last_level_mb"] << 20) if entry else 0)


def ceilings(platform: Platform, threads: int) -> Ceilings:
    """Measures them in a worker, once per device, threads and torch; later runs read the stored figure.
    Raises WorkerFailure where they cannot be measured."""
    environment = thread_environment(platform, threads)
    store = Path(cache_environment("ceilings")["TRITON_CACHE_DIR"]).parent / "ceilings.json"
    key = json.dumps([platform.name, platform.arch, platform.device, threads, version("torch")])
    known = _read(store)
    if key not in known:
        with tempfile.TemporaryDirectory() as folder:
            worker = Worker("ceilings", environment, Path(folder) / "log")
            try:
                facts = worker.ask(
                    "measure", 120, kind=platform.kind, device=platform.device, threads=threads
                )
            finally:
                worker.kill()
        known[key] = facts | {"measured": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())}
        _write(store, known)
    return Ceilings(**known[key])


def thread_environment(platform: Platform, threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads)} if platform.kind == "cpu" else {}


def _read(store: Path) -> dict[str, Any]:
    """What is known; what another version stored in another form, or broke, is not."""
    names = {field.name for field in fields(Ceilings)}
    try:
        return {key: facts for key, facts in json.loads(store.read_text()).items() if set(facts) == names}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(store: Path, known: dict[str, Any]) -> None:
    """Keeping it is a convenience: where it cannot be kept it is measured again."""
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        partial = store.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(store)
    except OSError:
        pass


class Meter:
    """In a worker: the best of several short tries at reading memory and at a bf16 product."""

    def measure(self, kind: str, device: str, threads: int) -> dict[str, float]:
        import torch

        from harness.device import timer_for

        torch.set_num_threads(threads)
        timer = timer_for(kind, "eager")
        on_cpu = kind == "cpu"
        numbers = torch.ones((1 << 28) if on_cpu else (1 << 31), dtype=torch.uint8, device=device)
        words = numbers.view(torch.int64)
        read = min(timer.turn(itertools.repeat(lambda: words.sum()), 0.05).seconds for _ in range(5))
        size = 2048 if on_cpu else 8192
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        out = torch.empty_like(a)
        product = min(
            timer.turn(itertools.repeat(lambda: torch.mm(a, b, out=out)), 0.05).seconds for _ in range(5)
        )
        found = Ceilings(flops=2.0 * size**3 / product, bytes=numbers.numel() / read)
        return {k: v for k, v in asdict(found).items() if k != "measured"}
