"""One row of block-scale GEMM over one block of N, in plain torch: right in several ways, wrong in many.

A variant takes a `Tile` and gives its columns [n] in fp32. How far over its limit the judge finds each bug is
printed by `pytest -s tests/kernels/block_scale_gemm/test_check.py`. No bug: one scale per row of activations
instead of one per 128. FP8 holds 15 octaves at full precision; what falls below them is lost in the
sum anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.formats import BLOCK, Fp8Format, fp8_format, quantise_activations


def read(o: BlockScaleGemmOperands, quantise: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations as products take them, fp32 [M, K], and their scales [M, ceil(K/128)], 1 for bf16 ones;
    `quantise` makes those FP8 first."""
    if o.a is None:
        return o.a_q.float(), o.a_scale
    if quantise:
        q, scales = quantise_activations(o.a, format_of(o), o.scales)
        return q.float(), scales
    return o.a.float(), torch.ones(len(o.a), o.b_scale.shape[1])


def format_of(o: BlockScaleGemmOperands) -> Fp8Format:
    return fp8_format(str(o.b_q.dtype).removeprefix("torch.float8_"))


@dataclass
class Tile:
    """What one program reads: of all activations and their scales (see `read`) one row, and a block of N."""

    o: BlockScaleGemmOperands
    a: torch.Tensor
    a_scales: torch.Tensor
    row: int
    n_block: int

    @property
    def blocks(self) -> int:
        return self.o.b_scale.shape[1]

    @property
    def columns(self) -> slice:
        return slice(self.n_block * BLOCK, min((self.n_block + 1) * BLOCK, len(self.o.b_q)))

    @property
    def middle(self) -> int:
        """The block of K in the middle, where bugs strike that strike one block."""
        return self.blocks // 2

    @property
    def a_scale(self) -> torch.Tensor:
        return self.a_scales[self.row].clone()

    @property
    def b_scale(self) -> torch.Tensor:
        return self.o.b_scale[self.n_block].clone()

    def products(self, b: torch.Tensor | None = None) -> torch.Tensor:
        """Of codes, fp32 [columns, blocks, 128]; zeros past the end of K."""
        b = self.o.b_q[self.columns].float() if b is None else b
        products = self.a[self.row] * b
        missing = self.blocks * BLOCK - products.shape[1]
        return torch.nn.functional.pad(products, (0, missing)).unflatten(1, (-1, BLOCK))

    def dots(self) -> torch.Tensor:
        """Of codes, per block of K: [columns, blocks]."""
        return self.products().sum(-1)

    def scaled(
        self, a_scale: torch.Tensor | None = None, b_scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The contribution of each block of K, with other scales than the right ones if given."""
        a_scale = self.a_scale if a_scale is None else a_scale
        return self.dots() * (a_scale * (self.b_scale if b_scale is None else b_scale))


Variant = Callable[[Tile], torch.Tensor]


# Right


def by_blocks(t: Tile) -> torch.Tensor:
    return t.scaled().sum(-1)


def scales_one_by_one(t: Tile) -> torch.Tensor:
    total = torch.zeros(t.dots().shape[0])
    for dot, a_scale, b_scale in zip(t.dots().T, t.a_scale, t.b_scale, strict=True):
        total += dot * a_scale * b_scale
    return total


def split_k(t: Tile) -> torch.Tensor:
    return torch.stack([part.sum(-1) for part in t.scaled().split(4, -1)]).sum(0)


def bf16_parts(t: Tile) -> torch.Tensor:
    """Split K whose parts are bf16, as cuBLAS may have them (torch allows it by default)."""
    parts = [part.sum(-1).bfloat16().float() for part in t.scaled().chunk(4, -1)]
    return torch.stack(parts).sum(0)


def weights_in_bf16(t: Tile) -> torch.Tensor:
    b = t.o.b_q[t.columns].float() * t.b_scale.repeat_interleave(BLOCK)[: t.a.shape[1]]
    return (t.products(b.bfloat16().float()).sum(-1) * t.a_scale).sum(-1)


def both_in_bf16(t: Tile) -> torch.Tensor:
    k = t.a.shape[1]
    a = (t.a[t.row] * t.a_scale.repeat_interleave(BLOCK)[:k]).bfloat16().float()
    return (t.o.b_q[t.columns].float() * t.b_scale.repeat_interleave(BLOCK)[:k]).bfloat16().float() @ a


def fourteen_bits_within_blocks(t: Tile) -> torch.Tensor:
    """Hopper's FP8 tensor cores: sums within 128 products keep 14 bits, truncated, step by step of 32."""
    total = torch.zeros(t.dots().shape)
    for part in t.products().unflatten(-1, (4, 32)).sum(-1).unbind(-1):
        total = total + part
        step = torch.ldexp(torch.ones_like(total), torch.frexp(total).exponent - 14)
        total = torch.where(total == 0, total, (total / step).trunc() * step)
    return (total * (t.a_scale * t.b_scale)).sum(-1)


RIGHT: dict[str, Variant] = {
    f.__name__: f
    for f in (
        by_blocks,
        scales_one_by_one,
        split_k,
        bf16_parts,
        weights_in_bf16,
        both_in_bf16,
        fourteen_bits_within_blocks,
    )
}


# Wrong scales


def weight_scale_of_next_k(t):
    scale = t.b_scale
    scale[t.middle] = scale[t.middle - 1]
    return t.scaled(b_scale=scale).sum(-1)


def weight_scale_of_next_n(t):
    scale = t.b_scale
    scale[t.middle] = t.o.b_scale[t.n_block - 1, t.middle]
    return t.scaled(b_scale=scale).sum(-1)


def weight_scales_of_previous_n(t):
    """As where the last, partial block is not counted."""
    return t.scaled(b_scale=t.o.b_scale[t.n_block - 1]).sum(-1)


def weight_scales_transposed(t):
    flat = t.o.b_scale.flatten()
    index = torch.arange(t.blocks) * len(t.o.b_scale) + t.n_block
    return t.scaled(b_scale=flat[index % len(flat)]).sum(-1)


def weight_scale_of_first_block_for_all(t):
    return t.scaled(b_scale=t.b_scale[:1]).sum(-1)


def weight_scale_forgotten_in_one_block(t):
    scale = t.b_scale
    scale[t.middle] = 1.0
    return t.scaled(b_scale=scale).sum(-1)


def activation_scale_of_next_row(t):
    scale = t.a_scale
    scale[t.middle] = t.a_scales[t.row - 1, t.middle]
    return t.scaled(a_scale=scale).sum(-1)


def activation_scale_of_next_block(t):
    scale = t.a_scale
    scale[t.middle] = scale[t.middle - 1]
    return t.scaled(a_scale=scale).sum(-1)


# Wrong sums


def last_k_block_dropped(t):
    return t.scaled()[:, :-1].sum(-1)


def one_k_block_dropped(t):
    contributions = t.scaled()
    contributions[:, t.middle] = 0
    return contributions.sum(-1)


def one_k_block_counted_twice(t):
    contributions = t.scaled()
    return contributions.sum(-1) + contributions[:, t.middle]


def split_lost(t):
    return t.scaled()[:, t.blocks // 4 + 1 :].sum(-1)


def fp16_sums_of_codes(t):
    total = torch.zeros(t.dots().shape, dtype=torch.float16)
    for part in t.products().unflatten(-1, (8, 16)).sum(-1).unbind(-1):
        total = total + part.half()
    return (total.float() * (t.a_scale * t.b_scale)).sum(-1)


def bf16_accumulator(t):
    """Rounded at every product."""
    total = torch.zeros(t.dots().shape[0], dtype=torch.bfloat16)
    products = t.products() * (t.a_scale * t.b_scale)[:, None]
    for product in products.flatten(1).bfloat16().T:
        total += product
    return total.float()


def rest_of_k_from_next_row(t):
    """The load past the end of K is not masked: in the last block it reads the row below as well."""
    rest = -t.a.shape[1] % BLOCK
    below = t.a[(t.row + 1) % len(t.a), :rest] @ t.o.b_q.float().roll(-1, 0)[t.columns, :rest].T
    return t.scaled().sum(-1) + below * t.a_scale[-1] * t.b_scale[-1]


# Wrong places and values


def weights_in_other_format(t):
    other = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}
    b = t.o.b_q[t.columns].view(other[t.o.b_q.dtype]).float()
    return (t.products(b).sum(-1) * (t.a_scale * t.b_scale)).sum(-1)


def weight_column_of_neighbour(t):
    out = by_blocks(t)
    out[1] = out[0]
    return out


def row_given_to_another(t):
    return by_blocks(replace(t, row=t.row - 1))


def last_columns_not_written(t):
    out = by_blocks(t)
    out[-1] = float("nan")
    return out


def last_columns_zero(t):
    out = by_blocks(t)
    out[len(out) // 2 :] = 0
    return out


def tile_zero(t):
    return torch.zeros_like(by_blocks(t))


def tile_never_written(t):
    return torch.full_like(by_blocks(t), float("nan"))


WEIGHT_BUGS: tuple[Variant, ...] = (
    weight_scale_of_next_k,
    weight_scale_of_next_n,
    weight_scales_of_previous_n,
    weight_scales_transposed,
    weight_scale_of_first_block_for_all,
    weight_scale_forgotten_in_one_block,
    last_k_block_dropped,
    one_k_block_dropped,
    one_k_block_counted_twice,
    split_lost,
    bf16_accumulator,
    rest_of_k_from_next_row,
    weights_in_other_format,
    weight_column_of_neighbour,
    row_given_to_another,
    last_columns_not_written,
    last_columns_zero,
    tile_zero,
    tile_never_written,
)
ACTIVATION_BUGS: tuple[Variant, ...] = (
    activation_scale_of_next_row,
    activation_scale_of_next_block,
    fp16_sums_of_codes,
)


# Wrong quantisation


def scales_too_small(t):
    """By half: what exceeds the format's largest value is cut off there. (A power-of-two scale may have so
    much room that nothing does.)"""
    largest = format_of(t.o).max
    return by_blocks(replace(t, a=(t.a * 2).clamp(-largest, largest), a_scales=t.a_scales / 2))


QUANTISING_BUGS: tuple[Variant, ...] = (scales_too_small,)

# Found where activations are taken as they are given. Where a call may round them to FP8 the rounding is
# larger than one block of K of many, or bf16 sums.
TOO_FINE_FOR_FP8: tuple[Variant, ...] = (
    weight_scale_of_next_k,
    weight_scale_of_next_n,
    activation_scale_of_next_block,
    one_k_block_dropped,
    one_k_block_counted_twice,
    last_k_block_dropped,
    bf16_accumulator,
    rest_of_k_from_next_row,
)
