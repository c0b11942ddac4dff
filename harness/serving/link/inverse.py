"""Speedups that a target TPOT would need, and the most that each op could give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.serving.ledger.prediction import KernelChange
from harness.serving.link.closed_loop import ClosedLoop
from harness.serving.link.model import Link
from harness.serving.op_classes import OP_CLASSES
from kernels import OPS

INFINITE = 1e9
CLOSE = 1e-6


@dataclass(frozen=True)
class Need:
    """Of one op, or of all together.

    factor:  that reaches the target; None: no factor does; 1: it is reached already
    limit_ms: TPOT were the op to take no time
    most_ms: what it can take off TPOT, and share: of TPOT
    """

    ops: tuple[str, ...]
    factor: float | None
    limit_ms: float
    most_ms: float
    share: float


def needs(link: Link, load: ClosedLoop, target_ms: float | None) -> list[Need]:
    """Of each op of the suite that the link models alone, and of all together; for the central case.
    target_ms: None asks only for the most."""
    modelled = {t.op for p in (link.steps(load).decode, link.steps(load).prefill) for t in p.terms}
    ops = [op for op in OP_CLASSES if op in OPS and op in modelled]
    return [_need(link, load, target_ms, group) for group in [*((op,) for op in ops), tuple(ops)]]


def _need(link: Link, load: ClosedLoop, target_ms: float | None, ops: tuple[str, ...]) -> Need:
    before = tpot(link, load, ops, 1.0)
    limit = tpot(link, load, ops, INFINITE)
    factor = None
    if target_ms is not None and target_ms >= before:
        factor = 1.0
    elif target_ms is not None and target_ms > limit:
        factor = _factor(link, load, target_ms, ops)
    return Need(ops, factor, limit, before - limit, (before - limit) / before)


def tpot(link: Link, load: ClosedLoop, ops: Sequence[str], factor: float) -> float:
    """TPOT, ms, with all of the ops that much faster; the central case."""
    world = link.world(1)
    changes = [KernelChange(op=op, factor=factor) for op in ops] if factor != 1.0 else []
    return float(link.serving(load, changes, world)[1].tpot[0])


def _factor(link: Link, load: ClosedLoop, target_ms: float, ops: tuple[str, ...]) -> float:
    """By bisection of the share of the time that stays, over which TPOT grows."""
    low, high = 0.0, 1.0
    while high - low > CLOSE:
        middle = (low + high) / 2
        if tpot(link, load, ops, 1 / max(middle, 1 / INFINITE)) > target_ms:
            high = middle
        else:
            low = middle
    return 1 / max(low, 1 / INFINITE) if low else math.inf
