"""Advice: what stands between this machine and quieter or more complete numbers, and what to do."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import kernels
from harness.machine.cgroups import quota
from harness.machine.cpu_threads import cores, cpus_in
from kernels.gpus.nvidia import smi
from kernels.platform import Platform, devices, run, unseen
from kernels.vendor import Vendor, last_read

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
    """What an implementation that could run here lacks, and libraries newer than what was read of them, once
    each."""
    lacks: dict[str, list[str]] = {}
    newer: dict[str, None] = {}
    for op in kernels.OPS:
        for impl in kernels.implementations(op):
            support = impl.available(here)
            if not support.ok and "not installed" in support.reason:
                lacks.setdefault(support.reason, []).append(impl.name)
            if isinstance(impl, Vendor) and here.kind in impl.kinds and (said := _newer(impl)):
                newer[said] = None
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in lacks.items()] + [*newer]


def _newer(row: Vendor) -> str:
    library = row.library or row.provider
    read = last_read(library, row.version)
    how = "`python -m harness doctor --bind` says which calls still fit"
    return (
        f"{library} {row.version} is newer than {read}, the last that its rows were read against: {how}"
        if read
        else ""
    )


def _cpu(root: Path, threads: int) -> list[str]:
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(root, "proc/self/status"), re.MULTILINE)
    ours = sorted(cpus_in(allowed[1])) if allowed else []
    return [
        *_governors(root, ours),
        *_turbo(root),
        *_places(root, threads, ours),
        *_quota(root, threads),
        *_pages(root),
        *filter(None, [unseen()]),
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


def _places(root: Path, threads: int, cpus: list[int]) -> list[str]:
    """Each thread is bound to a core of its own, on one NUMA node first, as long as there are enough."""
    nodes = [len(node) for node in cores(root, set(cpus))]
    if cpus and threads > sum(nodes):
        return [
            f"{threads} threads share {sum(nodes)} cores, unbound: run with --threads {sum(nodes)} at most"
        ]
    if cpus and threads > nodes[0]:
        return [
            f"{threads} threads span NUMA nodes, and where memory lies changes times: --threads {nodes[0]} "
            "keeps to one node"
        ]
    return []


def _quota(root: Path, threads: int) -> list[str]:
    cpus = quota(root)
    if cpus >= threads:
        return []
    return [
        f"the control group may use {cpus:g} CPUs, so {threads} threads are stopped in mid-call: raise its "
        f"quota, or run with --threads {max(1, int(cpus))}"
    ]


def _pages(root: Path) -> list[str]:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    mode = re.search(r"\[(\w+)\]", _text(root, path))
    if mode is None or mode[1] == "always" or "hugetlb=1" in os.environ.get("GLIBC_TUNABLES", ""):
        return []
    how = "set GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    if mode[1] == "never":
        how = f"`echo madvise > /{path}`, then {how}"
    return [f"operands lie in 4 KiB pages, which reads a few percent slower than huge ones: {how}"]


def _gpu(here: Platform, ask: Ask) -> list[str]:
    return _persistence(here) if here.kind == "cuda" else _torch_devices(ask)


def _persistence(here: Platform) -> list[str]:
    """As nvidia-smi tells of a whole GPU. Untested on hardware."""
    device = here.uuid or here.device.partition(":")[2] or "0"
    query = ("-i", device, "--query-gpu=persistence_mode", "--format=csv,noheader")
    if device.startswith("MIG-") or smi(*query)[0] != "Disabled":
        return []
    return [f"persistence mode is off, so the GPU wakes anew: `nvidia-smi -i {device} -pm 1`"]


# Without amdsmi torch asks HIP; with it, amdsmi.
WITH_AMDSMI = "import torch; print(torch.cuda.device_count())"
WITHOUT_AMDSMI = f"import sys; sys.modules['amdsmi'] = None; {WITH_AMDSMI}"


def _torch_devices(ask: Ask) -> list[str]:
    """Whether torch, in processes of its own, counts the devices that the kernel driver shows: beside an
    amdsmi with a library of its own it counts none (pytorch/pytorch#186516). Untested on hardware."""
    shown = sum(platform.kind == "rocm" for platform in devices().values())
    beside, alone = (ask(sys.executable, "-c", code) for code in (WITH_AMDSMI, WITHOUT_AMDSMI))
    if not beside.isdigit() or not alone.isdigit():  # no torch, or one that does not answer
        return []
    if beside != alone:
        return [
            f"beside the installed amdsmi torch counts {beside} devices, without it {alone}, of {shown} that "
            "the driver shows: `pip uninstall amdsmi`, then `pip install` ROCm's own, in its share/amd_smi"
        ]
    if int(alone) != shown:
        return [
            f"torch counts {alone} devices of {shown} that the driver shows: see that it is the build for "
            "this ROCm, and that this user may open /dev/kfd and /dev/dri (groups render and video)"
        ]
    return []


def _text(root: Path, path: str) -> str:
    try:
        return (root / path).read_text().strip()
    except OSError:
        return ""
