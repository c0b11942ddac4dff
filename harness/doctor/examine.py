"""Facts about a machine: what it is, how small a difference it can measure, and what would improve that."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import kernels
from harness.catalogue.devices import datasheets, last_level
from harness.files import JsonObject
from harness.machine.cpu_threads import cores, cpus_in, quota
from harness.machine.device import LIBRARIES, torch_advice
from harness.machine.monitor.base import Blind, Monitor
from harness.run.ceilings import measured, meters, stored
from harness.statistics.intervals import MIN_BLOCKS
from harness.statistics.paired import Comparison, compare, noise_of
from harness.timing.rounds import Policy, measure
from harness.workers.environment import provenance, worker_threads
from harness.workers.process import WorkerFailure, WorkerProcess
from kernels.gpus import smi
from kernels.platform import Platform, devices, lookalike, unseen, version
from kernels.vendor import Vendor, last_read

WORKLOADS = ("read", "product")
SAMPLE_S = 0.05
SECONDS = 2.5  # the seconds of samples for each workload


def examine(
    here: Platform,
    conditions: Mapping[str, str] | None = None,
    complaints: Sequence[str] = (),
    quick: bool = False,
    monitor: Monitor | None = None,
) -> JsonObject:
    """Returns the facts about this machine, in SI units, as `doctor --json` writes them: `machine`, without
    what is not known; `devices`, a description of each; `libraries`, their versions; `ceilings` and
    `instruments`, with `problem` alone where they could not be measured; `datasheet`; `conditions`;
    `runs here`, `timed` or `checked only` by op and implementation; `what would improve it`.

    conditions: clocks and the like, as the driver gives them now
    complaints: what is wrong with them
    quick:      measure nothing, and give the ceilings of an earlier time if there are any
    monitor:    watches the machine while it is measured
    """
    threads = worker_threads()
    machine = provenance(here, threads)["machine"] | {"last_level_cache": last_level(here)}
    # The advice comes first, as measuring would disturb what it looks at.
    improve = [*complaints, *advice(here, threads)]
    if wrong_build := torch_advice(here):
        improve.insert(0, wrong_build)
    runs = [i for op in kernels.OPS for i in kernels.implementations(op) if i.available(here).ok]
    return {
        "machine": {name: value for name, value in machine.items() if value not in ("", 0)},
        "devices": {device: f"{p.kind} {p.arch} {p.name}" for device, p in devices().items()},
        "libraries": {name: version(name) or lookalike(name) or "not installed" for name in LIBRARIES},
        "ceilings": _ceilings(here, threads, quick, monitor or Blind("not watched")),
        "datasheet": datasheets(here),
        "instruments": {} if quick else _instruments(here, threads),
        "conditions": dict(conditions or {}),
        "runs here": {f"{i.op} {i.name}": "checked only" if i.interpreted(here) else "timed" for i in runs},
        "what would improve it": improve,
    }


def _ceilings(here: Platform, threads: int, quick: bool, monitor: Monitor) -> JsonObject:
    """The ceilings of `harness.run.ceilings`, the best so far; measured again unless `quick`."""
    try:
        ceilings = stored(here, threads) if quick else measured(here, threads, monitor)
    except WorkerFailure as failure:
        return {"problem": failure.reason}
    return asdict(ceilings) if ceilings else {}


def _instruments(here: Platform, threads: int) -> JsonObject:
    """The steps of the clock, and how far two preparations of one workload differ. Infinite numbers become
    null; the noise is infinite where the machine was too disturbed to tell it."""
    try:
        with meters(here, threads, 2) as pair:
            clock, pairs = pair[0].ask("clock", 60), clock_differences(pair)
    except WorkerFailure as failure:
        return {"problem": failure.reason}
    found: JsonObject = {"clock": clock}
    for workload, seen in pairs.items():
        numbers = {"ratio": seen.ratio, "low": seen.low, "high": seen.high, "floor": noise_of(seen)}
        found[workload] = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return found


def clock_differences(pair: list[WorkerProcess], seconds: float = SECONDS) -> dict[str, Comparison]:
    """Compares each workload with itself. Each of the two workers prepares it anew in every block, so the
    ratio is what two equal implementations differ by on this machine. Raises WorkerFailure."""
    samples = {str(i): lambda w=w: w.ask("sample", 60, at_least=SAMPLE_S) for i, w in enumerate(pair)}
    found = {}
    for workload in WORKLOADS:

        def prepare(*_: object, workload: str = workload) -> None:
            for worker in pair:
                worker.ask("prepare", 120, workload=workload)

        rounds = measure(samples, Policy(blocks=MIN_BLOCKS, budget_s=seconds, begin_block=prepare))
        for reason in rounds.dropped.values():
            raise WorkerFailure("error", reason)
        found[workload] = compare(rounds.series("0"), rounds.series("1"), blocks=rounds.blocks)
    return found


def advice(here: Platform, threads: int, root: Path = Path("/")) -> list[str]:
    """Returns lines of advice. root: the folder that holds sys and proc"""
    lines = _persistence(here) if here.kind == "cuda" else []
    if here.kind == "cpu":
        lines += _cpu(root, threads)
        if "hypervisor" in here.features:
            trust = "trust ratios within a run, or use a machine of your own"
            lines.append(f"a virtual machine: its neighbours' noise is not visible from inside; {trust}")
    return lines + _libraries(here)


def _libraries(here: Platform) -> list[str]:
    """The libraries that implementations for this platform lack, and the libraries that are newer than the
    releases that their implementations were written for."""
    lacks: dict[str, list[str]] = {}
    newer: dict[tuple[str, str], str] = {}
    for row in (row for op in kernels.OPS for row in kernels.implementations(op)):
        support = row.available(here)
        if not support.ok and "not installed" in support.reason:
            lacks.setdefault(support.reason, []).append(row.name)
        if isinstance(row, Vendor) and here.kind in row.kinds:
            library = row.library or row.provider
            if read := last_read(library, row.version):
                newer[library, row.version] = read
    lines = [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in lacks.items()]
    return lines + [
        f"{library} {release} is newer than {read}, the last that its rows were read against: "
        "`harness doctor --bind` says which calls still fit"
        for (library, release), read in newer.items()
    ]


def _cpu(root: Path, threads: int) -> Iterator[str]:
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(root, "proc/self/status"), re.MULTILINE)
    ours = sorted(cpus_in(allowed[1])) if allowed else []
    governors = {_text(root, f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor") for cpu in ours}
    if slow := governors - {"", "performance"}:
        wanted = "clocks drift less under `cpupower frequency-set -g performance`"
        yield f"the frequency governor is {', '.join(sorted(slow))}: {wanted}"
    # Each thread is bound to a core of its own, and to one NUMA node as long as that has enough cores.
    nodes = [len(node) for node in cores(root, set(ours))]
    if ours and threads > sum(nodes):
        yield f"{threads} threads share {sum(nodes)} cores, unbound: run with --threads {sum(nodes)} at most"
    elif ours and threads > nodes[0]:
        keep = f"--threads {nodes[0]} keeps to one node"
        yield f"{threads} threads span NUMA nodes, and where memory lies changes times: {keep}"
    if (cpus := quota(root)) < threads:
        how = f"raise its quota, or run with --threads {max(1, int(cpus))}"
        yield f"the control group may use {cpus:g} CPUs, so {threads} threads are stopped in mid-call: {how}"
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    mode = re.search(r"\[(\w+)\]", _text(root, path))
    if mode and mode[1] != "always" and "hugetlb=1" not in os.environ.get("GLIBC_TUNABLES", ""):
        how = "set GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
        if mode[1] == "never":
            how = f"`echo madvise > /{path}`, then {how}"
        yield f"operands lie in 4 KiB pages, which reads a few percent slower than huge ones: {how}"
    if why := unseen():
        yield why


def _persistence(here: Platform) -> list[str]:
    """nvidia-smi tells the mode of whole GPUs only. Untested on hardware."""
    device = here.uuid or here.device.partition(":")[2] or "0"
    query = ("-i", device, "--query-gpu=persistence_mode", "--format=csv,noheader")
    if device.startswith("MIG-") or smi(*query)[0] != "Disabled":
        return []
    return [f"persistence mode is off, so the GPU wakes anew: `nvidia-smi -i {device} -pm 1`"]


def _text(root: Path, path: str) -> str:
    """The text of a small file; empty where it cannot be read."""
    try:
        return (root / path).read_text("utf-8").strip()
    except OSError:
        return ""
