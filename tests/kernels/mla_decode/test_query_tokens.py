"""Several query tokens: what is wrong with them is refused and named."""

import itertools
from functools import partial

import pytest
import torch

import kernels
from harness.workers.child.diagnosis import Layout
from harness.workers.child.judge import compare_output
from kernels.mla_decode.mistakes import ATTENTION, QUERY_MISTAKES, answers
from kernels.mla_decode.operands import MlaDecodeOperands
from tests.kernels.test_mistakes import is_refused, mistakes, problem, sizes_of

OP = kernels.OPS["mla_decode"]
PAGE = 16


def cases(q: int, heads: int, kv: str) -> list[str]:
    """Lengths around q and around pages, the same for all sequences, and uneven ones; batch is not q."""
    same = [q, q + 1, PAGE - 1, PAGE, PAGE + 1, PAGE + q - 1, 2 * PAGE + 1]
    spans = [*map(str, same), f"{q}..{PAGE + 1}", f"{q}..{3 * PAGE + 1}"]
    batch = 4 if q == 3 else 3
    return [f"batch={batch} ctx={ctx} heads={heads} page={PAGE} kv={kv} q={q}" for ctx in spans]


GROUPS = [cases(*sizes) for sizes in itertools.product((2, 3, 4, 8), (8, 16), ("bf16", "fp8"))]
EVERY = [case for group in GROUPS for case in group]
LONG = "batch=2 ctx=500..513 heads=8 page=64 kv=fp8 q=8"
"""A key that is no landmark has too small a weight here."""
SOME = [LONG, *(group[i // 2] for i, group in enumerate(GROUPS))]
"""One span of lengths for each q and number of heads, on both caches."""


def differs(name: str, o: MlaDecodeOperands) -> bool:
    """Whether the sequence in which the mistake is made gets another answer: that need not be so where
    lengths are equal, or shorter than a page."""
    a = ATTENTION.read(o, ATTENTION.victim(o))
    wrong, right = QUERY_MISTAKES[name](a), a.out()
    return not torch.allclose(wrong, right, rtol=1e-4, atol=1e-6 * float(right.abs().max()))


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[] if case in SOME else pytest.mark.slow) for case in [LONG, *EVERY]
])  # fmt: skip
def test_wrong_query_tokens_are_refused(case, monkeypatch):
    monkeypatch.setattr("harness.workers.child.judge.of_errors", lambda *_: ("wrong", {}))
    planted = 0
    for kernel in mistakes("mla_decode"):
        name = kernel.name.removesuffix(", in FP8")
        if name in QUERY_MISTAKES and kernel.activations == sizes_of("mla_decode", case).kv:
            of = [problem("mla_decode", case, "core", adversarial, "cpu").operands for adversarial in (0, 1)]
            if any(differs(name, operands) for operands in of):
                is_refused("mla_decode", kernel, case, "cpu")
                planted += 1
    assert planted >= len(QUERY_MISTAKES) - 4


def test_wrong_query_tokens_are_named_and_nothing_is_new_with_one_token():
    case = "batch=3 ctx=33..65 heads=4 page=16 q=3"
    made = problem("mla_decode", case, "core", False, "cpu")
    layout = Layout(tuple(made.right.shape), OP.axes, answers=partial(answers, made.operands))
    every = answers(made.operands, [0, 1, 2], slice(0, 512))
    assert [*every][: len(QUERY_MISTAKES)] == [*QUERY_MISTAKES]
    unnamed = {}
    for name in QUERY_MISTAKES:
        out = every[name]().to(made.right.dtype)
        report = compare_output(out, made.reference, OP.tolerance(made.operands.sizes), layout=layout)
        assert not report["ok"], name
        if name not in report["diagnosis"].get("equals", ()):
            unnamed[name] = report["diagnosis"]["kind"]
        if name == "query tokens see all keys":
            assert "in parts of query tokens 0..1: equals: " in report["reason"]
    kinds = ["moved"] * 5 + ["NaN"]  # five give the answers of other rows, and NaN has many causes
    assert sorted(unnamed.values()) == sorted(kinds), unnamed
    one = problem("mla_decode", "batch=3 ctx=1..9 heads=4 page=16", "core", False, "cpu").operands
    assert not QUERY_MISTAKES.keys() & answers(one, [0], slice(0, 512)).keys()
