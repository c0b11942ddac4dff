"""Charts of a replayed step: its time by op class and by place, and what each arm changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.page.serving.colours import OBSERVED, PREDICTED, op_colours
from harness.page.serving.marks import LABEL, WIDTH, ranged, records
from harness.page.style import PROVIDERS
from harness.serving.replay.schema import Replay

if TYPE_CHECKING:
    import altair

TWIN = "base again"
METHODS = {
    "the whole step": ("circle", PREDICTED),
    "own calls, in place": ("square", OBSERVED),
    "own calls alone, cold": ("triangle-up", PROVIDERS["flash_attn"]),
    "own calls alone, warm": ("diamond", PROVIDERS["flashinfer"]),
}
"""Of each way to know an arm's difference its shape and its colour."""
ARMS = ["#7f7f7f", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#882255"]
"""Of arms, the base's first; a name always stands as well."""


def class_marks(replay: Replay) -> list[dict[str, Any]]:
    return [
        {
            "arm": name,
            "class": op_class,
            "ms": ms,
            "share": f"{ms / (sum(arm.classes.values()) or 1.0):.1%}",
            "aria": f"{name}, {op_class}: {ms:.4g} ms",
        }
        for name, arm in replay.arms.items()
        for op_class, ms in arm.classes.items()
    ]


def step_marks(replay: Replay) -> list[dict[str, Any]]:
    return [
        {
            "arm": name,
            "ms": arm.step.ms,
            "low": arm.step.low,
            "high": arm.step.high,
            "text": ranged(arm.step.ms, arm.step.low, arm.step.high, ".5g"),
        }
        for name, arm in replay.arms.items()
        if arm.step is not None
    ]


def by_class(replay: Replay) -> altair.TopLevelMixin:
    """A bar for each arm, of which each op class is a segment, and the step as it was timed whole."""
    import altair as alt

    marks = class_marks(replay)
    domain, colours = op_colours([mark["class"] for mark in marks])
    for mark in marks:
        mark["order"] = domain.index(mark["class"])
    y = alt.Y("arm:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABEL))
    scale = alt.Scale(zero=True)
    axis = alt.Axis(title="of the step, ms")
    bars = (
        alt.Chart(records(marks))
        .mark_bar(stroke="#ffffff", strokeWidth=0.5)
        .encode(
            x=alt.X("ms:Q", stack="zero", axis=axis, scale=scale),
            y=y,
            color=alt.Color(
                "class:N",
                scale=alt.Scale(domain=domain, range=colours),
                legend=alt.Legend(title=None, orient="bottom", columns=5),
            ),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("arm:N"),
                alt.Tooltip("class:N", title="op class"),
                alt.Tooltip("ms:Q", title="of the step, ms", format=".4f"),
                alt.Tooltip("share:N", title="of all calls"),
            ],
            description=alt.Description("aria:N"),
        )
    )
    whole = alt.Chart(records(step_marks(replay))).encode(
        y=y, tooltip=[alt.Tooltip("arm:N"), alt.Tooltip("text:N", title="the whole step, ms (90 %)")]
    )
    known = whole.transform_filter(alt.FieldValidPredicate(field="low", valid=True))
    return alt.layer(
        bars,
        known.mark_rule(strokeWidth=3, color="#ffffff").encode(x=alt.X("low:Q", axis=axis), x2="high:Q"),
        known.mark_rule(strokeWidth=1.5, color="currentColor").encode(
            x=alt.X("low:Q", axis=axis), x2="high:Q"
        ),
        whole.mark_point(
            shape="diamond", filled=True, size=70, opacity=1, color="currentColor", stroke="#ffffff"
        ).encode(x=alt.X("ms:Q", axis=axis, scale=scale)),
    ).properties(width=WIDTH, height=alt.Step(40))


def place_marks(replay: Replay) -> list[dict[str, Any]]:
    return [
        {"arm": name, "place": place, "ms": ms, "aria": f"{place}, {name}: {ms:.4g} ms"}
        for name, arm in replay.arms.items()
        for place, ms in arm.places.items()
    ]


def by_place(replay: Replay) -> altair.TopLevelMixin:
    """Of each place of the step a bar for each arm."""
    import altair as alt

    arms = [name for name, arm in replay.arms.items() if arm.places]
    colours = [ARMS[number % len(ARMS)] for number in range(len(arms))]
    return (
        alt.Chart(records(place_marks(replay)))
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", axis=alt.Axis(title="of the step, ms"), scale=alt.Scale(zero=True)),
            y=alt.Y("place:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABEL)),
            yOffset=alt.YOffset("arm:N", sort=None, scale=alt.Scale(domain=arms)),
            color=alt.Color(
                "arm:N",
                scale=alt.Scale(domain=arms, range=colours),
                legend=alt.Legend(title=None, orient="top"),
            ),
            tooltip=[
                alt.Tooltip("place:N"),
                alt.Tooltip("arm:N"),
                alt.Tooltip("ms:Q", title="of the step, ms", format=".4f"),
            ],
            description=alt.Description("aria:N"),
        )
        .properties(width=WIDTH, height=alt.Step(9, **{"for": "offset"}))
    )


def change_marks(replay: Replay) -> list[dict[str, Any]]:
    """Of each arm what it changes by every method, and of the base against itself."""
    marks: list[tuple[str, str, float, float | None, float | None]] = []
    for name, arm in replay.arms.items():
        if arm.change is not None:
            marks.append((name, "the whole step", arm.change.ms, arm.change.low, arm.change.high))
            methods = zip(list(METHODS)[1:], (arm.own, arm.cold, arm.warm), strict=True)
            marks += [(name, method, ms, None, None) for method, ms in methods if ms is not None]
    if replay.twin is not None:
        marks.append((TWIN, "the whole step", replay.twin.ms, replay.twin.low, replay.twin.high))
    return [
        {
            "arm": arm,
            "method": method,
            "ms": ms,
            "low": low,
            "high": high,
            "text": ranged(ms, low, high, "+.5g"),
            "aria": f"{arm}, {method}: {ranged(ms, low, high)} ms",
        }
        for arm, method, ms, low, high in marks
    ]


def changes(marks: Sequence[dict[str, Any]]) -> altair.TopLevelMixin:
    """Of each arm the difference from the base, by method, with its interval where it has one."""
    import altair as alt

    methods = [method for method in METHODS if any(mark["method"] == method for mark in marks)]
    axis = alt.Axis(title="difference from the base, ms")
    shapes = alt.Scale(domain=methods, range=[METHODS[method][0] for method in methods])
    colours = alt.Scale(domain=methods, range=[METHODS[method][1] for method in methods])
    legend = alt.Legend(title=None, orient="top", symbolOpacity=1)
    base = alt.Chart(records(marks)).encode(
        y=alt.Y("arm:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABEL)),
        yOffset=alt.YOffset("method:N", sort=None, scale=alt.Scale(domain=methods)),
        color=alt.Color("method:N", scale=colours, legend=legend),
        tooltip=[
            alt.Tooltip("arm:N"),
            alt.Tooltip("method:N", title="of"),
            alt.Tooltip("text:N", title="difference, ms"),
        ],
    )
    known = base.transform_filter(alt.FieldValidPredicate(field="low", valid=True))
    zero = alt.Chart(records([{"at": 0}])).mark_rule(strokeDash=[3, 3], color="#888888").encode(x="at:Q")
    return alt.layer(
        zero,
        known.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", axis=axis), x2="high:Q"),
        base.mark_point(filled=True, size=70, opacity=1).encode(
            x=alt.X("ms:Q", axis=axis, scale=alt.Scale(zero=True)),
            shape=alt.Shape("method:N", scale=shapes, legend=legend),
            description=alt.Description("aria:N"),
        ),
    ).properties(width=WIDTH, height=alt.Step(14, **{"for": "offset"}))
