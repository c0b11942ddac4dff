"""What kernels share that take the cache and the new tokens apart, as an engine holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kernels.mha_prefill.problem import BYTES, VALUE, WIDTH, MhaPrefillOperands, Sizes
from kernels.op import Prepared

if TYPE_CHECKING:
    import torch


def apart_bytes(sizes: Sizes) -> int:
    """Of the new tokens' keys and values where they stand apart from cached ones."""
    apart = sizes.keys > sizes.queries
    return apart * sizes.queries * sizes.heads * (WIDTH + VALUE) * BYTES["bf16"]


def new_rows(o: MhaPrefillOperands) -> torch.Tensor:
    """The rows of k and v that belong to new tokens, int64 [T]."""
    import torch

    rows = [torch.arange(s.keys.start + s.prefix, s.keys.stop) for s in o.sequences]
    return torch.cat(rows).to(o.k.device)


class Extended(Prepared):
    """The cache is the canonical tensors; the new tokens' `k` and `v` are those too where none is cached."""

    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        self.rows = new_rows(operands) if any(s.prefix for s in operands.sequences) else None
        self.k, self.v = (t if self.rows is None else t[self.rows] for t in (operands.k, operands.v))

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        super().load(live)
        if self.rows is not None:
            self.k.copy_(live["k"][self.rows])
            self.v.copy_(live["v"][self.rows])
