"""Observations: what serving runs showed before and after a change, with the interval over their pairs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.serving.clients.load import load
from harness.serving.compare.alike import compare
from harness.serving.compare.normalise import of_instance
from harness.serving.compare.quantity import quantity_of_run
from harness.serving.ledger.identity import assumptions, require_alike, require_one_release
from harness.serving.ledger.ledger import ExplanationEntry, Observation, ObservationEntry, append, read, rows
from harness.serving.schema import Metric, ServingRun, Totals, contradictions
from harness.statistics.intervals import mean_half_width

CONFIDENCE = 0.9
# quantity -> the metric's name, statistic, tokens and unit
READ = {
    "tpot": ("tpot", "mean", "", "ms"),
    "itl": ("itl", "mean", "", "ms"),
    "ttft": ("ttft", "mean", "", "ms"),
    "e2e": ("e2e", "mean", "", "ms"),
    "output_throughput": ("throughput", "total", "output", "tok/s"),
}


def observe(
    ledger: Path,
    row_id: str,
    before: Sequence[str],
    after: Sequence[str],
    *,
    assumed: Sequence[str] = (),
    explanation: str = "",
) -> None:
    """Appends an observation for each quantity that was predicted of the row and that the runs have.

    before, after: any client's files, paired in order; assumed: see `identity.differences`. That numbers of
    theirs cannot hold is written down beside. Raises UsageError where they cannot be paired, or are not of
    the row's setting.
    """
    known = {row.id: row for row in rows(read(ledger), str(ledger))}
    if row_id not in known:
        raise UsageError(f"{ledger} has no row {row_id!r}; rows: {', '.join(known) or 'none'}")
    runs_before, runs_after = _runs(before), _runs(after)
    if len(runs_before) != len(runs_after):
        raise UsageError(f"{len(runs_before)} runs before and {len(runs_after)} after: pairs are wanted")
    _require_once(runs_before)
    _require_once(runs_after)
    setting = known[row_id].setting
    require_alike(setting, [*runs_before, *runs_after], assumed)
    require_one_release([*runs_before, *runs_after])
    taken = assumptions(setting, [*runs_before, *runs_after], assumed)
    pairs = list(zip(runs_before, runs_after, strict=True))
    quantities = dict.fromkeys(entry.prediction.quantity for entry in known[row_id].predictions)
    observations = [o for quantity in quantities if quantity in READ and (o := observation(quantity, pairs))]
    if not observations:
        raise UsageError(f"none of {', '.join(quantities)} is in all of these runs")
    for observed in observations:
        observed = observed.model_copy(update={"assumed": taken})
        append(ledger, ObservationEntry(row=row_id, observation=observed))
    for text in filter(None, (explanation, contradictions([*runs_before, *runs_after]))):
        append(ledger, ExplanationEntry(row=row_id, text=text))


def _runs(files: Sequence[str]) -> list[ServingRun]:
    return [run for name in files for run in load(name)]


def _require_once(runs: Sequence[ServingRun]) -> None:
    """Raises UsageError where a run is there twice, whose pairs would agree better than any two runs."""
    seen: dict[tuple[Totals, tuple[Metric, ...]], str] = {}
    for run in runs:
        if first := seen.get((run.totals, run.metrics)):
            raise UsageError(f"{run.id} is {first} again, by every number: a run counts once")
        seen[run.totals, run.metrics] = run.id


def observation(quantity: str, pairs: Sequence[tuple[ServingRun, ServingRun]]) -> Observation | None:
    """Of the pairs' differences, of the whole instance, a t-interval; None where a run lacks the metric.
    Raises UsageError where a pair is not alike, or of an unknown part of the instance."""
    name, statistic, tokens, unit = READ[quantity]
    values = []
    for pair in pairs:
        a, b = (run.metric(name, statistic, tokens) for run in pair)
        if a is None or b is None:
            return None
        sides = quantity_of_run(pair[0], a), quantity_of_run(pair[1], b)
        compared = compare(*sides, ("all",))
        if compared.verdict != "alike":
            why = "; ".join(reason.text for reason in compared.reasons) or "they need normalising"
            raise UsageError(f"{pair[0].id} and {pair[1].id} are not alike in {quantity}: {why}")
        of_a, of_b = map(of_instance, sides)
        if of_a is None or of_b is None:
            raise UsageError(f"{pair[0].id} and {pair[1].id} do not say of how many GPUs their {quantity} is")
        values.append((of_a, of_b))
    if not values:
        return None
    before, after = (statistics.fmean(pair[i] for pair in values) for i in (0, 1))
    change, half = t_interval([b - a for a, b in values])
    return Observation(
        quantity=quantity,  # type: ignore[arg-type]
        unit=unit,  # type: ignore[arg-type]
        before=before,
        after=after,
        change=change,
        low=None if half is None else change - half,
        high=None if half is None else change + half,
        pairs=len(pairs),
        runs=tuple(run.source for pair in pairs for run in pair),
    )


def t_interval(differences: Sequence[float]) -> tuple[float, float | None]:
    """Their mean, and the half width of Student's 90 % interval; None of a single one."""
    half = mean_half_width(differences, CONFIDENCE)
    return statistics.fmean(differences), half if math.isfinite(half) else None
