"""Layouts of q, k and v that several libraries share.

`Extended` holds the cache and the new tokens apart, as an engine does. `VarlenLayout` is one call on all
sequences with cumulative lengths (FlashAttention's `flash_attn_varlen_func`, and AITER's after it);
`lengths`, `scale`, `mask` and `padded` give its arguments, each by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernels.binding import Function
from kernels.mha_prefill.operands import MhaPrefillOperands, guarded
from kernels.mha_prefill.sizes import BYTES, VALUE, WIDTH, MhaPrefillSizes
from kernels.op import Prepared

if TYPE_CHECKING:
    import torch


def apart_bytes(sizes: MhaPrefillSizes) -> int:
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

    operands: MhaPrefillOperands

    def __init__(self, operands: MhaPrefillOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        self.rows = new_rows(operands) if any(s.prefix for s in operands.sequences) else None
        self.k, self.v = (t if self.rows is None else t[self.rows] for t in (operands.k, operands.v))

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        super().load(live)
        if self.rows is not None:
            self.k.copy_(live["k"][self.rows])
            self.v.copy_(live["v"][self.rows])


def lengths(o: MhaPrefillOperands) -> dict[str, object]:
    """int32 [batch + 1] on the device, and the longest of each for the grid."""
    most_new, longest = o.longest
    return {
        "cu_seqlens_q": o.cu_q,
        "cu_seqlens_k": o.cu_k,
        "max_seqlen_q": most_new,
        "max_seqlen_k": longest,
    }


def scale(o: MhaPrefillOperands) -> float:
    """Of q . k as they are meant: a library that takes descales multiplies by those itself."""
    return o.scale


def mask() -> dict[str, object]:
    """Causal; all of these libraries align it to the last key."""
    return {"causal": True}


def padded(v: torch.Tensor) -> torch.Tensor:
    """v as wide as q and k, filled up with zeros, for kernels that take one head size only."""
    tokens, heads, _ = v.shape
    wide = guarded(tokens, heads, WIDTH, v.device, v.dtype).zero_()
    wide[..., :VALUE] = v
    return wide


VARLEN = "q k v softmax_scale cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k causal"
"""What a call of `VarlenLayout` needs by name."""


class VarlenLayout(Prepared):
    """One call of `function` by keyword; without an `out` its output is its own, and kept.

    further: arguments beside the usual ones
    pads:    v stands as wide as q and k, and the output's columns behind the 128th are dropped
    """

    def __init__(
        self,
        operands: MhaPrefillOperands,
        out: torch.Tensor | None,
        function: Function,
        further: Mapping[str, Any] | None = None,
        pads: bool = False,
    ) -> None:
        super().__init__(operands, out)
        self.v = padded(operands.v) if pads else operands.v
        given = {"q": operands.q, "k": operands.k, "v": self.v, "softmax_scale": scale(operands)}
        output = {} if out is None else {"out": out}
        self.attend = function.bind(**given, **lengths(operands), **mask(), **output, **(further or {}))

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {**super().inputs(), "v": self.v[..., :VALUE]}

    def call(self) -> None:
        returned = self.attend()
        # Some versions give the sums of exponentials too.
        self.returned = returned[0] if isinstance(returned, tuple | list) else returned

    def result(self) -> torch.Tensor:
        return self.returned[..., :VALUE] if self.out is None else self.out
