"""What the CPU monitor takes for a disturbance."""

import os
import resource
from pathlib import Path

import pytest

from harness.machine.monitor.cpu import Counters, CpuMonitor, process_seconds
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


def round_of(fake: FakeLinux, monitor: CpuMonitor, ours=1.0, wall=1.0, meanwhile=list, **passes) -> str:
    """Runs a round in which our worker uses `ours` CPU seconds. Returns what the monitor says."""
    monitor.begin()
    meanwhile()
    fake.pass_time(wall, **{"busy": {0: 1.0}} | passes)
    fake.use(WORKER, ours)
    return monitor.end()


@pytest.mark.parametrize(("cpus", "wall", "busy", "stolen", "ours", "said"), [
    (None, 1.0, {0: 1.0, 1: 1.0}, {}, 1.99, ""),
    (None, 1.0, {0: 1.0, 1: 0.2}, {}, 1.0, "other processes took 20% of a CPU"),
    ((0,), 1.0, {0: 1.0, 1: 1.0}, {}, 1.0, ""),  # on CPUs that we may not use
    ((6, 7), 1.0, {0: 1.0}, {}, 0.0, "other processes took 100% of a CPU"),  # a container counts from 0
    (None, 0.1, {0: 0.1, 1: 0.03}, {}, 0.1, ""),  # rounding of a short round
    (None, 0.1, {0: 0.1, 1: 0.06}, {}, 0.1, "other processes took 60% of a CPU"),
    # The CPU that lost most counts; two ticks of a short round, or less than 2 % of a long one, do not.
    (None, 1.0, {0: 1.0, 1: 0.96}, {1: 0.04}, 1.96, "the hypervisor took 4% of cpu1"),
    (None, 0.1, {}, {0: 0.02}, 0.0, ""),
    (None, 10.0, {}, {0: 0.19}, 0.0, ""),
])  # fmt: skip
def test_what_others_and_the_hypervisor_took(linux, cpus, wall, busy, stolen, ours, said):
    monitor = watch(linux, cpus=cpus)
    assert round_of(linux, monitor, ours, wall, busy=busy, stolen=stolen) == said


def test_what_is_recorded_of_a_quiet_round(linux):
    monitor = watch(linux)
    round_of(linux, monitor, 1.99, busy={0: 1.0, 1: 1.0})
    read = monitor.take_conditions()
    assert read["others_percent"]["max"] == pytest.approx(1.0, abs=0.01)
    assert read["steal_percent"] == {"min": 0, "median": 0, "max": 0}
    assert read["load"]["median"] == 0.5


@pytest.mark.parametrize(("daemons", "disturbed"), [(1.0, False), (1.5, True)])
def test_a_large_machine_has_more_daemons(tmp_path, daemons, disturbed):
    fake = FakeLinux(tmp_path, cpus=128)
    fake.start(WORKER)
    busy = {0: 1.0, 1: daemons / 2, 2: daemons / 2}
    assert bool(round_of(fake, watch(fake), busy=busy)) is disturbed


def test_descendants_of_our_workers_are_ours(linux):
    """A child of another thread is found once it works."""
    for pid, threads in (
        (WORKER, {WORKER: [50], WORKER + 1: [52]}),
        (50, {50: [51]}),
        (51, None),
        (52, None),
    ):
        linux.start(pid, threads)
    monitor = watch(linux)
    for pid in (50, 51, 52, 52):
        assert round_of(linux, monitor, 0.0, meanwhile=lambda pid=pid: linux.use(pid, 1.0)) == ""
    # What they used before is not subtracted from what others use now.
    assert round_of(linux, monitor, 0.0) == "other processes took 100% of a CPU"


def test_a_child_that_was_started_and_ended_within_the_round_is_ours(linux):
    linux.reaped[WORKER] = 0.0

    def ended() -> None:
        linux.reaped[WORKER] = 0.8

    assert round_of(linux, watch(linux), 1.0, meanwhile=ended, busy={0: 1.0, 1: 0.8}) == ""


def test_a_worker_started_in_the_round_is_ours_from_its_first_second(linux):
    def started() -> None:
        linux.start(77)
        linux.use(77, 0.9)

    assert round_of(linux, watch(linux, WORKER, 77), 0.0, meanwhile=started, busy={0: 0.9}) == ""


def test_others_are_not_blamed_for_a_worker_that_died(linux):
    linux.start(77)
    monitor = watch(linux, WORKER, 77)
    assert round_of(linux, monitor, meanwhile=lambda: linux.stop(77), busy={0: 1.0, 1: 1.0}) == ""
    read = monitor.take_conditions()
    assert "others_percent" not in read
    assert read["not_read"]["others_percent"] == "one of our own processes ended meanwhile"
    assert round_of(linux, monitor, 0.0) == "other processes took 100% of a CPU"


VERSION_1 = "4:cpuset:/\n3:cpu,cpuacct:/seen/outside\n"


@pytest.mark.parametrize(("group", "folder", "before", "after"), [
    ("0::/jobs/one\n", "jobs/one", "throttled_usec 5", "throttled_usec 200005"),
    ("0::/jobs/one\n", "jobs", "throttled_usec 5", "throttled_usec 200005"),
    (VERSION_1, "cpu,cpuacct", "throttled_time 0", "throttled_time 200000000"),
])  # fmt: skip
def test_a_quota_that_held_our_group(linux, group, folder, before, after):
    def counts(line: str) -> None:
        linux.write(f"sys/fs/cgroup/{folder}/cpu.stat", f"nr_periods 7\n{line}\n")

    linux.write("proc/self/cgroup", group)
    counts(before)
    monitor = watch(linux)
    assert round_of(linux, monitor) == ""
    said = round_of(linux, monitor, meanwhile=lambda: counts(after))
    assert said == "the control group's CPU quota held us for 0.200 s"


def test_a_package_slowed_for_heat_counts_once(linux):
    def slowed(count: int) -> None:
        for cpu in (0, 1):
            folder = f"sys/devices/system/cpu/cpu{cpu}"
            linux.write(f"{folder}/topology/physical_package_id", "0\n")
            linux.write(f"{folder}/thermal_throttle/package_throttle_count", f"{count}\n")

    slowed(3)
    said = round_of(linux, watch(linux), meanwhile=lambda: slowed(4))
    assert said == "the CPU was slowed for heat 1 times"


def frequencies(linux: FakeLinux, *megahertz: int) -> None:
    for cpu, mhz in enumerate(megahertz):
        linux.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", f"{mhz * 1000}\n")


def test_a_frequency_is_compared_with_the_same_work_only(linux):
    linux.last_cpu[WORKER] = 1
    frequencies(linux, 800, 4000)
    linux.flush()
    monitor = watch(linux)

    def samples() -> None:
        monitor.sample("one thread")
        frequencies(linux, 800, 2600)
        monitor.sample("all threads, wide vectors")

    assert round_of(linux, monitor, meanwhile=samples) == ""
    said = round_of(linux, monitor, meanwhile=lambda: monitor.sample("one thread"))
    assert said == "CPU frequency 2600 MHz, 65% of the 4000 MHz before"
    assert monitor.take_conditions()["frequency_mhz"] == {"min": 2600, "median": 2600, "max": 4000}


def test_a_dead_worker_does_not_keep_the_frequency_from_being_read(linux):
    frequencies(linux, 3000, 3000)
    monitor = CpuMonitor(lambda: [77, WORKER], linux.counters())
    monitor.begin()
    monitor.sample("product")
    assert monitor.take_conditions()["frequency_mhz"]["median"] == 3000
    linux.stop(WORKER)
    monitor.sample("product")
    assert monitor.take_conditions()["not_read"]["frequency_mhz"] == "no worker runs"


@pytest.mark.parametrize(
    ("virtual", "why"), [(True, "a constant in a virtual machine"), (False, "no cpufreq driver here")]
)
def test_why_a_frequency_is_not_read(tmp_path, virtual, why):
    monitor = watch(FakeLinux(tmp_path, virtual=virtual))
    monitor.begin()
    monitor.sample("anything")
    assert monitor.take_conditions() == {"not_read": {"frequency_mhz": why}}
    assert monitor.take_conditions() == {}


def test_counters_of_zero_blame_no_process_and_end_no_run(linux):
    """Some sandboxes give zero for all counters."""
    monitor = watch(linux)
    (linux.root / "proc/loadavg").unlink()
    monitor.begin()
    linux.now += 1.0
    assert monitor.end() == ""
    unread = monitor.take_conditions()["not_read"]
    assert unread["others_percent"] == "/proc/stat does not count all time here"
    assert unread["load"] == "No such file or directory"
    linux.write("proc/stat", "cpu  1 0 0 1 0 0 0 0 0 0\nintr 1\n")
    with pytest.raises(OSError, match="counts no CPU"):
        linux.counters()


def test_busy_processes_are_named_before_a_run(linux):
    linux.start(900, name="chrome")
    linux.start(901, name="sshd")

    def meanwhile(seconds: float) -> None:
        linux.pass_time(seconds, busy={0: seconds})
        linux.use(900, seconds)
        linux.use(901, 0.001)

    monitor = CpuMonitor(list, linux.counters(), meanwhile)
    assert monitor.complaints() == [
        "other processes took 100% of a CPU",
        "process 900 (chrome) takes 100% of a CPU",
    ]
    assert monitor.take_conditions() == {}
    assert monitor.blocked() == ""
    assert float(monitor.current_values()["others_percent"]) == pytest.approx(100)
    assert monitor.current_values()["frequency_mhz"] == "not readable: a constant in a virtual machine"


def test_other_processes_that_took_a_cpu_since_the_last_call_are_recorded(linux):
    linux.start(900, name="chrome")
    linux.start(901, name="worker")
    linux.use(900, 5.0)
    monitor = CpuMonitor(lambda: [901], linux.counters())
    monitor.take_conditions()
    linux.start(902, name="cc1plus")
    linux.pass_time(2.0, busy={0: 2.0})
    for pid, seconds in ((900, 0.1), (901, 2.0), (902, 1.5)):
        linux.use(pid, seconds)
    assert monitor.take_conditions()["processes"] == {"cc1plus 902": 75}
    linux.pass_time(2.0, busy={})
    assert "processes" not in monitor.take_conditions()


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_this_machines_counters_are_read():
    used = resource.getrusage(resource.RUSAGE_SELF)
    counters = Counters()
    read = counters.read([os.getpid()])
    assert read.ours[os.getpid()] >= used.ru_utime + used.ru_stime - 0.05
    assert set(read.cpus) >= set(counters.lines)
    with pytest.raises(OSError, match="Invalid argument"):
        process_seconds(1 << 27)  # there are fewer
