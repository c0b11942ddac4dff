"""The device of a run: locked, watched, and what else uses it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.errors import NothingRan
from harness.machine.monitor import monitor_for
from harness.machine.monitor.base import Monitor
from harness.run.device_lock import device_lock
from harness.workers.process import worker_pids
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
    monitor = monitor_for(platform, worker_pids)
    with device_lock(platform):
        if reason := monitor.blocked():
            raise NothingRan(f"{platform.device} cannot be measured: {reason}")
        yield OwnDevice(platform, monitor, monitor.before())
