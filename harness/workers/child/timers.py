"""Timers, inside a worker: how one sample of a program of calls is timed. CpuTimer times calls on a CPU,
EventTimer calls on GPUs (CUDA, and HIP through the same torch API), GraphTimer one graph of many calls there.

The timers of GPUs ran on an H100 (results/h100/first-contact); they are untested on AMD.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import one_line
from harness.machine.cpu_threads import MAIN_THREAD
from kernels.op import Unsupported

Call = Callable[[], object]

LONG_S = 0.5
"""Before a CPU sample an untimed call wakes the threads and fills the caches with the call's own data. Longer
calls go without: filling the caches takes 3 ms (32 MB at 10 GB/s), less than 1 % of such a call."""

FEW_PAGES = 16  # a CPU sample faults in fewer pages once its calls have touched all that they write to

MOST_STEPS = 400
"""So many steps at most are launched behind one sleep. The gap before the first kernel, about 2 us, is a
thousandth of so many steps of 5 us. A device queues about 1024 kernels."""

MARGIN = 1.5  # a sleep lasts this many times as long as the host may take to launch,
MARGIN_S = 3e-4  # and so many seconds more

SLEEPING = 2.0  # the sleeps of a sample, together, last no longer than this many times its length

LEFT_S = 1e-3
LEFT_SHARE = 0.02
"""After the last event the whole device must be at rest within LEFT_S seconds and LEFT_SHARE of the timed
seconds. Work that a call gives to a stream of its own, and does not wait for, escapes the events."""

LEFT_TRIES = 3  # readings in a row that must leave work behind: a pause of the host looks the same in one

TRIES = 8  # how many readings in a row may be thrown away

GRAPH_S = 1e-3  # seconds of the calls of a graph: the gap of a few us between two replays is negligible
MOST_CALLS = 256  # the most calls that a graph holds


@dataclass(frozen=True)
class Sample:
    seconds: float  # seconds per call
    calls: int  # how many timed calls the sample made
    host_seconds: float | None = None  # the median time of launching one call; None where the host computes


@dataclass
class Program:
    """What samples launch again and again. A sample continues the rotation where the last one stopped."""

    steps: Sequence[Call]  # eager: one call for each set of operands. Graph: one replay.
    calls: int = 1  # how many calls one step makes
    synchronises: bool = False  # whether a call waits for the device before it returns
    host_s: float = 0.0  # seconds that the host took to launch one step, as last seen
    device_s: float = math.inf  # seconds that one step takes on the device, as last seen
    most: float = math.inf
    """How many steps can be launched ahead of the device, as far as is known: a reading that was not hidden
    lowers it, hidden ones raise it."""
    taken: int = 0  # how many steps of the rotation were taken so far

    def step(self) -> None:
        call = self.steps[self.taken % len(self.steps)]
        self.taken += 1
        call()

    def computed_since(self, taken: int, sets: int) -> list[int]:
        """Which of the `sets` sets of operands were computed after that many steps were taken."""
        if len(self.steps) < sets:  # a graph holds calls on all sets
            return list(range(sets)) if self.taken > taken else []
        return sorted({step % len(self.steps) for step in range(taken, min(self.taken, taken + sets))})


class CpuTimer:
    """Times calls with the monotonic clock around as many as fill a sample of at least `at_least` seconds,
    after an untimed call (see LONG_S).

    A sample in which the rotation reaches sets of operands for the first time may fault memory in, which
    takes up to 4 s per GiB on a virtual machine. Then it counts as untimed, and another one follows."""

    def program(self, calls: Sequence[Call]) -> Program:
        return Program(calls)

    def sample(self, program: Program, at_least: float) -> Sample:
        with MAIN_THREAD.in_place():
            is_long = LONG_S <= program.device_s < math.inf
            if not is_long:
                program.step()
            while True:
                reaches_new_sets = program.taken < len(program.steps)
                faults = _page_faults()
                count = 0
                started = time.perf_counter()
                while (elapsed := time.perf_counter() - started) < at_least or not count:
                    program.step()
                    count += 1
                if not (reaches_new_sets and _page_faults() - faults > FEW_PAGES):
                    break
        program.device_s = elapsed / count
        return Sample(elapsed / count, count)

    def synchronize(self) -> None:
        pass


def _page_faults() -> int:
    """How many page faults without a disk this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@dataclass(frozen=True)
class Reading:
    """One timed series of steps."""

    device_s: float  # seconds between the first and the last event
    left_s: float  # seconds from the last event until the whole device was at rest, by the host's clock
    host_s: Sequence[float]  # seconds that the host took to launch each step
    hidden: bool = True  # whether the device slept until the last step was launched
    in_time: int = 0  # how many steps were launched before the device was to wake


class EventTimer:
    """Times calls between two events, behind a device sleep that hides the host's time, for about `at_least`
    seconds a sample, or for less where the sleeps would take longer than SLEEPING times that. One untimed
    step before raises the device's clocks.

    The sleep has a fixed length, so a call that waits for the device cannot wait for ever. A reading in which
    the device woke before all steps were launched may contain host time and is thrown away.

    Calls that synchronise the host are timed without the sleep, and their time contains host time, as it
    would in serving. A single call that makes more launches than the device queues counts as one of these:
    the host waits inside it too.
    """

    def __init__(self, cuda: Any = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """cuda: torch.cuda, or its substitute in a test; clock: the host's clock, in seconds"""
        if cuda is None:
            from torch import cuda
        self.cuda = cuda
        self.clock = clock
        self.cycles_per_s = self._calibrate()

    def _calibrate(self) -> float:
        """How many cycles the device sleeps per second, by its events: architectures count differently.
        The fastest of several is taken, as the first one after idling runs at a low clock."""
        cycles = 100_000
        while self._sleep_s(cycles) < 1e-3:
            cycles *= 4
        return cycles / min(self._sleep_s(cycles) for _ in range(5))

    def _sleep_s(self, cycles: int) -> float:
        start, end = self._events(2)
        start.record()
        self.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _events(self, count: int) -> list[Any]:
        return [self.cuda.Event(enable_timing=True) for _ in range(count)]

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def program(self, calls: Sequence[Call]) -> Program:
        """A program of calls that were all made before. Raises Unsupported where a graph cannot hold them."""
        alone_s = min(self._alone_s(calls[0]) for _ in range(3))
        return Program(calls, synchronises=self._waits(calls[0], alone_s), host_s=alone_s)

    def _alone_s(self, call: Call) -> float:
        """Seconds of the host's time that a call takes on an idle device."""
        self.cuda.synchronize()
        started = self.clock()
        call()
        return self.clock() - started

    def _waits(self, call: Call, alone_s: float) -> bool:
        """Whether a call returns only after the device has woken, however long it sleeps. A call that is only
        slow to launch returns before the end of the second, longer sleep, also on a busy host."""
        short = 2 * alone_s + 0.01
        for sleep_s in (short, short + min(3 * short, 1.0)):
            (woken,) = self._events(1)
            self.cuda._sleep(math.ceil(sleep_s * self.cycles_per_s))
            woken.record()
            call()
            outlasted = woken.query()
            self.cuda.synchronize()
            if not outlasted:
                return False
        return True

    def sample(self, program: Program, at_least: float) -> Sample:
        """Raises RuntimeError where the host is too slow or too busy for even one reading."""
        first = self._read(program, 1)
        program.device_s = min(program.device_s, first.device_s)
        program.host_s = program.host_s or first.host_s[0]
        readings: list[Reading] = []
        total = slept = 0.0
        growing = True
        while total < at_least and slept < SLEEPING * at_least:
            # What is left is split into readings of equal length.
            steps_left = (at_least - total) / program.device_s
            readings_left = math.ceil(steps_left / min(program.most, MOST_STEPS))
            steps = math.ceil(steps_left / readings_left)
            if program.synchronises:
                reading = self._read(program, steps)
            else:
                affordable = (SLEEPING * at_least - slept) / (MARGIN * program.host_s)
                most = program.most
                reading, sleep_s = self._hidden_reading(program, max(1, int(min(steps, affordable))))
                slept += sleep_s
                # A busy host may have lowered `most` although the queue had room. So it is doubled until a
                # reading lowers it again.
                growing = growing and program.most >= most
                if growing:
                    program.most = max(program.most, 2 * len(reading.host_s))
            readings.append(reading)
            total += reading.device_s
            taken = sum(len(reading.host_s) for reading in readings)
            program.device_s = total / taken
        program.host_s = statistics.median(s for reading in readings for s in reading.host_s)
        calls = program.calls * taken
        return Sample(total / calls, calls, program.host_s / program.calls)

    def _hidden_reading(self, program: Program, steps: int) -> tuple[Reading, float]:
        """A reading that contains no host time, and the seconds that the device slept for it."""
        slept = 0.0
        lengthening = 1.0
        for attempt in range(TRIES):
            steps = int(min(steps, program.most))
            sleep_s = lengthening * (MARGIN * steps * program.host_s + MARGIN_S)
            reading = self._read(program, steps, sleep_s)
            slept += sleep_s
            if reading.hidden:
                return reading, slept
            if reading.in_time:
                program.host_s = max(program.host_s, statistics.median(reading.host_s[: reading.in_time]))
            # The first failure may have been a disturbance. After a second one, only as many steps are tried
            # as were launched in time, for example before the queue of launches was full. Where not even one
            # step was, the sleep has to be longer.
            if attempt and steps > 1:
                program.most = max(1, min(steps - 1, int(0.7 * reading.in_time)))
            elif attempt:
                lengthening *= 2
        raise RuntimeError(
            f"the host took longer to launch its calls than the device slept, {TRIES} times up to "
            f"{sleep_s:.3g} s: other work on this machine, or a call whose host time varies"
        )

    def _read(self, program: Program, steps: int, sleep_s: float = 0.0) -> Reading:
        """Raises RuntimeError where work of the calls escapes the events."""
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
        cycles = math.ceil(sleep_s * self.cycles_per_s)
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
            # A clock that runs faster than at its calibration makes sleeps shorter than intended.
            self.cycles_per_s = max(self.cycles_per_s, 1e3 * cycles / asleep.elapsed_time(start))
        return Reading(
            device_s=start.elapsed_time(end) / 1e3,
            left_s=left_s,
            host_s=[later - earlier for earlier, later in itertools.pairwise(stamps)],
            hidden=hidden,
            in_time=sum(stamp <= began + sleep_s for stamp in stamps[1:]),
        )


_failed: list[Any] = []
"""Graphs whose capture failed; they are never freed. In torch 2.13 capture_begin also gives the allocator of
pinned memory a filter that points to the graph, and a failing capture_end does not remove it: every later
allocation asks the filter (aten/src/ATen/cuda/CUDAGraph.cpp, ATen/core/CachingHostAllocator.h)."""


class GraphTimer(EventTimer):
    """Times one graph of calls on all sets of operands in rotation, so that the caches see what they see
    when the calls are made one by one. Where a library allocates its output, the graph's memory has
    one output for each set, that of the last call on the set; every replay writes it anew."""

    def __init__(self, cuda: Any = None, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(cuda, clock)
        # All graphs are captured on this stream, because torch keeps a workspace for matrix products for each
        # stream that it has seen (see harness.plan.memory.blas_workspace).
        self.side = self.cuda.Stream()

    def program(self, calls: Sequence[Call]) -> Program:
        once = self._replaying(calls, 1)
        self.sample(once, GRAPH_S)
        rotations = min(math.ceil(GRAPH_S / once.device_s), MOST_CALLS // len(calls))
        return once if rotations <= 1 else self._replaying(calls, rotations)

    def _replaying(self, calls: Sequence[Call], rotations: int) -> Program:
        graph = capture(self.cuda, self.side, calls, rotations)
        return Program([graph.replay], calls=rotations * len(calls), host_s=self._alone_s(graph.replay))


def capture(cuda: Any, side: Any, calls: Sequence[Call], rotations: int) -> Any:
    """A graph of `rotations` rotations over the calls, captured on a side stream after a warm-up there, as
    torch requires. Raises Unsupported where the calls cannot be captured, and leaves the device as it was."""
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for call in calls:
            call()
    before = cuda.get_sync_debug_mode()
    try:
        # Makes torch raise where it synchronises by itself, before that breaks a capture.
        cuda.set_sync_debug_mode("error")
        with cuda.stream(side):
            for call in calls:
                call()
        cuda.set_sync_debug_mode(before)
        return _record(cuda, side, [*calls] * rotations)
    except Exception as error:
        raise Unsupported(f"cannot be captured into a graph: {one_line(error)}") from error
    finally:
        cuda.set_sync_debug_mode(before)
        cuda.synchronize()


def _record(cuda: Any, side: Any, calls: Sequence[Call]) -> Any:
    """A graph of the calls. Where a call breaks the capture, this raises the call's own error, and not the
    one that ending the broken capture raises after it."""
    graph, pool = cuda.CUDAGraph(), cuda.graph_pool_handle()
    cause: Exception | None = None
    try:
        with warnings.catch_warnings():
            # A graph without nodes takes no time and computes nothing; torch only warns of it.
            warnings.filterwarnings("error", message=".*CUDA Graph is empty")
            # torch.cuda.graph does not restore the stream where ending the capture fails; the outer one does.
            with cuda.stream(side), cuda.graph(graph, pool=pool, stream=side):
                try:
                    for call in calls:
                        call()
                except Exception as error:
                    cause = error
                    raise
    except Exception as error:
        _abandon(cuda, graph, pool)
        raise (cause or error) from None
    return graph


def _abandon(cuda: Any, graph: Any, pool: Any) -> None:
    """Tells torch's allocator that a failed capture is over, as a successful capture_end does. Otherwise the
    allocator refuses to empty its cache, which is what the next capture begins with. Before torch 2.8 the
    function had another name. There is none for pinned memory, so the graph is kept."""
    _failed.append(graph)
    memory = cuda.memory
    end = getattr(memory, "_cuda_endAllocateToPool", None) or memory._cuda_endAllocateCurrentStreamToPool
    with contextlib.suppress(RuntimeError):
        end(cuda.current_device(), pool)
        memory._cuda_releasePool(cuda.current_device(), pool)
    graph.reset()


Timer = CpuTimer | EventTimer  # a GraphTimer is an EventTimer


def timer_for(kind: str, launch: str) -> Timer:
    """The timer of a device. kind: cuda, rocm or cpu; launch: eager or graph"""
    if kind == "cpu":
        return CpuTimer()
    return GraphTimer() if launch == "graph" else EventTimer()
