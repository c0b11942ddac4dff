"""How a case is driven, where no worker is needed to tell."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest

import kernels
from harness.plan.arms import Arm
from harness.plan.contender import Contender
from harness.run.case import CaseRun, _clock_error
from harness.workers.process import WorkerFailure
from kernels.platform import Platform
from shapes.case import Case

REQUIRED = {
    "block_scale_gemm": {"m": 3, "n": 128, "k": 128},
    "fused_moe": {"tokens": 3},
    "mha_prefill": {"batch": 1, "new": 3},
    "mla_decode": {"batch": 1, "ctx": 3},
}
"""Sizes that a case of each op has to say."""


class Station:
    """Refuses whatever it is asked."""

    def __init__(self, failure: WorkerFailure) -> None:
        self.failure = failure

    def ask(self, contender: Contender, request: str) -> None:
        raise self.failure


@pytest.mark.parametrize(("how", "status"), [("error", None), ("crashed", "crashed"), ("timeout", "timeout")])
def test_a_profiler_that_does_not_work_costs_no_time(how, status):
    impl = kernels.implementations("mla_decode")[0]
    contender = Contender(impl.name, impl, Arm(), "eager")
    said: list[str] = []
    run = CaseRun(
        case=Case("mla_decode", {"batch": 1, "ctx": "64"}),
        stations=[],
        start_judge=None,
        monitor=None,
        scratch=Path(),
        say=said.append,
    )
    run._profile(Station(WorkerFailure(how, "CUPTI is not permitted")), contender)
    assert contender.status == status
    assert said == [f"{impl.name} could not be profiled: CUPTI is not permitted"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("calls", "call_s"), [(1, 0.5), (40, 0.0015), (5000, 1e-5)])
def test_a_clock_that_runs_at_a_third_of_its_speed_is_no_clock(kind, calls, call_s):
    """One untimed call comes before those that a worker tells of."""
    took_s = (calls + 1) * call_s + 0.002
    assert _clock_error(took_s, took_s, {"seconds": call_s, "calls": calls, "untimed_s": 0.0}, kind) < 1
    slow = 3 if kind == "cpu" else 10
    assert _clock_error(slow * took_s, 0.0, {"seconds": call_s, "calls": calls, "untimed_s": 0.0}, kind) > 1


def test_a_thread_computes_no_longer_than_its_calls_take():
    """On a busy CPU: the turn waited for others most of its time, and in the rest computed what it denies."""
    word = {"seconds": 1e-5, "calls": 5000, "untimed_s": 0.0}
    assert _clock_error(0.06, 0.05, word, "cpu") < 1 < _clock_error(0.06, 0.09, word, "cpu")
    assert _clock_error(0.06, 0.09, word, "cuda") < 1  # its thread waits for the device, and computes so


def test_an_output_of_any_set_is_held_to_that_sets_reference():
    """Calls whose sums have no fixed order may differ on any of them."""
    asked = []
    run = CaseRun(
        case=kernels.OPS["fused_moe"].case({"tokens": 3}),
        stations=[],
        start_judge=lambda: SimpleNamespace(ask=lambda *_, **given: asked.append(given) or 0),
        monitor=None,
        scratch=Path(),
        say=print,
    )
    names = [run._of_set(which, 5) for which in (0, 4, 2, 2)]
    assert names == ["first", "last", "set 2", "set 2"]
    assert [(each["name"], each["seeds"]) for each in asked] == [("set 2 core", {"turn": 2})]


class RaggedStation(Station):
    """Has operands, and tells who was prepared on them."""

    platform = Platform("cpu", "x86-avx2", "cpu", "a CPU")

    def __init__(self, contenders: list[Contender]) -> None:
        super().__init__(WorkerFailure("error", "no output"))
        self.living = self.contenders = contenders
        self.prepared: list[str] = []

    def open(self, case: Case, seeds: dict[str, int]) -> int:
        return 0

    def prepare(self, contender: Contender) -> None:
        self.prepared.append(contender.name)


@pytest.mark.parametrize("op", kernels.OPS)
def test_what_is_compiled_for_each_size_is_not_checked_at_another(op):
    """A plug-in's word on it does not count."""
    rows = {i.name: Contender(i.name, i, Arm(), "eager") for i in kernels.implementations(op)}
    own, alike = rows["torch.compile"], rows["torch.naive"]
    brought = Contender("mine", copy.copy(own.impl), Arm(), "eager")
    brought.impl.plugin = "mine.py"
    station = RaggedStation([own, alike, brought])
    run = CaseRun(
        case=kernels.OPS[op].case(REQUIRED[op]),
        stations=[station],
        start_judge=lambda: SimpleNamespace(ask=lambda *_, **__: 0),
        monitor=None,
        scratch=Path(),
        say=print,
    )
    run._check_ragged([station], run.case, "ragged-0")
    assert station.prepared == ["torch.naive", "mine"]
