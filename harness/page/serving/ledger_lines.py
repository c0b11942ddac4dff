"""Lines of a ledger as they are drawn: each prediction beside the observation of its quantity, or alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.page.serving.colours import NOT_OBSERVED, NOT_PREDICTED
from harness.page.serving.marks import distinct
from harness.serving.ledger.ledger import LedgerRow, Observation
from harness.serving.ledger.prediction import Prediction, unit_text
from harness.serving.ledger.residuals import Residual, residuals

NO_METHOD = "none"


@dataclass(frozen=True)
class LedgerLine:
    """row:    its name in this section, unlike all others'
    name:      by what it was predicted; `line`: that, unlike all others of its row and quantity
    blind:     None where it has no observation, or nothing was predicted
    Numbers are in `unit`.
    """

    row: str
    quantity: str
    unit: str
    method: str
    name: str
    verdict: str
    line: str = ""
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    observation: Observation | None = None
    residual: float | None = None
    relative: float | None = None
    blind: bool | None = None


def row_names(rows: Sequence[LedgerRow]) -> list[str]:
    """Of each row, with its ledger where two ledgers have one of that name."""
    ids = [row.id for row in rows]
    return distinct([f"{r.id}, {r.ledger}" if ids.count(r.id) > 1 and r.ledger else r.id for r in rows])


def ledger_lines(rows: Sequence[LedgerRow]) -> list[LedgerLine]:
    """All, in the order of the ledger. A row without prediction and observation has none."""
    drawn: list[LedgerLine] = []
    for row, name in zip(rows, row_names(rows), strict=True):
        lines = list(_lines(row, name))
        keys = dict.fromkeys((line.quantity, line.unit) for line in lines)
        for key in keys:
            group = [line for line in lines if (line.quantity, line.unit) == key]
            labels = distinct([line.name for line in group])
            drawn += [replace(line, line=label) for line, label in zip(group, labels, strict=True)]
    return drawn


def _lines(row: LedgerRow, name: str) -> Iterator[LedgerLine]:
    for entry in row.observations:
        alone = row.model_copy(update={"observations": (entry,)})
        judged = residuals(alone)
        yield from (_judged(name, residual, entry.observation) for residual in judged)
        if not judged:
            yield _unpredicted(name, entry.observation)
    seen = {(e.observation.quantity, e.observation.unit) for e in row.observations}
    for predicted in row.predictions:
        if (predicted.prediction.quantity, predicted.prediction.unit) not in seen:
            yield _unobserved(name, predicted.prediction)


def _judged(row: str, residual: Residual, observation: Observation) -> LedgerLine:
    return LedgerLine(
        row,
        residual.quantity,
        unit_text(residual.unit),
        residual.method,
        _name(residual.method, residual.of),
        residual.verdict,
        predicted=residual.predicted,
        low=residual.low,
        high=residual.high,
        observation=observation,
        residual=residual.residual,
        relative=residual.relative,
        blind=residual.blind,
    )


def _unpredicted(row: str, observation: Observation) -> LedgerLine:
    return LedgerLine(
        row,
        observation.quantity,
        unit_text(observation.unit),
        NO_METHOD,
        NO_METHOD,
        NOT_PREDICTED,
        observation=observation,
    )


def _unobserved(row: str, prediction: Prediction) -> LedgerLine:
    return LedgerLine(
        row,
        prediction.quantity,
        unit_text(prediction.unit),
        prediction.method,
        _name(prediction.method, prediction.of),
        NOT_OBSERVED,
        predicted=prediction.change,
        low=prediction.low,
        high=prediction.high,
    )


def _name(method: str, of: str) -> str:
    return f"{method}: {of} alone" if of else method
