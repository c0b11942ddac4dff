"""The look of charts: colours of providers and verdicts, the theme, parts that several charts have, and a
chart as Vega-Lite's JSON. Text takes the page's own colour, so that charts can be read on dark pages, too."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from harness.page.document import Chart
from harness.report.text import grouped

TEMPLATES = Path(__file__).parent / "templates"
COLOURS: dict[str, dict[str, str]] = json.loads((TEMPLATES / "colours.json").read_text("utf-8"))
PROVIDERS = COLOURS["providers"]
OTHER_COLOUR = "#44AA99"  # the colour of a provider that a plug-in brings
LINE_HEIGHT = 16  # pixels of a line of text
Values = Sequence[Mapping[str, Any]]  # the data of a chart: the fields of each mark by their names
BREAKS = ", | · | @ "  # a regular expression: where the name of a row breaks into lines on an axis


def provider(name: str) -> str:
    """The provider of an implementation: `vllm` of `vllm.amx`, `flashmla` of `flashmla@vllm eager`."""
    return re.split("[.@ ]", name)[0]


def provider_colour(providers: Iterable[str]) -> alt.Color:
    colours = {name: PROVIDERS.get(name, OTHER_COLOUR) for name in sorted(set(providers))}
    return alt.Color("provider:N", scale=scale_of(colours), legend=None)


def places_in_provider(names: Collection[str]) -> dict[str, int]:
    """By row its number among the rows of its provider, from 0."""
    by_provider = grouped(names, provider)
    return {name: by_provider[provider(name)].index(name) for name in names}


def row_colours(names: Collection[str]) -> dict[str, str]:
    """By row its colour, a shade of its provider's."""
    places = places_in_provider(names).items()
    return {name: shade(PROVIDERS.get(provider(name), OTHER_COLOUR), place) for name, place in places}


def heat_map(
    values: Values, across: Sequence[str], title: str | None, mark: Mapping[str, Any], **encodings: Any
) -> alt.TopLevelMixin:
    """A narrow rectangle for each value, at its `x` and `y`, with its `lead` as text in it. The x axis has
    this title, and the x of the values in the order of `across`. mark, encodings: of the rectangles"""
    base = alt.Chart({"values": list(values)}).encode(
        x=alt.X("x:O", sort=across, title=title, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("y:N", sort=None, title=None),
    )
    rect = base.mark_rect(**mark, stroke="#8886").encode(**encodings)
    label = base.mark_text(fontSize=11, aria=False).encode(text="lead:N")
    return alt.layer(rect, label).properties(width=alt.Step(52), height=alt.Step(24))


def choice_of_rows(rows: Values) -> alt.Parameter | None:
    """A control below a chart, by which a reader chooses the rows that the chart shows: the best (at first),
    all, or those of a provider. It sets the parameter `rows`. The best rows are those with `shown`. Where all
    have it, there is no control; a provider of which all have it is no choice."""
    providers = sorted({row["provider"] for row in rows if not row["shown"]})
    if not providers:
        return None
    others = ["all", *providers]
    select = alt.binding_select(options=["shown", *others], labels=["best", *others], name="Rows: ")
    return alt.param(name="rows", value="shown", bind=select)


def legend_values(rows: Values) -> list[str] | alt.ExprRef:
    """The names in the legend of a chart: those of the rows that a reader chose, see `choice_of_rows`."""
    names: dict[str, set[str]] = {}  # by choice
    for row in rows:
        choices = ["all", row["provider"], "shown"] if row["shown"] else ["all", row["provider"]]
        for choice in choices:
            names.setdefault(choice, set()).add(row["name"])
    if names.get("shown") == names["all"]:
        return sorted(names["all"])
    by_choice = {choice: sorted(of_choice) for choice, of_choice in names.items()}
    return alt.ExprRef(f"{json.dumps(by_choice)}[rows]")


BLACK, WHITE = 0, 255
SHADES = ((BLACK, 0.0), (WHITE, 0.4), (BLACK, 0.3), (WHITE, 0.6), (BLACK, 0.15), (WHITE, 0.2))
"""For each row of a provider the tone that is mixed into the provider's colour, and the tone's share."""


def shade(colour: str, place: int) -> str:
    """The provider's colour for its first row (place 0), darker and lighter ones for the next."""
    tone, share = SHADES[place % len(SHADES)]
    red_green_blue = bytes.fromhex(colour.removeprefix("#"))
    return "#" + bytes(round(value + (tone - value) * share) for value in red_green_blue).hex()


CHOSEN = "rows === 'all' || (rows === 'shown' ? datum.shown : datum.provider === rows)"
"""The Vega expression that is true of the rows that a reader chose, see `choice_of_rows`."""


def name_axis(order: Sequence[str], field: str = "name") -> alt.Y:
    """A vertical axis of the names of rows, in this order. Long names are broken into lines at BREAKS: the
    run has a line of its own, and so has each variable of a setting."""
    lines = alt.Axis(labelExpr=f"split(datum.label, regexp('{BREAKS}'))")
    return alt.Y(f"{field}:N", sort=order, title=None, axis=lines)


def name_step(order: Iterable[str], least: int) -> int:
    """Pixels from one row to the next, so that the name with the most lines has room; at least `least`."""
    return max([least, *(LINE_HEIGHT * len(re.split(BREAKS, name)) + 4 for name in order)])


def colour_by(field: str, codes: Mapping[str, str], opacity: float = 1.0) -> alt.Color:
    """Colours marks by a field, with a legend above the picture; `codes` has the colour of each value."""
    legend = alt.Legend(symbolOpacity=opacity, orient="top")
    return alt.Color(f"{field}:N", scale=scale_of(codes), title=None, legend=legend)


def scale_of(codes: Mapping[str, str]) -> alt.Scale:
    """The scale that gives each value its colour or shape."""
    return alt.Scale(domain=list(codes), range=list(codes.values()))


def tooltips(**titles: str) -> list[alt.Tooltip]:
    """A tooltip for each field of this name, with this title; if the title is empty the name is shown."""
    return [
        alt.Tooltip(f"{name}:N", title=title) if title else alt.Tooltip(f"{name}:N")
        for name, title in titles.items()
    ]


def interval_dots(base: alt.Chart, **dot: Any) -> list[alt.Chart]:
    """Two layers: for each row of data a bar from `low` to `high`, and a dot with more encodings (`dot`)."""
    return [
        base.mark_rule(strokeWidth=6, opacity=0.35, aria=False).encode(x="low:Q", x2="high:Q"),
        base.mark_point(filled=True, size=80, opacity=1).encode(**dot),
    ]


def forest(rows: Values, title: str, behind: alt.Chart, **dot: Any) -> alt.TopLevelMixin:
    """A forest plot on a log axis with this title: for each ratio a dot with its interval, coloured by the
    verdict. The rows have name, ratio, low, high and verdict. `behind` is drawn behind the dots; `dot` has
    more encodings of them."""
    order = [row["name"] for row in rows]
    base = alt.Chart({"values": list(rows)}).encode(
        y=name_axis(order), color=colour_by("verdict", COLOURS["verdicts"])
    )
    scale = alt.Scale(type="log", nice=False, padding=24)
    ratio = alt.X("ratio:Q", scale=scale, title=f"{title} (log scale)")
    picture = alt.layer(behind, *interval_dots(base, x=ratio, **dot))
    return picture.properties(width=520, height=alt.Step(name_step(order, 24)))


def noise_band(noise: float) -> alt.Chart:
    """A grey band over the ratios that the noise explains."""
    values = [{"from": 1 / (1 + noise), "to": 1 + noise}]
    return alt.Chart({"values": values}).mark_rect(color="#8883").encode(x="from:Q", x2="to:Q")


def grid(values: Values, x: alt.X, y: alt.Y, tooltip: Sequence[alt.Tooltip]) -> alt.TopLevelMixin:
    """A rectangle for each value, wide enough for its `text`, a ratio; its colour says the `verdict`."""
    opacity = 0.45
    base = alt.Chart({"values": list(values)}).encode(x=x, y=y)
    colour = colour_by("verdict", COLOURS["verdicts"], opacity)
    rect = base.mark_rect(opacity=opacity, stroke="#8886").encode(color=colour, tooltip=tooltip)
    label = base.mark_text(aria=False).encode(text="text:N")
    return alt.layer(rect, label).properties(width=alt.Step(100), height=alt.Step(24))


def specification(chart: Chart) -> dict[str, Any]:
    """A picture as Vega-Lite's JSON, with its data, the theme and a description; empty without a picture."""
    if chart.picture is None:
        return {}
    with alt.data_transformers.enable("default", max_rows=None):
        picture = chart.picture.to_dict(validate=False)  # validating takes as long again; the tests do it
    # Seven digits are more than a picture shows.
    picture = json.loads(json.dumps(picture), parse_float=lambda digits: float(f"{float(digits):.7g}"))
    theme = json.loads((TEMPLATES / "theme.json").read_text("utf-8"))
    return {"description": f"{chart.title}. {chart.reading}"} | picture | {"config": theme}
