"""Forest: ratios below each other, each a dot with its interval on a log axis, coloured by verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.page.style import name_step, names, verdict_colour

if TYPE_CHECKING:
    import altair


def forest(
    rows: Sequence[dict[str, Any]],
    title: str,
    behind: altair.Chart,
    tooltip: Sequence[altair.Tooltip],
    **dot: Any,
) -> altair.TopLevelMixin:
    """rows:   each with name, ratio, low, high and verdict
    title:  of the axis
    behind: what lies below them
    dot:    encodings of the dots besides
    """
    import altair as alt

    order = [row["name"] for row in rows]
    base = alt.Chart({"values": list(rows)}).encode(y=names(order), color=verdict_colour())
    ratio = alt.X(
        "ratio:Q", scale=alt.Scale(type="log", nice=False, padding=24), title=f"{title} (log scale)"
    )
    return alt.layer(
        behind,
        base.mark_rule(strokeWidth=6, opacity=0.35, aria=False).encode(x="low:Q", x2="high:Q"),
        base.mark_point(filled=True, size=80, opacity=1).encode(x=ratio, tooltip=tooltip, **dot),
    ).properties(width=520, height=alt.Step(name_step(order, 24)))
