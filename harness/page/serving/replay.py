"""Section of replays: what each arm changes in a step, and how long the step's calls take alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
from pydantic import ValidationError

from harness.errors import UsageError, mistake
from harness.page.document import Chart, Number, PageSection, Table, anchor, table
from harness.page.serving import shared
from harness.page.style import colour_by, scale_of, tooltips
from harness.serving.replay.replay import RERUN, Replay, Timed
from harness.serving.replay.step import OP_CLASS

STEP, CHANGE = ("step, ms", "low", "high"), ("change, ms", "change low", "change high")
"""The columns of a step's time and of its change, each with the ends of its interval."""
WHOLE, ALONE = "the whole step", "swapped calls alone"
"""What was timed to know an arm's difference from the base."""


def replay_section(replays: Sequence[Replay], title: str) -> PageSection:
    names = shared.distinct([step_name(replay.step) for replay in replays])
    return PageSection(
        anchor=anchor("replay", title),
        title=title,
        headline=f"Replayed steps: {len(replays)}." if replays else "Nothing was replayed.",
        sections=[_step(replay, name, title) for replay, name in zip(replays, names, strict=True)],
    )


def replays(document: Any, name: str) -> list[Replay]:
    """The replays in a document that `serving replay --json` wrote. Raises UsageError."""
    if isinstance(document, dict) and "replays" in document:  # a stage of an experiment of November 2026
        document = document["replays"]
    records = document if isinstance(document, list) else [document]
    try:
        return [Replay.model_validate(record) for record in records]
    except ValidationError as error:
        raise UsageError(f"cannot read {name}: no replay: {mistake(error)}") from None


def step_name(step: dict[str, Any]) -> str:
    """`decode step of deepseek-r1, 4 requests`"""
    contexts = step.get("contexts")  # of each request, in records of November 2026
    requests = len(contexts) if isinstance(contexts, list) else step.get("batch")
    name = f"{step.get('phase', 'decode')} step of {step.get('model', '?')}"
    return name if requests is None else f"{name}, {requests} requests"


def _step(replay: Replay, name: str, title: str) -> PageSection:
    """The section of one replay."""
    notes = [("rounds", f"{replay.rounds}, and {replay.disturbed} more disturbed")]
    if replay.left_out:
        notes.append(("left out", ", ".join(replay.left_out)))
    return PageSection(
        anchor=anchor("replay", title, name), title=name, headline=_headline(replay),
        charts=list(_charts(replay, anchor("replay", title, name))),
        notes=[*notes, *(("note", text) for text in replay.notes)],
    )  # fmt: skip


def _headline(replay: Replay) -> str:
    changed = [(name, arm.change) for name, arm in replay.arms.items() if arm.change is not None]
    parts = [f"{name}: {change.text()} ms" for name, change in changed]
    base = replay.arms.get(replay.base)
    if base is not None and base.step is not None:
        parts.insert(0, f"{replay.base}: {base.step.text('.4g')} ms a step")
    parts += [f"{name} failed: {arm.failed}" for name, arm in replay.arms.items() if arm.failed]
    return f"{'; '.join(parts)}." if parts else "no arm was timed."


def _charts(replay: Replay, prefix: str) -> Iterator[Chart]:
    if points := change_marks(replay):
        yield Chart(
            f"{prefix}-changes",
            "What each arm changes",
            "Left of the dashed line an arm is faster than the base. The whole step comes from paired "
            "rounds, with its 90 % interval; the swapped calls alone are those of all layers, without "
            "the rest of the step. The base again is the base against itself, which shows the noise.",
            changes(points),
            _changes_table(replay),
            len(points),
        )
    if bars := place_marks(replay):
        yield Chart(
            f"{prefix}-places",
            "The step's calls alone",
            "A place is one call of a layer. A bar is the time of a place's calls in all layers, made "
            "without the rest of the step: first the base's, then those of each arm that swaps them. In "
            "the step they take more or less, because other kernels run before them and fill the caches.",
            by_place(bars),
            _places_table(replay),
            len(bars),
        )


def _places_table(replay: Replay) -> Table:
    arms = {name: arm.places_alone for name, arm in replay.arms.items() if arm.places_alone}
    places = dict.fromkeys(place for alone in arms.values() for place in alone)
    rows = [
        {"place": place, "class": OP_CLASS.get(place, "")}
        | {name: alone.get(place) for name, alone in arms.items()}
        for place in places
    ]
    columns = {f"{name}, ms": (name, shared.digits(".4f")) for name in arms}
    return table(rows, {"place": "place", "op class": "class", **columns})


def _changes_table(replay: Replay) -> Table:
    rows: list[dict[str, Any]] = []
    for name, arm in replay.arms.items():
        rows.append({
            "arm": name,
            "implementations": ", ".join(f"{op}={row}" for op, row in arm.chosen.items()),
            **_cells(STEP, arm.step),
            **_cells(CHANGE, arm.change),
            "alone, ms": arm.alone,
            "whole model, ms": arm.whole.ms if arm.whole else None,
            "outputs apart": max(arm.difference.values(), default=None),
            "failed": arm.failed,
        })  # fmt: skip
    if replay.twin is not None:
        rows.append(dict.fromkeys(rows[0]) | {"arm": RERUN, **_cells(CHANGE, replay.twin)})
    columns: dict[str, str | Number] = {name: name for name in rows[0]}
    columns |= {name: (name, shared.digits()) for name in STEP}
    columns |= {name: (name, shared.digits("+.5g")) for name in (*CHANGE, "alone, ms", "whole model, ms")}
    columns["outputs apart"] = ("outputs apart", shared.digits(".1e"))
    return table(rows, columns)


def _cells(columns: Sequence[str], timed: Timed | None) -> dict[str, float | None]:
    """The cells of a time and of the ends of its interval."""
    values = (timed.ms, timed.low, timed.high) if timed else (None, None, None)
    return dict(zip(columns, values, strict=True))


def place_marks(replay: Replay) -> list[dict[str, Any]]:
    """The data of a bar for each place and arm."""
    return [
        {"arm": name, "place": place, "class": OP_CLASS.get(place, "unknown"), "ms": ms,
         "aria": f"{place}, {name}: {ms:.4g} ms"}
        for name, arm in replay.arms.items()
        for place, ms in arm.places_alone.items()
    ]  # fmt: skip


def by_place(marks: Sequence[dict[str, Any]]) -> alt.TopLevelMixin:
    """For each place of the step a bar for each arm, coloured by op class."""
    classes = shared.op_colours(mark["class"] for mark in marks)
    legend = alt.Legend(title=None, orient="bottom", columns=5)
    tooltip = tooltips(place="", arm="", **{"class": "op class"})
    bars = alt.Chart({"values": list(marks)}).mark_bar()
    return bars.encode(
        x=alt.X("ms:Q", title="of the step's calls alone, ms", scale=alt.Scale(zero=True)),
        y=shared.names_axis("place"),
        yOffset=alt.YOffset("arm:N", sort=None),
        color=alt.Color("class:N", scale=classes, legend=legend),
        tooltip=[*tooltip, alt.Tooltip("ms:Q", title="alone, ms", format=".4f")],
        description="aria:N",
    ).properties(width=shared.WIDTH, height=alt.Step(9, **{"for": "offset"}))


def change_marks(replay: Replay) -> list[dict[str, Any]]:
    """The data of a point for the change of each arm by each method, and for the base against itself."""
    points: list[tuple[str, str, Timed]] = []  # (arm, method, change)
    for name, arm in replay.arms.items():
        if arm.change is not None:
            points.append((name, WHOLE, arm.change))
            if arm.alone is not None:
                points.append((name, ALONE, Timed(ms=arm.alone)))
    if replay.twin is not None:
        points.append((RERUN, WHOLE, replay.twin))
    return [
        {"arm": arm, "method": method, "ms": change.ms, "low": change.low, "high": change.high,
         "text": change.text("+.5g"), "aria": f"{arm}, {method}: {change.text()} ms"}
        for arm, method, change in points
    ]  # fmt: skip


def changes(marks: Sequence[dict[str, Any]]) -> alt.TopLevelMixin:
    """The difference of each arm from the base, by method, with its interval where it has one."""
    methods = [method for method in (WHOLE, ALONE) if any(mark["method"] == method for mark in marks)]
    colours = dict(zip(methods, (shared.PREDICTED, shared.OBSERVED), strict=False))
    shapes = scale_of(dict(zip(methods, ("circle", "square"), strict=False)))
    title = "difference from the base, ms"
    base = alt.Chart({"values": list(marks)}).encode(
        y=shared.names_axis("arm"),
        yOffset=alt.YOffset("method:N", sort=None, scale=alt.Scale(domain=methods)),
        color=colour_by("method", colours),
        tooltip=tooltips(arm="", method="of", text="difference, ms"),
    )
    known = base.transform_filter(alt.FieldValidPredicate(field="low", valid=True))
    return alt.layer(
        shared.zero_line(),
        known.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=title), x2="high:Q"),
        base.mark_point(filled=True, size=70, opacity=1).encode(
            x=alt.X("ms:Q", title=title, scale=alt.Scale(zero=True)),
            shape=alt.Shape("method:N", scale=shapes, title=None),
            description="aria:N",
        ),
    ).properties(width=shared.WIDTH, height=alt.Step(14, **{"for": "offset"}))
