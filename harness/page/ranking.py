"""Times of a case: the ranking with intervals, every round of every row, and all times of a run against the
roofline of the machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from harness.catalogue.devices import Ceilings, peaks
from harness.page.case import MeasuredCase, interval_ends, us_text, verdict_text
from harness.page.document import Chart, Columns, anchor, table
from harness.page.style import coded, name_step, names, provider, provider_scale, tips
from harness.report.rows import Row
from harness.report.text import microseconds, significant, unit
from harness.results.schema import Cell, Samples
from kernels.platform import Platform

if TYPE_CHECKING:
    import altair

RANKING = (
    "Each line is an implementation: the dot is its time per call, the bar the interval; further left is "
    "faster. The dashed line is the time that this machine would need at its measured limits. Whether a row "
    "differs from the baseline is the verdict in the table, which comes from paired rounds. checked: right, "
    "but not timed here."
)
WIDTH = 640
TICKS = "Each tick is the time per call in one round; blocks are below each other."
PAIR = " The second strip of a baseline is the same code, prepared a second time: the difference is noise."
DISTURBED = " Crosses are disturbed rounds that count, triangles disturbed rounds that were left out."
CHOICE = " Choose a row below the picture to see it beside its baseline alone."
AGAIN = " (again)"
"""Ends the name of the second of an A/A pair."""
SHAPES = {"quiet": "stroke", "disturbed": "cross", "left out": "triangle-up"}
"""The marks of rounds."""
SHOWN = ("status", "time_us", "low_us", "high_us", "tflops", "gbps", "percent_of_ceiling", "reason")
"""The attributes of a cell that the table of a ranking shows."""


def ranking(cases: Sequence[MeasuredCase]) -> Chart:
    """The ranking of one case, in one run or in several."""
    rows = [(case, row) for case in cases for row in case.rows]
    rows.sort(key=lambda of: (of[1].cell.time_us or math.inf, of[0].row_name(of[1].cell)))
    values = [_values(case, row) for case, row in rows]
    timed = [value for value in values if value["time_us"] is not None]
    failed = [v for v in values if v["time_us"] is None and v["status"] != "unsupported"]
    limits = {case.label: case.limit_us for case, row in rows if row.cell.time_us and case.limit_us}
    columns: Columns = {
        "implementation": "name", "status": "status", "time, us": ("time_us", us_text),
        "from, us": ("low_us", us_text), "to, us": ("high_us", us_text),
        "vs baseline": ("speedup", "ratio"), "verdict": "verdict",
        "TFLOPS": ("tflops", significant), "GB/s": ("gbps", significant),
        "% of limit": ("percent_of_ceiling", significant), "note": "reason",
    }  # fmt: skip
    return Chart(
        anchor("ranking", cases[0].planned.key),
        "Time of a call",
        RANKING if timed else "Nothing has a time.",
        _ranking_picture(timed, failed, limits) if timed else None,
        table(values, columns),
        marks=len(timed),
    )


def _values(case: MeasuredCase, row: Row) -> dict[str, Any]:
    cell, baseline = row.cell, 1.0 if row.is_baseline else None
    name, time = case.row_name(cell), microseconds(cell.time_us)
    return {key: getattr(cell, key) for key in SHOWN} | {
        "name": name,
        "provider": provider(cell.name),
        "text": time,
        "ends": f"{microseconds(cell.low_us)} to {microseconds(cell.high_us)}" if cell.low_us else "none",
        "ratio": verdict_text(row.verdict, row.is_baseline),
        "speedup": row.verdict.ratio if row.verdict else baseline,
        "verdict": row.word,
        "share": significant(cell.percent_of_ceiling),
        "text_of_all": f"{name}: {time}",
        "anchor": case.row_anchor(cell),
    }


def _ranking_picture(
    timed: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]], limits: dict[str, float]
) -> altair.TopLevelMixin:
    """limits: times at the measured limits of the machine, in microseconds, by label of the run"""
    import altair as alt

    size, name = unit(min(value["time_us"] for value in timed))
    marks = []
    drawn = ("name", "provider", "time", "low", "high", "text", "ends", "ratio", "verdict", "share",
             "text_of_all")  # fmt: skip
    for value in timed:
        low, high = interval_ends(value["time_us"], value["low_us"], value["high_us"])
        scaled = {"time": value["time_us"] / size, "low": low / size, "high": high / size}
        marks.append({key: (value | scaled)[key] for key in drawn})
    y = alt.Y("name:N", sort=[value["name"] for value in (*timed, *failed)], title=None)
    scale = alt.Scale(type="log", nice=False, padding=24)
    x = alt.X("time:Q", scale=scale, title=f"time per call, {name} (log scale)")
    colour = alt.Color("provider:N", scale=provider_scale(mark["provider"] for mark in marks), legend=None)
    base = alt.Chart({"values": marks}).encode(y=y, color=colour)
    tooltip = tips(
        name="implementation",
        text="time",
        ends="interval",
        ratio="vs baseline",
        verdict="",
        share="% of limit",
    )
    layers: list[alt.Chart] = [
        base.mark_rule(strokeWidth=6, opacity=0.35, aria=False).encode(x="low:Q", x2="high:Q"),
        base.mark_point(filled=True, size=80, opacity=1).encode(
            x=x, tooltip=tooltip, description="text_of_all:N"
        ),
    ]
    if limits:
        lines = [
            {"limit": us / size, "what": f"limit of {label or 'this machine'}"}
            for label, us in limits.items()
        ]
        line = alt.Chart({"values": lines}).encode(x="limit:Q")
        layers += [
            line.mark_rule(strokeDash=[5, 4], color="#888"),
            line.mark_text(align="left", dx=-4, baseline="bottom", fontSize=10).encode(
                y=alt.value(-3), text="what:N"
            ),
        ]
    if failed:
        words = [
            {"name": v["name"], "status": v["status"], "failed": v["status"] != "checked"} for v in failed
        ]
        red = alt.condition("datum.failed", alt.value("#D55E00"), alt.value("#888888"))
        layers.append(
            alt.Chart({"values": words})
            .mark_text(align="right", fontWeight="bold")
            .encode(y=y, x=alt.value(WIDTH - 4), text="status:N", color=red)
        )
    return alt.layer(*layers).properties(width=WIDTH, height=alt.Step(24))


# Rounds


def rounds(case: MeasuredCase, most: int) -> Chart | None:
    """Every round's time of every row of a case, beside the A/A pair: what the verdicts rest on. None where
    no round was kept.

    most: ticks that are drawn; where there are more, quiet ones are left out evenly. The table has all.
    """
    points = list(_points(case))
    if not points:
        return None
    choices = [(row.cell.name, row.verdict.b) for row in case.rows if row.cell.time_us and row.verdict]
    if len(choices) == 1:  # it is beside its baseline alone already
        choices = []
    every = math.ceil(len(points) / most)
    drawn = [point for i, point in enumerate(points) if point["kind"] != "quiet" or i % every == 0]
    size, name = unit(min(point["us"] for point in points))
    for point in points:
        point["time"] = round(point["us"] / size, 5)
    reading = TICKS
    if any(point["name"] != point["of"] for point in points):
        reading += PAIR
    if choices:
        reading += CHOICE
    if any(point["kind"] != "quiet" for point in points):
        reading += DISTURBED
    if every > 1:
        reading += f" Of the quiet rounds 1 in {every} is drawn; the table has all."
    columns: Columns = {
        "implementation": "name", "block": ("block", str), "round": ("round", str),
        "time, us": ("us", us_text), "state": "state",
    }  # fmt: skip
    return Chart(
        anchor("rounds", case.label, case.planned.key),
        "Rounds",
        reading,
        _rounds_picture(drawn, name, choices),
        table(points, columns),
        len(drawn),
    )


def _points(case: MeasuredCase) -> Iterator[dict[str, Any]]:
    counted = {(r.block, r.round) for r in case.done.disturbed if r.counted}
    for cell in case.timed:
        yield from _strip(cell.name, cell.samples, counted)
        for pair in case.verdicts:
            if pair.about == "A/A" and pair.b == cell.name:
                yield from _strip(cell.name + AGAIN, pair.samples, counted)
    for dropped in case.done.disturbed:
        for name, seconds in dropped.seconds.items():
            place = (dropped.block, dropped.round)
            yield _tick(name, place, seconds, f"left out: {dropped.reason}", "left out")


def _strip(name: str, samples: Samples, disturbed: set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for place, seconds in samples.by_round.items():
        state = "disturbed" if place in disturbed else "quiet"
        yield _tick(name, place, seconds, state, state)


def _tick(name: str, place: tuple[int, int], seconds: float, state: str, kind: str) -> dict[str, Any]:
    return {
        "name": name,
        "of": name.removesuffix(AGAIN),
        "provider": provider(name),
        "block": place[0],
        "round": place[1],
        "us": seconds * 1e6,
        "state": state,
        "kind": kind,
    }


def _rounds_picture(
    points: Sequence[dict[str, Any]], unit_name: str, choices: Sequence[tuple[str, str]]
) -> altair.TopLevelMixin:
    """choices: each a row and its baseline, which a reader may choose to see alone"""
    import altair as alt

    order = list(dict.fromkeys(point["name"] for point in points))
    blocks = len({point["block"] for point in points})
    kinds = {kind: SHAPES[kind] for kind in SHAPES if any(p["kind"] == kind for p in points)}
    log = alt.Scale(type="log", nice=False, padding=12)
    tooltip = [
        alt.Tooltip("name:N", title="implementation"),
        alt.Tooltip("block:Q"),
        alt.Tooltip("round:Q"),
        alt.Tooltip("time:Q", title=f"time, {unit_name}"),
        alt.Tooltip("state:N"),
    ]
    picture = (
        alt.Chart({"values": list(points)})
        .mark_point(size=36, opacity=0.75, strokeWidth=1.5, angle=90)
        .encode(
            x=alt.X("time:Q", scale=log, title=f"time per call, {unit_name} (log scale)"),
            y=names(order),
            yOffset=alt.YOffset("block:O", scale=alt.Scale(paddingOuter=0.2)),
            color=alt.Color(
                "provider:N", scale=provider_scale(point["provider"] for point in points), legend=None
            ),
            shape=alt.Shape(
                "kind:N",
                scale=coded(kinds),
                title=None,
                legend=alt.Legend(orient="top") if len(kinds) > 1 else None,
            ),
            tooltip=tooltip,
        )
        .properties(
            width=640, height=alt.Step(name_step(order, max(28, min(60, 5 * blocks))), **{"for": "position"})
        )
    )
    if not choices:
        return picture
    select = alt.binding_select(
        options=[None, *choices], labels=["all", *(name for name, _ in choices)], name="Row: "
    )
    return picture.add_params(alt.param(name="row", value=None, bind=select)).transform_filter(
        "row === null || indexof(row, datum.of) >= 0"
    )


# Roofline


def roofline(cases: Sequence[MeasuredCase]) -> Chart | None:
    """Every time of a run against the limits of its machine, by arithmetic intensity (Williams, Waterman and
    Patterson, Communications of the ACM 52(4), 2009). None where no time has both rates."""
    import altair as alt

    points = [_dot(cell) for case in cases for cell in case.timed if cell.tflops and cell.gbps]
    if not points:
        return None
    roofs = _roofs(cases[0], [point["intensity"] for point in points])
    x = alt.X("intensity:Q", scale=alt.Scale(type="log"), title="arithmetic intensity, FLOP per byte")
    y = alt.Y("tflops:Q", scale=alt.Scale(type="log"), title="TFLOPS")
    tooltip = [
        *tips(name="implementation", case="", text="time"),
        alt.Tooltip("tflops:Q", title="TFLOPS"),
        alt.Tooltip("gbps:Q", title="GB/s"),
    ]
    colour = alt.Color("provider:N", scale=provider_scale(p["provider"] for p in points), title=None)
    dots = alt.Chart({"values": points}).mark_point(filled=True, size=60, opacity=0.8)
    layers: list[alt.Chart] = [dots.encode(x=x, y=y, color=colour, tooltip=tooltip)]
    if roofs:
        lines = alt.Chart({"values": roofs}).encode(x=x, y=y)
        layers += [
            lines.mark_line(color="#888", aria=False).encode(
                detail="roof:N", strokeDash=alt.StrokeDash("kind:N", title=None)
            ),
            lines.mark_text(align="right", baseline="bottom", dy=-3).encode(text="end:N"),
        ]
    columns: Columns = {
        "case": "case", "implementation": "name", "FLOP per byte": ("intensity", significant),
        "TFLOPS": ("tflops", significant), "GB/s": ("gbps", significant),
    }  # fmt: skip
    return Chart(
        anchor("roofline", cases[0].planned.op, cases[0].label),
        "Roofline",
        "Each dot is a time. Memory limits dots below the slope, arithmetic limits dots below the flat line "
        "of their dtype; the closer to a line, the less is left to gain. A dot above the slope reads from "
        "caches.",
        alt.layer(*layers).properties(width=560, height=360),
        table(points, columns),
        len(points),
    )


def _dot(cell: Cell) -> dict[str, Any]:
    assert cell.tflops and cell.gbps
    return {
        "name": cell.name,
        "provider": provider(cell.name),
        "case": cell.case,
        "intensity": cell.tflops * 1e3 / cell.gbps,
        "tflops": cell.tflops,
        "gbps": cell.gbps,
        "text": microseconds(cell.time_us),
    }


def _roofs(case: MeasuredCase, intensities: Sequence[float]) -> list[dict[str, Any]]:
    """The corners of the lines that the limits of the machine make, a line for each dtype, over the range of
    the dots."""
    machine = case.run.provenance.get("machine", {})
    platform = Platform(
        machine.get("platform", ""), machine.get("arch", ""), name=machine.get("device", ""), here=False
    )
    measured, datasheet = Ceilings.recorded(case.run.ceilings or {}), peaks(platform)
    lines = []
    if measured:
        lines += [("measured", dtype, rate, measured.bandwidth) for dtype, rate in measured.rates.items()]
    if datasheet:
        lines.append(("datasheet", "peak", max(datasheet.rates.values()), datasheet.bandwidth))
    knees = [rate / bandwidth for _, _, rate, bandwidth in lines]
    low, high = min([*intensities, *knees]) / 3, max([*intensities, *knees]) * 3
    return [
        {
            "kind": kind,
            "roof": f"{kind}, {dtype}",
            "end": dtype if intensity == high else "",
            "intensity": intensity,
            "tflops": min(rate, bandwidth * intensity) / 1e12,
        }
        for kind, dtype, rate, bandwidth in lines
        for intensity in (low, rate / bandwidth, high)
    ]
