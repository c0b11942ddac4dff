"""Event timer: device time by events, with the launches queued behind a device sleep (CUDA, and HIP through
the same torch API). Proven against tests/support/fake_cuda.py and on an H100 (results/h100/first-contact);
untested on AMD."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.workers.child.timers.base import Call, Program, Sample, Timer

# Steps launched behind one sleep, at most. The gap between the first event and the first kernel, about
# 2 us, is a thousandth of this many steps of 5 us; a device queues about 1024 kernels.
MOST_STEPS = 400
# The sleep lasts this many times what the host is expected to take, and so much longer.
MARGIN, MARGIN_S = 1.5, 3e-4
# A sample sleeps no longer than this many times its length, once it has a reading.
SLEEPING = 2.0
# After the last event the whole device is at rest within so long, and such a share of what was timed: work
# that a call gave to a stream of its own and did not wait for escapes events.
LEFT_S, LEFT_SHARE = 1e-3, 0.02
# The host's clock tells that, and a pause of the host looks the same. Such work is left by every reading:
# only
# where this many in a row left some is it believed.
LEFT_TRIES = 3
# So many readings in a row may be thrown away.
TRIES = 8


@dataclass(frozen=True)
class Reading:
    """device_s: between the events; left_s: from the last event until the whole device was at rest, by the
    host's clock; host_s: launching each step; hidden: whether the device slept until the last step was
    launched; in_time: steps that were launched before it was to wake"""

    device_s: float
    left_s: float
    host_s: Sequence[float]
    hidden: bool = True
    in_time: int = 0


class EventTimer(Timer):
    """The sleep is timed, so a call that waits for the device cannot wait for ever. A reading in which the
    device woke before all steps were launched may hold host time and is thrown away.

    Calls that synchronise the host are timed without the sleep, and their time holds host time, as it
    would in serving. A single call of more launches than the device queues counts as one of them: the host
    waits inside it too.

    cuda:  torch.cuda, or what stands for it in a test
    clock: of the host, in seconds
    """

    def __init__(self, cuda: Any = None, clock: Callable[[], float] = time.perf_counter) -> None:
        if cuda is None:
            from torch import cuda
        self.cuda = cuda
        self.clock = clock
        self.cycles_per_s = self._calibrate()

    def _calibrate(self) -> float:
        """Cycles that the device sleeps per second, by its events: which of its clocks counts them differs
        by architecture. The first sleep after idling is at a low clock: the fastest of several counts."""
        cycles = 100_000
        while self._sleep_s(cycles) < 1e-3:
            cycles *= 4
        return cycles / min(self._sleep_s(cycles) for _ in range(5))

    def _sleep_s(self, cycles: int) -> float:
        return self._between_events(lambda: self.cuda._sleep(cycles))

    def _between_events(self, work: Call) -> float:
        start, end = self._events(2)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _events(self, count: int) -> list[Any]:
        return [self.cuda.Event(enable_timing=True) for _ in range(count)]

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def program(self, calls: Sequence[Call]) -> Program:
        alone_s = min(self._alone_s(calls[0]) for _ in range(3))
        return Program(calls, synchronises=self._waits(calls[0], alone_s), host_s=alone_s)

    def _alone_s(self, call: Call) -> float:
        """Seconds of host time that a call takes on an idle device."""
        self.cuda.synchronize()
        started = self.clock()
        call()
        return self.clock() - started

    def _waits(self, call: Call, alone_s: float) -> bool:
        """Whether a call returns only once the device has woken, however long it sleeps. A call that is
        merely slow to launch has returned by then; where a busy host made it slower than it was alone,
        the second, longer sleep shows it."""
        short = 2 * alone_s + 0.01
        return all(self._outlasts(call, sleep_s) for sleep_s in (short, short + min(3 * short, 1.0)))

    def _outlasts(self, call: Call, sleep_s: float) -> bool:
        (woken,) = self._events(1)
        self.cuda._sleep(self._cycles(sleep_s))
        woken.record()
        call()
        outlasted = woken.query()
        self.cuda.synchronize()
        return outlasted

    def _cycles(self, seconds: float) -> int:
        return math.ceil(seconds * self.cycles_per_s)

    def sample(self, program: Program, at_least: float) -> Sample:
        """Raises RuntimeError where the host is too slow or too busy for a single reading."""
        first = self._sample(program, 1)
        program.device_s = min(program.device_s, first.device_s)
        program.host_s = program.host_s or first.host_s[0]
        readings: list[Reading] = []
        total = slept = 0.0
        growing = True
        while total < at_least and slept < SLEEPING * at_least:
            rounds = math.ceil((at_least - total) / (program.device_s * min(program.most, MOST_STEPS)))
            steps = math.ceil((at_least - total) / (program.device_s * rounds))
            if program.synchronises:
                reading = self._sample(program, steps)
            else:
                affordable = (SLEEPING * at_least - slept) / (MARGIN * program.host_s)
                most = program.most
                reading, sleep_s = self._hidden_sample(program, max(1, int(min(steps, affordable))))
                slept += sleep_s
                # A busy host may have lowered it, not the queue: raised until a reading does not fit.
                growing = growing and program.most >= most
                if growing:
                    program.most = max(program.most, 2 * len(reading.host_s))
            readings.append(reading)
            total += reading.device_s
            program.device_s = total / sum(len(s.host_s) for s in readings)
        program.host_s = statistics.median(s for reading in readings for s in reading.host_s)
        calls = program.calls * sum(len(reading.host_s) for reading in readings)
        return Sample(total / calls, calls, program.host_s / program.calls)

    def _hidden_sample(self, program: Program, steps: int) -> tuple[Reading, float]:
        """A reading without host time, and the seconds slept for it."""
        slept, longer = 0.0, 1.0
        for attempt in range(TRIES):
            steps = int(min(steps, program.most))
            sleep_s = longer * (MARGIN * steps * program.host_s + MARGIN_S)
            reading = self._sample(program, steps, sleep_s)
            slept += sleep_s
            if reading.hidden:
                return reading, slept
            if reading.in_time:
                program.host_s = max(program.host_s, statistics.median(reading.host_s[: reading.in_time]))
            # Once may have been a disturbance. Twice: only what was launched in time fits, say before the
            # queue of launches was full; and where not even one step did, the sleep has to be longer.
            if attempt and steps > 1:
                program.most = max(1, min(steps - 1, int(0.7 * reading.in_time)))
            elif attempt:
                longer *= 2
        raise RuntimeError(
            f"the host took longer to launch its calls than the device slept, {TRIES} times up to "
            f"{sleep_s:.3g} s: other work on this machine, or a call whose host time varies"
        )

    def _sample(self, program: Program, steps: int, sleep_s: float = 0.0) -> Reading:
        """Raises RuntimeError where work of the calls escapes its events."""
        left_s = math.inf
        for _ in range(LEFT_TRIES):
            reading = self._take(program, steps, sleep_s)
            if reading.device_s <= 0:
                raise RuntimeError("no time passed between its events: it launches nothing on its stream")
            if reading.left_s <= LEFT_S + LEFT_SHARE * reading.device_s:
                return reading
            left_s = min(left_s, reading.left_s)
        raise RuntimeError(
            f"its work went on for {left_s * 1e3:.3g} ms after its calls had ended, on another stream"
        )

    def _take(self, program: Program, steps: int, sleep_s: float) -> Reading:
        asleep, start, end = self._events(3)
        cycles = self._cycles(sleep_s)
        began = self.clock()
        asleep.record()
        if cycles:
            self.cuda._sleep(cycles)
        start.record()
        stamps = [self.clock()]
        for _ in range(steps):
            program.step()
            stamps.append(self.clock())
        end.record()
        hidden = not start.query()
        end.synchronize()
        ended = self.clock()
        self.cuda.synchronize()
        left_s = self.clock() - ended
        if cycles:
            # A clock that runs faster than when it was calibrated makes sleeps shorter than meant.
            self.cycles_per_s = max(self.cycles_per_s, 1e3 * cycles / asleep.elapsed_time(start))
        return Reading(
            device_s=start.elapsed_time(end) / 1e3,
            left_s=left_s,
            host_s=[later - earlier for earlier, later in itertools.pairwise(stamps)],
            hidden=hidden,
            in_time=sum(stamp <= began + sleep_s for stamp in stamps[1:]),
        )
