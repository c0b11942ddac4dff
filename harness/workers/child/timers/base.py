"""Timers that run inside a worker: one timed sample of an entry on its device."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Call = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """seconds per call, over so many timed calls; host_seconds: of the host's time to launch one call, at
    the median, None where the host itself computes"""

    seconds: float
    calls: int
    host_seconds: float | None = None


@dataclass
class Program:
    """What samples launch over and over: the calls on each set of operands in rotation, or one graph of them.
    A sample goes on in the rotation where the last one stopped.

    steps:        eager: one call for each set; graph: one replay, which holds calls on every set
    calls:        that one step holds
    synchronises: whether a call waits for the device before it returns
    host_s:       seconds of the host's time to launch one step, as last seen
    device_s:     seconds that one step takes on the device, as last seen
    most:         steps that can be launched ahead of the device, as far as is known: lowered where a sample
                  was not hidden, raised again by those that are
    taken:        steps of the rotation so far
    before:       what is done before each step, by set of operands: half a microsecond of a CPU's calls, so
                  that a call which does nothing is seen; empty where the device computes
    after_untimed: what is done between a sample's untimed step and its timed ones, where its timer lets it
    """

    steps: Sequence[Call]
    calls: int = 1
    synchronises: bool = False
    host_s: float = 0.0
    device_s: float = math.inf
    most: float = math.inf
    rotation: Iterator[Call] = field(init=False, repr=False)
    taken: int = 0
    before: Sequence[Call] = ()
    after_untimed: Call | None = None

    def __post_init__(self) -> None:
        self.rotation = itertools.cycle(self.steps)

    def step(self) -> None:
        """The next one of the rotation."""
        if self.before:
            self.before[self.taken % len(self.steps)]()
        self.taken += 1
        next(self.rotation)()

    def reached_since(self, taken: int, sets: int) -> list[int]:
        """Of so many sets those whose output was computed after that many steps were taken."""
        if len(self.steps) < sets:  # a graph holds calls on all
            return list(range(sets)) if self.taken > taken else []
        return sorted({step % len(self.steps) for step in range(taken, min(self.taken, taken + sets))})

    def reached(self, which: int) -> bool:
        """Whether steps of the rotation have computed the output on this set."""
        return which % len(self.steps) < self.taken

    def reproduce(self, which: int) -> None:
        """A step that computes the output on one of the sets anew."""
        self.steps[which % len(self.steps)]()


class Timer(ABC):
    """Makes programs of calls and times them. A sample lasts at least `at_least` seconds, after one untimed
    step that wakes threads and clocks."""

    def program(self, calls: Sequence[Call]) -> Program:
        """Of calls that were all made before. Raises Unsupported where they cannot be launched so."""
        return Program(calls)

    @abstractmethod
    def sample(self, program: Program, at_least: float) -> Sample: ...

    @abstractmethod
    def synchronize(self) -> None: ...
