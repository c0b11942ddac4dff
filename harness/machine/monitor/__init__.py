"""Monitors: what disturbs a measurement on a device (clocks, throttling, other processes)."""

from __future__ import annotations

from harness.machine.monitor.amd import open_amd
from harness.machine.monitor.base import Monitor, WorkerPids
from harness.machine.monitor.cpu import open_cpu
from harness.machine.monitor.nvidia import open_nvidia
from kernels.platform import Platform


def monitor_for(platform: Platform, worker_pids: WorkerPids) -> Monitor:
    if platform.kind == "cuda":
        return open_nvidia(platform, worker_pids)
    return open_amd(platform, worker_pids) if platform.kind == "rocm" else open_cpu(worker_pids)
