"""Section of an A/B of a server: the effects, and each launch of every pair."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import altair as alt

from harness.files import JsonObject
from harness.page.document import Chart, Number, PageSection, anchor, table
from harness.page.serving.shared import AFTER, BEFORE, PREDICTED, TARGET, digits, names_axis
from harness.serving.ab.record import Record
from harness.serving.ab.result import NAMES, UNITS, closing, interval_text, row, summary

PANEL = 170  # the width of one metric's plot in pixels
COLOURS = (BEFORE, AFTER, TARGET, PREDICTED)
SHAPES = ("circle", "diamond", "square", "triangle-up")


def ab_section(folder: Path) -> PageSection:
    """The section of a folder with ab.json, which may hold fewer pairs than planned. Raises UsageError."""
    record = Record(folder)
    result, name = summary(record), folder.name or "A/B"
    base, *others = result["plan"]["arms"]
    headline = []
    for verdict in result["verdicts"]:
        if verdict["decides"]:
            arm, metric = verdict["a"], NAMES[verdict["metric"]]
            change = f"{metric} {verdict['percent']:+.2f} %, {interval_text(verdict)}"
            headline.append(f"{arm}: {verdict['verdict']} ({change})")
    engine = " ".join(filter(None, (result["engine"].get("engine"), result["engine"].get("version"))))
    notes = [("engine", engine)] if engine else []
    notes += [("note", line.removeprefix("note: ")) for line in closing(result)]
    to_show = shlex.join(["serving", "ab", "--resume", str(folder)])
    notes.append(("shown by", f"python -m harness {to_show}"))
    return PageSection(
        anchor=anchor("ab", name),
        title=f"{name}: {', '.join(others)} against {base}",
        headline="; ".join(headline) or "No pair was finished yet.",
        charts=list(_charts(record, result, anchor("ab", name))) if result["pairs"] else [],
        notes=notes,
    )


def _charts(record: Record, result: JsonObject, prefix: str) -> Iterator[Chart]:
    """The charts, whose anchors begin with the prefix."""
    arms = list(result["plan"]["arms"])
    metrics = list(dict.fromkeys(verdict["metric"] for verdict in result["verdicts"]))
    # Pair 0 is a launch before the pairs, which does not count.
    launches = {f"pair {pair}": by_arm for pair, by_arm in record.pairs().items() if pair}
    effects = [row(verdict, arms[0]) for verdict in result["verdicts"]]
    yield Chart(
        f"{prefix}-effects",
        "Effects",
        "A change is of the metric itself: less time or more throughput is faster. One metric "
        "decides; the words in brackets hold each for itself.",
        table=table(effects, {name: name for name in effects[0]}),
    )
    marks = {metric: list(_marks(launches, metric, arms)) for metric in metrics}
    columns: dict[str, str | Number] = {"pair": "pair"}
    rows: list[JsonObject] = [{"pair": pair} for pair in launches]
    for metric, arm in itertools.product(metrics, arms):
        name = f"{NAMES[metric]} of {arm}, {UNITS[metric]}"
        columns[name] = (name, digits())
        for row_of_pair, by_arm in zip(rows, launches.values(), strict=True):
            row_of_pair[name] = by_arm[arm]["metrics"][metric]
    yield Chart(
        f"{prefix}-pairs",
        "Pairs of launches",
        "A line is a pair: one launch of each arm, with the same prompts. Where every line leads to "
        "the same side, the change is no accident of one launch. The axes do not begin at zero.",
        _picture(marks, arms),
        table(rows, columns),
        sum(map(len, marks.values())),
    )


def _marks(launches: dict[str, dict[str, JsonObject]], metric: str, arms: list[str]) -> Iterator[JsonObject]:
    """The data of a point for each launch. The point of the base also has the ends of its pair's line."""
    for pair, by_arm in launches.items():
        values = {arm: by_arm[arm]["metrics"][metric] for arm in arms}
        known = [value for value in values.values() if value is not None]
        base = values[arms[0]]
        for arm, value in values.items():
            if value is not None:
                change = f"{100 * (value / base - 1):+.2f} %" if base else ""
                aria = f"{pair}, {arm}: {value:.5g} {UNITS[metric]}, {change}"
                yield {"pair": pair, "arm": arm, "value": value, "change": change, "line": arm == arms[0],
                       "from": min(known), "to": max(known), "aria": aria}  # fmt: skip


def _picture(marks: dict[str, list[JsonObject]], arms: list[str]) -> alt.TopLevelMixin:
    """A panel for each metric, with a line for each pair. marks: by metric"""
    repeats = len(arms) // len(COLOURS) + 1  # more arms than colours take colours again
    legend = alt.Legend(title=None, orient="top")
    colours = alt.Scale(domain=arms, range=(COLOURS * repeats)[: len(arms)])
    shapes = alt.Scale(domain=arms, range=(SHAPES * repeats)[: len(arms)])
    panels: list[Any] = []
    for metric, marks_of_metric in marks.items():
        title = f"{NAMES[metric]}, {UNITS[metric]}"
        places = list(dict.fromkeys(mark["pair"] for mark in marks_of_metric))
        y = names_axis("pair").scale(domain=places)
        x_axis, scale = alt.Axis(title=title, tickCount=4), alt.Scale(zero=False, padding=12)
        # The first panel names the pairs for all.
        chart = alt.Chart({"values": marks_of_metric}).encode(y=y.axis(None) if panels else y)
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
