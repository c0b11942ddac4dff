"""Races of contenders whose true times are known: who wins, how often wrongly, and at what cost."""

from __future__ import annotations

import math

import pytest

from harness.family import judge
from harness.halving import SELECTING, halving
from harness.timing import Policy, Rounds
from tools.simulated_machine import FAMILIES, TURN_S, Family, Machine

CALL_S = 1e-3
ANCHOR, TWIN = "anchor", "anchor (again)"
OTHERS = [f"c{place}" for place in range(31)]
BUDGET_S = 100.0


def field(**times: float) -> dict[str, float]:
    """31 rivals of an anchor, all as fast as it but those that are named: as a multiple of its time."""
    return {name: CALL_S * times.get(name, 1.0) for name in (ANCHOR, *OTHERS, TWIN)}


def race(true: dict[str, float], family: Family = FAMILIES["offsets"], seed: int = 0, **policy: object) -> Rounds:
    machine = Machine(family, true, seed)
    given = {"budget_s": BUDGET_S, "anchor": ANCHOR, "twin": TWIN, "seed": seed} | policy
    return halving(machine.contenders, Policy(clock=machine.clock, begin_block=machine.prepare, **given))


def challenger(found: Rounds) -> str:
    (name,) = {name for r in found.rounds for name in r.seconds} - {ANCHOR, TWIN}
    return name


def stored(found: Rounds) -> str:
    """Who is faster than the anchor by the engine's rule, or the anchor."""
    names = [ANCHOR, challenger(found)]
    series = {name: found.series(name) for name in (*names, TWIN)}
    judged = judge(series, found.blocks, names, ANCHOR, TWIN)
    return next((j.a for j in judged if j.about == "baseline" and j.found.verdict == "faster"), ANCHOR)
