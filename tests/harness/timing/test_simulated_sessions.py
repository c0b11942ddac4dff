"""What the default policy and `compare` make of a disturbed machine: sessions of two contenders, simulated.

Few sessions with a fixed seed, for the bounds that such a number allows; `slow` is the acceptance itself.
At full size, beside the rules of other suites: `python -m tools.simulate_sessions`.
"""

from __future__ import annotations

import pytest

from tools.simulate_sessions import RULES, run
from tools.simulated_machine import BUSY, FAMILIES

PREPARED_APART = [name for name, family in FAMILIES.items() if family.offset]
DISTURBED = [name for name in FAMILIES if name not in (*PREPARED_APART, "all of these")]
OURS = "**ours**, defaults"


def sessions(families: list[str], n: int) -> dict[str, float]:
    """Means over the families, and the worst widths."""
    rows = [run(OURS, name, n, seed=20) for name in families]
    mean = {
        field: sum(getattr(row, field) for row in rows) / len(rows)
        for field in ("false", "covered", "near", "far")
    }
    return mean | {"width": max(row.width for row in rows), "near_worst": min(row.near for row in rows)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_sessions(family):
    found = run(OURS, family, 50, seed=20)
    assert found.false <= 10
    assert found.covered >= 88
    assert found.width <= 1.3
    assert found.far >= 90
    assert found.rounds[0] <= 200
    if family in DISTURBED:
        assert found.near >= 78


@pytest.mark.parametrize("rule", [OURS, "**ours**, with an A/A floor"])
@pytest.mark.parametrize("family", BUSY)
def test_verdicts_beside_neighbours_that_come_and_go(family, rule):
    """Twice as slow while they are there: who is as fast is not called otherwise, who takes half as long
    again is found."""
    found = [RULES[rule](BUSY[family], 1.0, seed) for seed in range(40)]
    assert sum(o.verdict in ("faster", "slower") for o in found) <= 4
    assert sum(RULES[rule](BUSY[family], 1.5, seed).called("faster") for seed in range(40)) >= 39


@pytest.mark.slow
def test_disturbances():
    found = sessions(DISTURBED, 150)
    assert found["false"] <= 5
    assert found["covered"] >= 93
    assert found["width"] <= 1.3
    assert found["near"] >= 90
    assert found["far"] >= 98


@pytest.mark.slow
def test_preparations_that_differ():
    found = sessions(PREPARED_APART, 400)
    assert found["false"] <= 5
    assert found["covered"] >= 93
    assert found["width"] <= 1.3
    assert found["far"] >= 98
