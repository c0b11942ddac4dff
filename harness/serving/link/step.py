"""Times of a step under a workload, for many draws of what is uncertain at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.serving.link.closure import Array, Serving, Workload, closed_loop
from harness.serving.link.structure import LAUNCH_US, LAUNCHES, STEP_GAP_US, Load, Structure, Term

MEMORY_SHARE = 0.82  # of the GPU's, for weights and cache (SGLang's --mem-fraction-static)
HOST_MS = 30.0  # of a request, before and after the engine


@dataclass(frozen=True)
class Phase:
    """Terms of one phase over a grid.

    grid:  batches of decode, prompts of a prefill step
    us:    [terms, grid] of all calls of a step
    tokens: what the grid's points are, for the host's share
    """

    terms: Sequence[Term]
    grid: Array
    us: Array
    deviation: Array

    def index(self, name: str) -> list[int]:
        return [i for i, term in enumerate(self.terms) if name in (term.name, term.op)]


@dataclass(frozen=True)
class Draws:
    """What is uncertain, each an array over draws (or over one, the central case).

    kappa:   calibration
    decode, prefill: factor of each term's time, [draws, terms]
    saved_decode, saved_prefill: us of a step that a change takes away, beside the factors, [draws]
    """

    kappa: Array
    decode: Array
    prefill: Array
    gap_us: Array
    launch_us: Array
    host_ms: Array
    scheduling: Array


@dataclass(frozen=True)
class Steps:
    """A structure under a workload."""

    structure: Structure
    load: Workload
    decode: Phase
    prefill: Phase
    eager: bool = False
    capacity: float = math.inf
    notes: tuple[str, ...] = field(default=())

    def decode_ms(self, draws: Draws, batch: Array) -> Array:
        return self._phase(self.decode, draws.decode, draws, batch, self.eager) + draws.gap_us / 1e3

    def prefill_ms(self, draws: Draws, together: Array) -> Array:
        """Prefill never replays a graph."""
        own = self._phase(self.prefill, draws.prefill, draws, together, True)
        return own * draws.scheduling + draws.gap_us / 1e3

    def _phase(self, phase: Phase, factors: Array, draws: Draws, at: Array, eager: bool) -> Array:
        gpu = draws.kappa * interpolated(phase.grid, factors @ phase.us, at) / 1e3
        return np.maximum(gpu, LAUNCHES * draws.launch_us / 1e3) if eager else gpu

    def serving(self, draws: Draws) -> Serving:
        return closed_loop(
            self.load,
            lambda batch: self.decode_ms(draws, batch),
            lambda together: self.prefill_ms(draws, together),
            draws.host_ms,
            self.capacity,
        )


def steps(
    structure: Structure, load: Workload, *, memory_gb: float | None = None, eager: bool = False
) -> Steps:
    """memory_gb: of a GPU, 1e9 bytes; None: no limit to the cache."""
    capacity = math.inf
    if memory_gb:
        room = memory_gb * MEMORY_SHARE - structure.weights_gb
        tokens = room * 1e9 / structure.kv_bytes
        capacity = tokens / load.mean_context
    chunks = math.ceil(load.mean_isl / load.prefill_tokens)
    decode = _phase(
        structure.decode,
        _grid(load.concurrency),
        lambda batch: Load(batch, batch, load.mean_context),
    )
    prefill = _phase(
        structure.prefill,
        _grid(max(load.most_together, 1.0)),
        lambda prompts: Load(prompts * load.mean_isl / chunks, prompts, load.mean_isl),
        {"mha_prefill": 1.0 / chunks},
    )
    if chunks > 1:
        prefill = Phase(prefill.terms, prefill.grid, prefill.us * chunks, prefill.deviation)
    return Steps(structure, load, decode, prefill, eager, capacity)


def central(steps: Steps, kappa: float = 1.0, exposure: Mapping[str, float] | None = None) -> Draws:
    """One draw, with every factor as it is thought to be. exposure: of an op class, 1 where not given."""

    def factors(phase: Phase) -> Array:
        return np.array([[(exposure or {}).get(term.op, 1.0) for term in phase.terms]])

    one = np.ones(1)
    return Draws(
        kappa * one, factors(steps.decode), factors(steps.prefill), STEP_GAP_US * one, LAUNCH_US * one,
        HOST_MS * one, one,
    )  # fmt: skip


def interpolated(grid: Array, values: Array, at: Array) -> Array:
    """values [draws, grid] at `at` [draws], linear in the logarithm of the grid."""
    x = np.log(np.clip(at, grid[0], grid[-1]))
    xs = np.log(grid)
    if len(grid) == 1:
        return values[:, 0] + 0 * x
    right = np.clip(np.searchsorted(xs, x), 1, len(xs) - 1)
    u = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    rows = np.arange(len(x)) if len(values) > 1 else np.zeros(len(x), int)
    return values[rows, right - 1] * (1 - u) + values[rows, right] * u


def _grid(most: float) -> Array:
    """From 1 to `most`, finely: step times bend where tables have points."""
    if most <= 1:
        return np.ones(1)
    return np.geomspace(1.0, most, max(2, 1 + math.ceil(4 * math.log2(most))))


def _phase(terms: Sequence[Term], grid: Array, load, scale: Mapping[str, float] | None = None) -> Phase:
    us, deviation = np.zeros((len(terms), len(grid))), np.zeros((len(terms), len(grid)))
    for i, term in enumerate(terms):
        for j, point in enumerate(grid):
            found = term.time(load(float(point)))
            us[i, j] = term.calls * found.us * (scale or {}).get(term.op, 1.0)
            deviation[i, j] = found.deviation
    return Phase(terms, grid, us, deviation)
