"""torch.cuda with a virtual host clock and a virtual device: what the device timers call, and no more.

Signatures, checks and the order of things are those of torch 2.13: torch/cuda/__init__.py, streams.py,
graphs.py, memory.py, and of aten/src/ATen/cuda/CUDAGraph.cpp and c10/cuda/CUDACachingAllocator.cpp, whose
state after a failed capture is kept: the stream stays the side stream, the allocator stays in the pool, and
emptying its cache then fails; the allocator of pinned memory keeps a pointer to the graph, which it follows
whenever memory is allocated (ATen/core/CachingHostAllocator.h).
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

QUEUE = 1024  # launches that wait for the device; the next one blocks the host
LAUNCH_S = 1e-6  # of the host, for whatever is launched beside entries' own
GAP_S = 2e-6  # between two replays of graphs


class FakeCuda:
    """cycles_per_s: of the sleep's clock; slow_sleeps: how many first ones run at half the clock."""

    def __init__(self, cycles_per_s: float = 1.7e9, slow_sleeps: int = 1) -> None:
        self.now = 0.0
        self.cycles_per_s, self.slow_sleeps = cycles_per_s, slow_sleeps
        self.slept_s = 0.0
        self.pending: list[float] = []  # when each queued launch ends
        self.executed: list[str] = []  # kernels, by name
        self.default, self.device = Stream(self, default=True), 0
        self.current = self.default
        self.capturing: CUDAGraph | None = None
        self.captures_underway: set[tuple[int, int]] = set()
        self.pinned_filters: dict[tuple[int, int], weakref.ref[CUDAGraph]] = {}
        self.streams: list[Stream] = []  # other than the default one
        self.pools = itertools.count(1)
        self.debug_mode = 0
        ends = {"_cuda_endAllocateToPool": self._end_allocate, "_cuda_releasePool": self._release_pool}
        self.memory = SimpleNamespace(**ends)
        self.released: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now

    def launch(self, name: str, device_s: float, effect: Callable[[], Any] | None = None) -> None:
        """A kernel on the current stream; `effect` is what it does to memory."""
        if self.capturing is not None:
            if self.current is not self.capturing.stream:
                self.capturing.valid = False
                raise RuntimeError("CUDA error: operation would make the legacy stream depend on a capture")
            self.capturing.nodes.append((name, device_s, effect))
            return
        self._enqueue(device_s)
        self._execute(name, effect)

    def pause(self, seconds: float) -> None:
        """Of the host."""
        self.now += seconds

    def _execute(self, name: str, effect: Callable[[], Any] | None) -> None:
        self.executed.append(name)
        if effect is not None:
            effect()

    def _enqueue(self, device_s: float) -> None:
        self.pending = [end for end in self.pending if end > self.now]
        if len(self.pending) >= QUEUE:
            self.pending.sort()
            self.now = self.pending[len(self.pending) - QUEUE]
        self.current.ready = max(self.current.ready, self.now) + device_s
        self.pending.append(self.current.ready)

    def wait_for_device(self, flagged: bool) -> None:
        """What a call does that synchronises; `flagged`: by way of torch, which its debug mode knows."""
        if flagged and self.debug_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.capturing is not None:
            self.capturing.valid = False
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.now = max(self.now, self.current.ready)

    # torch.cuda

    def _sleep(self, cycles: int) -> None:
        if type(cycles) is not int:
            raise TypeError("torch.cuda._sleep(): expected 'int'")
        assert self.capturing is None, "a sleep was captured"
        rate = self.cycles_per_s
        if self.slow_sleeps:
            self.slow_sleeps, rate = self.slow_sleeps - 1, rate / 2
        self.now += LAUNCH_S
        self._enqueue(cycles / rate)
        self.slept_s += cycles / rate

    def synchronize(self, device: None = None) -> None:
        if self.capturing is not None:
            self.capturing.valid = False
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.now = max([self.now, *self.pending])

    def current_device(self) -> int:
        return self.device

    def current_stream(self, device: None = None) -> Stream:
        return self.current

    def get_sync_debug_mode(self) -> int:
        return self.debug_mode

    def set_sync_debug_mode(self, debug_mode: int | str) -> None:
        self.debug_mode = {"default": 0, "warn": 1, "error": 2}.get(debug_mode, debug_mode)

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, next(self.pools))

    def empty_cache(self) -> None:
        if self.captures_underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def pin_memory(self) -> None:
        """An allocation of pinned memory, which asks every capture that is underway whether it is its own."""
        assert all(graph() is not None for graph in self.pinned_filters.values()), "a dangling pointer"

    def _end_allocate(self, device: int, mempool_id: tuple[int, int]) -> None:
        if mempool_id not in self.captures_underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.captures_underway.remove(mempool_id)

    def _release_pool(self, device: int, mempool_id: tuple[int, int]) -> None:
        assert mempool_id not in self.released, "a pool was released twice"
        self.released.append(mempool_id)

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return Event(self, enable_timing)

    def Stream(self, device: None = None, priority: int = 0) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self, keep_graph: bool = False) -> CUDAGraph:
        return CUDAGraph(self)

    @contextlib.contextmanager
    def graph(self, cuda_graph: CUDAGraph, pool: tuple[int, int], stream: Stream) -> Iterator[None]:
        """Where ending the capture raises, it does not restore the stream."""
        self.synchronize()
        self.empty_cache()
        before, self.current = self.current, stream
        cuda_graph.capture_begin(pool, capture_error_mode="global")
        try:
            yield
        finally:
            cuda_graph.capture_end()
        self.current = before


class Stream:
    """ready: when the device has done all that was queued on it"""

    def __init__(self, cuda: FakeCuda, default: bool = False) -> None:
        self.cuda, self.is_default, self.ready = cuda, default, 0.0

    def wait_stream(self, stream: Stream) -> None:
        self.ready = max(self.ready, stream.ready)


class Event:
    def __init__(self, cuda: FakeCuda, timing: bool) -> None:
        self.cuda, self.timing = cuda, timing
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.cuda.now += LAUNCH_S
        self.at = max((stream or self.cuda.current).ready, self.cuda.now)

    def query(self) -> bool:
        return self.at is None or self.at <= self.cuda.now

    def synchronize(self) -> None:
        if self.at is not None:
            self.cuda.now = max(self.cuda.now, self.at)

    def elapsed_time(self, end_event: Event) -> float:
        if not (self.timing and end_event.timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at is None or end_event.at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("CUDA error: device not ready")
        return (end_event.at - self.at) * 1e3


class CUDAGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.nodes: list[tuple[str, float, Callable[[], Any] | None]] = []
        self.stream: Stream | None = None
        self.valid, self.ended = True, False

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str = "global") -> None:
        self.stream, self.pool_id = self.cuda.current, pool
        if self.stream.is_default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if pool in self.cuda.captures_underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.cuda.captures_underway.add(pool)
        self.cuda.pinned_filters[pool] = weakref.ref(self)
        self.cuda.capturing = self

    def capture_end(self) -> None:
        if self.cuda.current is not self.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self.cuda.capturing = None
        if not self.valid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.cuda.captures_underway.remove(self.pool_id)
        del self.cuda.pinned_filters[self.pool_id]
        self.ended = True
        if not self.nodes:
            warnings.warn("The CUDA Graph is empty. This usually means that ...", stacklevel=1)

    def replay(self) -> None:
        """One launch for the host, however many kernels."""
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.cuda.now += 5 * LAUNCH_S
        self.cuda._enqueue(GAP_S + sum(device_s for _, device_s, _ in self.nodes))
        for name, _, effect in self.nodes:
            self.cuda._execute(name, effect)

    def reset(self) -> None:
        if self.ended:
            self.cuda._release_pool(0, self.pool_id)
        self.ended = False


@dataclass(eq=False)
class Entry:
    """A call of `launches` kernels that take `device_s` in all, and `host_s` of the host to launch.

    waits:  "" or how it synchronises at its end, through "torch" or a "library"
    effect: of a kernel, on memory
    then:   what happens on the host after each call, which is told its number
    """

    cuda: FakeCuda
    device_s: float
    host_s: float
    launches: int = 1
    waits: str = ""
    name: str = "kernel"
    effect: Callable[[], Any] | None = None
    then: Callable[[int], object] = lambda calls: None
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1
        for _ in range(self.launches):
            self.cuda.now += self.host_s / self.launches
            self.cuda.launch(self.name, self.device_s / self.launches, self.effect)
        if self.waits:
            self.cuda.wait_for_device(flagged=self.waits == "torch")
        self.then(self.calls)
