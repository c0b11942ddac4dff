"""Block-scale GEMM's checker catches planted bugs at small and at full size, and passes what is right."""

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
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.compose import bind
from kernels.formats import BLOCK
from kernels.op import Implementation, Reference
from kernels.operands import Seeds
from kernels.platform import detect
from shapes.case import parse
from tests.support import planted_bugs_block_scale_gemm as planted
from tests.support.judging import given_to
from tests.support.planted_bugs_block_scale_gemm import (
    ACTIVATION_BUGS,
    QUANTISING_BUGS,
    RIGHT,
    WEIGHT_BUGS,
    Tile,
    Variant,
)

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

    def with_tile(self, out: torch.Tensor, variant: Variant, row: int, n_block: int) -> torch.Tensor:
        """`out` but for one row of one block of N, which a variant computes."""
        tile = self.tile(row, n_block)
        out = out.clone()
        out[row, tile.columns] = variant(tile).bfloat16()
        return out

    def tile(self, row: int, n_block: int) -> Tile:
        return Tile(self.operands, *self._read, row, n_block)

    @functools.cached_property
    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return planted.read(self.operands, self.fp8)

    @property
    def right(self) -> torch.Tensor:
        return self.reference.value.bfloat16()


def make(text: str, boundary: str = "core", seed: int = 0, fp8: bool = False) -> Problem:
    sizes = OP.sizes(parse(text)[0])
    operands = OP.operands(sizes, Seeds(seed, seed), "cpu", boundary)
    return Problem(sizes, operands, OP.reference(operands), fp8)


# Bugs that show in one output

SIZES = {
    "small": "m=9 n=300 k=640",
    "small fnuz": "m=9 n=300 k=600 fp8=e4m3fnuz",
    "small ue8m0": "m=9 n=300 k=640 scales=ue8m0",
    "qkv_a, 1 token": "m=1 n=2112 k=7168",
    "qkv_a": "m=64 n=2112 k=7168",
    "o_proj": "m=5 n=7168 k=2048",
}
CLASSES = {"core": ("core", False), "W8A16": ("with_quant", False), "FP8": ("with_quant", True)}
# Times the limit at least, so that a bug is caught whatever the seed; see TOO_FINE_FOR_FP8.
CLEAR = {"core": 3.0, "W8A16": 3.0, "FP8": 1.2}


@pytest.fixture(scope="module")
def margins() -> Iterator[dict[tuple[str, str], dict[str, float]]]:
    """(class, bug) -> size -> its error over the limit, printed at the end (pytest -s)."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    yield found
    print("\n" + "error / limit".ljust(46) + "".join(name.rjust(16) for name in SIZES))
    for (kind, bug), row in found.items():
        cells = (f"{row[name]:.3g}" if name in row else "-" for name in SIZES)
        print(f"{kind:8}{bug:38}" + "".join(cell.rjust(16) for cell in cells))


def bugs_of(kind: str, sizes: BlockScaleGemmSizes) -> list[Variant]:
    chosen = list(WEIGHT_BUGS)
    if kind != "W8A16":
        chosen += ACTIVATION_BUGS
    if kind == "FP8":
        chosen = [bug for bug in [*chosen, *QUANTISING_BUGS] if bug not in planted.TOO_FINE_FOR_FP8]
    absent = {
        planted.row_given_to_another: sizes.m == 1,
        planted.activation_scale_of_next_row: sizes.m == 1,
        planted.rest_of_k_from_next_row: sizes.k % BLOCK == 0,
        # Rounding at each product adds up: over 640 of them to about the limit itself.
        planted.bf16_accumulator: sizes.k < 2048,
        planted.scales_too_small: sizes.scales == "ue8m0",
    }
    return [bug for bug in chosen if not absent.get(bug, False)]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "size", [pytest.param(s, marks=pytest.mark.slow) if s == "o_proj" else s for s in SIZES]
)
def test_bug_in_one_row_of_one_block_is_caught(size, kind, margins):
    boundary, fp8 = CLASSES[kind]
    problem = make(SIZES[size], boundary, fp8=fp8)
    right, tolerance = problem.right, OP.tolerance(problem.sizes)
    assert problem.judge(right)["ok"]
    row = 4 if problem.sizes.m > 4 else 0  # a flat one
    passed = {}
    for bug in bugs_of(kind, problem.sizes):
        reports = [
            problem.judge(problem.with_tile(right, bug, row, block))
            for block in (1, problem.sizes.n_blocks - 1)
        ]
        over = min(
            math.inf
            if r["row_error"] is None
            else max(r["row_error"] / tolerance.row, r["element_error"] / tolerance.element)
            for r in reports
        )
        margins.setdefault((kind, bug.__name__), {})[size] = over
        if over < CLEAR[kind] or any(r["ok"] or not r["reason"] for r in reports):
            passed[bug.__name__] = over
    assert not passed


@pytest.mark.parametrize("text", ["m=1 n=2112 k=7168", "m=2 n=576 k=18432"])
def test_any_block_of_k_that_is_lost_is_missed(text):
    problem = make(text)
    right = problem.right
    tile = problem.tile(0, problem.sizes.n_blocks - 1)
    contributions = tile.scaled()
    errors = []
    for block in range(problem.sizes.k_blocks):
        out = right.clone()
        out[0, tile.columns] = (contributions.sum(-1) - contributions[:, block]).bfloat16()
        report = problem.judge(out)
        errors.append(report["row_error"] / report["row_limit"])
        assert not report["ok"], f"block {block}"
    print(f"{text}: {min(errors):.3g} times the limit at least")


def test_activations_rounded_to_fp8_are_no_w8a16():
    problem = make("m=5 n=256 k=512", "with_quant", fp8=True)
    out = problem.with_tile(problem.right, planted.by_blocks, 2, 1)
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
    rows = random.Random(drawn.seed).sample(range(problem.sizes.m), min(3, problem.sizes.m))
    for fp8 in (False, True)[: 1 + (drawn.boundary == "with_quant")]:
        problem = Problem(problem.sizes, problem.operands, problem.reference, fp8)
        for name, variant in RIGHT.items():
            out = problem.right
            for row in rows:
                for block in range(problem.sizes.n_blocks):
                    out = problem.with_tile(out, variant, row, block)
            wrong[f"{name}, {fp8}"] = judged(problem, f"{name}{' fp8' * fp8}", out, fp8, worst)
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
        bits = vllms_process.submit(run_drawn, vllm.name, drawn).result(timeout=120)
        out = torch.from_numpy(bits).view(torch.bfloat16)
        if reason := judged(twisted(drawn), vllm.name, out, False, worst):
            wrong[drawn] = reason
    assert not wrong
