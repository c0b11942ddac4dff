"""Parts that the charts of serving share: data, cells of tables, numbers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.page.document import TableValue

WIDTH = 640
LABEL = 240  # pixels that labels left of a plot may take


def records(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows as a chart's data. Their text stays data: charts name fields, never values of the rows."""
    return {"values": [dict(row) for row in rows]}


def cell(value: float | None, form: str = ".5g") -> TableValue | str:
    return "" if value is None else TableValue(f"{value:{form}}", float(value))


def ranged(value: float | None, low: float | None, high: float | None, form: str = "+.4g") -> str:
    """`+8.2 (+2.7 to +13.7)`; an end that nobody knows is `?`."""
    if low is None and high is None:
        return "" if value is None else f"{value:{form}}"
    ends = " to ".join("?" if end is None else f"{end:{form}}" for end in (low, high))
    return f"({ends})" if value is None else f"{value:{form}} ({ends})"


def distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where one stands again: an axis has a place for each."""
    labels: list[str] = []
    for name in names:
        label, number = name, 1
        while label in labels:
            number += 1
            label = f"{name} ({number})"
        labels.append(label)
    return labels
