"""The checker of the fused MoE catches planted bugs, at small and at full size, and passes what is right."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kernels
from harness.workers.child.judge import judge
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.reference import routing
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Reference
from kernels.operands import Seeds
from shapes.case import parse
from tests.support import planted_bugs_fused_moe as planted

OP = kernels.OPS["fused_moe"]
CLEAR = 3.0  # times the limit at least, so that a bug is caught whatever the seed
FULL = pytest.mark.slow


@dataclass
class Problem:
    sizes: FusedMoeSizes
    operands: FusedMoeOperands
    reference: Reference

    def judge(self, out: torch.Tensor, fp8: bool = False) -> dict[str, Any]:
        shape = tuple(OP.empty_output(self.sizes, "meta").shape)
        return judge(out.bfloat16(), self.reference, OP.tolerance(self.sizes), shape, fp8)


def make(text: str, boundary: str = "core", seed: int = 0) -> Problem:
    sizes = OP.sizes(parse(text)[0])
    operands = OP.operands(sizes, Seeds(seed, seed), "cpu", boundary)
    return Problem(sizes, operands, OP.reference(operands))


# Bugs that show in one output

SIZES = {
    "small": "tokens=24 experts=32 topk=8 hidden=512 inter=256",
    "small fnuz ue8m0": "tokens=24 experts=32 topk=8 hidden=512 inter=256 fp8=e4m3fnuz scales=ue8m0 shared=1",
    "small ep": "tokens=24 experts=64 topk=8 hidden=512 inter=256 ep=4 shared=1",
    "tp8": "tokens=64 shared=1",
    "ep8": "tokens=64 ep=8 inter=2048 shared=1",
}


@pytest.fixture(scope="module")
def margins() -> Iterator[dict[str, dict[str, str]]]:
    """Bug -> size -> its row error over the limit, printed at the end (pytest -s)."""
    found: dict[str, dict[str, str]] = {}
    yield found
    print("\n" + "row error / limit".ljust(34) + "".join(name.rjust(18) for name in SIZES))
    for bug, row in found.items():
        print(bug.ljust(34) + "".join(row.get(name, "-").rjust(18) for name in SIZES))


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=FULL if n in ("tp8", "ep8") else ()) for n in SIZES]
)
def size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def problem(size: str) -> Problem:
    return make(SIZES[size], "with_routing")


@pytest.fixture(scope="module")
def right(problem: Problem) -> dict[bool, torch.Tensor]:
    return {fp8: planted.compute(problem.operands, fp8=fp8) for fp8 in (False, True)}


def over(report: dict[str, Any]) -> float:
    if report["row_error"] is None:
        return math.inf
    return max(report["row_error"] / report["row_limit"], report["element_error"] / report["element_limit"])


def note(margins: dict[str, dict[str, str]], bug: str, size: str, *reports: dict[str, Any]) -> None:
    margins.setdefault(bug, {})[size] = " / ".join(f"{over(r):.3g}" for r in reports)


def busiest(problem: Problem) -> int:
    """An expert that is some token's heaviest routed pick."""
    ids, weights = routing(problem.operands)
    routed = torch.where(ids[:, : problem.sizes.topk] < 0, -1, weights[:, : problem.sizes.topk])
    return int(ids[routed.max(1).values.argmax(), routed[routed.max(1).values.argmax()].argmax()])


@pytest.mark.parametrize("bug", planted.EXPERT_BUGS)
def test_bug_in_one_expert_is_caught(bug, size, problem, right, margins):
    """Margins in bf16, and in FP8, where a block is hidden unless its tokens are hot in it."""
    expert, reports = busiest(problem), []
    plan = planted.EXPERT_BUGS[bug](problem.operands, expert)
    for fp8 in (False, True):
        wrong = planted.compute(problem.operands, plan, fp8, only={expert})
        was = planted.compute(problem.operands, fp8=fp8, only={expert})
        reports.append(problem.judge(right[fp8] - was + wrong, fp8))
    note(margins, bug, size, *reports)
    assert over(reports[0]) > CLEAR


def by_expert(problem: Problem, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What each of the rank's experts counts for each token, fp64 [tokens, held]."""
    dense = torch.zeros(len(ids), problem.sizes.local_experts + 1, dtype=torch.float64)
    return dense.scatter_add_(1, ids % (problem.sizes.local_experts + 1), weights.double())[:, :-1]


@pytest.mark.parametrize("bug", planted.PICK_BUGS)
def test_bug_in_one_token_is_caught(bug, size, problem, right, margins):
    o = problem.operands
    ids, weights = routing(o)
    if "elsewhere" in bug and not bool((ids < 0).any()):
        pytest.skip("no picks of other ranks")
    wrong = planted.PICK_BUGS[bug](o, ids, weights)
    # The token for which it changes most.
    change = (by_expert(problem, *wrong) - by_expert(problem, ids, weights)).norm(dim=-1)
    token, reports = int((change / by_expert(problem, ids, weights).norm(dim=-1)).argmax()), []
    for fp8 in (False, True):
        out = right[fp8].clone()
        out[token] = planted.compute(o, fp8=fp8, picks=wrong, token=token)[0]
        reports.append(problem.judge(out, fp8))
    note(margins, bug, size, *reports)
    assert over(reports[0]) > CLEAR
    assert not reports[1]["ok"]


def test_row_never_written_is_caught(problem, right):
    out = right[False].clone()
    out[len(out) // 2] = math.nan
    assert "NaN" in problem.judge(out)["reason"]


def test_token_given_to_another_is_caught(problem, right, size, margins):
    out = right[False].clone()
    out[-1] = out[0]
    report = problem.judge(out)
    note(margins, "token given to another", size, report)
    assert over(report) > CLEAR


# What is right

TWISTS = ("none", "outliers", "zero blocks", "large scales", "tiny scales", "one hot value")


def twisted(seed: int) -> Problem:
    draw = random.Random(seed)
    sizes = {
        "tokens": draw.choice([1, 1, 2, 7, 20]),
        "experts": draw.choice([8, 16, 20]),
        "topk": draw.choice([1, 2, 3]),
        "hidden": draw.choice([128, 256, 640]),
        "inter": draw.choice([128, 256]),
        "ep": draw.choice([1, 1, 2]),
        "shared": draw.choice([0, 1]),
        "routing": draw.choice(["balanced", "uniform", "zipf:1.2", "one"]),
        "fp8": draw.choice(["e4m3fn", "e4m3fnuz"]),
        "scales": draw.choice(["fp32", "ue8m0"]),
    }
    boundary, twist = draw.choice(OP.boundaries), TWISTS[seed % len(TWISTS)]
    read = OP.sizes(sizes)
    o = OP.operands(read, Seeds(seed, seed), "cpu", "with_quant" if boundary == "core" else boundary)
    if twist == "outliers":
        o.x[:, 3] *= 1000
    elif twist == "zero blocks":
        o.x[:, :128] = 0
        o.w13[:, :, -128:] = 0
        o.w2[:, :128] = 0
    elif twist == "large scales":
        o.w13_scale *= 64
        o.w2_scale *= 2.0**20
    elif twist == "tiny scales":
        o.w13_scale *= 2.0**-30
        o.w2_scale *= 2.0**-20
    elif twist == "one hot value":
        o.x.mul_(2.0**-20)[:, 5] = 2.0
    if boundary == "core":
        inner = o.narrowed()
        OP.step(o, inner.live_tensors())()
        o = inner
    return Problem(read, o, OP.reference(o))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_right_passes(seed):
    problem = twisted(seed)
    reports = {
        name: problem.judge(planted.compute(problem.operands, plan, fp8), fp8)
        for name, (plan, fp8) in planted.RIGHT.items()
    }
    print({name: round(report["row_error"] or -1, 2) for name, report in reports.items()})
    assert not {name: report["reason"] for name, report in reports.items() if not report["ok"]}
