"""Charts of the times of a case: the ranking with intervals, and every round of every row."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

import altair as alt

from harness.page import style
from harness.page.case import (
    FAR,
    FEW,
    MeasuredCase,
    add_times_in_unit,
    four_digits,
    interval_ends,
    not_shown,
    shown_rows,
    slow_rows,
    verdict_text,
)
from harness.page.document import Chart, Columns, anchor, table
from harness.report.rows import Row, device
from harness.report.text import microseconds, significant, unit

RANKING_READING = (
    "Each line is an implementation: the dot is its time per call as a multiple of the fastest, the bar its "
    "interval; further left is faster. A dashed line is the time that the machine would need at its "
    "measured limits, where that is near. Whether a row differs from the baseline is the verdict in the "
    "table, which comes from paired rounds."
)
DEFAULT_READING = " An engine's name, or `both`, stands behind the row that it runs by default."
WIDTH = 640  # pixels
TICKS = "Each tick is the time per call in one round; blocks are below each other."
PAIR = " The second strip of a baseline is the same code, prepared a second time: the difference is noise."
DISTURBED = " Crosses are disturbed rounds that count, triangles disturbed rounds that were left out."
CHOICE = " Choose a row below the picture to see it beside its baseline alone."
AGAIN = " (again)"  # ends the name of the rerun of an A/A pair
SHAPES = {"quiet": "stroke", "disturbed": "cross", "left out": "triangle-up"}  # kind of a round -> its mark
SHOWN = ("status", "time_us", "low_us", "high_us", "tflops", "gbps", "percent_of_ceiling", "reason")
"""The attributes of a cell that the table of a ranking shows."""


def ranking(cases: Sequence[MeasuredCase]) -> Chart:
    """The ranking of one case, in one run or in several. A note of the section has rows that cannot run."""
    shown_names = shown_rows(cases)
    rows = [(case, row) for case in cases for row in case.rows if row.cell.status != "unsupported"]
    fastest_us = min((row.cell.time_us for _, row in rows if row.cell.time_us), default=math.nan)
    values = [_row_data(case, row, shown_names, fastest_us) for case, row in rows]
    values.sort(key=lambda value: (value["time_us"] or math.inf, value["name"]))
    _, time_columns = add_times_in_unit(values)
    has_defaults = any(value["default"] for value in values)
    columns: Columns = {
        "implementation": "name", **({"default": "default"} if has_defaults else {}),
        **time_columns, "vs fastest": ("ratio", significant),
        "vs baseline": ("speedup", "vs_baseline"), "verdict": "verdict",
        "TFLOPS": ("tflops", significant), "GB/s": ("gbps", significant),
        "% of limit": ("percent_of_ceiling", significant), "status": "status", "note": "reason",
    }  # fmt: skip
    key = cases[0].planned.key
    chart = Chart(anchor("ranking", key), "Time of a call", RANKING_READING, table=table(values, columns))
    timed = [value for value in values if value["time_us"] is not None]
    if not timed:
        chart.reading = "Nothing has a time."
        return chart
    failed = [value for value in values if value["time_us"] is None]
    # By label of the run the time at the measured limits, as a multiple of the fastest. A line further off
    # would leave the rows little room.
    limits = {case.label: (case.limit_us or 0.0) / fastest_us for case in cases}
    limits = {label: limit for label, limit in limits.items() if limit > 1 / FAR}
    if has_defaults:
        chart.reading += DEFAULT_READING
    if any(value["status"] == "checked" for value in failed):
        chart.reading += " checked: right, but not timed here."
    chart.reading += not_shown(timed)
    chart.picture, chart.marks = _ranking_picture(timed, failed, limits), len(timed)
    devices = ", ".join(dict.fromkeys(device(case.run) for case in cases))
    chart.about = f"{key}, {devices}. {slow_rows(timed)}"
    return chart


def _row_data(case: MeasuredCase, row: Row, shown_names: Container[str], fastest_us: float) -> dict[str, Any]:
    """What the chart and the table of a ranking show of a row."""
    cell = row.cell
    engines = case.engines_of(cell)
    default_of = "both" if len(engines) == 2 else "".join(engines)
    name, time_text = case.named(cell.name), microseconds(cell.time_us)
    ratio = cell.time_us / fastest_us if cell.time_us else None
    speedup = 1.0 if row.is_baseline else None
    if row.verdict:
        speedup = row.verdict.ratio
    return {key: getattr(cell, key) for key in SHOWN} | {
        "name": name, "label": f"{name} ({default_of})" if default_of else name,
        "provider": style.provider(cell.name), "default": default_of, "ratio": ratio, "text": time_text,
        "interval": f"{microseconds(cell.low_us)} to {microseconds(cell.high_us)}" if cell.low_us else "none",
        "vs_baseline": verdict_text(row), "speedup": speedup, "verdict": row.word,
        "share_text": significant(cell.percent_of_ceiling), "description": f"{name}: {time_text}",
        "anchor": case.row_anchor(cell), "shown": cell.name in shown_names and (ratio or 0.0) <= FAR,
    }  # fmt: skip


def _ranking_picture(
    timed: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]], limits: dict[str, float]
) -> alt.TopLevelMixin:
    """timed, failed: data of rows with a time, the fastest first, and of those without
    limits: by label of the run the time at the limits of its machine, as a multiple of the fastest"""
    fastest_us, choice = timed[0]["time_us"], style.choice_of_rows(timed)
    ends = [interval_ends(value["time_us"], value["low_us"], value["high_us"]) for value in timed]
    marks = [{**value, "low": low / fastest_us, "high": high / fastest_us}
             for value, (low, high) in zip(timed, ends, strict=True)]  # fmt: skip
    order = [value["label"] for value in (*timed, *failed)]
    y = style.name_axis(order, "label")
    scale = alt.Scale(type="log", nice=False, padding=24)
    colour = style.provider_colour(mark["provider"] for mark in marks)
    title = f"time per call, as a multiple of {timed[0]['text']} (log scale)"
    x = alt.X("ratio:Q", scale=scale, title=title)
    base = alt.Chart({"values": marks}).encode(y=y)
    base = base.transform_filter(style.CHOSEN) if choice else base
    tooltip = style.tooltips(name="implementation", text="time", interval="", vs_baseline="vs baseline",
                         verdict="", share_text="% of limit")  # fmt: skip
    dots = {"x": x, "tooltip": tooltip, "description": "description:N"}
    layers = style.interval_dots(base.encode(color=colour), **dots)
    layers.append(base.mark_text(align="left", dx=9, fontSize=11, aria=False).encode(x=x, text="text:N"))
    if limits:
        # The first text begins at its line, others end at theirs, each above the one before: none overlap.
        lines = [
            {"limit": limits[label], "what": f"limit of {label or 'this machine'}", "place": place}
            for place, label in enumerate(sorted(limits, key=lambda label: limits[label]))
        ]
        line = alt.Chart({"values": lines}).encode(x="limit:Q")
        text = line.mark_text(
            align=alt.expr("datum.place ? 'right' : 'left'"), dx=alt.expr("datum.place ? 4 : -4"),
            dy=alt.expr("-12 * datum.place"), baseline="bottom", fontSize=10,
        )  # fmt: skip
        layers.append(line.mark_rule(strokeDash=[5, 4], color="#888"))
        layers.append(text.encode(y=alt.value(-3), text="what:N"))
    if failed:
        words = [{"label": v["label"], "status": v["status"], "failed": v["status"] != "checked"}
                 for v in failed]  # fmt: skip
        red = alt.condition("datum.failed", alt.value("#D55E00"), alt.value("#888888"))
        text = alt.Chart({"values": words}).mark_text(align="left", fontWeight="bold")
        layers.append(text.encode(y=y, x=alt.value(4), text="status:N", color=red))
    picture = alt.layer(*layers).properties(width=WIDTH, height=alt.Step(style.name_step(order, 24)))
    return picture.add_params(choice) if choice else picture


# Rounds


def rounds(case: MeasuredCase, most: int) -> Chart | None:
    """The times of all rows of a case in all rounds, from which the verdicts come. None where no round was
    kept. Of more than `most` ticks, quiet ones are left out evenly from the picture. The table has all."""
    points = list(_ticks(case))
    if not points:
        return None
    choice = _choice_beside_baseline(case)
    every = math.ceil(len(points) / most)
    drawn = [point for i, point in enumerate(points) if point["kind"] != "quiet" or i % every == 0]
    common = unit(min(point["us"] for point in points))
    for point in points:
        point["time"] = round(point["us"] / common.us, 5)
    reading = TICKS
    if any(point["name"] != point["row"] for point in points):
        reading += PAIR
    if choice:
        reading += CHOICE
    if any(point["kind"] != "quiet" for point in points):
        reading += DISTURBED
    if every > 1:
        reading += f" Of the quiet rounds 1 in {every} is drawn; the table has all."
    columns: Columns = {
        "implementation": "name", "block": ("block", str), "round": ("round", str),
        f"time, {common.name}": ("time", four_digits), "state": "state",
    }  # fmt: skip
    key = case.planned.key
    return Chart(
        anchor("rounds", case.label, key), case.named("Rounds"), reading,
        _rounds_picture(drawn, common.name, choice), table(points, columns), marks=len(drawn),
        about=f"{key}, {device(case.run)}",
    )  # fmt: skip


def _ticks(case: MeasuredCase) -> Iterator[dict[str, Any]]:
    """Yields the data of a tick for each row and round: first the rounds in the samples, then the disturbed
    rounds that were left out. A rerun has a name of its own, but the `row` of its baseline."""
    counted = {(r.block, r.round) for r in case.done.disturbed if r.counted}

    def tick(
        name: str, block: int, number: int, seconds: float, kind: str, reason: str = ""
    ) -> dict[str, Any]:
        return {
            "name": name, "row": name.removesuffix(AGAIN), "provider": style.provider(name), "block": block,
            "round": number, "us": seconds * 1e6, "state": f"{kind}: {reason}" if reason else kind,
            "kind": kind,
        }  # fmt: skip

    for cell in case.timed:
        pairs = [v for v in case.verdicts if v.about == "A/A" and v.b == cell.name]
        strips = [(cell.name, cell.samples), *((cell.name + AGAIN, pair.samples) for pair in pairs)]
        for name, samples in strips:
            for (block, number), seconds in samples.by_round.items():
                kind = "disturbed" if (block, number) in counted else "quiet"
                yield tick(name, block, number, seconds, kind)
    for r in case.done.disturbed:
        for name, seconds in r.seconds.items():
            yield tick(name, r.block, r.round, seconds, "left out", r.reason)


def _choice_beside_baseline(case: MeasuredCase) -> alt.Parameter | None:
    """A control below the picture by which a reader chooses to see the best rows (at first, where there are
    many), all, or one row beside its baseline. It sets the parameter `chosen` to the names of these rows, or
    to null for all. None where all rows are a row and its baseline, or none has a verdict."""
    pairs = [(row.cell.name, row.verdict.b) for row in case.rows if row.cell.time_us and row.verdict]
    if len(pairs) < 2:
        return None
    labels = ["all", *(name for name, _ in pairs)]
    options: list[Sequence[str] | None] = [None, *pairs]
    if len(case.timed) > FEW and case.run.contrast == "implementations":
        best = sorted({*shown_rows([case]), *case.baselines})
        labels, options = ["best", *labels], [best, *options]
    select = alt.binding_select(options=options, labels=labels, name="Row: ")
    return alt.param(name="chosen", value=options[0], bind=select)


def _rounds_picture(
    points: Sequence[dict[str, Any]], unit_name: str, choice: alt.Parameter | None
) -> alt.TopLevelMixin:
    """A strip of ticks for each row, with a line for each block; `choice`: see `_choice_beside_baseline`."""
    order = list(dict.fromkeys(point["name"] for point in points))
    blocks = len({point["block"] for point in points})
    shapes = {kind: SHAPES[kind] for kind in SHAPES if any(p["kind"] == kind for p in points)}
    legend = alt.Legend(orient="top") if len(shapes) > 1 else None
    log = alt.Scale(type="log", nice=False, padding=12)
    step = alt.Step(style.name_step(order, max(28, min(60, 5 * blocks))), **{"for": "position"})
    picture = (
        alt.Chart({"values": list(points)})
        .mark_point(size=36, opacity=0.75, strokeWidth=1.5, angle=90)
        .encode(
            x=alt.X("time:Q", scale=log, title=f"time per call, {unit_name} (log scale)"),
            y=style.name_axis(order),
            yOffset=alt.YOffset("block:O", scale=alt.Scale(paddingOuter=0.2)),
            color=style.provider_colour(point["provider"] for point in points),
            shape=alt.Shape("kind:N", scale=style.scale_of(shapes), title=None, legend=legend),
            tooltip=[*style.tooltips(name="implementation"), "block:Q", "round:Q",
                     alt.Tooltip("time:Q", title=f"time, {unit_name}"), "state:N"],
        )
        .properties(width=WIDTH, height=step)
    )  # fmt: skip
    if not choice:
        return picture
    shown = "chosen === null || indexof(chosen, datum.row) >= 0"
    return picture.add_params(choice).transform_filter(shown)
