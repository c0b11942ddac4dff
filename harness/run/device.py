"""The device of a run: its lock, its monitor, what else uses it, and what the run's record says of it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.catalogue.devices import Ceilings, known_type
from harness.errors import NothingRan
from harness.files import JsonObject, take_lock
from harness.machine.cpu_threads import ALLOWED
from harness.machine.device import torch_advice
from harness.machine.monitor import monitor_for
from harness.machine.monitor.base import Monitor
from harness.run.ceilings import ceilings
from harness.workers.environment import provenance
from harness.workers.process import WorkerFailure, worker_pids
from kernels.platform import Platform, devices

LOCKS = "KERNEL_BENCH_LOCKS"
"""The environment variable that names the folder of locks, which all users of a machine have to share. So the
default is /tmp, whatever TMPDIR is."""


@dataclass(frozen=True)
class OwnDevice:
    """A device that no other run uses at the same time."""

    platform: Platform
    monitor: Monitor
    busy: Sequence[str] = ()  # what else used it at the start, one line each


@contextlib.contextmanager
def own_device(platform: Platform, shared: bool = False) -> Iterator[OwnDevice]:
    """Holds the device's lock, unless the device is `shared` with other runs. Raises NothingRan where another
    run holds the lock, or where the device cannot be measured."""
    if reason := torch_advice(platform):
        raise NothingRan(reason)
    monitor = monitor_for(platform, worker_pids)
    with contextlib.nullcontext() if shared else device_lock(platform):
        if reason := monitor.blocked():
            raise NothingRan(f"{platform.device} cannot be measured: {reason}")
        yield OwnDevice(platform, monitor, monitor.complaints())


@dataclass(frozen=True)
class DeviceFacts:
    """What a run's record says of its device."""

    platform: Platform
    provenance: JsonObject
    ceilings: Ceilings | None
    no_ceilings: str = ""  # why the ceilings could not be measured, where they could not
    busy: Sequence[str] = ()  # what else used it at the start, one line each


def device_facts(device: OwnDevice, threads: int) -> DeviceFacts:
    """The facts of a device. May measure ceilings for half a minute. threads: of each worker, on a CPU"""
    known, no_ceilings = None, ""
    try:
        known = ceilings(device.platform, threads, device.monitor)
    except WorkerFailure as failure:
        no_ceilings = failure.reason
    return DeviceFacts(device.platform, provenance(device.platform, threads), known, no_ceilings, device.busy)


def device_type(platform: Platform) -> str:
    """The type of a device as campaigns and clusters name it: `H200`, `cpu`."""
    return "cpu" if platform.kind == "cpu" else known_type(platform.name or platform.arch)


def machine_name(platform: Platform) -> str:
    """The name of a machine in folders of results, such as `h200`; for a CPU its name and the number of cores
    that this process may use, such as `epyc-9654-2core`."""
    if platform.kind != "cpu":
        return re.sub(r"[^a-z0-9]+", "-", device_type(platform).lower()).strip("-")
    words = re.sub(r"\(.*?\)|@.*|processor|cpu|\d+-core", " ", platform.name.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-") or platform.arch
    return f"{slug}-{len(ALLOWED)}core"


@contextlib.contextmanager
def device_lock(platform: Platform) -> Iterator[None]:
    """Lets one run at a time use a device, because two would disturb each other. A GPU is locked by its UUID,
    so CUDA_VISIBLE_DEVICES may number it differently in another run; of a CPU, each core is locked that this
    process may use. Raises NothingRan where another process holds the lock."""
    if platform.kind == "cpu":
        names = [f"cpu{cpu}" for cpu in sorted(ALLOWED)]
    else:
        # The older form of a slice's name has slashes.
        names = [re.sub(r"[:/]", "-", platform.uuid or platform.device)]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_locked(name, platform.device))
        yield


@contextlib.contextmanager
def _locked(name: str, device: str) -> Iterator[None]:
    path = Path(os.environ.get(LOCKS, "/tmp")) / f"deepseek-kernel-bench-{name}.lock"
    try:
        descriptor = _open(path)
    except OSError as error:
        raise NothingRan(f"cannot lock device {device}: {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "r+"):
        owner, about = take_lock(descriptor, about=f"{time.time():.0f} {_this_command()}")
        if owner:
            other = ", or choose another --device" if len(devices()) > 1 else ""
            raise NothingRan(
                f"device {device} is being measured by {_holder(owner, about)}; wait for it{other}"
            )
        yield


def _this_command() -> str:
    """This command, with the name of its program without folders: `harness run ...`, `pytest ...`."""
    file = Path(sys.argv[0])
    program = file.parent.name if file.name == "__main__.py" else file.name
    return shlex.join([program, *sys.argv[1:]])


def _holder(owner: str, about: str) -> str:
    """What holds a lock: the command, its process and since when. `about` has the second since 1970 and the
    command; it is empty where the process has written only its id, the owner, so far."""
    since, _, command = about.partition(" ")
    if not since:
        return f"process {owner}"
    began = time.localtime(int(since))
    form = "%H:%M" if time.strftime("%F", began) == time.strftime("%F") else "%F %H:%M"
    shown = textwrap.shorten(command, 100, placeholder=" ...")
    return f"`{shown}` (process {owner}, since {time.strftime(form, began)})"


def _open(path: Path) -> int:
    """Opens a lock file of any user. In a folder with a sticky bit Linux refuses to open another user's file
    with O_CREAT (fs.protected_regular)."""
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)  # whatever the umask is
        return descriptor
