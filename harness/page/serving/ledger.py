"""Section of a ledger: what was predicted of each change beside what was observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import altair as alt

from harness.page.document import Chart, Columns, PageSection, anchor, table
from harness.page.serving import shared
from harness.page.style import coded, coloured, tips
from harness.report.text import ranged
from harness.serving.ledger import LedgerLine, LedgerRow, explanations, ledger_lines, unit_text

READING = (
    "Circles are predicted changes, diamonds are observed ones, each with its 90 % interval where it has two "
    "ends. Where both intervals meet the prediction explains the observation. A change left of the dashed "
    "line is a decrease."
)
COLOURS = {"predicted": shared.PREDICTED, "observed": shared.OBSERVED}
SHAPES = {"predicted": "circle", "observed": "diamond"}
APART, PLOT = 5, shared.WIDTH - 110  # pixels: a mark from the middle of its line; a plot without its verdicts


def ledger_section(rows: Sequence[LedgerRow], title: str) -> PageSection:
    """A chart and a table for each quantity and unit, and what explains the rows."""
    names = shared.distinct([row.id for row in rows])
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
        told = [f"{counts[verdict]} {verdict}" for verdict in shared.VERDICT_COLOURS if counts[verdict]]
        parts.append(f"{method}: {', '.join(told)}")
    return "; ".join(parts) + "." if parts else "Nothing was predicted or observed."


def _chart(lines: Sequence[LedgerLine], title: str) -> Chart:
    quantity, unit = lines[0].kind[0], unit_text(lines[0].kind[1])
    of = [line.prediction.of if line.prediction else "" for line in lines]
    methods = [line.method + (f": {op} alone" if op else "") for line, op in zip(lines, of, strict=True)]
    names = shared.distinct([f"{line.row}, {method}" for line, method in zip(lines, methods, strict=True)])
    marks = [mark for name, line in zip(names, lines, strict=True) for mark in _marks(name, line)]
    rows = [_row(name, line) for name, line in zip(names, lines, strict=True)]
    columns: Columns = {
        "row, method": "name",
        **{
            f"{side} {of}, {unit}": (f"{side} {of}", shared.digits("+.5g"))
            for side in COLOURS
            for of in ("change", "low", "high")
        },
        f"before, {unit}": ("before", shared.digits()),
        "off by": ("off", "off_text"),
        "verdict": "verdict",
        "blind": "blind",
    }
    return Chart(
        anchor("ledger", title, quantity, unit),
        f"{quantity}, {unit}: predicted and observed change",
        READING,
        _picture(marks, quantity, unit),
        table(rows, columns),
        sum((mark["value"] is not None) + (mark["from"] is not None) for mark in marks),
    )


def _row(name: str, line: LedgerLine) -> dict[str, Any]:
    seen = line.observation
    sides = {"predicted": line.prediction, "observed": seen}
    return {
        "name": name,
        **{
            f"{side} {of}": getattr(record, of, None)
            for side, record in sides.items()
            for of in ("change", "low", "high")
        },
        "before": seen and seen.before,
        "off": line.off,
        "off_text": shared.digits("+.1%")(line.off) or line.off_text,  # in its unit
        "verdict": line.verdict,
        "blind": ("yes" if line.blind else "no") if seen and line.prediction else "",
    }


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
                "colour": shared.VERDICT_COLOURS[line.verdict],
                "aria": f"{name}, {side}: {text}, {line.verdict}",
                "beside": "" if marks else line.verdict,
            }
        )
    return marks


def _picture(marks: Sequence[dict[str, Any]], quantity: str, unit: str) -> alt.TopLevelMixin:
    """A place for each line of the ledger; its prediction lies above its observation."""
    title = f"change of {quantity}, {unit}"
    base = alt.Chart({"values": list(marks)}).encode(y=shared.names_axis("line"))
    of_side = base.encode(
        color=coloured("side", COLOURS),
        tooltip=tips(line="row, method", side="shown", text="change", verdict="verdict"),
    )
    offset = alt.ExprRef(f"datum.side == 'predicted' ? -{APART} : {APART}")
    return alt.layer(
        shared.zero_line(),
        of_side.mark_rule(strokeWidth=2, yOffset=offset).encode(x=alt.X("from:Q", title=title), x2="to:Q"),
        of_side.mark_point(filled=True, size=60, opacity=1, yOffset=offset).encode(
            x=alt.X("value:Q", title=title),
            shape=alt.Shape("side:N", scale=coded(SHAPES), title=None),
            description="aria:N",
        ),
        base.mark_text(align="left", fontWeight="bold", aria=False).encode(
            x=alt.value(PLOT + 8), text="beside:N", color=alt.Color("colour:N", scale=None)
        ),
    ).properties(width=PLOT, height=alt.Step(24))
