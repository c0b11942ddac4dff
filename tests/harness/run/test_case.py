"""How a case is driven, where no worker is needed to tell."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest

import kernels
from harness.plan.arms import Arm
from harness.plan.contender import Contender
from harness.plan.rotation import Rotation
from harness.run.case import NO_KERNELS, STALE, CaseRun
from harness.workers.process import WorkerFailure
from kernels.platform import Platform
from kernels.vendor import Vendor
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


def test_a_profiler_that_saw_nothing_on_a_gpu_is_told(monkeypatch):
    impl = kernels.implementations("mla_decode")[0]
    contender = Contender(impl.name, impl, Arm(), "eager")
    said: list[str] = []

    class Profiled:
        platform = Platform("cuda", "sm_90", "cuda:0")
        living = contenders = (contender,)

        def start_profiler(self) -> None:
            pass

        def ask(self, contender: Contender, request: str) -> dict[str, list]:
            return {"kernels": [], "picked": [], "ran": []}

    run = CaseRun(
        case=Case("mla_decode", {"batch": 1, "ctx": "64"}),
        stations=[Profiled()],
        start_judge=None,
        monitor=None,
        scratch=Path(),
        say=said.append,
    )
    for check in ("_check_timed", "_check_again"):
        monkeypatch.setattr(CaseRun, check, lambda *_: None)
    run.end(Rotation("warm", 1, 0, 0, False))
    assert f"{NO_KERNELS}: {impl.name}" in said


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


@pytest.mark.parametrize(
    ("stale", "differed", "status"), [(0.5, 0, "wrong"), (0.5, 3, None), (0.001, 0, None)]
)
def test_a_call_that_holds_something_of_the_call_before_is_wrong(stale, differed, status):
    """Where equal operands gave other bits before, an output may differ from the next."""
    impl = kernels.implementations("mla_decode")[0]
    contender = Contender(impl.name, impl, Arm(), "eager")
    contender.check["differed"] = differed
    seen = {"unseen": [1e-4], "again": [1e-4], "kept": [], "stale": stale}
    run = CaseRun(
        case=Case("mla_decode", {"batch": 1, "ctx": "64"}),
        stations=[],
        start_judge=None,
        monitor=None,
        scratch=Path(),
        say=print,
    )
    run._check_unseen(SimpleNamespace(ask=lambda *_: seen), contender)
    assert contender.status == status
    assert ("holds something of the call before" in contender.reason) is (status == "wrong")


def test_a_row_that_is_wrong_on_one_set_is_not_judged_on_another():
    """No other row may need that set's reference in the boundary that its own call covers."""
    impl = next(i for i in kernels.implementations("fused_moe") if i.native("with_quant") == "core")
    contender = Contender(impl.name, impl, Arm(), "eager")
    computed = {"first with_quant", "first core", "last with_quant", "last core"}

    def judged(request: str, deadline: float, *, name: str, **given: object) -> object:
        if request == "reference":
            computed.add(name)
            return 0
        if name not in computed:
            raise WorkerFailure("error", f"KeyError: {name}")
        return {"ok": False, "reason": "zeros"}

    class Compared:
        contenders = (contender,)

        @property
        def living(self) -> list[Contender]:
            return [contender] if contender.alive else []

        def digest(self) -> int:
            return 0

        def ask(self, contender: Contender, request: str, **given: object) -> dict[str, object]:
            output = {"output": b"", "shape": (), "dtype": "bfloat16"}
            seen = {"calls": 20, "differed": 1, "distance": 1.0, "kept": False, "guards": True}
            return seen | {"outputs": [output | {"set": which} for which in (0, 2)]}

    run = CaseRun(
        case=kernels.OPS["fused_moe"].case({"tokens": 3}, boundary="with_quant"),
        stations=[Compared()],
        start_judge=lambda: SimpleNamespace(ask=judged),
        monitor=None,
        scratch=Path(),
        say=print,
    )
    run.digests["first"] = 0
    run._check_timed(5)
    assert (contender.status, contender.reason) == ("wrong", "after timing: zeros")


def alone(judge: object = None) -> CaseRun:
    """A run of a case whose stations are asked directly."""
    return CaseRun(
        case=kernels.OPS["mla_decode"].case({"batch": 1, "ctx": 3}),
        stations=[],
        start_judge=lambda: judge,
        monitor=None,
        scratch=Path(),
        say=print,
    )


@pytest.mark.parametrize(
    ("stale", "differed", "status"),
    [(2 * STALE, 0, "wrong"), (2 * STALE, 3, None), (STALE / 2, 0, None)],
    ids=["old rows", "sums of no fixed order", "alike"],
)
def test_what_is_left_of_the_call_before_is_wrong_where_no_bit_differed_otherwise(stale, differed, status):
    impl = kernels.implementations("mla_decode")[0]
    contender = Contender(impl.name, impl, Arm(), "eager", check={"differed": differed})
    seen = {"kept": [], "unseen": [1e-3], "again": [1e-3], "stale": stale}
    alone()._check_unseen(SimpleNamespace(ask=lambda *_: seen), contender)
    assert contender.status == status


@pytest.mark.parametrize("is_library", [True, False])
@pytest.mark.parametrize("ok", [True, False])
def test_addresses_of_more_than_32_bits_cost_only_the_suites_rows_their_time(is_library, ok):
    impl = next(i for i in kernels.implementations("mla_decode") if isinstance(i, Vendor) is is_library)
    contender = Contender(impl.name, impl, Arm(), "eager")
    station = SimpleNamespace(ask=lambda *_: {"output": b"", "shape": (), "dtype": "bfloat16"})
    judge = SimpleNamespace(ask=lambda *_, **__: {"ok": ok, "reason": "zeros"})
    alone(judge)._check_far(station, contender, "ragged-0", "at its sizes: ")
    assert contender.check == {"far": ok}
    assert contender.status == (None if ok or is_library else "wrong")


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
