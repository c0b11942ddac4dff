"""Linux counters of who used the CPUs and what slowed them: /proc, /sys and process clocks."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness.machine import cgroups

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def text(path: Path | str) -> str:
    """A small file as it is now; half the time of Path.read_text. OSError if it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16).decode(errors="replace")
    finally:
        os.close(descriptor)


def process_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process, ended ones too, to the nanosecond; OSError if it is gone.

    The clock is the one that clock_getcpuclockid(3) names; /proc/<pid>/stat has the same in ticks, and
    /proc/<pid>/schedstat has that of one thread.
    """
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(frozen=True)
class Ticks:
    """Of one CPU, or of all together: without work (waiting for a disk too), stolen by the hypervisor, and
    the sum of all."""

    idle: int
    stolen: int
    total: int


@dataclass(frozen=True)
class Reading:
    """The counters at one moment.

    at:         seconds
    cpus:       line of /proc/stat -> its ticks, of the CPUs that this process may use
    ours:       process -> CPU seconds: the workers and their descendants, and this process
    reaped:     worker or descendant -> CPU seconds of those children of its that have ended
    throttled:  seconds, or the kernel's sum over CPUs, that our control groups were held by their quota
    overheated: times that a package was slowed for heat
    """

    at: float
    cpus: dict[str, Ticks] = field(default_factory=dict)
    ours: dict[int, float] = field(default_factory=dict)
    reaped: dict[int, float] = field(default_factory=dict)
    throttled: float = 0.0
    overheated: int = 0


class Counters:
    """root: where proc and sys are; cpus: those this process may use; cpu_time: of a process, seconds.
    Raises OSError where there is no /proc/stat, or none with CPUs in it."""

    def __init__(
        self,
        root: Path = Path("/"),
        cpus: Iterable[int] | None = None,
        cpu_time: Callable[[int], float] = process_seconds,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.proc = root / "proc"
        self.devices = root / "sys/devices/system/cpu"
        self.cpus = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
        self.cpu_time = cpu_time
        self.clock = clock
        present = self._stat().keys() - {"cpu"}
        mine = {f"cpu{cpu}" for cpu in self.cpus}
        # A container may count its CPUs from 0, whichever they are.
        self.lines = sorted(mine if mine <= present else present)
        if not self.lines:
            raise OSError(errno.ENODATA, "it counts no CPU", f"{self.proc}/stat")
        # The sum over all CPUs is rounded once, their own lines once each.
        self.sum_lines = ["cpu"] if len(self.lines) == len(present) else self.lines
        self.quota_files = _quota_files(root)
        self.heat_files = self._heat_files()
        self.no_frequency = self._no_frequency()

    def read(self, processes: Iterable[int]) -> Reading:
        """Processes that are gone are left out."""
        ours, reaped = {}, {}
        for pid in processes:
            try:
                ours[pid] = self.cpu_time(pid)
                if pid != os.getpid():
                    reaped[pid] = self._reaped(pid)
            except OSError:
                ours.pop(pid, None)
        at = self.clock()
        return Reading(at, self._stat(), ours, reaped, self._throttled(), self._overheated())

    def _stat(self) -> dict[str, Ticks]:
        """/proc/stat down to the first line that is no CPU's."""
        ticks_of = {}
        for line in text(f"{self.proc}/stat").splitlines():
            name, *rest = line.split()
            if not name.startswith("cpu"):
                break
            ticks = [int(value) for value in rest[:8]]
            ticks_of[name] = Ticks(ticks[3] + ticks[4], ticks[7], sum(ticks))
        return ticks_of

    def fields(self, pid: int) -> list[str]:
        """/proc/<pid>/stat from the state on: field n of proc(5) is at n - 3. OSError if it is gone."""
        return text(f"{self.proc}/{pid}/stat").rpartition(")")[2].split()

    def _reaped(self, pid: int) -> float:
        fields = self.fields(pid)
        return (int(fields[13]) + int(fields[14])) * TICK_S  # cutime, cstime

    def children(self, pid: int, all_threads: bool = False) -> list[int]:
        """Started by the main thread, or by any: a file is read for each."""
        tasks = f"{self.proc}/{pid}/task"
        try:
            threads = os.listdir(tasks) if all_threads else [str(pid)]  # noqa: PTH208 - twice as fast
            return [int(c) for t in threads for c in text(f"{tasks}/{t}/children").split()]
        except OSError:
            return []

    def everyone(self) -> list[int]:
        return [int(entry.name) for entry in self.proc.iterdir() if entry.name.isdigit()]

    def name_of(self, pid: int) -> str:
        try:
            return (self.proc / str(pid) / "comm").read_text().strip()
        except OSError:
            return "?"

    def load(self) -> float:
        return float(text(f"{self.proc}/loadavg").split()[0])

    def frequency(self, processes: Iterable[int]) -> float:
        """MHz, the highest of the CPUs on which these processes' main threads last ran: the others may be
        idle. Raises OSError, with the reason, where it cannot be read."""
        if self.no_frequency:
            raise OSError(self.no_frequency)
        last = set()
        for pid in processes:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                last.add(int(self.fields(pid)[36]))
        files = [f"{self.devices}/cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in last]
        if not files:
            raise OSError("no worker runs")
        return max(int(text(file)) for file in files) / 1e3

    def _no_frequency(self) -> str:
        if (self.devices / f"cpu{self.cpus[0]}" / "cpufreq/scaling_cur_freq").exists():
            return ""
        info = (self.proc / "cpuinfo").read_text()
        virtual = re.search(r"^flags\s*:.*\bhypervisor\b", info, re.MULTILINE)
        return "a constant in a virtual machine" if virtual else "no cpufreq driver here"

    def _throttled(self) -> float:
        """cpu.stat has throttled_usec (version 2 of control groups) or throttled_time (1, nanoseconds)."""
        total = 0.0
        for file in self.quota_files:
            for line in text(file).splitlines():
                key, value = line.split()
                total += int(value) * {"throttled_usec": 1e-6, "throttled_time": 1e-9}.get(key, 0.0)
        return total

    def _overheated(self) -> int:
        return sum(int(text(file)) for file in self.heat_files)

    def _heat_files(self) -> list[Path]:
        """One for each package (Intel; AMD's driver has no such counters)."""
        files: dict[str, Path] = {}
        for cpu in self.cpus:
            package = self.devices / f"cpu{cpu}" / "topology/physical_package_id"
            file = self.devices / f"cpu{cpu}" / "thermal_throttle/package_throttle_count"
            if package.exists() and file.exists():
                files.setdefault(package.read_text(), file)
        return list(files.values())


def _quota_files(root: Path) -> list[Path]:
    """cpu.stat of our control groups, where they count throttling."""
    files = [folder / "cpu.stat" for folder in cgroups.folders(root)]
    return [file for file in files if file.exists() and "throttled" in file.read_text()]
