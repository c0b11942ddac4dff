"""Predictions for the ledger: a change of each quantity, by method, from replays and benchmarks."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from harness.errors import HarnessError
from harness.serving.experiment.schedule import DECODE, Schedule
from harness.serving.experiment.schema import LiveRun, Replays, Served
from harness.serving.experiment.spec import Method, Quantity, Swap
from harness.serving.ledger.prediction import Part, Prediction
from harness.serving.replay.replay import BASE, TWIN
from harness.serving.replay.schema import CONFIDENCE, Timed
from harness.statistics.intervals import mean_half_width

NONE = Timed(ms=0.0, low=0.0, high=0.0)
"""Of a step that makes none of the swapped calls."""

Changes = Mapping[int, Timed | None]
"""Step, by how many requests it prefills -> its change in ms; None where the method has none."""

HOW = {
    "replay": "the step replayed whole, arms interleaved",
    "isolated-cold": "the swapped calls alone, over all layers' operands in turn",
    "isolated-warm": "the swapped calls alone, on one layer's operands again and again",
    "serving-mode": "the swapped calls by the suite's own runs, cache mode serving",
}


def replayed(replays: Replays, name: str) -> Timed | None:
    """The swap's change, with Student's interval over the blocks of all replays; None where it could not run.

    A block counts by the mean of its rounds, because what a client reports are means over steps: what a
    shared machine adds in bursts is in those, and a robust centre would leave it out of this.
    """
    blocks = defaultdict(list)
    for number, replay in enumerate(replays.replays):
        for sample in replay.samples:
            if BASE in sample and name in sample:
                base = statistics.fmean(sample[arm] for arm in (BASE, TWIN) if arm in sample)
                blocks[number, sample["block"]].append(1e3 * (sample[name] - base))
    if not blocks:
        return None
    changes = [statistics.fmean(rounds) for rounds in blocks.values()]
    mean, half = statistics.fmean(changes), mean_half_width(changes, CONFIDENCE)
    known = math.isfinite(half)
    return Timed(ms=mean, low=mean - half if known else None, high=mean + half if known else None)


def isolated(replays: Replays, name: str, mode: str) -> Timed | None:
    """mode: `cold` or `warm`; the mean over the replays."""
    values = [getattr(replay.arms[name], mode) for replay in replays.replays]
    return Timed(ms=statistics.fmean(values)) if values and None not in values else None


def change(method: str, replays: Replays | None, served: Served | None, name: str) -> Timed | None:
    """Of one kind of step, by one method. replays None: the step makes none of the swapped calls."""
    if replays is None:
        return NONE
    if method == "replay":
        return replayed(replays, name)
    if method == "serving-mode":
        return served.change if served else None
    return isolated(replays, name, method.removeprefix("isolated-"))


def prediction(
    method: Method,
    quantity: Quantity,
    swap: Swap,
    changes: Changes,
    *,
    weights: Schedule,
    before: Sequence[LiveRun],
) -> Prediction | None:
    """The quantity's change: the steps' changes with the schedule's weights. None where one is not known."""
    parts, squares, known = [], 0.0, True
    for kind, weight in weights.of(quantity).items():
        timed = changes.get(kind)
        if timed is None:
            return None
        half = None if timed.low is None or timed.high is None else weight * (timed.high - timed.low) / 2
        known = known and half is not None
        squares += (half or 0.0) ** 2
        value, half = weight * timed.ms, abs(half or 0.0)
        what = "decode steps" if kind == DECODE else f"prefills of {kind} together"
        parts.append(
            Part(
                what=f"{weight:.4g} x {what}",
                origin="measured",
                value=value,
                low=value - half,
                high=value + half,
            )
        )
    total, half = sum(part.value for part in parts), math.sqrt(squares)
    seen = [value for run in before if (value := getattr(run, quantity)) is not None]
    mean = statistics.fmean(seen) if seen else None
    return Prediction(
        quantity=quantity,
        unit="ms",
        method=method,
        change=total,
        low=total - half if known else None,
        high=total + half if known else None,
        before=mean,
        after=None if mean is None else mean + total,
        confidence=CONFIDENCE,
        parts=tuple(parts),
        assumptions=(HOW[method], *((f"not counted: {swap.glue}",) if swap.glue else ())),
    )


def require_earlier(predictions: Sequence[str], begun: str) -> None:
    """predictions: the times at which they were written. Raises HarnessError where a run began before: what
    it shows must not be set beside a prediction that may have known it."""
    from datetime import datetime

    for at in predictions:
        if datetime.fromisoformat(begun) <= datetime.fromisoformat(at):
            raise HarnessError(
                f"refused: runs began at {begun}, before their prediction was written at {at}; "
                "take their folder away to make them again"
            )
    if not predictions:
        raise HarnessError("refused: runs without a prediction; they would be no test of one")
