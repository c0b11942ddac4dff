"""The CPU's timer on a simulated clock."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.workers.child.timers import cpu
from harness.workers.child.timers.base import Program
from harness.workers.child.timers.cpu import LONG_S, CpuTimer


class Calls:
    """Each takes so many seconds of a clock of its own, and is counted by its set of operands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, sets: int = 1) -> None:
        self.now, self.made = 0.0, Counter[int]()
        monkeypatch.setattr(cpu.time, "perf_counter", lambda: self.now)

        def call(which: int) -> None:
            self.now += seconds
            self.made[which] += 1

        self.program = Program([lambda which=which: call(which) for which in range(sets)])


@pytest.mark.parametrize(("seconds", "timed"), [(0.004, 13), (0.06, 1)])
def test_a_turn_is_an_untimed_call_and_then_as_many_as_fill_it(monkeypatch, seconds, timed):
    calls = Calls(monkeypatch, seconds)
    for turn in (1, 2):
        taken = CpuTimer().turn(calls.program, 0.05)
        assert (taken.seconds, taken.calls) == (pytest.approx(seconds), timed)
        assert calls.made[0] == turn * (1 + timed)


def test_a_long_call_has_no_untimed_one_before_once_that_is_known(monkeypatch):
    calls = Calls(monkeypatch, 1.5 * LONG_S)
    assert [CpuTimer().turn(calls.program, 0.05).calls for _ in range(3)] == [1, 1, 1]
    assert calls.made[0] == 4


def test_a_program_knows_which_sets_it_reached(monkeypatch):
    calls = Calls(monkeypatch, 0.06, sets=3)
    CpuTimer().turn(calls.program, 0.05)
    assert [calls.program.reached(which) for which in range(3)] == [True, True, False]
    CpuTimer().turn(calls.program, 0.05)
    assert calls.program.reached(2)
    assert calls.made == {0: 2, 1: 1, 2: 1}
