"""Facts about a machine: what it is, how small a difference it can measure, and what would improve that."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
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
SECONDS = 2.5  # of samples for each workload


def examine(
    here: Platform,
    conditions: Mapping[str, str] | None = None,
    complaints: Sequence[str] = (),
    quick: bool = False,
    monitor: Monitor | None = None,
) -> JsonObject:
    """Returns the facts about this machine, in SI units, as `doctor --json` writes them: `machine`, without
    what is not known; `devices`, a description of each; `libraries`, their versions; `ceilings` and
    `instruments`, each with `problem` alone where it could not be measured; `datasheet`; `conditions`;
    `runs here`, `timed` or `checked only` by op and implementation; `what would improve it`.

    conditions: clocks and the like, as the driver gives them now
    complaints: what is wrong with the conditions, a line each
    quick:      measures nothing; the ceilings are those of an earlier time, if there are any
    monitor:    watches the machine while it is measured
    """
    threads = worker_threads()
    machine = provenance(here, threads)["machine"] | {"last_level_cache": last_level(here)}
    # Advice comes first, because measuring changes the state of the machine that it is about.
    improvements = [*complaints, *advice(here, threads)]
    if wrong_build := torch_advice(here):
        improvements = [wrong_build, *improvements]
    usable = [i for op in kernels.OPS for i in kernels.implementations(op) if i.available(here).ok]
    return {
        "machine": {name: value for name, value in machine.items() if value not in ("", 0)},
        "devices": {device: f"{p.kind} {p.arch} {p.name}" for device, p in devices().items()},
        "libraries": {name: version(name) or lookalike(name) or "not installed" for name in LIBRARIES},
        "ceilings": _ceilings(here, threads, quick, monitor or Blind("not watched")),
        "datasheet": datasheets(here),
        "instruments": {} if quick else _instruments(here, threads),
        "conditions": dict(conditions or {}),
        "runs here": {f"{i.op} {i.name}": "checked only" if i.interpreted(here) else "timed" for i in usable},
        "what would improve it": improvements,
    }


def _ceilings(here: Platform, threads: int, quick: bool, monitor: Monitor) -> JsonObject:
    """The ceilings of `harness.run.ceilings`, the best so far; measured again unless `quick`."""
    try:
        ceilings = stored(here, threads) if quick else measured(here, threads, monitor)
    except WorkerFailure as failure:
        return {"problem": failure.reason}
    return asdict(ceilings) if ceilings else {}


def _instruments(here: Platform, threads: int) -> JsonObject:
    """The steps of the clock, and how far two preparations of each workload differ. Infinite numbers become
    None; the noise is infinite where the machine was too disturbed to tell it."""
    try:
        with meters(here, threads, 2) as workers:
            clock = workers[0].ask("clock", 60)
            comparisons = self_comparisons(workers)
    except WorkerFailure as failure:
        return {"problem": failure.reason}
    facts: JsonObject = {"clock": clock}
    for workload, made in comparisons.items():
        numbers = {"ratio": made.ratio, "low": made.low, "high": made.high, "floor": noise_of(made)}
        facts[workload] = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return facts


def self_comparisons(workers: Sequence[WorkerProcess], seconds: float = SECONDS) -> dict[str, Comparison]:
    """Compares each workload with itself, in two workers that prepare it anew in every block. So the ratio is
    what two equal implementations differ by on this machine. Raises WorkerFailure."""
    return {workload: _self_comparison(workers, workload, seconds) for workload in WORKLOADS}


def _self_comparison(workers: Sequence[WorkerProcess], workload: str, seconds: float) -> Comparison:
    def prepare(block: int, lasting: Collection[str]) -> None:
        for worker in workers:
            worker.ask("prepare", 120, workload=workload)

    first, second = [partial(worker.ask, "sample", 60, at_least_s=SAMPLE_S) for worker in workers]
    policy = Policy(blocks=MIN_BLOCKS, budget_s=seconds, begin_block=prepare)
    rounds = measure({"first": first, "second": second}, policy)
    if rounds.dropped:
        raise WorkerFailure("error", next(iter(rounds.dropped.values())))
    return compare(rounds.series("first"), rounds.series("second"), blocks=rounds.blocks)


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
    """Lines on libraries that rows for this platform lack, and on those newer than what rows were read in."""
    rows_without: dict[str, list[str]] = {}  # by reason
    newer: dict[str, str] = {}  # the last release that was read, by library and release
    for row in [row for op in kernels.OPS for row in kernels.implementations(op)]:
        support = row.available(here)
        if not support.ok and "not installed" in support.reason:
            rows_without.setdefault(support.reason, []).append(row.name)
        if isinstance(row, Vendor) and here.kind in row.kinds:
            library = row.library or row.provider
            if read := last_read(library, row.version):
                newer[f"{library} {row.version}"] = read
    lines = [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in rows_without.items()]
    return lines + [
        f"{release} is newer than {read}, the last that its rows were read against: "
        "`harness doctor --bind` says which calls still fit"
        for release, read in newer.items()
    ]


def _cpu(root: Path, threads: int) -> Iterator[str]:
    """Lines of advice about the governor, threads, the quota and pages of memory."""
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(root, "proc/self/status"), re.MULTILINE)
    cpus = sorted(cpus_in(allowed[1])) if allowed else []
    governors = {_text(root, f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor") for cpu in cpus}
    if slow := governors - {"", "performance"}:
        how = "clocks drift less under `cpupower frequency-set -g performance`"
        yield f"the frequency governor is {', '.join(sorted(slow))}: {how}"
    # Each thread is bound to a core of its own, and to one NUMA node as long as that has enough cores.
    cores_of_nodes = [len(node) for node in cores(root, set(cpus))]
    all_cores, most_cores = sum(cores_of_nodes), cores_of_nodes[0]
    if cpus and threads > all_cores:
        yield f"{threads} threads share {all_cores} cores, unbound: run with --threads {all_cores} at most"
    elif cpus and threads > most_cores:
        how = f"--threads {most_cores} keeps to one node"
        yield f"{threads} threads span NUMA nodes, and where memory lies changes times: {how}"
    if (limit := quota(root)) < threads:
        how = f"raise its quota, or run with --threads {max(1, int(limit))}"
        yield f"the control group may use {limit:g} CPUs, so {threads} threads are stopped in mid-call: {how}"
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    in_use = re.search(r"\[(\w+)\]", _text(root, path))
    mode = in_use[1] if in_use else "always"
    if mode != "always" and "hugetlb=1" not in os.environ.get("GLIBC_TUNABLES", ""):
        how = "set GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
        if mode == "never":
            how = f"`echo madvise > /{path}`, then {how}"
        yield f"operands lie in 4 KiB pages, which reads a few percent slower than huge ones: {how}"
    if why_no_gpu := unseen():
        yield why_no_gpu


def _persistence(here: Platform) -> list[str]:
    """A line if the driver unloads an idle GPU; not known of parts of one (MIG). Untested on hardware."""
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
