"""Section of an A/B of a server: the effects, and each launch of every pair."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import altair as alt

from harness.files import JsonObject
from harness.page.document import Chart, Columns, PageSection, anchor, table
from harness.page.serving.shared import AFTER, BEFORE, PREDICTED, TARGET, digits, names_axis
from harness.serving.ab.record import Record
from harness.serving.ab.result import NAMES, UNITS, closing, row, summary

PANEL = 170  # pixels of one metric's plot
COLOURS = (BEFORE, AFTER, TARGET, PREDICTED)
SHAPES = ("circle", "diamond", "square", "triangle-up")


def ab_section(folder: Path) -> PageSection:
    """Of a folder with ab.json; what is not done yet is said. Raises UsageError."""
    record = Record(folder)
    found, name = summary(record), folder.name or "A/B"
    base, *others = found["plan"]["arms"]
    cells = [list(row(line, base).values()) for line in found["verdicts"] if line["decides"]]
    words = [f"{arm}: {word} ({metric} {change}, {ends})" for arm, metric, word, change, ends, *_ in cells]
    engine = " ".join(filter(None, (found["engine"].get("engine"), found["engine"].get("version"))))
    return PageSection(
        anchor=anchor("ab", name),
        title=f"{name}: {', '.join(others)} against {base}",
        headline="; ".join(words) or "No pair was finished yet.",
        charts=list(_charts(record, found, anchor("ab", name))) if found["pairs"] else [],
        notes=[
            *([("engine", engine)] if engine else []),
            *(("note", line.removeprefix("note: ")) for line in closing(found)),
            ("shown by", "python -m harness " + shlex.join(["serving", "ab", "--resume", str(folder)])),
        ],
    )


def _charts(record: Record, found: JsonObject, where: str) -> Iterator[Chart]:
    arms = list(found["plan"]["arms"])
    metrics = list(dict.fromkeys(line["metric"] for line in found["verdicts"]))
    runs = {f"pair {pair}": of_pair for pair, of_pair in record.pairs().items() if pair}
    effects = [row(line, arms[0]) for line in found["verdicts"]]
    yield Chart(
        f"{where}-effects",
        "Effects",
        "A change is of the metric itself: less time or more throughput is faster. One metric "
        "decides; the words in brackets hold each for itself.",
        table=table(effects, {name: name for name in effects[0]}),
    )
    marks = {metric: list(_marks(runs, metric, arms)) for metric in metrics}
    columns: Columns = {"pair": "pair"} | {
        f"{NAMES[metric]} of {arm}, {UNITS[metric]}": (f"{metric} {arm}", digits())
        for metric in metrics
        for arm in arms
    }
    rows = [
        {"pair": pair}
        | {f"{metric} {arm}": of_pair[arm]["metrics"][metric] for metric in metrics for arm in arms}
        for pair, of_pair in runs.items()
    ]
    yield Chart(
        f"{where}-pairs",
        "Pairs of launches",
        "A line is a pair: one launch of each arm, with the same prompts. Where every line leads to "
        "the same side, the change is no accident of one launch. The axes do not begin at zero.",
        _picture(marks, arms),
        table(rows, columns),
        sum(map(len, marks.values())),
    )


def _marks(runs: dict[str, dict[str, JsonObject]], metric: str, arms: list[str]) -> Iterator[dict[str, Any]]:
    """One of each launch; the base's has the ends of its pair's line."""
    for pair, of_pair in runs.items():
        values = {arm: of_pair[arm]["metrics"][metric] for arm in arms}
        there = [value for value in values.values() if value is not None]
        base = values[arms[0]]
        for arm, value in values.items():
            if value is not None:
                change = f"{100 * (value / base - 1):+.2f} %" if base else ""
                aria = f"{pair}, {arm}: {value:.5g} {UNITS[metric]}, {change}"
                yield {"pair": pair, "arm": arm, "value": value, "change": change, "line": arm == arms[0],
                       "from": min(there), "to": max(there), "aria": aria}  # fmt: skip


def _picture(marks: dict[str, list[dict[str, Any]]], arms: list[str]) -> alt.TopLevelMixin:
    """A panel for each metric, a line of each for every pair."""
    many = len(arms) // len(COLOURS) + 1
    legend = alt.Legend(title=None, orient="top")
    colours = alt.Scale(domain=arms, range=(COLOURS * many)[: len(arms)])
    shapes = alt.Scale(domain=arms, range=(SHAPES * many)[: len(arms)])
    panels: list[Any] = []
    for metric, of_metric in marks.items():
        title = f"{NAMES[metric]}, {UNITS[metric]}"
        places = list(dict.fromkeys(mark["pair"] for mark in of_metric))
        y = names_axis("pair").scale(domain=places)
        x_axis, scale = alt.Axis(title=title, tickCount=4), alt.Scale(zero=False, padding=12)
        chart = alt.Chart({"values": of_metric}).encode(y=y.axis(None) if panels else y)
        line = chart.transform_filter(alt.FieldEqualPredicate(field="line", equal=True))
        points = chart.mark_point(filled=True, size=60, opacity=1).encode(
            x=alt.X("value:Q", axis=x_axis, scale=scale),
            color=alt.Color("arm:N", scale=colours, legend=legend),
            shape=alt.Shape("arm:N", scale=shapes, legend=legend),
            tooltip=["pair:N", "arm:N", alt.Tooltip("value:Q", title=title, format=".5g"),
                     alt.Tooltip("change:N", title="against the first arm")],
            description="aria:N",
        )  # fmt: skip
        rule = line.mark_rule(color="#888888").encode(x=alt.X("from:Q", axis=x_axis, scale=scale), x2="to:Q")
        panels.append(alt.layer(rule, points).properties(width=PANEL, height=alt.Step(26)))
    return alt.hconcat(*panels, spacing=14)
