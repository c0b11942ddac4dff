"""The environment of worker processes: threads, allocator, caches."""

from __future__ import annotations

import hashlib
import os
import re
import site
from collections.abc import Collection, Mapping

import kernels
from harness.files import JsonObject
from harness.machine.cpu_threads import BINDING, cores, default_threads
from harness.machine.device import surroundings
from harness.paths import ROOT, cache, user_home, writable
from harness.plan.settings import parse_threads
from kernels.platform import Platform


def worker_threads(asked: int | None = None) -> int:
    """The threads of each worker on a CPU: as asked for, or OMP_NUM_THREADS, or the cores of a NUMA node."""
    return asked or parse_threads(os.environ.get("OMP_NUM_THREADS")) or default_threads()


def thread_environment(
    platform: Platform, threads: int, variables: Mapping[str, str | None] | None = None
) -> dict[str, str]:
    """The variables that make a worker compute on so many threads, each bound to a physical core. They are
    not bound where the user or a setting's `variables` bind them, or where there are more of them than cores.

    Between parallel regions threads spin for some milliseconds, as in engines: with threads that sleep then
    (OMP_WAIT_POLICY=passive) an addition of 1 MB took 27 us instead of 10 us (2 cores, libgomp).
    """
    if platform.kind != "cpu":
        return {}
    places = [cpu for node in cores() for cpu in node]
    environment = {"OMP_NUM_THREADS": str(threads)}
    are_bound = any(name in BINDING for name in (*os.environ, *(variables or {})))
    if not are_bound and threads <= len(places):
        environment |= {"OMP_PROC_BIND": "close", "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in places)}
    return environment


ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Makes freed memory stay in the process, as under the caching allocators that engines use. Faulting it in
anew at each call can take most of the time of an allocating call, and cause most of its noise."""
DEFAULTS = {
    # Milliseconds for which threads of Intel's OpenMP spin: a waiting worker must not disturb the timed one.
    "KMP_BLOCKTIME": "1",
    "HF_HUB_OFFLINE": "1",
    # GPUs are numbered as the driver numbers them; CUDA's own order puts the fastest first.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    **ALLOCATOR,
}


def provenance(platform: Platform, threads: int) -> JsonObject:
    """What identifies the surroundings of a measurement by workers, as plain values."""
    facts = surroundings(platform)
    return facts | {"machine": facts["machine"] | {"threads": threads}, "worker_defaults": DEFAULTS}


def worker_environment(
    extra: Mapping[str, str | None], tree: str | None = None, plugins: Collection[str] = ()
) -> dict[str, str]:
    """The environment of a worker: DEFAULTS, overridden by the user's variables, and these by `extra`.

    extra:   variables; None removes one
    tree:    the folder of the source tree that the worker runs; None: this one
    plugins: the plug-in files that it imports; it imports all plug-in folders, because these hold ops
    """
    user = dict(os.environ)
    path = [tree or str(ROOT), *filter(None, [user.get("PYTHONPATH")])]
    user["PYTHONPATH"] = os.pathsep.join(path)
    # Workers run in the project's folder, the user perhaps in another one, so the paths are absolute.
    imported = [str(path) for path in kernels.plugin_files() if path.is_dir() or str(path) in plugins]
    user[kernels.PLUGINS] = os.pathsep.join(imported)
    merged = DEFAULTS | user | home_environment() | dict(extra)
    return {name: value for name, value in merged.items() if value is not None}


def home_environment() -> dict[str, str]:
    """Another home, for what libraries compile, where the user's cannot be written."""
    if writable(user_home()):
        return {}
    home = cache() / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {"HOME": str(home), "PYTHONUSERBASE": site.getuserbase()}  # where the user's packages still are


def cache_environment(setting: str) -> dict[str, str]:
    """Compile caches for one setting: what one setting compiled must not serve another."""
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
