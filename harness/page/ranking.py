"""Times of a case: the ranking with intervals, and every round of every row."""

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
    in_unit,
    interval_ends,
    not_shown,
    shown_rows,
    slow_rows,
    us_text,
    verdict_text,
)
from harness.page.document import Chart, Columns, anchor, table
from harness.report.rows import Row, device
from harness.report.text import microseconds, significant, unit

RANKING = (
    "Each line is an implementation: the dot is its time per call as a multiple of the fastest, the bar its "
    "interval; further left is faster. A dashed line is the time that the machine would need at its "
    "measured limits, where that is near. Whether a row differs from the baseline is the verdict in the "
    "table, which comes from paired rounds."
)
DEFAULT = " An engine's name, or `both`, stands behind the row that it runs by default."
WIDTH = 640
TICKS = "Each tick is the time per call in one round; blocks are below each other."
PAIR = " The second strip of a baseline is the same code, prepared a second time: the difference is noise."
DISTURBED = " Crosses are disturbed rounds that count, triangles disturbed rounds that were left out."
CHOICE = " Choose a row below the picture to see it beside its baseline alone."
AGAIN = " (again)"  # ends the name of the second of an A/A pair
SHAPES = {"quiet": "stroke", "disturbed": "cross", "left out": "triangle-up"}  # the marks of rounds
SHOWN = ("status", "time_us", "low_us", "high_us", "tflops", "gbps", "percent_of_ceiling", "reason")
"""The attributes of a cell that the table of a ranking shows."""


def ranking(cases: Sequence[MeasuredCase]) -> Chart:
    """The ranking of one case, in one run or in several; a note has the rows that cannot run."""
    rows = [(case, row) for case in cases for row in case.rows if row.cell.status != "unsupported"]
    rows.sort(key=lambda of: (of[1].cell.time_us or math.inf, of[0].named(of[1].cell.name)))
    shown, fastest = shown_rows(cases), rows[0][1].cell.time_us or math.nan if rows else math.nan
    values = [_values(case, row, shown, fastest) for case, row in rows]
    _, times = in_unit(values)
    defaults = any(value["default"] for value in values)
    columns: Columns = {
        "implementation": "name", **({"default": "default"} if defaults else {}),
        **times, "vs fastest": ("ratio", significant),
        "vs baseline": ("speedup", "against"), "verdict": "verdict",
        "TFLOPS": ("tflops", significant), "GB/s": ("gbps", significant),
        "% of limit": ("percent_of_ceiling", significant), "status": "status", "note": "reason",
    }  # fmt: skip
    key = cases[0].planned.key
    place, numbers = anchor("ranking", key), table(values, columns)
    timed = [value for value in values if value["time_us"] is not None]
    if not timed:
        return Chart(place, "Time of a call", "Nothing has a time.", table=numbers)
    failed = [value for value in values if value["time_us"] is None]
    near = fastest / FAR  # a line further off would leave the rows little room
    limits = {case.label: us / fastest for case, _ in rows if (us := case.limit_us) and us > near}
    checked = any(value["status"] == "checked" for value in failed)
    reading = RANKING + DEFAULT * defaults
    reading += " checked: right, but not timed here." if checked else ""
    picture = _ranking_picture(timed, failed, limits)
    about = f"{key}, {', '.join(dict.fromkeys(device(case.run) for case in cases))}. {slow_rows(timed)}"
    return Chart(place, "Time of a call", reading + not_shown(timed), picture, numbers, len(timed), about)


def _values(case: MeasuredCase, row: Row, shown: Container[str], fastest: float) -> dict[str, Any]:
    """shown: names of cells
    fastest: the least time of all, in microseconds"""
    cell = row.cell
    engines = case.engines_of(cell)
    engine = "both" if len(engines) == 2 else "".join(engines)
    name, time = case.named(cell.name), microseconds(cell.time_us)
    values = {key: getattr(cell, key) for key in SHOWN} | {
        "name": name,
        "label": name + f" ({engine})" * bool(engine),
        "provider": style.provider(cell.name),
        "default": engine,
        "ratio": cell.time_us and cell.time_us / fastest,
        "text": time,
        "ends": f"{microseconds(cell.low_us)} to {microseconds(cell.high_us)}" if cell.low_us else "none",
        "against": verdict_text(row.verdict, row.is_baseline),
        "speedup": row.verdict.ratio if row.verdict else 1.0 if row.is_baseline else None,
        "verdict": row.word,
        "share": significant(cell.percent_of_ceiling),
        "text_of_all": f"{name}: {time}",
        "anchor": case.row_anchor(cell),
    }
    return values | {"shown": cell.name in shown and (values["ratio"] or 0.0) <= FAR}


def _ranking_picture(
    timed: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]], limits: dict[str, float]
) -> alt.TopLevelMixin:
    """limits: times at the measured limits of the machine as multiples of the fastest, by label of the run"""
    fastest, choice = timed[0]["time_us"], style.chosen_rows(timed)
    marks = []
    for value in timed:
        low, high = interval_ends(value["time_us"], value["low_us"], value["high_us"])
        marks.append({**value, "low": low / fastest, "high": high / fastest})
    order = [value["label"] for value in (*timed, *failed)]
    y = style.names(order, "label")
    scale = alt.Scale(type="log", nice=False, padding=24)
    colour = style.provider_colour(mark["provider"] for mark in marks)
    title = f"time per call, as a multiple of {timed[0]['text']} (log scale)"
    x = alt.X("ratio:Q", scale=scale, title=title)
    base = alt.Chart({"values": marks}).encode(y=y)
    base = base.transform_filter(style.CHOSEN) if choice else base
    layers = style.interval_dots(
        base.encode(color=colour),
        x=x,
        tooltip=style.tips(
            name="implementation", text="time", ends="interval", against="vs baseline", verdict="",
            share="% of limit",
        ),
        description="text_of_all:N",
    )  # fmt: skip
    layers.append(base.mark_text(align="left", dx=9, fontSize=11, aria=False).encode(x=x, text="text:N"))
    if limits:
        lines = [
            {"limit": ratio, "what": f"limit of {label or 'this machine'}", "above": above}
            for above, (label, ratio) in enumerate(sorted(limits.items(), key=lambda of: of[1]))
        ]
        line = alt.Chart({"values": lines}).encode(x="limit:Q")
        side, apart = alt.expr("datum.above ? 'right' : 'left'"), alt.expr("datum.above ? 4 : -4")
        raised = alt.expr("-12 * datum.above")
        text = line.mark_text(align=side, dx=apart, dy=raised, baseline="bottom", fontSize=10)
        layers.append(line.mark_rule(strokeDash=[5, 4], color="#888"))
        layers.append(text.encode(y=alt.value(-3), text="what:N"))
    if failed:
        words = [
            {"label": v["label"], "status": v["status"], "failed": v["status"] != "checked"} for v in failed
        ]
        red = alt.condition("datum.failed", alt.value("#D55E00"), alt.value("#888888"))
        text = alt.Chart({"values": words}).mark_text(align="left", fontWeight="bold")
        layers.append(text.encode(y=y, x=alt.value(4), text="status:N", color=red))
    picture = alt.layer(*layers).properties(width=WIDTH, height=alt.Step(style.name_step(order, 24)))
    return picture.add_params(choice) if choice else picture


# Rounds


def rounds(case: MeasuredCase, most: int) -> Chart | None:
    """Every round's time of every row of a case, beside the A/A pair: what the verdicts rest on. None where
    no round was kept.

    most: ticks that are drawn; where there are more, quiet ones are left out evenly. The table has all.
    """
    points = list(_ticks(case))
    if not points:
        return None
    choices = [(row.cell.name, row.verdict.b) for row in case.rows if row.cell.time_us and row.verdict]
    if len(choices) == 1:  # it is beside its baseline alone already
        choices = []
    many = len(case.timed) > FEW and case.run.contrast == "implementations"
    best = sorted({*shown_rows([case]), *case.baselines}) if many else []
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
        f"time, {name}": ("time", us_text), "state": "state",
    }  # fmt: skip
    key = case.planned.key
    place, picture = anchor("rounds", case.label, key), _rounds_picture(drawn, name, choices, best)
    title, about = case.named("Rounds"), f"{key}, {device(case.run)}"
    return Chart(place, title, reading, picture, table(points, columns), len(drawn), about)


def _ticks(case: MeasuredCase) -> Iterator[dict[str, Any]]:
    """A tick for each row and round: first all rounds in the samples, then the disturbed ones left out."""
    counted = {(r.block, r.round) for r in case.done.disturbed if r.counted}

    def tick(name: str, block: int, number: int, seconds: float, state: str, kind: str) -> dict[str, Any]:
        return {
            "name": name,
            "of": name.removesuffix(AGAIN),
            "provider": style.provider(name),
            "block": block,
            "round": number,
            "us": seconds * 1e6,
            "state": state,
            "kind": kind,
        }

    for cell in case.timed:
        pairs = [v.samples for v in case.verdicts if v.about == "A/A" and v.b == cell.name]
        for name, samples in ((cell.name, cell.samples), *((cell.name + AGAIN, pair) for pair in pairs)):
            for (block, number), seconds in samples.by_round.items():
                state = "disturbed" if (block, number) in counted else "quiet"
                yield tick(name, block, number, seconds, state, state)
    for dropped in case.done.disturbed:
        for name, seconds in dropped.seconds.items():
            state = f"left out: {dropped.reason}"
            yield tick(name, dropped.block, dropped.round, seconds, state, "left out")


def _rounds_picture(
    points: Sequence[dict[str, Any]], unit_name: str, choices: Sequence[tuple[str, str]], best: Sequence[str]
) -> alt.TopLevelMixin:
    """choices: each a row and its baseline, which a reader may choose to see alone
    best:    the rows that are shown first; empty: all"""
    order = list(dict.fromkeys(point["name"] for point in points))
    blocks = len({point["block"] for point in points})
    kinds = {kind: SHAPES[kind] for kind in SHAPES if any(p["kind"] == kind for p in points)}
    legend = alt.Legend(orient="top") if len(kinds) > 1 else None
    log = alt.Scale(type="log", nice=False, padding=12)
    step = alt.Step(style.name_step(order, max(28, min(60, 5 * blocks))), **{"for": "position"})
    picture = (
        alt.Chart({"values": list(points)})
        .mark_point(size=36, opacity=0.75, strokeWidth=1.5, angle=90)
        .encode(
            x=alt.X("time:Q", scale=log, title=f"time per call, {unit_name} (log scale)"),
            y=style.names(order),
            yOffset=alt.YOffset("block:O", scale=alt.Scale(paddingOuter=0.2)),
            color=style.provider_colour(point["provider"] for point in points),
            shape=alt.Shape("kind:N", scale=style.coded(kinds), title=None, legend=legend),
            tooltip=[
                *style.tips(name="implementation"), "block:Q", "round:Q",
                alt.Tooltip("time:Q", title=f"time, {unit_name}"), "state:N",
            ],
        )
        .properties(width=WIDTH, height=step)
    )  # fmt: skip
    if not choices:
        return picture
    labels = [*(["best"] if best else []), "all", *(name for name, _ in choices)]
    options = [*([best] if best else []), None, *choices]
    select = alt.binding_select(options=options, labels=labels, name="Row: ")
    return picture.add_params(alt.param(name="row", value=options[0], bind=select)).transform_filter(
        "row === null || indexof(row, datum.of) >= 0"
    )
