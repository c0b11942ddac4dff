"""GPU monitor, for either vendor: slowdowns, fallen clocks, other processes that run on it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from harness.machine.monitor.base import Clocks, Monitor, Ours
from kernels.platform import Platform

# Of a round's time: the drivers' counters run in steps, and a tenth of a verdict's margin hides in less.
MAX_SLOWED = 0.01
# Between two readings in a sample of 50 ms and more.
LOOK_S = 0.02
# Per cent of the time before a run: an idle device's own housekeeping stays under it.
BUSY = 5


@dataclass(frozen=True)
class Look:
    """What one reading gave.

    values: quantity -> value, clocks of an idle device left out
    clock:  MHz of the cores; None where it cannot be read
    busy:   whether the device was at work, so that its clock means anything; None where that is not told
    slowed: what holds its clock down now
    """

    values: dict[str, float] = field(default_factory=dict)
    clock: float | None = None
    busy: bool | None = None
    slowed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Holder:
    """A process with a context on the device, and the bytes it holds there; None where that is not told."""

    name: str
    bytes: float | None


class Residents:
    """Tells other people's processes on a device from ours.

    In a container a driver may name processes as the host numbers them, and we know ours by other numbers.
    Then those are foreign that were there before our first worker, and of the rest as many as there are
    more than we have workers; which ones is not known.
    """

    def __init__(self, before: Iterable[int]) -> None:
        self.before = set(before)
        self.same_numbers = False

    def foreign(self, pids: Collection[int], ours: Collection[int]) -> tuple[set[int], int]:
        """Those known to be foreign, and how many others must be."""
        present = set(pids)
        self.same_numbers |= bool(present & set(ours))
        if self.same_numbers:
            return present - set(ours), 0
        return present & self.before, max(0, len(present - self.before) - len(ours))


class GpuMonitor(Monitor):
    """What the vendors' libraries give, judged.

    clock_name: what the vendor calls the cores' clock; its quantity is `<name>_clock_mhz`
    disturbing: of what slows a device, that which does not come from the kernel's own work
    power:      ... that which does: a clock that it holds down is the normal state of a heavy product
    """

    clock_name: str
    disturbing: frozenset[str]
    power: str

    def __init__(self, platform: Platform, ours: Ours) -> None:
        super().__init__()
        self.device = platform.device
        self.ours = ours
        self.clocks = Clocks(f"{self.clock_name} clock")
        self.residents = Residents(self._holders())
        self.slowed: set[str] = set()
        self.workers: set[int] = set()
        self.slowed_before: Mapping[str, float] = {}
        self.elapsed = 0.0

    @abstractmethod
    def _look(self) -> Look: ...

    @abstractmethod
    def _slowdown_counters(self) -> tuple[float, dict[str, float]]:
        """A running time, and for each thing that slows the device how much of it that has been on."""

    @abstractmethod
    def _holders(self) -> dict[int, Holder]: ...

    @abstractmethod
    def _ran(self) -> dict[int, str]:
        """Processes that ran on the device in this round, each with how much."""

    @abstractmethod
    def _utilisation(self) -> float | None:
        """Per cent of the time lately."""

    def begin(self) -> None:
        self.clocks.begin()
        self.slowed.clear()
        self.workers = set(self.ours())
        self.elapsed, self.slowed_before = self._slowdown_counters()

    @contextlib.contextmanager
    def watching(self, work: str = "") -> Iterator[None]:
        """Reads from a thread of this process while the worker's calls run: once the worker has answered the
        device may be idle, and its clock another. A turn that was too short for that is read after it."""
        over, looks = threading.Event(), itertools.count()

        def look() -> None:
            while not over.wait(LOOK_S):
                self.sample(work)
                next(looks)

        watcher = threading.Thread(target=look, name="monitor", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        if not next(looks):
            self.sample(work)

    def sample(self, work: str = "") -> None:
        look = self._look()
        for quantity, value in look.values.items():
            self.notes.add(quantity, value)
        if look.busy is False:
            self.notes.idle += 1
            return
        if look.busy:
            self.notes.samples += 1
            self.notes.reasons.update(look.slowed)
        self.slowed |= look.slowed & self.disturbing
        if look.clock is None:
            return
        self.notes.add(f"{self.clock_name.lower()}_clock_mhz", look.clock)
        if look.busy and self.power not in look.slowed:
            self.clocks.see(work, look.clock)

    def end(self) -> str:
        return "; ".join([*self._slowdowns(), *self.clocks.fallen, *self._strangers()])

    def _slowdowns(self) -> list[str]:
        """From the counters over the whole round, and from the samples for what has no counter."""
        elapsed, slowed = self._slowdown_counters()
        lines = []
        for reason in sorted(slowed.keys() & self.slowed_before.keys()):
            if elapsed <= self.elapsed:
                continue
            share = (slowed[reason] - self.slowed_before[reason]) / (elapsed - self.elapsed)
            self.notes.add(f"{reason.replace(' ', '_')}_percent", 100 * share)
            if share > MAX_SLOWED and reason in self.disturbing:
                lines.append(f"{reason} for {share:.0%} of the round")
        return [*lines, *(f"{r} seen" for r in sorted(self.slowed - slowed.keys()))]

    def _strangers(self) -> list[str]:
        ran, ours = self._ran(), self.workers | set(self.ours())
        if ran and not self.residents.same_numbers:
            self.residents.foreign(self._holders(), ours)
        known, more = self.residents.foreign(ran.keys(), ours)
        lines = [f"process {pid}, not ours, ran on {self.device} ({ran[pid]})" for pid in sorted(known)]
        if more:
            lines.append(f"{len(ran)} processes ran on {self.device}: {more} more than we have")
        return lines

    def before(self) -> list[str]:
        holders = self._holders()
        known, more = self.residents.foreign(holders.keys(), set(self.ours()))
        lines = []
        for pid in sorted(known):
            name, size_bytes = holders[pid].name, holders[pid].bytes
            size = f" and holds {size_bytes / (1 << 30):.1f} GiB" if size_bytes is not None else ""
            lines.append(f"process {pid}{f' ({name})' if name else ''} is on {self.device}{size}")
        if more:
            lines.append(f"{more} more processes than ours are on {self.device}")
        used = self._utilisation()
        if used is not None and used > BUSY:
            lines.append(f"{self.device} is {used:.0f} % busy")
        self.notes.take()  # no round's
        return lines

    def readable(self) -> dict[str, str]:
        look = self._look()
        values = dict(look.values)
        if look.clock is not None:
            values[f"{self.clock_name.lower()}_clock_mhz"] = look.clock
        for quantity, value in values.items():
            self.notes.add(quantity, value)
        used = self._utilisation()
        if used is not None:
            self.notes.add("utilisation_percent", used)
        self._slowdown_counters()
        shown = {"slowed by": ", ".join(sorted(look.slowed)) or "nothing"} if look.busy is not None else {}
        shown["processes"] = str(len(self._holders()))
        return shown | self.notes.show()
