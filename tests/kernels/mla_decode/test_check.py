"""The checker of MLA decode catches planted bugs, at small and at full size, and passes what is right."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import kernels
from harness.workers.child.judge import judge
from kernels.arithmetic.attention import EXACT, Arithmetic
from kernels.arithmetic.roundings import bf16, exact
from kernels.mla_decode.mistakes import Sequence, decode, everywhere, scored
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.reference import through_scores
from kernels.mla_decode.sizes import LATENT, WIDTH, MlaDecodeSizes
from kernels.op import Implementation, Reference
from kernels.operands import Seeds
from kernels.platform import detect
from shapes.case import parse
from tests.kernels.mla_decode.right_arithmetic import BF16, fp8_call
from tests.support.same_digits import same_digits

OP = kernels.OPS["mla_decode"]


@dataclass
class Problem:
    """A case with its reference."""

    sizes: MlaDecodeSizes
    operands: MlaDecodeOperands
    reference: Reference

    def judge(self, out: torch.Tensor, fp8: bool = False) -> dict[str, Any]:
        shape = tuple(OP.empty_output(self.sizes, "meta").shape)
        return judge(out, self.reference, OP.tolerance(self.sizes), shape, fp8)

    def output(self, sequence: Sequence) -> torch.Tensor:
        return everywhere(sequence)(self.operands, OP.empty_output(self.sizes, "meta"))


def make(text: str, seed: int = 0, max_flops: float = math.inf) -> Problem:
    sizes = OP.sizes(parse(text)[0])
    operands = OP.operands(sizes, Seeds(seed, seed), "cpu")
    return Problem(sizes, operands, OP.reference(operands, max_flops))


@pytest.mark.parametrize(
    "text",
    [
        "batch=1 ctx=3999 page=64",
        "batch=1 ctx=3999 page=64 heads=1",
        "batch=1 ctx=3999 page=64 kv=fp8",
        pytest.param("batch=1 ctx=32768 page=64", marks=pytest.mark.slow),
        pytest.param("batch=1 ctx=131072 page=64", marks=pytest.mark.slow),
        "batch=1 ctx=200 page=1",
        "batch=1 ctx=3999 page=1",
    ],
)
def test_any_page_that_is_lost_is_missed(text):
    problem = make(text)
    pages = -(-problem.operands.host_lengths[0] // problem.sizes.page)
    chosen = random.Random(0).sample(range(pages), min(pages, 15))
    errors = []
    for page in chosen:
        out = without_page(problem.operands, page).bfloat16()
        report = problem.judge(out[None])
        errors.append(report["row_error"])
        assert not report["ok"], f"page {page}"
    print(f"{text}: {min(errors) / OP.tolerance(problem.sizes).row:.3g} times the limit at least")


def without_page(o: MlaDecodeOperands, page: int) -> torch.Tensor:
    slots = o.token_slots(0)
    return decode(o, 0, slots=torch.cat([slots[: page * o.page], slots[(page + 1) * o.page :]]))


def test_scores_in_bf16_pass_only_where_softmax_is_flat():
    """Rounding a score s changes its weight by up to 2^-8 |s|, as much as rounding the weight where |s| is 1.
    Row errors measured here: below 1.1 sigma where scores deviate by less than 0.7, 1 to 4.5 around 1.5,
    2.4 to 28 from 2.8 on. An output of 16 heads, from flat to peaked, has always been found wrong."""
    problem = make("batch=4 ctx=4096 heads=128")
    out = problem.output(partial(decode, how=Arithmetic(scores=bf16, weights=exact)))
    assert not problem.judge(out)["ok"]
    z = (out.double() - problem.reference.value) / problem.reference.sigma
    error = z.square().mean(-1).sqrt()[:, 1::2]  # of heads that do not hear the landmarks
    limit = OP.tolerance(problem.sizes).row
    for sequence, errors in enumerate(error):
        deviation = scored(problem.operands, sequence)[0].std(-1)[1::2]
        assert errors[deviation < 0.7].max() < limit
        assert errors[deviation > 2.8].median() > 2 * limit


# Sampled references

SAMPLED = "batch=12 ctx=1..200 heads=4 page=16"


def test_a_sample_agrees_with_the_whole():
    whole, sample = make(SAMPLED), make(SAMPLED, max_flops=5e6)
    rows, lengths = sample.reference.rows, whole.operands.host_lengths
    assert whole.reference.rows is None
    assert 4 <= len(rows) < 12
    assert {0, 11, lengths.index(1), lengths.index(200)} <= set(rows)
    assert torch.equal(sample.reference.value, whole.reference.value[rows])
    assert torch.equal(sample.reference.sigma, whole.reference.sigma[rows])


def test_a_sample_is_judged_exactly_and_the_rest_for_being_finite():
    sample = make(SAMPLED, max_flops=5e6)
    right = sample.output(decode)
    seen = max(sample.reference.rows, key=sample.operands.host_lengths.__getitem__)
    unseen = next(i for i in range(12) if i not in sample.reference.rows)
    report = sample.judge(right)
    assert report["ok"]
    assert (report["rows"], report["of_rows"]) == (len(sample.reference.rows) * 4, 48)

    def with_row(row: int, values: torch.Tensor | float) -> dict[str, Any]:
        out = right.clone()
        out[row, 3] = values
        return sample.judge(out)

    wrong = with_row(seen, right[seen, 2])
    assert not wrong["ok"] and f"[{seen}, 3," in wrong["reason"]
    assert not with_row(unseen, math.nan)["ok"]
    assert with_row(unseen, 0.0)["ok"]  # what a sample cannot see


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
    drawn = [
        Drawn("batch=1 ctx=1 heads=16 page=64", "none", 0),
        Drawn("batch=1 ctx=1 heads=1 page=1", "loud token", 1),
    ]
    for seed in range(len(drawn), count):
        twist = TWISTS[seed % len(TWISTS)]
        if twist == "equal lengths":
            spans = ["1", "16", "64", "100", "255"]
        else:
            spans = ["1..3", "1..40", "3..300", "250..600"]
        sizes = {
            "batch": choose([1, 1, 2, 3, 5]),
            "ctx": choose(spans),
            "heads": choose([1, 16, 20, 128]),
            "page": choose([1, 7, 16, 64]),
            "kv": choose(["bf16", "bf16", "bf16", "fp8"]),
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
        operands.q *= 8
    elif drawn.twist == "loud token":
        slots = operands.token_slots(0)
        row = operands.kv.view(-1, WIDTH)[slots[len(slots) // 2]]
        largest = torch.finfo(operands.kv.dtype).max
        row.copy_((row.float() * 100).clamp(-largest, largest))
    return Problem(sizes, operands, OP.reference(operands))


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


def implementation(name: str) -> Implementation:
    return next(i for i in kernels.implementations("mla_decode") if i.name == name)


@pytest.mark.parametrize("drawn", draw(CASES), ids=lambda d: f"{d.text}, {d.twist}")
def test_what_is_right_passes(drawn):
    problem = twisted(drawn)
    outputs = {name: run(name, problem) for name in ("torch.naive", "torch.sdpa")}
    outputs |= {name: problem.output(of) for name, of in [*BF16.items()][drawn.seed % 5 :: 5]}
    reports = {name: problem.judge(out) for name, out in outputs.items()}
    assert not {name: report["reason"] for name, report in reports.items() if not report["ok"]}


@pytest.mark.parametrize("name", ["vllm.amx", "vllm.vec"])
def test_what_vllm_gives_passes(name, vllms_process):
    if not (support := implementation(name).available(detect("cpu"))).ok:
        pytest.skip(support.reason)
    fitting = [d for d in draw(CASES) if implementation(name).fits(OP.sizes(parse(d.text)[0])).ok]
    assert len(fitting) > 10
    wrong = {}
    for drawn in fitting:
        bits = vllms_process.submit(run_drawn, name, drawn).result(timeout=900)
        report = twisted(drawn).judge(torch.from_numpy(bits).view(torch.bfloat16))
        if not report["ok"]:
            wrong[drawn] = report["reason"]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("text", ["batch=3 ctx=1..200 page=16", "batch=2 ctx=100 heads=20 page=7 kv=fp8"])
def test_what_torch_compiles_passes(text):
    if not (support := implementation("torch.compile").available(detect("cpu"))).ok:
        pytest.skip(support.reason)
    problem = make(text)
    report = problem.judge(run("torch.compile", problem))
    assert report["ok"], report["reason"]


# Calls that round q and the softmax weights to FP8 themselves


@pytest.mark.parametrize("context", [pytest.param("32768", marks=pytest.mark.slow), "9000"])
def test_weights_that_vanish_together_pass(context):
    """Those of nearly all tokens are below half of the smallest subnormal number there."""
    problem = make(f"batch=1 ctx={context} heads=4 kv=fp8")
    for summed in (False, True):
        out = problem.output(partial(fp8_call, how=EXACT, summed=summed))
        report = problem.judge(out, fp8=True)
        assert report["ok"] and report["row_error"] < 0.9 * report["row_limit"], report["reason"]


@pytest.mark.parametrize("least", [0.0, 2.0**-126])
def test_what_underflow_leaves_beside_a_value_of_zero_passes(least):
    """Exponentials end at 0 or at fp32's smallest normal number. In half of the columns the only token that
    is heard has 0."""
    problem = make("batch=1 ctx=30 heads=2 page=4 kv=bf16")
    o = problem.operands
    flat, slots = o.kv.view(-1, WIDTH), o.token_slots(0)
    flat[slots, WIDTH - 1] = 0.0
    flat[slots[7], WIDTH - 1] = o.q[..., WIDTH - 1] = 90.0
    flat[slots[7], : LATENT // 2] = 0.0
    v = flat[slots].double()
    weights = (o.q[0].double() @ v.T * o.scale).softmax(-1)
    assert weights.sort(-1).values[:, -2].max() < 2.0**-149
    out = (weights.clamp(min=least) @ v[:, :LATENT]).bfloat16()
    assert out[:, : LATENT // 2].any() == (least > 0)
    problem.reference = OP.reference(o)
    assert problem.reference.sigma.min() > 0
    assert problem.judge(out[None])["ok"]


def test_calls_in_fp8_are_wrong_by_the_measure_of_bf16():
    small = "batch=3 ctx=1..201 heads=16 page=16"
    problem = make(f"{small} kv=fp8")
    assert not problem.judge(problem.output(fp8_call))["ok"]
    assert make(small).reference.sigma_fp8 is None


def test_the_format_follows_the_architecture_and_bf16_cases_keep_their_keys():
    assert (OP.defaults("gfx942"), OP.defaults("gfx950")) == ({"fp8": "e4m3fnuz"}, {"fp8": "e4m3fn"})
    recorded = "mla_decode batch=64 ctx=3201..3999 heads=16 page=64 kv=bf16 core"
    for arch in ("gfx942", "sm_90", "x86-avx512"):
        given = {**OP.defaults(arch), **parse("batch=64 ctx=3201..3999")[0]}
        assert OP.case(given).key == recorded
        assert OP.case({**given, "kv": "fp8"}).key.endswith(f"kv=fp8 fp8={OP.defaults(arch)['fp8']} core")
    for fp8, dtype in (("e4m3fn", torch.float8_e4m3fn), ("e4m3fnuz", torch.float8_e4m3fnuz)):
        assert make(f"batch=1 ctx=9 kv=fp8 fp8={fp8}").operands.kv.dtype == dtype


# The reference and the operands


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_the_reference_is_what_plain_loops_give(kv):
    problem = make(f"batch=3 ctx=1..9 heads=2 page=4 kv={kv}")
    o = problem.operands
    q, cache = o.q.double().tolist(), (o.kv.double() * o.kv_scale).tolist()
    table, lengths = o.page_table.tolist(), o.lengths.tolist()
    for b, h in itertools.product(range(3), range(2)):
        tokens = [cache[table[b][t // 4]][t % 4] for t in range(lengths[b])]
        dots = [math.fsum(x * y for x, y in zip(q[b][h], token, strict=True)) for token in tokens]
        weights = [math.exp((dot - max(dots)) / math.sqrt(128 + 64)) for dot in dots]
        total = math.fsum(weights)
        for d in range(LATENT):
            terms = [weight * token[d] / total for weight, token in zip(weights, tokens, strict=True)]
            error = abs(math.fsum(terms) - float(problem.reference.value[b, h, d]))
            assert error <= 1e-12 * math.fsum(map(abs, terms))


def test_unused_slots_are_poisoned_and_tokens_are_finite():
    operands = make("batch=3 ctx=5..40 page=16").operands
    finite = torch.isfinite(operands.kv.view(-1, WIDTH).float())
    used = torch.zeros(len(finite), dtype=torch.bool)
    for i in range(3):
        used[operands.token_slots(i)] = True
    assert finite[used].all()
    assert not finite[~used].any()
    assert int(used.sum()) == sum(operands.host_lengths)  # no slot is two tokens'


def test_lengths_have_a_seed_of_their_own():
    sizes = OP.sizes(parse("batch=7 ctx=1..200 page=16")[0])
    first = OP.operands(sizes, Seeds(3, 3), "cpu")
    other = OP.operands(sizes, Seeds(4, 4, lengths=3), "cpu")
    assert first.host_lengths == other.host_lengths != OP.operands(sizes, Seeds(4, 4), "cpu").host_lengths
    assert not torch.equal(first.page_table, other.page_table)


def test_adversarial_operands_shift_scores_and_have_page_numbers_beyond_16_bits():
    sizes = OP.sizes(parse("batch=2 ctx=100 heads=8 page=1")[0])
    o = OP.operands(sizes, Seeds(1, 1, adversarial=True), "cpu")
    used = o.page_table[:, :-1]
    assert used.max() > 32767 and OP.operands(sizes, Seeds(1, 1), "cpu").page_table.max() < 256
    middle = scored(o, 0)[0].median(-1).values
    assert middle[::4].min() > 80 and middle[3::4].max() < -80 and middle[[1, 2, 5, 6]].abs().max() < 40


def test_ordinary_operands_are_those_of_recorded_runs():
    """Where torch draws the same numbers as on the machine that this was written on."""
    same_digits("mla_decode", "batch=3 ctx=1..200 heads=16 page=16", "e3337a03de9f3c90")
    same_digits("mla_decode", "batch=2 ctx=100 heads=20 page=7 kv=fp8", "156d796e109b5919")


@pytest.mark.parametrize("text", ["batch=3 ctx=1..200 page=16", "batch=2 ctx=50 heads=20 page=7 kv=fp8"])
def test_each_seed_makes_operands_of_its_own(text):
    sizes = OP.sizes(parse(text)[0])
    seeds = (Seeds(3, 5), Seeds(3, 6), Seeds(4, 5))
    assert len({OP.operands(sizes, each, "cpu").digest() for each in seeds}) == 3


def test_the_digest_sees_one_changed_value_in_any_tensor():
    operands = make("batch=2 ctx=5..20 page=16").operands
    before = operands.digest()
    for name, tensor in operands.tensors().items():
        changed = operands.copy([name])
        changed.tensors()[name].flatten()[-1] = 0 if name != "kv" else 1
        assert changed.digest() != before, name
        assert tensor.dtype == changed.tensors()[name].dtype


def test_digest_tells_the_order_of_rows():
    operands = make("batch=2 ctx=100 page=16").operands
    changed = operands.copy(["kv"])
    rows = changed.kv.view(-1, WIDTH)
    rows[[0, 1]] = rows[[1, 0]].clone()
    assert changed.digest() != operands.digest()


@pytest.mark.parametrize("tokens", [1, 40, 400])
def test_errors_of_q_add_up_in_either_order(tokens):
    """Over tokens first, or over q's columns, by which is less work."""
    torch.manual_seed(tokens)
    deviation, kv = torch.rand(WIDTH), torch.randn(tokens, WIDTH)
    moved = torch.randn(tokens, LATENT) / tokens
    wanted = (deviation.double()[:, None] * (kv.double().T @ moved.double()) ** 2).sum(0)
    torch.testing.assert_close(through_scores(deviation, kv, moved).double(), wanted, rtol=1e-4, atol=0)
