"""What is right passes, whatever the operands."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kernels
from harness.workers.child.judge import judge
from kernels.fused_moe.operands import FusedMoeOperands
from kernels.fused_moe.sizes import FusedMoeSizes
from kernels.op import Reference
from kernels.operands import Seeds
from shapes.case import parse
from tests.kernels.fused_moe.right_arithmetic import RIGHT

OP = kernels.OPS["fused_moe"]


@dataclass
class Problem:
    sizes: FusedMoeSizes
    operands: FusedMoeOperands
    reference: Reference

    def judge(self, out: torch.Tensor, fp8: bool = False) -> dict[str, Any]:
        shape = tuple(OP.empty_output(self.sizes, "meta").shape)
        return judge(out.bfloat16(), self.reference, OP.tolerance(self.sizes), shape, fp8)


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
        p.name: problem.judge(p.compute(problem.operands, problem.reference.value), p.activations == "fp8")
        for p in RIGHT
        if p.boundary == problem.operands.boundary
    }
    print({name: round(report["row_error"] or -1, 2) for name, report in reports.items()})
    assert len(reports) >= 4
    assert not {name: report["reason"] for name, report in reports.items() if not report["ok"]}


def test_adversarial_operands_are_louder_and_quieter():
    sizes = OP.sizes(parse("tokens=6 experts=8 topk=2 hidden=256 inter=128")[0])
    usual, loud = (
        OP.operands(sizes, Seeds(adversarial=adversarial), "cpu", "with_quant")
        for adversarial in (False, True)
    )
    factors = loud.x.float().norm(dim=1) / usual.x.float().norm(dim=1)
    assert factors.tolist() == pytest.approx([1, 2.0**7, 2.0**-7] * 2)
    assert torch.equal(loud.topk_ids, usual.topk_ids)
