"""Operands that must stay what they are."""

from __future__ import annotations

import hashlib

import pytest
import torch

import kernels
from kernels.operands import Seeds
from shapes.case import parse

DRAWN = "a0a6e0408b3096d3"
"""Of 1000 numbers that torch draws from seed 0, in fp32 and in bf16."""


def _sha(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def same_digits(op: str, text: str, digest: str) -> None:
    """Operands of the seeds (3, 5) have these bits, if torch draws here what it drew there: its numbers
    differ by instruction set in the last place."""
    drawn = [
        torch.empty(1000, dtype=dtype).normal_(generator=torch.Generator().manual_seed(0))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    if _sha(*drawn) != DRAWN:
        pytest.skip("torch draws other numbers on this CPU")
    of = kernels.OPS[op]
    operands = of.operands(of.sizes(parse(text)[0]), Seeds(3, 5), "cpu")
    assert _sha(*operands.tensors().values()) == digest
