"""Rows of ledgers as text and as JSON: what was predicted, what was observed, and what explains it."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from harness.report.text import table
from harness.serving.ledger.ledger import LedgerRow
from harness.serving.ledger.methods_table import is_wide, wide_table
from harness.serving.ledger.prediction import KernelChange, unit_text
from harness.serving.ledger.residuals import Residual, residuals

COLUMNS = ["row", "change", "quantity", "observed", "method", "predicted", "residual", "", "verdict"]
EXPLAINED = """
residual: observed less predicted change, and as a part of the observed one. In a column of a method: its
predicted change, and by what part of the observed one it was off. explained: the 90 % intervals meet, or,
where neither has one, the residual is within 15 %. not resolved: the observation does not tell the change
from none, or it is under 3 % of the value before. blind: the prediction was written down before the
observation. A bound says what one change alone can give at most. x before: times the value before, where only
a ratio was published. lacks: what a publication, or the part of it that was read, does not say, and what the
link would need besides. In the interval: explained by the link."""


def as_json(rows: Sequence[LedgerRow]) -> str:
    documents = [residual.model_dump() for row in rows for residual in residuals(row)]
    return (
        json.dumps({"rows": [row.model_dump() for row in rows], "held": documents}, indent=1, allow_nan=False)
        + "\n"
    )


def as_text(rows: Sequence[LedgerRow]) -> str:
    """A table a ledger, how many of each verdict, and what the columns say."""
    ledgers = dict.fromkeys(row.ledger for row in rows)
    blocks = [_block(ledger, [row for row in rows if row.ledger == ledger]) for ledger in ledgers]
    all_residuals = [residual for row in rows for residual in residuals(row)]
    return "\n".join([*blocks, summary(all_residuals), *published_summary(rows), EXPLAINED])


def _block(ledger: str, rows: Sequence[LedgerRow]) -> str:
    lines = [ledger]
    if wide := [row for row in rows if is_wide(row)]:
        lines.append(wide_table(wide))
    if narrow := [row for row in rows if not is_wide(row)]:
        cells = [line for row in narrow for line in _lines(row)]
        lines.append(table(cells, COLUMNS))
    for text, ids in _explanations(rows).items():
        others = " and others" if len(ids) > 1 else ""
        lines.append(textwrap.fill(f"{ids[0]}{others}: {text}", 120, subsequent_indent="    "))
    return "\n".join(lines) + "\n"


def summary(all_residuals: Sequence[Residual]) -> str:
    """How many of each verdict, by method: the misses are counted like the rest."""
    by_method: dict[str, Counter[str]] = {}
    for residual in all_residuals:
        by_method.setdefault(residual.method, Counter())[residual.verdict] += 1
    lines = [f"{method}: {', '.join(f'{n} {v}' for v, n in c.items())}" for method, c in by_method.items()]
    return "\n".join(lines) or "no prediction has an observation yet"


def published_summary(rows: Sequence[LedgerRow]) -> Iterator[str]:
    """How many published points there are, and what became of their predictions; nothing without any."""
    points = [row for row in rows if row.published]
    if not points:
        return
    of_link = [h for row in points for h in residuals(row) if h.method == "link"]
    bounds = [h for row in points for h in residuals(row) if h.method == "bound"]
    verdicts = Counter(h.verdict for h in [*of_link, *bounds])
    alone = sum(1 for row in points if not row.predictions)
    yield (
        f"published: {len(points)} points of {len({row.ledger for row in points})} publications\n"
        f"  predicted by the link: {len(of_link)}; {verdicts['explained']} in the interval, "
        f"{verdicts['missed']} missed, {verdicts['not resolved']} not resolved\n"
        f"  bounds: {verdicts['bound holds']} hold, {verdicts['bound broken']} broken\n"
        f"  neither: {alone}; what they lack stands below them"
    )


def _explanations(rows: Sequence[LedgerRow]) -> dict[str, list[str]]:
    """Each text once, with the rows that it is about."""
    texts: dict[str, list[str]] = {}
    for row in rows:
        for explanation in row.explanations:
            texts.setdefault(explanation.text, []).append(row.id)
        if row.lacks:
            texts.setdefault(f"lacks {'; '.join(row.lacks)}", []).append(row.id)
        for entry in row.observations:
            if assumed := ", ".join(entry.observation.assumed):
                texts.setdefault(f"taken as alike without being said: {assumed}", []).append(row.id)
    return texts


def _lines(row: LedgerRow) -> Iterator[list[str]]:
    judgements = residuals(row)
    head = [row.id, ", ".join(_change(change) for change in row.changes)]
    if not row.predictions and not row.observations:
        yield [*head, "", "neither predicted nor observed yet"]
    if not row.observations:
        for entry in row.predictions:
            p = entry.prediction
            yield [*head, p.quantity, "not observed yet", p.method, _value(p.change, p.low, p.high, p.unit)]
            head = ["", ""]
    for line in row.observations:
        observed = line.observation
        of_quantity = [h for h in judgements if h.quantity == observed.quantity]
        change = _value(observed.change, observed.low, observed.high, observed.unit)
        numbers = f"{observed.before:g} -> {observed.after:g} {unit_text(observed.unit)}, {change}"
        if not of_quantity:
            yield [*head, observed.quantity, numbers, "none", "", "", "", "no prediction"]
        for number, h in enumerate(of_quantity):
            cells = [observed.quantity, numbers] if number == 0 else ["", ""]
            residual = "" if h.residual is None else f"{h.residual:+.3g} {unit_text(h.unit)}"
            part = "" if h.relative is None else f"{h.relative:+.0%}"
            verdict = h.verdict + (", blind" if h.blind else "")
            yield [
                *head,
                *cells,
                f"{h.method}: {h.of} alone" if h.of else h.method,
                _value(h.predicted, h.low, h.high, h.unit),
                residual,
                part,
                verdict,
            ]
            head = ["", ""]


def _change(change: KernelChange) -> str:
    by = ""
    if change.factor is not None:
        by = f" {change.factor:g}x"
    elif change.saved_us is not None:
        by = f" saves {change.saved_us:g} us a call"
    return " ".join(filter(None, [change.op, change.part])) + by


def _value(value: float | None, low: float | None, high: float | None, unit: str) -> str:
    interval = "" if low is None and high is None else f"({_signed(low)}..{_signed(high)})"
    return " ".join(filter(None, ["" if value is None else f"{value:+.3g} {unit_text(unit)}", interval]))


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3g}"
