"""Times of a step under a workload, for many draws of what is uncertain at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from harness.serving.link.closed_loop import Array, ClosedLoop, ServingTimes, StepTime, closed_loop
from harness.serving.link.simulation import SimulatedRun, requests_of, simulate
from harness.serving.link.structure import LAUNCHES, StepLoad, Structure, Term

BATCH = 16.0  # at which kappa is what it says
MEMORY_SHARE = 0.82  # of the GPU's, for weights and cache (SGLang's --mem-fraction-static)
# Of that, what is neither: absorbed weights, workspaces, buffers of collectives. Set so that some of 64
# requests of 8192 tokens wait with SGLang on H200, as InferenceX's do.
BESIDE_GB, BESIDE_DEVIATION_GB = 3.0, 3.0


@dataclass(frozen=True)
class PhaseTimes:
    """The terms of one phase over a grid: batches of decode, prompts of a prefill step.

    us:        [terms, grid] of all calls of a step
    deviation: [terms], of the logarithm, by the tables
    skewed:    [terms, grid] logarithm of the time with skewed routing over that without
    """

    terms: Sequence[Term]
    grid: Array
    us: Array
    deviation: Array
    skewed: Array

    def indices(self, op: str, part: str = "") -> list[int]:
        return [i for i, term in enumerate(self.terms) if term.op == op and part in ("", term.part)]


@dataclass(frozen=True)
class Draws:
    """What is uncertain, an array each over draws; one draw is the central case.

    kappa:           of all kernels: time in a server over time alone
    slope:           growth of log kappa in decode steps with the log of the batch, from BATCH on
    decode, prefill: [draws, terms] factors of each term's time, exposure included
    decode_us, prefill_us: added to a step, on the critical path
    routing:         0: experts alike, 1: the skew of `Phase.skewed`
    scheduling:      factor of what a prefill takes beside its kernels' times
    beside_gb:       of a GPU's memory, neither weights nor cache
    cold_share:      of cold_ms and cold_prefill, what prompts of this load's length meet
    ttft, ttft_mean: factors of TTFT in the steady state and of its mean over a run
    """

    kappa: Array
    slope: Array
    decode: Array
    prefill: Array
    decode_us: Array
    prefill_us: Array
    routing: Array
    gap_us: Array
    launch_us: Array
    host_ms: Array
    cold_ms: Array
    cold_prefill: Array
    scheduling: Array
    beside_gb: Array
    cold_share: Array
    ttft: Array
    ttft_mean: Array

    def with_constants(
        self, kappa: Array, slope: Array, step_ms: Array, host_ms: Array, cold_ms: Array, cold_prefill: Array
    ) -> Draws:
        """With a calibration's: step_ms beside the gap that is drawn."""
        return replace(
            self,
            kappa=kappa,
            slope=slope,
            gap_us=self.gap_us + 1e3 * step_ms,
            host_ms=host_ms,
            cold_ms=cold_ms,
            cold_prefill=cold_prefill,
        )

    @property
    def cold(self) -> tuple[Array, Array]:
        """cold_ms and cold_prefill, as far as a load meets them."""
        return self.cold_ms * self.cold_share, 1 + (self.cold_prefill - 1) * self.cold_share

    def some(self, count: int) -> Draws:
        """So many of them, the central one first."""
        rows = np.linspace(0, len(self.kappa) - 1, count).round().astype(int)
        return Draws(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True)
class StepTimes:
    """A structure under a workload.

    eager:      decode without a graph
    room_gb:    of a GPU, 1e9 bytes, without its weights
    request_gb: what a request of mean length caches there
    """

    structure: Structure
    load: ClosedLoop
    decode: PhaseTimes
    prefill: PhaseTimes
    eager: bool = False
    room_gb: float = math.inf
    request_gb: float = 1.0

    @property
    def capacity(self) -> float:
        """Requests that the cache holds, at their mean length."""
        return (self.room_gb - BESIDE_GB) / self.request_gb

    def decode_ms(self, draws: Draws, batch: Array) -> Array:
        return self._decoding(draws)(batch)

    def prefill_ms(self, draws: Draws, together: Array) -> Array:
        """Of a step with so many prompts (in chunks where one is longer than a step); never in a graph."""
        return self._prefilling(draws)(together)

    def serving(self, draws: Draws) -> ServingTimes:
        decode, prefill = self._decoding(draws), self._prefilling(draws)
        times = closed_loop(self.load, decode, prefill, draws.host_ms, self._held(draws), *draws.cold)
        return replace(times, ttft=times.ttft * draws.ttft, ttft_mean=times.ttft_mean * draws.ttft_mean)

    def simulated(self, draws: Draws) -> list[SimulatedRun]:
        """The requests one by one, other ones in each draw."""
        most = min(math.ceil(self.decode.grid[-1]), requests_of(self.load))
        batches = np.arange(1, most + 1, dtype=float)
        decode, prefill, like = self._decoding(draws), self._prefilling(draws), np.ones_like(draws.kappa)
        # [draws, batches] and [draws, prompts]
        steps = np.stack([decode(batch * like) for batch in batches], axis=1)
        whole = np.stack([prefill(prompts * like) for prompts in self.prefill.grid], axis=1)
        held = self._held(draws)
        cold_ms, cold_prefill = draws.cold
        if self.load.waves:
            # By what a mean is late, all of the run's, its first wave is.
            mean = self.serving(draws).ttft_mean
            cold_ms = np.maximum(cold_ms + self.load.waves * (mean - mean / draws.ttft_mean), 0.0)
        runs = (
            simulate(
                self.load,
                steps[i].tolist(),
                np.log(self.prefill.grid),
                whole[i],
                float(draws.host_ms[i]),
                float(held[i]),
                float(cold_ms[i]),
                float(cold_prefill[i]),
                seed=i,
            )
            for i in range(len(like))
        )
        return [replace(run, ttft=run.ttft * factor) for run, factor in zip(runs, draws.ttft, strict=True)]

    def _held(self, draws: Draws) -> Array:
        """Requests that the cache holds in each draw."""
        return np.maximum((self.room_gb - draws.beside_gb) / self.request_gb, 1.0)

    def _decoding(self, draws: Draws) -> StepTime:
        us = totals(self.decode, draws.decode, draws.routing) + draws.decode_us[:, None]
        ms = kappa_at(draws, self.decode.grid) * us / 1e3
        ms = (np.maximum(ms, _launching(draws)) if self.eager else ms) + draws.gap_us[:, None] / 1e3
        return along(self.decode.grid, ms)

    def _prefilling(self, draws: Draws) -> StepTime:
        us = totals(self.prefill, draws.prefill, draws.routing) + draws.prefill_us[:, None]
        ms = np.maximum(draws.kappa[:, None] * us / 1e3, _launching(draws))
        ms = ms * draws.scheduling[:, None] + draws.gap_us[:, None] / 1e3
        return along(self.prefill.grid, ms)


def steps(
    structure: Structure,
    load: ClosedLoop,
    *,
    skewed: Structure | None = None,
    memory_gb: float | None = None,
    eager: bool = False,
) -> StepTimes:
    """skewed: the same with skewed routing; memory_gb: of a GPU, 1e9 bytes, None: no limit to the cache."""
    room_gb = memory_gb * MEMORY_SHARE - structure.weights_gb if memory_gb else math.inf
    request_gb = structure.kv_bytes * load.mean_context / 1e9
    chunks = math.ceil(load.mean_isl / load.prefill_tokens)

    def decoding(batch: float) -> StepLoad:
        return StepLoad(batch, batch, load.mean_context)

    def prefilling(prompts: float) -> StepLoad:
        return StepLoad(prompts * load.mean_isl / chunks, prompts, load.mean_isl)

    # The attention of a prompt in chunks is that of the whole, the rest is called once a chunk.
    often = {"mha_prefill": 1, "": chunks}
    other = skewed or structure
    most = min(load.concurrency, max(room_gb / request_gb, 1.0))
    decode = _phase(structure.decode, other.decode, _grid(most), decoding, {"": 1})
    prefill = _phase(structure.prefill, other.prefill, _grid(load.most_together), prefilling, often)
    return StepTimes(structure, load, decode, prefill, eager, room_gb, request_gb)


def kappa_at(draws: Draws, batch: Array) -> Array:
    """Of decode steps of these batches, [draws, batches] or for one batch of each draw [draws, 1]."""
    return draws.kappa[:, None] * (np.atleast_2d(batch) / BATCH) ** draws.slope[:, None]


def totals(phase: PhaseTimes, factors: Array, routing: Array) -> Array:
    """us of a step, [draws, grid]."""
    us = factors @ phase.us
    for i in np.flatnonzero(phase.skewed.any(axis=1)):
        us += factors[:, [i]] * phase.us[i] * np.expm1(routing[:, None] * phase.skewed[i])
    return us


def along(grid: Array, values: Array) -> StepTime:
    """values [rows, grid] at one point for each row, linear in the logarithm of the grid."""
    logs, last, flat = np.log(grid), len(grid) - 1, values.ravel()
    ends, firsts = logs[[0, -1]], len(grid) * np.arange(len(values))
    spans = np.maximum(np.diff(logs, prepend=logs[0]), 1e-12)

    def at(point: Array) -> Array:
        # Called tens of times for each draw of each point: np.clip would take as long as the rest.
        x = np.minimum(np.maximum(np.log(point), ends[0]), ends[1])
        right = np.minimum(np.maximum(np.searchsorted(logs, x), min(1, last)), last)
        left = np.maximum(right - 1, 0)
        u = (x - logs[left]) / spans[right]
        return flat[firsts + left] * (1 - u) + flat[firsts + right] * u

    return at


def term_us(phase: PhaseTimes, routing: Array, point: Array) -> Array:
    """us of each term's calls in a step, [terms, draws]."""
    return np.stack(
        [
            along(phase.grid, us * np.exp(routing[:, None] * skewed))(point)
            for us, skewed in zip(phase.us, phase.skewed, strict=True)
        ]
    )


def _launching(draws: Draws) -> Array:
    return LAUNCHES * draws.launch_us[:, None] / 1e3


def _grid(most: float) -> Array:
    """From 1 to `most`, finely: step times bend where tables have points."""
    if most <= 1:
        return np.ones(1)
    return np.geomspace(1.0, most, max(2, 1 + math.ceil(4 * math.log2(most))))


def _phase(
    terms: Sequence[Term],
    skewed: Sequence[Term],
    grid: Array,
    load: Callable[[float], StepLoad],
    often: Mapping[str, int],
) -> PhaseTimes:
    us, other, deviation = (np.zeros((len(terms), len(grid))) for _ in range(3))
    for i, (term, twin) in enumerate(zip(terms, skewed, strict=True)):
        calls = term.calls * often.get(term.op, often[""])
        for j, point in enumerate(grid):
            estimate = term.time(load(float(point)))
            us[i, j] = calls * estimate.us
            other[i, j] = calls * twin.time(load(float(point))).us if twin is not term else us[i, j]
            deviation[i, j] = estimate.deviation
    return PhaseTimes(terms, grid, us, np.sqrt((deviation**2).mean(axis=1)), np.log(other / us))
