"""The checker of MHA prefill catches planted bugs, at small and at full size, and passes what is right."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import kernels
from harness.workers.child.judge import judge
from kernels.mha_prefill.mistakes import KEYS, Attend, everywhere, of_keys, scored, victim
from kernels.mha_prefill.operands import MhaPrefillOperands, beyond
from kernels.mha_prefill.sizes import VALUE, MhaPrefillSizes
from kernels.op import Implementation, Reference
from kernels.operands import Seeds
from kernels.platform import detect
from shapes.case import parse
from tests.kernels.mha_prefill.right_arithmetic import BF16
from tests.support.same_digits import same_digits

OP = kernels.OPS["mha_prefill"]


@dataclass
class Problem:
    """A case with its reference."""

    sizes: MhaPrefillSizes
    operands: MhaPrefillOperands
    reference: Reference

    def judge(self, out: torch.Tensor) -> dict[str, Any]:
        shape = tuple(OP.empty_output(self.sizes, "meta").shape)
        return judge(out, self.reference, OP.tolerance(self.sizes), shape)

    def output(self, of: Attend) -> torch.Tensor:
        return everywhere(of)(self.operands, OP.empty_output(self.sizes, "meta"))

    def over(self, out: torch.Tensor, row: int) -> float:
        """How far an output of one row [1, heads, 128] is over the limit; infinite for NaN."""
        at = slice(row, row + 1)
        seen = Reference(self.reference.value[at], self.reference.sigma[at])
        report = judge(out, seen, OP.tolerance(self.sizes))
        return math.inf if report["row_error"] is None else report["row_error"] / report["row_limit"]


CLEAR = 3.0  # times the limit at least, so that a bug is caught whatever the seed


@functools.cache
def make(text: str, seed: int = 1) -> Problem:
    sizes = OP.sizes(parse(text)[0])
    operands = OP.operands(sizes, Seeds(seed, seed), "cpu")
    return Problem(sizes, operands, OP.reference(operands))


# One key, in any single row

SMALL = "batch=3 new=40..90 prefix=1..60 heads=4"
OF_KEYS = {name: of_keys(keys) for name, keys, _ in KEYS}
OF_ONE_KEY = (
    "causal mask one token too short",
    "causal mask one token too far",
    "first key lost",
    "last key of the previous sequence counted too",
    "last cached key lost",
    "first new key counted twice",
)


@pytest.mark.parametrize("name", OF_ONE_KEY)
@pytest.mark.parametrize("text", [SMALL, "batch=2 new=64..100 prefix=1500..2048 heads=4"])
def test_bug_of_one_key_is_caught_in_any_single_row(name, text):
    """Row 0 is left out: with nothing cached it has one key."""
    problem = make(text)
    s = victim(problem.operands)
    wrong = OF_KEYS[name](problem.operands, s).bfloat16()
    chosen = {1, 2, 15, 16, 31, 32, s.new - 2, *random.Random(0).sample(range(1, s.new - 1), 8)}
    over = {row: problem.over(wrong[row : row + 1], s.queries.start + row) for row in chosen}
    assert min(over.values()) > CLEAR, over


@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_a_key_behind_the_last_is_seen(sequence):
    """The next sequence's first one, or behind all of them a guard."""
    problem = make(SMALL)
    s = problem.operands.sequences[sequence]
    out = problem.reference.value.bfloat16()
    out[s.queries.stop - 1] = OF_KEYS["causal mask one token too far"](problem.operands, s)[-1].bfloat16()
    report = problem.judge(out)
    assert not report["ok"]
    assert report["row_error"] is None if sequence == 2 else report["row_error"] > CLEAR * report["row_limit"]


# What is right passes

CASES = 35


class Drawn(NamedTuple):
    """A case, something done to its operands, and its seed."""

    text: str
    twist: str
    seed: int


TWISTS = ("none", "flat softmax", "peaked softmax", "loud token", "equal lengths")


def draw(count: int) -> list[Drawn]:
    choose = random.Random(0).choice
    drawn = [Drawn("batch=1 new=1 heads=16", "none", 0), Drawn("batch=1 new=1 heads=1", "loud token", 1)]
    for seed in range(len(drawn), count):
        twist = TWISTS[seed % len(TWISTS)]
        spans = ["1", "16", "64", "100", "255"] if twist == "equal lengths" else ["1..3", "1..40", "3..300"]
        sizes = {
            "batch": choose([1, 1, 2, 3, 5]),
            "new": choose(spans),
            "prefix": choose(["0", "0", "0..7", "1", "0..100", "257"]),
            "heads": choose([1, 2, 3, 16]),
        }
        drawn.append(Drawn(" ".join(f"{name}={value}" for name, value in sizes.items()), twist, seed))
    return drawn


@functools.cache
def twisted(drawn: Drawn) -> Problem:
    sizes = OP.sizes(parse(drawn.text)[0])
    operands = OP.operands(sizes, Seeds(drawn.seed, drawn.seed), "cpu")
    if drawn.twist == "flat softmax":
        operands.q.zero_()
    elif drawn.twist == "peaked softmax":
        operands.q.mul_(8)
    elif drawn.twist == "loud token":
        operands.k[len(operands.k) // 2] *= 100
        operands.v[len(operands.v) // 2] *= 100
    return Problem(sizes, operands, OP.reference(operands))


def implementation(name: str) -> Implementation:
    return next(i for i in kernels.implementations("mha_prefill") if i.name == name)


def run(name: str, problem: Problem) -> torch.Tensor:
    """An implementation's output, which it may not read; nor may it change its operands."""
    before = problem.operands.digest()
    out = OP.empty_output(problem.sizes, "cpu").fill_(math.nan)
    prepared = implementation(name).prepare(problem.operands, out)
    prepared.call()
    assert problem.operands.digest() == before
    return prepared.result()


def run_drawn(name: str, drawn: Drawn) -> Any:
    """For another process: the bits of the output."""
    return run(name, twisted(drawn)).view(torch.int16).numpy()


@pytest.mark.parametrize("drawn", draw(CASES), ids=lambda d: f"{d.text}, {d.twist}")
def test_what_is_right_passes(drawn):
    problem = twisted(drawn)
    outputs = {name: run(name, problem) for name in ("torch.naive", "torch.sdpa")}
    outputs |= {name: problem.output(of) for name, of in [*BF16.items()][drawn.seed % 5 :: 5]}
    reports = {name: problem.judge(out) for name, out in outputs.items()}
    assert not {name: report["reason"] for name, report in reports.items() if not report["ok"]}


def test_what_vllm_gives_passes(vllms_process):
    if not (support := implementation("vllm.extend").available(detect("cpu"))).ok:
        pytest.skip(support.reason)
    wrong = {}
    for drawn in draw(CASES):
        bits = vllms_process.submit(run_drawn, "vllm.extend", drawn).result(timeout=900)
        report = twisted(drawn).judge(torch.from_numpy(bits).view(torch.bfloat16))
        if not report["ok"]:
            wrong[drawn] = report["reason"]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("text", ["batch=3 new=1..300 prefix=0..200 heads=3", "batch=2 new=130 heads=2"])
def test_what_torch_compiles_passes(text):
    if not (support := implementation("torch.compile").available(detect("cpu"))).ok:
        pytest.skip(support.reason)
    problem = make(text)
    report = problem.judge(run("torch.compile", problem))
    assert report["ok"], report["reason"]


# Operands


def test_lengths_have_a_seed_of_their_own():
    sizes = OP.sizes(parse("batch=7 new=1..50 prefix=0..20 heads=1")[0])
    first, other = OP.operands(sizes, Seeds(3, 3), "cpu"), OP.operands(sizes, Seeds(4, 4, lengths=3), "cpu")
    assert first.sequences == other.sequences != OP.operands(sizes, Seeds(4, 4), "cpu").sequences
    assert not torch.equal(first.q, other.q)


def test_adversarial_operands_shift_scores():
    sizes = OP.sizes(parse("batch=2 new=40 heads=8")[0])
    for dtype in ("bf16", "fp8"):
        sizes = OP.sizes({"batch": 2, "new": "40", "heads": 8, "dtype": dtype})
        o = OP.operands(sizes, Seeds(1, 1, adversarial=True), "cpu")
        scores, _ = scored(o, o.sequences[1], seen=torch.ones(40, 40, dtype=torch.bool))
        middle = scores.flatten(1).median(-1).values
        assert middle[::4].min() > 80 and middle[3::4].max() < -80 and middle[[1, 2, 5, 6]].abs().max() < 40


@pytest.mark.parametrize("least", [0.0, 2.0**-126])
def test_what_underflow_leaves_beside_a_value_of_zero_passes(least):
    """As in MLA decode: in half of the columns the first key, which alone is heard, has 0."""
    sizes = OP.sizes(parse("batch=1 new=20 heads=2")[0])
    o = OP.operands(sizes, Seeds(1, 1), "cpu")
    o.k[..., -1], o.q[..., -1] = 0.0, 90.0
    o.k[0, :, -1] = 90.0
    o.v[0, :, : VALUE // 2] = 0.0
    scores = torch.einsum("qhd,khd->hqk", o.q.double(), o.k.double()) * o.scale
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1).clamp(min=least).masked_fill(hidden, 0.0)
    out = torch.einsum("hqk,khd->qhd", weights, o.v.double()).bfloat16()
    problem = Problem(sizes, o, OP.reference(o))
    assert out[..., : VALUE // 2].any() == (least > 0)
    assert problem.reference.sigma.min() > 0
    assert problem.judge(out)["ok"]


def test_a_store_into_a_guard_changes_the_digest():
    o = OP.operands(OP.sizes({"batch": 2, "new": "9", "heads": 2}), Seeds(), "cpu")
    before = o.digest()
    for tensor in (o.q, o.k, o.v):
        for at in (0, -1):
            guard = beyond(tensor)[at]
            kept = guard.clone()
            guard.fill_(1.0)
            assert o.digest() != before
            guard.copy_(kept)
    assert o.digest() == before == o.copy().digest()


def test_ordinary_operands_are_those_of_recorded_runs():
    """Where torch draws the same numbers as on the machine that this was written on."""
    same_digits("mha_prefill", "batch=4 new=1..40 prefix=0..30 heads=3", "3881a80d947d2f57")
    same_digits("mha_prefill", "batch=3 new=20..90 prefix=0..60 heads=4 dtype=fp8", "0a31b0b93411eca9")
