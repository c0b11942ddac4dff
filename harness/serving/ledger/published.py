"""Published A/B points: what others saw in serving when they changed kernels, as rows of the ledger.

They were all observed before anything was predicted here, so no row of theirs is blind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from harness.errors import UsageError, mistake, one_line
from harness.paths import PUBLISHED
from harness.serving.ledger.bounds import least_share, saved_per_call_us
from harness.serving.ledger.ledger import (
    ChangeEntry,
    ExplanationEntry,
    LedgerRow,
    Observation,
    ObservationEntry,
    PredictionEntry,
    Setting,
    rows,
)
from harness.serving.ledger.prediction import KernelChange, Part, Prediction, QuantityName
from harness.serving.schema import StrictRecord

POINTS = PUBLISHED / "changes" / "ab_points.json"


class PublishedPoint(StrictRecord):
    """One setting of a publication, before and after. at: what tells it from its others, `c=4`."""

    at: str = ""
    concurrency: float | None = None
    quantity: QuantityName
    unit: Literal["ms", "tok/s"]
    before: float
    after: float


class PublishedChange(StrictRecord):
    """A publication. changes: all that was changed at once."""

    id: str
    source: str
    setting: Setting
    changes: tuple[KernelChange, ...]
    points: tuple[PublishedPoint, ...]
    explanation: str = ""


def published_rows(path: Path = POINTS) -> list[LedgerRow]:
    """A row for each point. Raises UsageError where the file cannot be read."""
    try:
        document = json.loads(path.read_text())
        known = [PublishedChange(**entry) for entry in document["changes"]]
    except ValidationError as error:
        raise UsageError(f"cannot read {path}: {error.title} {mistake(error)}") from None
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from None
    return [
        rows(list(_lines(change, point)), change.source)[0] for change in known for point in change.points
    ]


def _lines(change: PublishedChange, point: PublishedPoint) -> Iterator[Any]:
    row = " ".join(filter(None, [change.id, point.at]))
    workload = change.setting.workload.model_copy(
        update={"concurrency": point.concurrency or change.setting.workload.concurrency}
    )
    setting = change.setting.model_copy(update={"workload": workload})
    yield ChangeEntry(row=row, changes=change.changes, setting=setting)
    for single in change.changes:
        if single.saved_us is not None and point.unit == "ms":
            yield PredictionEntry(row=row, prediction=_from_saving(single, point))
        elif single.factor is not None and point.unit == "ms":
            yield PredictionEntry(row=row, prediction=_alone(single, point))
    yield ObservationEntry(row=row, observation=_observation(change, point))
    for text in ("; ".join(_follows(change, point)), change.explanation):
        if text:
            yield ExplanationEntry(row=row, text=text)


def _observation(change: PublishedChange, point: PublishedPoint) -> Observation:
    return Observation(
        quantity=point.quantity,
        unit=point.unit,
        before=point.before,
        after=point.after,
        change=point.after - point.before,
        source=change.source,
    )


def _from_saving(change: KernelChange, point: PublishedPoint) -> Prediction:
    """The kernel's own saving times its calls, all of it on the critical path."""
    calls = change.calls or 1
    value = -calls * (change.saved_us or 0.0) / 1e3
    part = Part(what=f"{change.op} {change.part}".strip(), origin="table", value=value, low=value, high=value)
    return Prediction(
        quantity=point.quantity,
        unit="ms",
        method="link",
        change=value,
        before=point.before,
        after=point.before + value,
        parts=(part,),
        assumptions=(f"{calls} calls a step, all exposed; {change.source}",),
    )


def _alone(change: KernelChange, point: PublishedPoint) -> Prediction:
    """The most that this change alone can give: the kernel being the whole step."""
    most = -point.before * (1 - 1 / (change.factor or 1.0))
    return Prediction(
        quantity=point.quantity,
        unit="ms",
        method="bound",
        of=change.op,
        low=min(most, 0.0),
        high=max(most, 0.0),
        before=point.before,
        assumptions=(f"nothing else changed, and it is the whole step; {change.factor:g}x: {change.source}",),
    )


def _follows(change: PublishedChange, point: PublishedPoint) -> Iterator[str]:
    """What the observation says of the kernels, whatever was predicted."""
    for single in change.changes:
        if single.factor is not None and point.unit == "ms":
            share = least_share(point.before, point.after, single.factor)
            needs = f"a share of at least {share:.0%}" if share <= 1 else "more than the whole step"
            yield f"{single.op} at {single.factor:g}x alone would need {needs}"
        elif single.calls and point.unit == "ms":
            saved = saved_per_call_us(point.before, point.after, single.calls)
            yield f"implies {saved:.0f} us saved of each of {single.calls} calls"
    if len(change.changes) > 1:
        yield "all changed at once: no single one is known"
