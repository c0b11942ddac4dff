"""What all monitors share (interface, notes of readings, the check of clocks), and what those of GPUs do.
Monitors run in the parent process, which imports neither torch nor a GPU's runtime."""

from __future__ import annotations

import contextlib
import statistics
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from harness.files import JsonObject
from kernels.platform import Platform

WorkerPids = Callable[[], Sequence[int]]  # returns the process ids of the living workers

MIN_CLOCK = 0.75  # a clock below this share of the same work's highest is a disturbance, as in nvbench


class Monitor(ABC):
    """Watches a device through a run; it never changes a setting. It is made before the run's workers start,
    because it takes every process that it then finds on the device for a foreign one."""

    clock_name = "clock"  # the name of the cores' clock in what `end` returns

    def __init__(self) -> None:
        self.notes = Notes()
        self.highest: dict[str, float] = {}  # the highest clock of each work in this run, in MHz
        self.low_clocks: list[str] = []  # a line for each clock of this round that was far below the highest

    def check_clock(self, work: str, megahertz: float) -> None:
        """Compares a clock with the highest one of the same work, as kernels differ in power and width."""
        highest = self.highest[work] = max(megahertz, self.highest.get(work, 0.0))
        if megahertz < MIN_CLOCK * highest:
            share = f"{megahertz / highest:.0%} of the {highest:.0f} MHz before"
            self.low_clocks.append(f"{self.clock_name} {megahertz:.0f} MHz, {share}")

    @abstractmethod
    def begin(self) -> None: ...  # begins a round

    @abstractmethod
    def sample(self, work: str = "") -> None:
        """Takes one reading. work: names the entry and its case"""

    @contextlib.contextmanager
    def watching(self, work: str = "") -> Iterator[None]:
        """Wraps a sample. By default the reading comes after it, as a reading during it disturbs a CPU."""
        yield
        self.sample(work)

    @abstractmethod
    def end(self) -> str:
        """Ends the round. Returns why it is disturbed, with figures, or an empty string."""

    @abstractmethod
    def complaints(self) -> list[str]:
        """What keeps the device busy or makes its readings doubtful, a line each. Takes half a second."""

    @abstractmethod
    def current_values(self) -> dict[str, str]:
        """Each quantity with its value now, or why it cannot be read. May take half a second."""

    def blocked(self) -> str:
        """Why several processes cannot use the device at once, or an empty string."""
        return ""

    def take_conditions(self) -> JsonObject:
        """What was read since the last call, as JSON (see `Notes.take`)."""
        return self.notes.take()


@dataclass
class Notes:
    """What a monitor has read since `take` was last called."""

    values: dict[str, list[float]] = field(default_factory=dict)  # readings by quantity, named with its unit
    reasons: Counter[str] = field(default_factory=Counter)  # in how many readings each slowed the device
    samples: int = 0  # how often `reasons` were read
    idle: int = 0  # how often the device was idle, so that its clock and its reasons meant nothing
    unread: dict[str, str] = field(default_factory=dict)  # quantity -> why the last attempt to read it failed

    def add(self, quantity: str, value: float) -> None:
        self.values.setdefault(quantity, []).append(value)

    def take(self) -> JsonObject:
        """Returns the readings and forgets them: for each quantity {min, median, max}; `slowed_by`: reason ->
        share of the samples; `samples` and `idle_samples`: counts; `not_read`: quantity -> why."""
        taken: JsonObject = {}
        for quantity, values in sorted(self.values.items()):
            figures = {"min": min(values), "median": statistics.median(values), "max": max(values)}
            taken[quantity] = {name: round(figure, 3) for name, figure in figures.items()}
        if self.samples:
            taken["samples"] = self.samples
            taken["slowed_by"] = {r: round(n / self.samples, 4) for r, n in self.reasons.most_common()}
        if self.idle:
            taken["idle_samples"] = self.idle
        if self.unread:
            taken["not_read"] = dict(sorted(self.unread.items()))
        self.values, self.reasons, self.samples, self.idle, self.unread = {}, Counter(), 0, 0, {}
        return taken

    def show(self) -> dict[str, str]:
        """Returns the median of each quantity, or why it could not be read, and forgets the readings."""
        values = {quantity: f"{statistics.median(v):.4g}" for quantity, v in self.values.items()}
        unread = {quantity: f"not readable: {reason}" for quantity, reason in self.unread.items()}
        self.take()
        return dict(sorted((unread | values).items()))


class Blind(Monitor):
    """A monitor that reads nothing and says why. The run goes on without readings."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def begin(self) -> None:
        self.notes.unread["clocks"] = self.reason

    def sample(self, work: str = "") -> None:
        pass

    def end(self) -> str:
        return ""

    def complaints(self) -> list[str]:
        return [f"clocks not read: {self.reason}"]

    def current_values(self) -> dict[str, str]:
        return {"clocks": f"not readable: {self.reason}"}


MAX_SLOWED = 0.01
"""A slowdown disturbs a round if it takes more than this share of it. Drivers' counters advance in steps, and
a smaller share hardly changes a time."""
READ_EVERY_S = 0.02  # seconds between two readings during a sample, which takes 50 ms or more
BUSY = 5  # a utilisation above so many per cent before a run is another's work; housekeeping takes less


@dataclass(frozen=True)
class GpuReading:
    """One reading of the device."""

    values: dict[str, float] = field(default_factory=dict)  # by quantity; no clocks of an idle device
    clock_mhz: float | None = None  # of the cores; None where it cannot be read
    busy: bool | None = None  # whether it was at work, so that its clock means something; None: unknown
    slowed_by: frozenset[str] = frozenset()  # what holds the clock down now


Holder = tuple[str, float | None]
"""A process with a context on the device: its name, and the bytes that it holds there, None where unknown."""


class GpuMonitor(Monitor):
    """Judges what the libraries of the vendors read."""

    library_name: str
    error_name: str  # of the library's exception
    disturbing: frozenset[str]  # reasons for a slowdown that do not come from the kernel's own work
    power: str  # the reason that comes from it: a heavy product normally runs at the power limit

    def __init__(
        self, platform: Platform, worker_pids: WorkerPids, library: ModuleType, handle: object
    ) -> None:
        super().__init__()
        self.device = platform.device
        self.is_slice = platform.uuid.startswith("MIG-")
        self.worker_pids = worker_pids
        self.library, self.handle = library, handle
        self.holders_before = set(self._holders())  # process ids before the run's first worker
        self.same_pids = False  # whether the driver was seen to use the process ids that we know
        self.reasons_read: set[str] = set()  # the disturbing reasons that this round's readings show
        self.workers: set[int] = set()  # the workers at the beginning of the round
        # The slowdown counters as the round began (see `_slowdown_counters`).
        self.elapsed_before = 0.0
        self.slowed_before: dict[str, float] = {}

    def _ask(self, quantity: str, functions: Sequence[str], *arguments: object) -> Any:
        """The answer of the first function that the library and the driver both have. None if no function
        answers (too new, too old, a part of a GPU, no permission); the reason is noted."""
        reason = f"{self.library_name} has no {functions[-1]}"
        for function in functions:
            if hasattr(self.library, function):
                try:
                    return getattr(self.library, function)(self.handle, *arguments)
                except getattr(self.library, self.error_name) as error:
                    reason = self._message(error)
        self.notes.unread[quantity] = reason
        return None

    _message: Callable[[Exception], str] = staticmethod(str)  # what the library says of an error

    @abstractmethod
    def _read(self) -> GpuReading: ...

    @abstractmethod
    def _slowdown_counters(self) -> tuple[float, dict[str, float]]:
        """The time so far, and for each reason how much of it the device was slowed; in any one unit."""

    @abstractmethod
    def _holders(self) -> dict[int, Holder]: ...

    @abstractmethod
    def _ran(self) -> dict[int, str]:
        """The process ids that ran on the device in this round -> how much they used, for people."""

    @abstractmethod
    def _utilisation(self) -> float | None:
        """Recent utilisation in per cent of the time."""

    def _note_workers(self, pids: Collection[int], workers: Collection[int]) -> None:
        """Notes that the driver uses the process ids that we know, once one of its ids is a worker's."""
        self.same_pids = self.same_pids or not set(pids).isdisjoint(workers)

    def _foreign(self, pids: Collection[int], workers: Collection[int]) -> tuple[set[int], int]:
        """The processes that are known to be foreign, and the number of further ones that must be foreign.

        In a container the driver may use the host's process ids, while we know our workers by other ids.
        Then the processes that were there before our first worker are foreign. Of the other processes as
        many are foreign as exceed the number of our workers; it is unknown which.
        """
        present = set(pids)
        if self.same_pids:
            return present - set(workers), 0
        later = present - self.holders_before
        return present & self.holders_before, max(0, len(later) - len(workers))

    def begin(self) -> None:
        self.low_clocks.clear()
        self.reasons_read.clear()
        self.workers = set(self.worker_pids())
        self.elapsed_before, self.slowed_before = self._slowdown_counters()

    @contextlib.contextmanager
    def watching(self, work: str = "") -> Iterator[None]:
        """Takes readings in a thread while the worker's calls run: once the worker has answered, the device
        may be idle and its clock another. After a sample that was too short for a reading, it takes one."""
        is_over, was_read = threading.Event(), threading.Event()

        def read() -> None:
            while not is_over.wait(READ_EVERY_S):
                self.sample(work)
                was_read.set()

        reader = threading.Thread(target=read, name="monitor", daemon=True)
        reader.start()
        try:
            yield
        finally:
            is_over.set()
            reader.join()
        if not was_read.is_set():
            self.sample(work)

    def sample(self, work: str = "") -> None:
        reading = self._read()
        for quantity, value in reading.values.items():
            self.notes.add(quantity, value)
        if reading.busy is False:
            self.notes.idle += 1
            return
        if reading.busy:
            self.notes.samples += 1
            self.notes.reasons.update(reading.slowed_by)
        self.reasons_read |= reading.slowed_by & self.disturbing
        if reading.clock_mhz is None:
            return
        self.notes.add(self._clock_quantity(), reading.clock_mhz)
        if reading.busy and self.power not in reading.slowed_by:
            self.check_clock(work, reading.clock_mhz)

    def _clock_quantity(self) -> str:
        return f"{self.clock_name.lower().replace(' ', '_')}_mhz"

    def end(self) -> str:
        return "; ".join([*self._slowdowns(), *self.low_clocks, *self._foreign_lines()])

    def _slowdowns(self) -> list[str]:
        """Slowdowns by the counters of the whole round, and by the readings where there is no counter."""
        elapsed, slowed = self._slowdown_counters()
        round_time = elapsed - self.elapsed_before
        lines = []
        counted = sorted(slowed.keys() & self.slowed_before.keys()) if round_time > 0 else []
        for reason in counted:
            share = (slowed[reason] - self.slowed_before[reason]) / round_time
            self.notes.add(f"{reason.replace(' ', '_')}_percent", 100 * share)
            if share > MAX_SLOWED and reason in self.disturbing:
                lines.append(f"{reason} for {share:.0%} of the round")
        return lines + [f"{reason} seen" for reason in sorted(self.reasons_read - slowed.keys())]

    def _foreign_lines(self) -> list[str]:
        ran, workers = self._ran(), self.workers | set(self.worker_pids())
        self._note_workers(ran, workers)
        if ran and not self.same_pids:
            self._note_workers(self._holders(), workers)
        foreign, further = self._foreign(ran, workers)
        lines = [f"process {pid}, not ours, ran on {self.device} ({ran[pid]})" for pid in sorted(foreign)]
        if further:
            lines.append(f"{len(ran)} processes ran on {self.device}: {further} more than we have")
        return lines

    def complaints(self) -> list[str]:
        holders, workers = self._holders(), self.worker_pids()
        self._note_workers(holders, workers)
        foreign, further = self._foreign(holders, workers)
        lines = []
        for pid in sorted(foreign):
            name, held_bytes = holders[pid]
            called = f"process {pid} ({name})" if name else f"process {pid}"
            size = f" and holds {held_bytes / (1 << 30):.1f} GiB" if held_bytes is not None else ""
            lines.append(f"{called} is on {self.device}{size}")
        if further:
            lines.append(f"{further} more processes than ours are on {self.device}")
        used_percent = self._utilisation()
        if used_percent is not None and used_percent > BUSY:
            lines.append(f"{self.device} is {used_percent:.0f} % busy")
        self.notes.take()  # forgets these readings, which are not of a round
        return lines

    def current_values(self) -> dict[str, str]:
        reading, used_percent = self._read(), self._utilisation()
        for quantity, value in reading.values.items():
            self.notes.add(quantity, value)
        if reading.clock_mhz is not None:
            self.notes.add(self._clock_quantity(), reading.clock_mhz)
        if used_percent is not None:
            self.notes.add("utilisation_percent", used_percent)
        self._slowdown_counters()  # notes why it cannot be read
        shown = {"processes": str(len(self._holders()))}
        if reading.busy is not None:
            shown = {"slowed by": ", ".join(sorted(reading.slowed_by)) or "nothing"} | shown
        return shown | self.notes.show()
