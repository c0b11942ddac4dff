"""Section of an A/B of a server: the effects, and each launch of every pair."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.files import JsonObject
from harness.page.document import Chart, PageSection, Table, TableRow, TableValue, anchor
from harness.page.serving.colours import AFTER, BEFORE, PREDICTED, TARGET
from harness.page.serving.marks import LABEL, cell, records
from harness.serving.ab.record import Record
from harness.serving.ab.report import NAMES, UNITS, closing, interval_text
from harness.serving.ab.result import percent, summary

if TYPE_CHECKING:
    import altair

PANEL = 170  # pixels of one metric's plot
COLOURS = (BEFORE, AFTER, TARGET, PREDICTED)
SHAPES = ("circle", "diamond", "square", "triangle-up")


def ab_section(folder: Path) -> PageSection:
    """Of a folder with ab.json; what is not done yet is said. Raises UsageError."""
    record = Record(folder)
    found, name = summary(record), folder.name or "A/B"
    where = anchor("ab", name)
    arms = list(found["plan"]["arms"])
    return PageSection(
        anchor=where,
        title=f"{name}: {', '.join(arms[1:])} against {arms[0]}",
        headline=_headline(found),
        charts=list(_charts(record, found, where, arms)) if found["pairs"] else [],
        notes=[
            (
                "engine",
                " ".join(filter(None, (found["engine"].get("engine"), found["engine"].get("version")))),
            ),
            *(("note", line) for line in closing(found)),
            ("goes on", "python -m harness " + shlex.join(["serving", "ab", "--resume", str(folder)])),
        ],
    )


def _headline(found: JsonObject) -> str:
    words = [
        f"{line['a']}: {line['verdict']} ({NAMES[line['metric']]} {line['change_percent']:+.2f} %, "
        f"{interval_text(line)})"
        for line in found["verdicts"]
        if line["decides"]
    ]
    return "; ".join(words) or "No pair was finished yet."


def _charts(record: Record, found: JsonObject, where: str, arms: list[str]) -> Iterator[Chart]:
    metrics = list(dict.fromkeys(line["metric"] for line in found["verdicts"]))
    marks = {metric: _marks(record, metric, arms) for metric in metrics}
    yield Chart(
        anchor=f"{where}-effects",
        title="Effects",
        reading="A change is of the metric itself: less time or more throughput is faster. One metric decides; "
        "the words in brackets hold each for itself.",
        table=_effects(found),
    )
    yield Chart(
        anchor=f"{where}-pairs",
        title="Pairs of launches",
        reading="A line is a pair: one launch of each arm, with the same prompts. Where every line leads to the "
        "same side, the change is no accident of one launch. The axes do not begin at zero.",
        picture=_picture(marks, arms),
        table=_pairs(record, metrics, arms),
        marks=sum(map(len, marks.values())),
    )


def _effects(found: JsonObject) -> Table:
    rows = [
        TableRow([
            line["a"], NAMES[line["metric"]], cell(line["base"]), cell(line["arm"]),
            TableValue(f"{line['change_percent']:+.2f}", line["change_percent"]), interval_text(line),
            line["verdict"] if line["decides"] else f"({line['verdict']})",
        ])
        for line in found["verdicts"]
    ]  # fmt: skip
    numeric = ["base", "arm's", "change, %"]
    return Table(["arm", "metric", *numeric, "interval", "verdict"], rows, frozenset(numeric))


def _pairs(record: Record, metrics: list[str], arms: list[str]) -> Table:
    columns = [f"{NAMES[metric]} of {arm}, {UNITS.get(metric, 'ms')}" for metric in metrics for arm in arms]
    rows = [
        TableRow(
            [f"pair {pair}", *(cell(runs[arm]["metrics"][metric]) for metric in metrics for arm in arms)]
        )
        for pair, runs in sorted(record.pairs().items())
        if pair
    ]
    return Table(["pair", *columns], rows, frozenset(columns))


def _marks(record: Record, metric: str, arms: list[str]) -> list[dict[str, Any]]:
    """One of each launch; the base's has the ends of its pair's line."""
    marks = []
    for pair, runs in sorted(record.pairs().items()):
        values = {arm: runs[arm]["metrics"][metric] for arm in arms}
        there = [value for value in values.values() if value is not None]
        for arm, value in values.items():
            if pair and value is not None:
                base = values[arms[0]]
                ratio = None if not base else base / value if metric != "throughput" else value / base
                change = "" if ratio is None else f"{percent(ratio, metric):+.2f} %"
                marks.append({
                    "pair": f"pair {pair}", "arm": arm, "value": value, "change": change, "line": arm == arms[0],
                    "from": min(there), "to": max(there), "aria": f"pair {pair}, {arm}: {value:.5g} {change}",
                })  # fmt: skip
    return marks


def _picture(marks: dict[str, list[dict[str, Any]]], arms: list[str]) -> altair.TopLevelMixin:
    import altair as alt

    panels = []
    for metric, of_metric in marks.items():
        title = f"{NAMES[metric]}, {UNITS.get(metric, 'ms')}"
        axis = None if panels else alt.Axis(labelLimit=LABEL)
        places = list(dict.fromkeys(mark["pair"] for mark in of_metric))
        y = alt.Y("pair:N", sort=None, title=None, axis=axis, scale=alt.Scale(domain=places))
        scale = alt.Scale(zero=False, padding=12)
        x = alt.X("value:Q", axis=alt.Axis(title=title, tickCount=4), scale=scale)
        many = len(arms) // len(COLOURS) + 1
        legend = alt.Legend(title=None, orient="top")
        colours = alt.Scale(domain=arms, range=(COLOURS * many)[: len(arms)])
        shapes = alt.Scale(domain=arms, range=(SHAPES * many)[: len(arms)])
        tooltip = [alt.Tooltip("pair:N"), alt.Tooltip("arm:N"), alt.Tooltip("value:Q", title=title, format=".5g"),
                   alt.Tooltip("change:N", title="against the first arm")]  # fmt: skip
        chart = alt.Chart(records(of_metric)).encode(y=y)
        line = chart.transform_filter(alt.FieldEqualPredicate(field="line", equal=True))
        rule = line.mark_rule(color="#888888").encode(x=alt.X("from:Q", scale=scale), x2="to:Q")
        points = chart.mark_point(filled=True, size=60, opacity=1).encode(
            x=x,
            color=alt.Color("arm:N", scale=colours, legend=legend),
            shape=alt.Shape("arm:N", scale=shapes, legend=legend),
            tooltip=tooltip,
            description=alt.Description("aria:N"),
        )
        panels.append(alt.layer(rule, points).properties(width=PANEL, height=alt.Step(26)))
    return alt.hconcat(*panels, spacing=14)
