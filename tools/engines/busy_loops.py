"""A busy loop on each core, which ends with whoever started it, however that ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from harness.machine.cpu_threads import ALLOWED

# Killed outright, its parent cannot stop it: it looks whether it still has that one.
LOOP = """
import os, sys
parent, cpu = map(int, sys.argv[1:])
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {cpu})
while os.getppid() == parent:
    for _ in range(10_000_000):
        pass
"""


@contextlib.contextmanager
def busy_loops() -> Iterator[list[int]]:
    """Their process ids, one for each CPU that this process may use."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for cpu in sorted(ALLOWED):
            loops.append(subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid()), str(cpu)]))
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
