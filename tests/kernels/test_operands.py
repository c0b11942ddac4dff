"""What the operands of all ops have in common."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import kernels
from kernels.operands import Seeds, draw_normal
from shapes.case import parse

SMALL = {
    "block_scale_gemm": ["m=33 n=520 k=640"],
    "fused_moe": ["tokens=16 experts=16 topk=4 hidden=256 inter=128"],
    "mha_prefill": ["batch=1 new=5 prefix=0 heads=2", "batch=1 new=5 prefix=0 heads=2 dtype=fp8"],
    "mla_decode": ["batch=2 ctx=20 page=16", "batch=2 ctx=20 page=16 kv=fp8"],
}


@pytest.mark.parametrize("op", SMALL)
def test_all_is_drawn_in_fp32(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of torch draw other bf16 numbers from the same seed."""
    drawn: set[torch.dtype] = set()
    for name in ("normal_", "uniform_"):
        original = getattr(torch.Tensor, name)

        def noted(tensor: torch.Tensor, original: Any, *args: Any, **given: Any) -> torch.Tensor:
            drawn.add(tensor.dtype)
            return original(tensor, *args, **given)

        monkeypatch.setattr(torch.Tensor, name, functools.partialmethod(noted, original))
    of = kernels.OPS[op]
    for text in SMALL[op]:
        for boundary in of.boundaries:
            of.make(of.sizes(parse(text)[0]), Seeds(1, adversarial=True), "cpu", boundary)
    assert drawn == {torch.float32}


def test_normal_values_are_those_of_fp32_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.operands.DRAWN_AT_ONCE", 64)
    target = torch.empty(5, 32, dtype=torch.bfloat16)
    draw_normal(target, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    parts = [torch.empty(rows, 32).normal_(generator=generator) for rows in (2, 2, 1)]
    assert torch.equal(target, torch.cat(parts).bfloat16())
