"""Section of a ledger: what was predicted of each change beside what was observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import altair as alt

from harness.page.document import Chart, Number, PageSection, anchor, table
from harness.page.serving import shared
from harness.page.style import colour_by, scale_of, tooltips
from harness.report.text import grouped, ranged
from harness.serving.ledger import LedgerLine, LedgerRow, explanations, ledger_lines, unit_text

READING = (
    "Circles are predicted changes, diamonds are observed ones, each with its 90 % interval where it has two "
    "ends. Where both intervals meet the prediction explains the observation. A change left of the dashed "
    "line is a decrease."
)
CHANGE = ("change", "low", "high")
"""The fields of a predicted or observed change: its value, and the ends of its interval."""
COLOURS = {"predicted": shared.PREDICTED, "observed": shared.OBSERVED}
SHAPES = {"predicted": "circle", "observed": "diamond"}
APART = 5  # pixels of a mark from the middle of its line
PLOT = shared.WIDTH - 110  # pixels of a plot's width, beside which the verdicts stand


def ledger_section(rows: Sequence[LedgerRow], title: str) -> PageSection:
    """A chart and a table for each quantity and unit, and what explains the rows."""
    names = shared.distinct([row.id for row in rows])
    rows = [row.model_copy(update={"id": name}) for row, name in zip(rows, names, strict=True)]
    lines = [line for row in rows for line in ledger_lines(row)]
    empty = [row.id for row in rows if not ledger_lines(row)]
    kinds = grouped(lines, lambda line: (line.quantity, line.unit))
    notes = [(", ".join(ids), text) for text, ids in explanations(rows).items()]
    return PageSection(
        anchor=anchor("ledger", title),
        title=title,
        headline=_headline(lines),
        charts=[_chart(of_kind, title) for of_kind in kinds.values()],
        notes=[*notes, *((name, "nothing predicted, nothing observed") for name in empty)],
    )


def _headline(lines: Sequence[LedgerLine]) -> str:
    """How many lines of each verdict, by method."""
    parts = []
    for method in dict.fromkeys(line.method for line in lines):
        counts = Counter(line.verdict for line in lines if line.method == method)
        counted = [f"{counts[verdict]} {verdict}" for verdict in shared.VERDICT_COLOURS if counts[verdict]]
        parts.append(f"{method}: {', '.join(counted)}")
    return "; ".join(parts) + "." if parts else "Nothing was predicted or observed."


def _chart(lines: Sequence[LedgerLine], title: str) -> Chart:
    """The chart of lines of one kind."""
    quantity, unit = lines[0].quantity, unit_text(lines[0].unit)
    names = []
    for line in lines:
        part = f": {line.prediction.of} alone" if line.prediction and line.prediction.of else ""
        names.append(f"{line.row}, {line.method}{part}")
    named = list(zip(shared.distinct(names), lines, strict=True))
    marks = [mark for name, line in named for mark in _marks(name, line)]
    rows = [_row(name, line) for name, line in named]
    columns: dict[str, str | Number] = {"row, method": "name"}
    for change in (f"{side} {end}" for side in COLOURS for end in CHANGE):
        columns[f"{change}, {unit}"] = (change, shared.digits("+.5g"))
    columns[f"before, {unit}"] = ("before", shared.digits())
    columns |= {"off by": ("off", "off_text"), "verdict": "verdict", "blind": "blind"}
    return Chart(
        anchor("ledger", title, quantity, unit),
        f"{quantity}, {unit}: predicted and observed change",
        READING,
        _picture(marks, quantity, unit),
        table(rows, columns),
        sum(mark[part] is not None for mark in marks for part in ("value", "from")),
    )


def _row(name: str, line: LedgerLine) -> dict[str, Any]:
    """A row of the table below the chart."""
    predicted, observed = line.prediction, line.observation
    row: dict[str, Any] = {"name": name}
    for end in CHANGE:
        row[f"predicted {end}"] = getattr(predicted, end, None)
        row[f"observed {end}"] = getattr(observed, end, None)
    is_blind = "yes" if line.blind else "no"
    return row | {
        "before": observed.before if observed else None,
        "off": line.off,
        "off_text": line.off_text if line.off is None else f"{line.off:+.1%}",
        "verdict": line.verdict,
        "blind": is_blind if predicted and observed else "",
    }


def _marks(name: str, line: LedgerLine) -> list[dict[str, Any]]:
    """The data of a line's prediction and of its observation, where it has them."""
    unit = unit_text(line.unit)
    marks: list[dict[str, Any]] = []
    for side, record in (("predicted", line.prediction), ("observed", line.observation)):
        if record is None:
            continue
        text = f"{ranged(record.change, record.low, record.high)} {unit}"
        low, high = record.low, record.high
        if low is None or high is None:
            low = high = None
        marks.append({
            "line": name, "side": side, "value": record.change, "from": low, "to": high, "text": text,
            "verdict": f"{line.verdict}, blind" if line.blind else line.verdict,
            "colour": shared.VERDICT_COLOURS[line.verdict],
            "aria": f"{name}, {side}: {text}, {line.verdict}",
            "beside": "" if marks else line.verdict,  # once for both
        })  # fmt: skip
    return marks


def _picture(marks: Sequence[dict[str, Any]], quantity: str, unit: str) -> alt.TopLevelMixin:
    """A place for each line of the ledger; its prediction lies above its observation."""
    title = f"change of {quantity}, {unit}"
    base = alt.Chart({"values": list(marks)}).encode(y=shared.names_axis("line"))
    of_side = base.encode(
        color=colour_by("side", COLOURS),
        tooltip=tooltips(line="row, method", side="shown", text="change", verdict="verdict"),
    )
    offset = alt.ExprRef(f"datum.side == 'predicted' ? -{APART} : {APART}")
    return alt.layer(
        shared.zero_line(),
        of_side.mark_rule(strokeWidth=2, yOffset=offset).encode(x=alt.X("from:Q", title=title), x2="to:Q"),
        of_side.mark_point(filled=True, size=60, opacity=1, yOffset=offset).encode(
            x=alt.X("value:Q", title=title),
            shape=alt.Shape("side:N", scale=scale_of(SHAPES), title=None),
            description="aria:N",
        ),
        base.mark_text(align="left", fontWeight="bold", aria=False).encode(
            x=alt.value(PLOT + 8), text="beside:N", color=alt.Color("colour:N", scale=None)
        ),
    ).properties(width=PLOT, height=alt.Step(24))
