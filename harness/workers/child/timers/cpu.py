"""The CPU's timer: wall clock."""

from __future__ import annotations

import time

from harness.workers.child.timers.base import Program, Timer, Turn


class CpuTimer(Timer):
    """The monotonic clock around as many calls as fill the turn."""

    def turn(self, program: Program, at_least: float) -> Turn:
        program.step()
        count = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < at_least or not count:
            program.step()
            count += 1
        return Turn(elapsed / count, count)

    def synchronize(self) -> None:
        pass
