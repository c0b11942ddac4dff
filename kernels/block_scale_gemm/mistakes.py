"""Block-scale GEMM as kernels compute it, on a tile of the output in fp32; and kernels with one mistake each.

Unless its name says otherwise, a kernel is wrong in one row of the second block of 128 columns. Calls are of
three kinds: those of `core`, which are given FP8 activations, and in `with_quant` W8A8, which quantises bf16
activations, and W8A16, which does not. Most wrong sums and scales of b are made in W8A8, because there the
tolerance is the widest, and an error the hardest to see.
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
    E4M3FNUZ,
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

Change = Round  # any function of a tensor, not only one that rounds
Quantised = tuple[torch.Tensor, torch.Tensor]
"""FP8 values of a before scaling [M, K], and their scales [M, blocks of K]."""
Quantiser = Callable[[Operands], Quantised]
Terms = list[torch.Tensor]  # the products of each block of K, fp32 [rows, columns]
ChangeTerms = Callable[[Terms], Terms] | None  # None: no change


@dataclass(frozen=True)
class Tile:
    """Some rows of the output over some columns, and what a kernel reads for them, in fp32."""

    operands: Operands
    rows: torch.Tensor  # indexes into the output, as are columns
    columns: torch.Tensor
    a: torch.Tensor  # values before scaling [rows, K]
    a_scale: torch.Tensor  # [rows, blocks of K]
    b: torch.Tensor  # values before scaling [columns, K]
    b_scale: torch.Tensor  # [columns, blocks of K]


Variant = Callable[[Tile], torch.Tensor]
"""Returns a tile of the output as a wrong kernel computes it, fp32 [rows, columns]."""
Variants = Mapping[str, Variant]


def b_of(operands: Operands, columns: torch.Tensor) -> torch.Tensor:
    """Columns of b before scaling, fp32 [columns, K]. An index past the end starts again at 0."""
    return operands.b_q.view(torch.uint8)[columns % len(operands.b_q)].view(operands.b_q.dtype).float()


def tile_of(
    operands: Operands, quantiser: Quantiser | None, rows: torch.Tensor, columns: torch.Tensor
) -> Tile:
    """The tile of these rows and columns. In `core` a is FP8 already. In `with_quant` the quantiser makes it
    FP8; without one it stays bf16, with scales of 1."""
    if operands.a is None:
        a = operands.a_q.view(torch.uint8)[rows].view(operands.a_q.dtype).float()
        a_scale = operands.a_scale[rows]
    elif quantiser:
        all_values, all_scales = quantiser(operands)
        a, a_scale = all_values[rows], all_scales[rows]
    else:
        a, a_scale = operands.a[rows].float(), operands.b_scale.new_ones(len(rows), operands.b_scale.shape[1])
    return Tile(
        operands, rows, columns, a, a_scale, b_of(operands, columns), operands.b_scale[columns // BLOCK]
    )


def multiply(
    tile: Tile, terms: ChangeTerms = None, *,
    step: int = BLOCK, round_step: Round = exact,
    parts: int = 1, round_part: Round = exact, round_total: Round = exact,
    round_operands: tuple[Round, Round] | None = None,
) -> torch.Tensor:  # fmt: skip
    """The tile's product, fp32 [rows, columns]; right by default.

    terms:          changes the products of the blocks of K before they are summed
    step:           after so many values of K `round_step` rounds the sum of a block
    parts:          K is split into so many parts of whole blocks; `round_part` rounds the sum of each part,
                    and `round_total` the sum after each part is added
    round_operands: where given, a and b are dequantised before they are multiplied, and the first function
                    rounds a, the second b; `step` then has no effect
    """
    products = []
    for block, (a, b) in enumerate(zip(tile.a.split(BLOCK, 1), tile.b.split(BLOCK, 1), strict=True)):
        a_scale, b_scale = tile.a_scale[:, block, None], tile.b_scale[:, block, None]
        if round_operands:
            round_a, round_b = round_operands
            products.append(round_a(a * a_scale) @ round_b(b * b_scale).T)
        else:
            dot = a.new_zeros(len(a), len(b))
            for a_step, b_step in zip(a.split(step, 1), b.split(step, 1), strict=True):
                dot = round_step(dot + a_step @ b_step.T)
            products.append(dot * (a_scale * b_scale.T))
    if terms:
        products = terms(products)
    blocks_of_part = math.ceil(len(products) / parts)
    total = torch.zeros_like(products[0])
    for first in range(0, len(products), blocks_of_part):
        part = sum(products[first : first + blocks_of_part], torch.zeros_like(total))
        total = round_total(total + round_part(part))
    return total


def gemm(terms: ChangeTerms = None, **options: Any) -> Variant:
    """The kernel that calls `multiply` with these options."""
    return lambda tile: multiply(tile, terms, **options)


def reading(**readers: Callable[[Tile], Any]) -> Variant:
    """The kernel that multiplies a changed tile. A reader returns what replaces the field of its name."""
    return lambda tile: multiply(replace(tile, **{name: read(tile) for name, read in readers.items()}))


def changed(name: str, change: Change) -> Variant:
    """The kernel that reads a tile's a, b, a_scale or b_scale changed in some way."""
    return reading(**{name: lambda tile: change(getattr(tile, name))})


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1)


def quantised(
    operands: Operands,
    *,
    block: int = BLOCK,
    amax: Change = largest,
    top: float = 0.0,
    rounding: Callable[[torch.dtype, torch.Tensor], torch.Tensor] = fp8,
    stored: Change = exact,
) -> Quantised:
    """Quantises a, with the default options as the suite does.

    block:    the values of K that share a scale; if not 128, the product still reads one scale for each 128
    amax:     (a [M, blocks, block], padded with zeros) -> the magnitude that becomes `top`, [M, blocks]
    top:      the largest FP8 value; 0 stands for that of the format
    rounding: rounds to the FP8 of a dtype
    stored:   changes the scale that the product gets
    """
    fmt = fp8_format(operands.sizes.fp8)
    top = top or fmt.max
    k, k_blocks = operands.sizes.k, operands.sizes.k_blocks
    x = torch.nn.functional.pad(operands.a.float(), (0, -k % block)).unflatten(1, (-1, block))
    scale = block_scale(amax(x), replace(fmt, max=top), known_scales(operands.sizes.scales))
    q = rounding(fmt.dtype, (x / scale[..., None]).clamp(-top, top))
    return q.flatten(1)[:, :k], stored(scale)[:, :k_blocks]  # blocks of 64 have more scales than are read


def everywhere(variant: Variant, quantiser: Quantiser | None = None) -> Compute:
    """The whole output is that of the variant."""

    def compute(operands: Operands, right: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(right.shape[0], device=right.device)
        columns = torch.arange(right.shape[1], device=right.device)
        return variant(tile_of(operands, quantiser, rows, columns)).to(right.dtype)

    return compute


def chosen_row(operands: Operands) -> int:
    """A row whose values make mistakes in any block of K visible (see operands.py)."""
    return 4 if operands.sizes.m > 4 else 0


def in_one_place(variant: Variant, quantiser: Quantiser | None = None, row: int | None = None) -> Compute:
    """The output is that of the variant in one row of the second block of 128 columns, or of the first block
    where there is no second. row: None for `chosen_row`"""

    def compute(operands: Operands, right: torch.Tensor) -> torch.Tensor:
        wrong_row = chosen_row(operands) if row is None else row
        n = right.shape[1]
        first_column = BLOCK if n > BLOCK else 0
        rows = torch.tensor([wrong_row], device=right.device)
        columns = torch.arange(first_column, min(n, 2 * BLOCK), device=right.device)
        right[wrong_row, columns] = variant(tile_of(operands, quantiser, rows, columns))[0].to(right.dtype)
        return right

    return compute


def transposed(tile: Tile) -> torch.Tensor:
    """The scales of b that a kernel reads if it takes the other dimension of their table for contiguous."""
    table = tile.operands.b_scale
    k = torch.arange(table.shape[1], device=table.device)
    return table.flatten()[(tile.columns[:, None] // BLOCK + k * len(table)) % table.numel()]


def middle_replaced(terms: Terms) -> Terms:
    """The block in the middle is replaced by the one before it. Of a single block nothing is replaced."""
    middle = len(terms) // 2
    return [*terms[:middle], terms[middle - 1], *terms[middle + 1 :]]


b_scales = partial(changed, "b_scale")
IN_W8A8: Variants = {
    "b's scales of the next block of K": b_scales(lambda s: s.roll(-1, 1)),
    "b's scales of the next block of N": reading(
        b_scale=lambda tile: tile.operands.b_scale.roll(-1, 0)[tile.columns // BLOCK]
    ),
    "b's scales one column late": reading(
        b_scale=lambda tile: tile.operands.b_scale[(tile.columns - 1).clamp(min=0) // BLOCK]
    ),
    "b's scales transposed": reading(b_scale=transposed),
    "b's scales left out": b_scales(torch.ones_like),
    "b's scale of the first block of K in all": b_scales(lambda s: s[:, :1].expand_as(s)),
    "one scale for all of b": reading(
        b_scale=lambda tile: tile.operands.b_scale.mean().expand_as(tile.b_scale)
    ),
    "b's scales rounded down to powers of two": b_scales(lambda s: s.log2().floor().exp2()),
    "b's scale of the block before in the last block of K": b_scales(lambda s: put(s, (..., -1), s[:, -2])),
    "b's scale of the second block in the first block of K": b_scales(lambda s: put(s, (..., 0), s[:, 1])),
    "first block of K left out": gemm(lambda terms: terms[1:]),
    "last block of K left out": gemm(lambda terms: terms[:-1]),
    "last block of half of K left out": gemm(
        lambda terms: terms[: len(terms) // 2 - 1] + terms[len(terms) // 2 :]
    ),
    "three quarters of K left out": gemm(lambda terms: terms[: max(1, len(terms) // 4)]),
    "first block of K counted twice": gemm(lambda terms: [*terms, terms[0]]),
    "half of the first block of K counted twice": gemm(lambda terms: [*terms, terms[0] * 0.5]),
    "a block of K replaced by the one before": gemm(middle_replaced),
    "a partial sum one column late": gemm(lambda terms: [*terms[:-1], terms[-1].roll(1, 1)]),
}

IN_CORE_AND_W8A16: Variants = {
    "b's scales of the next block of K": b_scales(lambda s: s.roll(-1, 1)),
    "b's scales in FP8": b_scales(lambda s: fp8(E4M3, s * 128) / 128),
    "a block of K left out": gemm(lambda terms: terms[: len(terms) // 2] + terms[len(terms) // 2 + 1 :]),
}


def padded_and_read_unpadded(tile: Tile) -> torch.Tensor:
    """a's scales, of which each column is padded to four rows for TMA, read as if they were not padded."""
    m, blocks = tile.operands.a_scale.shape
    padded = torch.nn.functional.pad(tile.operands.a_scale.t(), (0, -m % 4)).flatten()
    return padded[torch.arange(blocks, device=padded.device) * m + tile.rows[:, None]]


def in_the_other_format(tile: Tile) -> torch.Tensor:
    """The values of codes whose bits are read as the other of e4m3fn and e4m3fnuz."""
    dtype = tile.operands.b_q.dtype
    return tile.b.to(dtype).view(OTHER_FP8[dtype]).float()


def without_the_largest_code(tile: Tile) -> torch.Tensor:
    """Reads the largest code as the next smaller one."""
    most = {E4M3: 416.0, E4M3FNUZ: 224.0}[tile.operands.b_q.dtype]
    return tile.b.clamp(-most, most)


def shuffled(b: torch.Tensor) -> torch.Tensor:
    """b that lies in tiles of 16 columns by 32 of K, for AMD's matrix instruction, but is read row by row."""
    n, k = b.shape[0] // 32 * 32, b.shape[1] // 32 * 32
    tiles = b[:n, :k].reshape(n // 16, 16, k // 32, 2, 16).permute(0, 2, 3, 1, 4)
    return put(b, (slice(n), slice(k)), tiles.reshape(n, k))


def bf16_after_16_products(tile: Tile) -> torch.Tensor:
    total = tile.a.new_zeros(())
    for first in range(0, tile.a.shape[1], 16):
        step, block = slice(first, first + 16), first // BLOCK
        dot = bf16(tile.a[:, step] @ tile.b[:, step].T)
        total = bf16(total + dot * (tile.a_scale[:, block, None] * tile.b_scale[None, :, block]))
    return total


UNSCALED = changed("a_scale", torch.ones_like)
IN_CORE: Variants = {
    "a's scales left out": UNSCALED,
    "all scales left out": lambda tile: tile.a @ tile.b.T,
    "a's scale of the first block of K in all": changed("a_scale", lambda s: s[:, :1].expand_as(s)),
    "a's scales of the next block of K": changed("a_scale", lambda s: s.roll(-1, 1)),
    "a's padded scales read unpadded": reading(a_scale=padded_and_read_unpadded),
    "a's scales in fp16": changed("a_scale", fp16),
    "a of the next row": reading(
        a=lambda tile: tile.operands.a_q.float()[(tile.rows + 1) % tile.operands.sizes.m]
    ),
    "a without the lowest bit": changed("a", partial(truncated_to, 3)),
    "b read in the other FP8 format": reading(b=in_the_other_format),
    "b with the largest code read as the one below": reading(b=without_the_largest_code),
    "b without the lowest bit": changed("b", partial(truncated_to, 3)),
    "b of the neighbouring column": reading(b=lambda tile: b_of(tile.operands, tile.columns ^ 1)),
    "b without the last element of K": changed("b", lambda b: put(b, (..., -1), 0.0)),
    "b shuffled for MFMA, read row by row": changed("b", shuffled),
    "sums of codes in fp16": gemm(step=16, round_step=fp16),
    "sums of codes of 8 bits": gemm(step=32, round_step=partial(truncated_to, 8)),
    "the sum in bf16 after each 16 products": bf16_after_16_products,
    "partial sums in fp16": gemm(parts=4, round_part=fp16),
    "partial sums of 6 bits": gemm(parts=4, round_part=partial(truncated_to, 6)),
    "dequantised to fp16": gemm(round_operands=(fp16, fp16)),
    "dequantised weights in FP8": gemm(round_operands=(exact, partial(fp8, E4M3))),
    "dequantised weights of 6 bits": gemm(round_operands=(exact, partial(truncated_to, 6))),
}


def in_chosen_row(change: Change) -> Compute:
    """Changes the chosen row of the right output."""
    return lambda operands, out: put(out, chosen_row(operands), change(out[chosen_row(operands)]))


OUTPUTS: Mapping[str, Compute] = {
    "last row never written": lambda operands, out: put(out, -1, math.nan),
    "last column zero": in_chosen_row(lambda x: put(x, -1, 0.0)),
    "tiles of 8 columns swapped": in_chosen_row(lambda x: put(x, slice(16), x[:16].roll(8))),
    "columns shifted by one": in_chosen_row(lambda x: x.roll(1)),
    "rows shifted by one": lambda operands, out: out.roll(1, 0),
    "added to what the output held": in_chosen_row(lambda x: x * 2),
    "a row 1 percent too small": in_chosen_row(lambda x: x.float() * 0.99),
    "a row in fp16": in_chosen_row(torch.Tensor.half),
    "a row of 6 bits": in_chosen_row(lambda x: truncated_to(6, x.float())),
}


def quantising_all_rows(**options: Any) -> Compute:
    """All rows are quantised with these options of `quantised`."""
    return everywhere(multiply, partial(quantised, **options))


def quantising_row(row: int, **options: Any) -> Compute:
    """One row is quantised with these options. row: one where the mistake shows (see `_spoil_activations`)"""
    return in_one_place(multiply, partial(quantised, **options), row)


QUANTISERS_IN_ALL_ROWS: Mapping[str, Compute] = {
    "stored scales 2 percent too large": quantising_all_rows(stored=lambda s: 1.02 * s),
    "stored scales 5 percent too small": quantising_all_rows(stored=lambda s: 0.95 * s),
    "codes truncated": quantising_all_rows(rounding=fp8_truncated),
    "codes rounded as e5m2": quantising_all_rows(rounding=lambda _, x: fp8(E5M2, x)),
    "up to 448 in e4m3fnuz": quantising_all_rows(top=448.0),
}
"""Errors that the noise of rounding to FP8 hides in each single row, and that show over all rows together."""

QUANTISERS_IN_ONE_ROW: Mapping[str, Compute] = {
    "scales of half their size, saturated": quantising_row(4, amax=lambda x: largest(x) / 2),
    "scales of 2^16 times their size": quantising_row(4, amax=lambda x: largest(x) * 2**16),
    "scales never stored": quantising_row(4, stored=torch.ones_like),
    "blocks of 64": quantising_row(4, block=64),
    "last value of a block overlooked": quantising_row(2, amax=lambda x: largest(x[..., :-1])),
    "negative values overlooked": quantising_row(2, amax=lambda x: x.amax(-1)),
    "one scale for the tensor": quantising_row(4, amax=lambda x: x.abs().amax().expand(x.shape[:2])),
    "no magnitude below 1": quantising_row(4, amax=lambda x: largest(x).clamp(min=1.0)),
    "NaN for a block of zeros": quantising_row(
        7, stored=lambda s: torch.where(s > SMALLEST_SCALE, s, math.nan)
    ),
}


def each_in_one_place(variants: Variants, quantiser: Quantiser | None = None) -> dict[str, Compute]:
    return {name: in_one_place(variant, quantiser) for name, variant in variants.items()}


MISTAKES: tuple[Mistake, ...] = (
    *listed(each_in_one_place(IN_W8A8, quantised), "with_quant", "fp8"),
    *listed(each_in_one_place(IN_CORE_AND_W8A16), form="core: {}"),
    *listed(each_in_one_place(IN_CORE_AND_W8A16), "with_quant", form="W8A16: {}"),
    Mistake("W8A16: activations in FP8", in_one_place(multiply, quantised), "with_quant"),
    *listed({**each_in_one_place(IN_CORE), **OUTPUTS}),
    Mistake("a row truncated to 5 bits", in_chosen_row(lambda x: truncated_to(5, x.float())), truncates=True),
    *listed(QUANTISERS_IN_ALL_ROWS, "with_quant", "fp8", "quantiser: {}"),
    *listed(QUANTISERS_IN_ONE_ROW, "with_quant", "fp8", "quantiser, one row: {}"),
)


def answers(operands: Operands, rows: list[int], columns: slice) -> Answers:
    """What the wrong kernels give for these rows and columns (see `Answers`)."""
    row_index = torch.tensor(rows, device=operands.b_q.device)
    column_index = torch.arange(columns.start, columns.stop, device=operands.b_q.device)

    def output(variant: Variant) -> torch.Tensor:
        # The tile of bf16 activations has scales of 1, which make no difference when they are left out.
        quantiser = quantised if operands.a is not None and variant is UNSCALED else None
        return variant(tile_of(operands, quantiser, row_index, column_index))

    variants = {**IN_W8A8, **IN_CORE, **IN_CORE_AND_W8A16}
    return {name: partial(output, variant) for name, variant in variants.items()}
