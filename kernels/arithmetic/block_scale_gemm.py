"""Block-scale GEMM as kernels compute it, right and wrong, for a tile of the output. Tensors are fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.arithmetic.roundings import Round, exact, fp8
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands as Operands
from kernels.formats import BLOCK, Fp8Format, block_scale, fp8_format

Quantised = tuple[torch.Tensor, torch.Tensor]
"""FP8 values of a before scaling [M, K], and their scales [M, blocks of K]."""
Quantiser = Callable[[Operands], Quantised]


@dataclass(frozen=True)
class Way:
    """How a kernel multiplies."""

    step: int = BLOCK
    """So many products are summed before `inner` rounds their sum."""
    inner: Round = exact
    parts: int = 1
    """K is split into so many parts of whole blocks. `partial` rounds the sum of each part."""
    partial: Round = exact
    summed: Round = exact
    """Rounds the sum after each part is added."""
    wide: tuple[Round, Round] | None = None
    """Where given, operands are dequantised first, and these round a and b."""


@dataclass(frozen=True)
class OutputTile:
    """Some rows of the output over some columns. An index past a tensor's end starts again at 0."""

    operands: Operands
    all_a: torch.Tensor
    """a before scaling, [M, K]."""
    all_a_scale: torch.Tensor
    """Its scales, [M, blocks of K]."""
    rows: torch.Tensor
    columns: torch.Tensor

    @property
    def k(self) -> torch.Tensor:
        """The numbers of the blocks of K."""
        return torch.arange(self.all_a_scale.shape[1], device=self.rows.device)

    @property
    def middle(self) -> int:
        """The block of K that is wrong where only one is."""
        return len(self.k) // 2

    @property
    def n(self) -> torch.Tensor:
        """The block of N of each column."""
        return self.columns // BLOCK

    def of_a(self, rows: torch.Tensor) -> torch.Tensor:
        return self.all_a[rows % len(self.all_a)]

    def of_b(self, columns: torch.Tensor) -> torch.Tensor:
        """b before scaling, [columns, K]."""
        q = self.operands.b_q
        return q.view(torch.uint8)[columns % len(q)].view(q.dtype).float()

    def a_scales(self, rows: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.all_a_scale[(rows % len(self.all_a))[:, None], (k % len(self.k))[None]]

    def b_scales(self, n: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Scales of these blocks of N, [columns, blocks of K]."""
        table = self.operands.b_scale
        return table[(n % len(table))[:, None], (k % len(self.k))[None]]

    # What belongs to this tile. Each is a new copy.

    @property
    def a(self) -> torch.Tensor:
        return self.of_a(self.rows)

    @property
    def b(self) -> torch.Tensor:
        return self.of_b(self.columns)

    @property
    def a_scale(self) -> torch.Tensor:
        return self.a_scales(self.rows, self.k)

    @property
    def b_scale(self) -> torch.Tensor:
        return self.b_scales(self.n, self.k)

    def multiply(self, way: Way = Way(), **changed: torch.Tensor) -> torch.Tensor:
        return summed(self.terms(way, **changed), way)

    def terms(self, way: Way = Way(), **changed: torch.Tensor) -> list[torch.Tensor]:
        """The products of each block of K [rows, columns]. changed: replaces a, b, a_scale or b_scale."""
        a, b, a_scale, b_scale = (
            changed.get(name, getattr(self, name)) for name in ("a", "b", "a_scale", "b_scale")
        )
        products = []
        for k, (x, w) in enumerate(zip(a.split(BLOCK, 1), b.split(BLOCK, 1), strict=True)):
            of_a, of_b = a_scale[:, k, None], b_scale[None, :, k]
            if way.wide:
                products.append(way.wide[0](x * of_a) @ way.wide[1](w * of_b.T).T)
                continue
            dot = x.new_zeros(len(x), len(w))
            for some, others in zip(x.split(way.step, 1), w.split(way.step, 1), strict=True):
                dot = way.inner(dot + some @ others.T)
            products.append(dot * (of_a * of_b))
        return products


def summed(terms: list[torch.Tensor], way: Way = Way()) -> torch.Tensor:
    each = math.ceil(len(terms) / way.parts)
    result = torch.zeros_like(terms[0])
    for first in range(0, len(terms), each):
        total = torch.zeros_like(result)
        for term in terms[first : first + each]:
            total = total + term
        result = way.summed(result + way.partial(total))
    return result


# Reading and quantising a


def format_of(o: Operands) -> Fp8Format:
    return fp8_format(str(o.b_q.dtype).removeprefix("torch.float8_"))


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1)


def quantised(
    o: Operands,
    *,
    block: int = BLOCK,
    amax: Round = largest,
    top: float = 0.0,
    rounding: Round | None = None,
    stored: Round = exact,
) -> Quantised:
    """Quantises a as the suite does, unless it is told otherwise.

    amax:     (a [M, blocks, block], padded with zeros) -> the magnitude that becomes `top`, [M, blocks]
    top:      the largest FP8 value; 0 stands for that of the format
    rounding: rounds to FP8
    stored:   changes the scale that the product gets
    """
    fmt = format_of(o)
    top = top or fmt.max
    x = torch.nn.functional.pad(o.a.float(), (0, -o.a.shape[1] % block)).unflatten(1, (-1, block))
    scale = block_scale(amax(x), replace(fmt, max=top), o.scales)
    q = (rounding or partial(fp8, fmt.dtype))((x / scale[..., None]).clamp(-top, top))
    return q.flatten(1)[:, : o.a.shape[1]], stored(scale)[:, : o.b_scale.shape[1]]


def read(o: Operands, quantiser: Quantiser | None) -> Quantised:
    """a as a call reads it: given as FP8, quantised by the call, or kept in bf16 with scales of 1."""
    if o.a is None:
        return o.a_q.float(), o.a_scale
    if quantiser:
        return quantiser(o)
    return o.a.float(), o.b_scale.new_ones(o.m, o.b_scale.shape[1])
