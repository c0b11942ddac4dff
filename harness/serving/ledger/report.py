"""Rows of ledgers as text and as JSON: each prediction beside the observation of its quantity."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.report.text import WIDTH, table
from harness.serving.ledger.ledger import KernelChange, LedgerRow, Observation, Prediction, unit_text

TOLERANCE = 0.15  # of the observed change, where neither side has an interval
MOST_OFF = 3.0  # times the observed change: beyond it that is near 0, and a percentage of it says nothing
NOT_OBSERVED, NOT_PREDICTED = "not observed yet", "no prediction"
COLUMNS = ["row", "change", "quantity", "observed", "method", "predicted", "off by", "verdict"]
EXPLAINED = f"""
explained: the 90 % intervals of prediction and observation meet; where neither has one, they differ by
at most {TOLERANCE:.0%} of the observed change. not resolved: the interval of the observation holds 0, or
it is of one pair and has none. off by: predicted less observed change, as a part of the observed one, or in
its unit where that part is over {MOST_OFF:.0%}: the observed change is near 0. blind: the prediction was
written before the observation. bound: the most that one change alone can give. x before: where only the ratio
of after to before was published."""


@dataclass(frozen=True)
class LedgerLine:
    """A prediction beside an observation of the same quantity and unit, or one of them alone.

    blind: whether the prediction was written before the observation
    """

    row: str
    prediction: Prediction | None
    observation: Observation | None
    blind: bool = False

    @property
    def kind(self) -> tuple[str, str]:
        """Quantity and unit."""
        of = self.prediction or self.observation
        return (of.quantity, of.unit) if of else ("", "")

    @property
    def method(self) -> str:
        return self.prediction.method if self.prediction else "none"

    @property
    def difference(self) -> float | None:
        """Predicted less observed change."""
        change = self.prediction.change if self.prediction else None
        return None if change is None or self.observation is None else change - self.observation.change

    @property
    def off(self) -> float | None:
        """The difference as a part of the observed change; None where that change is near 0."""
        observed = self.observation.change if self.observation else 0.0
        if self.difference is None or not observed or abs(self.difference) > MOST_OFF * abs(observed):
            return None
        return self.difference / observed

    @property
    def off_text(self) -> str:
        """In per cent, or the difference where the observed change is near 0."""
        if self.off is not None:
            return f"{self.off:+.0%}"
        return "" if self.difference is None else f"{self.difference:+.3g} {unit_text(self.kind[1])}"

    @property
    def verdict(self) -> str:
        """Whether the prediction explains the observation: see EXPLAINED; NOT_OBSERVED or NOT_PREDICTED where
        one of them is missing."""
        predicted, seen = self.prediction, self.observation
        if predicted is None or seen is None:
            return NOT_OBSERVED if seen is None else NOT_PREDICTED
        low, high = _interval(predicted)
        seen_low, seen_high = _interval(seen)
        if predicted.method == "bound":
            return "bound holds" if low <= seen.change <= high else "bound broken"
        if seen.pairs == 1 or (seen_low <= 0 <= seen_high and seen_low < seen_high):
            return "not resolved"
        if predicted.change is None:
            return "missed"
        if low == high and seen_low == seen_high:
            return "explained" if abs(low - seen_low) <= TOLERANCE * abs(seen_low) else "missed"
        return "explained" if low <= seen_high and seen_low <= high else "missed"


def _interval(of: Prediction | Observation) -> tuple[float, float]:
    """The ends of its 90 % interval: the change itself where it has none, infinite where a bound has none."""
    ends = (-math.inf, math.inf) if of.change is None else (of.change, of.change)
    return (ends[0] if of.low is None else of.low), (ends[1] if of.high is None else of.high)


def ledger_lines(row: LedgerRow) -> list[LedgerLine]:
    """Each observation beside each prediction of its kind, then the predictions without observation."""
    predicted = [(LedgerLine(row.id, entry.prediction, None), entry.at) for entry in row.predictions]
    lines: list[LedgerLine] = []
    for seen in row.observations:
        alone = LedgerLine(row.id, None, seen.observation)
        same = [(line, at) for line, at in predicted if line.kind == alone.kind]
        lines += [replace(line, observation=seen.observation, blind="" < at < seen.at) for line, at in same]
        lines += [] if same else [alone]
    known = {line.kind for line in lines}
    return lines + [line for line, _ in predicted if line.kind not in known]


def as_json(rows: Sequence[LedgerRow]) -> str:
    lines = [
        {"row": line.row, "quantity": line.kind[0], "unit": line.kind[1], "method": line.method,
         "off": line.off, "verdict": line.verdict, "blind": line.blind}
        for row in rows for line in ledger_lines(row)
    ]  # fmt: skip
    document = {"rows": [row.model_dump() for row in rows], "lines": lines}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def as_text(rows: Sequence[LedgerRow]) -> str:
    """A table for each ledger, what explains its rows, and how many of each verdict."""
    blocks = []
    for ledger in dict.fromkeys(row.ledger for row in rows):
        own = [row for row in rows if row.ledger == ledger]
        blocks += [ledger, table([cells for row in own for cells in _cells(row)], COLUMNS)]
        for text, ids in explanations(own).items():
            others = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
            blocks.append(textwrap.fill(f"{ids[0]}{others}: {text}", WIDTH, subsequent_indent="    "))
        blocks.append("")
    return "\n".join([*blocks, *_summary([line for row in rows for line in ledger_lines(row)]), EXPLAINED])


def explanations(rows: Sequence[LedgerRow]) -> dict[str, list[str]]:
    """Each text once, with the rows that it is about."""
    texts: dict[str, dict[str, None]] = {}
    for row in rows:
        for one in row.explanations:
            evidence = f" (shown by {', '.join(one.evidence)})" if one.evidence else ""
            texts.setdefault(one.text + evidence, {})[row.id] = None
        for assumed in filter(None, (", ".join(entry.observation.assumed) for entry in row.observations)):
            texts.setdefault(f"taken to be alike without being said: {assumed}", {})[row.id] = None
    return {text: list(ids) for text, ids in texts.items()}


def _summary(lines: Sequence[LedgerLine]) -> Iterator[str]:
    """For each method: how many of each verdict, and how far off it was where the change is resolved."""
    judged = [line for line in lines if line.prediction and line.observation]
    if not judged:
        yield "no prediction has an observation yet"
    for method in dict.fromkeys(line.method for line in judged):
        of_method = [line for line in judged if line.method == method]
        counts = Counter(line.verdict for line in of_method)
        off = [abs(line.off) for line in of_method if line.off is not None and line.verdict != "not resolved"]
        far = f"; off by {statistics.median(off):.0%} in the median, {max(off):.0%} at most" if off else ""
        yield f"{method}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}{far}"


def _cells(row: LedgerRow) -> Iterator[list[str]]:
    """A row's lines of the table: its name and its changes stand in the first one."""
    start = [row.id, ", ".join(_change(change) for change in row.changes)]
    lines = ledger_lines(row)
    if not lines:
        yield [*start, "", "neither predicted nor observed yet"]
    for line in lines:
        seen, predicted, (quantity, unit) = line.observation, line.prediction, line.kind
        sides = f"{seen.before:.4g} -> {seen.after:.4g} {unit_text(unit)}, " if seen else NOT_OBSERVED
        of = f": {predicted.of} alone" if predicted and predicted.of else ""
        told = (line.verdict if seen else "") + (", blind" if line.blind else "")
        sides += _value(seen) if seen else ""
        yield [*start, quantity, sides, line.method + of, _value(predicted) if predicted else "",
               line.off_text, told]  # fmt: skip
        start = ["", ""]


def _change(change: KernelChange) -> str:
    by = "" if change.factor is None else f"{change.factor:g}x"
    by = by if change.saved_us is None else f"saves {change.saved_us:g} us a call"
    return " ".join(filter(None, [change.op, change.part, by]))


def _value(of: Prediction | Observation) -> str:
    """`-8 ms (-9..-7)`"""
    parts = [] if of.change is None else [f"{of.change:+.3g} {unit_text(of.unit)}"]
    if of.low is not None or of.high is not None:
        ends = ["" if end is None else f"{end:+.3g}" for end in (of.low, of.high)]
        parts.append(f"({ends[0]}..{ends[1]})")
    return " ".join(parts)
