"""Monitors: what disturbs a measurement on a device (clocks, throttling, other processes)."""

from __future__ import annotations

from harness.machine.monitor.amd import open_amd
from harness.machine.monitor.base import Monitor, Ours
from harness.machine.monitor.cpu import open_cpu
from harness.machine.monitor.nvidia import open_nvidia
from kernels.platform import Platform


def monitor_for(platform: Platform, ours: Ours) -> Monitor:
    if platform.kind == "cuda":
        return open_nvidia(platform, ours)
    return open_amd(platform, ours) if platform.kind == "rocm" else open_cpu(ours)
