"""The methods of prediction beside each other, for rows that have more than one: which of them to trust."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from harness.serving.ledger.ledger import Observation, Row
from harness.serving.ledger.residuals import Held, held, resolved

METHODS = {"replay": "replay", "isolated-cold": "cold", "isolated-warm": "warm", "serving-mode": "serving"}
COLUMNS = ["swap", "quantity", "before", "observed", "", *METHODS.values(), "replay is"]


def is_wide(row: Row) -> bool:
    return len({one.prediction.method for one in row.predictions} & METHODS.keys()) > 1


def wide_table(rows: Sequence[Row]) -> str:
    """A line for each row and quantity, a column for each method with its error as a part of the observed
    change, then how far off each method was."""
    lines = [line for row in rows for line in _lines(row)]
    judged = [one for row in rows for one in held(row)]
    return "\n".join([tabulate(lines, COLUMNS, disable_numparse=True), *errors(judged)])


def _lines(row: Row) -> Iterator[list[str]]:
    judged, name = held(row), row.id
    for quantity in dict.fromkeys(one.prediction.quantity for one in row.predictions):
        seen = next((o.observation for o in row.observations if o.observation.quantity == quantity), None)
        own = {one.method: one for one in judged if one.quantity == quantity}
        written = {
            p.prediction.method: p.prediction for p in row.predictions if p.prediction.quantity == quantity
        }
        before = seen.before if seen else next(iter(written.values())).before
        cells = [_cell(written[m].change, own.get(m), seen) if m in written else "none" for m in METHODS]
        verdict = (
            own["replay"].verdict + (", blind" if own["replay"].blind else "") if "replay" in own else ""
        )
        yield [
            name,
            quantity,
            "" if before is None else f"{before:.4g} ms",
            *_observed(seen),
            *cells,
            verdict,
        ]
        name = ""


def _observed(seen: Observation | None) -> tuple[str, str]:
    if seen is None:
        return "not observed yet", ""
    interval = "" if seen.low is None or seen.high is None else f" ({seen.low:+.3g}..{seen.high:+.3g})"
    return f"{seen.change:+.3g} ms{interval}", f"{seen.change / seen.before:+.1%}" if seen.before else ""


def _cell(change: float | None, one: Held | None, seen: Observation | None) -> str:
    if change is None:
        return "none"
    off = seen is not None and resolved(seen) and one is not None and one.relative is not None
    return f"{change:+.3g}" + (f" ({-one.relative:+.0%})" if off else "")  # type: ignore[union-attr, operator]


def errors(judged: Sequence[Held]) -> Iterator[str]:
    """A line for each method: over what was resolved, the median and the largest part by which its prediction
    was off the observed change."""
    for method, name in METHODS.items():
        own = [
            one
            for one in judged
            if one.method == method and one.verdict != "not resolved" and one.relative is not None
        ]
        if own:
            off = sorted(abs(one.relative) for one in own)
            worst = max(own, key=lambda one: abs(one.relative))
            yield (
                f"{name}: off by {statistics.median(off):.0%} in the median of {len(own)}, "
                f"at worst {off[-1]:.0%} ({worst.row}, {worst.quantity})"
            )
