"""How times depend on batch, context or tokens, beside the fastest row and by themselves; and which row is
fastest in which case."""

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
    in_unit,
    interval_ends,
    not_shown,
    shared_sizes,
    short_keys,
    shown_rows,
    slow_rows,
    us_text,
    verdict_text,
)
from harness.page.document import Chart, Columns, anchor, table
from harness.report.notes import apart
from harness.report.rows import device
from harness.report.text import grouped, microseconds, short_ratio, significant
from shapes.case import text_of

LOAD = ("batch", "tokens", "m", "new", "ctx")
"""The sizes that grow with the load of a server, as the ops call them."""
UNTOLD = "indistinguishable"
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")


def sweep_charts(cases: Sequence[MeasuredCase]) -> Iterator[Chart]:
    """Charts for every size that varies while all other sizes, the boundary and the run are the same."""
    for size in dict.fromkeys(name for case in cases for name in case.planned.sizes):
        with_size = [case for case in cases if isinstance(case.planned.sizes.get(size), int)]
        for fixed, group in grouped(with_size, partial(_others, size)).items():
            if len({case.planned.sizes[size] for case in group}) > 1:
                group.sort(key=lambda case: case.planned.sizes[size])
                if chart := _sweep(size, ", ".join(filter(None, fixed)), group):
                    yield chart


def _others(size: str, case: MeasuredCase) -> tuple[str, str, str]:
    """What is the same in all cases of a sweep over the size."""
    rest = {name: value for name, value in case.planned.sizes.items() if name != size}
    return text_of(rest), case.planned.boundary, case.label


def _sweep(size: str, fixed: str, cases: Sequence[MeasuredCase]) -> Chart | None:
    """A chart of times by a size; None where nothing has a time.

    fixed: the sizes that all cases have, and the boundary, as text
    cases: those that differ in the size alone, ordered by it
    """
    points = [point for case in cases for point in _points(size, case, shown_rows(cases))]
    if not points:
        return None
    unit_name, times = in_unit(points)
    columns: Columns = {
        size: ("x", str), "implementation": "name", **times, "vs fastest": ("ratio", significant),
        "vs baseline": ("speedup", "against"), "verdict": "verdict",
        "% of limit": ("share", "share_text"),
    }  # fmt: skip
    op = cases[0].planned.op
    return Chart(
        anchor("time-over", op, size, fixed),
        f"Time over {size} at {fixed}",
        "The time of a call as a multiple of the fastest at that size; below the picture choose the time "
        "itself, or its share of the limit. Bands are intervals, axes are logarithmic. Point at a row to "
        "see it alone." + not_shown(points) + _devices(cases),
        _lines(size, points, unit_name),
        table(points, columns),
        len(points),
        f"Multiples of the fastest at each size. {op} {fixed}, {device(cases[0].run)}. {slow_rows(points)}",
    )


def _points(size: str, case: MeasuredCase, shown: Container[str]) -> Iterator[dict[str, Any]]:
    fastest = case.timed[0].time_us if case.timed else None
    for row in case.rows:
        cell, verdict = row.cell, row.verdict
        if cell.time_us and fastest:
            low, high = interval_ends(cell.time_us, cell.low_us, cell.high_us)
            ratio = cell.time_us / fastest
            yield {
                "x": case.planned.sizes[size],
                "name": cell.name,
                "provider": style.provider(cell.name),
                "shown": cell.name in shown and ratio <= FAR,
                "ratio": ratio,
                "ratio_low": low / fastest,
                "ratio_high": high / fastest,
                "beside": f"{ratio:.3g}x",
                "time_us": cell.time_us,
                "low_us": low,
                "high_us": high,
                "text": microseconds(cell.time_us),
                "speedup": verdict.ratio if verdict else None,
                "against": verdict_text(verdict, row.is_baseline),
                "verdict": row.word,
                "share": cell.percent_of_ceiling,
                "share_text": significant(cell.percent_of_ceiling),
            }


def _devices(cases: Sequence[MeasuredCase]) -> str:
    """A sentence on how far the devices differ, where several measured the cases."""
    used = {case.done.device for case in cases} - {""}
    if len(used) < 2:
        return ""
    of_them = (s for s in cases[0].spreads if used <= set(s.devices))
    known = next((apart(spread) for spread in of_them), "were not compared with each other")
    return f" {len(used)} devices measured its cases; those of their type {known}."


def _lines(size: str, points: Sequence[dict[str, Any]], unit_name: str) -> alt.TopLevelMixin:
    """A line for each row, over the size; the others are pale while a reader points at one."""
    choice = style.chosen_rows(points)
    looks, legend = _looks(points), alt.Legend(symbolOpacity=1, values=style.legend_values(points))
    values = sorted({point["x"] for point in points})
    across = alt.Scale(type="symlog", nice=False)
    if values[0] > 0:
        across = alt.Scale(type="log", base=2, nice=False)
    pointed = alt.selection_point(name="pointed", fields=["name"], on="pointerover")
    axes = {"ratio": ("multiple of the fastest", "x"), "time": (f"time, {unit_name}", f" {unit_name}")}
    if any(point["share"] for point in points):
        axes["share"] = ("% of the machine's limit", " %")
    names, suffixes = [name for name, _ in axes.values()], {axis: end for axis, (_, end) in axes.items()}
    select = alt.binding_select(options=[*axes], labels=names, name="Axis: ")
    params = [alt.param(name="axis", value="ratio", bind=select), *([choice] if choice else [])]
    base = alt.Chart({"values": list(points)}).encode(
        x=alt.X("x:Q", title=size, scale=across, axis=alt.Axis(values=values)),
        color=alt.Color("name:N", scale=looks[0], title=None, legend=legend),
        opacity=alt.condition(pointed, alt.value(1), alt.value(0.15)),
    )
    base = base.transform_filter(style.CHOSEN) if choice else base
    base = base.transform_calculate(
        at="datum[axis]",
        from_="datum[axis + '_low'] || datum.share",
        to="datum[axis + '_high'] || datum.share",
    )
    labels = alt.Axis(labelExpr=f"datum.label && datum.label + {json.dumps(suffixes)}[axis]")
    y = alt.Y("at:Q", title=None, scale=alt.Scale(type="log", nice=False), axis=labels)
    tooltip = [
        *style.tips(name="implementation"),
        alt.Tooltip("x:Q", title=size),
        *style.tips(text="time", beside="vs fastest", against="vs baseline", verdict=""),
        *style.tips(share_text="% of limit"),
    ]
    return (
        alt.layer(
            base.mark_area(fillOpacity=0.15, aria=False).encode(y="from_:Q", y2="to:Q"),
            base.mark_line(aria=False).encode(y=y, detail="name:N"),
            base.mark_point(filled=True, size=70)
            .encode(
                y=y, shape=alt.Shape("name:N", scale=looks[1], title=None, legend=legend), tooltip=tooltip
            )
            .add_params(pointed),
        )
        .properties(width=560, height=max(320, style.LINE * len(looks[0].domain)))
        .add_params(*params)
    )


def _looks(points: Sequence[dict[str, Any]]) -> tuple[alt.Scale, alt.Scale]:
    """Colours and shapes of rows: those of a provider have shades of its colour, and each another shape; the
    rows that are shown without being asked come first."""
    colours: dict[str, str] = {}
    shapes: dict[str, str] = {}
    shown = {point["name"] for point in points if point["shown"]}
    for name in sorted({point["name"] for point in points}, key=lambda name: (name not in shown, name)):
        place = sum(style.provider(other) == style.provider(name) for other in colours)
        colours[name] = style.shade(style.PROVIDERS.get(style.provider(name), style.OTHER), place)
        shapes[name] = SHAPES[place % len(SHAPES)]
    return style.coded(colours), style.coded(shapes)


def winners(cases: Sequence[MeasuredCase]) -> Chart | None:
    """Which row is fastest in each case, and by how much; None where fewer than two have a time."""
    timed = [case for case in cases if case.timed]
    if len(timed) < 2:
        return None
    timed.sort(key=lambda case: case.size_order)
    axis = _axis(timed)
    shared, keys = shared_sizes(timed), short_keys(timed)
    values = [
        _winner(case, axis, shared)
        | {"sizes": " · ".join(filter(None, [keys[case.planned.key], case.label]))}
        for case in timed
    ]
    unit_name, _ = in_unit(values)
    columns: Columns = {
        "fastest": "name", f"time, {unit_name}": ("time", us_text), "case": "sizes",
        "against the second": ("ratio", "margin"), "% of limit": ("percent", "share"),
        "% of the suite": ("weight", lambda weight: f"{weight:.1f}"),
    }  # fmt: skip
    place, numbers = anchor("winners", timed[0].planned.op), table(values, columns)
    all_have = f" All have {text_of(shared)}." if shared else ""
    if 1 in (len({value[side] for value in values}) for side in "xy"):  # a list, not a plane
        reading = f"The fastest row of each case, and by how much it leads the second.{all_have}"
        return Chart(place, "Fastest implementation", reading, table=numbers)
    return Chart(
        place,
        "Fastest implementation",
        "Each field is a case: whose row is fastest, and by how much it leads the second. Grey: "
        f"indistinguishable.{all_have}",
        _plane(values, axis),
        numbers,
        len(values),
    )


def _plane(values: Sequence[dict[str, Any]], axis: str) -> alt.TopLevelMixin:
    """A field for each winner, by the size `axis` and all other sizes."""
    providers = sorted({value["provider"] for value in values})
    colours = {name: style.PROVIDERS.get(name, style.OTHER) for name in providers}
    if UNTOLD in colours:
        colours[UNTOLD] = "#9994"
    across = list(dict.fromkeys(value["x"] for value in values))
    base = alt.Chart({"values": list(values)}).encode(
        x=alt.X("x:O", sort=across, title=axis or None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("y:N", sort=None, title=None),
    )
    tooltip = style.tips(
        y="case", x=axis or "size", name="fastest", took="time", margin="", share="% of limit"
    )
    colour = style.coloured("provider", colours)
    rect = base.mark_rect(opacity=0.35, stroke="#8886").encode(color=colour, tooltip=tooltip)
    label = base.mark_text(fontSize=11, aria=False).encode(text="lead:N")
    return alt.layer(rect, label).properties(width=alt.Step(52), height=alt.Step(24))


def _winner(case: MeasuredCase, axis: str, shared: dict[str, int | str]) -> dict[str, Any]:
    fastest, verdict = case.timed[0], case.runner_up
    others = {k: v for k, v in case.planned.sizes.items() if k != axis and k not in shared}
    margin, lead, told = "not compared", "", False
    if len(case.timed) == 1:
        margin, told = "no second", True
    elif verdict is not None and verdict.verdict == "faster":
        lead = short_ratio(verdict)
        margin, told = f"{lead} {verdict.b}", True
    elif verdict is not None:
        words = {"same": "same as", "unclear": "indistinguishable from", "slower": "slower by rounds than"}
        margin = f"{words[verdict.verdict]} {verdict.b}"
    return {
        "x": str(case.planned.sizes.get(axis, "")),
        "y": ", ".join(filter(None, [text_of(others), case.planned.boundary, case.label])),
        "provider": style.provider(fastest.name) if told else UNTOLD,
        "name": fastest.name,
        "margin": margin,
        "lead": lead,
        "took": microseconds(fastest.time_us),
        "share": significant(fastest.percent_of_ceiling),
        "weight": 100 * case.planned.weight,
        **{key: getattr(fastest, key) for key in ("time_us", "low_us", "high_us")},
        "ratio": verdict.ratio if verdict else None,
        "percent": fastest.percent_of_ceiling,
    }


def _axis(cases: Sequence[MeasuredCase]) -> str:
    """The size that grows with the load, else the size with the most values; empty where no size has two."""
    sizes = [size for case in cases for size in case.planned.sizes.items()]
    counts = Counter(name for name, _ in dict.fromkeys(sizes))
    several = [name for name, count in counts.items() if count > 1]
    load = next((name for name in LOAD if name in several), "")
    return load or max(several, key=counts.__getitem__, default="")
