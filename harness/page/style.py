"""How charts look: colours by provider and by verdict, the theme. Text takes the page's own colour, so that
charts are read on light and on dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair

# Okabe and Ito's eight, told apart by colour-blind readers (jfly.uni-koeln.de/color), black left out, and
# four of Paul Tol's (personal.sron.nl/~pault); a name or a shape says the same everywhere. Grey is no one's.
PROVIDERS = {
    "torch": "#999933",
    "triton": "#E69F00",
    "vllm": "#0072B2",
    "sglang": "#56B4E9",
    "aiter": "#D55E00",
    "flashinfer": "#009E73",
    "flash_attn": "#CC79A7",
    "flashmla": "#AA4499",
    "deepgemm": "#882255",
    "cudnn": "#BB5566",
    "hipblaslt": "#F0E442",
}
OTHER = "#44AA99"
"""Of a provider that a plug-in brings."""

LINE = 15  # pixels of a line of text

VERDICTS = {"faster": "#0072B2", "slower": "#D55E00", "same": "#666666", "unclear": "#a9a9a9"}

CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, sans-serif",
    "axis": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "domainColor": "#8888",
        "tickColor": "#8888",
        "gridColor": "#8883",
        "labelFontSize": 12,
        "labelLimit": 560,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    "legend": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "labelFontSize": 12,
        "labelLimit": 320,
        "symbolOpacity": 1,
        "symbolBaseFillColor": "currentColor",
        "symbolBaseStrokeColor": "currentColor",
    },
    "header": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "labelFontSize": 12,
        "labelFontWeight": "bold",
        "labelOrient": "top",
        "labelAngle": 0,
        "labelAlign": "left",
        "labelAnchor": "start",
        "labelLimit": 640,
        "labelPadding": 2,
    },
    "title": {"color": "currentColor", "anchor": "start"},
    "view": {"stroke": None},
    "text": {"color": "currentColor"},
    "rule": {"color": "currentColor"},
}
"""Of every chart, Vega-Lite's config."""


def provider(name: str) -> str:
    """Of an implementation: `vllm` of `vllm.amx`."""
    return name.partition(".")[0]


def provider_scale(providers: Iterable[str]) -> altair.Scale:
    """Of colours, by provider."""
    import altair as alt

    domain = sorted(set(providers))
    return alt.Scale(domain=domain, range=[PROVIDERS.get(p, OTHER) for p in domain])


def names(order: Sequence[str]) -> altair.Y:
    """An axis of rows in this order; a setting of several variables has a line for each."""
    import altair as alt

    return alt.Y("name:N", sort=order, title=None, axis=alt.Axis(labelExpr="split(datum.label, ', ')"))


def name_step(order: Iterable[str], least: int) -> int:
    """Pixels of a row, in which the longest name has room."""
    return max([least, *(LINE * len(name.split(", ")) + 4 for name in order)])


def verdict_colour(opacity: float = 1.0) -> altair.Color:
    """opacity: of the marks, which the legend takes too"""
    import altair as alt

    scale = alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values()))
    return alt.Color("verdict:N", scale=scale, title=None, legend=alt.Legend(symbolOpacity=opacity))
