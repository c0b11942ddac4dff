"""The CPU's timer: wall clock."""

from __future__ import annotations

import math
import time

from harness.workers.child.timers.base import Program, Timer, Turn

# What others left in the caches costs a call no more than reading its own anew: 32 MB at 10 GB/s are 3 ms,
# which of calls that take longer than this is under 1 %.
LONG_S = 0.5


class CpuTimer(Timer):
    """The monotonic clock around as many calls as fill the turn. Long calls have no untimed one before."""

    def turn(self, program: Program, at_least: float) -> Turn:
        if not LONG_S <= program.device_s < math.inf:
            program.step()
        count = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < at_least or not count:
            program.step()
            count += 1
        program.device_s = elapsed / count
        return Turn(elapsed / count, count)

    def synchronize(self) -> None:
        pass
