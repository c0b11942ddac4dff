"""MHA prefill's adapters against the doubles of their libraries."""

from __future__ import annotations

import pytest

from kernels import vendor
from tests.support.contract_prefill import CASES, FRESH, IMPLEMENTATIONS, INFER, OP, ROWS, Row, keep


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_the_adapter_keeps_the_contract(row, text):
    keep(row, text)


@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.dtype == "fp8"], ids=lambda r: r.text)
def test_another_fp8_format_is_refused_in_one_line(row):
    other = {"e4m3fn": "e4m3fnuz", "e4m3fnuz": "e4m3fn"}[OP.defaults(row.arch)["fp8"]]
    with pytest.raises(AssertionError, match=rf"^{row.arch} takes \w+, not {other}"):
        keep(row, FRESH, fp8=other)


@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.dtype == "fp8"], ids=lambda r: r.text)
def test_another_fp8_format_would_be_noticed(row, monkeypatch):
    monkeypatch.setattr(vendor.Vendor, "any_fp8", True)
    other = {"e4m3fn": "e4m3fnuz", "e4m3fnuz": "e4m3fn"}[OP.defaults(row.arch)["fp8"]]
    with pytest.raises(Exception) as noticed:  # what the library or the judge says
        keep(row, FRESH, fp8=other)
    assert f"not {other}" not in str(noticed.value)


def test_bf16_that_the_library_lacks_would_be_noticed(monkeypatch):
    row = Row("flashinfer.cute_dsl", "cuda", "sm_100", INFER)
    with pytest.raises(AssertionError, match="takes dtype=fp8, not bf16"):
        keep(row, FRESH)
    monkeypatch.setattr(type(IMPLEMENTATIONS[row.name]), "dtypes", ("bf16",))
    with pytest.raises(NotImplementedError, match="headdim 192"):
        keep(row, FRESH)
