"""How times, speedups and shares of the limit depend on batch, context or tokens; and which row is fastest in
which case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import altair as alt

from harness.page.case import TIMES, MeasuredCase, interval_ends, shared_sizes, us_text, verdict_text
from harness.page.document import Chart, Columns, anchor, table
from harness.page.style import OTHER, PROVIDERS, coded, provider, tips
from harness.report.notes import apart
from harness.report.text import grouped, microseconds, short_ratio, significant, unit
from shapes.case import text_of

LOAD = ("batch", "tokens", "m", "new", "ctx")
"""The sizes that grow with the load of a server, as the ops call them."""
UNTOLD = "not told apart"
LETTER = 6.2
"""The width of a letter in a field, in pixels."""
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")


def sweep_charts(cases: Sequence[MeasuredCase]) -> Iterator[Chart]:
    """Charts for every size that has two or more values while all other sizes, the boundary and the run are
    the same."""
    for size in dict.fromkeys(name for case in cases for name in case.planned.sizes):
        with_size = [case for case in cases if isinstance(case.planned.sizes.get(size), int)]
        for fixed, group in grouped(with_size, partial(_others, size)).items():
            if len({case.planned.sizes[size] for case in group}) > 1:
                group.sort(key=lambda case: case.planned.sizes[size])
                yield from _sweep(size, ", ".join(filter(None, fixed)), group)


def _others(size: str, case: MeasuredCase) -> tuple[str, str, str]:
    """What is the same in all cases of a sweep over the size."""
    rest = {name: value for name, value in case.planned.sizes.items() if name != size}
    return text_of(rest), case.planned.boundary, case.label


def _sweep(size: str, fixed: str, cases: Sequence[MeasuredCase]) -> Iterator[Chart]:
    """Charts of times, speedups and shares of the limit by a size.

    fixed: the sizes that all cases have, and the boundary, as text
    cases: those that differ in the size alone, ordered by it
    """
    points = [point for case in cases for point in _points(size, case)]
    if not points:
        return
    microseconds_of_unit, unit_name = unit(min(point["time_us"] for point in points))
    for point in points:
        point |= {key: point[f"{key}_us"] / microseconds_of_unit for key in ("time", "low", "high")}
    columns: Columns = {
        size: ("x", str), "implementation": "name", **TIMES,
        "vs baseline": ("speedup", "ratio"), "verdict": "verdict",
        "% of limit": ("share", "share_text"),
    }  # fmt: skip
    numbers = table(points, columns)
    baseline = next((name for case in cases for name in case.baselines), "the baseline")
    of = f"{size} at {fixed}"
    kinds: list[tuple[str, str, str, str, alt.Scale, tuple[str, str] | None]] = [
        (
            "time",
            f"Time over {of}",
            f"Lower is faster; the band is the interval. Both axes are logarithmic.{_devices(cases)}",
            f"time per call, {unit_name}",
            alt.Scale(type="log", nice=False),
            ("low", "high"),
        ),
        (
            "speedup",
            f"Speedup over {baseline} by {of}",
            f"Above the line at 1 is faster than {baseline}; a band that crosses it shows no difference.",
            f"speedup over {baseline}",
            alt.Scale(zero=False),
            ("speedup_low", "speedup_high"),
        ),
        (
            "share",
            f"Share of the machine's limit by {of}",
            "The share of what the machine was measured to reach; the rest up to 100 % could be gained.",
            "% of the measured limit",
            alt.Scale(zero=True),
            None,
        ),
    ]
    looks = _looks(points)
    for key, title, reading, axis, scale, band in kinds:
        drawn = [point for point in points if point[key] is not None]
        if drawn:
            place = anchor(f"{key}-over", cases[0].planned.op, size, fixed)
            picture = _lines(size, drawn, key, axis, scale, band, looks)
            yield Chart(place, title, reading, picture, numbers, len(drawn))


def _points(size: str, case: MeasuredCase) -> Iterator[dict[str, Any]]:
    for row in case.rows:
        cell, verdict = row.cell, row.verdict
        if cell.time_us:
            low, high = interval_ends(cell.time_us, cell.low_us, cell.high_us)
            yield {
                "x": case.planned.sizes[size],
                "name": cell.name,
                "time_us": cell.time_us,
                "low_us": low,
                "high_us": high,
                "text": microseconds(cell.time_us),
                "speedup": verdict.ratio if verdict else None,
                "speedup_low": verdict.low if verdict else None,
                "speedup_high": verdict.high if verdict else None,
                "ratio": verdict_text(verdict, row.is_baseline),
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


def _lines(
    size: str,
    points: Sequence[dict[str, Any]],
    key: str,
    axis: str,
    scale: alt.Scale,
    band: tuple[str, str] | None,
    looks: tuple[alt.Scale, alt.Scale],
) -> alt.TopLevelMixin:
    """A line for each row, over the size.

    key, axis: what is drawn, and the title of its axis
    band:      the keys of the ends of its interval
    looks:     see `_looks`; those of all rows of the sweep, so that each row looks the same in all charts
    """
    names = sorted({point["name"] for point in points})
    legend = alt.Legend(symbolOpacity=1, values=names)
    colour = alt.Color("name:N", scale=looks[0], title=None, legend=legend)
    shape = alt.Shape("name:N", scale=looks[1], title=None, legend=legend)
    values = sorted({point["x"] for point in points})
    across = alt.Scale(type="symlog", nice=False)
    if values[0] > 0:
        across = alt.Scale(type="log", base=2, nice=False)
    x = alt.X("x:Q", title=size, scale=across, axis=alt.Axis(values=values))
    base = alt.Chart({"values": list(points)}).encode(x=x, color=colour)
    tooltip = [
        *tips(name="implementation"),
        alt.Tooltip("x:Q", title=size),
        *tips(text="time", ratio="vs baseline", verdict="", share_text="% of limit"),
    ]
    layers: list[alt.Chart] = []
    if key == "speedup":
        layers.append(alt.Chart({"values": [{"at": 1.0}]}).mark_rule(color="#888").encode(y="at:Q"))
    if band:
        low = alt.Y(f"{band[0]}:Q", scale=scale)
        layers.append(base.mark_area(opacity=0.15, aria=False).encode(y=low, y2=f"{band[1]}:Q"))
    line = base.mark_line(aria=False).encode(y=alt.Y(f"{key}:Q", title=axis, scale=scale), detail="name:N")
    dots = base.mark_point(filled=True, size=70, opacity=1)
    layers += [line, dots.encode(y=f"{key}:Q", shape=shape, tooltip=tooltip)]
    return alt.layer(*layers).properties(width=560, height=320)


def _looks(points: Sequence[dict[str, Any]]) -> tuple[alt.Scale, alt.Scale]:
    """Colours and shapes of rows: those of a provider have the same colour, and each another shape."""
    colours: dict[str, str] = {}
    shapes: dict[str, str] = {}
    for name in sorted({point["name"] for point in points}):
        place = sum(provider(other) == provider(name) for other in colours)
        colours[name] = PROVIDERS.get(provider(name), OTHER)
        shapes[name] = SHAPES[place % len(SHAPES)]
    return coded(colours), coded(shapes)


def winners(cases: Sequence[MeasuredCase]) -> Chart | None:
    """Which row is fastest in each case, and by how much; None where nothing has a time."""
    timed = [case for case in cases if case.timed]
    if not timed:
        return None
    axis = _axis(timed)
    shared = shared_sizes(timed)
    values = [_winner(case, axis, shared) for case in timed]
    colours = {name: PROVIDERS.get(name, OTHER) for name in sorted({value["provider"] for value in values})}
    if UNTOLD in colours:
        colours[UNTOLD] = "#9994"
    xs = sorted({value["x"] for value in values}, key=lambda text: (len(text), text))
    longest = max(len(line) for value in values for line in value["text"].split("\n"))
    base = alt.Chart({"values": values}).encode(
        x=alt.X("x:O", sort=xs, title=axis or None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("y:N", sort=None, title=None),
    )
    tooltip = tips(y="case", x=axis or "size", name="fastest", time="", margin="", share="% of limit")
    colour = alt.Color("provider:N", scale=coded(colours), title=None)
    rect = base.mark_rect(opacity=0.35, stroke="#8886").encode(color=colour, tooltip=tooltip)
    text = base.mark_text(lineBreak="\n", fontSize=11, lineHeight=13, dy=-6, aria=False).encode(text="text:N")
    columns: Columns = {
        "case": "case", "% of the suite": ("weight", lambda weight: f"{weight:.1f}"),
        "fastest": "name", "time, us": ("time_us", us_text),
        "against the second": ("ratio", "margin"), "% of limit": ("percent", "share"),
    }  # fmt: skip
    return Chart(
        anchor("winners", timed[0].planned.op),
        "Fastest implementation",
        "Each field is a case: the fastest row, and by how much it leads the second. Grey: not told apart."
        + (f" All have {text_of(shared)}." if shared else ""),
        alt.layer(rect, text).properties(width=alt.Step(12 + LETTER * longest), height=alt.Step(44)),
        table(values, columns),
        len(values),
    )


def _winner(case: MeasuredCase, axis: str, shared: dict[str, int | str]) -> dict[str, Any]:
    fastest, verdict = case.timed[0], case.runner_up
    others = {k: v for k, v in case.planned.sizes.items() if k != axis and k not in shared}
    margin, told = "not compared", False
    if len(case.timed) == 1:
        margin, told = "no second", True
    elif verdict is not None and verdict.verdict == "faster":
        margin, told = f"{short_ratio(verdict)} {verdict.b}", True
    elif verdict is not None:
        words = {"same": "same as", "unclear": "not told from", "slower": "slower by rounds than"}
        margin = f"{words[verdict.verdict]} {verdict.b}"
    return {
        "x": str(case.planned.sizes.get(axis, "")),
        "y": ", ".join(filter(None, [text_of(others), case.planned.boundary, case.label])),
        "provider": provider(fastest.name) if told else UNTOLD,
        "text": f"{fastest.name}\n{margin}",
        "name": fastest.name,
        "margin": margin,
        "time": microseconds(fastest.time_us),
        "share": significant(fastest.percent_of_ceiling),
        "case": case.planned.key + (f" · {case.label}" if case.label else ""),
        "weight": 100 * case.planned.weight,
        "time_us": fastest.time_us,
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
