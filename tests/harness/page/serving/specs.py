"""Charts of a section as what a browser gets: their data, and whether they compile."""

from __future__ import annotations

import json

import vl_convert

from harness.page.document import Page, PageSection


def charts(section: PageSection):
    return list(Page("page", sections=[section]).charts())


def data(chart) -> list[dict]:
    """All rows of all of a chart's data."""
    spec = chart.picture.to_dict()
    json.dumps(spec, allow_nan=False)
    return [row for rows in spec.get("datasets", {}).values() for row in rows] + list(_inline(spec))


def _inline(node):
    if isinstance(node, list):
        for child in node:
            yield from _inline(child)
    elif isinstance(node, dict):
        values = node.get("data", {}).get("values") if isinstance(node.get("data"), dict) else None
        yield from values or []
        for key, child in node.items():
            if key not in ("data", "datasets"):
                yield from _inline(child)


def require_valid(section: PageSection) -> None:
    """Every chart compiles, names its axes, and has its numbers in marks."""
    everything = charts(section)
    assert len({chart.anchor for chart in everything}) == len(everything)
    for chart in everything:
        assert chart.reading
        if chart.picture is not None:
            vl_convert.vegalite_to_vega(chart.picture.to_dict())
            assert chart.marks


def expressions(node) -> list[str]:
    """Everything in a compiled chart that Vega evaluates."""
    if isinstance(node, list):
        return [text for child in node for text in expressions(child)]
    if not isinstance(node, dict):
        return []
    own = [str(node[key]) for key in ("expr", "signal", "update", "test") if isinstance(node.get(key), str)]
    return own + [text for key, child in node.items() if key != "values" for text in expressions(child)]


def compiled(chart) -> dict:
    return vl_convert.vegalite_to_vega(chart.picture.to_dict())
