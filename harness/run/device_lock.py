"""The lock of a device: one run at a time."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from harness.errors import NothingRan
from harness.files import take_lock
from harness.machine.cpu_threads import ALLOWED
from kernels.platform import Platform

LOCKS = "KERNEL_BENCH_LOCKS"
"""Environment variable: a folder for locks, for tests of the suite itself. The default is one place for all
users of a machine, whatever their TMPDIR."""


@contextlib.contextmanager
def device_lock(platform: Platform) -> Iterator[None]:
    """One run at a time on a device, however it is numbered: two would measure each other. A CPU is locked
    core by core, those that this process may use."""
    if platform.kind == "cpu":
        names = [f"cpu{cpu}" for cpu in sorted(ALLOWED)]
    else:
        # A slice's old name has slashes.
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
        if owner := take_lock(descriptor):
            where = f"device {device} is being measured by process {owner}"
            raise NothingRan(f"{where}; wait for it, or choose another --device")
        yield


def _open(path: Path) -> int:
    """Of whichever user's: in a folder with a sticky bit Linux refuses to open another's file with O_CREAT
    (fs.protected_regular)."""
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)  # whatever the umask
        return descriptor
