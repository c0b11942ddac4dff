"""Colours of serving's charts: of verdicts, of the two sides of a row, of op classes."""

from __future__ import annotations

from harness.page.style import PROVIDERS
from harness.serving.ledger.report import NOT_OBSERVED, NOT_PREDICTED
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
