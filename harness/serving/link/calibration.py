"""Calibration: measured serving, which sets the model's six constants and says how far to trust it.

kappa is the ratio of the kernels' time in a server to their time alone, and slope how it grows with the batch
that decodes; step_ms is what a step of the engine takes beside them and what is assumed of gaps and glue;
host_ms is what a request takes outside the engine's steps (client, HTTP, tokenisation); cold_prefill is how
many times as long the prefills of the first wave take, and cold_ms what it takes beside that, where a load
meets these (its `cold_share`). Each is one number for all points of a system. Few points say little, so each
constant begins at what is assumed of systems that nobody measured, and moves to what the points say by their
number (partial pooling: a normal prior of the system's constant, and a prior of the points' scatter worth
PRIOR_POINTS).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import PUBLISHED
from harness.serving.link.closed_loop import Array, ClosedLoop, ServingTimes
from harness.serving.link.step_times import BATCH, Draws, StepTimes

MEASURED = PUBLISHED / "serving-link"
ROUNDS = 30
SETTLED = 5e-4  # of the constants, in deviations of their priors
NUDGE = 0.2  # of log kappa: less is caught in the bend where a prefill begins to wait for its launches
# Where nobody measured: kernels in a server take about as long as alone, or some less (warm caches, fusion),
# or more (skew between ranks). 90 % from 0.7 to 1.35.
ASSUMED_KAPPA, ASSUMED_DEVIATION = 0.97, 0.2
# Of the logarithm of kappa for each factor e of the batch: tables of B200 bend by 0.1, of H200 by 0.01.
SLOPE_DEVIATION = 0.05
STEP_DEVIATION_MS, LEAST_STEP_MS = 1.0, -1.0  # beyond the gaps and the glue that are assumed of every step
ASSUMED_HOST_MS, ASSUMED_HOST_DEVIATION = 60.0, 30.0
# Of the six systems of InferenceX in results/published/serving-link, each from its points at 1024 tokens: the
# first wave is 0.1 to 2.4 s later than its prefills, however few, and these take 1.2 to 2.0 times as long.
ASSUMED_COLD_MS, ASSUMED_COLD_DEVIATION = 1300.0, 800.0
COLD_PREFILL, COLD_PREFILL_DEVIATION, LEAST_COLD_PREFILL = 1.6, 0.5, 0.5
# Of single points about their system's kappa, as SGLang's 15 points on H200 scatter; worth so many points.
PRIOR_SCATTER, PRIOR_POINTS = 0.055, 4
# The same of a point's median and of its mean TTFT. Assumed; the second was 0.12 until two of four points of
# SGLang 0.5.7 were seen to lie outside of what 0.5.9's predict.
TTFT_SCATTER, TTFT_MEAN_SCATTER = 0.1, 0.15
OF_TPOT = 3  # constants that TPOT tells: kappa, slope and step


@dataclass(frozen=True)
class MeasuredPoint:
    """One run of a client. ttft_median_ms, ttft_p99_ms: None where the source has them not."""

    load: ClosedLoop
    tpot_ms: float
    ttft_ms: float
    output_tok_s_gpu: float
    ttft_median_ms: float | None = None
    ttft_p99_ms: float | None = None


@dataclass(frozen=True)
class Series:
    """use: `calibration`, or what it is held out for; kv: dtype of the cache, empty where it is not known"""

    name: str
    engine: str
    version: str
    use: str
    source: str
    points: tuple[MeasuredPoint, ...]
    kv: str = ""


class Prior(NamedTuple):
    """Of one constant, before any point; least: what it is at least."""

    mean: float
    deviation: float
    least: float


PRIORS = (
    Prior(0.0, ASSUMED_DEVIATION, -math.inf),  # log(kappa / ASSUMED_KAPPA)
    Prior(0.0, SLOPE_DEVIATION, -math.inf),
    Prior(0.0, STEP_DEVIATION_MS, LEAST_STEP_MS),
    Prior(ASSUMED_HOST_MS, ASSUMED_HOST_DEVIATION, 0.0),
    Prior(ASSUMED_COLD_MS, ASSUMED_COLD_DEVIATION, 0.0),
    Prior(COLD_PREFILL, COLD_PREFILL_DEVIATION, LEAST_COLD_PREFILL),
)
MEAN, DEVIATION, LEAST = np.array(PRIORS).T


def named(constants: Array) -> dict[str, Array]:
    """The constants in the order of their priors, [constants, draws], kappa itself in place of its
    logarithm."""
    names = ("kappa", "slope", "step_ms", "host_ms", "cold_ms", "cold_prefill")
    return dict(zip(names, [ASSUMED_KAPPA * np.exp(constants[0]), *constants[1:]], strict=True))


@dataclass(frozen=True)
class Fit:
    """constants: [constants, draws], in the order of PRIORS
    residuals: logarithm of measured over fitted TPOT, of the central draw
    scatter:   deviation of a point about what the constants give
    spread:    a root of the covariance of the constants
    ttft_scatter, ttft_mean_scatter: deviation of a point's median and of its mean TTFT, of the logarithm
    freedom:   degrees of freedom that the deviations rest on
    settled:   whether the last of at most ROUNDS rounds hardly moved the constants
    """

    constants: Array
    residuals: tuple[float, ...]
    scatter: float
    spread: Array
    ttft_scatter: float
    ttft_mean_scatter: float
    freedom: int
    settled: bool

    @property
    def named(self) -> dict[str, Array]:
        """Each constant's draws."""
        return named(self.constants)

    def elsewhere(self, normals: Array, scatter: Array | float) -> dict[str, Array]:
        """The constants as they may be at a point that was not calibrated on.

        normals: [constants, draws], standard normal; scatter: [draws], of kappa's logarithm there
        """
        constants = self.constants + self.spread @ normals
        constants[0] += scatter
        return named(np.maximum(constants, LEAST[:, None]))


def measured(hardware: str, engine: str, folder: Path = MEASURED) -> list[Series]:
    """All series of a machine and engine; empty where there are none."""
    path = folder / f"{hardware}-{engine}.json"
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return [_series(entry, document.get("kv", "")) for entry in document["series"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {path}: {type(error).__name__}: {error}") from None


def _series(entry: JsonObject, kv: str) -> Series:
    shared = {k: entry[k] for k in ("isl", "osl", "range_ratio", "prefill_tokens", "waves")}
    points = []
    for point in entry["points"]:
        values = dict(point)
        own = {name: values.pop(name) for name in ("concurrency", "recv_interval") if name in values}
        load = ClosedLoop(**shared, **own)
        points.append(MeasuredPoint(load, **values))
    name, engine, version, use, source = (
        entry[key] for key in ("name", "engine", "version", "use", "source")
    )
    return Series(name, engine, version, use, source, tuple(points), kv)


@dataclass(frozen=True)
class Miss:
    """By how much the fitted misses one number of a point.

    ratio:       logarithm of measured over fitted, of the central draw
    off:         [draws], as a share of the number, by which such numbers scatter
    by_constant: [constants, draws], how much less off it is for each unit of a constant
    """

    ratio: float
    off: Array
    by_constant: Array


def fit(
    points: Sequence[MeasuredPoint],
    prepared: Sequence[StepTimes],
    draw: Callable[[StepTimes], Draws],
    prior_scatter: float = PRIOR_SCATTER,
) -> Fit:
    """The constants that points and priors make most likely, for each draw of all else.

    draw: the draws for a workload's steps, with any constants
    """
    draws = [draw(steps) for steps in prepared]
    constants = MEAN[:, None] * np.ones_like(draws[0].kappa)
    scatters = [prior_scatter, TTFT_SCATTER, TTFT_MEAN_SCATTER]
    misses = _misses(points, prepared, draws, constants)
    for _ in range(ROUNDS):
        moves, spread = _gauss_newton(misses, scatters, constants)
        before, constants = constants, np.maximum(constants + moves, LEAST[:, None])
        # Of the same constants as the misses: those of the constants before would go to and fro.
        misses = tpot, ttft, ttft_mean = _misses(points, prepared, draws, constants)
        residuals = tuple(miss.ratio for miss in tpot)
        scatters = [
            _pooled(residuals, prior_scatter, constants=OF_TPOT),
            _pooled([miss.ratio for miss in ttft], TTFT_SCATTER),
            _pooled([miss.ratio for miss in ttft_mean], TTFT_MEAN_SCATTER),
        ]
        settled = bool(np.max(np.abs(constants - before) / DEVIATION[:, None]) < SETTLED)
        if settled:
            break
    return Fit(
        constants=constants,
        residuals=residuals,
        scatter=scatters[0],
        spread=spread,
        ttft_scatter=scatters[1],
        ttft_mean_scatter=scatters[2],
        freedom=PRIOR_POINTS + max(len(points) - OF_TPOT, 0),
        settled=settled,
    )


def _misses(
    points: Sequence[MeasuredPoint], prepared: Sequence[StepTimes], draws: Sequence[Draws], constants: Array
) -> tuple[list[Miss], list[Miss], list[Miss]]:
    """Of TPOT, of medians of TTFT where there are any, and of its means."""
    tpot, ttft, ttft_mean = [], [], []
    for point, steps, drawn in zip(points, prepared, draws, strict=True):
        drawn = drawn.with_constants(**named(constants))
        times = steps.serving(drawn)
        slower = steps.serving(replace(drawn, kappa=drawn.kappa * math.exp(NUDGE)))
        tpot.append(_of_tpot(point, times, drawn, slower))
        if (median := steady_median_ms(point)) is not None:
            ttft.append(_of_ttft(median, times))
        ttft_mean.append(_of_ttft_mean(point, times, drawn))
    return tpot, ttft, ttft_mean


def _of_tpot(point: MeasuredPoint, times: ServingTimes, drawn: Draws, slower: ServingTimes) -> Miss:
    """slower: the times of a kappa that is NUDGE more, as kernels of a prefill that waits for their launches
    do not follow it. Slope and step are of decode; what they do to others' prefills and the batch is left
    out."""
    gap = drawn.gap_us / 1e3
    grown, zero = np.log(times.batch / BATCH), np.zeros_like(gap)
    by_kappa = np.log(slower.tpot / times.tpot) / NUDGE
    by_slope, by_step = grown * (times.decode - gap) / times.tpot, 1 / times.tpot
    off = np.log(point.tpot_ms / times.tpot)
    return Miss(float(off[0]), off, np.stack([by_kappa, by_slope, by_step, zero, zero, zero]))


def _of_ttft(measured_ms: float, times: ServingTimes) -> Miss:
    """Of the median. It scatters by a share: small times are missed by less."""
    one, zero = np.ones_like(times.ttft), np.zeros_like(times.ttft)
    by_constant = np.stack([zero, zero, zero, one, zero, zero])
    ratio = math.log(measured_ms / times.ttft[0])
    return Miss(ratio, (measured_ms - times.ttft) / measured_ms, by_constant / measured_ms)


def _of_ttft_mean(point: MeasuredPoint, times: ServingTimes, drawn: Draws) -> Miss:
    """By how much its first wave is later than that of the fitted. A mean whose steady median is known is
    held against that: the steady state's misses are not cold."""
    ratio = math.log(point.ttft_ms / times.ttft_mean[0])
    share, zero = drawn.cold_share, np.zeros_like(times.ttft)
    if not has_first_wave(point):
        return Miss(ratio, zero, np.stack(6 * [zero]))
    whole = point.load.waves * point.ttft_ms
    median = steady_median_ms(point)
    steady = zero if median is None else median - times.ttft
    late = point.load.waves * (point.ttft_ms - times.ttft_mean - steady)
    by_constant = np.stack([zero, zero, zero, zero, share, share * times.first_wave])
    return Miss(ratio, late / whole, by_constant / whole)


def steady_median_ms(point: MeasuredPoint) -> float | None:
    """The median of its TTFT; None where it is not of the steady state: the first wave is half of two."""
    return None if point.load.waves in (1, 2) else point.ttft_median_ms


def has_first_wave(point: MeasuredPoint) -> bool:
    """Whether its mean TTFT holds a first wave beside steady ones: requests of one length come in waves all
    along."""
    return point.load.waves > 1 and point.load.range_ratio < 1


def _gauss_newton(
    misses: Sequence[Sequence[Miss]], scatters: Sequence[float], constants: Array
) -> tuple[Array, Array]:
    """How far the constants are to move, [constants, draws] as they are, and a root of the covariance that
    points and priors leave them, of the central draw. scatters: one for each sequence of misses"""
    scattered = [(miss, scatter) for each, scatter in zip(misses, scatters, strict=True) for miss in each]
    off = np.stack([miss.off / scatter for miss, scatter in scattered])
    by_constant = np.stack([miss.by_constant / scatter for miss, scatter in scattered])
    precision = np.diag(DEVIATION**-2)
    information = np.einsum("pcd,ped->dce", by_constant, by_constant) + precision
    pull = np.einsum("pcd,pd->dc", by_constant, off) - (constants - MEAN[:, None]).T @ precision
    moves = np.linalg.solve(information, pull[..., None])[..., 0].T
    return moves, np.linalg.cholesky(np.linalg.inv(information[0]))


def _pooled(residuals: Sequence[float], prior: float, constants: int = 1) -> float:
    """A deviation from the residuals of a fit of so many constants, with what is assumed counted as
    PRIOR_POINTS of them."""
    squares = sum(r * r for r in residuals) + PRIOR_POINTS * prior**2
    return math.sqrt(squares / (PRIOR_POINTS + max(len(residuals) - constants, 0)))


def assumed(like: Array) -> Fit:
    """Where nothing was measured on that machine with that engine."""
    return Fit(
        constants=MEAN[:, None] * np.ones_like(like),
        residuals=(),
        scatter=0.0,
        spread=np.diag(DEVIATION),
        ttft_scatter=TTFT_SCATTER,
        ttft_mean_scatter=TTFT_MEAN_SCATTER,
        freedom=0,
        settled=True,
    )
