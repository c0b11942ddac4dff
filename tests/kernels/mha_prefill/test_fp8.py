"""MHA prefill in FP8: its cases, operands, and a check that passes what is right and nothing else."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

import kernels
from harness.paths import ROOT
from kernels.formats import fp8_format
from kernels.mha_prefill.operands import GUARD, beyond
from kernels.mha_prefill.sizes import VALUE
from kernels.op import Work
from kernels.operands import Seeds
from shapes.case import parse
from tests.support.judging import judged

OP = kernels.OPS["mha_prefill"]
IMPLEMENTATIONS = {i.name: i for i in kernels.implementations("mha_prefill")}
RECORDED = sorted((ROOT / "results").glob("*/mha_prefill-*/cells.jsonl"))
FORMATS = ("e4m3fn", "e4m3fnuz")


def made(text: str, seeds: Seeds = Seeds()):  # noqa: B008
    sizes = OP.sizes({**parse(text)[0], "dtype": "fp8"})
    return sizes, OP.operands(sizes, seeds, "cpu")


# Cases and operands


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.parent.name)
def test_recorded_cases_keep_their_keys(path):
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    keys = {cell["case"] for cell in cells if cell.get("kind") == "cell"}
    assert keys
    for key in keys:
        text = key.removeprefix("mha_prefill ").removesuffix(" core")
        for arch in ("x86-avx512", "gfx942", "sm_90"):
            assert OP.case({**OP.defaults(arch), **parse(text)[0]}).key == key


def test_an_fp8_case_names_the_format_of_its_architecture():
    case = {
        arch: OP.case({**OP.defaults(arch), "batch": 1, "new": "1", "dtype": "fp8"})
        for arch in ("gfx942", "sm_90")
    }
    assert case["gfx942"].text.endswith("dtype=fp8 fp8=e4m3fnuz")
    assert case["sm_90"].text.endswith("dtype=fp8 fp8=e4m3fn")


def test_work_and_bytes():
    sizes, o = made("batch=3 new=1..40 prefix=0..30 heads=3")
    bf16 = OP.work(OP.sizes({"batch": 3, "new": "1..40", "prefix": "0..30", "heads": 3}))
    out = OP.output_bytes(sizes)
    assert OP.work(sizes) == Work(bf16.flops, float(o.q.nbytes + o.k.nbytes + o.v.nbytes + out), "fp8")
    assert OP.operand_bytes(sizes) == sum(beyond(t).nbytes for t in (o.q, o.k, o.v))


@pytest.mark.parametrize("fp8", FORMATS)
def test_operands_fill_the_format_and_stand_between_guards(fp8):
    _, o = made(f"batch=3 new=40 prefix=9 heads=4 fp8={fp8}")
    fmt = fp8_format(fp8)
    for name, tensor in o.copy().live_tensors().items():
        values = tensor.float()
        assert tensor.dtype == fmt.dtype and values.isfinite().all()
        assert fmt.max / 16 < values.abs().max() <= fmt.max
        assert (values.abs() == fmt.max).float().mean() < 1e-3, f"{name} is clipped"
        assert (values.abs() < fmt.smallest_normal).float().mean() < 0.05
        around = beyond(tensor).float()
        assert around[:GUARD].isnan().all() and around[-GUARD:].isnan().all()
    scales = [float(t) for t in (o.q_descale, o.k_descale, o.v_descale)]
    assert len(set(scales)) == 3 and not any(math.log2(scale).is_integer() for scale in scales)


def test_the_reference_is_what_plain_loops_give():
    _, o = made("batch=3 new=1..5 prefix=0..4 heads=2")
    reference = OP.reference(o)
    q, k, v = (
        (t.double() * d.double()).tolist()
        for t, d in ((o.q, o.q_descale), (o.k, o.k_descale), (o.v, o.v_descale))
    )
    for s, h in itertools.product(o.sequences, range(2)):
        for i in range(s.new):
            row, seen = q[s.queries.start + i][h], range(s.keys.start, s.keys.start + s.prefix + i + 1)
            dots = [math.fsum(a * b for a, b in zip(row, k[j][h], strict=True)) for j in seen]
            weights = [math.exp((dot - max(dots)) / math.sqrt(192)) for dot in dots]
            for d in range(0, VALUE, 7):
                want = math.fsum(w * v[j][h][d] for w, j in zip(weights, seen, strict=True)) / sum(weights)
                got = reference.value[s.queries.start + i, h, d].item()
                assert abs(got - want) <= 0.02 * reference.sigma[s.queries.start + i, h, d].item()


# Right


@pytest.mark.parametrize("name", ["torch.naive", "torch.sdpa"])
def test_what_torch_gives_passes_with_new_live_operands(name):
    for text in ("batch=4 new=1..40 prefix=0..30 heads=3", "batch=2 new=130 heads=16"):
        sizes, o = made(text)
        prepared = IMPLEMENTATIONS[name].prepare(o, OP.empty_output(sizes, "cpu").fill_(math.nan))
        for live in (0, 1):
            _, fresh = made(text, Seeds(0, live))
            prepared.load(fresh.live_tensors())
            prepared.call()
            report = judged(OP, IMPLEMENTATIONS[name], sizes, fresh, prepared.result())
            assert report["ok"], report["reason"]


def test_rows_of_one_key_are_v_itself():
    """No weight is rounded there: what one may err by is the output's rounding."""
    _, o = made("batch=3 new=1 heads=4")
    reference = OP.reference(o)
    value = o.v.float() * o.v_descale
    assert torch.allclose(reference.value, value, rtol=1e-6)
    assert (reference.sigma <= 2.0**-8 * value.abs() + 1e-9).all()


def test_bf16_cases_have_no_second_sigma():
    o = OP.operands(OP.sizes({"batch": 2, "new": "3"}), Seeds(), "cpu")
    assert OP.reference(o).sigma_fp8 is None and o.score_scale == o.scale and o.value_scale == 1.0
