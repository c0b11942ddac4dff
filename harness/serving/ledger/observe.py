"""Observations: what serving runs showed before and after a change, with the interval over their pairs."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.serving.clients.load import beside_each_other, load
from harness.serving.compare import identity
from harness.serving.compare.alike import Quantity, compare, of_instance
from harness.serving.compare.settings import beside
from harness.serving.ledger.ledger import ExplanationEntry, Observation, ObservationEntry, append, read, rows
from harness.serving.schema import ServingRun, contradictions
from harness.statistics.intervals import mean_half_width

CONFIDENCE = 0.9
RELEASE = re.compile(r"\d+(?:\.\d+)+")
"""The release at the beginning of a version; the rest tells builds of it apart."""
METRICS: dict[str, tuple[str, ...]] = {name: (name, "mean") for name in ("tpot", "itl", "ttft", "e2e")}
METRICS |= {"output_throughput": ("throughput", "total", "output")}
"""Quantities of a prediction: the metric's name, statistic and kind of tokens."""


def observe(
    ledger: Path,
    row_id: str,
    before: Sequence[str],
    after: Sequence[str],
    *,
    assumed: Sequence[str] = (),
    engine: str = "",
    explanation: str = "",
) -> None:
    """Appends an observation for each quantity that was predicted of the row and that the runs have.

    before, after: any client's files, paired in order; assumed: see `identity.differences`; engine: of all
    runs, where their files do not say it. What else differs between the sides, and what `serving load` finds,
    is added as explanations. Raises UsageError where the runs cannot be paired, are not of the row's setting,
    or have numbers that `serving load` calls wrong.
    """
    identity.require_names("--assume", assumed, ("all", *identity.FIELDS))
    known = {row.id: row for row in rows(read(ledger), str(ledger))}
    if row_id not in known:
        raise UsageError(f"{ledger} has no row {row_id!r}; rows: {', '.join(known) or 'none'}")
    setting = known[row_id].setting
    sides = [[identity.with_engine(run, engine) for name in names for run in load(name)]
             for names in (before, after)]  # fmt: skip
    if len(sides[0]) != len(sides[1]):
        raise UsageError(f"{len(sides[0])} runs before and {len(sides[1])} after: pairs are wanted")
    every = beside_each_other([*sides[0], *sides[1]])
    wrong = contradictions(every)
    twice = [found.message for run in every for found in run.findings if found.rule == "repeated"]
    if wrong or twice:
        raise UsageError(wrong or f"{twice[0]}; a run counts once")
    for run in every:
        if found := identity.differences(setting, run, assumed):
            hint = "" if all(each.is_known for each in found) else "; --assume NAME takes it to be alike"
            raise UsageError(f"{run.id} is no run of this row: {identity.text(found)}{hint}")
    unsaid = {each.name for run in every for each in identity.differences(setting, run)}
    pairs = list(zip(every[: len(sides[0])], every[len(sides[0]) :], strict=True))
    texts = dict.fromkeys([explanation, *(text for pair in pairs for text in _beside(*pair))])
    predicted = dict.fromkeys(entry.prediction.quantity for entry in known[row_id].predictions)
    seen = [observation(quantity, pairs) for quantity in predicted if quantity in METRICS]
    taken = {"assumed": tuple(name for name in identity.FIELDS if name in unsaid)}
    entries = [ObservationEntry(row=row_id, observation=one.model_copy(update=taken)) for one in seen if one]
    if not entries:
        raise UsageError(f"none of {', '.join(predicted)} is in all of these runs")
    append(ledger, *entries, *(ExplanationEntry(row=row_id, text=text) for text in texts if text))


def _beside(before: ServingRun, after: ServingRun) -> Iterator[str]:
    """What differs between a run before and one after, and what `serving load` suspects of them. Raises
    UsageError where they differ in a known field of the identity, builds of one release excepted."""
    for each in identity.unlike(identity.of_run(before), identity.of_run(after)):
        releases = {release[0] for value in (each.row, each.run) if (release := RELEASE.match(value))}
        if each.is_known and (each.name != "version" or len(releases) > 1):
            raise UsageError(
                f"{before.id} and {after.id} differ in more than the row's change: {each.name} {each.row} "
                f"before, {each.run} after"
            )
        if each.row or each.run:
            yield f"{each.name}: {each.row or 'unknown'} before, {each.run or 'unknown'} after"
    yield from (f"before against after: {line}" for line in beside(before, after))
    for run in (before, after):
        yield from (f"suspect: {each.message}" for each in run.findings if each.severity == "suspect")


def observation(quantity: str, pairs: Sequence[tuple[ServingRun, ServingRun]]) -> Observation | None:
    """The mean difference of the pairs, over the whole instance, with its t-interval; None where a run lacks
    the metric. Raises UsageError where a pair's numbers are of two kinds or of unknown GPUs."""
    values = []
    for pair in pairs:
        metrics = [run.metric(*METRICS[quantity]) for run in pair]
        sides = [Quantity(run, metric) for run, metric in zip(pair, metrics, strict=True) if metric]
        if len(sides) < 2:
            return None
        where = f"{quantity} of {pair[0].id} and {pair[1].id}"
        compared = compare(sides[0], sides[1], ("all",))
        if compared.verdict != "alike":
            why = "; ".join(reason.text for reason in compared.reasons) or "they need normalising"
            raise UsageError(f"{where}: not alike: {why}")
        before, after = map(of_instance, sides)
        if before is None or after is None:
            raise UsageError(f"{where}: it is not known of how many GPUs they are")
        values.append((before, after))
    if not values:
        return None
    means = [statistics.fmean(side) for side in zip(*values, strict=True)]
    change, half = (
        means[1] - means[0],
        mean_half_width([after - before for before, after in values], CONFIDENCE),
    )
    is_finite = math.isfinite(half)  # of a single pair it is not
    return Observation(
        quantity=quantity,  # type: ignore[arg-type]
        unit="tok/s" if quantity == "output_throughput" else "ms",
        before=means[0],
        after=means[1],
        change=change,
        low=change - half if is_finite else None,
        high=change + half if is_finite else None,
        pairs=len(pairs),
        runs=tuple(run.source for pair in pairs for run in pair),
    )
