"""A load, and the kernel times of a step under it: sums over the calls of a decode step and of a prefill."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.errors import UsageError
from harness.serving.link.structure import StepLoad, Structure, Term

Array = np.ndarray
PREFILL_TOKENS = 16384
"""Of one prefill step where nothing says it: SGLang's --chunked-prefill-size on GPUs of 160 GB and more."""
MEMORY_SHARE = 0.82  # of the GPU's, for weights and cache (SGLang's --mem-fraction-static)
# Of that, what is neither: absorbed weights, workspaces, buffers of collectives. Set so that some of 64
# requests of 8192 tokens wait with SGLang on H200, as InferenceX's do.
BESIDE_GB = 3.0
BETWEEN_POINTS = math.sqrt(2)  # factor between two points of a grid; times are interpolated between them


@dataclass(frozen=True)
class Load:
    """A closed loop: a fixed number of requests in flight, each followed by the next.

    isl, osl:       tokens in and out, at most
    range_ratio:    lengths are uniform from range_ratio * length to length (InferenceX: 0.8); 1: all alike,
                    then requests stay in step with each other
    prefill_tokens: of one step (SGLang's --chunked-prefill-size)
    waves:          prompts for each place, of which the first come all at once
    recv_interval:  decode steps between two looks for new requests (SGLang's --scheduler-recv-interval)

    Raises UsageError for a number that no load has.
    """

    isl: int
    osl: int
    concurrency: int
    range_ratio: float = 0.8
    prefill_tokens: int = PREFILL_TOKENS
    waves: int = 10
    recv_interval: int = 1

    def __post_init__(self) -> None:
        least = {"isl": 1, "osl": 2, "concurrency": 1, "prefill_tokens": 1, "waves": 1, "recv_interval": 1}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise UsageError(f"{name}={getattr(self, name)} must be at least {minimum}")
        if not 0 <= self.range_ratio <= 1:
            raise UsageError(f"range_ratio={self.range_ratio} must be from 0 to 1")

    @property
    def mean_isl(self) -> float:
        return self.isl * (1 + self.range_ratio) / 2

    @property
    def mean_osl(self) -> float:
        return max(self.osl * (1 + self.range_ratio) / 2, 2.0)

    @property
    def mean_context(self) -> float:
        """Cached tokens of a decoding request, over its life."""
        return self.mean_isl + self.mean_osl / 2

    @property
    def most_together(self) -> float:
        """Prompts that one prefill step takes."""
        return max(self.prefill_tokens / self.mean_isl, 1.0)


@dataclass(frozen=True)
class Phase:
    """The terms of one phase over a grid: batches of decode, prompts of a prefill step.

    us: [terms, grid] of all calls of a step
    """

    terms: Sequence[Term]
    grid: Array
    us: Array

    def at(self, point: float) -> Array:
        """us of each term, [terms]; linear in the logarithm of the grid, its ends beyond it."""
        return np.array([np.interp(math.log(point), np.log(self.grid), row) for row in self.us])

    @functools.cached_property
    def total_ms(self) -> Array:
        """Of all terms, [grid]."""
        return self.us.sum(axis=0) / 1e3

    def ms(self, point: float) -> float:
        return float(np.interp(math.log(point), np.log(self.grid), self.total_ms))

    def indices(self, op: str, part: str = "") -> list[int]:
        return [i for i, term in enumerate(self.terms) if term.op == op and part in ("", term.part)]


@dataclass(frozen=True)
class KernelSums:
    """capacity: requests of the load that the cache holds; infinite where memory is not known"""

    load: Load
    decode: Phase
    prefill: Phase
    capacity: float = math.inf

    def having(self, phase: str, us: Array) -> KernelSums:
        """With other times of that phase, [terms, grid]."""
        return replace(self, **{phase: replace(getattr(self, phase), us=us)})


def kernel_sums(structure: Structure, load: Load, memory_gb: float | None = None) -> KernelSums:
    """memory_gb: of a GPU, 1e9 bytes; None: no limit to the cache. Raises UsageError where it holds no
    request."""
    capacity = math.inf
    if memory_gb:
        room = memory_gb * MEMORY_SHARE - structure.weights_gb - BESIDE_GB
        capacity = room / (structure.kv_bytes * load.mean_context / 1e9)
        if capacity < 1:
            raise UsageError(
                f"no request of {load.mean_context:.0f} tokens fits: weights take "
                f"{structure.weights_gb:.1f} GB of each GPU's {memory_gb:.1f}"
            )
    chunks = math.ceil(load.mean_isl / load.prefill_tokens)

    together = min(load.most_together, float(load.concurrency))
    decode = _phase(structure.decode, min(float(load.concurrency), capacity),
                    lambda batch: StepLoad(batch, batch, load.mean_context), 1)  # fmt: skip
    prefill = _phase(structure.prefill, together,
                     lambda n: StepLoad(n * load.mean_isl / chunks, n, load.mean_isl), chunks)  # fmt: skip
    return KernelSums(load, decode, prefill, capacity)


def _phase(terms: Sequence[Term], most: float, step: Callable[[float], StepLoad], chunks: int) -> Phase:
    """Over a grid from 1 to `most`. The attention of a prompt in chunks is that of the whole, the rest is
    called once a chunk."""
    points = 1 + math.ceil(math.log(most) / math.log(BETWEEN_POINTS)) if most > 1 else 1
    grid = np.geomspace(1.0, most, points)
    loads = [step(float(point)) for point in grid]
    calls = [term.calls * (1 if term.op == "mha_prefill" else chunks) for term in terms]
    us = [[n * term.time(load) for load in loads] for n, term in zip(calls, terms, strict=True)]
    return Phase(terms, grid, np.array(us))
