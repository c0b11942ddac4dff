"""Environments of worker processes: threads, allocator, caches."""

from __future__ import annotations

import hashlib
import os
import re
import site
from collections.abc import Collection, Mapping

import kernels
from harness.files import JsonObject
from harness.machine.cpu_threads import BINDING, cores, default_threads
from harness.machine.provenance import surroundings
from harness.paths import ROOT, cache, user_home, writable
from harness.plan.settings import parse_threads
from kernels.platform import Platform


def worker_threads(asked: int | None = None) -> int:
    """Of each worker on a CPU: as asked, or OMP_NUM_THREADS, or the cores of a NUMA node."""
    return asked or parse_threads(os.environ.get("OMP_NUM_THREADS")) or default_threads()


def thread_environment(
    platform: Platform, threads: int, variables: Mapping[str, str | None] | None = None
) -> dict[str, str]:
    """What makes a worker compute on so many threads, each bound to a physical core. They are not bound where
    the user's environment or a setting's `variables` bind them, or where there are more than cores.

    They spin for some milliseconds between parallel regions, as OpenMP does by default and engines have it:
    told to sleep at once (OMP_WAIT_POLICY=passive) an addition of 1 MB took 27 us for 10 (2 cores, libgomp).
    """
    if platform.kind != "cpu":
        return {}
    places = [cpu for node in cores() for cpu in node]
    environment = {"OMP_NUM_THREADS": str(threads)}
    if not any(name in BINDING for name in (*os.environ, *(variables or {}))) and threads <= len(places):
        environment |= {"OMP_PROC_BIND": "close", "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in places)}
    return environment


# Freed memory stays in the process, as under the caching allocators that engines run with. Faulting it in
# anew at each call can be most of what an allocating call takes, and most of its noise.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
DEFAULTS = {
    # A worker that waits for its sample must not take a core from the one whose turn it is.
    "KMP_BLOCKTIME": "1",
    "HF_HUB_OFFLINE": "1",
    # As the driver counts GPUs; CUDA's own order is the fastest first.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    **ALLOCATOR,
}


def provenance(platform: Platform, threads: int) -> JsonObject:
    """Everything that identifies the surroundings of a measurement by workers, as plain values."""
    facts = surroundings(platform)
    return facts | {"machine": facts["machine"] | {"threads": threads}, "worker_defaults": DEFAULTS}


def worker_environment(
    extra: Mapping[str, str | None], tree: str | None = None, plugins: Collection[str] = ()
) -> dict[str, str]:
    """Our defaults, over them the user's environment with the project first on the path, then `extra`, where
    None takes a variable away.

    plugins: the files of implementations that this worker imports; folders, which bring ops, all do
    """
    environment = dict(os.environ)
    path = [tree or str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    # Workers run in the project's folder, the user perhaps elsewhere.
    wanted = [str(path) for path in kernels.plugin_files() if path.is_dir() or str(path) in plugins]
    environment[kernels.PLUGINS] = os.pathsep.join(wanted)
    whole = DEFAULTS | environment | home_environment() | dict(extra)
    return {name: value for name, value in whole.items() if value is not None}


def home_environment() -> dict[str, str]:
    """A home where the user has none that can be written: libraries keep what they compile there. What is
    installed in the user's own is found as before."""
    if writable(user_home()):
        return {}
    home = cache() / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {"HOME": str(home), "PYTHONUSERBASE": site.getuserbase()}


def cache_environment(setting: str) -> dict[str, str]:
    """Compile caches of a setting's own: what one setting compiled must not serve another."""
    folder = setting
    if not re.fullmatch(r"\w{1,40}", setting):
        words = re.sub(r"[^A-Za-z0-9]+", "-", setting)[:40]
        folder = f"{words}-{hashlib.sha256(setting.encode()).hexdigest()[:12]}"
    base = cache() / folder
    return {
        "TRITON_CACHE_DIR": str(base / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(base / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(base / "extensions"),
    }
