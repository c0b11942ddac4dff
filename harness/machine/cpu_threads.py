"""The CPUs of this process (Linux): the quota of its control groups, its OpenMP threads and their CPUs."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

SYSTEM = Path("/")


def control_groups(root: Path = SYSTEM) -> list[Path]:
    """The folders of this process's control groups, version 1 or 2, and of those around them."""
    try:
        groups = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        groups = ["0::/"]
    folders: list[Path] = []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the root of the mount is our own group, and `path` may be one that only the host has.
        mount = root / "sys/fs/cgroup" / controllers
        inner = mount / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount)]
    return folders


def quota(root: Path = SYSTEM) -> float:
    """The smallest limit of the control groups, in CPUs, such as 1.5; infinite where no group has a limit."""
    limits = [math.inf]
    for folder in control_groups(root):
        with contextlib.suppress(OSError):  # version 2: microseconds in each period, or `max`
            limit, period_us = (folder / "cpu.max").read_text("utf-8").split()
            if limit != "max":
                limits.append(int(limit) / int(period_us))
        with contextlib.suppress(OSError):  # version 1: -1 means no limit
            limit_us = int((folder / "cpu.cfs_quota_us").read_text("utf-8"))
            if limit_us > 0:
                limits.append(limit_us / int((folder / "cpu.cfs_period_us").read_text("utf-8")))
    return min(limits)


BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that bind threads. Where the user sets one of them, the suite binds none."""
HAS_AFFINITY = hasattr(os, "sched_getaffinity")
ALLOWED = os.sched_getaffinity(0) if HAS_AFFINITY else set(range(os.cpu_count() or 1))
"""The CPUs that this process was given. Once OpenMP has bound the main thread, that thread has fewer."""


def nodes(root: Path = SYSTEM) -> list[set[int]]:
    """The CPUs of each NUMA node; one node with all CPUs where the system does not list nodes."""
    files = root.glob("sys/devices/system/node/node[0-9]*/cpulist")
    by_number = sorted(files, key=lambda file: int(file.parent.name.removeprefix("node")))
    with_cpus = [cpus for cpus in [cpus_in(file.read_text("utf-8")) for file in by_number] if cpus]
    return with_cpus or [set(range(os.cpu_count() or 1))]


def cores(root: Path = SYSTEM, allowed: set[int] = ALLOWED) -> list[list[int]]:
    """For each NUMA node, the largest first: one allowed CPU (hardware thread) of each core."""
    by_node = []
    for node in nodes(root):
        cpu_of_core: dict[frozenset[int], int] = {}  # a core is named by its hardware threads
        for cpu in sorted(node & allowed):
            file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            siblings = cpus_in(file.read_text("utf-8")) if file.exists() else {cpu}
            cpu_of_core.setdefault(frozenset(siblings), cpu)
        if cpu_of_core:
            by_node.append(list(cpu_of_core.values()))
    return sorted(by_node, key=len, reverse=True) or [sorted(allowed)]


def cpus_in(text: str) -> set[int]:
    """`0-2,8` -> {0, 1, 2, 8}"""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for low, high in ranges for cpu in range(int(low), int(high or low) + 1)}


def runs_of(numbers: Iterable[int], most_apart: int = 1) -> list[tuple[int, int]]:
    """Both ends of each series of ascending numbers whose neighbours are at most `most_apart` apart."""
    ends: list[tuple[int, int]] = []
    for number in numbers:
        if ends and number - ends[-1][1] <= most_apart:
            ends[-1] = (ends[-1][0], number)
        else:
            ends.append((number, number))
    return ends


def default_threads(root: Path = SYSTEM, allowed: set[int] = ALLOWED) -> int:
    """The physical cores of a NUMA node, as engines bind a rank to a node; fewer where the quota is less."""
    return max(1, int(min(len(cores(root, allowed)[0]), quota(root))))


def pinned(threads: int) -> list[int] | str:
    """The CPU that each OpenMP thread of this process is bound to, in the order of the threads, as the system
    reports it; `no: REASON` where they are not bound."""
    import torch

    # A parallel region that has enough work for each thread starts the threads and binds them.
    torch.empty(threads << 17).fill_(0.0)
    # Each CPU once: threads of torch's own pool, which no kernel uses, share that of the main thread.
    bound: list[int] = []
    for task in sorted(Path("/proc/self/task").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            listed = re.search(r"^Cpus_allowed_list:(.*)", (task / "status").read_text("utf-8"), re.MULTILINE)
            cpus = cpus_in(listed[1]) if listed else set()
            if len(cpus) == 1 and not cpus <= set(bound):
                bound += cpus
    if len(bound) == threads:
        return bound
    binding = ", ".join(f"{name}={os.environ[name]}" for name in BINDING if name in os.environ)
    return f"no: {binding}" if binding else f"no: {threads} threads are more than there are physical cores"


class MainThread:
    """Binds this process's main thread while calls are timed, and only then.

    OpenMP binds the main thread as it binds the others, and to the same CPU in every worker. While several
    workers prepare side by side they would all wait for that one CPU, and the compilers that they start
    would inherit it. So the main thread may run on its whole NUMA node until calls are timed.
    """

    def __init__(self) -> None:
        self.bound: set[int] | None = None  # the CPUs that OpenMP bound it to, as far as `release` saw it

    def release(self) -> None:
        """Remembers the CPUs that the thread is bound to, and lets it run on all of its NUMA node."""
        if HAS_AFFINITY:
            current = os.sched_getaffinity(0)
            of_its_nodes = {cpu for node in nodes() if node & current for cpu in node & ALLOWED}
            if current < of_its_nodes:
                self.bound = current
                os.sched_setaffinity(0, of_its_nodes)

    @contextlib.contextmanager
    def bound_again(self) -> Iterator[None]:
        """Binds the thread, within the context, to the CPUs that `release` remembered."""
        if self.bound is None:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.bound)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


MAIN_THREAD = MainThread()
