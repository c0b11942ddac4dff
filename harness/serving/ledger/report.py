"""Rows of ledgers as text and as JSON: each prediction beside the observation of its quantity."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from harness.report.text import WIDTH, table
from harness.serving.ledger.ledger import LedgerRow, Observation, ObservationEntry, PredictionEntry
from harness.serving.ledger.prediction import KernelChange, Prediction, unit_text

TOLERANCE = 0.15  # of the observed change, where neither side has an interval
NOT_OBSERVED, NOT_PREDICTED = "not observed yet", "no prediction"
COLUMNS = ["row", "change", "quantity", "observed", "method", "predicted", "off by", "verdict"]
EXPLAINED = f"""
explained: the 90 % intervals of prediction and observation meet; where neither has one, they differ by at
most {TOLERANCE:.0%} of the observed change. not resolved: the interval of the observation holds 0. off by:
predicted less observed change, as a part of the observed one. blind: the prediction was written before the
observation. bound: the most that one change alone can give. x before: where only the ratio of after to
before was published."""


@dataclass(frozen=True)
class LedgerLine:
    """A prediction beside an observation of the same quantity and unit, or one of them alone.

    verdict: `explained`, `missed` or `not resolved`; of a bound `bound holds` or `bound broken`; NOT_OBSERVED
             or NOT_PREDICTED where one is missing
    blind:   whether the prediction was written before the observation
    """

    row: str
    quantity: str
    unit: str
    verdict: str
    prediction: Prediction | None = None
    observation: Observation | None = None
    blind: bool = False

    @property
    def method(self) -> str:
        return self.prediction.method if self.prediction else "none"

    @property
    def error(self) -> float | None:
        """Predicted less observed change, in the unit; None where one of them has no value."""
        if self.prediction is None or self.prediction.change is None or self.observation is None:
            return None
        return self.prediction.change - self.observation.change

    @property
    def relative_error(self) -> float | None:
        if self.error is None or self.observation is None or not self.observation.change:
            return None
        return self.error / self.observation.change


def ledger_lines(row: LedgerRow) -> list[LedgerLine]:
    """Each observation beside each prediction of its quantity, then the predictions without observation. A
    prediction made after an observation does not take the place of an earlier one of its method."""
    lines: list[LedgerLine] = []
    for seen in row.observations:
        observed = seen.observation
        kind = row.id, observed.quantity, observed.unit
        beside = [p for p in row.predictions if (row.id, p.prediction.quantity, p.prediction.unit) == kind]
        judged = [p for p in beside if p.at <= seen.at or not _has_earlier(beside, p, seen)]
        lines += [
            LedgerLine(
                *kind,
                verdict(entry.prediction, observed),
                entry.prediction,
                observed,
                blind=bool(entry.at) and entry.at < seen.at,
            )
            for entry in judged
        ]
        if not judged:
            lines.append(LedgerLine(*kind, NOT_PREDICTED, observation=observed))
    known = {(line.quantity, line.unit) for line in lines}
    return lines + [
        LedgerLine(row.id, predicted.quantity, predicted.unit, NOT_OBSERVED, predicted)
        for predicted in (entry.prediction for entry in row.predictions)
        if (predicted.quantity, predicted.unit) not in known
    ]


def _has_earlier(beside: Sequence[PredictionEntry], late: PredictionEntry, seen: ObservationEntry) -> bool:
    method = late.prediction.method
    return any(entry.prediction.method == method and entry.at <= seen.at for entry in beside)


def verdict(prediction: Prediction, observation: Observation) -> str:
    """Whether the prediction explains the observation: see EXPLAINED."""
    if prediction.method == "bound":
        inside = (prediction.low is None or prediction.low <= observation.change) and (
            prediction.high is None or observation.change <= prediction.high
        )
        return "bound holds" if inside else "bound broken"
    low, high = observation.low, observation.high
    if low is not None and high is not None and low <= 0 <= high:
        return "not resolved"
    if prediction.change is None:
        return "missed"
    predicted_low, predicted_high = _interval(prediction.change, prediction.low, prediction.high)
    seen_low, seen_high = _interval(observation.change, low, high)
    if predicted_low == predicted_high and seen_low == seen_high:
        close = abs(observation.change - prediction.change) <= TOLERANCE * abs(observation.change)
        return "explained" if close else "missed"
    return "explained" if predicted_low <= seen_high and seen_low <= predicted_high else "missed"


def _interval(value: float, low: float | None, high: float | None) -> tuple[float, float]:
    return (value if low is None else low, value if high is None else high)


def as_json(rows: Sequence[LedgerRow]) -> str:
    lines = [
        asdict(line)
        | {
            "prediction": line.prediction and line.prediction.model_dump(),
            "observation": line.observation and line.observation.model_dump(),
            "error": line.error,
            "relative_error": line.relative_error,
        }
        for row in rows
        for line in ledger_lines(row)
    ]
    document = {"rows": [row.model_dump() for row in rows], "lines": lines}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def as_text(rows: Sequence[LedgerRow]) -> str:
    """A table for each ledger, what explains its rows, and how many of each verdict."""
    ledgers = dict.fromkeys(row.ledger for row in rows)
    blocks = [_block(ledger, [row for row in rows if row.ledger == ledger]) for ledger in ledgers]
    return "\n".join([*blocks, *_summary([line for row in rows for line in ledger_lines(row)]), EXPLAINED])


def _block(ledger: str, rows: Sequence[LedgerRow]) -> str:
    lines = [ledger, table([cells for row in rows for cells in _cells(row)], COLUMNS)]
    for text, ids in explanations(rows).items():
        others = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        lines.append(textwrap.fill(f"{ids[0]}{others}: {text}", WIDTH, subsequent_indent="    "))
    return "\n".join(lines) + "\n"


def explanations(rows: Sequence[LedgerRow]) -> dict[str, list[str]]:
    """Each text once, with the rows that it is about."""
    texts: dict[str, dict[str, None]] = {}
    for row in rows:
        for explanation in row.explanations:
            evidence = f" (shown by {', '.join(explanation.evidence)})" if explanation.evidence else ""
            texts.setdefault(explanation.text + evidence, {})[row.id] = None
        for entry in row.observations:
            if assumed := ", ".join(entry.observation.assumed):
                texts.setdefault(f"taken to be alike without being said: {assumed}", {})[row.id] = None
    return {text: list(ids) for text, ids in texts.items()}


def _summary(lines: Sequence[LedgerLine]) -> Iterator[str]:
    """For each method: how many of each verdict, and how far off it was where the change is resolved."""
    judged = [line for line in lines if line.prediction and line.observation]
    if not judged:
        yield "no prediction has an observation yet"
    for method in dict.fromkeys(line.method for line in judged):
        of_method = [line for line in judged if line.method == method]
        verdicts = [line.verdict for line in of_method]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
        off = [abs(line.relative_error) for line in of_method
               if line.relative_error is not None and line.verdict != "not resolved"]  # fmt: skip
        far = f"; off by {statistics.median(off):.0%} in the median, {max(off):.0%} at most" if off else ""
        yield f"{method}: {counts}{far}"


def _cells(row: LedgerRow) -> Iterator[list[str]]:
    """A row's lines of the table; what a line has in common with the one above it is left empty."""
    start = [row.id, ", ".join(_change(change) for change in row.changes)]
    lines = ledger_lines(row)
    if not lines:
        yield [*start, "", "neither predicted nor observed yet"]
    above = None
    for line in lines:
        seen, predicted = line.observation, line.prediction
        numbers = NOT_OBSERVED
        if seen:
            change = _value(seen.change, seen.low, seen.high, seen.unit)
            numbers = f"{seen.before:.4g} -> {seen.after:.4g} {unit_text(seen.unit)}, {change}"
        off = "" if line.relative_error is None else f"{line.relative_error:+.0%}"
        of = f": {predicted.of} alone" if predicted and predicted.of else ""
        value = _value(predicted.change, predicted.low, predicted.high, line.unit) if predicted else ""
        shown = [line.quantity, numbers] if seen is None or seen is not above else ["", ""]
        told = (line.verdict if seen else "") + (", blind" if line.blind else "")
        yield [*start, *shown, line.method + of, value, off, told]
        start, above = ["", ""], seen


def _change(change: KernelChange) -> str:
    by = ""
    if change.factor is not None:
        by = f" {change.factor:g}x"
    elif change.saved_us is not None:
        by = f" saves {change.saved_us:g} us a call"
    return " ".join(filter(None, [change.op, change.part])) + by


def _value(value: float | None, low: float | None, high: float | None, unit: str) -> str:
    parts = [] if value is None else [f"{value:+.3g} {unit_text(unit)}"]
    if low is not None or high is not None:
        ends = ["" if end is None else f"{end:+.3g}" for end in (low, high)]
        parts.append(f"({ends[0]}..{ends[1]})")
    return " ".join(parts)
