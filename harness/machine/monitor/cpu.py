"""CPU monitor: other processes, the hypervisor, throttling, a low frequency, by /proc and /sys of Linux."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.files import JsonObject
from harness.machine.cpu_threads import control_groups
from harness.machine.monitor.base import Blind, Monitor, WorkerPids

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""Counters of /proc/stat are rounded down to ticks of mostly 10 ms: a difference is up to one tick off."""

# A kernel waits for its slowest thread, so these limits are shares of one CPU, however many CPUs there are.
STEAL = 0.02  # the hypervisor disturbs a round if it takes more than this share of a CPU,
STEAL_TICKS = 3  # and at least so many ticks
OTHERS = 0.10  # other processes disturb a round if they take more than this share of a CPU,
OTHERS_OF_ALL = 0.01  # and more than this share of all CPUs: large machines have many daemons
OTHERS_TICKS = 4  # the error of the time of others, in ticks: three counters of a line are rounded
GLANCE_S = 0.25  # seconds between two readings that judge the machine before a run
NAMED = 3  # the most other processes that are named


def text(path: Path | str) -> str:
    """A small file as it is now, in half the time of Path.read_text. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16).decode(errors="replace")
    finally:
        os.close(descriptor)


def process_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process, ended threads included; raises OSError if it is gone.

    It reads the clock whose number clock_getcpuclockid(3) would compute, which is exact to the nanosecond:
    /proc/PID/stat counts in ticks, and /proc/PID/schedstat counts one thread.
    """
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(frozen=True)
class Ticks:
    """Ticks of one CPU, or of all together."""

    idle: int  # idle ticks, those of waiting for a disk included
    stolen: int  # ticks that the hypervisor gave to other machines
    total: int


@dataclass(frozen=True)
class Reading:
    """The counters at one moment."""

    at_s: float  # by the clock
    cpus: dict[str, Ticks]  # name of a line of /proc/stat -> its ticks
    ours: dict[int, float]  # process id -> CPU seconds, of the processes that were asked for and still live
    reaped: dict[int, float]  # process id -> CPU seconds of its ended children; not of this process
    throttled_s: float  # for which quotas stopped our control groups; in version 1 summed over CPUs
    overheated: int  # how often a package was slowed because of heat


class Counters:
    """Reads the counters of /proc and /sys."""

    def __init__(
        self,
        root: Path = Path("/"),
        cpus: Iterable[int] | None = None,
        cpu_time: Callable[[int], float] = process_seconds,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises OSError where /proc/stat is missing or counts no CPU. root: the folder that holds proc and
        sys; cpus: those that this process may use; cpu_time: gives the CPU seconds of a process"""
        self.proc = root / "proc"
        self.devices = root / "sys/devices/system/cpu"
        self.cpus = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
        self.cpu_time = cpu_time
        self.clock = clock
        present = self._stat().keys() - {"cpu"}
        mine = {f"cpu{cpu}" for cpu in self.cpus}
        # A container may count its CPUs from 0, whichever CPUs of the host they are.
        self.lines = sorted(mine if mine <= present else present)
        if not self.lines:
            raise OSError(errno.ENODATA, "it counts no CPU", f"{self.proc}/stat")
        # The sum over all CPUs is rounded once; a sum of their lines is rounded once for each CPU.
        self.sum_lines = ["cpu"] if len(self.lines) == len(present) else self.lines
        stats = [folder / "cpu.stat" for folder in control_groups(root)]
        self.quota_files = [file for file in stats if file.exists() and b"throttled" in file.read_bytes()]
        self.heat_files = self._heat_files()
        self.no_frequency = self._no_frequency()

    def read(self, processes: Iterable[int]) -> Reading:
        """Reads all counters. Processes that are gone are left out."""
        ours, reaped = {}, {}
        for pid in processes:
            with contextlib.suppress(OSError):
                used_s = self.cpu_time(pid)
                if pid != os.getpid():
                    fields = self.fields(pid)
                    reaped[pid] = (int(fields[13]) + int(fields[14])) * TICK_S  # cutime, cstime
                ours[pid] = used_s
        overheated = sum(int(text(file)) for file in self.heat_files)
        return Reading(self.clock(), self._stat(), ours, reaped, self._throttled(), overheated)

    def _stat(self) -> dict[str, Ticks]:
        """/proc/stat up to the first line that is not about a CPU."""
        ticks_of = {}
        for line in text(f"{self.proc}/stat").splitlines():
            name, *values = line.split()
            if not name.startswith("cpu"):
                break
            user, nice, system, idle, iowait, irq, softirq, steal = map(int, values[:8])
            total = user + nice + system + idle + iowait + irq + softirq + steal
            ticks_of[name] = Ticks(idle + iowait, steal, total)
        return ticks_of

    def fields(self, pid: int) -> list[str]:
        """/proc/PID/stat from the state on: field n of proc(5) has index n - 3. Raises OSError."""
        return text(f"{self.proc}/{pid}/stat").rpartition(")")[2].split()

    def children(self, pid: int, all_threads: bool = False) -> list[int]:
        """The child processes of the main thread, or of all threads. One file is read for each thread."""
        tasks = f"{self.proc}/{pid}/task"
        try:
            threads = os.listdir(tasks) if all_threads else [str(pid)]  # noqa: PTH208 - twice as fast
            return [int(c) for t in threads for c in text(f"{tasks}/{t}/children").split()]
        except OSError:
            return []

    def name_of(self, pid: int) -> str:
        try:
            return (self.proc / str(pid) / "comm").read_text("utf-8").strip()
        except OSError:
            return "?"

    def load(self) -> float:
        return float(text(f"{self.proc}/loadavg").split()[0])

    def frequency(self, processes: Iterable[int]) -> float:
        """MHz: the highest of the CPUs on which the main threads of these processes last ran, as the other
        CPUs may be idle. Raises OSError, with the reason, where it cannot be read."""
        if self.no_frequency:
            raise OSError(self.no_frequency)
        last_cpus = set()
        for pid in processes:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                last_cpus.add(int(self.fields(pid)[36]))  # processor
        files = [f"{self.devices}/cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in last_cpus]
        if not files:
            raise OSError("no worker runs")
        return max(int(text(file)) for file in files) / 1e3

    def _no_frequency(self) -> str:
        """Why the frequency cannot be read; empty where it can."""
        if (self.devices / f"cpu{self.cpus[0]}" / "cpufreq/scaling_cur_freq").exists():
            return ""
        info = (self.proc / "cpuinfo").read_text("utf-8")
        virtual = re.search(r"^flags\s*:.*\bhypervisor\b", info, re.MULTILINE)
        return "a constant in a virtual machine" if virtual else "no cpufreq driver here"

    def _throttled(self) -> float:
        """cpu.stat has throttled_usec (version 2 of control groups) or throttled_time (1, nanoseconds)."""
        units = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
        lines = (line.split() for file in self.quota_files for line in text(file).splitlines())
        return sum(int(value) * units.get(key, 0.0) for key, value in lines)

    def _heat_files(self) -> list[Path]:
        """One file for each package. AMD's driver has no such counters."""
        files: dict[str, Path] = {}
        for cpu in self.cpus:
            package = self.devices / f"cpu{cpu}" / "topology/physical_package_id"
            file = self.devices / f"cpu{cpu}" / "thermal_throttle/package_throttle_count"
            if package.exists() and file.exists():
                files.setdefault(package.read_text("utf-8"), file)
        return list(files.values())


def open_cpu(worker_pids: WorkerPids) -> Monitor:
    """A monitor of the CPUs that this process may use, or one that says why it reads nothing."""
    if not hasattr(os, "sched_getaffinity"):
        return Blind("not Linux")
    try:
        return CpuMonitor(worker_pids, Counters())
    except OSError as error:
        return Blind(f"{error.filename}: {error.strerror}")


class CpuMonitor(Monitor):
    clock_name = "CPU frequency"

    def __init__(
        self, worker_pids: WorkerPids, counters: Counters, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__()
        self.worker_pids, self.counters, self.sleep = worker_pids, counters, sleep
        self.descendants: set[int] = set()  # of workers, as the last search of all threads found them
        self.start: Reading | None = None  # the counters at the beginning of the round
        # When `take_conditions` was last called, and the CPU seconds of every process at that time.
        self.conditions_at_s = math.nan  # makes the shares of the first call NaN, so that it names no process
        self.spent_before: dict[int, float] = {}

    def begin(self) -> None:
        self.low_clocks.clear()
        self.start = self._read()

    def sample(self, work: str = "") -> None:
        try:
            frequency = self.counters.frequency(self.worker_pids())
        except OSError as error:
            self.notes.unread["frequency_mhz"] = error.strerror or str(error)
            return
        self.notes.add("frequency_mhz", frequency)
        self.check_clock(work, frequency)

    def end(self) -> str:
        reasons = list(self.low_clocks)
        if self.start is not None:
            reasons += self._disturbances(self.start, self._read())
            try:
                self.notes.add("load", self.counters.load())
            except OSError as error:
                self.notes.unread["load"] = error.strerror or str(error)
        return "; ".join(reasons)

    def complaints(self) -> list[str]:
        first, spent = self._read(), self._spent()
        self.sleep(GLANCE_S)
        now = self._read()
        lines = self._disturbances(first, now)
        for pid, share in self._busiest(spent, self._spent(), now.at_s - first.at_s, now.ours).items():
            lines.append(f"process {pid} ({self.counters.name_of(pid)}) takes {share:.0%} of a CPU")
        self.notes.take()  # these readings are not of a round
        return lines

    def take_conditions(self) -> JsonObject:
        """Also `processes`: others that took more than OTHERS since the last call, in per cent of a CPU."""
        taken = super().take_conditions()
        now_s, spent = self.counters.clock(), self._spent()
        before = dict.fromkeys(spent, 0.0) | self.spent_before  # 0 of a process that began since then
        ours = self._own_processes(all_threads=True)
        others = self._busiest(before, spent, now_s - self.conditions_at_s, ours).items()
        if others:
            taken["processes"] = {f"{self.counters.name_of(pid)} {pid}": round(100 * s) for pid, s in others}
        self.conditions_at_s, self.spent_before = now_s, spent
        return taken

    def current_values(self) -> dict[str, str]:
        self.begin()
        self.sleep(GLANCE_S)
        self.sample()
        self.end()
        return self.notes.show()

    @staticmethod
    def _busiest(
        before: dict[int, float], after: dict[int, float], wall_s: float, ours: Iterable[int]
    ) -> dict[int, float]:
        """The foreign processes that took more than OTHERS of a CPU -> their share of one, the largest first.
        before, after: CPU seconds by process id"""
        foreign = (before.keys() & after.keys()) - set(ours)
        shares = Counter({pid: (after[pid] - before[pid]) / wall_s for pid in foreign})
        return {pid: share for pid, share in shares.most_common(NAMED) if share > OTHERS}

    def _disturbances(self, start: Reading, now: Reading) -> list[str]:
        lines = [self._stolen(start, now), self._others(start, now)]
        if now.throttled_s > start.throttled_s:
            held_s = now.throttled_s - start.throttled_s
            lines.append(f"the control group's CPU quota held us for {held_s:.3f} s")
        if now.overheated > start.overheated:
            lines.append(f"the CPU was slowed for heat {now.overheated - start.overheated} times")
        return [line for line in lines if line]

    def _stolen(self, start: Reading, now: Reading) -> str:
        """What the hypervisor gave to other machines, on the CPU that lost most; empty if it is little."""
        stolen = {cpu: now.cpus[cpu].stolen - start.cpus[cpu].stolen for cpu in self.counters.lines}
        cpu = max(stolen, key=stolen.__getitem__)
        ticks = stolen[cpu]
        share = ticks * TICK_S / (now.at_s - start.at_s)
        self.notes.add("steal_percent", 100 * share)
        if ticks < STEAL_TICKS or share <= STEAL:
            return ""
        return f"the hypervisor took {share:.0%} of {cpu}"

    def _others(self, start: Reading, now: Reading) -> str:
        """The time that CPUs were busy, less what we used; empty if it is little. If one of our processes
        ended between the readings, its last use is unknown, and other processes are not blamed for it."""
        if start.ours.keys() - now.ours.keys():
            self.notes.unread["others_percent"] = "one of our own processes ended meanwhile"
            return ""
        wall_s, lines = now.at_s - start.at_s, self.counters.sum_lines
        all_cpus_s = wall_s * len(self.counters.lines)
        pairs = [(start.cpus[line], now.cpus[line]) for line in lines]
        counted_s = TICK_S * sum(after.total - before.total for before, after in pairs)
        idle_s = TICK_S * sum(after.idle - before.idle for before, after in pairs)
        stolen_s = TICK_S * sum(after.stolen - before.stolen for before, after in pairs)
        # The counters should add up to the time of all CPUs. Where they are far from it, they say nothing.
        if counted_s < all_cpus_s / 2 - OTHERS_TICKS * TICK_S:
            self.notes.unread["others_percent"] = "/proc/stat does not count all time here"
            return ""
        ours_s = sum(seconds - start.ours.get(pid, 0.0) for pid, seconds in now.ours.items())
        ours_s += sum(seconds - start.reaped.get(pid, 0.0) for pid, seconds in now.reaped.items())
        others_s = all_cpus_s - idle_s - stolen_s - ours_s
        rounding_s = OTHERS_TICKS * TICK_S * math.sqrt(len(lines))
        limit_s = max(OTHERS * wall_s, OTHERS_OF_ALL * all_cpus_s, rounding_s)
        if others_s > limit_s:  # perhaps they are descendants of ours that were not known yet
            descendants = self.counters.read(self._own_processes(all_threads=True)).ours
            others_s -= sum(seconds for pid, seconds in descendants.items() if pid not in now.ours)
        self.notes.add("others_percent", max(0.0, 100 * others_s / wall_s))
        return f"other processes took {others_s / wall_s:.0%} of a CPU" if others_s > limit_s else ""

    def _read(self) -> Reading:
        return self.counters.read(self._own_processes())

    def _own_processes(self, all_threads: bool = False) -> set[int]:
        """This process, the workers and their descendants.

        Main threads start nearly all children, and reading those of a hundred threads takes a millisecond. So
        other threads are searched (`all_threads`) only when an unknown process runs; it is then remembered.
        """
        family: set[int] = set()
        queue = [*self.worker_pids(), *self.descendants]
        while queue:
            pid = queue.pop()
            if pid not in family:
                family.add(pid)
                queue += self.counters.children(pid, all_threads)
        if all_threads:
            self.descendants = family - set(self.worker_pids())
        return family | {os.getpid()}

    def _spent(self) -> dict[int, float]:
        """CPU seconds of every process of the machine."""
        folders = self.counters.proc.iterdir()
        return self.counters.read(int(folder.name) for folder in folders if folder.name.isdigit()).ours
