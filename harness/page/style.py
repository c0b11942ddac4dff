"""How charts look: colours by provider and by verdict, the theme, parts that several charts have, and a chart
as Vega-Lite's JSON. Text takes the page's own colour, so that charts can be read on light and on dark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from harness.page.document import Chart

TEMPLATES = Path(__file__).parent / "templates"
COLOURS: dict[str, dict[str, str]] = json.loads((TEMPLATES / "colours.json").read_text("utf-8"))
PROVIDERS = COLOURS["providers"]
OTHER = "#44AA99"  # the colour of a provider that a plug-in brings
LINE = 16  # pixels of a line of text
BREAKS = ", | · | @ "  # where the name of a row breaks into lines on an axis


def provider(name: str) -> str:
    """The provider of an implementation: `vllm` of `vllm.amx`, `flashmla` of `flashmla@vllm eager`."""
    return re.split("[.@ ]", name)[0]


def provider_colour(providers: Iterable[str]) -> alt.Color:
    colours = {name: PROVIDERS.get(name, OTHER) for name in sorted(set(providers))}
    return alt.Color("provider:N", scale=coded(colours), legend=None)


def chosen_rows(rows: Sequence[Mapping[str, Any]]) -> alt.Parameter | None:
    """A choice below a chart: the rows that are `shown` without being asked, all, or those of a provider.
    None where there is nothing to choose.

    rows: each with name, provider and shown
    """
    hidden = {row["provider"] for row in rows if not row["shown"]}
    if not hidden:
        return None
    options, labels = ["shown", "all", *sorted(hidden)], ["best", "all", *sorted(hidden)]
    select = alt.binding_select(options=options, labels=labels, name="Rows: ")
    return alt.param(name="rows", value="shown", bind=select)


def legend_values(rows: Sequence[Mapping[str, Any]]) -> list[str] | alt.ExprRef:
    """The names in the legend of a chart whose rows can be chosen, see `chosen_rows`: those that it shows."""
    names: dict[str, set[str]] = {}
    for row in rows:
        for choice in ("all", row["provider"], *(["shown"] if row["shown"] else [])):
            names.setdefault(choice, set()).add(row["name"])
    if names.get("shown") == names["all"]:
        return sorted(names["all"])
    return alt.ExprRef(json.dumps({choice: sorted(of) for choice, of in names.items()}) + "[rows]")


def shade(colour: str, place: int) -> str:
    """The colour for the first of several rows, lighter and darker ones for the next.

    colour: `#0072B2`
    """
    towards, part = ((0, 0.0), (255, 0.4), (0, 0.3), (255, 0.6), (0, 0.15), (255, 0.2))[place % 6]
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(value + (towards - value) * part):02x}" for value in parts)


CHOSEN = "rows === 'all' || (rows === 'shown' ? datum.shown : datum.provider === rows)"
"""Keeps the rows that a reader chose, see `chosen_rows`."""


def names(order: Sequence[str], field: str = "name") -> alt.Y:
    """An axis of rows in this order; the run has a line of its own, and so has each variable of a setting."""
    lines = alt.Axis(labelExpr=f"split(datum.label, regexp('{BREAKS}'))")
    return alt.Y(f"{field}:N", sort=order, title=None, axis=lines)


def name_step(order: Iterable[str], least: int) -> int:
    """The height of a row in pixels, in which the name with the most lines has room; at least `least`."""
    return max([least, *(LINE * len(re.split(BREAKS, name)) + 4 for name in order)])


def coloured(field: str, codes: Mapping[str, str], opacity: float = 1.0) -> alt.Color:
    """The colours of a field's values, with a legend of the same opacity as the marks above the picture."""
    legend = alt.Legend(symbolOpacity=opacity, orient="top")
    return alt.Color(f"{field}:N", scale=coded(codes), title=None, legend=legend)


def coded(codes: Mapping[str, str]) -> alt.Scale:
    return alt.Scale(domain=list(codes), range=list(codes.values()))


def tips(**titles: str) -> list[alt.Tooltip]:
    """Tooltips by the names of fields, with their titles; an empty title stands for the name."""
    return [
        alt.Tooltip(f"{name}:N", title=title) if title else alt.Tooltip(f"{name}:N")
        for name, title in titles.items()
    ]


def interval_dots(base: alt.Chart, **dot: Any) -> list[alt.Chart]:
    """The layers of a bar from `low` to `high`, and of a dot on it for each row of the data.

    dot: encodings of the dots, in addition to those of the base
    """
    return [
        base.mark_rule(strokeWidth=6, opacity=0.35, aria=False).encode(x="low:Q", x2="high:Q"),
        base.mark_point(filled=True, size=80, opacity=1).encode(**dot),
    ]


def forest(rows: Sequence[Mapping[str, Any]], title: str, behind: alt.Chart, **dot: Any) -> alt.TopLevelMixin:
    """Ratios below each other, each a dot with its interval on a log axis, coloured by verdict.

    rows:   each with name, ratio, low, high and verdict
    title:  of the axis
    behind: drawn below the dots
    dot:    more encodings of the dots
    """
    order = [row["name"] for row in rows]
    base = alt.Chart({"values": list(rows)}).encode(
        y=names(order), color=coloured("verdict", COLOURS["verdicts"])
    )
    scale = alt.Scale(type="log", nice=False, padding=24)
    ratio = alt.X("ratio:Q", scale=scale, title=f"{title} (log scale)")
    picture = alt.layer(behind, *interval_dots(base, x=ratio, **dot))
    return picture.properties(width=520, height=alt.Step(name_step(order, 24)))


def noise_band(noise: float) -> alt.Chart:
    values = [{"from": 1 / (1 + noise), "to": 1 + noise}]
    return alt.Chart({"values": values}).mark_rect(color="#8883").encode(x="from:Q", x2="to:Q")


def grid(
    values: Sequence[Mapping[str, Any]], x: alt.X, y: alt.Y, tooltip: Sequence[alt.Tooltip]
) -> alt.TopLevelMixin:
    """A field for each value, coloured by its verdict, with its text in it."""
    base, opacity = alt.Chart({"values": list(values)}).encode(x=x, y=y), 0.45
    colour = coloured("verdict", COLOURS["verdicts"], opacity)
    return alt.layer(
        base.mark_rect(opacity=opacity, stroke="#8886").encode(color=colour, tooltip=tooltip),
        base.mark_text(aria=False).encode(text="text:N"),
    ).properties(width=alt.Step(100), height=alt.Step(24))


def specification(chart: Chart) -> dict[str, Any]:
    """A picture as Vega-Lite's JSON, with its data, the theme and a description; empty without a picture."""
    if chart.picture is None:
        return {}
    with alt.data_transformers.enable("default", max_rows=None):
        picture = chart.picture.to_dict(validate=False)  # the tests do, and it is half of the time
    # Seven digits are more than a picture shows.
    picture = json.loads(json.dumps(picture), parse_float=lambda digits: float(f"{float(digits):.7g}"))
    theme = json.loads((TEMPLATES / "theme.json").read_text("utf-8"))
    theme["view"] |= picture["config"]["view"]
    return {"description": f"{chart.title}. {chart.reading}"} | picture | {"config": theme}
