"""What a CPU monitor calls a disturbance, and what not."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.machine.monitor import monitor_for
from harness.machine.monitor.base import Blind
from harness.machine.monitor.cpu import CpuMonitor
from harness.machine.monitor.procfs import TICK_S, Counters, Reading, process_seconds
from kernels.platform import Platform
from tests.support.fake_linux import FakeLinux

WORKER = 4242


@pytest.fixture
def linux(tmp_path: Path) -> FakeLinux:
    fake = FakeLinux(tmp_path)
    fake.start(WORKER)
    return fake


def watch(fake: FakeLinux, *workers: int, cpus: tuple[int, ...] | None = None) -> CpuMonitor:
    mine = list(workers or (WORKER,))
    return CpuMonitor(
        lambda: [pid for pid in mine if pid in fake.seconds], fake.counters(cpus), lambda s: None
    )


def test_a_quiet_round_in_which_only_ours_worked(linux: FakeLinux) -> None:
    monitor = watch(linux)
    monitor.begin()
    linux.pass_time(1.0, busy={0: 1.0, 1: 1.0})
    linux.use(WORKER, 1.97)
    linux.use(os.getpid(), 0.02)
    assert monitor.end() == ""
    read = monitor.conditions()
    assert read["others_percent"]["max"] == pytest.approx(1.0, abs=0.01)
    assert read["steal_percent"] == {"min": 0, "median": 0, "max": 0}
    assert read["load"]["median"] == 0.5


def test_another_process_on_a_cpu_of_ours(linux: FakeLinux) -> None:
    monitor = watch(linux)
    monitor.begin()
    linux.pass_time(1.0, busy={0: 1.0, 1: 0.2})
    linux.use(WORKER, 1.0)
    assert monitor.end() == "other processes took 20% of a CPU"


def test_a_process_on_cpus_that_we_may_not_use_is_no_matter(linux: FakeLinux) -> None:
    monitor = watch(linux, cpus=(0,))
    monitor.begin()
    linux.pass_time(1.0, busy={0: 1.0, 1: 1.0})
    linux.use(WORKER, 1.0)
    assert monitor.end() == ""


def test_two_ticks_in_a_short_round_are_rounding(linux: FakeLinux) -> None:
    monitor = watch(linux)
    monitor.begin()
    linux.pass_time(0.1, busy={0: 0.1, 1: 0.03})
    linux.use(WORKER, 0.1)
    assert monitor.end() == ""
    monitor.begin()
    linux.pass_time(0.1, busy={0: 0.1, 1: 0.06})
    linux.use(WORKER, 0.1)
    assert monitor.end() == "other processes took 60% of a CPU"


def test_a_large_machine_has_more_daemons(tmp_path: Path) -> None:
    fake = FakeLinux(tmp_path, cpus=128)
    fake.start(WORKER)
    monitor = watch(fake)
    for daemons, disturbed in ((1.0, False), (1.5, True)):
        monitor.begin()
        fake.pass_time(1.0, busy={0: 1.0, 1: daemons / 2, 2: daemons / 2})
        fake.use(WORKER, 1.0)
        assert bool(monitor.end()) is disturbed


def test_stolen_time_counts_by_the_cpu_that_lost_most(linux: FakeLinux) -> None:
    monitor = watch(linux)
    monitor.begin()
    linux.pass_time(1.0, busy={0: 1.0, 1: 0.96}, stolen={1: 0.04})
    linux.use(WORKER, 1.96)
    assert monitor.end() == "the hypervisor took 4% of cpu1"
    assert monitor.conditions()["steal_percent"]["max"] == pytest.approx(4)


@pytest.mark.parametrize(("wall", "stolen"), [(0.1, 0.02), (10.0, 0.19)])
def test_little_stolen_time_is_none(linux: FakeLinux, wall: float, stolen: float) -> None:
    """Two ticks of a short round, or under 2 % of a long one."""
    monitor = watch(linux)
    monitor.begin()
    linux.pass_time(wall, busy={}, stolen={0: stolen})
    assert monitor.end() == ""


def test_children_of_our_workers_are_ours(linux: FakeLinux) -> None:
    linux.start(50)
    linux.start(51)
    linux.start(WORKER, {WORKER: [50]})
    linux.start(50, {50: [51]})
    monitor = watch(linux)
    monitor.begin()
    linux.pass_time(1.0, busy={0: 1.0, 1: 1.0})
    linux.use(50, 1.0)
    linux.use(51, 1.0)
    assert monitor.end() == ""


def test_a_child_that_was_started_and_ended_within_the_round_is_ours(linux: FakeLinux) -> None:
    monitor = watch(linux)
    monitor.begin()
    linux.reaped[WORKER] = 0.8
    linux.pass_time(1.0, busy={0: 1.0, 1: 0.8})
    linux.use(WORKER, 1.0)
    assert monitor.end() == ""


def test_a_child_of_another_thread_is_found_when_it_works(linux: FakeLinux) -> None:
    linux.start(50)
    linux.start(WORKER, {WORKER: [], WORKER + 1: [50]})
    monitor = watch(linux)
    for _ in range(2):
        monitor.begin()
        linux.pass_time(1.0, busy={0: 1.0})
        linux.use(50, 1.0)
        assert monitor.end() == ""
    # What it did before does not excuse others now.
    monitor.begin()
    linux.pass_time(1.0, busy={0: 1.0})
    assert monitor.end() == "other processes took 100% of a CPU"


def test_a_worker_started_in_the_round_is_ours_from_its_first_second(linux: FakeLinux) -> None:
    monitor = watch(linux, WORKER, 77)
    monitor.begin()
    linux.start(77)
    linux.use(77, 0.9)
    linux.pass_time(1.0, busy={0: 0.9})
    assert monitor.end() == ""


def test_nobody_is_blamed_for_a_worker_that_died(linux: FakeLinux) -> None:
    linux.start(77)
    monitor = watch(linux, WORKER, 77)
    monitor.begin()
    linux.pass_time(1.0, busy={0: 1.0, 1: 1.0}, stolen={})
    linux.use(WORKER, 1.0)
    linux.stop(77)
    assert monitor.end() == ""
    read = monitor.conditions()
    assert "others_percent" not in read
    assert read["not_read"]["others_percent"] == "one of our own processes ended meanwhile"
    monitor.begin()
    linux.pass_time(1.0, busy={0: 1.0})
    assert monitor.end() == "other processes took 100% of a CPU"


def test_a_proc_that_counts_nothing_accuses_nobody(linux: FakeLinux) -> None:
    """As some sandboxes have it: all zero."""
    monitor = watch(linux)
    monitor.begin()
    linux.now += 1.0
    assert monitor.end() == ""
    assert monitor.conditions()["not_read"]["others_percent"] == "/proc/stat does not count all time here"


def test_a_container_may_number_its_cpus_from_zero(linux: FakeLinux) -> None:
    monitor = watch(linux, cpus=(6, 7))
    monitor.begin()
    linux.pass_time(1.0, busy={0: 1.0})
    assert monitor.end() == "other processes took 100% of a CPU"


@pytest.mark.parametrize(
    ("group", "folder", "before", "after"),
    [
        ("0::/jobs/one\n", "sys/fs/cgroup/jobs/one", "throttled_usec 5", "throttled_usec 200005"),
        ("0::/jobs/one\n", "sys/fs/cgroup/jobs", "throttled_usec 5", "throttled_usec 200005"),
        (
            "4:cpuset:/\n3:cpu,cpuacct:/seen/outside\n",
            "sys/fs/cgroup/cpu,cpuacct",
            "throttled_time 0",
            "throttled_time 200000000",
        ),
    ],
)
def test_a_quota_that_held_our_group(
    linux: FakeLinux, group: str, folder: str, before: str, after: str
) -> None:
    linux.write("proc/self/cgroup", group)
    linux.write(f"{folder}/cpu.stat", f"nr_periods 7\n{before}\n")
    monitor = watch(linux)
    monitor.begin()
    linux.pass_time(1.0, busy={})
    assert monitor.end() == ""
    monitor.begin()
    linux.pass_time(1.0, busy={})
    linux.write(f"{folder}/cpu.stat", f"nr_periods 9\n{after}\n")
    assert monitor.end() == "the control group's CPU quota held us for 0.200 s"


def test_a_package_slowed_for_heat_counts_once(linux: FakeLinux) -> None:
    for cpu in (0, 1):
        linux.write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", "0\n")
        linux.write(f"sys/devices/system/cpu/cpu{cpu}/thermal_throttle/package_throttle_count", "3\n")
    monitor = watch(linux)
    monitor.begin()
    linux.pass_time(1.0, busy={})
    for cpu in (0, 1):
        linux.write(f"sys/devices/system/cpu/cpu{cpu}/thermal_throttle/package_throttle_count", "5\n")
    assert monitor.end() == "the CPU was slowed for heat 2 times"


def frequencies(linux: FakeLinux, *megahertz: int) -> None:
    for cpu, mhz in enumerate(megahertz):
        linux.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", f"{mhz * 1000}\n")


def test_a_frequency_is_held_against_the_same_work_only(linux: FakeLinux) -> None:
    linux.last_cpu[WORKER] = 1
    frequencies(linux, 800, 4000)
    linux.flush()
    monitor = watch(linux)
    monitor.begin()
    monitor.sample("one thread")
    frequencies(linux, 800, 2600)
    monitor.sample("all threads, wide vectors")
    linux.pass_time(0.2, busy={})
    assert monitor.end() == ""
    monitor.begin()
    monitor.sample("one thread")
    linux.pass_time(0.2, busy={})
    assert monitor.end() == "CPU frequency 2600 MHz, 65% of the 4000 MHz before"
    assert monitor.conditions()["frequency_mhz"] == {"min": 2600, "median": 2600, "max": 4000}


def test_the_frequency_of_those_that_live_is_read_beside_a_dead_worker(linux: FakeLinux) -> None:
    frequencies(linux, 3000, 3000)
    monitor = CpuMonitor(lambda: [77, WORKER], linux.counters())
    monitor.begin()
    monitor.sample("product")
    assert monitor.conditions()["frequency_mhz"]["median"] == 3000
    linux.stop(WORKER)
    monitor.sample("product")
    assert monitor.conditions()["not_read"]["frequency_mhz"] == "no worker runs"


@pytest.mark.parametrize(
    ("virtual", "why"), [(True, "a constant in a virtual machine"), (False, "no cpufreq driver here")]
)
def test_why_a_frequency_is_not_read(tmp_path: Path, virtual: bool, why: str) -> None:
    fake = FakeLinux(tmp_path, virtual=virtual)
    monitor = watch(fake)
    monitor.begin()
    monitor.sample("anything")
    assert monitor.conditions() == {"not_read": {"frequency_mhz": why}}
    assert monitor.conditions() == {}


def test_a_load_that_cannot_be_read_ends_no_run(linux: FakeLinux) -> None:
    monitor = watch(linux)
    (linux.root / "proc/loadavg").unlink()
    monitor.begin()
    linux.pass_time(1.0, busy={})
    assert monitor.end() == ""
    assert monitor.conditions()["not_read"]["load"] == "No such file or directory"


def test_a_proc_without_cpus_is_said_so(linux: FakeLinux) -> None:
    linux.write("proc/stat", "cpu  1 0 0 1 0 0 0 0 0 0\nintr 1\n")
    with pytest.raises(OSError, match="counts no CPU"):
        linux.counters()


def test_before_a_run_the_busy_are_named(linux: FakeLinux) -> None:
    linux.start(900, name="chrome")
    linux.start(901, name="sshd")

    def meanwhile(seconds: float) -> None:
        linux.pass_time(seconds, busy={0: seconds})
        linux.use(900, seconds)
        linux.use(901, 0.001)

    monitor = CpuMonitor(list, linux.counters(), meanwhile)
    assert monitor.before() == [
        "other processes took 100% of a CPU",
        "process 900 (chrome) takes 100% of a CPU",
    ]
    assert monitor.conditions() == {}
    assert monitor.blocked() == ""
    assert float(monitor.readable()["others_percent"]) == pytest.approx(100)
    assert monitor.readable()["frequency_mhz"] == "not readable: a constant in a virtual machine"


def test_who_took_a_cpu_since_the_last_look_is_recorded_but_not_ourselves(linux: FakeLinux) -> None:
    linux.start(900, name="chrome")
    linux.start(901, name="worker")
    linux.use(900, 5.0)
    monitor = CpuMonitor(lambda: [901], linux.counters())
    monitor.conditions()
    linux.start(902, name="cc1plus")
    linux.pass_time(2.0, busy={0: 2.0})
    linux.use(900, 0.1)
    linux.use(901, 2.0)
    linux.use(902, 1.5)
    assert monitor.conditions()["processes"] == {"cc1plus 902": 75}
    linux.pass_time(2.0, busy={})
    assert "processes" not in monitor.conditions()


def test_a_machine_without_proc_runs_without_a_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monitor = monitor_for(Platform("cpu", "arm64"), list)
    assert isinstance(monitor, Blind)
    monitor.begin()
    monitor.sample()
    assert (monitor.end(), monitor.before()) == ("", ["clocks not read: not Linux"])
    assert monitor.conditions() == {"not_read": {"clocks": "not Linux"}}


# From here on, this machine.

BURN = """
import resource, sys, time
sys.stdin.readline()
end = time.monotonic() + 1.0
while time.monotonic() < end: pass
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, flush=True)
sys.stdin.readline()
"""


class Burner:
    """Burns a CPU for a second when told, and says how much it got."""

    def __enter__(self) -> Burner:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", BURN], **pipes)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def burn(self) -> float:
        before = process_seconds(self.process.pid)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline()) - before


class Replay(Counters):
    """This machine's counters, read before: each monitor is shown the same."""

    def __init__(self, readings: list[Reading]) -> None:
        super().__init__()
        self.readings = list(readings)

    def read(self, processes: Iterable[int]) -> Reading:
        now, mine = self.readings.pop(0), set(processes)
        return replace(now, ours={pid: s for pid, s in now.ours.items() if pid in mine})


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_a_burning_process_is_counted_unless_it_is_ours() -> None:
    """Others may burn on this machine too, and the hypervisor take time that the burner believes its own:
    asserted is only that its time is in the others' where it is not ours, and that the same counters are
    read as so much less where it is."""
    counters, me = Counters(), os.getpid()
    with Burner() as burner:
        first = counters.read([burner.process.pid, me])
        took = burner.burn()
        last = counters.read([burner.process.pid, me])
        seen = {}
        for name, mine in (("strange", []), ("own", [burner.process.pid])):
            # The third is for the look that follows a suspicion.
            monitor = CpuMonitor(lambda mine=mine: mine, Replay([first, last, last]))
            monitor.begin()
            monitor.end()
            read = monitor.notes.take()
            if "others_percent" not in read:
                pytest.skip(read["not_read"]["others_percent"])
            seen[name] = read["others_percent"]["max"] / 100 * (last.at - first.at)
    stolen = sum(last.cpus[c].stolen - first.cpus[c].stolen for c in counters.lines) * TICK_S
    rounding = 4 * TICK_S * len(counters.sum_lines)
    assert seen["strange"] > took - stolen - rounding
    assert seen["strange"] - seen["own"] <= took + rounding
    assert seen["own"] < seen["strange"] - took + stolen + rounding


def test_the_clock_of_another_process_is_its_cpu_time() -> None:
    with Burner() as burner:
        took = burner.burn()
        total = process_seconds(burner.process.pid)
        assert took <= total < took + 2.0
    mine = resource.getrusage(resource.RUSAGE_SELF)
    assert process_seconds(os.getpid()) >= mine.ru_utime + mine.ru_stime - 0.05
    with pytest.raises(OSError, match="Invalid argument"):
        process_seconds(burner.process.pid)
