"""Finished pairs of a journal, and what they say of each arm."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.serving.live.ab.effect import ArmEffect, effect

QUANTITIES = {
    "steady_itl_ms": "decode step (steady ITL)",
    "steady_itl_median_ms": "its median",
    "mean_ttft_ms": "mean TTFT",
    "mean_tpot_ms": "mean TPOT",
    "prefill_1_ms": "first prefill",
    "prefill_2_ms": "second prefill",
}


def counted(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs of finished pairs that count."""
    kept = {line["pair"]: line["attempts"] for line in lines if line["kind"] == "pair"}
    runs = (line for line in lines if line["kind"] == "run")
    return [run for run in runs if kept.get(run["pair"], {}).get(run["arm"]) == run["attempt"]]


def pairs_of(lines: Sequence[Mapping[str, Any]], quantity: str, base: str, arm: str) -> list[tuple[Any, Any]]:
    """(base, arm) of each finished pair, in order."""
    values = {(run["pair"], run["arm"]): run.get(quantity) for run in counted(lines)}
    both = [(values.get((pair, base)), values[pair, name]) for pair, name in sorted(values) if name == arm]
    return [(a, b) for a, b in both if a is not None and b is not None]


def effects(lines: Sequence[Mapping[str, Any]], base: str, arm: str) -> dict[str, ArmEffect]:
    """What `arm` changes against `base`, by quantity."""
    changes = {}
    for quantity in QUANTITIES:
        both = pairs_of(lines, quantity, base, arm)
        if change := effect([a for a, _ in both], [b for _, b in both]):
            changes[quantity] = change
    return changes


def spread(lines: Sequence[Mapping[str, Any]], arm: str, quantity: str = "steady_itl_ms") -> float | None:
    """Relative standard deviation between an arm's finished runs; None for fewer than two."""
    values = [a for a, _ in pairs_of(lines, quantity, arm, arm)]
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else None
