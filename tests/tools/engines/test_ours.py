"""Our engine as the comparison uses it, on simulated calls: each gives the seconds that it takes."""

from __future__ import annotations

import random

import pytest

from harness.workers.child.timers.base import Program, Turn
from tools.engines import ours

NAMES = ["base", "base again", "base +2%", "other"]
SECONDS = {"base": 1e-3, "base again": 1e-3, "base +2%": 1.02e-3, "other": 0.7e-3}


class SimulatedTimer:
    def __init__(self) -> None:
        self.noise = random.Random(0)

    def program(self, calls):
        return Program(calls)

    def turn(self, program, at_least):
        return Turn(program.steps[0]() * self.noise.gauss(1, 0.003), 1)


class Disturbed:
    def begin(self) -> None:
        pass

    def sample(self, who: str) -> None:
        pass

    def end(self) -> str:
        return "others"


@pytest.fixture
def simulated(monkeypatch):
    prepared = []

    def prepare(name: str):
        prepared.append(name)
        return lambda: SECONDS[name]

    monkeypatch.setattr(ours, "prepare", prepare)
    monkeypatch.setattr(ours, "CpuTimer", SimulatedTimer)
    monkeypatch.setattr(ours, "monitor_for", lambda platform, pids: Disturbed())
    return prepared


def test_it_finds_two_percent_and_prepares_each_block_anew(simulated):
    ranking = ours.rank(NAMES, budget_s=60.0)
    assert ranking.verdicts["base again"] in ("same", "unclear")
    assert ranking.verdicts["base +2%"] == "slower"
    assert ranking.verdicts["other"] == "faster"
    assert ranking.seconds["base +2%"] / ranking.seconds["base"] == pytest.approx(1.02, rel=0.003)
    assert simulated.count("base +2%") >= 6
    assert simulated.count("base") == 2 * simulated.count("base +2%")  # the twin is the baseline, too
