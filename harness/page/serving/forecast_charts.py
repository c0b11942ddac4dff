"""Charts of a forecast: where a token's time goes, quantities by concurrency, what a target needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.page.serving.colours import AFTER, BEFORE, TARGET, op_colours
from harness.page.serving.forecast_document import ForecastNeed, ForecastWorkload
from harness.page.serving.marks import LABEL, WIDTH, ranged, records

if TYPE_CHECKING:
    import altair

IN_DECODE, IN_STALL = "decode step", "stall by other requests' prefills"
REACHED, OUT_OF_REACH = "reached already", "not reachable"
SIDE_TEXT = 120  # pixels right of a plot


@dataclass(frozen=True)
class SweepPoint:
    """A quantity at one concurrency; side: before or after the changes. of: what the interval is of."""

    concurrency: int
    side: str
    value: float
    low: float | None
    high: float | None
    of: str


def parts(workloads: Sequence[ForecastWorkload]) -> altair.TopLevelMixin:
    """A bar for each concurrency, of which each kernel is a segment."""
    import altair as alt

    marks = list(part_marks(workloads))
    classes = op_colours([mark["class"] for mark in marks])
    for mark in marks:
        mark["order"] = classes[0].index(mark["class"]) + (1000 if mark["phase"] == IN_STALL else 0)
    legend = alt.Legend(title=None, orient="bottom", columns=5, symbolOpacity=1)
    return (
        alt.Chart(records(marks))
        .mark_bar(stroke="#ffffff", strokeWidth=0.5)
        .encode(
            x=alt.X("ms:Q", stack="zero", axis=alt.Axis(title="of TPOT, ms"), scale=alt.Scale(zero=True)),
            y=alt.Y("concurrency:O", axis=alt.Axis(title="concurrency, requests")),
            color=alt.Color("class:N", scale=alt.Scale(domain=classes[0], range=classes[1]), legend=legend),
            opacity=alt.Opacity(
                "phase:N",
                scale=alt.Scale(domain=[IN_DECODE, IN_STALL], range=[1.0, 0.45]),
                legend=alt.Legend(title=None, orient="top", symbolFillColor="#555555"),
            ),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("kernel:N"),
                alt.Tooltip("class:N", title="op class"),
                alt.Tooltip("phase:N", title="in"),
                alt.Tooltip("ms:Q", title="of TPOT, ms", format=".4f"),
                alt.Tooltip("share:N", title="share of TPOT, in all"),
                alt.Tooltip("calls:Q", title="calls a step"),
                alt.Tooltip("origin:N", title="time from"),
                alt.Tooltip("concurrency:O", title="concurrency, requests"),
            ],
            description=alt.Description("aria:N"),
        )
        .properties(width=WIDTH, height=alt.Step(34))
    )


def part_marks(workloads: Sequence[ForecastWorkload]) -> Iterator[dict[str, Any]]:
    """Of each kernel its milliseconds in decode steps, and in stalls; none of those that take no time."""
    for workload in workloads:
        for term in workload.shares:
            for phase, ms in ((IN_DECODE, term.decode_ms), (IN_STALL, term.stall_ms)):
                if ms:
                    yield {
                        "concurrency": workload.load.concurrency,
                        "kernel": term.name,
                        "class": term.op_class,
                        "phase": phase,
                        "ms": ms,
                        "share": ranged(term.share.value, term.share.low, term.share.high, ".1%"),
                        "calls": term.calls,
                        "origin": term.origin,
                        "aria": f"{term.name}, {phase}, concurrency {workload.load.concurrency}: {ms:.4g} ms",
                    }


def sweep(points: Sequence[SweepPoint], name: str, unit: str, target: float | None) -> altair.TopLevelMixin:
    """A quantity against the concurrency, before and after a change, each with its band. target: a line."""
    import altair as alt

    marks = [
        {
            "concurrency": point.concurrency,
            "side": point.side,
            "value": point.value,
            "low": point.low,
            "high": point.high,
            "text": ranged(point.value, point.low, point.high, ".5g"),
            "of": point.of,
            "aria": f"{name} {point.side}, concurrency {point.concurrency}: {point.value:.4g} {unit}",
        }
        for point in points
    ]
    places = sorted({point.concurrency for point in points})
    sides = list(dict.fromkeys(point.side for point in points))
    scale = alt.Scale(type="log", base=2, domain=[places[0] / 1.15, places[-1] * 1.15], nice=False)
    axis = alt.Axis(title="concurrency, requests", values=places, format="d", grid=False)
    colour = alt.Color(
        "side:N",
        scale=alt.Scale(domain=sides, range=[BEFORE, AFTER][: len(sides)]),
        legend=alt.Legend(title=None, orient="top", symbolOpacity=1),
    )
    tooltip = [
        alt.Tooltip("side:N", title="shown"),
        alt.Tooltip("concurrency:Q", title="concurrency, requests"),
        alt.Tooltip("text:N", title=f"{name}, {unit} (90 %)"),
        alt.Tooltip("of:N", title="interval of"),
    ]
    base = alt.Chart(records(marks)).encode(x=alt.X("concurrency:Q", scale=scale, axis=axis), color=colour)
    y_axis = alt.Axis(title=f"{name}, {unit}")
    y_scale = alt.Scale(zero=True)
    ends = base.encode(y=alt.Y("low:Q", axis=y_axis, scale=y_scale), y2="high:Q")
    layers: list[Any] = [
        ends.mark_area(opacity=0.18, line=False),
        ends.mark_rule(strokeWidth=2, opacity=0.7),
        base.mark_line().encode(y=alt.Y("value:Q", axis=y_axis, scale=y_scale)),
        base.mark_point(filled=True, size=70, opacity=1).encode(
            y=alt.Y("value:Q", axis=y_axis, scale=y_scale),
            shape=alt.Shape(
                "side:N",
                scale=alt.Scale(domain=sides, range=["circle", "square"][: len(sides)]),
                legend=alt.Legend(title=None, orient="top", symbolOpacity=1),
            ),
            tooltip=tooltip,
            description=alt.Description("aria:N"),
        ),
    ]
    if target is not None:
        line = alt.Chart(records([{"target": target, "text": f"target, {target:g} {unit}"}]))
        layers.append(line.mark_rule(strokeDash=[6, 4], color=TARGET).encode(y="target:Q"))
        layers.append(
            line.mark_text(align="left", dx=4, dy=-6, color=TARGET).encode(
                x=alt.value(0), y="target:Q", text="text:N"
            )
        )
    return alt.layer(*layers).properties(width=WIDTH, height=300)


def needs(workloads: Sequence[ForecastWorkload], target: float | None) -> altair.TopLevelMixin:
    """Of each op TPOT now and TPOT were the op free, beside the target."""
    import altair as alt

    marks = [
        {
            "concurrency": workload.load.concurrency,
            "place": f"concurrency {workload.load.concurrency}",
            "op": op_name(need),
            "now": workload.tpot.value,
            "free": need.limit_ms,
            "target": target,
            "answer": answer(need, target),
            "colour": TARGET if target is not None and need.factor is None else "#009E73",
            "most": f"{need.most_ms:.4g} ms, {need.share:.1%} of TPOT",
            "aria": f"{op_name(need)} at concurrency {workload.load.concurrency}: {answer(need, target)}",
        }
        for workload in workloads
        for need in workload.needs
    ]
    tooltip: list[Any] = [
        alt.Tooltip("op:N"),
        alt.Tooltip("concurrency:Q", title="concurrency, requests"),
        alt.Tooltip("now:Q", title="TPOT, ms", format=".4f"),
        alt.Tooltip("free:Q", title="TPOT were it free, ms", format=".4f"),
        alt.Tooltip("most:N", title="most it can give"),
        alt.Tooltip("answer:N", title="speedup needed"),
    ]
    base = alt.Chart().encode(y=alt.Y("op:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABEL)))
    axis = alt.Axis(title="TPOT, ms")
    scale = alt.Scale(zero=True)
    free = alt.X("free:Q", axis=axis, scale=scale)
    layers: list[Any] = [
        base.mark_rule(strokeWidth=3, color=AFTER, opacity=0.5).encode(x=free, x2="now:Q"),
        base.mark_point(filled=True, size=60, shape="diamond", color=AFTER, opacity=1).encode(
            x=free, tooltip=tooltip, description=alt.Description("aria:N")
        ),
        base.mark_tick(color=BEFORE, thickness=3, size=14).encode(
            x=alt.X("now:Q", axis=axis, scale=scale), tooltip=tooltip
        ),
    ]
    width = WIDTH - SIDE_TEXT
    if target is not None:
        layers.append(
            alt.Chart().mark_rule(color=TARGET, strokeDash=[6, 4]).encode(x=alt.X("target:Q", scale=scale))
        )
        layers.append(
            base.mark_text(align="left", fontWeight="bold").encode(
                x=alt.value(width + 8), text="answer:N", color=alt.Color("colour:N", scale=None)
            )
        )
    in_order = alt.EncodingSortField(field="concurrency", op="min", order="ascending")
    return (
        alt.layer(*layers)
        .properties(width=width, height=alt.Step(22))
        .facet(data=records(marks), row=alt.Row("place:N", sort=in_order, title=None), spacing=6)
        .resolve_scale(y="independent")
    )


def op_name(need: ForecastNeed) -> str:
    return need.ops[0] if len(need.ops) == 1 else "all of these alike"


def answer(need: ForecastNeed, target: float | None) -> str:
    """The speedup that reaches the target."""
    if target is None:
        return ""
    if need.factor is None:
        return OUT_OF_REACH
    return REACHED if need.factor == 1.0 else f"{need.factor:.3g}x"
