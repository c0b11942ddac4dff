"""The checker of MHA prefill catches planted bugs, at small and at full size, and passes what is right."""

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
from kernels.mha_prefill.operands import MhaPrefillOperands, Sequence
from kernels.mha_prefill.sizes import MhaPrefillSizes
from kernels.op import Implementation, Reference
from kernels.operands import Seeds
from kernels.platform import detect
from shapes.case import parse
from tests.support import planted_bugs_mha_prefill as planted
from tests.support.planted_bugs_mha_prefill import BUGS, EVERY_ROW, RIGHT, WITH_CACHED, Variant

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

    def output(self, variant: Variant) -> torch.Tensor:
        sequences = self.operands.sequences
        return torch.cat([variant(self.operands, s, range(s.new)).bfloat16() for s in sequences])

    @property
    def right(self) -> torch.Tensor:
        return self.reference.value.bfloat16()

    @property
    def victim(self) -> Sequence:
        """With cached tokens if there are any, and behind another sequence."""
        return max(self.operands.sequences[1:], key=lambda s: (s.prefix > 0, s.new))

    def over(self, bug: Variant, rows: range) -> float:
        """How far an output with some rows of the victim wrong, which alone are looked at, is over the limit;
        infinite for NaN."""
        at = slice(self.victim.queries.start + rows.start, self.victim.queries.start + rows.stop)
        seen = Reference(self.reference.value[at], self.reference.sigma[at])
        out = bug(self.operands, self.victim, rows).bfloat16()
        report = judge(out, seen, OP.tolerance(self.sizes))
        assert not report["ok"] and report["reason"], f"{bug.__name__} in rows {rows}"
        return math.inf if report["row_error"] is None else report["row_error"] / report["row_limit"]


@functools.cache
def make(text: str, seed: int = 1) -> Problem:
    sizes = OP.sizes(parse(text)[0])
    operands = OP.operands(sizes, Seeds(seed, seed), "cpu")
    return Problem(sizes, operands, OP.reference(operands))


# Bugs that show in one output

SIZES = {
    "small": "batch=3 new=100..150 heads=4",
    "small cached": "batch=3 new=90 prefix=1..60 heads=4",
    "full": "batch=2 new=100..3200 heads=4",
    "full cached": "batch=2 new=64..1152 prefix=2048 heads=8",
    "128 heads": "batch=2 new=130 heads=128",
}
CLEAR = 3.0  # times the limit at least, so that a bug is caught whatever the seed


@pytest.fixture(scope="module")
def margins() -> Iterator[dict[str, dict[str, str]]]:
    """Bug -> size -> its row error over the limit, printed at the end (pytest -s)."""
    found: dict[str, dict[str, str]] = {}
    yield found
    print("\n" + "row error / limit".ljust(36) + "".join(name.rjust(16) for name in SIZES))
    for bug, row in found.items():
        print(bug.ljust(36) + "".join(row.get(name, "-").rjust(16) for name in SIZES))


@pytest.fixture(scope="module", params=list(SIZES))
def size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_bug_in_one_tile_is_caught(bug, size, margins):
    problem = make(SIZES[size])
    new = problem.victim.new
    if bug in WITH_CACHED and not problem.victim.prefix:
        pytest.skip("nothing is cached")
    over = problem.over(bug, range(max(1, new - 65), new - 1))
    margins.setdefault(bug.__name__, {})[size] = "not finite" if math.isinf(over) else f"{over:.3g}"
    assert over > CLEAR


@pytest.mark.parametrize("bug", EVERY_ROW, ids=lambda bug: bug.__name__)
def test_bug_of_one_key_is_caught_in_any_single_row(bug, size, margins):
    """Row 0 is left out: with nothing cached it has one key."""
    problem = make(SIZES[size])
    new = problem.victim.new
    if bug in WITH_CACHED and not problem.victim.prefix:
        pytest.skip("nothing is cached")
    chosen = {1, 2, 15, 16, 63, 64, new - 2, *random.Random(0).sample(range(1, new - 1), 8)}
    over = {row: problem.over(bug, range(row, row + 1)) for row in chosen if 1 <= row < new - 1}
    name = f"{bug.__name__}, least in a row"
    margins.setdefault(name, {})[size] = f"{min(over.values()):.3g}"
    assert min(over.values()) > CLEAR, over


@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_a_key_behind_the_last_is_seen(sequence):
    """The next sequence's first one, or behind all of them a guard."""
    problem = make(SIZES["small cached"])
    s = problem.operands.sequences[sequence]
    out = problem.right
    rows = range(s.new - 1, s.new)
    out[s.queries.stop - 1 :][:1] = planted.mask_one_long(problem.operands, s, rows).bfloat16()
    report = problem.judge(out)
    assert not report["ok"]
    assert report["row_error"] is None if sequence == 2 else report["row_error"] > CLEAR * report["row_limit"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", EVERY_ROW, ids=lambda bug: bug.__name__)
def test_bug_of_one_key_is_caught_behind_a_long_prefix(bug):
    # Of a row of zeros there is only its weight to see, no value: the nearest to the limit.
    clear = 2.0 if bug is planted.row_of_zeros_leaks else CLEAR
    assert make("batch=2 new=4 prefix=100000 heads=4").over(bug, range(1, 2)) > clear


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
    outputs |= {name: problem.output(variant) for name, variant in RIGHT.items()}
    reports = {name: problem.judge(out) for name, out in outputs.items()}
    assert not {name: report["reason"] for name, report in reports.items() if not report["ok"]}


def test_what_vllm_gives_passes(vllms_process):
    if not (support := implementation("vllm.extend").available(detect("cpu"))).ok:
        pytest.skip(support.reason)
    wrong = {}
    for drawn in draw(CASES):
        bits = vllms_process.submit(run_drawn, "vllm.extend", drawn).result(timeout=120)
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
