"""Explanation of a replay that missed: what the trace of the swapped arm shows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from harness.serving.experiment.observations import prefill_changes
from harness.serving.experiment.predictions import Changes
from harness.serving.experiment.schedule import DECODE
from harness.serving.experiment.schema import ObservedArm, Paired, Replays
from harness.serving.experiment.spec import Experiment, Swap
from harness.serving.ledger.report import LedgerLine as Residual
from harness.serving.replay.replay import BASE

LEAST_MS = 0.1
MOST = 4  # classes named


def missed(experiment: Experiment, judged: Sequence[Residual]) -> list[Residual]:
    """Replays of what was resolved that are off by more than the threshold, or outside both intervals."""
    return [
        residual
        for residual in judged
        if residual.method == "replay"
        and residual.observation is not None
        and residual.verdict != "not resolved"
        and (residual.verdict == "missed" or abs(residual.relative_error or 0.0) > experiment.thresholds.miss)
    ]


def by_class(
    swap: Swap, replays: Replays | None, base: Mapping[str, float], seen: Mapping[str, float]
) -> list[tuple[str, float, float]]:
    """(op class, change in the replayed step, in the traced one), ms; most difference first. base, seen: op
    class -> ms in the traces, the base's at the swapped one's pace. Replay and trace name what stands between
    the ops differently (a copy, a pointwise kernel), and a kernel swapped in need not have a name of its op's
    class (torch's products): only the sum of all that can be set beside each other."""
    replayed: dict[str, float] = {}
    every = replays.replays if replays else ()
    for replay in every:
        old, new = replay.arms[BASE].classes, replay.arms[swap.name].classes
        for name in {*old, *new}:
            by = (new.get(name, 0.0) - old.get(name, 0.0)) / len(every)
            replayed[_named(name, swap)] = replayed.get(_named(name, swap), 0.0) + by
    traced: dict[str, float] = {}
    scale = pace(swap, base, seen)
    for name in {*base, *seen}:
        by = seen.get(name, 0.0) - scale * base.get(name, 0.0)
        traced[_named(name, swap)] = traced.get(_named(name, swap), 0.0) + by
    rows = [(name, replayed.get(name, 0.0), traced.get(name, 0.0)) for name in {*replayed, *traced}]
    return sorted(rows, key=lambda row: -abs(row[2] - row[1]))


def pace(swap: Swap, base: Mapping[str, float], seen: Mapping[str, float]) -> float:
    """How long the ops that are not swapped took in the swapped arm's trace, of their time in the base's: a
    shared machine is another in each. 1 where both traces have none."""
    from kernels import OPS

    others = [name for name in OPS if name != swap.op and base.get(name) and seen.get(name)]
    return sum(seen[name] for name in others) / sum(base[name] for name in others) if others else 1.0


def _named(op_class: str, swap: Swap) -> str:
    from kernels import OPS

    apart = op_class == "host" or (op_class in OPS and op_class != swap.op)
    return op_class if apart else f"{swap.op} and glue"


def explanation(
    swap: Swap,
    misses: Sequence[Residual],
    *,
    replays: Mapping[int, Replays | None],
    changes: Changes,
    paired: Paired,
    pattern: Sequence[int],
    base: ObservedArm,
    seen: ObservedArm,
) -> str:
    """One line: how far off, and where the difference sits. replays: of each kind of step."""
    residuals = [
        f"{miss.quantity} {-(miss.error or 0):+.3g} ms ({-(miss.relative_error or 0):+.0%})"
        for miss in misses
    ]
    parts = [f"observed less replayed: {', '.join(residuals)}"]
    parts += _by_class("decode", swap, replays.get(DECODE), base.classes, seen.classes)
    # Of prefills of different sizes the trace's median is of none of them.
    if len(set(pattern)) == 1 and pattern[0] in replays:
        parts += _by_class("prefill", swap, replays.get(pattern[0]), base.prefill, seen.prefill)
    parts += _prefills(changes, paired, pattern)
    parts += _glue(swap)
    return "; ".join(parts)


def _by_class(
    phase: str, swap: Swap, replays: Replays | None, base: Mapping[str, float], seen: Mapping[str, float]
) -> Iterator[str]:
    if not (base and seen):
        return
    rows = [row for row in by_class(swap, replays, base, seen) if abs(row[2] - row[1]) >= LEAST_MS]
    if rows:
        changes = ", ".join(f"{name} {a:+.2f} and {b:+.2f} ms" for name, a, b in rows[:MOST])
        scaled = f"the base's trace times {pace(swap, base, seen):.2f}, as the ops that were not swapped"
        yield f"{phase} step by class, replayed and traced change ({scaled}): {changes}"


def _prefills(changes: Changes, paired: Paired, pattern: Sequence[int]) -> Iterator[str]:
    changes_seen = prefill_changes(paired)
    if len(changes_seen) != len(pattern):
        return
    pieces = []
    for size in dict.fromkeys(pattern):
        seen = statistics.fmean(c for c, n in zip(changes_seen, pattern, strict=True) if n == size)
        timed = changes.get(size)
        if size != DECODE and timed is not None and abs(seen - timed.ms) >= LEAST_MS:
            pieces.append(f"of {size} {timed.ms:+.0f} and {seen:+.0f} ms")
    if pieces:
        yield f"prefill steps, replayed and timed by the client: {', '.join(pieces)}"


def _glue(swap: Swap) -> Iterator[str]:
    if swap.glue:
        yield f"not replayed: {swap.glue}"
