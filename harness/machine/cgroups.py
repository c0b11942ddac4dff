"""The control groups of this process, and the CPU time that they grant (Linux, versions 1 and 2)."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

SYSTEM = Path("/")


def control_groups(root: Path = SYSTEM) -> list[Path]:
    """The folders of the control groups (version 1 or 2) that limit the CPU time of this process: its own
    group and the groups around it."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
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
    """The smallest limit that a control group sets, in CPUs (1.5 is one and a half CPUs' worth of time);
    infinite where no group sets one."""
    limits = [math.inf]
    for folder in control_groups(root):
        with contextlib.suppress(OSError):  # version 2: microseconds in each period, or `max`
            share, period = (folder / "cpu.max").read_text().split()
            if share != "max":
                limits.append(int(share) / int(period))
        with contextlib.suppress(OSError):  # version 1: -1 means no limit
            share, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(share) > 0:
                limits.append(int(share) / int(period))
    return min(limits)
