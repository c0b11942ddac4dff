"""Residuals: each prediction beside the observations of its quantity, and the verdict on it."""

from __future__ import annotations

from typing import Literal

from harness.serving.ledger.ledger import LedgerRow, Observation, ObservationEntry, PredictionEntry
from harness.serving.ledger.prediction import Prediction
from harness.serving.schema import StrictRecord

TOLERANCE = 0.15  # of the observed change, where neither side has an interval
RESOLVED = 0.03  # of the value before: a smaller change is within what machines and neighbours drift

ResidualVerdict = Literal["explained", "missed", "not resolved", "bound holds", "bound broken"]


class Residual(StrictRecord):
    """One prediction beside one observation of the same quantity, in its unit.

    residual: observed change - predicted change; relative: of the observed change
    blind:    whether the prediction was written down before the observation was
    of:       the one change that a bound is of
    """

    row: str
    method: str
    of: str
    quantity: str
    unit: str
    predicted: float | None
    low: float | None
    high: float | None
    observed: float
    observed_low: float | None
    observed_high: float | None
    residual: float | None
    relative: float | None
    verdict: ResidualVerdict
    blind: bool


def residuals(row: LedgerRow) -> list[Residual]:
    """Each of the row's predictions beside each observation of its quantity."""
    return [
        _held(row.id, predicted, observed)
        for observed in row.observations
        for predicted in row.predictions
        if predicted.prediction.quantity == observed.observation.quantity
        and predicted.prediction.unit == observed.observation.unit
        and not (predicted.at > observed.at and _has_blind(row, predicted, observed))
    ]


def _has_blind(row: LedgerRow, late: PredictionEntry, observed: ObservationEntry) -> bool:
    """A prediction made again after the observation does not stand in for the one made before it."""
    return any(
        entry.prediction.method == late.prediction.method
        and entry.prediction.quantity == late.prediction.quantity
        and entry.at <= observed.at
        for entry in row.predictions
    )


def _held(row: str, predicted: PredictionEntry, observed: ObservationEntry) -> Residual:
    prediction, observation = predicted.prediction, observed.observation
    change = prediction.change
    residual = None if change is None else observation.change - change
    return Residual(
        row=row,
        method=prediction.method,
        of=prediction.of,
        quantity=prediction.quantity,
        unit=prediction.unit,
        predicted=change,
        low=prediction.low,
        high=prediction.high,
        observed=observation.change,
        observed_low=observation.low,
        observed_high=observation.high,
        residual=residual,
        relative=residual / observation.change if residual is not None and observation.change else None,
        verdict=verdict(prediction, observation),
        blind=bool(predicted.at) and predicted.at < observed.at,
    )


def verdict(prediction: Prediction, observation: Observation) -> ResidualVerdict:
    """`explained` if the intervals meet; without any, if the residual is within TOLERANCE of the observed."""
    if prediction.method == "bound":
        inside = (prediction.low is None or prediction.low <= observation.change) and (
            prediction.high is None or observation.change <= prediction.high
        )
        return "bound holds" if inside else "bound broken"
    if not resolved(observation):
        return "not resolved"
    if prediction.change is None:
        return "missed"
    low, high = _interval(prediction.change, prediction.low, prediction.high)
    seen_low, seen_high = _interval(observation.change, observation.low, observation.high)
    if (low, seen_low) == (high, seen_high):
        close = abs(observation.change - prediction.change) <= TOLERANCE * abs(observation.change)
        return "explained" if close else "missed"
    return "explained" if low <= seen_high and seen_low <= high else "missed"


def resolved(observation: Observation) -> bool:
    """Whether the observation tells the change from none: it is large enough, and its interval without 0."""
    least = RESOLVED if observation.resolution is None else observation.resolution
    if abs(observation.change) < least * abs(observation.before):
        return False
    return observation.low is None or observation.high is None or not observation.low <= 0 <= observation.high


def _interval(value: float, low: float | None, high: float | None) -> tuple[float, float]:
    return (value if low is None else low, value if high is None else high)
