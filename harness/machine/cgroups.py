"""Control groups that this process is in, and the CPU time they grant (Linux, versions 1 and 2)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/")


def folders(root: Path = SYSTEM) -> list[Path]:
    """Of our group, as far as CPUs go, and of those around it."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = ["0::/"]
    groups_above: list[Path] = []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the mount's root is our own group, and `path` may be seen from outside.
        mount = root / "sys/fs/cgroup" / controllers
        inner = mount / path.lstrip("/")
        groups_above += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount)]
    return groups_above


def quota(root: Path = SYSTEM) -> float:
    """CPUs' worth of time, the least that any of them grants; infinite where none limits it."""
    return min((granted for folder in folders(root) for granted in _granted(folder)), default=math.inf)


def _granted(folder: Path) -> Iterator[float]:
    """Microseconds in each period: `max` (version 2) or -1 (1) for no limit."""
    with contextlib.suppress(OSError):
        share, period = (folder / "cpu.max").read_text().split()
        if share != "max":
            yield int(share) / int(period)
    with contextlib.suppress(OSError):
        share, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(share) > 0:
            yield int(share) / int(period)
