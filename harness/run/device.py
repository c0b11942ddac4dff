"""The device of a run: locked, watched, what else uses it, and what its records say of it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.catalogue.devices import Ceilings, known_type
from harness.errors import NothingRan
from harness.files import JsonObject
from harness.machine.cpu_threads import ALLOWED
from harness.machine.device import torch_advice
from harness.machine.monitor import monitor_for
from harness.machine.monitor.base import Monitor
from harness.run.ceilings import ceilings
from harness.run.device_lock import device_lock
from harness.workers.environment import provenance
from harness.workers.process import WorkerFailure, worker_pids
from kernels.platform import Platform


@dataclass(frozen=True)
class OwnDevice:
    """A device that no other run uses meanwhile.

    busy: what else used it at the start, a line each
    """

    platform: Platform
    monitor: Monitor
    busy: Sequence[str] = ()


@contextlib.contextmanager
def own_device(platform: Platform) -> Iterator[OwnDevice]:
    """Holds the device's lock. Raises NothingRan where another run has it, or where it cannot be measured."""
    if reason := torch_advice(platform):
        raise NothingRan(reason)
    monitor = monitor_for(platform, worker_pids)
    with device_lock(platform):
        if reason := monitor.blocked():
            raise NothingRan(f"{platform.device} cannot be measured: {reason}")
        yield OwnDevice(platform, monitor, monitor.before())


@dataclass(frozen=True)
class DeviceFacts:
    """What a run's record says of its device.

    ceilings: None where they could not be measured, for the reason that `no_ceilings` gives
    busy:     what else used it at the start, a line each
    """

    platform: Platform
    provenance: JsonObject
    ceilings: Ceilings | None
    no_ceilings: str = ""
    busy: Sequence[str] = ()


def device_facts(device: OwnDevice, threads: int) -> DeviceFacts:
    """threads: of each worker, on a CPU. Measures the ceilings where none are stored, in half a minute."""
    known, reason = None, ""
    try:
        known = ceilings(device.platform, threads, device.monitor)
    except WorkerFailure as failure:
        reason = failure.reason
    return DeviceFacts(device.platform, provenance(device.platform, threads), known, reason, device.busy)


def device_type(platform: Platform) -> str:
    """As a campaign's steps and a cluster call it: `H200`, `cpu`."""
    return "cpu" if platform.kind == "cpu" else known_type(platform.name or platform.arch)


def machine_name(platform: Platform) -> str:
    """As a folder of results is called: `h200`; of a CPU its name and its cores, `epyc-9654-2core`."""
    if platform.kind != "cpu":
        return re.sub(r"[^a-z0-9]+", "-", device_type(platform).lower()).strip("-")
    words = re.sub(r"\(.*?\)|@.*|processor|cpu|\d+-core", " ", platform.name.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-") or platform.arch
    return f"{slug}-{len(ALLOWED)}core"
