"""Kernels of block-scale GEMM that are wrong in one way each.

Unless its name says otherwise, a kernel is wrong in one row of the second block of 128 columns. Wrong sums
and most wrong scales of b are made in calls that quantise their activations to FP8. The tolerance of these
calls is the widest, so there the error is the hardest to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from kernels.arithmetic.block_scale_gemm import OutputTile, Quantiser, Way, largest, quantised, read, summed
from kernels.arithmetic.roundings import Round, bf16, exact, fp8, fp8_truncated, fp16, kept
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands as Operands
from kernels.block_scale_gemm.operands import BlockScaleGemmSizes as Sizes
from kernels.formats import BLOCK, SMALLEST_SCALE
from kernels.mistakes import Compute, Mistake, put

Variant = Callable[[OutputTile], torch.Tensor]
"""Returns a tile of the output as a wrong kernel computes it, fp32 [rows, columns]."""

Terms = list[torch.Tensor]
"""The products of each block of K, fp32 [rows, columns]."""


def everywhere(variant: Variant, quantiser: Quantiser | None = None) -> Compute:
    def compute(o: Operands, right: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.arange(size, device=right.device) for size in right.shape)
        return variant(OutputTile(o, *read(o, quantiser), rows, columns)).to(right.dtype)

    return compute


def chosen_row(o: Operands) -> int:
    """A row whose values make mistakes in any block of K visible (see generate.py)."""
    return 4 if o.m > 4 else 0


def in_one_place(variant: Variant, quantiser: Quantiser | None = None, row: int | None = None) -> Compute:
    def compute(o: Operands, right: torch.Tensor) -> torch.Tensor:
        at, n = chosen_row(o) if row is None else row, right.shape[1]
        rows = torch.tensor([at], device=right.device)
        columns = torch.arange(min(BLOCK, n - 1) // BLOCK * BLOCK, min(n, 2 * BLOCK), device=right.device)
        right[at, columns] = variant(OutputTile(o, *read(o, quantiser), rows, columns))[0].to(right.dtype)
        return right

    return compute


def b_scales(change: Variant) -> Variant:
    return lambda t: t.multiply(b_scale=change(t))


def b_codes(change: Variant) -> Variant:
    return lambda t: t.multiply(b=change(t))


def terms(change: Callable[[Terms], Terms]) -> Variant:
    return lambda t: summed(change(t.terms()))


def rounded_down(scale: torch.Tensor) -> torch.Tensor:
    """Rounds to powers of two."""
    return scale.log2().floor().exp2()


def scale_of_another_block(at: int, source: int) -> Variant:
    """A block of K is multiplied with b's scale of another one."""
    return b_scales(lambda t: put(t.b_scale, (..., at), t.b_scale[:, source]))


def transposed(t: OutputTile) -> torch.Tensor:
    """b's table of scales is read as if its other dimension were contiguous."""
    table = t.operands.b_scale
    return table.flatten()[(t.n[:, None] + t.k * len(table)) % table.numel()]


def half(terms: Terms) -> int:
    return len(terms) // 2


IN_FP8: Mapping[str, Variant] = {
    "b's scales of the next block of K": b_scales(lambda t: t.b_scales(t.n, t.k + 1)),
    "b's scales of the next block of N": b_scales(lambda t: t.b_scales(t.n + 1, t.k)),
    "b's scales one column late": b_scales(lambda t: t.b_scales((t.columns - 1).clamp(min=0) // BLOCK, t.k)),
    "b's scales transposed": b_scales(transposed),
    "b's scales left out": b_scales(lambda t: torch.ones_like(t.b_scale)),
    "one scale for all of b": b_scales(lambda t: t.operands.b_scale.mean().expand_as(t.b_scale)),
    "b's scales rounded down to powers of two": b_scales(lambda t: rounded_down(t.b_scale)),
    "b's scale of the block before in the last block of K": scale_of_another_block(-1, -2),
    "b's scale of the second block in the first block of K": scale_of_another_block(0, 1),
    "first block of K left out": terms(lambda t: t[1:]),
    "last block of K left out": terms(lambda t: t[:-1]),
    "last block of half of K left out": terms(lambda t: t[: half(t) - 1] + t[half(t) :]),
    "three quarters of K left out": terms(lambda t: t[: max(1, len(t) // 4)]),
    "first block of K counted twice": terms(lambda t: [*t, t[0]]),
    "half of the first block of K counted twice": terms(lambda t: [*t, t[0] * 0.5]),
    "a block of K replaced by the one before": terms(
        lambda t: t[: half(t)] + t[half(t) - 1 :][:1] + t[half(t) + 1 :]
    ),
    "a partial sum one column late": terms(lambda t: [*t[:-1], t[-1].roll(1, 1)]),
}
"""What is wrong in calls that quantise their activations to FP8."""

IN_OTHER_CALLS: Mapping[str, Variant] = {
    "b's scales of the next block of K": IN_FP8["b's scales of the next block of K"],
    "b's scales in FP8": b_scales(lambda t: fp8(torch.float8_e4m3fn, t.b_scale * 128) / 128),
    "a block of K left out": terms(lambda t: t[: half(t)] + t[half(t) + 1 :]),
}
"""What is wrong both in calls that are given FP8 codes and in calls that keep activations in bf16 (W8A16)."""


def padded_and_read_unpadded(t: OutputTile) -> torch.Tensor:
    """a's scales have columns that are padded to a multiple of four rows, as TMA needs it, and are read as if
    they were not padded."""
    padded = torch.nn.functional.pad(t.all_a_scale.t(), (0, -len(t.all_a) % 4)).flatten()
    return padded[t.k * len(t.all_a) + t.rows[:, None]]


def in_the_other_format(o: Operands, codes: torch.Tensor) -> torch.Tensor:
    """The values of codes whose bits are read as the other of e4m3fn and e4m3fnuz."""
    other = torch.float8_e4m3fnuz if o.b_q.dtype == torch.float8_e4m3fn else torch.float8_e4m3fn
    return codes.to(o.b_q.dtype).view(other).float()


def without_the_largest_code(t: OutputTile) -> torch.Tensor:
    """Reads the largest code as the next smaller one."""
    most = torch.finfo(t.operands.b_q.dtype).max * 13 / 14
    return t.b.clamp(-most, most)


def shuffled(t: OutputTile) -> torch.Tensor:
    """b lies in tiles of 16 columns by 32 of K, for AMD's matrix instruction. It is read row by row."""
    n, k = (size // 32 * 32 for size in t.b.shape)
    tiles = t.b[:n, :k].reshape(n // 16, 16, k // 32, 2, 16).permute(0, 2, 3, 1, 4)
    return put(t.b, (slice(n), slice(k)), tiles.reshape(n, k))


def bf16_after_16_products(t: OutputTile) -> torch.Tensor:
    total = torch.zeros(())
    for first in range(0, t.all_a.shape[1], 16):
        some, k = slice(first, first + 16), first // BLOCK
        dot = bf16(t.a[:, some] @ t.b[:, some].T)
        total = bf16(total.to(dot.device) + dot * (t.a_scale[:, k, None] * t.b_scale[None, :, k]))
    return total


def by(**way: Any) -> Variant:
    return lambda t: t.multiply(Way(**way))


IN_CORE: Mapping[str, Variant] = {
    "a's scales of the next block of K": lambda t: t.multiply(a_scale=t.a_scales(t.rows, t.k + 1)),
    "a's padded scales read unpadded": lambda t: t.multiply(a_scale=padded_and_read_unpadded(t)),
    "a's scales in fp16": lambda t: t.multiply(a_scale=fp16(t.a_scale)),
    "a of the next row": lambda t: t.multiply(a=t.of_a(t.rows + 1)),
    "a without the lowest bit": lambda t: t.multiply(a=kept(3, t.a)),
    "b read in the other FP8 format": b_codes(lambda t: in_the_other_format(t.operands, t.b)),
    "b with the largest code read as the one below": b_codes(without_the_largest_code),
    "b without the lowest bit": b_codes(lambda t: kept(3, t.b)),
    "b of the neighbouring column": b_codes(lambda t: t.of_b(t.columns ^ 1)),
    "b without the last element of K": b_codes(lambda t: put(t.b, (..., -1), 0.0)),
    "b shuffled for MFMA, read row by row": b_codes(shuffled),
    "sums of codes in fp16": by(step=16, inner=fp16),
    "sums of codes of 8 bits": by(step=32, inner=partial(kept, 8)),
    "the sum in bf16 after each 16 products": bf16_after_16_products,
    "partial sums in fp16": by(parts=4, partial=fp16),
    "partial sums of 6 bits": by(parts=4, partial=partial(kept, 6)),
    "dequantised to fp16": by(wide=(fp16, fp16)),
    "dequantised weights in FP8": by(wide=(exact, partial(fp8, torch.float8_e4m3fn))),
    "dequantised weights of 6 bits": by(wide=(exact, partial(kept, 6))),
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
    "a row of 6 bits": row(lambda x: kept(6, x.float())),
}

QUANTISERS_IN_ALL_ROWS: Mapping[str, Quantiser] = {
    "stored scales 2 percent too large": partial(quantised, stored=lambda s: 1.02 * s),
    "stored scales 5 percent too small": partial(quantised, stored=lambda s: 0.95 * s),
    "codes truncated": lambda o: quantised(o, rounding=partial(fp8_truncated, o.b_q.dtype)),
    "codes rounded as e5m2": partial(quantised, rounding=partial(fp8, torch.float8_e5m2)),
    "up to 448 in e4m3fnuz": partial(quantised, top=448.0),
}
"""Errors that one row hides in its rounding to FP8, but not all rows together."""

QUANTISERS_IN_ONE_ROW: Mapping[str, tuple[Quantiser, int]] = {
    "scales of half their size, saturated": (partial(quantised, amax=lambda x: largest(x) / 2), 4),
    "scales of 2^16 times their size": (partial(quantised, amax=lambda x: largest(x) * 2**16), 4),
    "scales never stored": (partial(quantised, stored=torch.ones_like), 4),
    "blocks of 64": (partial(quantised, block=64), 4),
    "last value of a block overlooked": (partial(quantised, amax=lambda x: largest(x[..., :-1])), 2),
    "negative values overlooked": (partial(quantised, amax=lambda x: x.amax(-1)), 2),
    "one scale for the tensor": (partial(quantised, amax=lambda x: x.abs().amax().expand(x.shape[:2])), 4),
    "no magnitude below 1": (partial(quantised, amax=lambda x: largest(x).clamp(min=1.0)), 4),
    "NaN for a block of zeros": (
        partial(quantised, stored=lambda s: torch.where(s > SMALLEST_SCALE, s, math.nan)),
        7,
    ),
}
"""Each with the row of adversarial operands in which it shows (generate.py)."""


def of_free_scales(sizes: Sizes) -> bool:
    """Sizes with several rows and blocks of K, and scales that are not powers of two."""
    return sizes.m > 8 and sizes.k_blocks > 3 and sizes.scales == "fp32"


FITS: Mapping[str, Callable[[Sizes], bool]] = {
    "quantiser: up to 448 in e4m3fnuz": lambda s: s.fp8 == "e4m3fnuz",
    "quantiser: stored scales 2 percent too large": lambda s: s.m > 32,
    "the sum in bf16 after each 16 products": lambda s: s.k >= 2048,
    "a's padded scales read unpadded": lambda s: s.m > 8 and s.m % 4 != 0,
}


def made(name: str, compute: Compute, boundary: str = "core", activations: str = "bf16") -> Mistake:
    return Mistake(name, compute, boundary, activations, fits=FITS.get(name, of_free_scales))


def quantises(name: str, compute: Compute) -> Mistake:
    return made(name, compute, "with_quant", "fp8")


MISTAKES: tuple[Mistake, ...] = (
    *(quantises(name, in_one_place(variant, quantised)) for name, variant in IN_FP8.items()),
    *(
        made(f"{call}: {name}", in_one_place(variant), boundary)
        for call, boundary in (("of given codes", "core"), ("W8A16", "with_quant"))
        for name, variant in IN_OTHER_CALLS.items()
    ),
    made("W8A16: activations in FP8", in_one_place(OutputTile.multiply, quantised), "with_quant"),
    *(made(name, in_one_place(variant)) for name, variant in IN_CORE.items()),
    *(made(name, compute) for name, compute in OUTPUTS.items()),
    Mistake("a row truncated to 5 bits", row(lambda x: kept(5, x.float())), truncates=True),
    *(
        quantises(f"quantiser: {name}", everywhere(OutputTile.multiply, quantiser))
        for name, quantiser in QUANTISERS_IN_ALL_ROWS.items()
    ),
    *(
        quantises(f"quantiser, one row: {name}", in_one_place(OutputTile.multiply, quantiser, at))
        for name, (quantiser, at) in QUANTISERS_IN_ONE_ROW.items()
    ),
)
