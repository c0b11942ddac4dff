"""GPU monitor of either vendor: slowdowns, fallen clocks, other processes that run on the GPU."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from harness.machine.monitor.base import Clocks, Monitor, Ours
from kernels.platform import Platform

MAX_SLOWED = 0.01
"""Share of a round's time. Drivers' counters advance in steps, so a smaller share means little; and a
slowdown of this size changes a time by a tenth of what separates verdicts."""
LOOK_S = 0.02
"""Seconds between two readings during a sample, which takes 50 ms or more."""
BUSY = 5
"""Per cent of the time before a run; an idle device's own housekeeping takes less."""


@dataclass(frozen=True)
class Look:
    """One reading of the device."""

    values: dict[str, float] = field(default_factory=dict)
    """Quantity -> value; clocks of an idle device are left out."""
    clock: float | None = None
    """MHz of the cores; None where it cannot be read."""
    busy: bool | None = None
    """Whether the device was at work, so that its clock means something; None where that is unknown."""
    slowed: frozenset[str] = frozenset()
    """What holds the clock down now."""


@dataclass(frozen=True)
class Holder:
    """A process with a context on the device."""

    name: str
    bytes: float | None
    """The device memory that it holds; None where that is unknown."""


class GpuMonitor(Monitor):
    """Judges what the libraries of the vendors read."""

    clock_name: str
    """The vendor's name of the cores' clock; its quantity is `<name>_clock_mhz`."""
    disturbing: frozenset[str]
    """The reasons for a slowdown that do not come from the kernel's own work."""
    power: str
    """The reason that does come from it: a heavy product normally runs at the power limit."""

    def __init__(self, platform: Platform, ours: Ours) -> None:
        super().__init__()
        self.device = platform.device
        self.ours = ours
        self.clocks = Clocks(f"{self.clock_name} clock")
        self.there_before = set(self._holders())
        self.same_numbers = False
        """Whether the driver was seen to use our numbers of processes (see `_foreign`)."""
        self.slowed: set[str] = set()
        """What disturbed the samples of this round."""
        self.workers: set[int] = set()
        self.slowed_before: Mapping[str, float] = {}
        self.elapsed = 0.0

    @abstractmethod
    def _look(self) -> Look: ...

    @abstractmethod
    def _slowdown_counters(self) -> tuple[float, dict[str, float]]:
        """A running time, and for each reason how much of it the device was slowed."""

    @abstractmethod
    def _holders(self) -> dict[int, Holder]: ...

    @abstractmethod
    def _ran(self) -> dict[int, str]:
        """The processes that ran on the device in this round -> how much they used."""

    @abstractmethod
    def _utilisation(self) -> float | None:
        """Recent utilisation in per cent of the time."""

    def _foreign(self, pids: Collection[int], ours: Collection[int]) -> tuple[set[int], int]:
        """The processes that are known to be foreign, and how many others must be.

        In a container the driver may use the host's numbers, while we know our workers by other numbers.
        Then the processes that were there before our first worker are foreign. Of the rest as many are
        foreign as exceed the number of our workers, and which ones is unknown.
        """
        present = set(pids)
        self.same_numbers |= bool(present & set(ours))
        if self.same_numbers:
            return present - set(ours), 0
        return present & self.there_before, max(0, len(present - self.there_before) - len(ours))

    def begin(self) -> None:
        self.clocks.fallen.clear()
        self.slowed.clear()
        self.workers = set(self.ours())
        self.elapsed, self.slowed_before = self._slowdown_counters()

    @contextlib.contextmanager
    def watching(self, work: str = "") -> Iterator[None]:
        """Reads from a thread of this process while the worker's calls run: once the worker has answered, the
        device may be idle and its clock another. If the sample was too short for that, it reads after it."""
        over, looked = threading.Event(), threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                self.sample(work)
                looked.set()

        watcher = threading.Thread(target=look, name="monitor", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        if not looked.is_set():
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
        """Slowdowns by the counters of the whole round, and by the samples where there is no counter."""
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
        if ran and not self.same_numbers:
            self._foreign(self._holders(), ours)
        known, more = self._foreign(ran, ours)
        lines = [f"process {pid}, not ours, ran on {self.device} ({ran[pid]})" for pid in sorted(known)]
        if more:
            lines.append(f"{len(ran)} processes ran on {self.device}: {more} more than we have")
        return lines

    def before(self) -> list[str]:
        holders = self._holders()
        known, more = self._foreign(holders, self.ours())
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
        self.notes.take()  # these readings are not of a round
        return lines

    def readable(self) -> dict[str, str]:
        look = self._look()
        values = dict(look.values)
        if look.clock is not None:
            values[f"{self.clock_name.lower()}_clock_mhz"] = look.clock
        used = self._utilisation()
        if used is not None:
            values["utilisation_percent"] = used
        for quantity, value in values.items():
            self.notes.add(quantity, value)
        self._slowdown_counters()
        shown = {"processes": str(len(self._holders()))}
        if look.busy is not None:
            shown = {"slowed by": ", ".join(sorted(look.slowed)) or "nothing"} | shown
        return shown | self.notes.show()
