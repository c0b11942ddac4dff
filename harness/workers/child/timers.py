"""Timers, inside a worker: each method `sample` times a series of calls of one entry.

CpuTimer times calls on a CPU, EventTimer calls on a GPU (CUDA, and HIP through the same torch API),
GraphTimer one graph of many calls on a GPU. Those of GPUs ran on H100 (results/h100/first-contact) and H200;
they are untested on AMD.
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
"""On a CPU an untimed call before each sample wakes the threads and fills the caches with the call's own
data. A call of LONG_S seconds or more has none: filling the caches takes 3 ms (32 MB at 10 GB/s)."""
FEW_PAGES = 16  # fewer page faults than this in a CPU sample: its calls had touched all that they write to
MOST_STEPS = 400
"""The most steps that are launched behind one sleep. The gap before the first kernel, about 2 us, is a
thousandth of 400 steps of 5 us. A device queues about 1024 kernels."""
MARGIN = 1.5
MARGIN_S = 3e-4
"""A sleep lasts MARGIN times as long as the host should take for the launches, and MARGIN_S more."""
MOST_SLEEP = 2.0  # all sleeps of a sample together last at most this many times as long as the sample
TRAILING_S = 1e-3
TRAILING_SHARE = 0.02
"""After the last event the whole device must be at rest within TRAILING_S seconds and TRAILING_SHARE of the
timed seconds. Work that a call gives to another stream, and does not wait for, escapes the events."""
TRAILING_TRIES = 3  # a call is refused after this many such readings in a row: one may be a pause of the host
HIDING_TRIES = 8  # the most readings in a row that are thrown away because the device woke too early
GRAPH_S = 1e-3  # the least seconds of a graph: then the gap of a few us between two replays is negligible
MOST_CALLS = 256  # the most calls that a graph holds


@dataclass(frozen=True)
class Sample:
    seconds: float  # seconds per call
    calls: int  # how many timed calls the sample made
    host_seconds: float | None = None  # the median time of launching one call; None where the host computes


@dataclass
class Program:
    """The calls of an entry as samples make them: in steps, which rotate over the sets of operands. Each
    sample continues the rotation where the last one stopped."""

    steps: Sequence[Call]  # eager: one call for each set of operands. Graph: one replay.
    calls_per_step: int = 1
    synchronises: bool = False  # whether a call waits for the device before it returns
    host_s: float = 0.0  # seconds that the host took to launch one step, as last measured
    device_s: float = math.inf  # seconds that one step takes on the device, as last measured
    most_ahead: float = math.inf
    """How many steps can be launched ahead of the device, as far as readings have shown."""
    steps_taken: int = 0  # over all samples

    def step(self) -> None:
        call = self.steps[self.steps_taken % len(self.steps)]
        self.steps_taken += 1
        call()

    def computed_since(self, earlier: int, sets: int) -> list[int]:
        """The sets that steps used since `steps_taken` was `earlier`, as indices. sets: how many there are"""
        if len(self.steps) < sets:  # a graph holds calls on all sets
            return list(range(sets)) if self.steps_taken > earlier else []
        end = min(self.steps_taken, earlier + sets)  # in more steps than sets, all sets come again
        return sorted({step % len(self.steps) for step in range(earlier, end)})


class CpuTimer:
    """Times calls by the host's monotonic clock, for at least `at_least_s` seconds and one call, after an
    untimed call (see LONG_S).

    In the first sample that reaches a set of operands the calls may fault memory in, which takes up to 4 s
    per GiB on a virtual machine. A sample with such faults is thrown away, and another one follows."""

    def program(self, calls: Sequence[Call]) -> Program:
        return Program(calls)

    def sample(self, program: Program, at_least_s: float) -> Sample:
        with MAIN_THREAD.bound_again():
            is_long = LONG_S <= program.device_s < math.inf
            if not is_long:
                program.step()
            while True:
                reaches_new_sets = program.steps_taken < len(program.steps)
                faults_before = _page_faults()
                count = 0
                started = time.perf_counter()
                while (elapsed_s := time.perf_counter() - started) < at_least_s or count == 0:
                    program.step()
                    count += 1
                faulted_in = reaches_new_sets and _page_faults() - faults_before > FEW_PAGES
                if not faulted_in:
                    break
        program.device_s = elapsed_s / count
        return Sample(elapsed_s / count, count)

    def synchronize(self) -> None:
        pass


def _page_faults() -> int:
    """How many page faults without a disk this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@dataclass(frozen=True)
class Reading:
    """One timed series of steps."""

    device_s: float  # seconds between the events `start` and `end`
    trailing_s: float  # seconds from `end` until the whole device was at rest, by the host's clock
    launches_s: Sequence[float]  # seconds that the host took to launch each step
    is_hidden: bool  # whether the device slept until the last step was launched
    steps_in_time: int  # how many steps the host launched within the length of the sleep

    @property
    def steps(self) -> int:
        return len(self.launches_s)


class EventTimer:
    """Times steps on a GPU between two events. The device sleeps while the host launches the steps, so that
    the time between the events contains none of the host's:

        host    launches the sleep, `start`, all steps and `end`; then waits for `end`
        device  sleeps ...................................... `start`, step, step, step, ..., `end`

    Such a series is a reading. A sample is as many readings as take about `at_least_s` seconds between their
    events, or fewer (see MOST_SLEEP). An untimed step before them raises the device's clocks.

    A sleep has a fixed length, so that a call which waits for the device cannot wait for ever. A reading in
    which the device woke before all steps were launched may contain host time and is thrown away.

    Calls that synchronise the host are timed without the sleep. Their time contains host time, as it would in
    serving. A call with more launches than the device queues is such a call: the host waits in it for room.
    """

    def __init__(self, cuda: Any = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """cuda: torch.cuda, or its substitute in a test; clock: the host's clock, in seconds"""
        if cuda is None:
            from torch import cuda
        self.cuda, self.clock = cuda, clock
        self.cycles_per_s = self._calibrated_cycles_per_s()

    def _calibrated_cycles_per_s(self) -> float:
        """How many cycles the device sleeps per second, by its events: architectures count differently.
        The fastest of several sleeps counts, as the first one after idling runs at a low clock."""
        cycles = 100_000
        while self._sleep_s(cycles) < 1e-3:
            cycles *= 4
        return cycles / min(self._sleep_s(cycles) for _ in range(5))

    def _sleep_s(self, cycles: int) -> float:
        """Sleeps, and returns for how many seconds."""
        start, end = self._event(), self._event()
        start.record()
        self.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _event(self) -> Any:
        return self.cuda.Event(enable_timing=True)

    def synchronize(self) -> None:
        self.cuda.synchronize()

    def program(self, calls: Sequence[Call]) -> Program:
        """A program of calls that were made before. Raises Unsupported where a graph cannot hold them."""
        launch_s = min(self._launch_s(calls[0]) for _ in range(3))
        return Program(calls, synchronises=self._synchronises(calls[0], launch_s), host_s=launch_s)

    def _launch_s(self, call: Call) -> float:
        """Makes a call on an idle device. Returns the seconds of the host's time until it returned."""
        self.cuda.synchronize()
        started = self.clock()
        call()
        return self.clock() - started

    def _synchronises(self, call: Call, launch_s: float) -> bool:
        """Whether a call behind a sleep returns only after the device has woken, in both of two attempts.
        A call that is only slow to launch returns during the second, longer sleep, also on a busy host."""
        first_s = 2 * launch_s + 0.01
        second_s = first_s + min(3 * first_s, 1.0)
        for sleep_s in (first_s, second_s):
            woken = self._event()
            self.cuda._sleep(math.ceil(sleep_s * self.cycles_per_s))
            woken.record()
            call()
            returned_after_waking = woken.query()
            self.cuda.synchronize()
            if not returned_after_waking:
                return False
        return True

    def sample(self, program: Program, at_least_s: float) -> Sample:
        """Raises RuntimeError if the host is too slow for one reading, or if work escapes the events."""
        untimed = self._reading_at_rest(program, 1)
        program.device_s = min(program.device_s, untimed.device_s)
        if program.host_s == 0:
            program.host_s = untimed.launches_s[0]
        readings: list[Reading] = []
        steps_timed = 0
        timed_s = slept_s = 0.0
        most_slept_s = MOST_SLEEP * at_least_s
        was_lowered = False  # whether a reading of this sample has lowered `most_ahead`
        while timed_s < at_least_s and slept_s < most_slept_s:
            # The steps that are still needed are split into readings of equal length.
            steps_left = (at_least_s - timed_s) / program.device_s
            readings_left = math.ceil(steps_left / min(program.most_ahead, MOST_STEPS))
            steps = math.ceil(steps_left / readings_left)
            if program.synchronises:
                reading = self._reading_at_rest(program, steps)
            else:
                affordable_steps = (most_slept_s - slept_s) / (MARGIN * program.host_s)
                ahead_before = program.most_ahead
                reading, sleeps_s = self._hidden_reading(program, max(1, int(min(steps, affordable_steps))))
                slept_s += sleeps_s
                was_lowered = was_lowered or program.most_ahead < ahead_before
                if not was_lowered:  # A busy host may have made an earlier sample lower it too far.
                    program.most_ahead = max(program.most_ahead, 2 * reading.steps)
            readings.append(reading)
            timed_s += reading.device_s
            steps_timed += reading.steps
            program.device_s = timed_s / steps_timed
        program.host_s = statistics.median(s for reading in readings for s in reading.launches_s)
        calls = program.calls_per_step * steps_timed
        return Sample(timed_s / calls, calls, program.host_s / program.calls_per_step)

    def _hidden_reading(self, program: Program, steps: int) -> tuple[Reading, float]:
        """A reading of at most so many steps, without host time, and all seconds of sleep that it took."""
        slept_s = 0.0
        lengthening = 1.0
        for attempt in range(HIDING_TRIES):
            steps = int(min(steps, program.most_ahead))
            sleep_s = lengthening * (MARGIN * steps * program.host_s + MARGIN_S)
            reading = self._reading_at_rest(program, steps, sleep_s)
            slept_s += sleep_s
            if reading.is_hidden:
                return reading, slept_s
            in_time = reading.steps_in_time
            if in_time:
                program.host_s = max(program.host_s, statistics.median(reading.launches_s[:in_time]))
            if attempt == 0:
                continue  # the first failure may have been a disturbance
            # The queue of launches may be too short for so many steps. For one step the sleep was too short.
            if steps > 1:
                program.most_ahead = max(1, min(steps - 1, int(0.7 * in_time)))
            else:
                lengthening *= 2
        slept = f"{HIDING_TRIES} times up to {sleep_s:.3g} s"
        why = "other work on this machine, or a call whose host time varies"
        raise RuntimeError(f"the host took longer to launch its calls than the device slept, {slept}: {why}")

    def _reading_at_rest(self, program: Program, steps: int, sleep_s: float = 0.0) -> Reading:
        """A reading with the device at rest soon after. Raises RuntimeError if work escapes the events."""
        trailing_s = math.inf  # the least of the readings
        for _ in range(TRAILING_TRIES):
            reading = self._any_reading(program, steps, sleep_s)
            if reading.device_s <= 0:
                raise RuntimeError("no time passed between its events: it launches nothing on its stream")
            if reading.trailing_s <= TRAILING_S + TRAILING_SHARE * reading.device_s:
                return reading
            trailing_s = min(trailing_s, reading.trailing_s)
        after = f"{1e3 * trailing_s:.3g} ms after its calls had ended"
        raise RuntimeError(f"its work went on for {after}, on another stream")

    def _any_reading(self, program: Program, steps: int, sleep_s: float) -> Reading:
        """Takes a reading, whatever it shows. Without a sleep it is not hidden."""
        asleep, start, end = self._event(), self._event(), self._event()
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
        is_hidden = not start.query()
        end.synchronize()
        ended = self.clock()
        self.cuda.synchronize()
        trailing_s = self.clock() - ended
        if cycles:
            # A clock that runs faster than at its calibration makes sleeps shorter than intended.
            self.cycles_per_s = max(self.cycles_per_s, 1e3 * cycles / asleep.elapsed_time(start))
        return Reading(
            device_s=start.elapsed_time(end) / 1e3,
            trailing_s=trailing_s,
            launches_s=[later - earlier for earlier, later in itertools.pairwise(stamps)],
            is_hidden=is_hidden,
            steps_in_time=len([stamp for stamp in stamps[1:] if stamp <= began + sleep_s]),
        )


_failed: list[Any] = []
"""Graphs whose capture failed; they are never freed. In torch 2.13 capture_begin also gives the allocator of
pinned memory a filter that points to the graph, and a failing capture_end does not remove it: every later
allocation asks the filter (aten/src/ATen/cuda/CUDAGraph.cpp, ATen/core/CachingHostAllocator.h)."""


class GraphTimer(EventTimer):
    """Times replays of one graph, whose calls rotate over all sets of operands, so that caches see the same
    accesses as with eager calls. Where a library allocates its output, the output of a set is that of the
    last call on the set; it lies in the graph's memory, and each replay writes it anew."""

    def __init__(self, cuda: Any = None, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(cuda, clock)
        # One stream for all captures, because torch keeps a workspace for matrix products for each stream
        # that it has seen (see harness.plan.memory.blas_workspace).
        self.side = self.cuda.Stream()

    def program(self, calls: Sequence[Call]) -> Program:
        one_rotation = self._replaying(calls, 1)
        self.sample(one_rotation, GRAPH_S)  # measures device_s
        rotations = min(math.ceil(GRAPH_S / one_rotation.device_s), MOST_CALLS // len(calls))
        return one_rotation if rotations <= 1 else self._replaying(calls, rotations)

    def _replaying(self, calls: Sequence[Call], rotations: int) -> Program:
        replay = capture(self.cuda, self.side, calls, rotations).replay
        return Program([replay], calls_per_step=rotations * len(calls), host_s=self._launch_s(replay))


def capture(cuda: Any, side: Any, calls: Sequence[Call], rotations: int) -> Any:
    """A graph of `rotations` rotations over the calls, captured on a side stream after a warm-up there, as
    torch requires. Raises Unsupported where the calls cannot be captured, and leaves the device as it was."""
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for call in calls:
            call()
    mode_before = cuda.get_sync_debug_mode()
    try:
        # In this mode torch raises where it synchronises by itself. Synchronising would break the capture.
        cuda.set_sync_debug_mode("error")
        with cuda.stream(side):
            for call in calls:
                call()
        cuda.set_sync_debug_mode(mode_before)
        return _recorded(cuda, side, list(calls) * rotations)
    except Exception as error:
        raise Unsupported(f"cannot be captured into a graph: {one_line(error)}") from error
    finally:
        cuda.set_sync_debug_mode(mode_before)
        cuda.synchronize()


def _recorded(cuda: Any, side: Any, calls: Sequence[Call]) -> Any:
    """A graph of the calls. Raises a call's own error; torch hides it behind that of ending the capture."""
    graph, pool = cuda.CUDAGraph(), cuda.graph_pool_handle()
    call_error: Exception | None = None
    try:
        with warnings.catch_warnings():
            # A graph without nodes takes no time and computes nothing; torch only warns of it.
            warnings.filterwarnings("error", message=".*CUDA Graph is empty")
            # torch.cuda.graph does not restore the stream where ending the capture fails; `cuda.stream` does.
            with cuda.stream(side), cuda.graph(graph, pool=pool, stream=side):
                try:
                    for call in calls:
                        call()
                except Exception as error:
                    call_error = error
                    raise
    except Exception as error:
        _abandon(cuda, graph, pool)
        raise (call_error or error) from None
    return graph


def _abandon(cuda: Any, graph: Any, pool: Any) -> None:
    """Tells torch's allocator of device memory that a failed capture is over, as a successful capture_end
    does. Otherwise the allocator refuses to empty its cache, which is what the next capture begins with. The
    allocator of pinned memory cannot be told, so the graph is kept."""
    _failed.append(graph)
    memory = cuda.memory
    end_allocating = getattr(memory, "_cuda_endAllocateToPool", None)
    if end_allocating is None:  # torch before 2.8
        end_allocating = memory._cuda_endAllocateCurrentStreamToPool
    with contextlib.suppress(RuntimeError):
        end_allocating(cuda.current_device(), pool)
        memory._cuda_releasePool(cuda.current_device(), pool)
    graph.reset()


Timer = CpuTimer | EventTimer  # a GraphTimer is an EventTimer


def timer_for(kind: str, launch: str) -> Timer:
    """The timer of a device. kind: cuda, rocm or cpu; launch: eager or graph"""
    if kind == "cpu":
        return CpuTimer()
    return GraphTimer() if launch == "graph" else EventTimer()
