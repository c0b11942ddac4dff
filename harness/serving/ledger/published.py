"""Published A/B points: what others saw in serving when they changed kernels, as rows of the ledger.

They were all observed before anything was predicted here, so no row of theirs is blind in time. What the link
predicts of them is blind in what it knows: no point was ever fitted to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from harness.serving.ledger.link_predictions import REMAKE, StoredPrediction, command, stored
from harness.serving.ledger.prediction import KernelChange, Prediction, QuantityName, Unit
from harness.serving.schema import StrictRecord

FOLDER = PUBLISHED / "changes"


class PublishedPoint(StrictRecord):
    """One setting of a publication, before and after. at: what tells it from its others, `c=4`; with the unit
    1 only the ratio was given, and before is 1."""

    at: str = ""
    concurrency: float | None = None
    quantity: QuantityName
    unit: Unit
    before: float
    after: float


class PublishedChange(StrictRecord):
    """A publication, or a setting of one.

    where:   which part of it was read
    changes: all that was changed at once
    lacks:   what it, or the part read, does not say, and what the link would need besides
    link:    options of `serving link` that predict it, without --concurrency; empty: something lacks
    """

    id: str
    source: str
    where: str = ""
    setting: Setting
    changes: tuple[KernelChange, ...]
    points: tuple[PublishedPoint, ...]
    lacks: tuple[str, ...] = ()
    link: str = ""
    explanation: str = ""

    def row(self, point: PublishedPoint) -> str:
        return " ".join(filter(None, [self.id, point.at]))

    def command(self, point: PublishedPoint) -> str:
        """That predicts the point. Raises UsageError where its concurrency is not known."""
        count = point.concurrency or self.setting.workload.concurrency
        if count is None:
            raise UsageError(f"{self.row(point)}: nothing is predicted without a concurrency")
        return command(self.link, count)


def published_changes(paths: Sequence[Path] = ()) -> list[PublishedChange]:
    """Of the files, or of all that there are. Raises UsageError where one cannot be read."""
    return [change for path in paths or sorted(FOLDER.glob("*_points.json")) for change in _read(path)]


def _read(path: Path) -> list[PublishedChange]:
    try:
        return [PublishedChange(**entry) for entry in json.loads(path.read_text())["changes"]]
    except ValidationError as error:
        raise UsageError(f"cannot read {path}: {error.title} {mistake(error)}") from None
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from None


def published_rows(paths: Sequence[Path] = ()) -> list[LedgerRow]:
    """A row for each point. Raises UsageError where a file cannot be read, or where a stored prediction is
    not that of its point's command."""
    predictions = stored()
    return [
        _row(change, point, predictions) for change in published_changes(paths) for point in change.points
    ]


def _row(
    change: PublishedChange, point: PublishedPoint, predictions: dict[str, StoredPrediction]
) -> LedgerRow:
    linked = predictions.get(change.row(point)) if change.link else None
    if change.link and (linked is None or linked.command != change.command(point)):
        raise UsageError(f"no prediction of {change.row(point)} by its command; {REMAKE}")
    [row] = rows(list(_lines(change, point, linked)), change.source)
    return row.model_copy(update={"published": True, "lacks": change.lacks})


def _lines(change: PublishedChange, point: PublishedPoint, linked: StoredPrediction | None) -> Iterator[Any]:
    row = change.row(point)
    workload = change.setting.workload.model_copy(
        update={"concurrency": point.concurrency or change.setting.workload.concurrency}
    )
    setting = change.setting.model_copy(update={"workload": workload})
    yield ChangeEntry(row=row, changes=change.changes, setting=setting)
    if linked is not None:
        yield PredictionEntry(row=row, prediction=linked.prediction)
    for single in change.changes:
        if single.factor is not None:
            yield PredictionEntry(row=row, prediction=_alone(single, point))
    yield ObservationEntry(row=row, observation=_observation(change, point))
    for text in ("; ".join(_follows(change, point, linked)), change.explanation):
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


def _alone(change: KernelChange, point: PublishedPoint) -> Prediction:
    """The most that this change alone can give: the kernel being the whole step."""
    factor = change.factor or 1.0
    most = point.before * (factor - 1) if _is_rate(point) else -point.before * (1 - 1 / factor)
    return Prediction(
        quantity=point.quantity,
        unit=point.unit,
        method="bound",
        of=change.op,
        low=min(most, 0.0),
        high=max(most, 0.0),
        before=point.before,
        assumptions=(f"nothing else changed, and it is the whole step; {factor:g}x: {change.source}",),
    )


def _is_rate(point: PublishedPoint) -> bool:
    return point.quantity == "output_throughput"


def _follows(
    change: PublishedChange, point: PublishedPoint, linked: StoredPrediction | None
) -> Iterator[str]:
    """What the observation says of the kernels, whatever was predicted."""
    before, after = (point.after, point.before) if _is_rate(point) else (point.before, point.after)
    for single in change.changes:
        if single.factor is not None:
            share = least_share(before, after, single.factor)
            needs = f"a share of at least {share:.0%}" if share <= 1 else "more than the whole step"
            yield f"{single.op} at {single.factor:g}x alone would need {needs}"
        elif single.calls and point.unit == "ms":
            saved = saved_per_call_us(point.before, point.after, single.calls)
            yield f"implies {saved:.0f} us saved of each of {single.calls} calls"
    if linked is not None and linked.prediction.before and point.unit != "1":
        own = linked.prediction.before
        yield f"the link's own value before is {own:.3g} {point.unit}, {own / point.before - 1:+.0%}"
    if len(change.changes) > 1:
        yield "all changed at once: no single one is known"
