"""What several libraries ask for: one call on all sequences with cumulative lengths (FlashAttention's
`flash_attn_varlen_func`, and AITER's after it), new tokens apart from cached ones, as an engine holds them,
and v as wide as q and k.
"""

from __future__ import annotations

from typing import Any

from kernels.binding import Function
from kernels.lazy import torch
from kernels.mha_prefill.operands import BYTES, VALUE, WIDTH, MhaPrefillOperands, MhaPrefillSizes, guarded
from kernels.op import Call, Prepared

VARLEN = "q k v softmax_scale cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k causal"
"""What a call of `varlen` needs by name."""


def varlen(
    o: MhaPrefillOperands, out: torch.Tensor | None, function: Function, *, pads: bool = False, **further: Any
) -> Prepared:
    """One call by keyword, causal: all of these libraries align the mask to the last key. Without an `out`
    the library allocates its output.

    further: arguments beside the usual ones
    pads:    v is as wide as q and k, and the output's columns from the 128th on are dropped
    """
    v = padded(o.v) if pads else o.v
    output = {} if out is None else {"out": out}
    attend = function.bind(
        q=o.q, k=o.k, v=v, softmax_scale=o.scale, **lengths(o), causal=True, **output, **further
    )
    return Prepared(o, out, attend, inputs=reading(o, v), result=of_values if out is None else None)


def reading(o: MhaPrefillOperands, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """The live operands of a call that reads v in a layout of its own."""
    return {**o.live_tensors(), "v": v[..., :VALUE]}


def of_values(returned: Any) -> torch.Tensor:
    """The output that a library returned, some versions with the sums of exponentials."""
    output: torch.Tensor = returned[0] if isinstance(returned, tuple | list) else returned
    return output[..., :VALUE]


def lengths(o: MhaPrefillOperands) -> dict[str, Any]:
    """int32 [batch + 1] on the device, and the longest of each for the grid."""
    most_new, longest = o.longest
    return {
        "cu_seqlens_q": o.cu_q,
        "cu_seqlens_k": o.cu_k,
        "max_seqlen_q": most_new,
        "max_seqlen_k": longest,
    }


def padded(v: torch.Tensor) -> torch.Tensor:
    """v as wide as q and k, filled up with zeros, for kernels that take one head size only."""
    wide = guarded((*v.shape[:2], WIDTH), v.device, v.dtype).zero_()
    wide[..., :VALUE] = v
    return wide


class NewTokens:
    """`k` and `v` of the new tokens, [T, heads, width]: the canonical tensors where no token is cached, else
    copies, as an engine holds them apart from its cache."""

    def __init__(self, operands: MhaPrefillOperands) -> None:
        o = self.operands = operands
        self.k, self.v = o.k, o.v
        self.rows: torch.Tensor | None = None
        if any(s.prefix for s in o.sequences):
            new = [torch.arange(s.keys.start + s.prefix, s.keys.stop) for s in o.sequences]
            self.rows = torch.cat(new).to(o.k.device)
            self.k, self.v = o.k[self.rows], o.v[self.rows]

    def copy(self) -> None:
        if self.rows is not None:
            self.k.copy_(self.operands.k[self.rows])
            self.v.copy_(self.operands.v[self.rows])

    def prepared(self, out: torch.Tensor, call: Call) -> Prepared:
        return Prepared(self.operands, out, call, after_load=self.copy)

    @staticmethod
    def bytes(sizes: MhaPrefillSizes) -> int:
        if sizes.keys == sizes.queries:
            return 0
        return sizes.queries * sizes.heads * (WIDTH + VALUE) * BYTES["bf16"]
