"""Table of the methods of prediction side by side, for rows that have several: which of them to trust."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from harness.report.text import table
from harness.serving.ledger.ledger import LedgerRow, Observation
from harness.serving.ledger.residuals import Residual, residuals, resolved

METHODS = {"replay": "replay", "isolated-cold": "cold", "isolated-warm": "warm", "serving-mode": "serving"}
COLUMNS = ["swap", "quantity", "before", "observed", "", *METHODS.values(), "replay is"]


def is_wide(row: LedgerRow) -> bool:
    return len({entry.prediction.method for entry in row.predictions} & METHODS.keys()) > 1


def wide_table(rows: Sequence[LedgerRow]) -> str:
    """A line for each row and quantity, a column for each method with its error as a part of the observed
    change, then how far off each method was."""
    lines = [line for row in rows for line in _lines(row)]
    all_residuals = [residual for row in rows for residual in residuals(row)]
    return "\n".join([table(lines, COLUMNS), *errors(all_residuals)])


def _lines(row: LedgerRow) -> Iterator[list[str]]:
    judgements, name = residuals(row), row.id
    for quantity in dict.fromkeys(entry.prediction.quantity for entry in row.predictions):
        observed = next((o.observation for o in row.observations if o.observation.quantity == quantity), None)
        by_method = {residual.method: residual for residual in judgements if residual.quantity == quantity}
        written = {
            p.prediction.method: p.prediction for p in row.predictions if p.prediction.quantity == quantity
        }
        before = observed.before if observed else next(iter(written.values())).before
        cells = [
            _cell(written[m].change, by_method.get(m), observed) if m in written else "none" for m in METHODS
        ]
        verdict = (
            by_method["replay"].verdict + (", blind" if by_method["replay"].blind else "")
            if "replay" in by_method
            else ""
        )
        yield [
            name,
            quantity,
            "" if before is None else f"{before:.4g} ms",
            *_observed(observed),
            *cells,
            verdict,
        ]
        name = ""


def _observed(observed: Observation | None) -> tuple[str, str]:
    if observed is None:
        return "not observed yet", ""
    interval = (
        ""
        if observed.low is None or observed.high is None
        else f" ({observed.low:+.3g}..{observed.high:+.3g})"
    )
    return (
        f"{observed.change:+.3g} ms{interval}",
        f"{observed.change / observed.before:+.1%}" if observed.before else "",
    )


def _cell(change: float | None, residual: Residual | None, observed: Observation | None) -> str:
    if change is None:
        return "none"
    if observed is None or residual is None or residual.relative is None or not resolved(observed):
        return f"{change:+.3g}"
    return f"{change:+.3g} ({-residual.relative:+.0%})"


def errors(all_residuals: Sequence[Residual]) -> Iterator[str]:
    """A line for each method: over what was resolved, the median and the largest part by which its prediction
    was off the observed change."""
    for method, name in METHODS.items():
        of_method = [
            (abs(residual.relative), residual)
            for residual in all_residuals
            if residual.method == method
            and residual.verdict != "not resolved"
            and residual.relative is not None
        ]
        if of_method:
            median = statistics.median(off for off, _ in of_method)
            off, worst = max(of_method, key=lambda pair: pair[0])
            yield (
                f"{name}: off by {median:.0%} in the median of {len(of_method)}, "
                f"at worst {off:.0%} ({worst.row}, {worst.quantity})"
            )
