"""The interface of monitors, and what they share: notes of readings, and the check of clocks.

A monitor runs in the parent process, which imports neither torch nor a GPU's runtime. Where a library that
reads clocks is missing, the record says which quantities were not read.
"""

from __future__ import annotations

import contextlib
import statistics
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from harness.files import JsonObject

Ours = Callable[[], Sequence[int]]
"""Returns the process ids of the living workers."""

MIN_CLOCK = 0.75
"""A clock below this share of the highest that the same work had in this run is a disturbance; nvbench drops
samples below the same share."""


class Monitor(ABC):
    """Watches a device through a run; it never changes a setting. It is made before the run's workers start,
    because it takes every process that it then finds on the device for a foreign one."""

    def __init__(self) -> None:
        self.notes = Notes()

    @abstractmethod
    def begin(self) -> None:
        """Begins a round."""

    @abstractmethod
    def sample(self, work: str = "") -> None:
        """Takes one reading. `work` names the entry and its case. A clock is compared with the highest clock
        of the same work, because kernels differ in power and vector width."""

    @contextlib.contextmanager
    def watching(self, work: str = "") -> Iterator[None]:
        """Wraps a sample. By default the reading comes after it, as a reading beside it disturbs a CPU."""
        yield
        self.sample(work)

    @abstractmethod
    def end(self) -> str:
        """Ends the round. Returns why it is disturbed, with figures, or an empty string."""

    @abstractmethod
    def before(self) -> list[str]:
        """One line for each thing that makes the device busy or its numbers doubtful now. It may take half a
        second."""

    @abstractmethod
    def readable(self) -> dict[str, str]:
        """Each quantity with its value now, or why it cannot be read. It may take half a second."""

    def blocked(self) -> str:
        """Why several processes cannot use the device at once, or an empty string."""
        return ""

    def conditions(self) -> JsonObject:
        """What was read since the last call, as JSON (see `Notes.take`)."""
        return self.notes.take()


@dataclass
class Notes:
    """What a monitor has read since `take` was last called."""

    values: dict[str, list[float]] = field(default_factory=dict)
    """Quantity, with its unit in its name -> its readings."""
    reasons: Counter[str] = field(default_factory=Counter)
    """What slowed the device -> the number of samples in which it did."""
    samples: int = 0
    """How often `reasons` was read."""
    idle: int = 0
    """How often the device was idle, so that its clock and its reasons meant nothing."""
    unread: dict[str, str] = field(default_factory=dict)
    """Quantity -> why the last attempt to read it failed."""

    def add(self, quantity: str, value: float) -> None:
        self.values.setdefault(quantity, []).append(value)

    def take(self) -> JsonObject:
        """Returns the readings and forgets them: for each quantity {min, median, max}; `slowed_by`: reason ->
        share of the samples; `samples` and `idle_samples`: counts; `not_read`: quantity -> why. Empty parts
        are left out."""
        taken: JsonObject = {
            quantity: {
                "min": round(min(values), 3),
                "median": round(statistics.median(values), 3),
                "max": round(max(values), 3),
            }
            for quantity, values in sorted(self.values.items())
        }
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


class Clocks:
    """Finds clocks that are far below the highest of the same work."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.highest: dict[str, float] = {}
        self.fallen: list[str] = []
        """A line for each such clock of this round."""

    def see(self, work: str, megahertz: float) -> None:
        highest = self.highest[work] = max(megahertz, self.highest.get(work, 0.0))
        if megahertz < MIN_CLOCK * highest:
            self.fallen.append(
                f"{self.name} {megahertz:.0f} MHz, {megahertz / highest:.0%} of the {highest:.0f} MHz before"
            )


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

    def before(self) -> list[str]:
        return [f"clocks not read: {self.reason}"]

    def readable(self) -> dict[str, str]:
        return {"clocks": f"not readable: {self.reason}"}
