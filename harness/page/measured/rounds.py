"""Distribution: every round's time of every row of a case, beside the A/A pair, so that a reader sees what a
verdict rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from harness.page.document import Chart, Table, TableRow, TableValue, anchor
from harness.page.measured.case import MeasuredCase, unit_of, us_text
from harness.page.style import name_step, names, provider, provider_scale
from harness.results.schema import Samples

if TYPE_CHECKING:
    import altair

TICKS = "Each tick is a round's time per call, one block below the other."
PAIR = " The second strip of a baseline is the same code prepared apart: what that is off by is noise."
DISTURBED = " Crosses are rounds that something disturbed and that count, triangles those that were left out."
CHOICE = " A row that is chosen below the picture stands beside its baseline alone."
AGAIN = " (again)"
"""Ends the name of the second of an A/A pair."""


def rounds(case: MeasuredCase, most: int) -> Chart | None:
    """Of one case; None where no round was kept.

    most: ticks that are drawn; of more, every second quiet one, or third ... The table has all.
    """
    points = list(_points(case))
    if not points:
        return None
    choices = [(cell.name, verdict.b) for cell in case.timed if (verdict := case.against_baseline(cell))]
    choices = choices if len(choices) > 1 else []  # one is beside its baseline alone already
    every = math.ceil(len(points) / most)
    drawn = [point for i, point in enumerate(points) if point["kind"] != "quiet" or i % every == 0]
    size, unit = unit_of(point["us"] for point in points)
    for point in points:
        point["time"] = round(point["us"] / size, 5)
    return Chart(
        anchor("rounds", case.label, case.planned.key),
        "Rounds",
        _reading(points, choices, every),
        _picture(drawn, unit, choices),
        _table(points),
        len(drawn),
    )


def _reading(points: Sequence[dict[str, Any]], choices: Sequence[tuple[str, str]], every: int) -> str:
    text = TICKS
    if any(point["name"] != point["of"] for point in points):
        text += PAIR
    if choices:
        text += CHOICE
    if any(point["kind"] != "quiet" for point in points):
        text += DISTURBED
    return text + (f" Of the quiet ones 1 in {every} is drawn; the table has all." if every > 1 else "")


def _points(case: MeasuredCase) -> Iterator[dict[str, Any]]:
    counted = {(r.block, r.round) for r in case.done.disturbed if r.counted}
    for cell in case.timed:
        yield from _strip(cell.name, cell.samples, counted)
        for pair in case.verdicts:
            if pair.about == "A/A" and pair.b == cell.name:
                yield from _strip(cell.name + AGAIN, pair.samples, counted)
    for dropped in case.done.disturbed:
        for name, seconds in dropped.seconds.items():
            yield _tick(name, dropped.block, dropped.round, seconds, f"left out: {dropped.reason}")


def _strip(name: str, samples: Samples, disturbed: set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for block, number, seconds in zip(samples.block, samples.round, samples.seconds, strict=True):
        yield _tick(name, block, number, seconds, "disturbed" if (block, number) in disturbed else "quiet")


def _tick(name: str, block: int, number: int, seconds: float, state: str) -> dict[str, Any]:
    kind = "left out" if state.startswith("left out") else state
    return {
        "name": name,
        "of": name.removesuffix(AGAIN),
        "provider": provider(name),
        "block": block,
        "round": number,
        "us": seconds * 1e6,
        "state": state,
        "kind": kind,
    }


def _picture(
    points: Sequence[dict[str, Any]], unit: str, choices: Sequence[tuple[str, str]]
) -> altair.TopLevelMixin:
    """choices: each a row and its baseline, which a reader may have alone"""
    import altair as alt

    order = list(dict.fromkeys(point["name"] for point in points))
    blocks = len({point["block"] for point in points})
    kinds = [kind for kind in ("quiet", "disturbed", "left out") if any(p["kind"] == kind for p in points)]
    shapes = {"quiet": "stroke", "disturbed": "cross", "left out": "triangle-up"}
    picture = (
        alt.Chart({"values": list(points)})
        .mark_point(size=36, opacity=0.75, strokeWidth=1.5, angle=90)
        .encode(
            x=alt.X(
                "time:Q",
                scale=alt.Scale(type="log", nice=False, padding=12),
                title=f"time per call, {unit} (log scale)",
            ),
            y=names(order),
            yOffset=alt.YOffset("block:O", scale=alt.Scale(paddingOuter=0.2)),
            color=alt.Color(
                "provider:N",
                scale=provider_scale(point["provider"] for point in points),
                legend=None,
            ),
            shape=alt.Shape(
                "kind:N",
                scale=alt.Scale(domain=kinds, range=[shapes[kind] for kind in kinds]),
                title=None,
                legend=alt.Legend(orient="top") if len(kinds) > 1 else None,
            ),
            tooltip=[
                alt.Tooltip("name:N", title="implementation"),
                alt.Tooltip("block:Q"),
                alt.Tooltip("round:Q"),
                alt.Tooltip("time:Q", title=f"time, {unit}"),
                alt.Tooltip("state:N"),
            ],
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


def _table(points: Sequence[dict[str, Any]]) -> Table:
    columns = ("implementation", "block", "round", "time, us", "state")
    rows = [
        TableRow(
            [
                point["name"],
                TableValue(str(point["block"]), point["block"]),
                TableValue(str(point["round"]), point["round"]),
                TableValue(us_text(point["us"]), point["us"]),
                point["state"],
            ]
        )
        for point in points
    ]
    return Table(columns, rows, frozenset({"block", "round", "time, us"}))
