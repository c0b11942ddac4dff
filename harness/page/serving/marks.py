"""Parts that the charts of serving share: colours, data, cells of tables, numbers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.page.document import TableValue
from harness.page.style import PROVIDERS
from harness.serving.ledger import NOT_OBSERVED, NOT_PREDICTED
from harness.serving.names import OP_CLASSES

VERDICT_COLOURS = {
    "explained": "#009E73",
    "missed": "#D55E00",
    "not resolved": "#7f7f7f",
    "bound holds": "#0072B2",
    "bound broken": "#AA4499",
    NOT_OBSERVED: "#7f7f7f",
    NOT_PREDICTED: "#7f7f7f",
}
PREDICTED, OBSERVED = "#0072B2", "#E69F00"
BEFORE, AFTER, TARGET = "#7f7f7f", "#0072B2", "#D55E00"


def op_colours(classes: list[str]) -> tuple[list[str], list[str]]:
    """The domain and the range of a scale, in the order of OP_CLASSES; a class that it lacks comes last."""
    order = list(OP_CLASSES)
    domain = sorted(set(classes), key=lambda name: (order.index(name) if name in order else len(order), name))
    return domain, [OP_CLASSES.get(name, {"colour": PROVIDERS["torch"]})["colour"] for name in domain]


WIDTH = 640
LABEL = 240  # pixels that labels left of a plot may take


def records(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows as a chart's data. Their text stays data: charts name fields, never values of the rows."""
    return {"values": [dict(row) for row in rows]}


def cell(value: float | None, form: str = ".5g") -> TableValue | str:
    return "" if value is None else TableValue(f"{value:{form}}", float(value))


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
