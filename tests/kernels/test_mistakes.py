"""The judge refuses each op's mistakes, and accepts what libraries compute, with room to spare."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kernels
from harness.workers.child.judge import judge
from kernels.op import Reference
from kernels.operands import Seeds
from shapes.case import parse

SMALL = {
    "block_scale_gemm": ("m=9 n=300 k=600", "m=9 n=300 k=600 fp8=e4m3fnuz", "m=33 n=160 k=2048"),
    "fused_moe": ("tokens=24 experts=16 topk=4 hidden=384 inter=256 ep=2 shared=1",),
    "mha_prefill": (
        "batch=3 new=40..90 prefix=1..60 heads=4",
        "batch=3 new=40..90 prefix=0..60 heads=4 dtype=fp8",
        "batch=3 new=40..90 prefix=0..60 heads=4 dtype=fp8 fp8=e4m3fnuz",
    ),
    "mla_decode": (
        "batch=3 ctx=1..201 heads=16 page=16",
        "batch=3 ctx=1..201 heads=16 page=16 kv=fp8",
        "batch=3 ctx=1..201 heads=16 page=16 kv=fp8 fp8=e4m3fnuz",
        "batch=3 ctx=40..300 heads=16 page=1",
    ),
}
"""Each mistake is made in the first case that it fits."""
LARGE = {
    "block_scale_gemm": ("m=64 n=2112 k=7168",),
    "fused_moe": ("tokens=16 experts=8 topk=4 hidden=7168 inter=256 shared=1",),
    "mha_prefill": ("batch=2 new=64..100 prefix=1500..2048 heads=4",),
    "mla_decode": ("batch=2 ctx=3201..3999 heads=16 page=64",),
}
MOST = 0.9
"""Of the limit, that a right kernel may take: a library's next release rounds otherwise."""


@dataclass(frozen=True)
class Problem:
    operands: Any
    reference: Reference
    right: torch.Tensor


@functools.cache
def problem(op: str, case: str, boundary: str, adversarial: bool, device: str) -> Problem:
    of, sizes = kernels.OPS[op], sizes_of(op, case)
    seeds = Seeds(1, 1, adversarial=True) if adversarial else Seeds(0, 0)
    operands = of.make(sizes, seeds, device, boundary)
    reference = of.reference(operands)
    return Problem(operands, reference, reference.value.to(of.empty_output(sizes, "meta").dtype))


@functools.cache
def sizes_of(op: str, case: str) -> Any:
    return kernels.OPS[op].sizes(parse(case)[0])


def judged(op: str, kernel: Any, case: str, adversarial: bool, device: str) -> tuple[bool, float]:
    """Whether the judge accepts a kernel's output, and by how many limits it errs."""
    made = problem(op, case, kernel.boundary, adversarial, device)
    out = kernel.compute(made.operands, made.right.clone())
    tolerance, fp8 = kernels.OPS[op].tolerance(sizes_of(op, case)), kernel.activations == "fp8"
    report = judge(out, made.reference, tolerance, tuple(made.right.shape), fp8, kernel.truncates)
    if report["row_error"] is None:
        return report["ok"], math.inf
    row, element = (report[f"{what}_error"] / report[f"{what}_limit"] for what in ("row", "element"))
    return report["ok"], max(row, element)
