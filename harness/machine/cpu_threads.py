"""OpenMP threads on a CPU: how many, and each on a physical core of its own, NUMA node by node."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from harness.machine.cgroups import SYSTEM, quota

# Whoever sets one of these binds threads himself.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


# What this process was given; the main thread has less once OpenMP has bound it.
ALLOWED = _allowed()


def nodes(root: Path = SYSTEM) -> list[set[int]]:
    """The CPUs of each NUMA node; one node of all where the system does not tell."""
    files = sorted(
        root.glob("sys/devices/system/node/node[0-9]*/cpulist"), key=lambda f: int(f.parent.name[4:])
    )
    return [cpus for file in files if (cpus := cpus_in(file.read_text()))] or [
        set(range(os.cpu_count() or 1))
    ]


def cores(root: Path = SYSTEM, allowed: set[int] = ALLOWED) -> list[list[int]]:
    """One hardware thread of each physical core that may be used, by NUMA node, the one with the most cores
    first."""
    by_node = []
    for node in nodes(root):
        firsts: dict[frozenset[int], int] = {}
        for cpu in sorted(node & allowed):
            file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            siblings = cpus_in(file.read_text()) if file.exists() else {cpu}
            firsts.setdefault(frozenset(siblings), cpu)
        if firsts:
            by_node.append(list(firsts.values()))
    return sorted(by_node, key=lambda node: -len(node)) or [sorted(allowed)]


def cpus_in(text: str) -> set[int]:
    """`0-2,8` -> {0, 1, 2, 8}"""
    return {
        cpu
        for low, high in re.findall(r"(\d+)(?:-(\d+))?", text)
        for cpu in range(int(low), int(high or low) + 1)
    }


def default_threads(root: Path = SYSTEM, allowed: set[int] = ALLOWED) -> int:
    """The physical cores of one NUMA node, to which engines bind a rank, or the CPUs' worth of time that the
    control group is given, if that is less."""
    return max(1, int(min(len(cores(root, allowed)[0]), quota(root))))


def pinned(threads: int) -> list[int] | str:
    """The CPU that each of this process's OpenMP threads is bound to, as the system sees it, in their order;
    or `no: why`."""
    import torch

    # A parallel region of torch's with enough to do for each starts the threads and binds them.
    torch.empty(threads << 17).fill_(0.0)
    # A pool of torch's own, which no kernel here uses, shares the main thread's CPU.
    bound = dict.fromkeys(cpus.pop() for cpus in map(cpus_in, _affinities()) if len(cpus) == 1)
    if len(bound) == threads:
        return list(bound)
    binding = ", ".join(f"{name}={os.environ[name]}" for name in BINDING if name in os.environ)
    return f"no: {binding}" if binding else f"no: {threads} threads are more than there are physical cores"


def _affinities() -> Iterator[str]:
    """The list of CPUs that each thread of this process may run on, in the order that they were started."""
    for task in sorted(Path("/proc/self/task").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            match = re.search(r"^Cpus_allowed_list:\s*(\S+)", (task / "status").read_text(), re.MULTILINE)
            yield match.group(1) if match else ""


class MainThread:
    """Where this process's main thread may run. OpenMP binds it as it does the others, in every worker to the
    same CPU: while several workers prepare side by side they would take samples there, and the compilers that
    they start inherit where they may run. So it is bound while calls are timed, and otherwise not."""

    def __init__(self) -> None:
        self.bound: set[int] | None = None

    def release(self) -> None:
        """Notes where it is bound now, if it is, and lets it run on all of its NUMA node."""
        if hasattr(os, "sched_setaffinity"):
            now = os.sched_getaffinity(0)
            around = {cpu for node in nodes() if node & now for cpu in node & ALLOWED}
            if now < around:
                self.bound = now
                os.sched_setaffinity(0, around)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Binds it meanwhile to where it was."""
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
