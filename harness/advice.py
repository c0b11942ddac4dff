"""What stands between this machine and quieter or more complete numbers, each with what to do."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import kernels
from harness.provenance import run
from kernels.platform import Platform

Ask = Callable[..., str]


def advice(here: Platform, threads: int, root: Path = Path("/"), ask: Ask = run) -> list[str]:
    """root: of /sys and /proc; ask: runs a command and gives what it prints, nothing where it fails."""
    machine = _cpu(root, threads) if here.kind == "cpu" else _gpu(here, ask)
    return [*machine, *_virtual(here), *_libraries(here)]


def _virtual(here: Platform) -> list[str]:
    if here.kind == "cpu" and "hypervisor" in here.features:
        return [
            "a virtual machine: its neighbours' noise is not visible from inside; trust ratios within a run, "
            "or use a machine of your own"
        ]
    return []


def _libraries(here: Platform) -> list[str]:
    """What an implementation that could run here lacks, once each."""
    lacks: dict[str, list[str]] = {}
    for op in kernels.OPS:
        for impl in kernels.implementations(op):
            support = impl.available(here)
            if not support.ok and "not installed" in support.reason:
                lacks.setdefault(support.reason, []).append(impl.name)
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in lacks.items()]


def _cpu(root: Path, threads: int) -> list[str]:
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(root, "proc/self/status"), re.MULTILINE)
    ours = sorted(cpus_in(allowed[1])) if allowed else []
    return [
        *_governors(root, ours),
        *_turbo(root),
        *_siblings(root, ours),
        *_nodes(root, set(ours)),
        *_quota(root, threads),
        *_pages(root),
        *_driver(),
    ]


def _governors(root: Path, cpus: list[int]) -> list[str]:
    path = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
    slow = {name for cpu in cpus if (name := _text(root, path.format(cpu))) not in ("", "performance")}
    wanted = "clocks drift less under `cpupower frequency-set -g performance`"
    return [f"the frequency governor is {', '.join(sorted(slow))}: {wanted}"] if slow else []


def _turbo(root: Path) -> list[str]:
    """Intel's driver says no_turbo, the others boost."""
    how = "for steadier ones `echo {} > {}`, though engines serve with it on"
    switches = (("intel_pstate/no_turbo", "0", 1), ("cpufreq/boost", "1", 0))
    return [
        f"turbo is on, so clocks follow load and heat: {how.format(off, f'/sys/devices/system/cpu/{name}')}"
        for name, on, off in switches
        if _text(root, f"sys/devices/system/cpu/{name}") == on
    ]


def _siblings(root: Path, cpus: list[int]) -> list[str]:
    path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        cores.setdefault(_text(root, path.format(cpu)) or str(cpu), []).append(cpu)
    if len(cores) == len(cpus):
        return []
    firsts = listed(sorted(min(core) for core in cores.values()))
    return [
        f"cores show as several CPUs each, and two threads may meet on one: run under `taskset -c {firsts}`"
    ]


def _nodes(root: Path, cpus: set[int]) -> list[str]:
    lists = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    ours = sorted(int(f.parent.name[4:]) for f in lists if cpus_in(f.read_text()) & cpus)
    if len(ours) < 2:
        return []
    node = f"`numactl --cpunodebind={ours[0]} --membind={ours[0]}`"
    return [f"threads span {len(ours)} NUMA nodes, and where memory lies changes times: run under {node}"]


def _quota(root: Path, threads: int) -> list[str]:
    quota, _, period = _text(root, "sys/fs/cgroup/cpu.max").partition(" ")
    if not quota.isdigit() or int(quota) >= threads * int(period):
        return []
    cpus = int(quota) / int(period)
    return [
        f"the control group may use {cpus:g} CPUs, so {threads} threads are stopped in mid-call: raise its "
        f"cpu.max, or run with --threads {max(1, int(cpus))}"
    ]


def _pages(root: Path) -> list[str]:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    chosen = re.search(r"\[(\w+)\]", _text(root, path))
    if chosen is None or chosen[1] == "always" or "hugetlb=1" in os.environ.get("GLIBC_TUNABLES", ""):
        return []
    how = "set GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    if chosen[1] == "never":
        how = f"`echo madvise > /{path}`, then {how}"
    return [f"operands lie in 4 KiB pages, which reads a few percent slower than huge ones: {how}"]


def _driver() -> list[str]:
    shown = "nvidia-smi is installed but shows no GPU: see what `nvidia-smi` says of its driver"
    return [shown] if shutil.which("nvidia-smi") else []


def _gpu(here: Platform, ask: Ask) -> list[str]:
    """Persistence mode, as nvidia-smi tells. Untested on hardware."""
    if here.kind != "cuda":
        return []
    index = here.device.partition(":")[2] or "0"
    one = ("nvidia-smi", "-i", index)
    if ask(*one, "--query-gpu=persistence_mode", "--format=csv,noheader") != "Disabled":
        return []
    return [f"persistence mode is off, so the GPU wakes anew: `nvidia-smi -i {index} -pm 1`"]


def cpus_in(text: str) -> set[int]:
    """The CPUs of a kernel's list (`0-3,8`)."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


def listed(cpus: list[int]) -> str:
    """The other way round, for ascending CPUs."""
    spans: list[list[int]] = []
    for cpu in cpus:
        if spans and spans[-1][-1] == cpu - 1:
            spans[-1] = [spans[-1][0], cpu]
        else:
            spans.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _text(root: Path, path: str) -> str:
    try:
        return (root / path).read_text().strip()
    except OSError:
        return ""
