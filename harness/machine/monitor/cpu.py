"""CPU monitor: other processes, the hypervisor, throttling, a fallen frequency. Linux only."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from harness.files import JsonObject
from harness.machine.monitor.base import Blind, Clocks, Monitor, Ours
from harness.machine.monitor.procfs import TICK_S, Counters, Reading

# A kernel waits for its slowest thread, so the limits are shares of one CPU, however many there are.
STEAL = 0.02
OTHERS = 0.10
# ... or of all CPUs together, where that is more: a larger machine has more daemons.
OTHERS_OF_ALL = 0.01
# Counters of /proc/stat are rounded down, to 10 ms: a difference is up to a tick off.
STEAL_TICKS = 3
OTHERS_TICKS = 4  # of three counters to a line: idle, waiting, stolen
GLANCE_S = 0.25
NAMED = 3  # processes, in a line about others


def open_cpu(ours: Ours) -> Monitor:
    """A monitor of the CPUs that this process may use, or one that says why it sees nothing."""
    if not hasattr(os, "sched_getaffinity"):
        return Blind("not Linux")
    try:
        return CpuMonitor(ours, Counters())
    except OSError as error:
        return Blind(f"{error.filename}: {error.strerror}")


class CpuMonitor(Monitor):
    def __init__(self, ours: Ours, counters: Counters, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__()
        self.ours = ours
        self.sleep = sleep
        self.counters = counters
        self.clocks = Clocks("CPU frequency")
        self.adopted: set[int] = set()
        self.start: Reading | None = None
        self.since = math.nan
        self.spent: dict[int, float] = {}

    def begin(self) -> None:
        self.clocks.begin()
        self.start = self._read()

    def sample(self, work: str = "") -> None:
        try:
            frequency = self.counters.frequency(self.ours())
        except OSError as error:
            self.notes.unread["frequency_mhz"] = error.strerror or str(error)
            return
        self.notes.add("frequency_mhz", frequency)
        self.clocks.see(work, frequency)

    def end(self) -> str:
        reasons = list(self.clocks.fallen)
        if self.start is not None:
            reasons += self._judge(self.start, self._read())
            self._note_load()
        return "; ".join(reasons)

    def _note_load(self) -> None:
        try:
            self.notes.add("load", self.counters.load())
        except OSError as error:
            self.notes.unread["load"] = error.strerror or str(error)

    def before(self) -> list[str]:
        first, spent = self._read(), self._spent()
        self.sleep(GLANCE_S)
        now = self._read()
        lines = self._judge(first, now)
        wall = now.at - first.at
        took = {pid: (after - spent[pid]) / wall for pid, after in self._spent().items() if pid in spent}
        for pid in sorted(took.keys() - now.ours.keys(), key=took.__getitem__, reverse=True)[:NAMED]:
            if took[pid] > OTHERS:
                name = self.counters.name_of(pid)
                lines.append(f"process {pid} ({name}) takes {took[pid]:.0%} of a CPU")
        self.notes.take()  # no round's
        return lines

    def conditions(self) -> JsonObject:
        """Also `processes`: others that took more than OTHERS of a CPU since the last call, in per cent."""
        taken = super().conditions()
        now, spent, ours = self.counters.clock(), self._spent(), self._family(all_threads=True)
        wall = now - self.since
        took = {pid: (after - self.spent.get(pid, 0.0)) / wall for pid, after in spent.items()}
        busiest = sorted(took.keys() - ours, key=took.__getitem__, reverse=True)[:NAMED]
        others = {pid: took[pid] for pid in busiest if took[pid] > OTHERS}
        if others:
            taken["processes"] = {
                f"{self.counters.name_of(pid)} {pid}": round(100 * share) for pid, share in others.items()
            }
        self.since, self.spent = now, spent
        return taken

    def readable(self) -> dict[str, str]:
        self.begin()
        self.sleep(GLANCE_S)
        self.sample()
        self.end()
        return self.notes.show()

    def _judge(self, start: Reading, now: Reading) -> list[str]:
        lines = [self._stolen(start, now), self._others(start, now)]
        if now.throttled > start.throttled:
            lines.append(f"the control group's CPU quota held us for {now.throttled - start.throttled:.3f} s")
        if now.overheated > start.overheated:
            lines.append(f"the CPU was slowed for heat {now.overheated - start.overheated} times")
        return [line for line in lines if line]

    def _stolen(self, start: Reading, now: Reading) -> str:
        """What the hypervisor gave to other machines, on the CPU that lost most."""
        wall = now.at - start.at
        ticks, cpu = max((now.cpus[c].stolen - start.cpus[c].stolen, c) for c in self.counters.lines)
        share = ticks * TICK_S / wall
        self.notes.add("steal_percent", 100 * share)
        if ticks < STEAL_TICKS or share <= STEAL:
            return ""
        return f"the hypervisor took {share:.0%} of {cpu}"

    def _others(self, start: Reading, now: Reading) -> str:
        """The time that CPUs were busy less what we used. When one of our processes ended between the
        readings, its last use is not known, and nobody else is blamed for it."""
        if start.ours.keys() - now.ours.keys():
            self.notes.unread["others_percent"] = "one of our own processes ended meanwhile"
            return ""
        wall, lines = now.at - start.at, self.counters.sum_lines
        whole = wall * len(self.counters.lines)

        def passed(counter: str) -> float:
            return (
                sum(getattr(now.cpus[c], counter) - getattr(start.cpus[c], counter) for c in lines) * TICK_S
            )

        if passed("total") < whole / 2 - OTHERS_TICKS * TICK_S:
            self.notes.unread["others_percent"] = "/proc/stat does not count all time here"
            return ""
        used = sum(seconds - start.ours.get(pid, 0.0) for pid, seconds in now.ours.items())
        used += sum(seconds - start.reaped.get(pid, 0.0) for pid, seconds in now.reaped.items())
        others = whole - passed("idle") - passed("stolen") - used
        rounding = OTHERS_TICKS * TICK_S * math.sqrt(len(lines))
        limit = max(OTHERS * wall, OTHERS_OF_ALL * whole, rounding)
        if others > limit:
            others -= self._unknown(now)
        self.notes.add("others_percent", max(0.0, 100 * others / wall))
        return f"other processes took {others / wall:.0%} of a CPU" if others > limit else ""

    def _unknown(self, now: Reading) -> float:
        """CPU seconds, since they were started, of descendants that were not known yet."""
        known = self.counters.read(self._family(all_threads=True)).ours
        return sum(seconds for pid, seconds in known.items() if pid not in now.ours)

    def _read(self) -> Reading:
        return self.counters.read(self._family())

    def _family(self, all_threads: bool = False) -> set[int]:
        """This process, the workers and their descendants. To read the children of each of a hundred
        threads takes a millisecond, and main threads start nearly all: the others' are looked for when
        somebody unknown is seen to run, and known from then on."""
        family: set[int] = set()
        queue = [*self.ours(), *self.adopted]
        while queue:
            pid = queue.pop()
            if pid not in family:
                family.add(pid)
                queue += self.counters.children(pid, all_threads)
        if all_threads:
            self.adopted = family - set(self.ours())
        return family | {os.getpid()}

    def _spent(self) -> dict[int, float]:
        """CPU seconds of every process."""
        return self.counters.read(self.counters.everyone()).ours
