"""Calibration: measured serving, which sets the model's four constants and says how far to trust it.

kappa is the ratio of the kernels' time in a server to their time alone; step_ms is what a step of the engine
takes beside them and the gaps that are assumed; host_ms is what a request takes outside the engine's steps
(client, HTTP, tokenisation); cold_ms is what the first wave of requests takes beside that. Each is one number
for all points of a system. Few points say little, so each constant begins at what is assumed of systems that
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
from harness.serving.link.step_times import Draws, StepTimes

MEASURED = PUBLISHED / "serving-link"
ROUNDS = 30
SETTLED = 1e-4  # of log kappa, and ms of a step
# Where nobody measured: kernels in a server take about as long as alone, or some less (warm caches, fusion),
# or more (skew between ranks). 90 % from 0.7 to 1.35.
ASSUMED_KAPPA, ASSUMED_DEVIATION = 0.97, 0.2
STEP_DEVIATION_MS, LEAST_STEP_MS = 1.0, -0.2  # beyond the gaps that are assumed of every step
ASSUMED_HOST_MS, ASSUMED_HOST_DEVIATION = 60.0, 30.0
# By how much the first wave of InferenceX's runs of SGLang on H200 was later than its prefills, however few:
# about 0.9 s with 0.5.9, 1.5 s with 0.5.7.
ASSUMED_COLD_MS, ASSUMED_COLD_DEVIATION = 900.0, 500.0
# Of single points about their system's kappa, as SGLang's 15 points on H200 scatter; worth so many points.
PRIOR_SCATTER, PRIOR_LATE_MS, PRIOR_POINTS = 0.055, 15.0, 4


@dataclass(frozen=True)
class MeasuredPoint:
    """One run of a client. ttft_median_ms: None where the source has it not."""

    load: ClosedLoop
    tpot_ms: float
    ttft_ms: float
    output_tok_s_gpu: float
    ttft_median_ms: float | None = None


@dataclass(frozen=True)
class Series:
    """use: `calibration`, or what it is held out for."""

    name: str
    engine: str
    version: str
    use: str
    source: str
    points: tuple[MeasuredPoint, ...]


@dataclass(frozen=True)
class Fit:
    """kappa, step_ms, host_ms, cold_ms: one value for each draw
    residuals: logarithm of measured over fitted TPOT, of the central draw
    scatter:   deviation of a point about what the constants give
    spread:    a root of the covariance of log kappa and step_ms
    late_ms:   the same of its median TTFT, cold_deviation: of its first wave's
    freedom:   degrees of freedom that the deviations rest on
    """

    kappa: Array
    step_ms: Array
    host_ms: Array
    cold_ms: Array
    residuals: tuple[float, ...]
    scatter: float
    spread: Array
    late_ms: float
    cold_deviation: float
    freedom: int


def measured(hardware: str, engine: str, folder: Path = MEASURED) -> list[Series]:
    """All series of a machine and engine; empty where there are none."""
    path = folder / f"{hardware}-{engine}.json"
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return [_series(entry) for entry in document["series"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {path}: {type(error).__name__}: {error}") from None


def _series(entry: JsonObject) -> Series:
    shared = {k: entry[k] for k in ("isl", "osl", "range_ratio", "prefill_tokens", "waves")}
    points = []
    for point in entry["points"]:
        values = dict(point)
        load = ClosedLoop(concurrency=values.pop("concurrency"), **shared)
        points.append(MeasuredPoint(load, **values))
    return Series(
        entry["name"], entry["engine"], entry["version"], entry["use"], entry["source"], tuple(points)
    )


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
    kappa = np.full_like(draws[0].kappa, ASSUMED_KAPPA)
    host, cold = np.full_like(kappa, ASSUMED_HOST_MS), np.full_like(kappa, ASSUMED_COLD_MS)
    step = np.zeros_like(kappa)
    for _ in range(ROUNDS):
        ratios, by_kappa, by_step, late, first = [], [], [], [], []
        for point, steps, drawn in zip(points, prepared, draws, strict=True):
            now = replace(drawn, kappa=kappa, host_ms=host, cold_ms=cold, gap_us=drawn.gap_us + 1e3 * step)
            fitted = steps.serving(now)
            ratios.append(np.log(point.tpot_ms / fitted.tpot))
            # All of TPOT but the gap is kappa's; what others' prefills and the batch add is left out.
            by_kappa.append(1 - now.gap_us / 1e3 / fitted.tpot)
            by_step.append(1 / fitted.tpot)
            if point.ttft_median_ms is not None:
                late.append(point.ttft_median_ms - fitted.ttft)
            if point.load.waves > 1:
                # A mean whose median is known is held against that: the steady state's misses are not cold.
                missed = 0.0 if point.ttft_median_ms is None else point.ttft_median_ms - fitted.ttft
                first.append(point.load.waves * (point.ttft_ms - fitted.ttft_mean - missed))
        residuals = tuple(float(ratio[0]) for ratio in ratios)
        scatter = _pooled(residuals, prior_scatter, constants=2)
        moves, spread = _gauss_newton(ratios, by_kappa, by_step, scatter, np.log(kappa / ASSUMED_KAPPA), step)
        kappa, before = kappa * np.exp(moves[0]), step
        step = np.maximum(step + moves[1], LEAST_STEP_MS)
        host_step = _pulled(host - ASSUMED_HOST_MS, late, PRIOR_LATE_MS, ASSUMED_HOST_DEVIATION)
        host = np.maximum(host + host_step, 0.0)
        cold_step = _pulled(cold - ASSUMED_COLD_MS, first, ASSUMED_COLD_DEVIATION, ASSUMED_COLD_DEVIATION)
        cold = np.maximum(cold + cold_step, 0.0)
        if max(np.max(np.abs(moves[0])), np.max(np.abs(step - before))) < SETTLED:
            break
    return Fit(
        kappa,
        step,
        host,
        cold,
        residuals,
        scatter,
        spread,
        _of_new(_pooled([float(each[0]) for each in late], PRIOR_LATE_MS), len(late), ASSUMED_HOST_DEVIATION),
        _of_new(ASSUMED_COLD_DEVIATION, len(first), ASSUMED_COLD_DEVIATION),
        PRIOR_POINTS + max(len(points) - 2, 0),
    )


def _gauss_newton(
    ratios: Sequence[Array],
    by_kappa: Sequence[Array],
    by_step: Sequence[Array],
    scatter: float,
    log_kappa: Array,
    step: Array,
) -> tuple[tuple[Array, Array], Array]:
    """How far log kappa and the step's ms are to move, in each draw, and a root of the covariance that points
    and priors leave them, of the central one.

    ratios: log of measured over fitted; by_kappa, by_step: derivatives of the log of the fitted
    log_kappa, step: how far they have moved from their priors' means
    """

    def total(*factors: Sequence[Array]) -> Array:
        return np.sum([math.prod(each) for each in zip(*factors, strict=True)], axis=0) / scatter**2

    kk = total(by_kappa, by_kappa) + ASSUMED_DEVIATION**-2
    ks, ss = total(by_kappa, by_step), total(by_step, by_step) + STEP_DEVIATION_MS**-2
    k = total(by_kappa, ratios) - log_kappa / ASSUMED_DEVIATION**2
    s = total(by_step, ratios) - step / STEP_DEVIATION_MS**2
    determinant = kk * ss - ks**2
    moves = (ss * k - ks * s) / determinant, (kk * s - ks * k) / determinant
    information = np.array([[kk[0], ks[0]], [ks[0], ss[0]]])
    return moves, np.linalg.cholesky(np.linalg.inv(information))


def _pulled(moved: Array, misses: Sequence[Array], scatter: float, prior: float) -> Array:
    """By how much a constant is to move where it has moved from its prior's mean already: to the mean of the
    points and of the prior, each by its precision."""
    if not misses:
        return -moved
    points = len(misses) / scatter**2
    return (points * np.mean(misses, axis=0) - moved / prior**2) / (points + 1 / prior**2)


def _pooled(residuals: Sequence[float], prior: float, constants: int = 1) -> float:
    """A deviation from the residuals of a fit of so many constants, with what is assumed counted as
    PRIOR_POINTS of them."""
    squares = sum(r * r for r in residuals) + PRIOR_POINTS * prior**2
    return math.sqrt(squares / (PRIOR_POINTS + max(len(residuals) - constants, 0)))


def _of_new(scatter: float, points: int, prior: float) -> float:
    """Deviation of a new point about the fitted constant: its own scatter, and the constant's."""
    return math.hypot(scatter, (points / scatter**2 + 1 / prior**2) ** -0.5)


def assumed(like: Array) -> Fit:
    """Where nothing was measured on that machine with that engine."""
    ones = np.ones_like(like)
    return Fit(
        ASSUMED_KAPPA * ones,
        0 * ones,
        ASSUMED_HOST_MS * ones,
        ASSUMED_COLD_MS * ones,
        (),
        ASSUMED_DEVIATION,
        np.zeros((2, 2)),
        ASSUMED_HOST_DEVIATION,
        ASSUMED_COLD_DEVIATION,
        0,
    )
