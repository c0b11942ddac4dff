"""Monitors: what disturbs a measurement on a device (clocks, throttling, other processes)."""

from __future__ import annotations

from harness.machine.monitor.base import Monitor, Ours
from kernels.platform import Platform


def monitor_for(platform: Platform, ours: Ours) -> Monitor:
    """The monitor of a platform's device."""
    if platform.kind == "cuda":
        from harness.machine.monitor.nvidia import open_nvidia

        return open_nvidia(platform, ours)
    if platform.kind == "rocm":
        from harness.machine.monitor.amd import open_amd

        return open_amd(platform, ours)
    from harness.machine.monitor.cpu import open_cpu

    return open_cpu(ours)
