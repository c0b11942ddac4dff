"""The check of block-scale GEMM misses no block of K, and accepts what is right whatever the operands."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import kernels
from harness.workers.child.judge import judge
from kernels.arithmetic.block_scale_gemm import OutputTile, quantised, read, summed
from kernels.block_scale_gemm.mistakes import in_one_place
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.compose import bind
from kernels.formats import BLOCK
from kernels.op import Implementation, Reference
from kernels.operands import Seeds
from kernels.platform import detect
from shapes.case import parse
from tests.kernels.block_scale_gemm.right_arithmetic import RIGHT
from tests.support.judging import given_to

OP = kernels.OPS["block_scale_gemm"]


@dataclass
class Problem:
    """A case with its reference. `fp8`: judged as a call that rounds activations to FP8 itself."""

    sizes: BlockScaleGemmSizes
    operands: BlockScaleGemmOperands
    reference: Reference
    fp8: bool = False

    def judge(self, out: torch.Tensor, fp8: bool | None = None) -> dict[str, Any]:
        shape = tuple(OP.empty_output(self.sizes, "meta").shape)
        fp8 = self.fp8 if fp8 is None else fp8
        return judge(out, self.reference, OP.tolerance(self.sizes), shape, fp8)

    @property
    def right(self) -> torch.Tensor:
        return self.reference.value.bfloat16()


def make(text: str, boundary: str = "core", seed: int = 0, fp8: bool = False) -> Problem:
    sizes = OP.sizes(parse(text)[0])
    operands = OP.operands(sizes, Seeds(seed, seed), "cpu", boundary)
    return Problem(sizes, operands, OP.reference(operands), fp8)


def test_adversarial_operands_are_what_they_say():
    sizes = OP.sizes(parse("m=16 n=600 k=640")[0])
    o = OP.operands(sizes, Seeds(1, 1, adversarial=True), "cpu", "with_quant")
    a, b = o.a.float(), o.b_q.float()
    assert a[7].abs().max() == 0 and a[1].abs().max() > 65504 and 1e-7 < a[4].abs().max() < 1e-4
    assert bool(torch.signbit(a[5, :BLOCK]).any()) and a[5, :BLOCK].abs().max() == 0
    assert torch.equal(a[6, :BLOCK], -a[6, BLOCK : 2 * BLOCK])
    assert a[2, :BLOCK].abs().argmax() == 0 and a[2, BLOCK : 2 * BLOCK].abs().argmax() == BLOCK - 1
    assert set(b[3].abs().tolist()) == {448.0}
    assert b[3 * BLOCK : 4 * BLOCK, 3 * BLOCK : 4 * BLOCK].abs().max() == 0
    same = OP.operands(sizes, Seeds(1, 1, adversarial=True), "cpu", "with_quant")
    assert same.digest() == o.digest() != OP.operands(sizes, Seeds(1, 1), "cpu", "with_quant").digest()


@pytest.mark.parametrize("text", ["m=1 n=2112 k=7168", "m=2 n=576 k=18432"])
def test_any_block_of_k_that_is_lost_is_missed(text):
    problem = make(text)
    right = problem.right
    columns = torch.arange((problem.sizes.n_blocks - 1) * BLOCK, problem.sizes.n)
    terms = OutputTile(problem.operands, *read(problem.operands, None), torch.tensor([0]), columns).terms()
    errors = []
    for block in range(problem.sizes.k_blocks):
        out = right.clone()
        out[0, columns] = summed(terms[:block] + terms[block + 1 :])[0].bfloat16()
        report = problem.judge(out)
        errors.append(report["row_error"] / report["row_limit"])
        assert not report["ok"], f"block {block}"
    print(f"{text}: {min(errors):.3g} times the limit at least")


def test_activations_rounded_to_fp8_are_no_w8a16():
    problem = make("m=5 n=256 k=512", "with_quant", fp8=True)
    out = in_one_place(OutputTile.multiply, quantised, row=2)(problem.operands, problem.right)
    assert problem.judge(out)["ok"]
    report = problem.judge(out, fp8=False)
    assert report["row_error"] > 3 * report["row_limit"]


# What is right passes

CASES = 40


class Drawn(NamedTuple):
    """A case, something done to its operands, and its seed."""

    text: str
    boundary: str
    twist: str
    seed: int


TWISTS = ("none", "outlier", "one product", "zero blocks", "far scales", "cancelling")


def draw(count: int) -> list[Drawn]:
    choose = random.Random(0).choice
    drawn = [
        Drawn("m=1 n=1 k=1", "core", "none", 0),
        Drawn("m=300 n=129 k=256", "with_quant", "none", 1),
        Drawn("m=300 n=160 k=256", "core", "one product", 2),
        Drawn("m=300 n=3 k=640", "core", "none", 3),
    ]
    for seed in range(len(drawn), count):
        sizes = {
            "m": choose([1, 1, 2, 5, 17, 70]),
            "n": choose([1, 16, 32, 64, 100, 128, 129, 160, 192, 288, 512]),
            "k": choose([1, 32, 64, 128, 130, 384, 576, 1024, 1300]),
            "fp8": choose(["e4m3fn", "e4m3fn", "e4m3fnuz"]),
            "scales": choose(["fp32", "fp32", "ue8m0"]),
        }
        text = " ".join(f"{name}={value}" for name, value in sizes.items())
        drawn.append(Drawn(text, choose(OP.boundaries), TWISTS[seed % len(TWISTS)], seed))
    return drawn


@functools.cache
def twisted(drawn: Drawn) -> Problem:
    sizes = OP.sizes(parse(drawn.text)[0])
    o = OP.operands(sizes, Seeds(drawn.seed, drawn.seed), "cpu", drawn.boundary)
    a = o.a_q if o.a is None else o.a
    half = sizes.k // 2
    if drawn.twist == "outlier" and o.a is not None:
        o.a[:, half] = o.a.abs().amax(1) * 10_000
    elif drawn.twist == "one product":
        kept = a[:, half].clone()
        a.view(torch.int8 if o.a is None else torch.int16).zero_()
        a[:, half] = kept
    elif drawn.twist == "zero blocks":
        o.b_q.view(torch.int8)[:BLOCK] = 0
        o.b_scale[0] = 2.0**-126
    elif drawn.twist == "far scales":
        o.b_scale *= 2.0**-30
        if o.a is None:
            o.a_scale *= 2.0**40
    elif drawn.twist == "cancelling" and half:
        # Products come in pairs of opposite sign but for the scales, which differ between blocks.
        a[:, half : 2 * half] = a[:, :half].clone()
        b = o.b_q.float()
        b[:, half : 2 * half] = -b[:, :half]
        o.b_q.copy_(b)
    return Problem(sizes, o, OP.reference(o))


def run(name: str, problem: Problem) -> torch.Tensor:
    """An implementation's output, which it may not read; nor may it change its operands."""
    before = problem.operands.digest()
    chosen = implementation(name)
    out = None if chosen.allocates else OP.empty_output(problem.sizes, "cpu").fill_(math.nan)
    prepared = bind(OP, chosen, problem.operands, out)
    prepared.call()
    assert problem.operands.digest() == before
    return prepared.result()


def run_drawn(name: str, drawn: Drawn) -> Any:
    """For another process: the bits of the output."""
    return run(name, twisted(drawn)).view(torch.int16).numpy()


def implementation(name: str) -> Implementation:
    return next(i for i in kernels.implementations("block_scale_gemm") if i.name == name)


@pytest.fixture(scope="module")
def worst() -> Iterator[dict[str, float]]:
    """The largest row error of each that is right, over its limit, printed at the end."""
    found: dict[str, float] = {}
    yield found
    print("\n" + "\n".join(f"{name:32}{error:.3g} of the limit" for name, error in found.items()))


def judged(problem: Problem, name: str, out: torch.Tensor, fp8: bool, worst: dict[str, float]) -> str:
    report = problem.judge(out, fp8)
    parts = (report["row_error"] / report["row_limit"], report["element_error"] / report["element_limit"])
    worst[name] = max(worst.get(name, 0.0), *parts)
    return report["reason"]


@pytest.mark.parametrize("drawn", draw(CASES), ids=lambda d: f"{d.text}, {d.boundary}, {d.twist}")
def test_what_is_right_passes(drawn, worst):
    problem = twisted(drawn)
    wrong = {}
    for name in ("torch.naive", "torch.bf16"):
        given = given_to(OP, implementation(name), problem.operands)
        own = Problem(problem.sizes, given, OP.reference(given))
        wrong[name] = judged(own, f"{name} {drawn.boundary}", run(name, problem), False, worst)
    for kernel in RIGHT:
        if drawn.twist == "zero blocks" and "subnormal" in kernel.name:
            continue  # to it zeros are 2^-7
        if not kernel.truncates and kernel.boundary == drawn.boundary:
            out = kernel.compute(problem.operands, problem.right)
            wrong[kernel.name] = judged(problem, kernel.name, out, kernel.activations == "fp8", worst)
    assert not {name: reason for name, reason in wrong.items() if reason}


def test_what_vllm_gives_passes(vllms_process, worst):
    vllm = implementation("vllm.amx")
    if not (support := vllm.available(detect("cpu"))).ok:
        pytest.skip(support.reason)
    fitting = [
        d for d in draw(3 * CASES) if d.boundary == "with_quant" and vllm.fits(OP.sizes(parse(d.text)[0])).ok
    ]
    assert len(fitting) > 3
    wrong = {}
    for drawn in fitting:
        bits = vllms_process.submit(run_drawn, vllm.name, drawn).result(timeout=900)
        out = torch.from_numpy(bits).view(torch.bfloat16)
        if reason := judged(twisted(drawn), vllm.name, out, False, worst):
            wrong[drawn] = reason
    assert not wrong
