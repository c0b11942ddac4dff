"""Section of replays: the time of each step by op class and place, and what each arm changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from harness.errors import UsageError, mistake
from harness.page.document import Chart, PageSection, Table, TableRow, anchor
from harness.page.serving.marks import cell, distinct, ranged
from harness.page.serving.replay_charts import (
    by_class,
    by_place,
    change_marks,
    changes,
    class_marks,
    place_marks,
    step_marks,
)
from harness.serving.replay.schema import Replay, Timed

NOTHING = "no arm was timed"


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
    """Of what `serving replay --json` wrote, or a stage of an experiment. Raises UsageError."""
    if isinstance(document, dict) and "replays" in document:
        document = document["replays"]
    try:
        return [Replay.model_validate(of) for of in (document if isinstance(document, list) else [document])]
    except ValidationError as error:
        raise UsageError(f"cannot read {name}: no replay: {mistake(error)}") from None


def step_name(step: dict[str, Any]) -> str:
    """`decode step of deepseek-r1, 4 requests`: of what the record says."""
    contexts = step.get("contexts")
    requests = f", {len(contexts)} requests" if isinstance(contexts, list) else ""
    tokens = f", {step['tokens']} tokens" if "tokens" in step else ""
    return f"{step.get('phase', '?')} step of {step.get('model', '?')}{requests}{tokens}"


def _step(replay: Replay, name: str, title: str) -> PageSection:
    return PageSection(
        anchor=anchor("replay", title, name),
        title=name,
        headline=_headline(replay),
        charts=list(_charts(replay, anchor("replay", title, name))),
        notes=list(_notes(replay)),
    )


def _headline(replay: Replay) -> str:
    parts = [
        f"{name}: {_ranged(arm.change, '+.4g')} ms"
        for name, arm in replay.arms.items()
        if arm.change is not None
    ]
    base = replay.arms.get(replay.base)
    if base is not None and base.step is not None:
        parts.insert(0, f"{replay.base}: {_ranged(base.step, '.4g')} ms a step")
    parts += [f"{name} failed: {arm.failed}" for name, arm in replay.arms.items() if arm.failed]
    return "; ".join(parts or [NOTHING]) + "."


def _charts(replay: Replay, prefix: str) -> Iterator[Chart]:
    if segments := class_marks(replay):
        yield Chart(
            anchor=f"{prefix}-classes",
            title="The step's time by op class",
            reading=(
                "A bar is the step of one arm, each call waited for and timed by itself; a segment is an op "
                "class. The diamond is the step as it was timed whole, with its 90 % interval: it differs "
                "from the bar by what passes between calls, by calls that overlap, and by drift."
            ),
            picture=by_class(replay),
            table=_pivot(replay, "op class", "classes"),
            marks=len(segments) + len(step_marks(replay)),
        )
    if bars := place_marks(replay):
        yield Chart(
            anchor=f"{prefix}-places",
            title="The step's time by place",
            reading="Each place of the step over all its layers, each call waited for, in the step's order.",
            picture=by_place(replay),
            table=_pivot(replay, "place", "places"),
            marks=len(bars),
        )
    if points := change_marks(replay):
        yield Chart(
            anchor=f"{prefix}-changes",
            title="What each arm changes",
            reading=(
                "Left of the dashed line an arm is faster than the base. The whole step comes from paired "
                "rounds, with its 90 % interval; own calls are the swapped ones, in the step or by "
                "themselves. The base again is the base against itself: the change that is none."
            ),
            picture=changes(points),
            table=_changes_table(replay),
            marks=len(points),
        )


def _pivot(replay: Replay, heading: str, field: str) -> Table:
    """A row for each op class or place, a column for each arm."""
    arms = {name: getattr(arm, field) for name, arm in replay.arms.items() if getattr(arm, field)}
    columns = distinct([heading, *(f"{name}, ms" for name in arms)])
    keys = dict.fromkeys(key for values in arms.values() for key in values)
    rows = [TableRow([key, *(cell(values.get(key), ".4f") for values in arms.values())]) for key in keys]
    return Table(columns, rows, frozenset(columns[1:]))


def _changes_table(replay: Replay) -> Table:
    numeric = ["step, ms", "low", "high", "change, ms", "change low", "change high", "own calls, ms",
               "cold, ms", "warm, ms", "whole model, ms", "outputs apart"]  # fmt: skip
    rows = []
    for name, arm in replay.arms.items():
        apart = max(arm.difference.values(), default=None)
        whole = None if arm.whole is None else arm.whole.ms
        rows.append(
            TableRow(
                [
                    name,
                    ", ".join(f"{op}={implementation}" for op, implementation in arm.chosen.items()),
                    *_ends(arm.step, ".5g"),
                    *_ends(arm.change, "+.5g"),
                    *(cell(value, "+.5g") for value in (arm.own, arm.cold, arm.warm, whole)),
                    cell(apart, ".1e"),
                    arm.failed,
                ]
            )
        )
    if replay.twin is not None:
        blank = [""] * 5
        rows.append(TableRow(["base again", "", "", "", "", *_ends(replay.twin, "+.5g"), *blank, ""]))
    return Table(["arm", "implementations", *numeric, "failed"], rows, frozenset(numeric))


def _ends(timed: Timed | None, form: str) -> list[Any]:
    values = (None,) * 3 if timed is None else (timed.ms, timed.low, timed.high)
    return [cell(value, form) for value in values]


def _ranged(timed: Timed, form: str) -> str:
    return ranged(timed.ms, timed.low, timed.high, form)


def _notes(replay: Replay) -> Iterator[tuple[str, str]]:
    yield "rounds", f"{replay.rounds}, and {replay.disturbed} more disturbed"
    if replay.left_out:
        yield "left out", ", ".join(replay.left_out)
    yield from (("note", text) for text in replay.notes)
