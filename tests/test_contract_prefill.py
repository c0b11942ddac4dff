"""MHA prefill's adapters against the doubles of their libraries."""

from __future__ import annotations

import pytest
from contract_prefill import CASES, FRESH, OP, ROWS, keep

from kernels.mha_prefill import aiter, aiter_persistent, cudnn, flash_attn, flashinfer
from kernels.op import Unsupported


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_the_adapter_keeps_the_contract(row, text):
    keep(row, text)


@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.dtype == "fp8"], ids=lambda r: r.text)
def test_another_fp8_format_is_refused_in_one_line(row):
    other = {"e4m3fn": "e4m3fnuz", "e4m3fnuz": "e4m3fn"}[OP.defaults(row.arch)["fp8"]]
    with pytest.raises(Unsupported, match=rf"{row.arch} multiplies FP8 in \w+, not in {other}"):
        keep(row, FRESH, fp8=other)


@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.dtype == "fp8"], ids=lambda r: r.text)
def test_another_fp8_format_would_be_noticed(row, monkeypatch):
    for module in (aiter, aiter_persistent, cudnn, flash_attn, flashinfer):
        monkeypatch.setattr(module, "require_native", lambda operands: None)
    other = {"e4m3fn": "e4m3fnuz", "e4m3fnuz": "e4m3fn"}[OP.defaults(row.arch)["fp8"]]
    with pytest.raises(Exception):  # noqa: B017, what the library or the judge says
        keep(row, FRESH, fp8=other)
