"""A chart's picture as Vega-Lite's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair

from harness.page.document import Chart
from harness.page.style import CONFIG


def specification(chart: Chart) -> dict[str, Any]:
    """With all of its data, the config of all charts beneath its own, and words for those who cannot see it.
    Empty where it has no picture."""
    if chart.picture is None:
        return {}
    with altair.data_transformers.enable("default", max_rows=None):
        picture = chart.picture.to_dict()
    words = {"description": f"{chart.title}. {chart.reading}"}
    return words | picture | {"config": merged(CONFIG, picture.get("config", {}))}


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Level by level; where both have something, `own` does."""
    return {
        **base,
        **{
            name: merged(base[name], value)
            if isinstance(value, Mapping) and isinstance(base.get(name), Mapping)
            else value
            for name, value in own.items()
        },
    }
