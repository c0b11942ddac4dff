"""Wrong arithmetic of block-scale GEMM: what a tile reads, how it sums, the quantiser before it, the output.

Wrong scales of b and wrong sums are of calls that quantise to FP8, where they err by the fewest limits; their
functions take operands of `core` too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from kernels.arithmetic.block_scale_gemm import (
    OutputTile,
    Quantiser,
    Way,
    format_of,
    largest,
    quantised,
    read,
    summed,
)
from kernels.arithmetic.roundings import Round, bf16, exact, fp8, fp8_truncated, fp16, kept
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands as Operands
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes as Sizes
from kernels.formats import BLOCK, SMALLEST_SCALE
from kernels.mistakes import Compute, Mistake

# Where

Variant = Callable[[OutputTile], torch.Tensor]


def everywhere(variant: Variant, quantiser: Quantiser | None = None) -> Compute:
    def compute(o: Operands, right: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.arange(size, device=right.device) for size in right.shape)
        return variant(OutputTile(o, *read(o, quantiser), rows, columns)).to(right.dtype)

    return compute


def chosen_row(o: Operands) -> int:
    """A flat row: in it a mistake in any block of K shows."""
    return 4 if o.m > 4 else 0


def in_one_place(variant: Variant, quantiser: Quantiser | None = None, row: int | None = None) -> Compute:
    """In one row of the second block of N."""

    def compute(o: Operands, right: torch.Tensor) -> torch.Tensor:
        at, n = chosen_row(o) if row is None else row, right.shape[1]
        rows = torch.tensor([at], device=right.device)
        columns = torch.arange(min(BLOCK, n - 1) // BLOCK * BLOCK, min(n, 2 * BLOCK), device=right.device)
        right[at, columns] = variant(OutputTile(o, *read(o, quantiser), rows, columns))[0].to(right.dtype)
        return right

    return compute


def put(x: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    x[at] = value
    return x


# Wrong operands: scales [rows or columns, blocks of K], codes [rows or columns, K]


def reading(what: str, change: Variant) -> Variant:
    """what: `a`, `b`, `a_scale` or `b_scale`"""
    return lambda t: t.multiply(Way(), **{what: change(t)})


def strided(t: OutputTile, of_n: int, of_k: int) -> torch.Tensor:
    """b's scales with other strides."""
    flat = t.operands.b_scale.flatten()
    return flat[(t.n[:, None] * of_n + t.k * of_k) % len(flat)]


def rounded_down(scale: torch.Tensor) -> torch.Tensor:
    """To powers of two."""
    return scale.log2().floor().exp2()


def copied(scale: torch.Tensor, at: int, source: int) -> torch.Tensor:
    """A block of K has the scales of another."""
    return put(scale, (..., at), scale[:, source].clone())


def three_blocks_on(t: OutputTile) -> torch.Tensor:
    return t.b_scales(t.n, torch.where(t.k + 3 < len(t.k), t.k + 3, t.k))


B_SCALES: Mapping[str, Variant] = {
    "of the next block of K": lambda t: t.b_scales(t.n, t.k + 1),
    "of three blocks of K on where there are": three_blocks_on,
    "of the first block of K for all": lambda t: t.b_scales(t.n, t.k * 0),
    "in reverse along K": lambda t: t.b_scales(t.n, -1 - t.k),
    "of the next block of N": lambda t: t.b_scales(t.n + 1, t.k),
    "by blocks of 64 columns": lambda t: t.b_scales(t.columns // 64, t.k),
    "one column late": lambda t: t.b_scales((t.columns - 1).clamp(min=0) // BLOCK, t.k),
    "transposed": lambda t: strided(t, 1, len(t.operands.b_scale)),
    "with a stride one too short": lambda t: strided(t, len(t.k) - 1, 1),
    "left out": lambda t: torch.ones_like(t.b_scale),
    "replaced by the table's mean": lambda t: t.operands.b_scale.mean().expand_as(t.b_scale),
    "replaced by their mean along K": lambda t: t.b_scale.mean(1, True).expand_as(t.b_scale),
    "rounded down to powers of two": lambda t: rounded_down(t.b_scale),
    "of the block before in one block": lambda t: copied(t.b_scale, t.middle, t.middle - 1),
    "of the block before in the last block": lambda t: copied(t.b_scale, -1, -2),
    "of the second block in the first": lambda t: copied(t.b_scale, 0, 1),
    "never loaded in the last block": lambda t: put(t.b_scale, (..., -1), math.nan),
}


def padded_and_read_unpadded(t: OutputTile) -> torch.Tensor:
    """Columns end at multiples of four, as TMA wants them."""
    padded = torch.nn.functional.pad(t.all_a_scale.t(), (0, -len(t.all_a) % 4)).flatten()
    return padded[t.k * len(t.all_a) + t.rows[:, None]]


A_SCALES: Mapping[str, Variant] = {
    "of the next block of K": lambda t: t.a_scales(t.rows, t.k + 1),
    "of the row before": lambda t: t.a_scales(t.rows - 1, t.k),
    "of columns padded to four, read unpadded": padded_and_read_unpadded,
    "in fp16": lambda t: fp16(t.a_scale),
}


def in_the_other_format(o: Operands, codes: torch.Tensor) -> torch.Tensor:
    other = torch.float8_e4m3fnuz if o.b_q.dtype == torch.float8_e4m3fn else torch.float8_e4m3fn
    return codes.to(o.b_q.dtype).view(other).float()


def largest_as_the_next(t: OutputTile) -> torch.Tensor:
    most = format_of(t.operands).max * 13 / 14
    return t.b.clamp(-most, most)


def stale(t: OutputTile) -> torch.Tensor:
    """A block of K is still that before it."""
    at = t.middle * BLOCK
    return put(t.b, (..., slice(at, at + BLOCK)), t.b[:, at - BLOCK : at])


def shuffled(t: OutputTile) -> torch.Tensor:
    """Tiles of 16 columns by 32 of K as they lie for AMD's matrix instruction."""
    n, k = (size // 32 * 32 for size in t.b.shape)
    tiles = t.b[:n, :k].reshape(n // 16, 16, k // 32, 2, 16).permute(0, 2, 3, 1, 4)
    return put(t.b, (slice(n), slice(k)), tiles.reshape(n, k))


B_CODES: Mapping[str, Variant] = {
    "read in the other FP8 format": lambda t: in_the_other_format(t.operands, t.b),
    "with the largest code read as the next": largest_as_the_next,
    "without the lowest bit": lambda t: kept(3, t.b),
    "of the neighbouring column": lambda t: t.of_b(t.columns ^ 1),
    "one element along K late": lambda t: t.b.roll(1, 1),
    "of the block of K before in one block": stale,
    "of which 16 along K are zero": lambda t: put(t.b, (..., slice(BLOCK, BLOCK + 16)), 0.0),
    "without the last element of K": lambda t: put(t.b, (..., -1), 0.0),
    "shuffled for MFMA, read unshuffled": shuffled,
}
A_CODES: Mapping[str, Variant] = {
    "of the next row": lambda t: t.of_a(t.rows + 1),
    "without the lowest bit": lambda t: kept(3, t.a),
}


# Wrong sums of what the blocks of K give

Terms = list[torch.Tensor]


def half(terms: Terms) -> int:
    return len(terms) // 2


def part(terms: Terms) -> int:
    """The length of one of four."""
    return max(1, len(terms) // 4)


SUMS: Mapping[str, Callable[[Terms], Terms]] = {
    "first block of K left out": lambda t: t[1:],
    "last block of K left out": lambda t: t[:-1],
    "a block of K in the middle left out": lambda t: t[: half(t)] + t[half(t) + 1 :],
    "last block of half of K left out": lambda t: t[: half(t) - 1] + t[half(t) :],
    "first block of K counted twice": lambda t: [*t, t[0]],
    "a block of K in the middle counted twice": lambda t: [*t, t[half(t)]],
    "a block of K counted in two parts": lambda t: [*t, t[part(t)]],
    "sums not cleared before they begin": lambda t: [*t, t[0] * 0.5],
    "a block of K taken for the one before": lambda t: t[: half(t)] + t[half(t) - 1 :][:1] + t[half(t) + 1 :],
    "a part of K taken for the one before": lambda t: t[: part(t)] * 2 + t[2 * part(t) :],
    "all parts of K but one left out": lambda t: t[: part(t)],
    "a partial sum one column late": lambda t: [*t[:-1], t[-1].roll(1, 1)],
    "a partial sum never written": lambda t: [*t[:-1], t[-1] * math.nan],
}


def with_terms(change: Callable[[Terms], Terms]) -> Variant:
    return lambda t: summed(change(t.terms()))


# Wrong arithmetic


def by(**way: Any) -> Variant:
    return lambda t: t.multiply(Way(**way))


def bf16_after_16_products(t: OutputTile) -> torch.Tensor:
    total = torch.zeros(())
    for first in range(0, t.all_a.shape[1], 16):
        some, k = slice(first, first + 16), first // BLOCK
        dot = bf16(t.a[:, some] @ t.b[:, some].T)
        total = bf16(total.to(dot.device) + dot * (t.a_scale[:, k, None] * t.b_scale[None, :, k]))
    return total


def scaled_every_two_blocks(t: OutputTile) -> torch.Tensor:
    """By the second one's scales."""
    k = (t.k | 1).clamp(max=len(t.k) - 1)
    return t.multiply(a_scale=t.a_scales(t.rows, k), b_scale=t.b_scales(t.n, k))


def rest_from_the_next_row(t: OutputTile) -> torch.Tensor:
    rest = -t.all_a.shape[1] % BLOCK
    below = t.of_a(t.rows + 1)[:, :rest] @ t.of_b(t.columns + 1)[:, :rest].T
    return t.multiply() + below * t.a_scale[:, -1:] * t.b_scale[None, :, -1]


ARITHMETIC: Mapping[str, Variant] = {
    "sums of codes in fp16": by(step=16, inner=fp16),
    "sums of codes of 8 bits": by(step=32, inner=partial(kept, 8)),
    "the sum in bf16 after each 16 products": bf16_after_16_products,
    "partial sums in fp16": by(parts=4, partial=fp16),
    "partial sums of 6 bits": by(parts=4, partial=partial(kept, 6)),
    "dequantised to fp16": by(wide=(fp16, fp16)),
    "dequantised weights in FP8": by(wide=(exact, partial(fp8, torch.float8_e4m3fn))),
    "dequantised weights of 6 bits": by(wide=(exact, partial(kept, 6))),
    "scales after every two blocks of K": scaled_every_two_blocks,
    "loads past the end of K from the next row": rest_from_the_next_row,
}


# Wrong outputs


def in_a_row(change: Round) -> Compute:
    return lambda o, out: put(out, chosen_row(o), change(out[chosen_row(o)].clone()))


OUTPUTS: Mapping[str, Compute] = {
    "last row never written": lambda o, out: put(out, -1, math.nan),
    "last column never written": lambda o, out: put(out, (..., -1), math.nan),
    "last column zero": in_a_row(lambda row: put(row, -1, 0.0)),
    "tiles of 8 columns swapped": in_a_row(lambda row: put(row, slice(16), row[:16].roll(8))),
    "columns shifted by one": in_a_row(lambda row: row.roll(1)),
    "rows shifted by one": lambda o, out: out.roll(1, 0),
    "added to what was there": in_a_row(lambda row: row * 2),
    "a row 1 percent too small": in_a_row(lambda row: row.float() * 0.99),
    "a row through fp16": in_a_row(torch.Tensor.half),
    "a row of 6 bits": in_a_row(lambda row: kept(6, row.float())),
}


# Wrong quantisers

IN_ALL_ROWS: Mapping[str, Quantiser] = {
    "stored scales 2 percent too large": partial(quantised, stored=lambda s: 1.02 * s),
    "stored scales 5 percent too large": partial(quantised, stored=lambda s: 1.05 * s),
    "stored scales 5 percent too small": partial(quantised, stored=lambda s: 0.95 * s),
    "codes truncated": lambda o: quantised(o, rounding=partial(fp8_truncated, o.b_q.dtype)),
    "codes rounded as e5m2": partial(quantised, rounding=partial(fp8, torch.float8_e5m2)),
    "up to 448 in e4m3fnuz": partial(quantised, top=448.0),
}
"""What is within rounding to FP8 in one row, and seen in all of them."""


def nan_for_zeros(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > SMALLEST_SCALE, scale, math.nan)


IN_ONE_ROW: Mapping[str, tuple[Quantiser, int]] = {
    "scales of half their size, saturated": (partial(quantised, amax=lambda x: largest(x) / 2), 4),
    "scales of 2^16 times their size": (partial(quantised, amax=lambda x: largest(x) * 2**16), 4),
    "scales never stored": (partial(quantised, stored=torch.ones_like), 4),
    "stored scales rounded down to powers of two": (partial(quantised, stored=rounded_down), 4),
    "blocks of 64": (partial(quantised, block=64), 4),
    "first value of a block overlooked": (partial(quantised, amax=lambda x: largest(x[..., 1:])), 2),
    "last value of a block overlooked": (partial(quantised, amax=lambda x: largest(x[..., :-1])), 2),
    "second half of a block overlooked": (partial(quantised, amax=lambda x: largest(x[..., :64])), 2),
    "negative values overlooked": (partial(quantised, amax=lambda x: x.amax(-1)), 2),
    "the mean magnitude for the largest": (partial(quantised, amax=lambda x: x.abs().mean(-1)), 4),
    "one scale for the tensor": (partial(quantised, amax=lambda x: x.abs().amax().expand(x.shape[:2])), 4),
    "no magnitude below 1": (partial(quantised, amax=lambda x: largest(x).clamp(min=1.0)), 4),
    "NaN for a block of zeros": (partial(quantised, stored=nan_for_zeros), 7),
    "codes read in the other FP8 format": (
        lambda o: quantised(o, rounding=partial(in_the_other_format, o)),
        4,
    ),
}
"""Each with the row of adversarial operands in which it shows (generate.py)."""

Fits = Callable[[Sizes], bool]


def of_free_scales(sizes: Sizes) -> bool:
    """Larger than the smallest, with scales that are no powers of two."""
    return sizes.m > 8 and sizes.k_blocks > 3 and sizes.scales == "fp32"


FITS: Mapping[str, Fits] = {
    "up to 448 in e4m3fnuz": lambda s: s.fp8 == "e4m3fnuz",
    "stored scales 2 percent too large": lambda s: s.m > 32,
    "the sum in bf16 after each 16 products": lambda s: s.k >= 2048,
    "of columns padded to four, read unpadded": lambda s: s.m > 8 and s.m % 4 != 0,
    "loads past the end of K from the next row": lambda s: s.m > 8 and s.k % BLOCK != 0,
}


def listed(
    table: Mapping[str, Any], place: Callable[[Any], Compute], before: str = "", of: str = "core"
) -> list[Mistake]:
    boundary, activations = CALLS[of]
    return [
        Mistake(before + name, place(change), boundary, activations, fits=FITS.get(name, of_free_scales))
        for name, change in table.items()
    ]


CALLS = {"core": ("core", "bf16"), "W8A16": ("with_quant", "bf16"), "FP8": ("with_quant", "fp8")}
ALSO = {
    "b's scales of the next block of K": reading("b_scale", B_SCALES["of the next block of K"]),
    "b's scales in FP8": reading("b_scale", lambda t: fp8(torch.float8_e4m3fn, t.b_scale * 128) / 128),
    "a block of K left out": with_terms(SUMS["a block of K in the middle left out"]),
}
"""In calls that do not quantise to FP8."""


MISTAKES: tuple[Mistake, ...] = (
    *listed(
        B_SCALES, lambda change: in_one_place(reading("b_scale", change), quantised), "b's scales ", "FP8"
    ),
    *listed(SUMS, lambda change: in_one_place(with_terms(change), quantised), of="FP8"),
    *listed(ALSO, in_one_place, "of given codes: "),
    *listed(ALSO, in_one_place, "W8A16: ", "W8A16"),
    *listed(
        {"W8A16: activations in FP8": OutputTile.multiply},
        partial(in_one_place, quantiser=quantised),
        of="W8A16",
    ),
    *listed(A_SCALES, lambda change: in_one_place(reading("a_scale", change)), "a's scales "),
    *listed(B_CODES, lambda change: in_one_place(reading("b", change)), "b "),
    *listed(A_CODES, lambda change: in_one_place(reading("a", change)), "a "),
    *listed(ARITHMETIC, in_one_place),
    *listed(OUTPUTS, lambda compute: compute),
    Mistake("a row truncated to 5 bits", in_a_row(lambda row: kept(5, row.float())), truncates=True),
    *listed(IN_ALL_ROWS, partial(everywhere, OutputTile.multiply), "quantiser: ", "FP8"),
    *listed(
        IN_ONE_ROW, lambda where: in_one_place(OutputTile.multiply, *where), "quantiser, one row: ", "FP8"
    ),
)
