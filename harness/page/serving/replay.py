"""Section of replays: what each arm changes in a step, and how long the step's calls take alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harness.errors import UsageError, mistake
from harness.page.document import Chart, PageSection, Table, TableRow, anchor
from harness.page.serving.marks import (
    LABEL,
    OBSERVED,
    PREDICTED,
    WIDTH,
    cell,
    distinct,
    op_colours,
    records,
)
from harness.serving.replay.replay import Replay, Timed
from harness.serving.replay.step import OP_CLASS

if TYPE_CHECKING:
    import altair

RERUN = "base again"
METHODS = {"the whole step": ("circle", PREDICTED), "swapped calls alone": ("square", OBSERVED)}
"""Of each way to know an arm's difference its shape and its colour."""


def replay_section(steps: Sequence[Replay], title: str) -> PageSection:
    """A section for each step that was replayed."""
    names = distinct([step_name(replay.step) for replay in steps])
    return PageSection(
        anchor=anchor("replay", title),
        title=title,
        headline=f"Replayed steps: {len(steps)}." if steps else "Nothing was replayed.",
        sections=[_step(replay, name, title) for replay, name in zip(steps, names, strict=True)],
    )


def replays(document: Any, name: str) -> list[Replay]:
    """Of what `serving replay --json` wrote. Raises UsageError."""
    if isinstance(document, dict) and "replays" in document:  # a stage of an experiment of November 2026
        document = document["replays"]
    try:
        return [Replay.model_validate(of) for of in (document if isinstance(document, list) else [document])]
    except ValidationError as error:
        raise UsageError(f"cannot read {name}: no replay: {mistake(error)}") from None


def step_name(step: dict[str, Any]) -> str:
    """`decode step of deepseek-r1, 4 requests`: of what the record says."""
    contexts = step.get("contexts")  # of each request, in records of November 2026
    requests = len(contexts) if isinstance(contexts, list) else step.get("batch")
    name = f"{step.get('phase', 'decode')} step of {step.get('model', '?')}"
    return name if requests is None else f"{name}, {requests} requests"


def _step(replay: Replay, name: str, title: str) -> PageSection:
    notes = [("rounds", f"{replay.rounds}, and {replay.disturbed} more disturbed")]
    if replay.left_out:
        notes.append(("left out", ", ".join(replay.left_out)))
    return PageSection(
        anchor=anchor("replay", title, name),
        title=name,
        headline=_headline(replay),
        charts=list(_charts(replay, anchor("replay", title, name))),
        notes=[*notes, *(("note", text) for text in replay.notes)],
    )


def _headline(replay: Replay) -> str:
    changed = [(name, arm.change) for name, arm in replay.arms.items() if arm.change is not None]
    parts = [f"{name}: {change.text()} ms" for name, change in changed]
    base = replay.arms.get(replay.base)
    if base is not None and base.step is not None:
        parts.insert(0, f"{replay.base}: {base.step.text('.4g')} ms a step")
    parts += [f"{name} failed: {arm.failed}" for name, arm in replay.arms.items() if arm.failed]
    return "; ".join(parts or ["no arm was timed"]) + "."


def _charts(replay: Replay, prefix: str) -> Iterator[Chart]:
    if points := change_marks(replay):
        yield Chart(
            anchor=f"{prefix}-changes",
            title="What each arm changes",
            reading=(
                "Left of the dashed line an arm is faster than the base. The whole step comes from paired "
                "rounds, with its 90 % interval; the swapped calls alone are those of all layers, without "
                "the rest of the step. The base again is the base against itself: the change that is none."
            ),
            picture=changes(points),
            table=_changes_table(replay),
            marks=len(points),
        )
    if bars := place_marks(replay):
        yield Chart(
            anchor=f"{prefix}-places",
            title="The step's calls alone",
            reading=(
                "Of each place of the step the calls of all layers, without the rest of the step, in the "
                "step's order: the base's, and below it those of an arm that swaps them. In the step they "
                "take more or less, as caches and neighbours have it."
            ),
            picture=by_place(bars),
            table=_places_table(replay),
            marks=len(bars),
        )


def _places_table(replay: Replay) -> Table:
    """A row for each place, a column for each arm."""
    arms = {name: arm.places_alone for name, arm in replay.arms.items() if arm.places_alone}
    columns = distinct(["place", "op class", *(f"{name}, ms" for name in arms)])
    places = dict.fromkeys(place for alone in arms.values() for place in alone)
    rows = [
        TableRow([place, OP_CLASS.get(place, ""), *(cell(of.get(place), ".4f") for of in arms.values())])
        for place in places
    ]
    return Table(columns, rows, frozenset(columns[2:]))


def _changes_table(replay: Replay) -> Table:
    numeric = ["step, ms", "low", "high", "change, ms", "change low", "change high", "alone, ms",
               "whole model, ms", "outputs apart"]  # fmt: skip
    rows = []
    for name, arm in replay.arms.items():
        whole = arm.whole.ms if arm.whole else None
        rows.append(
            TableRow(
                [
                    name,
                    ", ".join(f"{op}={implementation}" for op, implementation in arm.chosen.items()),
                    *_ends(arm.step, ".5g"),
                    *_ends(arm.change, "+.5g"),
                    *(cell(value, "+.5g") for value in (arm.alone, whole)),
                    cell(max(arm.difference.values(), default=None), ".1e"),
                    arm.failed,
                ]
            )
        )
    if replay.twin is not None:
        rows.append(TableRow([RERUN, "", "", "", "", *_ends(replay.twin, "+.5g"), "", "", "", ""]))
    return Table(["arm", "implementations", *numeric, "failed"], rows, frozenset(numeric))


def _ends(timed: Timed | None, form: str) -> list[Any]:
    values = (None,) * 3 if timed is None else (timed.ms, timed.low, timed.high)
    return [cell(value, form) for value in values]


def place_marks(replay: Replay) -> list[dict[str, Any]]:
    return [
        {
            "arm": name,
            "place": place,
            "class": OP_CLASS.get(place, "unknown"),
            "ms": ms,
            "aria": f"{place}, {name}: {ms:.4g} ms",
        }
        for name, arm in replay.arms.items()
        for place, ms in arm.places_alone.items()
    ]


def by_place(marks: Sequence[dict[str, Any]]) -> altair.TopLevelMixin:
    """A bar for each arm's own calls at each place."""
    import altair as alt

    domain, colours = op_colours([mark["class"] for mark in marks])
    axis = alt.Axis(title="of the step's calls alone, ms")
    return (
        alt.Chart(records(marks))
        .mark_bar()
        .encode(
            x=alt.X("ms:Q", axis=axis, scale=alt.Scale(zero=True)),
            y=alt.Y("place:N", sort=None, title=None, axis=alt.Axis(labelLimit=LABEL)),
            yOffset=alt.YOffset("arm:N", sort=None),
            color=alt.Color(
                "class:N",
                scale=alt.Scale(domain=domain, range=colours),
                legend=alt.Legend(title=None, orient="bottom", columns=5),
            ),
            tooltip=[
                alt.Tooltip("place:N"),
                alt.Tooltip("arm:N"),
                alt.Tooltip("class:N", title="op class"),
                alt.Tooltip("ms:Q", title="alone, ms", format=".4f"),
            ],
            description=alt.Description("aria:N"),
        )
        .properties(width=WIDTH, height=alt.Step(9, **{"for": "offset"}))
    )


def change_marks(replay: Replay) -> list[dict[str, Any]]:
    """Of each arm what it changes by both methods, and of the base against itself."""
    whole, alone = METHODS
    marks: list[tuple[str, str, Timed]] = []
    for name, arm in replay.arms.items():
        if arm.change is not None:
            marks.append((name, whole, arm.change))
            marks += [] if arm.alone is None else [(name, alone, Timed(ms=arm.alone))]
    if replay.twin is not None:
        marks.append((RERUN, whole, replay.twin))
    return [
        {
            "arm": arm,
            "method": method,
            "ms": timed.ms,
            "low": timed.low,
            "high": timed.high,
            "text": timed.text("+.5g"),
            "aria": f"{arm}, {method}: {timed.text()} ms",
        }
        for arm, method, timed in marks
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
