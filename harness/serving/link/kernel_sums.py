"""Kernel times of a step under a load: the sum over the calls of a decode step and of a prefill."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import UsageError
from harness.serving.link.load import Load
from harness.serving.link.structure import StepLoad, Structure, Term

Array = np.ndarray
MEMORY_SHARE = 0.82  # of the GPU's, for weights and cache (SGLang's --mem-fraction-static)
# Of that, what is neither: absorbed weights, workspaces, buffers of collectives. Set so that some of 64
# requests of 8192 tokens wait with SGLang on H200, as InferenceX's do.
BESIDE_GB = 3.0
BETWEEN_POINTS = math.sqrt(2)  # factor between two points of a grid; times are interpolated between them


@dataclass(frozen=True)
class Phase:
    """The terms of one phase over a grid: batches of decode, prompts of a prefill step.

    us:        [terms, grid] of all calls of a step
    deviation: [terms], of the logarithm of a term's time, by its table
    """

    terms: Sequence[Term]
    grid: Array
    us: Array
    deviation: Array

    def at(self, point: float) -> Array:
        """us of each term, [terms]; linear in the logarithm of the grid, its ends beyond it."""
        return np.array([np.interp(math.log(point), self._logs, row) for row in self.us])

    def total(self, point: float) -> float:
        """us of all terms."""
        return float(np.interp(math.log(point), self._logs, self._totals))

    @functools.cached_property
    def _logs(self) -> Array:
        return np.log(self.grid)

    @functools.cached_property
    def _totals(self) -> Array:
        return self.us.sum(axis=0)

    def indices(self, op: str, part: str = "") -> list[int]:
        return [i for i, term in enumerate(self.terms) if term.op == op and part in ("", term.part)]


@dataclass(frozen=True)
class KernelSums:
    """capacity: requests of the load that the cache holds; infinite where memory is not known"""

    load: Load
    decode: Phase
    prefill: Phase
    capacity: float = math.inf

    def decode_ms(self, batch: float) -> float:
        """Of a decode step of so many requests."""
        return self.decode.total(batch) / 1e3

    def prefill_ms(self, together: float) -> float:
        """Of so many prompts prefilled in one step, or in several where one prompt is longer than a step."""
        return self.prefill.total(together) / 1e3


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

    def decoding(batch: float) -> StepLoad:
        return StepLoad(batch, batch, load.mean_context)

    def prefilling(prompts: float) -> StepLoad:
        return StepLoad(prompts * load.mean_isl / chunks, prompts, load.mean_isl)

    # The attention of a prompt in chunks is that of the whole, the rest is called once a chunk.
    often = {"mha_prefill": 1}
    most = min(float(load.concurrency), capacity)
    together = min(load.most_together, float(load.concurrency))
    decode = _phase(structure.decode, _grid(most), decoding, {}, 1)
    prefill = _phase(structure.prefill, _grid(together), prefilling, often, chunks)
    return KernelSums(load, decode, prefill, capacity)


def _grid(most: float) -> Array:
    if most <= 1:
        return np.ones(1)
    return np.geomspace(1.0, most, 1 + math.ceil(math.log(most) / math.log(BETWEEN_POINTS)))


def _phase(
    terms: Sequence[Term],
    grid: Array,
    step: Callable[[float], StepLoad],
    often: Mapping[str, int],
    otherwise: int,
) -> Phase:
    us, deviation = np.zeros((len(terms), len(grid))), np.zeros((len(terms), len(grid)))
    for i, term in enumerate(terms):
        for j, point in enumerate(grid):
            estimate = term.time(step(float(point)))
            us[i, j] = term.calls * often.get(term.op, otherwise) * estimate.us
            deviation[i, j] = estimate.deviation
    return Phase(terms, grid, us, np.sqrt((deviation**2).mean(axis=1)))
