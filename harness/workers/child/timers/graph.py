"""Graph timer, launching as engines decode: calls recorded into one CUDA or HIP graph that is replayed.
Proven against tests/support/fake_cuda.py and on an H100 (results/h100/first-contact); untested on AMD."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.errors import one_line
from harness.workers.child.timers.base import Call, Program
from harness.workers.child.timers.events import EventTimer
from kernels.op import Unsupported

# A graph holds calls for so many seconds, which makes the gap between two replays, a few us, a small part ...
GRAPH_S = 1e-3
# ... but no more calls than this.
MOST_CALLS = 256

# Graphs whose capture failed. In torch 2.13 capture_begin also gives the allocator of pinned memory a filter
# that points to the graph, and a capture_end that fails does not take it back: every later allocation asks
# the filter (aten/src/ATen/cuda/CUDAGraph.cpp, ATen/core/CachingHostAllocator.h). So they are never freed.
_failed: list[Any] = []


class GraphTimer(EventTimer):
    """One graph of calls on all sets of operands in rotation, so that the caches see what they see when the
    calls are made one by one. An allocated output lives in the graph's memory, one for each set: that of
    the last call on the set, which every replay writes anew.

    side: the stream that everything is captured on. torch keeps a workspace for matrix products for each
          stream that it saw (see harness.plan.memory.blas_workspace), so there is one stream for all
    """

    def __init__(self, cuda: Any = None, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(cuda, clock)
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
    """A graph of so many rotations over the calls, recorded on a side stream after a warm-up there, as torch
    asks. Raises Unsupported where they cannot be recorded, and leaves the device as it was."""
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        _each(calls)
    try:
        with cuda.stream(side), _synchronising_raises(cuda):
            _each(calls)
        return _record(cuda, side, lambda: _each([*calls] * rotations))
    except Exception as error:
        raise Unsupported(f"cannot be captured into a graph: {one_line(error)}") from error
    finally:
        cuda.synchronize()


def _each(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


@contextlib.contextmanager
def _synchronising_raises(cuda: Any) -> Iterator[None]:
    """What torch itself synchronises for is found before a capture, which it would break."""
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(before)


def _record(cuda: Any, side: Any, work: Callable[[], object]) -> Any:
    """Raises what the work raised, rather than what ending a capture that it broke raises after it."""
    graph, pool = cuda.CUDAGraph(), cuda.graph_pool_handle()
    broke: list[Exception] = []
    try:
        # Where ending the capture fails torch.cuda.graph does not restore the stream: the outer one does.
        with cuda.stream(side), _empty_raises(), cuda.graph(graph, pool=pool, stream=side):
            try:
                work()
            except Exception as error:
                broke.append(error)
                raise
    except Exception as error:
        _abandon(cuda, graph, pool)
        raise [*broke, error][0] from None
    return graph


@contextlib.contextmanager
def _empty_raises() -> Iterator[None]:
    """torch only warns of a graph without nodes (aten/src/ATen/cuda/CUDAGraph.cpp, capture_end), which takes
    no time and computes nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA Graph is empty")
        try:
            yield
        except UserWarning:
            raise RuntimeError("nothing was launched on the stream that is captured") from None


def _abandon(cuda: Any, graph: Any, pool: Any) -> None:
    """Tells torch's allocator that a failed capture is over, as capture_end does where it succeeds: else
    the allocator refuses to empty its cache, which the next capture begins with. Before torch 2.8 the
    function had another name. For pinned memory there is none: the graph is kept."""
    _failed.append(graph)
    memory = cuda.memory
    end = getattr(memory, "_cuda_endAllocateToPool", None) or memory._cuda_endAllocateCurrentStreamToPool
    with contextlib.suppress(RuntimeError):
        end(cuda.current_device(), pool)
        memory._cuda_releasePool(cuda.current_device(), pool)
    graph.reset()
