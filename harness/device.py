"""Timers that run inside a worker: one timed turn of a contender on its device."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Call = Callable[[], None]


@dataclass(frozen=True)
class Turn:
    """seconds per call, over so many timed calls"""

    seconds: float
    calls: int


class Timer(ABC):
    """Times calls that rotate over copies of the operands; a turn goes on where the last one stopped.

    A turn lasts at least `at_least` seconds, after one untimed call that wakes threads and clocks.
    """

    def capture(self, calls: Sequence[Call]) -> Sequence[Call]:
        """What a turn replays; the calls themselves unless they are recorded into a graph."""
        return calls

    @abstractmethod
    def turn(self, rotation: Iterator[Call], at_least: float) -> Turn: ...

    @abstractmethod
    def synchronize(self) -> None: ...


class CpuTimer(Timer):
    """The monotonic clock around as many calls as fill the turn."""

    def turn(self, rotation: Iterator[Call], at_least: float) -> Turn:
        next(rotation)()
        count = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < at_least or not count:
            next(rotation)()
            count += 1
        return Turn(elapsed / count, count)

    def synchronize(self) -> None:
        pass


class EventTimer(Timer):
    """Device events (CUDA, and HIP through the same torch API), with the launches queued behind a
    device sleep, so that the time between the events holds no host time. Untested on hardware."""

    SLEEP_S = 0.02
    MAX_QUEUED = 100  # calls; a device queues about a thousand kernels before the host has to wait

    def __init__(self, graph: bool) -> None:
        import torch

        self.torch = torch
        self.graph = graph
        self.cycles_per_second = self._calibrate()

    def _calibrate(self) -> float:
        cycles = 20_000_000
        self.torch.cuda._sleep(1000)
        return cycles / self._between_events(lambda: self.torch.cuda._sleep(cycles))

    def _between_events(self, work: Call, sleep_cycles: int = 0) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda.synchronize()
        if sleep_cycles:
            self.torch.cuda._sleep(sleep_cycles)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def capture(self, calls: Sequence[Call]) -> Sequence[Call]:
        """One graph per call, on a side stream as torch asks; raises what the capture raises."""
        if not self.graph:
            return calls
        side = self.torch.cuda.Stream()
        side.wait_stream(self.torch.cuda.current_stream())
        graphs = []
        for call in calls:
            with self.torch.cuda.stream(side):
                call()
            self.torch.cuda.current_stream().wait_stream(side)
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                call()
            graphs.append(graph.replay)
        self.torch.cuda.synchronize()
        return graphs

    def turn(self, rotation: Iterator[Call], at_least: float) -> Turn:
        next(rotation)()
        self.torch.cuda.synchronize()
        # Host time to enqueue one call decides how many fit behind one sleep.
        started = time.perf_counter()
        next(rotation)()
        host = time.perf_counter() - started
        self.torch.cuda.synchronize()
        batch = max(1, min(self.MAX_QUEUED, int(0.5 * self.SLEEP_S / max(host, 1e-6))))
        sleep = int(self.SLEEP_S * self.cycles_per_second)
        total = count = 0.0

        def queue() -> None:
            for _ in range(batch):
                next(rotation)()

        while total < at_least:
            total += self._between_events(queue, sleep)
            count += batch
        return Turn(total / count, int(count))

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()


def timer_for(kind: str, launch: str) -> Timer:
    return CpuTimer() if kind == "cpu" else EventTimer(graph=launch == "graph")


def kernel_names(call: Call, kind: str) -> list[str]:
    """What ran in one call, from the profiler: device kernels, or torch operators on cpu, by time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if kind != "cpu":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        call()
        if kind != "cpu":
            torch.cuda.synchronize()

    def own_time(event: Any) -> float:
        return event.self_device_time_total if kind != "cpu" else event.self_cpu_time_total

    events = sorted(profiler.key_averages(), key=own_time, reverse=True)
    total = sum(map(own_time, events)) or 1.0
    return [e.key for e in events if own_time(e) > 0.01 * total][:8]
