"""Adapters of MLA decode against doubles of their libraries.

Every adapter runs on the op's own operands and is judged by the op's own check, and again after other live
operands were loaded.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType

import pytest

import kernels
from kernels.mla_decode.providers import sglang_triton, vllm_triton
from kernels.platform import named
from shapes.case import parse
from tests.doubles import lent
from tests.support.contract_mla import CONTRACTS, OP, Contract, reports

CASES = [(contract, text) for contract in CONTRACTS for text in contract.texts]


@pytest.fixture(autouse=True)
def a_device_of_few_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (vllm_triton, sglang_triton):
        monkeypatch.setattr(module, "compute_units", lambda device: 4)


@pytest.mark.parametrize(
    ("contract", "text"), CASES, ids=lambda p: p if isinstance(p, str) else f"{p.name} {p.double} {p.arch}"
)
def test_right_on_the_double(contract: Contract, text: str) -> None:
    with lent(contract.kind, contract.arch, contract.double) as here:
        for report in reports(contract, text, here):
            assert report["ok"], report["reason"]


@pytest.mark.parametrize(
    ("name", "kind", "arch", "sizes", "reason"),
    [
        ("aiter.asm", "rocm", "gfx942", "kv=fp8 fp8=e4m3fn", "gfx942 takes e4m3fnuz, not e4m3fn"),
        ("aiter.asm", "rocm", "gfx950", "kv=fp8 fp8=e4m3fnuz", "gfx950 takes e4m3fn, not e4m3fnuz"),
        ("aiter.asm", "rocm", "gfx950", "heads=64 kv=fp8", "takes 8, 16, 128 heads with kv=fp8"),
        ("aiter.asm_persistent", "rocm", "gfx950", "heads=8", "takes multiples of 16 heads, 128 at the most"),
        ("aiter.triton", "rocm", "gfx942", "page=8", "needs pages of a multiple of 16 tokens, not 8"),
        ("flashmla", "cuda", "sm_90", "page=16", "needs a page that is a multiple of 64"),
        ("flashmla", "cuda", "sm_100", "", "needs sm_90; this is sm_100"),
        ("flashinfer.fa2", "cuda", "sm_100", "kv=fp8", "takes an FP8 cache on sm_90, not on sm_100"),
        ("flashinfer.cutlass", "cuda", "sm_100", "heads=16", "takes 128 heads, not 16"),
        ("flash_attn.fa3", "cuda", "sm_90", "kv=fp8", "takes a bf16 cache, not fp8"),
        ("vllm.triton", "cpu", "x86-avx512", "", "needs cuda or rocm; this is cpu x86-avx512"),
    ],
)
def test_what_a_library_does_not_take_is_refused_in_words(name, kind, arch, sizes, reason) -> None:
    (implementation,) = [i for i in kernels.implementations("mla_decode") if i.name == name]
    case = OP.case(parse(f"batch=2 ctx=100 {sizes}")[0])
    assert implementation.supports(case, named(kind, arch)).reason == reason


def test_sglangs_build_of_flash_mla_is_taken_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of 2025 under another name (sgl-kernel/python/sgl_kernel/flash_mla.py of SGLang)."""
    contract = next(c for c in CONTRACTS if c.double == "flash_mla_2025")
    with lent(contract.kind, contract.arch, contract.double):
        form_of_2025 = importlib.import_module("flash_mla")
    package = ModuleType("sgl_kernel")
    package.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", form_of_2025)
    with lent(contract.kind, contract.arch) as here:
        for report in reports(contract, contract.texts[0], here):
            assert report["ok"], report["reason"]
