"""Calibration: measured serving, which sets the model's two constants and says how far to trust it.

kappa is the ratio of the kernels' time in a server to their time alone; host_ms is what a request takes
outside the engine's steps (client, HTTP, tokenisation). Each is one number for all points of a machine and
engine.
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
    """kappa, host_ms:  one value for each draw
    residuals: logarithm of measured over fitted TPOT, of the central draw
    scatter:   deviation of the residuals
    late_ms:   deviation of measured less fitted TTFT
    """

    kappa: Array
    host_ms: Array
    residuals: tuple[float, ...]
    scatter: float
    late_ms: float


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
    kappa, host = np.ones_like(draws[0].kappa), np.full_like(draws[0].kappa, ASSUMED_HOST_MS)
    for _ in range(ROUNDS):
        errors, late = [], []
        for point, steps, drawn in zip(points, prepared, draws, strict=True):
            fitted = steps.serving(replace(drawn, kappa=kappa, host_ms=host))
            errors.append(np.log(point.tpot_ms / fitted.tpot))
            if point.ttft_median_ms is not None:
                late.append(point.ttft_median_ms - fitted.ttft)
        step = np.mean(errors, axis=0)
        kappa = kappa * np.exp(step)
        host = np.maximum(host + np.mean(late, axis=0), 0.0) if late else host
        if np.max(np.abs(step)) < SETTLED:
            break
    residuals = tuple(float(error[0]) for error in errors)
    waits = [float(wait[0]) for wait in late]
    late_ms = _deviation(waits) if waits else ASSUMED_HOST_DEVIATION
    return Fit(kappa, host, residuals, _deviation(residuals), late_ms)


def _deviation(residuals: Sequence[float]) -> float:
    """About zero, one constant having been fitted."""
    return math.sqrt(sum(r * r for r in residuals) / max(len(residuals) - 1, 1))


def assumed(like: Array) -> Fit:
    """Where nothing was measured on that machine with that engine."""
    ones = np.ones_like(like)
    return Fit(ASSUMED_KAPPA * ones, ASSUMED_HOST_MS * ones, (), ASSUMED_DEVIATION, ASSUMED_HOST_DEVIATION)
