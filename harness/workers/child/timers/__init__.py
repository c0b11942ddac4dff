"""Timers of a device: events on a GPU, the wall clock on a CPU, a captured graph."""

from __future__ import annotations

from harness.workers.child.timers.base import Timer
from harness.workers.child.timers.cpu import CpuTimer


def timer_for(kind: str, launch: str) -> Timer:
    """kind: cuda, rocm or cpu; launch: eager or graph"""
    if kind == "cpu":
        return CpuTimer()
    from harness.workers.child.timers.events import EventTimer
    from harness.workers.child.timers.graph import GraphTimer

    return GraphTimer() if launch == "graph" else EventTimer()
