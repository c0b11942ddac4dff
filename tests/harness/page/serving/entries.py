"""Entries of ledgers, and what a compiled chart evaluates."""

from typing import Any

from harness.page.document import Page, PageSection
from harness.serving.ledger import Observation, ObservationEntry, Prediction, PredictionEntry


def prediction(
    row: str = "a",
    change: float | None = -8.0,
    low: float | None = -9.0,
    high: float | None = -7.0,
    method: str = "replay",
    **more: Any,
) -> PredictionEntry:
    record = Prediction(
        quantity="itl", method=method, change=change, low=low, high=high, **{"unit": "ms"} | more
    )
    return PredictionEntry(row=row, at="2026-01-01", prediction=record)


def observation(
    row: str = "a", change: float = -8.2, low: float | None = -9.1, high: float | None = -7.3, **more: Any
) -> ObservationEntry:
    record = Observation(
        quantity="itl", before=64.0, after=64.0 + change, change=change, low=low, high=high,
        **{"unit": "ms"} | more,
    )  # fmt: skip
    return ObservationEntry(row=row, at="2026-01-02", observation=record)


def expressions(section: PageSection) -> list[str]:
    """Everything in its compiled charts that Vega evaluates."""
    import vl_convert

    pictures = (chart.picture for chart in Page("", sections=[section]).charts() if chart.picture)
    compiled = [vl_convert.vegalite_to_vega(picture.to_dict()) for picture in pictures]
    return [text for picture in compiled for text in _expressions(picture)]


def _expressions(node: Any) -> list[str]:
    if isinstance(node, list):
        return [text for child in node for text in _expressions(child)]
    if not isinstance(node, dict):
        return []
    own = [str(node[key]) for key in ("expr", "signal", "update", "test") if isinstance(node.get(key), str)]
    return own + [text for key, child in node.items() if key != "values" for text in _expressions(child)]
