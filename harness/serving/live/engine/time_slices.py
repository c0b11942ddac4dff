"""Time slices of a machine: one engine runs while the others stand still, a fraction of a second each.

The speed of a shared machine wanders by several per cent from one second to the next, so two runs one after
the other differ by that much whatever runs in them. In slices shorter than that, both meet the same machine.
Their times are then read on the engine's own clock, which stands still with it.

For engines whose work is on the CPU: to stop a process does not stop the GPU's queue.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from harness.errors import UsageError
from harness.serving.live.engine.engine import Engine
from kernels.platform import Platform


def require_cpu(platform: Platform) -> None:
    """Raises UsageError elsewhere."""
    if platform.kind != "cpu":
        raise UsageError(
            f"slices need engines on the CPU, this is {platform.kind} {platform.arch}: a process that stands "
            "still does not stop its GPU"
        )


@dataclass(frozen=True)
class OwnClock:
    """stops: (from, to) in which the engine stood still, in order; seconds of time.monotonic"""

    stops: tuple[tuple[float, float], ...] = ()

    def __call__(self, at: float) -> float:
        """The moment `at` less the time that the engine had stood still until then."""
        before = bisect_left(self.stops, (at, at))
        lost = sum(end - start for start, end in self.stops[:before])
        return at - lost + max(0.0, self.stops[before - 1][1] - at if before else 0.0)


class TimeSlices:
    """While this is entered, its engines run in turn, the first one first."""

    def __init__(self, engines: Sequence[Engine], slice_s: float) -> None:
        self.engines, self.slice_s = list(engines), slice_s
        self.stops: dict[int, list[tuple[float, float]]] = {id(engine): [] for engine in engines}
        self._since: dict[int, float] = {}
        self._running = list(engines)
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._take_turns, daemon=True)

    def clock(self, engine: Engine) -> OwnClock:
        """Of all stops that are over."""
        return OwnClock(tuple(self.stops[id(engine)]))

    def finished(self, engine: Engine) -> None:
        """The others go on without it: what is left of their runs has the machine alone."""
        with self._changed:
            self._running = [other for other in self._running if other is not engine]
            self._changed.notify()

    def __enter__(self) -> TimeSlices:
        for engine in self.engines[1:]:
            self._pause(engine)
        self._resume(self.engines[0])
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()
        for engine in self.engines:
            self._resume(engine)

    def _take_turns(self) -> None:
        awake = self.engines[0]
        while True:
            with self._changed:
                share = self.slice_s if len(self._running) > 1 else None
                self._changed.wait_for(partial(self._is_turned, awake), share)
                if self._over or not self._running:
                    return
                following = self._after(awake)
            if following is not awake:
                self._pause(awake)
                self._resume(following)
                awake = following

    def _is_turned(self, awake: Engine) -> bool:
        return self._over or awake not in self._running

    def _after(self, awake: Engine) -> Engine:
        at = self.engines.index(awake)
        order = [*self.engines[at + 1 :], *self.engines[: at + 1]]
        return next(engine for engine in order if engine in self._running)

    def _pause(self, engine: Engine) -> None:
        at = engine.pause()
        self._since.setdefault(id(engine), at)

    def _resume(self, engine: Engine) -> None:
        at = engine.resume()
        if (since := self._since.pop(id(engine), None)) is not None:
            self.stops[id(engine)].append((since, at))
