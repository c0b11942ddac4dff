"""Validation of the model against measurements: leave-one-out where it was calibrated, plainly elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.errors import UsageError
from harness.serving.link.calibration import MeasuredPoint, Series, measured
from harness.serving.link.model import CALIBRATED, Link
from harness.serving.link.predictions import Value, outlook

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
    ttft: Value
    ttft_mean: Value
    ttft_p99: Value | None
    output_tok_s_gpu: Value

    @property
    def error(self) -> float:
        return self.tpot.value / self.point.tpot_ms - 1

    @property
    def covered(self) -> bool:
        return self.tpot.covers(self.point.tpot_ms)

    def against(self) -> Iterator[tuple[str, Value, float]]:
        """What is predicted and measured, by name: TTFT is the client's mean, first wave included."""
        yield "TPOT", self.tpot, self.point.tpot_ms
        yield "mean TTFT", self.ttft_mean, self.point.ttft_ms
        if self.point.ttft_p99_ms is not None and self.ttft_p99 is not None:
            yield "p99 TTFT", self.ttft_p99, self.point.ttft_p99_ms
        yield "throughput", self.output_tok_s_gpu, self.point.output_tok_s_gpu


@dataclass(frozen=True)
class ValidationErrors:
    """Of one quantity over a series: how many points have it, mean and largest absolute error, bias, and how
    many lie in their interval."""

    points: int
    mean: float
    largest: float
    bias: float
    covered: int


@dataclass(frozen=True)
class ValidationSummary:
    """Of one series, the errors by quantity (see ValidationRow.against). calibrates: whether the model was
    fitted to it, and each point predicted from the others"""

    series: str
    use: str
    source: str
    points: int
    calibrates: bool
    errors: Mapping[str, ValidationErrors]

    @property
    def tpot(self) -> ValidationErrors:
        return self.errors["TPOT"]


def rows(link: Link, series: Series) -> Iterator[ValidationRow]:
    """Each point of a series; one that calibrates is predicted from the others."""
    for point in series.points:
        model = link.without(point) if point in link.calibration else link
        look = outlook(model, point.load)
        yield ValidationRow(
            series.name,
            series.use,
            point,
            look.tpot,
            look.ttft,
            look.ttft_mean,
            look.ttft_p99,
            look.output.over(link.gpus),
        )


def validated(link: Link) -> list[tuple[ValidationSummary, list[ValidationRow]]]:
    """Of all series of its machine, engine, parallelism, cache and launch. Raises UsageError where there is
    none."""
    known = measured(link.hardware, link.engine)
    alike = [series for series in known if series.kv in ("", link.kv)]
    system = f"{link.hardware} with {link.engine}"
    if not known:
        raise UsageError(f"nothing was measured of {system} to hold the model against")
    if not alike or link.structure.parallel != CALIBRATED[0]:
        caches = " or ".join(dict.fromkeys(series.kv for series in known if series.kv)) or "any"
        raise UsageError(
            f"what was measured of {system} is of {CALIBRATED[0].text} and {caches} cache, not of "
            f"{link.structure.parallel.text} and {link.kv}"
        )
    if link.eager:
        raise UsageError(f"what was measured of {system} is of graphs: leave out --launch eager")
    validations = []
    for series in alike:
        points = list(rows(link, series))
        by_name: dict[str, list[tuple[float, bool]]] = {}
        for row in points:
            for name, value, measured_value in row.against():
                error = value.value / measured_value - 1
                by_name.setdefault(name, []).append((error, value.covers(measured_value)))
        errors = {name: _errors(of) for name, of in by_name.items()}
        is_own = all(point in link.calibration for point in series.points)
        summary = ValidationSummary(series.name, series.use, series.source, len(points), is_own, errors)
        validations.append((summary, points))
    return validations


def _errors(of: Sequence[tuple[float, bool]]) -> ValidationErrors:
    sizes = [abs(error) for error, _ in of]
    mean, bias = sum(sizes) / len(of), sum(error for error, _ in of) / len(of)
    return ValidationErrors(len(of), mean, max(sizes), bias, sum(covered for _, covered in of))
