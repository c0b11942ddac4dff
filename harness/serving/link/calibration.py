"""Calibration: measured serving, which sets the model's three constants and says how far to trust it.

kappa is the ratio of the kernels' time in a server to their time alone; host_ms is what a request takes
outside the engine's steps (client, HTTP, tokenisation); cold_ms is what the first wave of requests takes
beside that. Each is one number for all points of a system. Few points say little, so each constant begins at
what is assumed of systems that nobody measured, and moves to what the points say by their number (partial
pooling: a normal prior of the system's constant, and a prior of the points' scatter worth PRIOR_POINTS).
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
SETTLED = 1e-7
# Where nobody measured: kernels in a server take about as long as alone, or some less (warm caches, fusion),
# or more (skew between ranks). 90 % from 0.7 to 1.35.
ASSUMED_KAPPA, ASSUMED_DEVIATION = 0.97, 0.2
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
    """kappa, host_ms, cold_ms: one value for each draw
    residuals: logarithm of measured over fitted TPOT, of the central draw
    scatter:   deviation of a point's kappa about the system's, and of the system's about the fitted one
    late_ms:   the same of its median TTFT, cold_deviation: of its first wave's
    freedom:   degrees of freedom that the deviations rest on
    """

    kappa: Array
    host_ms: Array
    cold_ms: Array
    residuals: tuple[float, ...]
    scatter: float
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
) -> Fit:
    """The constants that leave no mean error over the points, for each draw of all else.

    draw: the draws for a workload's steps, with any kappa and host_ms
    """
    draws = [draw(steps) for steps in prepared]
    kappa = np.full_like(draws[0].kappa, ASSUMED_KAPPA)
    host, cold = np.full_like(kappa, ASSUMED_HOST_MS), np.full_like(kappa, ASSUMED_COLD_MS)
    for _ in range(ROUNDS):
        ratios, late, first = [], [], []
        for point, steps, drawn in zip(points, prepared, draws, strict=True):
            fitted = steps.serving(replace(drawn, kappa=kappa, host_ms=host, cold_ms=cold))
            ratios.append(np.log(point.tpot_ms / fitted.tpot))
            if point.ttft_median_ms is not None:
                late.append(point.ttft_median_ms - fitted.ttft)
            if point.load.waves > 1:
                # A mean whose median is known is held against that: the steady state's misses are not cold.
                missed = 0.0 if point.ttft_median_ms is None else point.ttft_median_ms - fitted.ttft
                first.append(point.load.waves * (point.ttft_ms - fitted.ttft_mean - missed))
        scatter = _pooled([float(ratio[0] - np.mean(ratios, axis=0)[0]) for ratio in ratios], PRIOR_SCATTER)
        step = _pulled(np.log(kappa / ASSUMED_KAPPA), ratios, scatter, ASSUMED_DEVIATION)
        kappa = kappa * np.exp(step)
        host_step = _pulled(host - ASSUMED_HOST_MS, late, PRIOR_LATE_MS, ASSUMED_HOST_DEVIATION)
        host = np.maximum(host + host_step, 0.0)
        cold_step = _pulled(cold - ASSUMED_COLD_MS, first, ASSUMED_COLD_DEVIATION, ASSUMED_COLD_DEVIATION)
        cold = np.maximum(cold + cold_step, 0.0)
        if np.max(np.abs(step)) < SETTLED:
            break
    residuals = tuple(float(ratio[0]) for ratio in ratios)
    return Fit(
        kappa,
        host,
        cold,
        residuals,
        _of_new(scatter, len(ratios), ASSUMED_DEVIATION),
        _of_new(_pooled([float(each[0]) for each in late], PRIOR_LATE_MS), len(late), ASSUMED_HOST_DEVIATION),
        _of_new(ASSUMED_COLD_DEVIATION, len(first), ASSUMED_COLD_DEVIATION),
        PRIOR_POINTS + len(points) - 1,
    )


def _pulled(moved: Array, misses: Sequence[Array], scatter: float, prior: float) -> Array:
    """By how much a constant is to move where it has moved from its prior's mean already: to the mean of the
    points and of the prior, each by its precision."""
    if not misses:
        return -moved
    points = len(misses) / scatter**2
    return (points * np.mean(misses, axis=0) - moved / prior**2) / (points + 1 / prior**2)


def _pooled(residuals: Sequence[float], prior: float) -> float:
    """A deviation from residuals about their mean, with what is assumed counted as PRIOR_POINTS of them."""
    squares = sum(r * r for r in residuals) + PRIOR_POINTS * prior**2
    return math.sqrt(squares / (PRIOR_POINTS + max(len(residuals) - 1, 0)))


def _of_new(scatter: float, points: int, prior: float) -> float:
    """Deviation of a new point about the fitted constant: its own scatter, and the constant's."""
    return math.hypot(scatter, (points / scatter**2 + 1 / prior**2) ** -0.5)


def assumed(like: Array) -> Fit:
    """Where nothing was measured on that machine with that engine."""
    ones = np.ones_like(like)
    return Fit(
        ASSUMED_KAPPA * ones,
        ASSUMED_HOST_MS * ones,
        ASSUMED_COLD_MS * ones,
        (),
        ASSUMED_DEVIATION,
        ASSUMED_HOST_DEVIATION,
        ASSUMED_COLD_DEVIATION,
        0,
    )
