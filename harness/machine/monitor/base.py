"""Monitor of a device: what may spoil a round, watched from outside the workers.

A monitor runs in the parent, which imports neither torch nor a GPU library: those that read clocks are
imported when a monitor is made, and where one is missing its quantities are said not to be read.
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

# Of the highest clock that the same work was seen at in this run; nvbench drops samples below the same share.
MIN_CLOCK = 0.75


class Monitor(ABC):
    """Watches a device through a run; made before the run's workers start, as what is on the device by
    then is not theirs. It never changes a setting."""

    def __init__(self) -> None:
        self.notes = Notes()

    @abstractmethod
    def begin(self) -> None:
        """A round begins."""

    @abstractmethod
    def sample(self, work: str = "") -> None:
        """One reading. `work`: the entry and its case; a clock is held against the highest that the same
        work had, because one kernel's power or vector width is no disturbance for another."""

    @contextlib.contextmanager
    def watching(self, work: str = "") -> Iterator[None]:
        """Around a sample. A CPU is read right after it: a reading beside the calls would disturb them."""
        yield
        self.sample(work)

    @abstractmethod
    def end(self) -> str:
        """The round is over: why it is disturbed, with figures, or an empty string."""

    @abstractmethod
    def before(self) -> list[str]:
        """One line for each thing that makes the device busy or its numbers doubtful now. May take half a
        second."""

    @abstractmethod
    def readable(self) -> dict[str, str]:
        """Each quantity with its value now, or why it cannot be read. May take half a second."""

    def blocked(self) -> str:
        """Why several processes cannot use the device at once, or an empty string."""
        return ""

    def conditions(self) -> JsonObject:
        """What was read since the last call, as plain values (see `Notes.take`)."""
        return self.notes.take()


@dataclass
class Notes:
    """What a monitor read, until the record takes it.

    values:  quantity, with its unit in its name -> one entry for each reading
    reasons: what slowed the device -> in how many samples
    samples: how often `reasons` was looked for
    idle:    how often the device was at rest already, so that its clock and `reasons` meant nothing
    unread:  quantity -> why it could not be read, at the last attempt
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    idle: int = 0
    unread: dict[str, str] = field(default_factory=dict)

    def add(self, quantity: str, value: float) -> None:
        self.values.setdefault(quantity, []).append(value)

    def take(self) -> JsonObject:
        """quantity -> {min, median, max}; `slowed_by`: reason -> share of the samples that it was on in;
        `samples`, `idle_samples`: how many; `not_read`: quantity -> why. Empty parts are left out."""
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
        """Each quantity with the middle of what was read, or why it could not be; then forgets them."""
        values = {quantity: f"{statistics.median(v):.4g}" for quantity, v in self.values.items()}
        unread = {quantity: f"not readable: {reason}" for quantity, reason in self.unread.items()}
        self.take()
        return dict(sorted((unread | values).items()))


class Clocks:
    """The highest clock of each work, and what fell below it in this round."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.highest: dict[str, float] = {}
        self.fallen: list[str] = []

    def begin(self) -> None:
        self.fallen = []

    def see(self, work: str, megahertz: float) -> None:
        highest = self.highest[work] = max(megahertz, self.highest.get(work, 0.0))
        if megahertz < MIN_CLOCK * highest:
            self.fallen.append(
                f"{self.name} {megahertz:.0f} MHz, {megahertz / highest:.0%} of the {highest:.0f} MHz before"
            )


class Blind(Monitor):
    """Sees nothing, and says why; the run goes on without."""

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
