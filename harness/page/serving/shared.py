"""Parts that the charts of serving share: colours, an axis of names, numbers as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import altair as alt

from harness.page.style import COLOURS, PROVIDERS, scale_of
from harness.serving.names import OP_CLASSES

VERDICT_COLOURS = COLOURS["verdicts on predictions"]
PREDICTED, OBSERVED = "#0072B2", "#E69F00"
BEFORE, AFTER, TARGET = "#7f7f7f", "#0072B2", "#D55E00"
WIDTH = 640


def op_colours(classes: Iterable[str]) -> alt.Scale:
    """The colours of op classes, in the order of OP_CLASSES; then classes that it lacks, in one colour."""
    names = set(classes)
    known = {name: about["colour"] for name, about in OP_CLASSES.items() if name in names}
    return scale_of({**known, **dict.fromkeys(sorted(names - known.keys()), PROVIDERS["torch"])})


def names_axis(field: str) -> alt.Y:
    """An axis of names in the order of the data. They may take 240 pixels left of the plot."""
    return alt.Y(f"{field}:N", sort=None, title=None, axis=alt.Axis(labelLimit=240))


def zero_line() -> alt.Chart:
    """A dashed line at 0 of the x axis."""
    return alt.Chart({"values": [{"at": 0}]}).mark_rule(strokeDash=[3, 3], color="#888888").encode(x="at:Q")


def digits(form: str = ".5g") -> Callable[[float | None], str]:
    """A function that makes the text of a number in a format, and an empty text of None."""
    return lambda value: "" if value is None else f"{value:{form}}"


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
