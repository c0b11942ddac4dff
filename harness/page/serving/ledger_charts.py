"""Charts of a ledger: predicted beside observed changes, and how far off each method was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.page.serving.colours import OBSERVED, PREDICTED, VERDICT_COLOURS
from harness.page.serving.ledger_lines import LedgerLine
from harness.page.serving.marks import LABEL, WIDTH, ranged, records
from harness.serving.ledger.residuals import TOLERANCE

if TYPE_CHECKING:
    import altair

SIDES = {
    "predicted": ("circle", PREDICTED),
    "observed": ("diamond", OBSERVED),
    "bound, at least": ("triangle-right", PREDICTED),
    "bound, at most": ("triangle-left", PREDICTED),
}
"""Of each kind of point its shape and its colour: a bound with one end only points to where it is open."""
VERDICT_TEXT = 110  # pixels right of a plot
STEP, APART = 24, 5


def forest(lines: Sequence[LedgerLine], quantity: str, unit: str) -> altair.TopLevelMixin:
    """Of lines of one quantity and unit: rows below each other, a line for each method."""
    import altair as alt

    tooltip: list[Any] = [
        alt.Tooltip("row:N", title="row"),
        alt.Tooltip("line:N", title="method"),
        alt.Tooltip("side:N", title="shown"),
        alt.Tooltip("text:N", title=f"change, {unit}"),
        alt.Tooltip("predicted_text:N", title=f"predicted, {unit}"),
        alt.Tooltip("observed_text:N", title=f"observed, {unit}"),
        alt.Tooltip("runs:N", title=f"before and after, {unit}"),
        alt.Tooltip("off:N", title="residual"),
        alt.Tooltip("verdict:N", title="verdict"),
    ]
    order = {name: number for number, name in enumerate(dict.fromkeys(line.row for line in lines))}
    marks = [mark | {"order": order[line.row]} for line in lines for mark in _marks(line)]
    in_order = alt.EncodingSortField(field="order", op="min", order="ascending")
    sides = [side for side in SIDES if any(mark["side"] == side for mark in marks)] or ["predicted"]
    scale = alt.Scale(domain=sides, range=[SIDES[side][1] for side in sides])
    shape = alt.Scale(domain=sides, range=[SIDES[side][0] for side in sides])
    base = alt.Chart().encode(y=alt.Y("line:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABEL)))
    axis = alt.Axis(title=f"change of {quantity}, {unit}", grid=True)
    x = alt.X("value:Q", axis=axis, scale=alt.Scale(zero=True))
    colour = alt.Color("side:N", scale=scale, legend=alt.Legend(title=None, orient="top"))
    of_side = base.encode(color=colour, tooltip=tooltip)
    offset = alt.ExprRef(f"datum.upper ? -{APART} : {APART}")
    width = WIDTH - VERDICT_TEXT
    # What a mark lacks is null in its row: filters would give each layer an order of lines of its own.
    layers: list[Any] = [
        alt.Chart().mark_rule(strokeDash=[3, 3], color="#888888").encode(x=alt.datum(0)),
        of_side.mark_rule(strokeWidth=2, yOffset=offset).encode(x=alt.X("from:Q", axis=axis), x2="to:Q"),
        of_side.mark_point(filled=True, size=60, opacity=1, yOffset=offset).encode(
            x=x,
            shape=alt.Shape("side:N", scale=shape, legend=alt.Legend(title=None, orient="top")),
            description=alt.Description("aria:N"),
        ),
        base.mark_text(align="left", fontWeight="bold", aria=False).encode(
            x=alt.value(width + 8), text="beside:N", color=alt.Color("colour:N", scale=None)
        ),
    ]
    return (
        alt.layer(*layers)
        .properties(width=width, height=alt.Step(STEP))
        .facet(data=records(marks), row=alt.Row("row:N", sort=in_order, title=None), spacing=6)
        .resolve_scale(y="independent")
    )


def forest_marks(lines: Sequence[LedgerLine]) -> int:
    """Points and intervals."""
    return sum((m["value"] is not None) + (m["from"] is not None) for line in lines for m in _marks(line))


def _marks(line: LedgerLine) -> list[dict[str, Any]]:
    """What is drawn of a line: its prediction, and its observation."""
    seen = line.observation
    predicted = ranged(line.predicted, line.low, line.high)
    observed = "" if seen is None else ranged(seen.change, seen.low, seen.high)
    relative = "" if line.relative is None else f" ({line.relative:+.1%} of the observed)"
    about: dict[str, Any] = {
        "row": line.row,
        "line": line.line,
        "predicted_text": predicted or "nothing",
        "observed_text": observed or "not yet",
        "runs": "" if seen is None else f"{seen.before:.5g} to {seen.after:.5g}",
        "off": "" if line.residual is None else f"{line.residual:+.4g} {line.unit}{relative}",
        "verdict": line.verdict + {True: ", blind", False: "", None: ""}[line.blind],
        "colour": VERDICT_COLOURS.get(line.verdict, VERDICT_COLOURS["not resolved"]),
    }
    sides: list[tuple[bool, str, float | None, float | None, float | None, str]] = []
    if seen is None or line.predicted is not None or line.low is not None or line.high is not None:
        sides.append((True, *_predicted(line), predicted))
    if seen is not None:
        sides.append((False, "observed", seen.change, seen.low, seen.high, observed))
    marks = [
        about
        | {
            "upper": upper,
            "side": side,
            "value": value,
            "low": low,
            "high": high,
            "from": None if high is None else low,
            "to": None if low is None else high,
            "text": text,
            "aria": f"{line.row}, {line.line}, {side}: {text} {line.unit}, {line.verdict}",
            "beside": "",
        }
        for upper, side, value, low, high, text in sides
    ]
    marks[0]["beside"] = about["verdict"]
    return marks


def _predicted(line: LedgerLine) -> tuple[str, float | None, float | None, float | None]:
    """Side, value, low and high: of an interval with one end the end that there is."""
    if line.predicted is not None or (line.low is None) == (line.high is None):
        return "predicted", line.predicted, line.low, line.high
    if line.low is not None:
        return "bound, at least", line.low, line.low, None
    return "bound, at most", line.high, None, line.high


def off(lines: Sequence[LedgerLine]) -> altair.TopLevelMixin:
    """Of lines with a relative residual: a mark for each, by method."""
    import altair as alt

    quantities = list(dict.fromkeys(line.quantity for line in lines))
    verdicts = [v for v in VERDICT_COLOURS if any(line.verdict == v for line in lines)]
    marks: list[dict[str, Any]] = [
        {
            "row": line.row,
            "method": line.method,
            "quantity": line.quantity,
            "relative": line.relative,
            "residual": f"{line.residual:+.4g} {line.unit}",
            "verdict": line.verdict,
            "aria": f"{line.row}, {line.line}, {line.quantity}: {line.relative:+.1%}, {line.verdict}",
        }
        for line in lines
    ]
    within = [{"from": -TOLERANCE, "to": TOLERANCE}]
    band = (
        alt.Chart(records(within))
        .mark_rect(color="#888888", opacity=0.15)
        .encode(x=alt.X("from:Q"), x2="to:Q")
    )
    axis = alt.Axis(title="residual: observed less predicted, % of the observed change", format="+.0%")
    points = (
        alt.Chart(records(marks))
        .mark_point(size=70, filled=True, opacity=0.85, stroke="#ffffff", strokeWidth=0.5)
        .encode(
            x=alt.X("relative:Q", axis=axis),
            y=alt.Y("method:N", sort=None, title=None),
            yOffset=alt.YOffset("quantity:N", sort=None),
            color=alt.Color(
                "verdict:N",
                scale=alt.Scale(domain=verdicts, range=[VERDICT_COLOURS[v] for v in verdicts]),
                legend=alt.Legend(title="verdict", orient="top"),
            ),
            shape=alt.Shape(
                "quantity:N",
                scale=alt.Scale(domain=quantities),
                legend=alt.Legend(title="quantity", orient="top"),
            ),
            tooltip=[
                alt.Tooltip("row:N"),
                alt.Tooltip("method:N"),
                alt.Tooltip("quantity:N"),
                alt.Tooltip("relative:Q", format="+.2%", title="residual of the observed"),
                alt.Tooltip("residual:N"),
                alt.Tooltip("verdict:N"),
            ],
            description=alt.Description("aria:N"),
        )
    )
    zero = alt.Chart(records([{"at": 0}])).mark_rule(strokeDash=[3, 3], color="#888888").encode(x="at:Q")
    return alt.layer(band, zero, points).properties(width=WIDTH, height=alt.Step(16))
