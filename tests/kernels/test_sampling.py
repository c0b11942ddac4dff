"""Rows of a sampled reference."""

import itertools
import math

import pytest
import torch

import kernels
from kernels.fused_moe import reference as moe_reference
from kernels.op import MOST_ELEMENTS, affordable, spread
from kernels.operands import Seeds
from shapes.case import parse

CASES = {
    "block_scale_gemm": "m=40 n=256 k=256",
    "fused_moe": "tokens=40 experts=16 topk=4 hidden=256 inter=128",
    "mha_prefill": "batch=3 new=30..50 prefix=0..20 heads=2",
    "mla_decode": "batch=37 ctx=1..60 heads=4 page=16",
}


@pytest.mark.parametrize("count", [1, 2, 3, 37, 1000])
@pytest.mark.parametrize("offset", [0.0, 0.3, 0.999])
def test_any_beginning_is_spread_evenly(count, offset):
    order = spread(count, offset)
    assert sorted(order) == list(range(count))
    for taken in range(1, count, 7):
        ends = sorted(order[:taken])
        gaps = [b - a for a, b in itertools.pairwise([*ends, ends[0] + count])]
        assert max(gaps) <= 3 * count / taken


def test_what_is_affordable_is_asked_for_in_order_and_one_row_always_is():
    assert affordable([5, 3, 5, 9, 1], float, 17.0) == [3, 5, 9]
    assert affordable([5, 3], float, 0.0) == [5]
    assert affordable([5, 3], float, 8.0) is None


def test_rows_of_a_reference_end_with_the_memory_for_it():
    half = MOST_ELEMENTS // 2
    assert affordable(range(9), float, math.inf, half) == [0, 1]
    assert affordable(range(9), float, math.inf, 3 * half) == [0]


def test_each_expert_is_converted_once():
    sizes, ids = kernels.OPS["fused_moe"].sizes(parse(CASES["fused_moe"])[0]), torch.tensor([[3, 9, -1]] * 40)
    of_pair = 6.0 * sizes.hidden * sizes.inter
    rows = moe_reference._sampled_rows(ids, sizes, of_pair * (2 * moe_reference.EXPERT_PAIRS + 2 * 10), 0.0)
    assert rows is not None and len(rows) == 10


@pytest.mark.parametrize(("op", "text"), CASES.items())
def test_a_large_reference_is_sampled_however_few_its_operations(monkeypatch, op, text):
    monkeypatch.setattr("kernels.op.MOST_ELEMENTS", 1)
    of = kernels.OPS[op]
    assert len(of.reference(of.operands(of.sizes(parse(text)[0]), Seeds(), "cpu")).rows) == 1


@pytest.mark.parametrize(("op", "text"), CASES.items())
def test_samples_of_any_size_agree_with_the_whole_and_follow_the_offset(op, text):
    of = kernels.OPS[op]
    operands = of.operands(of.sizes(parse(text)[0]), Seeds(), "cpu")
    whole = of.reference(operands)
    assert whole.rows is None
    chosen: dict[float, set[tuple[int, ...]]] = {}
    for share, offset in itertools.product((0.0, 0.3, 1.5, 8.0), (0.0, 0.5)):
        sample = of.reference(operands, share * of.work(operands.sizes, "core").flops, offset)
        if sample.rows is None:
            continue
        assert len(sample.rows) < 8 or {0, len(whole.value) - 1} <= set(sample.rows)
        chosen.setdefault(share, set()).add(tuple(sample.rows))
        off = (sample.value - whole.value[sample.rows]).abs()
        assert bool((off <= 0.05 * whole.sigma[sample.rows]).all())
        torch.testing.assert_close(sample.sigma, whole.sigma[sample.rows], rtol=1e-3, atol=0)
    assert {len(rows) for rows in chosen[0.0]} == {1}
    assert max(len(samples) for samples in chosen.values()) == 2
