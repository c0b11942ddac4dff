"""Section of a ledger: what was predicted of each change beside what was observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.page.document import Chart, PageSection, Table, TableRow, anchor
from harness.page.serving.marks import (
    LABEL,
    OBSERVED,
    PREDICTED,
    VERDICT_COLOURS,
    WIDTH,
    cell,
    distinct,
    records,
)
from harness.report.text import ranged
from harness.serving.ledger import LedgerLine, LedgerRow, explanations, ledger_lines, unit_text

if TYPE_CHECKING:
    import altair

READING = (
    "Circles are predicted changes, diamonds are observed ones, each with its 90 % interval where it has two "
    "ends. Where both intervals meet the prediction explains the observation. A change left of the dashed "
    "line is a decrease."
)
SIDES = {"predicted": ("circle", PREDICTED), "observed": ("diamond", OBSERVED)}
APART, PLOT = 5, WIDTH - 110  # pixels: a mark from the middle of its line; a plot without its verdicts


def ledger_section(rows: Sequence[LedgerRow], title: str) -> PageSection:
    """A chart and a table for each quantity and unit, and what explains the rows."""
    names = distinct([row.id for row in rows])
    rows = [row.model_copy(update={"id": name}) for row, name in zip(rows, names, strict=True)]
    lines = [line for row in rows for line in ledger_lines(row)]
    kinds = dict.fromkeys(line.kind for line in lines)
    empty = [row.id for row in rows if not ledger_lines(row)]
    return PageSection(
        anchor=anchor("ledger", title),
        title=title,
        headline=_headline(lines),
        charts=[_chart([line for line in lines if line.kind == kind], title) for kind in kinds],
        notes=[
            *((", ".join(ids), text) for text, ids in explanations(rows).items()),
            *((name, "nothing predicted, nothing observed") for name in empty),
        ],
    )


def _headline(lines: Sequence[LedgerLine]) -> str:
    """How many lines of each verdict, by method."""
    parts = []
    for method in dict.fromkeys(line.method for line in lines):
        counts = Counter(line.verdict for line in lines if line.method == method)
        told = [f"{counts[verdict]} {verdict}" for verdict in VERDICT_COLOURS if counts[verdict]]
        parts.append(f"{method}: {', '.join(told)}")
    return "; ".join(parts) + "." if parts else "Nothing was predicted or observed."


def _chart(lines: Sequence[LedgerLine], title: str) -> Chart:
    quantity, unit = lines[0].kind[0], unit_text(lines[0].kind[1])
    marks = [mark for name, line in zip(_names(lines), lines, strict=True) for mark in _marks(name, line)]
    return Chart(
        anchor=anchor("ledger", title, quantity, unit),
        title=f"{quantity}, {unit}: predicted and observed change",
        reading=READING,
        picture=_picture(marks, quantity, unit),
        table=_table(lines, unit),
        marks=sum((mark["value"] is not None) + (mark["from"] is not None) for mark in marks),
    )


def _names(lines: Sequence[LedgerLine]) -> list[str]:
    of = [line.prediction.of if line.prediction else "" for line in lines]
    methods = [line.method + (f": {op} alone" if op else "") for line, op in zip(lines, of, strict=True)]
    return distinct([f"{line.row}, {method}" for line, method in zip(lines, methods, strict=True)])


def _marks(name: str, line: LedgerLine) -> list[dict[str, Any]]:
    """The data of a line's prediction and of its observation, as far as there are such."""
    unit = unit_text(line.kind[1])
    marks: list[dict[str, Any]] = []
    for side, record in (("predicted", line.prediction), ("observed", line.observation)):
        if record is None:
            continue
        text = f"{ranged(record.change, record.low, record.high)} {unit}"
        whole = record.low is not None and record.high is not None
        marks.append(
            {
                "line": name,
                "side": side,
                "value": record.change,
                "from": record.low if whole else None,
                "to": record.high if whole else None,
                "text": text,
                "verdict": line.verdict + (", blind" if line.blind else ""),
                "colour": VERDICT_COLOURS[line.verdict],
                "aria": f"{name}, {side}: {text}, {line.verdict}",
                "beside": "" if marks else line.verdict,
            }
        )
    return marks


def _picture(marks: Sequence[dict[str, Any]], quantity: str, unit: str) -> altair.TopLevelMixin:
    """A place for each line of the ledger; its prediction lies above its observation."""
    import altair as alt

    sides = list(SIDES)
    colour = alt.Scale(domain=sides, range=[SIDES[side][1] for side in sides])
    shape = alt.Scale(domain=sides, range=[SIDES[side][0] for side in sides])
    legend = alt.Legend(title=None, orient="top")
    axis = alt.Axis(title=f"change of {quantity}, {unit}", grid=True)
    tooltip = [
        alt.Tooltip("line:N", title="row, method"),
        alt.Tooltip("side:N", title="shown"),
        alt.Tooltip("text:N", title="change"),
        alt.Tooltip("verdict:N", title="verdict"),
    ]
    base = alt.Chart(records(marks)).encode(
        y=alt.Y("line:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABEL))
    )
    of_side = base.encode(color=alt.Color("side:N", scale=colour, legend=legend), tooltip=tooltip)
    offset = alt.ExprRef(f"datum.side == 'predicted' ? -{APART} : {APART}")
    layers: list[Any] = [
        alt.Chart(records([{"at": 0}])).mark_rule(strokeDash=[3, 3], color="#888888").encode(x="at:Q"),
        of_side.mark_rule(strokeWidth=2, yOffset=offset).encode(x=alt.X("from:Q", axis=axis), x2="to:Q"),
        of_side.mark_point(filled=True, size=60, opacity=1, yOffset=offset).encode(
            x=alt.X("value:Q", axis=axis),
            shape=alt.Shape("side:N", scale=shape, legend=legend),
            description=alt.Description("aria:N"),
        ),
        base.mark_text(align="left", fontWeight="bold", aria=False).encode(
            x=alt.value(PLOT + 8), text="beside:N", color=alt.Color("colour:N", scale=None)
        ),
    ]
    return alt.layer(*layers).properties(width=PLOT, height=alt.Step(24))


def _table(lines: Sequence[LedgerLine], unit: str) -> Table:
    sides = ("predicted", "observed")
    numeric = [f"{side} {name}, {unit}" for side in sides for name in ("change", "low", "high")]
    columns = ["row, method", *numeric, f"before, {unit}", "off by", "verdict", "blind"]
    rows = []
    for name, line in zip(_names(lines), lines, strict=True):
        seen = line.observation
        values = [(r.change, r.low, r.high) if r else (None,) * 3 for r in (line.prediction, seen)]
        cells = [cell(value, "+.5g") for of_side in values for value in of_side]
        before = cell(seen.before if seen else None)
        blind = ("yes" if line.blind else "no") if seen and line.prediction else ""
        off = cell(line.off, "+.1%") or line.off_text  # in its unit
        rows.append(TableRow([name, *cells, before, off, line.verdict, blind]))
    return Table(columns, rows, frozenset({*numeric, f"before, {unit}", "off by"}))
