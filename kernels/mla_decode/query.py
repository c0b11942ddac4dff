"""The forms in which libraries take the query token of each sequence, and give its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.mla_decode.problem import MlaDecodeOperands
from kernels.op import Prepared

if TYPE_CHECKING:
    import torch


def one_token(q: torch.Tensor) -> torch.Tensor:
    """[batch, 1, heads, 576]: one query token per sequence."""
    return q[:, None]


def query_buffer(operands: MlaDecodeOperands) -> torch.Tensor:
    """What a kernel reads whose q has the cache's dtype: q itself, or on an FP8 cache room for it in the
    cache's format."""
    import torch

    if operands.kv.element_size() > 1:
        return operands.q
    return torch.empty_like(operands.q, dtype=operands.kv.dtype)


class OneToken(Prepared):
    """Of a library that allocates its answer, [batch, 1, heads, 512]; `call` keeps that."""

    answer: torch.Tensor | None = None

    def result(self) -> torch.Tensor:
        assert self.answer is not None, "nothing was called"
        return self.answer[:, 0]
