"""Calibration: measured serving, which sets the model's five constants and says how far to trust it.

kappa is the ratio of the kernels' time in a server to their time alone, and slope how it grows with the batch
that decodes; step_ms is what a step of the engine takes beside them and what is assumed of gaps and glue;
host_ms is what a request takes outside the engine's steps (client, HTTP, tokenisation); cold_ms is what the
first wave of requests takes beside that, of which a load meets its `cold_share`. Each is one number for all
points of a system. Few points say little, so each constant begins at what is assumed of systems that
nobody measured, and moves to what the points say by their number (partial pooling: a normal prior of the
system's constant, and a prior of the points' scatter worth PRIOR_POINTS).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.errors import UsageError
from harness.files import JsonObject
from harness.paths import PUBLISHED
from harness.serving.link.closed_loop import Array, ClosedLoop
from harness.serving.link.step_times import BATCH, Draws, StepTimes

MEASURED = PUBLISHED / "serving-link"
ROUNDS = 30
SETTLED, SETTLED_MS = 1e-4, 0.5  # of log kappa, slope and ms of a step; ms of a request's two constants
# Where nobody measured: kernels in a server take about as long as alone, or some less (warm caches, fusion),
# or more (skew between ranks). 90 % from 0.7 to 1.35.
ASSUMED_KAPPA, ASSUMED_DEVIATION = 0.97, 0.2
# Of the logarithm of kappa for each factor e of the batch: tables of B200 bend by 0.1, of H200 by 0.01.
SLOPE_DEVIATION = 0.05
STEP_DEVIATION_MS, LEAST_STEP_MS = 1.0, -1.0  # beyond the gaps and the glue that are assumed of every step
ASSUMED_HOST_MS, ASSUMED_HOST_DEVIATION = 60.0, 30.0
# By how much the first wave of InferenceX's runs of SGLang on H200 was later than its prefills, however few:
# about 0.9 s with 0.5.9, 1.5 s with 0.5.7.
ASSUMED_COLD_MS, ASSUMED_COLD_DEVIATION = 900.0, 500.0
# Of single points about their system's kappa, as SGLang's 15 points on H200 scatter; worth so many points.
PRIOR_SCATTER, PRIOR_POINTS = 0.055, 4
# The same of a point's median and of its mean TTFT. Assumed; the second was 0.12 until two of four points of
# SGLang 0.5.7 were seen to lie outside of what 0.5.9's predict.
TTFT_SCATTER, TTFT_MEAN_SCATTER = 0.1, 0.15
PRIORS = (ASSUMED_DEVIATION, SLOPE_DEVIATION, STEP_DEVIATION_MS)  # of log kappa, slope and step


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


@dataclass(frozen=True)
class Fit:
    """kappa, slope, step_ms, host_ms, cold_ms: one value for each draw
    residuals: logarithm of measured over fitted TPOT, of the central draw
    scatter:   deviation of a point about what the constants give
    spread:    a root of the covariance of log kappa, slope and step_ms
    host_deviation, cold_deviation: of these two constants, ms
    ttft_scatter, ttft_mean_scatter: deviation of a point's median and of its mean TTFT, of the logarithm
    freedom:   degrees of freedom that the deviations rest on
    """

    kappa: Array
    slope: Array
    step_ms: Array
    host_ms: Array
    cold_ms: Array
    residuals: tuple[float, ...]
    scatter: float
    spread: Array
    host_deviation: float
    cold_deviation: float
    ttft_scatter: float
    ttft_mean_scatter: float
    freedom: int


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


def fit(
    points: Sequence[MeasuredPoint],
    prepared: Sequence[StepTimes],
    draw: Callable[[StepTimes], Draws],
    prior_scatter: float = PRIOR_SCATTER,
) -> Fit:
    """The constants that points and priors make most likely, for each draw of all else.

    draw: the draws for a workload's steps, with any kappa and host_ms
    """
    draws = [draw(steps) for steps in prepared]
    host = np.full_like(draws[0].kappa, ASSUMED_HOST_MS)
    cold = np.full_like(host, ASSUMED_COLD_MS)
    # A miss counts by its share: small times are missed by less.
    host_scatter = [TTFT_SCATTER * p.ttft_median_ms for p in points if p.ttft_median_ms is not None]
    cold_scatter = [TTFT_SCATTER * p.load.waves * p.ttft_ms for p in points if has_first_wave(p)]
    moved = np.zeros((len(PRIORS), len(host)))  # log of kappa, slope and step from their priors' means
    for _ in range(ROUNDS):
        kappa, (slope, step) = ASSUMED_KAPPA * np.exp(moved[0]), moved[1:]
        ratios, by_constant, host_misses, cold_misses = [], [], [], []
        ttft_residuals, ttft_mean_residuals = [], []
        for point, steps, drawn in zip(points, prepared, draws, strict=True):
            gap = drawn.gap_us + 1e3 * step
            fitted = steps.serving(
                replace(drawn, kappa=kappa, slope=slope, host_ms=host, cold_ms=cold, gap_us=gap)
            )
            ratios.append(np.log(point.tpot_ms / fitted.tpot))
            # All of TPOT but the gap is kappa's, and slope's where it decodes; what others' prefills and the
            # batch add is left out.
            kernels, decoding = (fitted.tpot - gap / 1e3, fitted.decode - gap / 1e3)
            grown = np.log(fitted.batch / BATCH)
            by_constant.append(np.stack([kernels, grown * decoding, np.ones_like(gap)]) / fitted.tpot)
            if point.ttft_median_ms is not None:
                host_misses.append(point.ttft_median_ms - fitted.ttft)
                ttft_residuals.append(math.log(point.ttft_median_ms / fitted.ttft[0]))
            ttft_mean_residuals.append(math.log(point.ttft_ms / fitted.ttft_mean[0]))
            if has_first_wave(point):
                # A mean whose median is known is held against that: the steady state's misses are not cold.
                missed = 0.0 if point.ttft_median_ms is None else point.ttft_median_ms - fitted.ttft
                cold_misses.append(point.load.waves * (point.ttft_ms - fitted.ttft_mean - missed))
        residuals = tuple(float(ratio[0]) for ratio in ratios)
        scatter = _pooled(residuals, prior_scatter, constants=len(PRIORS))
        before = moved
        steps_taken, spread = _gauss_newton(np.stack(ratios), np.stack(by_constant), scatter, moved)
        moved = moved + steps_taken
        moved[2] = np.maximum(moved[2], LEAST_STEP_MS)
        host_step = _pulled(host - ASSUMED_HOST_MS, host_misses, host_scatter, ASSUMED_HOST_DEVIATION)
        host = np.maximum(host + host_step, 0.0)
        cold_step = _pulled(cold - ASSUMED_COLD_MS, cold_misses, cold_scatter, ASSUMED_COLD_DEVIATION)
        cold = np.maximum(cold + cold_step, 0.0)
        slow = max(float(np.max(np.abs(each))) for each in (host_step, cold_step))
        if np.max(np.abs(moved - before)) < SETTLED and slow < SETTLED_MS:
            break
    return Fit(
        ASSUMED_KAPPA * np.exp(moved[0]),
        moved[1],
        moved[2],
        host,
        cold,
        residuals,
        scatter,
        spread,
        _deviation(host_scatter, ASSUMED_HOST_DEVIATION),
        _deviation(cold_scatter, ASSUMED_COLD_DEVIATION),
        _pooled(ttft_residuals, TTFT_SCATTER),
        _pooled(ttft_mean_residuals, TTFT_MEAN_SCATTER),
        PRIOR_POINTS + max(len(points) - len(PRIORS), 0),
    )


def has_first_wave(point: MeasuredPoint) -> bool:
    """Whether its mean TTFT holds a first wave beside steady ones: requests of one length come in waves all
    along."""
    return point.load.waves > 1 and point.load.range_ratio < 1


def _gauss_newton(ratios: Array, by_constant: Array, scatter: float, moved: Array) -> tuple[Array, Array]:
    """How far the constants are to move [constants, draws], and a root of the covariance that points and
    priors leave them, of the central draw.

    ratios:      [points, draws], log of measured over fitted
    by_constant: [points, constants, draws], derivatives of the log of the fitted
    moved:       [constants, draws], how far they are from their priors' means
    """
    precision = np.diag(np.array(PRIORS) ** -2)
    information = np.einsum("pcd,ped->dce", by_constant, by_constant) / scatter**2 + precision
    pull = np.einsum("pcd,pd->dc", by_constant, ratios) / scatter**2 - moved.T @ precision
    moves = np.linalg.solve(information, pull[..., None])[..., 0].T
    return moves, np.linalg.cholesky(np.linalg.inv(information[0]))


def _pulled(moved: Array, misses: Sequence[Array], scatters: Sequence[float], prior: float) -> Array:
    """By how much a constant is to move where it has moved from its prior's mean already: to the mean of the
    points and of the prior, each by its precision."""
    if not misses:
        return -moved
    weights = np.array(scatters) ** -2
    return (weights @ np.stack(misses) - moved / prior**2) / (weights.sum() + 1 / prior**2)


def _pooled(residuals: Sequence[float], prior: float, constants: int = 1) -> float:
    """A deviation from the residuals of a fit of so many constants, with what is assumed counted as
    PRIOR_POINTS of them."""
    squares = sum(r * r for r in residuals) + PRIOR_POINTS * prior**2
    return math.sqrt(squares / (PRIOR_POINTS + max(len(residuals) - constants, 0)))


def _deviation(scatters: Sequence[float], prior: float) -> float:
    """Of a constant, by the points and its prior."""
    return float(sum(scatter**-2 for scatter in scatters) + prior**-2) ** -0.5


def assumed(like: Array) -> Fit:
    """Where nothing was measured on that machine with that engine."""
    ones = np.ones_like(like)
    return Fit(
        ASSUMED_KAPPA * ones,
        0 * ones,
        0 * ones,
        ASSUMED_HOST_MS * ones,
        ASSUMED_COLD_MS * ones,
        (),
        ASSUMED_DEVIATION,
        np.zeros((len(PRIORS), len(PRIORS))),
        ASSUMED_HOST_DEVIATION,
        ASSUMED_COLD_DEVIATION,
        TTFT_SCATTER,
        TTFT_MEAN_SCATTER,
        0,
    )
