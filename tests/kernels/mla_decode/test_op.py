"""MLA decode: cases, operands, the reference, and what the check tells apart."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels
from harness.workers.child.judge import compare_output
from kernels.attention import edges
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands
from kernels.mla_decode.problem import variance_from_q
from kernels.op import Reference
from kernels.operands import Seeds
from shapes.case import parse

OP = kernels.OPS["mla_decode"]


def made(text: str, **seeds: Any) -> MlaDecodeOperands:
    return OP.operands(OP.sizes(parse(text)[0]), Seeds(**seeds), "cpu")


def report(o: MlaDecodeOperands, reference: Reference, out: torch.Tensor, fp8: bool = False) -> dict:
    shape = tuple(OP.empty_output(o.sizes, "meta").shape)
    return compare_output(out.bfloat16(), reference, OP.tolerance(o.sizes), shape, fp8)


def cached(o: MlaDecodeOperands, slots: torch.Tensor) -> torch.Tensor:
    return o.kv.view(-1, WIDTH)[slots].double() * o.kv_scale


def scores(o: MlaDecodeOperands, sequence: int, kv: torch.Tensor) -> torch.Tensor:
    return o.q[sequence].double() @ kv.T * o.scale


def attend(o: MlaDecodeOperands, sequence: int, slots: torch.Tensor) -> torch.Tensor:
    kv = cached(o, slots)
    return scores(o, sequence, kv).softmax(-1) @ kv[:, :LATENT]


def with_weights_in_fp8(o: MlaDecodeOperands, summed: bool) -> torch.Tensor:
    """All of a sequence's tokens in one block. summed: the rounded weights are what is divided by."""
    outputs = []
    for sequence in range(len(o.host_lengths)):
        kv = cached(o, o.token_slots(sequence))
        s = scores(o, sequence, kv)
        weights = (s - s.amax(-1, keepdim=True)).exp()
        rounded = weights.float().to(o.kv.dtype).double()
        total = (rounded if summed else weights).sum(-1, keepdim=True)
        outputs.append(rounded @ kv[:, :LATENT] / total)
    return torch.stack(outputs)


# Cases and operands


def test_the_format_follows_the_architecture_and_bf16_cases_keep_their_keys():
    assert (OP.defaults("gfx942"), OP.defaults("gfx950")) == ({"fp8": "e4m3fnuz"}, {"fp8": "e4m3fn"})
    recorded = "mla_decode batch=64 ctx=3201..3999 heads=16 page=64 kv=bf16 core"
    for arch in ("gfx942", "sm_90", "x86-avx512"):
        given = {**OP.defaults(arch), **parse("batch=64 ctx=3201..3999")[0]}
        assert OP.case(given).key == recorded
        assert OP.case({**given, "kv": "fp8"}).key.endswith(f"kv=fp8 fp8={OP.defaults(arch)['fp8']} core")
    for fp8, dtype in (("e4m3fn", torch.float8_e4m3fn), ("e4m3fnuz", torch.float8_e4m3fnuz)):
        assert made(f"batch=1 ctx=9 kv=fp8 fp8={fp8}").kv.dtype == dtype


def test_unused_slots_are_poisoned_and_tokens_are_finite():
    o = made("batch=3 ctx=5..40 page=16")
    finite = torch.isfinite(o.kv.view(-1, WIDTH).float())
    used = torch.zeros(len(finite), dtype=torch.bool)
    for sequence in range(3):
        used[o.token_slots(sequence)] = True
    assert finite[used].all() and not finite[~used].any()
    assert int(used.sum()) == sum(o.host_lengths), "a slot is two tokens'"


def test_adversarial_operands_shift_scores_and_have_page_numbers_beyond_16_bits():
    text = "batch=2 ctx=100 heads=8 page=1"
    o = made(text, stationary=1, live=1, adversarial=True)
    assert o.page_table[:, :-1].max() > 32767 and made(text, stationary=1).page_table.max() < 256
    ordinary, adversarial = (
        made("batch=1 ctx=9 heads=8 kv=fp8", adversarial=adversarial).q[..., :LATENT].float().abs().amax()
        for adversarial in (False, True)
    )
    assert ordinary > 2 * adversarial, "no head is peaked"
    assert edges(64, 16) == [15, 16, 31, 32, 47, 48]
    middle = scores(o, 0, cached(o, o.token_slots(0)))[0].median(-1).values
    assert middle[::4].min() > 80 and middle[3::4].max() < -80 and middle[[1, 2, 5, 6]].abs().max() < 40


# The reference


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_the_reference_is_what_plain_loops_give(kv):
    o = made(f"batch=3 ctx=1..9 heads=2 page=4 kv={kv}")
    value = OP.reference(o).value
    q, cache = o.q[:, 0].double().tolist(), (o.kv.double() * o.kv_scale).tolist()
    table, lengths = o.page_table.tolist(), o.lengths.tolist()
    for b, h in itertools.product(range(3), range(2)):
        tokens = [cache[table[b][t // 4]][t % 4] for t in range(lengths[b])]
        dots = [math.fsum(x * y for x, y in zip(q[b][h], token, strict=True)) for token in tokens]
        weights = [math.exp((dot - max(dots)) / math.sqrt(128 + 64)) for dot in dots]
        for d in range(0, LATENT, 5):
            terms = [w * token[d] / math.fsum(weights) for w, token in zip(weights, tokens, strict=True)]
            error = abs(math.fsum(terms) - float(value[b, 0, h, d]))
            assert error <= 1e-12 * math.fsum(map(abs, terms))


@pytest.mark.parametrize(
    "case", ["ctx=2..9 page=4 q=2", "ctx=60..70 heads=8 q=3 kv=fp8", "ctx=8..40 page=1 q=8"]
)
def test_the_reference_of_query_tokens_is_that_of_calls_with_one(case):
    """Token t of a sequence of n is the only one of a sequence of n - q + 1 + t tokens."""
    o = made(f"batch=3 {case}")
    whole, sizes = OP.reference(o), replace(o.sizes, q=1)
    for t in range(o.sizes.q):
        lengths = [length - o.sizes.q + 1 + t for length in o.host_lengths]
        q = o.q[:, t : t + 1].contiguous()
        one = OP.reference(o.replaced(q=q, lengths=torch.tensor(lengths), host_lengths=lengths, sizes=sizes))
        torch.testing.assert_close(whole.value[:, t], one.value[:, 0], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(whole.sigma[:, t], one.sigma[:, 0])
        if o.is_fp8:
            torch.testing.assert_close(whole.sigma_fp8[:, t], one.sigma_fp8[:, 0])
            assert torch.equal(whole.even[:, t], one.even[:, 0])


@pytest.mark.parametrize(("q", "ctx", "names"), [
    ("9", "100", "q=9 of mla_decode must be at most 8"),
    ("0", "100", "q=0 of mla_decode must be at least 1"),
    ("4", "3..100", "ctx=3..100 of mla_decode counts the q=4 query tokens of a sequence: it must be"),
])  # fmt: skip
def test_query_tokens_are_part_of_their_sequence(q, ctx, names):
    with pytest.raises(ValueError, match=names):
        OP.sizes({"batch": 2, "ctx": ctx, "q": q})
    assert "q" not in OP.case({"batch": 2, "ctx": 9, "q": 1}).sizes
    assert (
        OP.work(OP.sizes({"batch": 2, "ctx": "9", "q": 3, "heads": 1})).flops == 2.0 * 2 * (7 + 8 + 9) * 1088
    )


@pytest.mark.parametrize("tokens", [1, 40, 400])
def test_errors_of_q_add_up_in_either_order(tokens):
    """Over tokens first, or over q's columns, by which is less work."""
    torch.manual_seed(tokens)
    deviation, kv = torch.rand(WIDTH), torch.randn(tokens, WIDTH)
    moved = torch.randn(tokens, LATENT) / tokens
    wanted = (deviation.double()[:, None] * (kv.double().T @ moved.double()) ** 2).sum(0)
    found = variance_from_q(deviation, kv, moved)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=0)


def test_a_sample_is_judged_exactly_and_the_rest_for_being_finite():
    o = made("batch=12 ctx=2..200 heads=4 page=16 q=2")
    whole, sample = OP.reference(o), OP.reference(o, 1e7)
    rows, lengths = sample.rows, o.host_lengths
    assert whole.rows is None and 4 <= len(rows) < 12
    assert {0, 11, lengths.index(2), lengths.index(200)} <= set(rows)
    assert torch.equal(sample.value, whole.value[rows]) and torch.equal(sample.sigma, whole.sigma[rows])

    right = whole.value.bfloat16()
    seen = max(rows, key=lengths.__getitem__)
    unseen = next(i for i in range(12) if i not in rows)

    def with_row(row: int, values: torch.Tensor | float) -> dict[str, Any]:
        out = right.clone()
        out[row, 1, 3] = values
        return report(o, sample, out)

    found = report(o, sample, right)
    assert found["ok"] and (found["rows"], found["of_rows"]) == (len(rows) * 2 * 4, 96)
    assert f"[{seen}, 1, 3," in with_row(seen, right[seen, 1, 2])["reason"]
    assert not with_row(unseen, math.nan)["ok"]
    assert with_row(unseen, 0.0)["ok"], "a sample cannot see that"


# What the check tells apart


@pytest.mark.parametrize("case", ["page=64 heads=1", "page=64 kv=fp8", "page=1"])
def test_any_page_that_is_lost_is_missed(case):
    o = made(f"batch=1 ctx=3999 {case}")
    reference, slots = OP.reference(o), o.token_slots(0)
    pages = slots.split(o.page)
    for page in random.Random(0).sample(range(len(pages)), 8):
        left = torch.cat([*pages[:page], *pages[page + 1 :]])
        assert not report(o, reference, attend(o, 0, left)[None])["ok"], page


def test_weights_that_vanish_together_pass():
    """Those of nearly all tokens are below half of the smallest subnormal number of FP8."""
    o = made("batch=1 ctx=9000 heads=4 kv=fp8")
    reference = OP.reference(o)
    for summed in (False, True):
        found = report(o, reference, with_weights_in_fp8(o, summed), fp8=True)
        # It is 0.3 of the limit, and 0.7 where the reference does not know that they vanish together.
        assert found["ok"] and found["row_error"] < 0.5 * found["row_limit"], found["reason"]


def test_calls_in_fp8_are_wrong_by_the_measure_of_bf16():
    o = made("batch=3 ctx=100..300 heads=16 page=16 kv=fp8")
    reference, out = OP.reference(o), with_weights_in_fp8(o, summed=False)
    assert report(o, reference, out, fp8=True)["ok"] and not report(o, reference, out)["ok"]
    assert OP.reference(made("batch=1 ctx=9")).sigma_fp8 is None


@pytest.mark.parametrize("least", [0.0, 2.0**-126])
def test_what_underflow_leaves_beside_a_value_of_zero_passes(least):
    """Exponentials end at 0 or at fp32's smallest normal. In half of the columns
    the value of the key that has all the weight is 0."""
    o = made("batch=1 ctx=30 heads=2 page=4")
    rows, slots = o.kv.view(-1, WIDTH), o.token_slots(0)
    rows[slots, WIDTH - 1] = 0.0
    rows[slots[7], WIDTH - 1] = o.q[..., WIDTH - 1] = 90.0
    rows[slots[7], : LATENT // 2] = 0.0
    kv = cached(o, slots)
    weights = scores(o, 0, kv).softmax(-1)
    assert weights.sort(-1).values[..., -2].max() < 2.0**-149
    out = (weights.clamp(min=least) @ kv[:, :LATENT]).bfloat16()
    assert out[..., : LATENT // 2].any() == (least > 0)
    reference = OP.reference(o)
    assert reference.sigma.min() > 0 and report(o, reference, out[None])["ok"]
