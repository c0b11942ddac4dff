"""The CPU's timer on a simulated clock."""

from collections import Counter

import pytest

from harness.workers.child import timers as cpu
from harness.workers.child.timers import FEW_PAGES, LONG_S, CpuTimer, Program


class Calls:
    """Each takes so many seconds of a clock of its own, and is counted by its set of operands. Those that
    touch memory take ten times as long on a set that is new to them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: float, sets: int = 1, touches: bool = False
    ) -> None:
        self.now, self.made, self.faults = 0.0, Counter[int](), 0
        monkeypatch.setattr(cpu.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(cpu, "_page_faults", lambda: self.faults)

        def call(which: int) -> None:
            first = touches and not self.made[which]
            self.now += 10 * seconds if first else seconds
            self.faults += 1000 if first else FEW_PAGES // 2
            self.made[which] += 1

        self.program = Program([lambda which=which: call(which) for which in range(sets)])


@pytest.mark.parametrize(("seconds", "timed"), [(0.004, 13), (0.06, 1)])
def test_a_turn_is_an_untimed_call_and_then_as_many_as_fill_it(monkeypatch, seconds, timed):
    calls = Calls(monkeypatch, seconds)
    for sample in (1, 2):
        taken = CpuTimer().sample(calls.program, 0.05)
        assert (taken.seconds, taken.calls) == (pytest.approx(seconds), timed)
        assert calls.made[0] == sample * (1 + timed)


def test_a_long_call_has_no_untimed_one_before_once_that_is_known(monkeypatch):
    calls = Calls(monkeypatch, 1.5 * LONG_S)
    assert [CpuTimer().sample(calls.program, 0.05).calls for _ in range(3)] == [1, 1, 1]
    assert calls.made[0] == 4


def test_a_program_knows_which_sets_it_reached(monkeypatch):
    calls = Calls(monkeypatch, 0.06, sets=3)
    CpuTimer().sample(calls.program, 0.05)
    assert calls.program.computed_since(0, 3) == [0, 1]
    assert calls.program.computed_since(1, 3) == [1]
    CpuTimer().sample(calls.program, 0.05)
    assert calls.program.computed_since(0, 3) == [0, 1, 2]
    assert calls.made == {0: 2, 1: 1, 2: 1}


def test_calls_that_touch_memory_for_the_first_time_are_not_timed(monkeypatch):
    calls = Calls(monkeypatch, 0.06, sets=4, touches=True)
    times = [CpuTimer().sample(calls.program, 0.05).seconds for _ in range(4)]
    assert times == [pytest.approx(0.06)] * 4


def test_calls_that_always_fault_memory_in_are_timed_so(monkeypatch):
    calls = Calls(monkeypatch, 0.06, sets=3)
    monkeypatch.setattr(cpu, "_page_faults", lambda: int(1e6 * calls.now))
    assert [CpuTimer().sample(calls.program, 0.05).calls for _ in range(3)] == [1, 1, 1]
    assert sum(calls.made.values()) <= 3 * 2 + 3


def test_a_graph_has_reached_all_sets_once_it_was_replayed_and_none_before():
    graph = Program([int], calls_per_step=3)
    assert [graph.computed_since(0, 3), graph.step(), graph.computed_since(0, 3)] == [[], None, [0, 1, 2]]
