"""The CPU's timer: wall clock."""

from __future__ import annotations

import math
import resource
import time

from harness.machine.cpu_threads import MAIN_THREAD
from harness.workers.child.timers.base import Program, Sample, Timer

# What others left in the caches costs a call no more than reading its own anew: 32 MB at 10 GB/s are 3 ms,
# which of calls that take longer than this is under 1 %.
LONG_S = 0.5

# A sample faults in fewer pages than this once all that its calls write to was touched.
FEW_PAGES = 16


class CpuTimer(Timer):
    """The monotonic clock around as many calls as fill the sample. Long calls have no untimed one before.
    Where calls on a set of operands that the rotation had not reached faulted memory in, which on a virtual
    machine takes up to 4 s a GiB, the sample counts as untimed and another one follows."""

    def sample(self, program: Program, at_least: float) -> Sample:
        with MAIN_THREAD.in_place():
            return self._turn(program, at_least)

    def _turn(self, program: Program, at_least: float) -> Sample:
        if not LONG_S <= program.device_s < math.inf:
            program.step()
            if program.after_untimed:
                program.after_untimed()
        touching = True
        while touching:
            reaching, faults = not program.reached(len(program.steps) - 1), _page_faults()
            count = 0
            started = time.perf_counter()
            while (elapsed := time.perf_counter() - started) < at_least or not count:
                program.step()
                count += 1
            touching = reaching and _page_faults() - faults > FEW_PAGES
        program.device_s = elapsed / count
        return Sample(elapsed / count, count)

    def synchronize(self) -> None:
        pass


def _page_faults() -> int:
    """Of this process so far, those that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
