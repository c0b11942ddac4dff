"""Block-scale GEMM as kernels compute it, for a tile of the output in fp32, and kernels that are wrong in one
way each.

Unless its name says otherwise, a kernel is wrong in one row of the second block of 128 columns. Wrong sums
and most wrong scales of b are made in calls that quantise their activations to FP8. The tolerance of these
calls is the widest, so there the error is the hardest to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands as Operands
from kernels.formats import BLOCK, SMALLEST_SCALE, block_scale, fp8_format, known_scales
from kernels.mistakes import (
    E4M3,
    E5M2,
    OTHER_FP8,
    Answers,
    Compute,
    Mistake,
    Round,
    bf16,
    exact,
    fp8,
    fp8_truncated,
    fp16,
    listed,
    put,
    truncated_to,
)

Quantised = tuple[torch.Tensor, torch.Tensor]
"""FP8 values of a before scaling [M, K], and their scales [M, blocks of K]."""
Quantiser = Callable[[Operands], Quantised]
Terms = list[torch.Tensor]  # the products of each block of K, fp32 [rows, columns]


@dataclass(frozen=True)
class Tile:
    """Some rows of the output over some columns, and what is read for it: values before scaling [rows, K] and
    [columns, K], and their scales [rows or columns, blocks of K]."""

    operands: Operands
    rows: torch.Tensor
    columns: torch.Tensor
    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor


Variant = Callable[[Tile], torch.Tensor]
"""Returns a tile of the output as a wrong kernel computes it, fp32 [rows, columns]."""


def b_of(o: Operands, columns: torch.Tensor) -> torch.Tensor:
    """b before scaling. An index past the end starts again at 0."""
    return o.b_q.view(torch.uint8)[columns % len(o.b_q)].view(o.b_q.dtype).float()


def tile(o: Operands, quantiser: Quantiser | None, rows: torch.Tensor, columns: torch.Tensor) -> Tile:
    """a is given as FP8, quantised by the call, or kept in bf16 with scales of 1."""
    if o.a is None:
        a, scale = o.a_q.view(torch.uint8)[rows].view(o.a_q.dtype).float(), o.a_scale[rows]
    elif quantiser:
        a, scale = (whole[rows] for whole in quantiser(o))
    else:
        a, scale = o.a[rows].float(), o.b_scale.new_ones(len(rows), o.b_scale.shape[1])
    return Tile(o, rows, columns, a, scale, b_of(o, columns), o.b_scale[columns // BLOCK])


def multiply(
    t: Tile,
    terms: Callable[[Terms], Terms] = list,
    *,
    step: int = BLOCK,
    inner: Round = exact,
    parts: int = 1,
    part: Round = exact,
    total: Round = exact,
    wide: tuple[Round, Round] | None = None,
) -> torch.Tensor:
    """Multiplies; right by default.

    terms: changes the products of the blocks of K before they are summed
    step:  so many products are summed before `inner` rounds their sum
    parts: K is split into so many parts of whole blocks; `part` rounds the sum of each, and `total` the sum
           after each is added
    wide:  where given, operands are dequantised first, and these round a and b
    """
    products = []
    for k, (x, w) in enumerate(zip(t.a.split(BLOCK, 1), t.b.split(BLOCK, 1), strict=True)):
        of_a, of_b = t.a_scale[:, k, None], t.b_scale[None, :, k]
        if wide:
            products.append(wide[0](x * of_a) @ wide[1](w * of_b.T).T)
            continue
        dot = x.new_zeros(len(x), len(w))
        for some, others in zip(x.split(step, 1), w.split(step, 1), strict=True):
            dot = inner(dot + some @ others.T)
        products.append(dot * (of_a * of_b))
    products = terms(products)
    each = math.ceil(len(products) / parts)
    result = torch.zeros_like(products[0])
    for first in range(0, len(products), each):
        result = total(result + part(sum(products[first : first + each], torch.zeros_like(result))))
    return result


def by(terms: Callable[[Terms], Terms] = list, **way: Any) -> Variant:
    return lambda t: multiply(t, terms, **way)


def reads(**changed: Callable[[Tile], Any]) -> Variant:
    """changed: by name, what is read in place of a, b, a_scale or b_scale."""
    return lambda t: multiply(replace(t, **{name: other(t) for name, other in changed.items()}))


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1)


def quantised(
    o: Operands,
    *,
    block: int = BLOCK,
    amax: Round = largest,
    top: float = 0.0,
    rounding: Callable[[torch.dtype, torch.Tensor], torch.Tensor] = fp8,
    stored: Round = exact,
) -> Quantised:
    """Quantises a as the suite does, unless it is told otherwise.

    amax:     (a [M, blocks, block], padded with zeros) -> the magnitude that becomes `top`, [M, blocks]
    top:      the largest FP8 value; 0 stands for that of the format
    rounding: rounds to the FP8 of a dtype
    stored:   changes the scale that the product gets
    """
    fmt = fp8_format(o.sizes.fp8)
    top = top or fmt.max
    x = torch.nn.functional.pad(o.a.float(), (0, -o.a.shape[1] % block)).unflatten(1, (-1, block))
    scale = block_scale(amax(x), replace(fmt, max=top), known_scales(o.sizes.scales))
    q = rounding(fmt.dtype, (x / scale[..., None]).clamp(-top, top))
    return q.flatten(1)[:, : o.a.shape[1]], stored(scale)[:, : o.b_scale.shape[1]]


def everywhere(variant: Variant, quantiser: Quantiser | None = None) -> Compute:
    def compute(o: Operands, right: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.arange(size, device=right.device) for size in right.shape)
        return variant(tile(o, quantiser, rows, columns)).to(right.dtype)

    return compute


def chosen_row(o: Operands) -> int:
    """A row whose values make mistakes in any block of K visible (see operands.py)."""
    return 4 if o.sizes.m > 4 else 0


def in_one_place(variant: Variant, quantiser: Quantiser | None = None, row: int | None = None) -> Compute:
    def compute(o: Operands, right: torch.Tensor) -> torch.Tensor:
        at, n = chosen_row(o) if row is None else row, right.shape[1]
        rows = torch.tensor([at], device=right.device)
        columns = torch.arange(min(BLOCK, n - 1) // BLOCK * BLOCK, min(n, 2 * BLOCK), device=right.device)
        right[at, columns] = variant(tile(o, quantiser, rows, columns))[0].to(right.dtype)
        return right

    return compute


def transposed(t: Tile) -> torch.Tensor:
    """b's table of scales is read as if its other dimension were contiguous."""
    table = t.operands.b_scale
    k = torch.arange(table.shape[1], device=table.device)
    return table.flatten()[(t.columns[:, None] // BLOCK + k * len(table)) % table.numel()]


NEXT_SCALE = "b's scales of the next block of K"
IN_FP8: Mapping[str, Variant] = {
    NEXT_SCALE: reads(b_scale=lambda t: t.b_scale.roll(-1, 1)),
    "b's scales of the next block of N": reads(
        b_scale=lambda t: t.operands.b_scale.roll(-1, 0)[t.columns // BLOCK]
    ),
    "b's scales one column late": reads(
        b_scale=lambda t: t.operands.b_scale[(t.columns - 1).clamp(min=0) // BLOCK]
    ),
    "b's scales transposed": reads(b_scale=transposed),
    "b's scales left out": reads(b_scale=lambda t: torch.ones_like(t.b_scale)),
    "b's scale of the first block of K in all": reads(
        b_scale=lambda t: t.b_scale[:, :1].expand_as(t.b_scale)
    ),
    "one scale for all of b": reads(b_scale=lambda t: t.operands.b_scale.mean().expand_as(t.b_scale)),
    "b's scales rounded down to powers of two": reads(b_scale=lambda t: t.b_scale.log2().floor().exp2()),
    "b's scale of the block before in the last block of K": reads(
        b_scale=lambda t: put(t.b_scale, (..., -1), t.b_scale[:, -2])
    ),
    "b's scale of the second block in the first block of K": reads(
        b_scale=lambda t: put(t.b_scale, (..., 0), t.b_scale[:, 1])
    ),
    "first block of K left out": by(lambda t: t[1:]),
    "last block of K left out": by(lambda t: t[:-1]),
    "last block of half of K left out": by(lambda t: t[: len(t) // 2 - 1] + t[len(t) // 2 :]),
    "three quarters of K left out": by(lambda t: t[: max(1, len(t) // 4)]),
    "first block of K counted twice": by(lambda t: [*t, t[0]]),
    "half of the first block of K counted twice": by(lambda t: [*t, t[0] * 0.5]),
    "a block of K replaced by the one before": by(
        lambda t: t[: len(t) // 2] + t[len(t) // 2 - 1 :][:1] + t[len(t) // 2 + 1 :]
    ),
    "a partial sum one column late": by(lambda t: [*t[:-1], t[-1].roll(1, 1)]),
}
"""What is wrong in calls that quantise their activations to FP8."""

IN_OTHER_CALLS: Mapping[str, Variant] = {
    NEXT_SCALE: IN_FP8[NEXT_SCALE],
    "b's scales in FP8": reads(b_scale=lambda t: fp8(E4M3, t.b_scale * 128) / 128),
    "a block of K left out": by(lambda t: t[: len(t) // 2] + t[len(t) // 2 + 1 :]),
}
"""What is wrong both in calls that are given FP8 codes and in calls that keep activations in bf16 (W8A16)."""


def padded_and_read_unpadded(t: Tile) -> torch.Tensor:
    """a's scales have columns that are padded to a multiple of four rows, as TMA needs it, and are read as if
    they were not padded."""
    m, blocks = t.operands.a_scale.shape
    padded = torch.nn.functional.pad(t.operands.a_scale.t(), (0, -m % 4)).flatten()
    return padded[torch.arange(blocks, device=padded.device) * m + t.rows[:, None]]


def in_the_other_format(t: Tile) -> torch.Tensor:
    """The values of codes whose bits are read as the other of e4m3fn and e4m3fnuz."""
    dtype = t.operands.b_q.dtype
    return t.b.to(dtype).view(OTHER_FP8[dtype]).float()


def without_the_largest_code(t: Tile) -> torch.Tensor:
    """Reads the largest code as the next smaller one."""
    most = torch.finfo(t.operands.b_q.dtype).max * 13 / 14
    return t.b.clamp(-most, most)


def shuffled(t: Tile) -> torch.Tensor:
    """b lies in tiles of 16 columns by 32 of K, for AMD's matrix instruction. It is read row by row."""
    n, k = (size // 32 * 32 for size in t.b.shape)
    tiles = t.b[:n, :k].reshape(n // 16, 16, k // 32, 2, 16).permute(0, 2, 3, 1, 4)
    return put(t.b, (slice(n), slice(k)), tiles.reshape(n, k))


def bf16_after_16_products(t: Tile) -> torch.Tensor:
    total = t.a.new_zeros(())
    for first in range(0, t.a.shape[1], 16):
        some, k = slice(first, first + 16), first // BLOCK
        dot = bf16(t.a[:, some] @ t.b[:, some].T)
        total = bf16(total + dot * (t.a_scale[:, k, None] * t.b_scale[None, :, k]))
    return total


UNSCALED = reads(a_scale=lambda t: torch.ones_like(t.a_scale))
IN_CORE: Mapping[str, Variant] = {
    "a's scales left out": UNSCALED,
    "all scales left out": lambda t: t.a @ t.b.T,
    "a's scale of the first block of K in all": reads(
        a_scale=lambda t: t.a_scale[:, :1].expand_as(t.a_scale)
    ),
    "a's scales of the next block of K": reads(a_scale=lambda t: t.a_scale.roll(-1, 1)),
    "a's padded scales read unpadded": reads(a_scale=padded_and_read_unpadded),
    "a's scales in fp16": reads(a_scale=lambda t: fp16(t.a_scale)),
    "a of the next row": reads(a=lambda t: t.operands.a_q.float()[(t.rows + 1) % t.operands.sizes.m]),
    "a without the lowest bit": reads(a=lambda t: truncated_to(3, t.a)),
    "b read in the other FP8 format": reads(b=in_the_other_format),
    "b with the largest code read as the one below": reads(b=without_the_largest_code),
    "b without the lowest bit": reads(b=lambda t: truncated_to(3, t.b)),
    "b of the neighbouring column": reads(b=lambda t: b_of(t.operands, t.columns ^ 1)),
    "b without the last element of K": reads(b=lambda t: put(t.b, (..., -1), 0.0)),
    "b shuffled for MFMA, read row by row": reads(b=shuffled),
    "sums of codes in fp16": by(step=16, inner=fp16),
    "sums of codes of 8 bits": by(step=32, inner=partial(truncated_to, 8)),
    "the sum in bf16 after each 16 products": bf16_after_16_products,
    "partial sums in fp16": by(parts=4, part=fp16),
    "partial sums of 6 bits": by(parts=4, part=partial(truncated_to, 6)),
    "dequantised to fp16": by(wide=(fp16, fp16)),
    "dequantised weights in FP8": by(wide=(exact, partial(fp8, E4M3))),
    "dequantised weights of 6 bits": by(wide=(exact, partial(truncated_to, 6))),
}


def row(change: Round) -> Compute:
    """Changes one row of the right output."""
    return lambda o, out: put(out, chosen_row(o), change(out[chosen_row(o)]))


OUTPUTS: Mapping[str, Compute] = {
    "last row never written": lambda o, out: put(out, -1, math.nan),
    "last column zero": row(lambda x: put(x, -1, 0.0)),
    "tiles of 8 columns swapped": row(lambda x: put(x, slice(16), x[:16].roll(8))),
    "columns shifted by one": row(lambda x: x.roll(1)),
    "rows shifted by one": lambda o, out: out.roll(1, 0),
    "added to what the output held": row(lambda x: x * 2),
    "a row 1 percent too small": row(lambda x: x.float() * 0.99),
    "a row in fp16": row(torch.Tensor.half),
    "a row of 6 bits": row(lambda x: truncated_to(6, x.float())),
}


def quantiser(**options: Any) -> Compute:
    """Of all rows."""
    return everywhere(multiply, partial(quantised, **options))


def of_row(row: int, **options: Any) -> Compute:
    """row: the row of adversarial operands in which it shows (operands.py)."""
    return in_one_place(multiply, partial(quantised, **options), row)


QUANTISERS_IN_ALL_ROWS: Mapping[str, Compute] = {
    "stored scales 2 percent too large": quantiser(stored=lambda s: 1.02 * s),
    "stored scales 5 percent too small": quantiser(stored=lambda s: 0.95 * s),
    "codes truncated": quantiser(rounding=fp8_truncated),
    "codes rounded as e5m2": quantiser(rounding=lambda _, x: fp8(E5M2, x)),
    "up to 448 in e4m3fnuz": quantiser(top=448.0),
}
"""Errors that one row hides in its rounding to FP8, but not all rows together."""

QUANTISERS_IN_ONE_ROW: Mapping[str, Compute] = {
    "scales of half their size, saturated": of_row(4, amax=lambda x: largest(x) / 2),
    "scales of 2^16 times their size": of_row(4, amax=lambda x: largest(x) * 2**16),
    "scales never stored": of_row(4, stored=torch.ones_like),
    "blocks of 64": of_row(4, block=64),
    "last value of a block overlooked": of_row(2, amax=lambda x: largest(x[..., :-1])),
    "negative values overlooked": of_row(2, amax=lambda x: x.amax(-1)),
    "one scale for the tensor": of_row(4, amax=lambda x: x.abs().amax().expand(x.shape[:2])),
    "no magnitude below 1": of_row(4, amax=lambda x: largest(x).clamp(min=1.0)),
    "NaN for a block of zeros": of_row(7, stored=lambda s: torch.where(s > SMALLEST_SCALE, s, math.nan)),
}


def places(variants: Mapping[str, Variant], quantiser: Quantiser | None = None) -> dict[str, Compute]:
    return {name: in_one_place(variant, quantiser) for name, variant in variants.items()}


MISTAKES: tuple[Mistake, ...] = (
    *listed(places(IN_FP8, quantised), "with_quant", "fp8"),
    *listed(places(IN_OTHER_CALLS), form="of given codes: {}"),
    *listed(places(IN_OTHER_CALLS), "with_quant", form="W8A16: {}"),
    Mistake("W8A16: activations in FP8", in_one_place(multiply, quantised), "with_quant"),
    *listed({**places(IN_CORE), **OUTPUTS}),
    Mistake("a row truncated to 5 bits", row(lambda x: truncated_to(5, x.float())), truncates=True),
    *listed(QUANTISERS_IN_ALL_ROWS, "with_quant", "fp8", "quantiser: {}"),
    *listed(QUANTISERS_IN_ONE_ROW, "with_quant", "fp8", "quantiser, one row: {}"),
)


def answers(o: Operands, rows: list[int], columns: slice) -> Answers:
    at = torch.tensor(rows, device=o.b_q.device)
    across = torch.arange(columns.start, columns.stop, device=o.b_q.device)

    def output(variant: Variant) -> torch.Tensor:
        quantiser = quantised if o.a is not None and variant is UNSCALED else None
        return variant(tile(o, quantiser, at, across))

    variants = {**IN_FP8, **IN_CORE, **IN_OTHER_CALLS}
    return {name: partial(output, variant) for name, variant in variants.items()}
