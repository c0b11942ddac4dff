"""The judge: limits in units of sigma, over rows or segments of them, and what it says."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.plan.memory import MAX_FLOPS
from harness.workers.child.judge import CHEAP, Judge, compare_output
from harness.workers.child.outputs import Blob
from kernels.op import Reference, Tolerance
from shapes.case import Case, parse


def simple(rows: int = 3, columns: int = 512) -> Reference:
    value = torch.ones(rows, columns, dtype=torch.float64)
    return Reference(value, value * 2.0**-9)


def off(index: Any, by: float) -> torch.Tensor:
    out = torch.ones(3, 512, dtype=torch.float64)
    out[index] += by * 2.0**-9
    return out


LIMITS = Tolerance(row=2.0, element=10.0)


@pytest.mark.parametrize(("out", "ok"), [
    (off(0, 0.0), True), (off(1, 1.9), True), (off(1, 2.1), False), (off((2, 7), 9.0), True),
    (off(0, 0.0)[:2], False), (off((2, 7), 11.0), False),  # a row error of 0.5
    (off((2, 7), math.nan), False), (off((2, 7), math.inf), False), (off(0, 0.0).flatten(), False),
])  # fmt: skip
def test_limits_of_row_and_element(out, ok):
    report = compare_output(out, simple(), LIMITS)
    assert report["ok"] is ok
    assert bool(report["reason"]) is not ok


def test_an_exact_value_must_be_met_exactly():
    reference = Reference(torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64))
    assert compare_output(torch.zeros(1, 4), reference, LIMITS)["ok"]
    assert not compare_output(torch.tensor([[0, 0, 1e-30, 0]]), reference, LIMITS)["ok"]


def test_an_error_in_one_block_is_not_diluted_by_the_rest_of_the_row():
    out = off((1, slice(128, 256)), 3.0)  # 1.5 over the row
    assert compare_output(out, simple(), LIMITS)["ok"]
    report = compare_output(out, simple(), replace(LIMITS, segment=128))
    assert not report["ok"]
    assert report["row_error"] == pytest.approx(3.0)
    assert (report["rows"], report["of_rows"]) == (3, 3)
    assert report["reason"].startswith("1 of 3 rows are off, in row 1, columns 128..255: ")
    narrow = off((2, slice(500, 512)), 3.0)
    assert compare_output(narrow, simple(), replace(LIMITS, segment=128))["ok"]
    assert not compare_output(narrow, simple(), replace(LIMITS, segment=250))["ok"]  # 12 columns over


def test_who_rounds_to_fp8_itself_is_held_to_the_wider_sigma():
    coarse = replace(simple(), sigma_fp8=simple().sigma * 8)
    for by, narrow, wide in ((1.5, True, True), (10.0, False, True), (17.0, False, False)):
        out = off(0, by)
        limits = replace(LIMITS, element=30.0)
        assert compare_output(out, coarse, limits)["ok"] is narrow
        for truncates in (False, True):  # a little wider
            assert compare_output(out, coarse, limits, fp8=True, truncates=truncates)["ok"] is wide
    assert not compare_output(off(0, 10.0), simple(), LIMITS, fp8=True)["ok"]  # the op has one sigma
    for by, ok in ((3.9, True), (4.1, False)):  # four times the variance
        assert compare_output(off(0, by), simple(), LIMITS, truncates=True)["ok"] is ok


@pytest.mark.parametrize(("by", "rows", "fp8", "ok"), [
    (1.1, 8, True, True), (1.3, 8, True, False), (1.3, 7, True, True), (1.3, 8, False, True),
])  # fmt: skip
def test_calls_in_fp8_err_no_more_in_all_than_a_format_of_so_many_bits(by, rows, fp8, ok):
    reference = replace(simple(rows), sigma_fp8=simple().sigma[0])
    signs = torch.tensor([1.0, -1.0]).repeat(256)
    report = compare_output(
        reference.value + by * 2.0**-9 * signs, reference, replace(LIMITS, noise=1.2), fp8=fp8
    )
    noise = pytest.approx(by) if fp8 and rows == 8 else None
    assert (report["ok"], report["noise"], report["noise_limit"]) == (ok, noise, 1.2 if fp8 else None)


@pytest.mark.parametrize(("factor", "rows", "how", "ok"), [
    (1.01, 8, {}, False), (0.99, 8, {}, False), (1.005, 8, {}, True),
    (1.01, 7, {}, True),  # too few rows to tell
    (torch.tensor([[1.0], [1.014]] * 4), 8, {}, True),  # rows that scatter so far
    (0.99, 8, {"truncates": True}, True), (0.98, 8, {"truncates": True}, False),
    (1.01, 8, {"fp8": True}, True),
])  # fmt: skip
def test_a_factor_on_all_of_an_output_shows_where_rounding_hides_it(factor, rows, how, ok):
    reference = replace(simple(rows), sigma=simple(rows).sigma * 4, sigma_fp8=simple(rows).sigma * 8)
    report = compare_output(factor * reference.value, reference, LIMITS, **how)
    assert report["row_error"] < report["row_limit"]
    assert report["ok"] is ok, report["reason"]


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_of_few_errors_in_fp8_count_where_nothing_is_rounded_to_it(fp8):
    reference = replace(simple(8), sigma=simple(8).sigma * 4, sigma_fp8=simple(8).sigma * 8)
    reference.even = torch.zeros_like(reference.value[..., 0], dtype=torch.bool)
    report = compare_output(1.01 * reference.value, reference, LIMITS, fp8=fp8)
    assert (report["bias"] is None, report["ok"]) == (fp8, fp8)


@pytest.fixture
def asked() -> Judge:
    judge = Judge()
    judge.hello("cpu", "cpu", 1)
    return judge


@pytest.mark.parametrize(("cheap", "whole"), [(2.0, True), (0.5, False)])
def test_a_small_reference_is_whole_whatever_its_share(asked, cheap, whole, monkeypatch):
    flops = 2.0 * 500 * 128 * 128
    monkeypatch.setitem(MAX_FLOPS, "cpu", cheap * 2 * flops / CHEAP)  # its reference takes two products
    asked.reference("live", Case("block_scale_gemm", parse("m=500 n=128 k=128")[0]), {}, share=0.05)
    assert (asked.references["live"].reference.rows is None) is whole


@pytest.mark.parametrize(("free", "sampled"), [(1 << 40, False), (1 << 18, True)])
def test_references_of_a_gpus_case_fit_into_its_hosts_memory(asked, monkeypatch, free, sampled):
    """Nothing is left on the device when one was computed, and what torch keeps of it is given back."""
    emptied = []
    monkeypatch.setattr("harness.workers.child.judge.available_memory", lambda: free)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    asked.kind = "cuda"
    asked.reference("first core", Case("block_scale_gemm", parse("m=500 n=128 k=128")[0]), {})
    assert (asked.references["first core"].reference.rows is not None) is sampled
    assert emptied == [1]


@pytest.mark.parametrize("free", [0, 1 << 40])
@pytest.mark.parametrize("wrong", [False, True])
def test_outputs_are_compared_on_a_gpu_with_room_and_diagnosed_on_the_host(asked, monkeypatch, free, wrong):
    on_device = []

    def judge_(output, reference, *how):
        if len(how) == 4:  # without what is known for a diagnosis
            on_device.append(1)
        return compare_output(output, reference, *how)

    monkeypatch.setattr("harness.workers.child.judge.compare_output", judge_)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    asked.kind = "cuda"
    asked.reference("first core", Case("block_scale_gemm", parse("m=8 n=256 k=128")[0]), {})
    output = asked.references["first core"].reference.value.bfloat16()
    if wrong:
        output[3, 128:] = 0.0
    report = asked.judge("first core", Blob.of(output.view(torch.int16)), (8, 256), "bfloat16")
    assert (report["ok"], "row 3" in report["reason"]) == (not wrong, wrong)
    assert on_device == [1] * bool(free)


def test_the_first_wrong_output_is_kept(asked, tmp_path):
    asked.reference("first core", Case("block_scale_gemm", parse("m=8 n=256 k=128")[0]), {})
    right = asked.references["first core"].reference.value.bfloat16()
    for factor in (1.0, 2.0, 3.0, 1.0):
        output = Blob.of((factor * right).view(torch.int16))
        asked.judge("first core", output, (8, 256), "bfloat16")
    saved = asked.save(str(tmp_path))
    assert not saved["report"]["ok"] and torch.equal(torch.load(tmp_path / "output.pt"), 2.0 * right)


@pytest.mark.parametrize(("shape", "ok"), [((2, 1, 3, 512), True), ((2, 3, 512), True), ((3, 2, 512), False)])
def test_an_output_may_leave_out_axes_of_length_1(asked, shape, ok):
    """As a kernel of before there were several query tokens does."""
    asked.reference("first core", Case("mla_decode", {"batch": 2, "ctx": "9", "heads": 3}), {})
    right = asked.references["first core"].reference.value.bfloat16()
    report = asked.judge("first core", Blob.of(right.view(torch.int16)), shape, "bfloat16")
    assert report["ok"] is ok and report["reason"].startswith("" if ok else "output has shape")
