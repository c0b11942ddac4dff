"""Validation of the model against measurements: leave-one-out where it was calibrated, plainly elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.serving.link.calibration import MeasuredPoint, Series, measured
from harness.serving.link.model import Link
from harness.serving.link.predictions import Value

HELD = "held out"
CALIBRATION = "calibration"


@dataclass(frozen=True)
class ValidationRow:
    """One measured point and its prediction by a model that has not seen it.

    error: predicted over measured TPOT, less 1
    """

    series: str
    use: str
    point: MeasuredPoint
    tpot: Value
    ttft_ms: float
    ttft_mean_ms: float
    output_tok_s_gpu: float

    @property
    def error(self) -> float:
        return self.tpot.value / self.point.tpot_ms - 1

    @property
    def covered(self) -> bool:
        return self.tpot.low <= self.point.tpot_ms <= self.tpot.high


@dataclass(frozen=True)
class ValidationSummary:
    """Of one series: mean and largest absolute error of TPOT, bias, and how many points lie in their
    interval."""

    series: str
    use: str
    source: str
    points: int
    mean: float
    largest: float
    bias: float
    covered: int


def rows(link: Link, series: Series) -> Iterator[ValidationRow]:
    """Each point of a series; one that calibrates is predicted from the others."""
    for point in series.points:
        model = link.without(point) if point in link.calibration else link
        times, _ = model.serving(point.load)
        yield ValidationRow(
            series.name,
            series.use,
            point,
            Value.of(times.tpot),
            float(times.ttft[0]),
            float(times.ttft_mean[0]),
            float(times.output[0]) / link.gpus,
        )


def validated(link: Link) -> list[tuple[ValidationSummary, list[ValidationRow]]]:
    validations = []
    for series in measured(link.hardware, link.engine):
        points = list(rows(link, series))
        errors = [row.error for row in points]
        summary = ValidationSummary(
            series.name,
            series.use,
            series.source,
            len(points),
            sum(map(abs, errors)) / len(errors),
            max(map(abs, errors)),
            sum(errors) / len(errors),
            sum(row.covered for row in points),
        )
        validations.append((summary, points))
    return validations
