"""The small cases of uneven sizes beside a case that is timed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import kernels
from harness.machine.monitor.base import Blind
from harness.plan.arms import Arm
from harness.plan.contender import Contender
from harness.plan.select import kept_sizes, ragged_cases
from harness.run.device import OwnDevice
from harness.run.measurer import CaseMeasurer, Group
from kernels.platform import Platform
from shapes.case import Case
from shapes.suites import suite

CPU = Platform("cpu", "x86-avx2", "cpu", "a CPU")


def mla(sizes):
    lengths = sizes.lengths()
    return {
        "more than eight": len(lengths) > 8,
        "unequal": len(set(lengths)) > 3,
        "one token": 1 in lengths,
        "whole pages": any(length % sizes.page == 0 for length in lengths),
    }


def mha(sizes):
    prefixes, new = zip(*sizes.lengths(), strict=True)
    return {
        "more than eight": len(new) > 8,
        "unequal": len(set(new)) > 1,
        "nothing cached beside something": min(prefixes) == 0 < max(prefixes),
        "nothing cached": max(prefixes) == 0,
        "all cached": min(prefixes) > 0,
    }


def moe(sizes):
    here = {pick for picks in sizes.routed.picks(0) for pick in picks}
    return {
        "odd tokens": sizes.tokens % 2 and sizes.tokens > 1,
        "one token": sizes.tokens == 1,
        "other ranks": -1 in here,
        "shared": sizes.shared and sizes.ep == 1,
        "shared beside other ranks": sizes.shared and -1 in here,
        "experts without rows": len(here - {-1}) < sizes.local_experts,
    }


def gemm(sizes):
    return {
        "odd rows below a tile": sizes.m % 2 and sizes.m < 16,
        "rows beyond a tile": sizes.m > 128 and sizes.m % 128,
        "columns beyond a block": sizes.n % 128,
        "odd blocks": sizes.k_blocks % 2,
    }


SHOWS = {"block_scale_gemm": gemm, "fused_moe": moe, "mha_prefill": mha, "mla_decode": mla}


@pytest.mark.parametrize("op", SHOWS)
@pytest.mark.parametrize("name", ["r1-tp8", "r1-dp-ep8"])
def test_they_are_uneven_whatever_the_case_is_and_of_its_dtypes(op, name):
    of = kernels.OPS[op]
    boundary = of.boundaries[-1]
    for given in suite(name).cases(op):
        case = of.case(given.sizes, boundary=boundary)
        cases = ragged_cases(of, case, CPU.arch)
        assert {each.boundary for each in cases} == {boundary}
        assert all(kept_sizes(each) == kept_sizes(case) for each in cases)
        shown = [SHOWS[op](of.sizes(each.sizes)) for each in cases]
        assert all(any(each[what] for each in shown) for what in shown[0]), case.key


def test_the_case_itself_is_left_out():
    of = kernels.OPS["mha_prefill"]
    first, *others = ragged_cases(of, of.case({"batch": 1, "new": 3, "dtype": "fp8"}), CPU.arch)
    assert ragged_cases(of, first, CPU.arch) == others


def asked(measurer: CaseMeasurer, case: Case) -> int:
    impl = next(i for i in kernels.implementations("mla_decode") if i.name == "torch.naive")
    return len(measurer._ragged(case, Group([Contender(impl.name, impl, Arm(), "eager")], "", None)))


def test_whoever_was_checked_is_not_asked_again_but_at_other_dtypes():
    of = kernels.OPS["mla_decode"]
    plan = SimpleNamespace(op=of, record=SimpleNamespace(race=None))
    measurer = CaseMeasurer(plan, OwnDevice(CPU, Blind("")), progress=None)
    bf16, long, fp8 = (of.case({"batch": 1, "ctx": 3} | more) for more in ({}, {"ctx": 4000}, {"kv": "fp8"}))
    assert asked(measurer, bf16) > 1
    measurer.ragged[("torch.naive", "core", "heads=16", "page=64", "kv=bf16")] = ""
    assert (asked(measurer, long), asked(measurer, fp8) > 1) == (0, True)


@pytest.mark.parametrize(
    ("op", "given"),
    [
        ("block_scale_gemm", {"m": 64, "n": 256, "k": 512, "fp8": "e4m3fnuz", "scales": "ue8m0"}),
        ("fused_moe", {"tokens": 64, "fp8": "e4m3fnuz", "scales": "ue8m0"}),
        ("mha_prefill", {"batch": 1, "new": 64, "heads": 32, "dtype": "fp8", "fp8": "e4m3fnuz"}),
        ("mla_decode", {"batch": 1, "ctx": 64, "heads": 32, "page": 1, "kv": "fp8", "fp8": "e4m3fnuz"}),
    ],
)
def test_formats_heads_and_pages_are_those_of_the_timed_case(op, given):
    of = kernels.OPS[op]
    kept = {k: v for k, v in given.items() if k not in ("m", "n", "k", "tokens", "batch", "new", "ctx")}
    cases = ragged_cases(of, of.case(given), CPU.arch)
    assert cases
    assert all(kept.items() <= each.sizes.items() for each in cases)


def test_later_cases_say_too_that_far_addresses_are_wrong(monkeypatch):
    """They are checked once a run; a row of a library keeps its time in all of its cases."""
    of = kernels.OPS["mla_decode"]
    impl = kernels.implementations("mla_decode")[0]
    told = iter([{"ok": True, "far": False}, {"ok": True}, {}, {"ok": True}])

    class Run:
        def __init__(self, **given: object) -> None:
            pass

        def run(self, *_: object) -> None:
            contender.check |= next(told)

        def close(self) -> None:
            pass

    monkeypatch.setattr("harness.run.measurer.CaseRun", Run)
    plan = SimpleNamespace(op=of, record=SimpleNamespace(race=None), rules=None, threads=1, deadlines=None)
    progress = SimpleNamespace(say=None, rounds=None)
    measurer = CaseMeasurer(plan, OwnDevice(CPU, Blind("")), progress)
    seen = []
    for more in ({}, {"ctx": 4000}, {"ctx": 5000}, {"kv": "fp8"}):
        contender = Contender(impl.name, impl, Arm(), "eager")
        case = of.case({"batch": 1, "ctx": 3} | more)
        measurer._run_group(case, Group([contender], "", None), 1.0, 1.0, Path())
        seen.append(contender.check)
    assert seen == [{"ok": True, "far": False}, {"ok": True, "far": False}, {}, {"ok": True}]
