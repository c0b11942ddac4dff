"""The number and the CPUs of compute threads, on made-up machines."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.machine import cpu_threads
from harness.machine.cpu_threads import MainThread, cores, default_threads, quota
from harness.workers.child import timers as cpu
from harness.workers.child.timers import Program

EIGHT = set(range(8))


def has(root: Path, files: dict[str, str]) -> None:
    for path, content in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")


def version_1(folder: str, quota: str) -> dict[str, str]:
    folder = f"cpu,cpuacct/{folder}"
    return {f"{folder}cpu.cfs_quota_us": quota, f"{folder}cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(("group", "files", "cpus"), [
    ("", {}, math.inf),
    ("0::/", {"cpu.max": "150000 100000"}, 1.5),
    ("0::/", {"cpu.max": "max 100000"}, math.inf),
    ("0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, 3.0),
    # In a container.
    ("4:memory:/docker/7\n3:cpu,cpuacct:/docker/7\n0::/", version_1("", "400000"), 4.0),
    ("3:cpu,cpuacct:/docker/7", version_1("docker/7/", "-1"), math.inf),
])  # fmt: skip
def test_the_smallest_quota_of_our_groups_limits_threads(tmp_path, group, files, cpus):
    has(tmp_path, {"sys/devices/system/node/node0/cpulist": "0-7"})
    has(tmp_path, {"proc/self/cgroup": group} if group else {})
    has(tmp_path / "sys/fs/cgroup", files)
    assert quota(tmp_path) == cpus
    assert default_threads(tmp_path, EIGHT) == min(8, int(min(cpus, 8)))


def test_one_thread_of_each_core_of_the_node_with_the_most_comes_first(tmp_path):
    node = "sys/devices/system/node/node{}/cpulist"
    has(tmp_path, {node.format(0): "0-1", node.format(1): "2-7"})
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    has(tmp_path, {siblings.format(cpu): f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)})
    assert cores(tmp_path, EIGHT) == [[2, 4, 6], [0]]
    assert cores(tmp_path, {0, 1, 3}) == [[0], [3]]
    assert default_threads(tmp_path, EIGHT) == 3


@pytest.mark.skipif(len(cpu_threads.ALLOWED) < 2, reason="one CPU is all there is")
def test_the_main_thread_is_bound_while_calls_are_timed_and_not_before(monkeypatch):
    """It runs in a thread of its own, which is bound as OpenMP would bind the main thread."""
    monkeypatch.setattr(cpu_threads, "nodes", lambda: [cpu_threads.ALLOWED])
    bound = {min(cpu_threads.ALLOWED)}
    seen = []

    def worker():
        os.sched_setaffinity(0, bound)
        main_thread = MainThread()
        monkeypatch.setattr(cpu, "MAIN_THREAD", main_thread)
        main_thread.release()
        main_thread.release()
        seen.append(os.sched_getaffinity(0))
        cpu.CpuTimer().sample(Program([lambda: seen.append(os.sched_getaffinity(0))]), 0.0)
        seen.append(os.sched_getaffinity(0))

    with ThreadPoolExecutor() as pool:
        pool.submit(worker).result()
    assert seen[0] == seen[-1] == cpu_threads.ALLOWED
    assert len(seen) > 2
    assert all(during == bound for during in seen[1:-1])


def test_an_unbound_thread_stays_unbound():
    before = os.sched_getaffinity(0)
    main_thread = MainThread()
    main_thread.release()
    with main_thread.bound_again():
        assert os.sched_getaffinity(0) == before
    assert main_thread.bound is None
