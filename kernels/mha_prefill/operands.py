"""Operands of an MHA prefill, and where each sequence lies in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kernels.lazy import torch
from kernels.mha_prefill.sizes import SCALE, MhaPrefillSizes
from kernels.operands import ABSENT, Operands

GUARD = 256  # tokens of NaN before and behind q, k and v: at least what a kernel's tile reads at once


class Sequence(NamedTuple):
    queries: slice  # its rows of q and out
    keys: slice  # its rows of k and v
    prefix: int  # how many of those are cached

    @property
    def new(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def length(self) -> int:
        return self.keys.stop - self.keys.start


@dataclass
class MhaPrefillOperands(Operands):
    """Nothing is streamed: q, k and v are activations, all just written by the q_b and kv_b products of the
    same layer (the cached tokens' too: only their latents are kept), with nothing large read in between. The
    last-level cache holds as much of them in serving as it holds here from the call before; the rest comes
    from memory in both.
    """

    q: torch.Tensor  # bf16 or FP8 [T, heads, 192], for the T new tokens of all sequences
    k: torch.Tensor  # bf16 or FP8 [S, heads, 192], for all S tokens, by sequence, cached tokens first
    v: torch.Tensor  # bf16 or FP8 [S, heads, 128]
    cu_q: torch.Tensor  # int32 [batch + 1]: sequence b has rows cu_q[b] .. cu_q[b + 1] of q
    cu_k: torch.Tensor  # the same of k and v
    sequences: list[Sequence]  # the same for the host
    sizes: MhaPrefillSizes
    scale: float = SCALE
    # fp32 [1], by which a stored value is to be multiplied; None for bf16. Stationary: calibrated once, as
    # engines hold the scales of an FP8 cache.
    q_descale: torch.Tensor = ABSENT
    k_descale: torch.Tensor = ABSENT
    v_descale: torch.Tensor = ABSENT
    boundary: str = "core"

    live: ClassVar = ("q", "k", "v")
    streamed: ClassVar = ()

    @property
    def is_fp8(self) -> bool:
        return self.q.element_size() == 1

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys of a sequence."""
        return max(s.new for s in self.sequences), max(s.length for s in self.sequences)

    @property
    def without_effect(self) -> frozenset[str]:
        """The weight of a single key is 1, whatever its score."""
        return frozenset({"q", "k"}) if self.longest[1] == 1 else frozenset()

    @property
    def score_scale(self) -> float:
        """Turns the product of a stored q and a stored k into a score."""
        return self.scale * _number(self.q_descale) * _number(self.k_descale)

    @property
    def value_scale(self) -> float:
        """Turns a stored v into the value that is meant."""
        return _number(self.v_descale)

    def copy(self, names: Iterable[str] | None = None) -> MhaPrefillOperands:
        """The copy has guards of its own."""
        copied = super().copy(names)
        for name in self.live:
            if (tensor := getattr(copied, name)) is not getattr(self, name):
                tokens, heads, width = tensor.shape
                fresh = guarded(tokens, heads, width, tensor.device, tensor.dtype)
                setattr(copied, name, fresh.copy_(tensor))
        return copied

    def guarded_tensors(self) -> Iterable[torch.Tensor]:
        return [beyond(t) if n in self.live and is_guarded(t) else t for n, t in self.tensors().items()]


def is_guarded(tensor: torch.Tensor) -> bool:
    """Whether there are as many tokens before and behind it as `guarded` puts there."""
    stride, held = tensor.stride(0), tensor.untyped_storage().nbytes() // tensor.element_size()
    offset = tensor.storage_offset()
    return offset >= GUARD * stride and offset + (len(tensor) + GUARD) * stride <= held


def beyond(tensor: torch.Tensor) -> torch.Tensor:
    """The same tokens with the guards before and behind them, which a stray pointer reaches."""
    stride = tensor.stride(0)
    shape = (tensor.shape[0] + 2 * GUARD, *tensor.shape[1:])
    return tensor.as_strided(shape, tensor.stride(), tensor.storage_offset() - GUARD * stride)


def _number(descale: torch.Tensor | None) -> float:
    return 1.0 if descale is None else float(descale)


def guarded(
    tokens: int, heads: int, width: int, device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """An empty tensor [tokens, heads, width] of dtype, by default bf16, between tokens of NaN, which show a
    read past an end."""
    shape = (GUARD + tokens + GUARD, heads, width)
    storage = torch.empty(shape, dtype=dtype or torch.bfloat16, device=device)
    nan = torch.tensor(torch.nan, device=device)
    storage[:GUARD].copy_(nan)
    storage[GUARD + tokens :].copy_(nan)
    return storage[GUARD : GUARD + tokens]


def sequences_of(lengths: list[tuple[int, int]]) -> list[Sequence]:
    """The places of sequences of (prefix, new) tokens, one after the other."""
    queries = [0, *itertools.accumulate(new for _, new in lengths)]
    keys = [0, *itertools.accumulate(prefix + new for prefix, new in lengths)]
    return [
        Sequence(slice(*q), slice(*k), prefix)
        for q, k, (prefix, _) in zip(
            itertools.pairwise(queries), itertools.pairwise(keys), lengths, strict=True
        )
    ]
