"""Verdicts made again from a run's records: what was recorded is enough to decide as the run did."""

import math
from collections.abc import Iterable
from dataclasses import replace

from harness.results.comparison import compare_samples
from harness.results.schema import Cell, Record, Samples, Verdict
from harness.statistics.paired import Comparison
from harness.statistics.paired import verdict as of_interval


def redo(records: Iterable[Record]) -> list[tuple[Verdict, Comparison]]:
    """Each verdict of a case, and what its samples give with the noise and the confidence that it states."""
    records = list(records)
    samples = {r.name: r.samples for r in records if isinstance(r, Cell)}
    verdicts = [r for r in records if isinstance(r, Verdict)]
    # Each group of entries has a rerun of the same name.
    sides = [(v.samples if v.about == "A/A" else samples[v.a], samples[v.b]) for v in verdicts]
    return [(v, _compared(v, *pair)) for v, pair in zip(verdicts, sides, strict=True)]


def _compared(verdict: Verdict, a: Samples, b: Samples) -> Comparison:
    noise = math.inf if verdict.noise is None else verdict.noise
    found = compare_samples(a, b, confidence=verdict.confidence)
    return replace(found, verdict=of_interval(found.low, found.high, noise=noise, margin=verdict.margin))
