"""CPU time that other processes took while ours ran, so that a page can say whether `quiet` was quiet."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from harness.machine.monitor.procfs import TICK_S, Counters


@dataclass(frozen=True)
class Moment:
    """at: seconds; busy: CPU seconds of all processes and of the hypervisor's other machines, on the CPUs
    that this process may use; ours: of this process and of its children that have ended, and theirs."""

    at: float
    busy: float
    ours: float

    @staticmethod
    def now(counters: Counters) -> Moment:
        ticks = counters.read(()).cpus
        busy = sum(ticks[cpu].total - ticks[cpu].idle for cpu in counters.lines) * TICK_S
        return Moment(time.perf_counter(), busy, sum(os.times()[:4]))

    def others_until(self, later: Moment) -> float:
        """How many CPUs others kept busy; the counters are off by a few ticks."""
        others = later.busy - self.busy - (later.ours - self.ours)
        return max(0.0, others / (later.at - self.at))
