"""Observations for the ledger: what pairs of live runs show."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from harness.serving.experiment.schema import LiveRun, Paired
from harness.serving.experiment.spec import Experiment
from harness.serving.ledger.ledger import Observation
from harness.serving.replay.schema import CONFIDENCE
from harness.statistics.intervals import mean_half_width


def values(paired: Paired, quantity: str) -> list[tuple[float, float]]:
    """(base, arm) of the pairs of which both are known."""
    both = [(getattr(a, quantity), getattr(b, quantity)) for a, b in paired.pairs]
    return [(a, b) for a, b in both if a is not None and b is not None]


def observations(experiment: Experiment, paired: Paired) -> Iterator[Observation]:
    """One for each quantity: the mean over pairs with Student's 90 % interval."""
    for quantity in experiment.predict.quantities:
        both = values(paired, quantity)
        if len(both) < 2:
            continue
        differences = [b - a for a, b in both]
        mean, half = statistics.fmean(differences), mean_half_width(differences, CONFIDENCE)
        yield Observation(
            quantity=quantity,
            unit="ms",
            before=statistics.fmean(a for a, _ in both),
            after=statistics.fmean(b for _, b in both),
            change=mean,
            low=mean - half,
            high=mean + half,
            pairs=len(both),
            source=experiment.engine.kind,
            runs=tuple(run.file for pair in paired.pairs for run in pair),
        )


def prefill_changes(paired: Paired) -> list[float]:
    """Of each prefill step of the pattern, in order, the mean change in ms."""
    groups = min((len(run.prefills) for pair in paired.pairs for run in pair), default=0)

    def of(run: LiveRun, group: int) -> float:
        return run.prefills[group]

    return [statistics.fmean(of(b, group) - of(a, group) for a, b in paired.pairs) for group in range(groups)]
