"""Charts of times over a size, such as batch, context or tokens; and of the fastest row of each case."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from functools import partial
from typing import Any

import altair as alt

from harness.page import style
from harness.page.case import (
    FAR,
    MeasuredCase,
    add_times_in_unit,
    four_digits,
    interval_ends,
    not_shown,
    shared_sizes,
    short_keys,
    shown_rows,
    slow_rows,
    verdict_text,
)
from harness.page.document import Chart, Columns, anchor, table
from harness.report.notes import apart
from harness.report.rows import device
from harness.report.text import grouped, microseconds, short_ratio, significant
from shapes.case import text_of

LOAD_SIZES = ("batch", "tokens", "m", "new", "ctx")  # the sizes that grow with the load of a server
UNDECIDED = "indistinguishable"
"""Stands for the provider of a fastest row that is not known to be faster than the second."""
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")


def sweep_charts(cases: Sequence[MeasuredCase]) -> Iterator[Chart]:
    """Yields a chart for every size that varies while the other sizes, the boundary and the run do not."""
    for size in dict.fromkeys(name for case in cases for name in case.planned.sizes):
        with_size = [case for case in cases if isinstance(case.planned.sizes.get(size), int)]
        for fixed, group in grouped(with_size, partial(_fixed, size)).items():
            if len({case.planned.sizes[size] for case in group}) > 1:
                group.sort(key=lambda case: case.planned.sizes[size])
                if chart := _sweep(size, fixed, group):
                    yield chart


def _fixed(size: str, case: MeasuredCase) -> str:
    """What all cases of a sweep over the size have in common, as text."""
    other_sizes = {name: value for name, value in case.planned.sizes.items() if name != size}
    return ", ".join(filter(None, [text_of(other_sizes), case.planned.boundary, case.label]))


def _sweep(size: str, fixed: str, cases: Sequence[MeasuredCase]) -> Chart | None:
    """A chart of times over a size; None where nothing has a time. The cases differ in the size alone and are
    ordered by it. fixed: what they have in common, as text"""
    points = [point for case in cases for point in _points(size, case, shown_rows(cases))]
    if not points:
        return None
    unit_name, time_columns = add_times_in_unit(points)
    columns: Columns = {
        size: ("x", str), "implementation": "name", **time_columns, "vs fastest": ("ratio", significant),
        "vs baseline": ("speedup", "vs_baseline"), "verdict": "verdict",
        "% of limit": ("share", "share_text"),
    }  # fmt: skip
    op = cases[0].planned.op
    on = f"{op} {fixed}, {device(cases[0].run)}"
    return Chart(
        anchor("time-over", op, size, fixed), f"Time over {size} at {fixed}",
        "The time of a call as a multiple of the fastest at that size; below the picture choose the time "
        "itself, or its share of the limit. Bands are intervals, axes are logarithmic. Point at a row to "
        "see it alone." + not_shown(points) + _devices(cases),
        _lines(size, points, unit_name), table(points, columns), marks=len(points),
        about=f"Multiples of the fastest at each size. {on}. {slow_rows(points)}",
    )  # fmt: skip


def _points(size: str, case: MeasuredCase, shown_names: Container[str]) -> Iterator[dict[str, Any]]:
    """Yields the data of each row with a time."""
    for row in case.rows:
        cell = row.cell
        if cell.time_us and (fastest_us := case.timed[0].time_us):
            low_us, high_us = interval_ends(cell.time_us, cell.low_us, cell.high_us)
            ratio = cell.time_us / fastest_us
            yield {
                "x": case.planned.sizes[size], "name": cell.name, "provider": style.provider(cell.name),
                "shown": cell.name in shown_names and ratio <= FAR,
                "ratio": ratio, "ratio_low": low_us / fastest_us, "ratio_high": high_us / fastest_us,
                "vs_fastest": f"{ratio:.3g}x", "time_us": cell.time_us, "low_us": low_us, "high_us": high_us,
                "text": microseconds(cell.time_us), "speedup": row.verdict.ratio if row.verdict else None,
                "vs_baseline": verdict_text(row), "verdict": row.word,
                "share": cell.percent_of_ceiling, "share_text": significant(cell.percent_of_ceiling),
            }  # fmt: skip


def _devices(cases: Sequence[MeasuredCase]) -> str:
    """A sentence on how far the devices differ; empty where one device measured all cases."""
    devices = {case.done.device for case in cases if case.done.device}
    if len(devices) < 2:
        return ""
    differences = [apart(spread) for spread in cases[0].spreads if devices <= set(spread.devices)]
    difference = differences[0] if differences else "were not compared with each other"
    return f" {len(devices)} devices measured its cases; those of their type {difference}."


def _lines(size: str, points: Sequence[dict[str, Any]], unit_name: str) -> alt.TopLevelMixin:
    """A line for each row over the size, with its interval as a band. While a reader points at a row, the
    others are pale. A control below the chart sets the y axis, the parameter `axis`."""
    colours, shapes = _colours_and_shapes(points)
    legend = alt.Legend(symbolOpacity=1, values=style.legend_values(points))
    sizes = sorted({point["x"] for point in points})
    log, zero = alt.Scale(type="log", base=2, nice=False), alt.Scale(type="symlog", nice=False)
    pointed = alt.selection_point(name="pointed", fields=["name"], on="pointerover")
    axis_names = {"ratio": "multiple of the fastest", "time": f"time, {unit_name}"}
    suffixes = {"ratio": "x", "time": f" {unit_name}"}  # of the labels of an axis
    if any(point["share"] for point in points):
        axis_names["share"], suffixes["share"] = "% of the machine's limit", " %"
    select = alt.binding_select(options=[*axis_names], labels=[*axis_names.values()], name="Axis: ")
    params = [alt.param(name="axis", value="ratio", bind=select)]
    base = alt.Chart({"values": list(points)}).encode(
        x=alt.X("x:Q", title=size, scale=log if sizes[0] > 0 else zero, axis=alt.Axis(values=sizes)),
        color=alt.Color("name:N", scale=colours, title=None, legend=legend),
        opacity=alt.condition(pointed, alt.value(1), alt.value(0.15)),
    )
    if choice := style.choice_of_rows(points):
        params.append(choice)
        base = base.transform_filter(style.CHOSEN)
    # A share has no interval.
    ends = {"from_": "datum[axis + '_low'] || datum.share", "to": "datum[axis + '_high'] || datum.share"}
    base = base.transform_calculate(at="datum[axis]", **ends)
    labels = alt.Axis(labelExpr=f"datum.label && datum.label + {json.dumps(suffixes)}[axis]")
    y = alt.Y("at:Q", title=None, scale=alt.Scale(type="log", nice=False), axis=labels)
    of_time = style.tooltips(
        text="time", vs_fastest="vs fastest", vs_baseline="vs baseline", verdict="", share_text="% of limit"
    )
    tooltip = [*style.tooltips(name="implementation"), alt.Tooltip("x:Q", title=size), *of_time]
    band = base.mark_area(fillOpacity=0.15, aria=False).encode(y="from_:Q", y2="to:Q")
    line = base.mark_line(aria=False).encode(y=y, detail="name:N")
    shape = alt.Shape("name:N", scale=shapes, title=None, legend=legend)
    dots = base.mark_point(filled=True, size=70).encode(y=y, shape=shape, tooltip=tooltip).add_params(pointed)
    height = max(320, style.LINE_HEIGHT * len(colours.domain))  # so that the legend has room
    return alt.layer(band, line, dots).properties(width=560, height=height).add_params(*params)


def _colours_and_shapes(points: Sequence[dict[str, Any]]) -> tuple[alt.Scale, alt.Scale]:
    """Colours and shapes of rows. Those of a provider have shades of its colour, and each another shape. The
    rows that are shown first have the first of both."""
    shown = {point["name"] for point in points if point["shown"]}
    names = sorted({point["name"] for point in points}, key=lambda name: (name not in shown, name))
    places = style.places_in_provider(names)
    shapes = {name: SHAPES[place % len(SHAPES)] for name, place in places.items()}
    return style.scale_of(style.row_colours(names)), style.scale_of(shapes)


def winners(cases: Sequence[MeasuredCase]) -> Chart | None:
    """The fastest row of each case, and by how much it leads; None where fewer than two cases have a time."""
    timed = [case for case in cases if case.timed]
    if len(timed) < 2:
        return None
    timed.sort(key=lambda case: case.size_order)
    axis = _axis_size(timed)
    shared, keys = shared_sizes(timed), short_keys(timed)
    values = [_winner(case, axis, shared) | {"sizes": case.named(keys[case.planned.key])} for case in timed]
    unit_name, _ = add_times_in_unit(values)
    columns: Columns = {
        "fastest": "name", f"time, {unit_name}": ("time", four_digits), "case": "sizes",
        "against the second": ("ratio", "margin"), "% of limit": ("share", "share_text"),
        "% of the suite": ("weight", lambda weight: f"{weight:.1f}"),
    }  # fmt: skip
    chart = Chart(anchor("winners", timed[0].planned.op), "Fastest implementation",
                  "The fastest row of each case, and by how much it leads the second.",
                  table=table(values, columns))  # fmt: skip
    if all(len({value[side] for value in values}) > 1 for side in ("x", "y")):  # a list needs no picture
        chart.reading = ("Each field is a case: whose row is fastest, and by how much it leads the second. "
                         "Grey: indistinguishable.")  # fmt: skip
        chart.picture, chart.marks = _plane(values, axis), len(values)
    if shared:
        chart.reading += f" All have {text_of(shared)}."
    return chart


def _plane(values: Sequence[dict[str, Any]], axis: str) -> alt.TopLevelMixin:
    """A rectangle for each case: the size `axis` goes from left to right, all other sizes go down."""
    providers = sorted({value["provider"] for value in values})
    colours = {name: style.PROVIDERS.get(name, style.OTHER_COLOUR) for name in providers}
    if UNDECIDED in colours:
        colours[UNDECIDED] = "#9994"
    across = list(dict.fromkeys(value["x"] for value in values))
    tooltip = style.tooltips(
        y="case", x=axis or "size", name="fastest", took="time", margin="", share_text="% of limit"
    )
    colour = style.colour_by("provider", colours)
    return style.heat_map(values, across, axis or None, {"opacity": 0.35}, color=colour, tooltip=tooltip)


def _winner(case: MeasuredCase, axis: str, shared: dict[str, int | str]) -> dict[str, Any]:
    """The data of the fastest row of a case. By how much it leads the second is `lead` in its field, empty
    where that is not clear, and `margin` in words. `provider` gives the colour: UNDECIDED is one, too."""
    fastest, verdict = case.timed[0], case.first_against_second
    others = {k: v for k, v in case.planned.sizes.items() if k != axis and k not in shared}
    provider, margin, lead = UNDECIDED, "not compared", ""
    if len(case.timed) == 1:
        provider, margin = style.provider(fastest.name), "no second"
    elif verdict is not None and verdict.verdict == "faster":
        lead = short_ratio(verdict)
        provider, margin = style.provider(fastest.name), f"{lead} {verdict.b}"
    elif verdict is not None:
        words = {"same": "same as", "unclear": "indistinguishable from", "slower": "slower by rounds than"}
        margin = f"{words[verdict.verdict]} {verdict.b}"
    return {
        "x": str(case.planned.sizes.get(axis, "")),
        "y": ", ".join(filter(None, [text_of(others), case.planned.boundary, case.label])),
        "provider": provider, "name": fastest.name, "margin": margin, "lead": lead,
        "took": microseconds(fastest.time_us), "share_text": significant(fastest.percent_of_ceiling),
        "weight": 100 * case.planned.weight,
        "time_us": fastest.time_us, "low_us": fastest.low_us, "high_us": fastest.high_us,
        "ratio": verdict.ratio if verdict else None, "share": fastest.percent_of_ceiling,
    }  # fmt: skip


def _axis_size(cases: Sequence[MeasuredCase]) -> str:
    """The size of the x axis: one that grows with the load, else that with most values; empty if none has two
    values."""
    different = dict.fromkeys(size for case in cases for size in case.planned.sizes.items())
    counts = Counter(name for name, _ in different)
    several = [name for name, count in counts.items() if count > 1]
    of_load = [name for name in LOAD_SIZES if name in several]
    return of_load[0] if of_load else max(several, key=lambda name: counts[name], default="")
