"""Reference of MHA prefill, streamed over sequences, heads and query rows."""

from __future__ import annotations

import math

from kernels.formats import Fp8Format, fp8_format
from kernels.lazy import torch
from kernels.mha_prefill.operands import MhaPrefillOperands, Sequence
from kernels.mha_prefill.sizes import VALUE, WIDTH
from kernels.op import LEAST_SIGMA, Reference, affordable, spread

UNIT = 2.0**-9  # relative error of rounding to bf16, about, in root mean square
UNIT_FP8 = 2.0**-5  # the same for FP8 with 3 mantissa bits
UNIT_SUM = 2.0**-13  # the same for sums in the 14 bits that Hopper's FP8 products keep
HEADS = 16  # computed at once
SCORES = 1 << 22  # computed at once, of all those heads
OVERHEAD = 3  # the reference takes so many times as long as its products
EVEN = 0.1  # the largest weight of rows that are judged together
TILES = (64, 128, 256)  # query rows that kernels take per program


def reference(
    operands: MhaPrefillOperands, max_flops: float = float("inf"), offset: float = 0.0
) -> Reference:
    """The reference in fp32: its products err by about 1e-6 of a score, a thousandth of a sigma. Above
    `max_flops` and MOST_ELEMENTS it takes the first and the last row of every sequence, rows at the edges of
    tiles, and others at even distances, as many as fit.

    sigma, as in MLA decode: a right kernel takes exact products of bf16, sums in fp32, and rounds to bf16
    twice (relative error 2^-8 at most, about 2^-9 in root mean square): the softmax weights before the second
    product, each independently, and the output. The first adds 2^-9 * sqrt(sum_j p_j^2 (v_j - out)^2) for
    each element where the rounded weights are summed; v_j replaces v_j - out where the exact ones are. The
    larger counts. The second adds 2^-9 * |out|. The fp32 error of a score of size |s| acts like an error of
    its weight. FP8 products are exact too; a kernel that multiplies in bf16 instead rounds v, which adds
    2^-9 * sqrt(sum_j p_j^2 v_j^2). kernels.op.LEAST_SIGMA is the least.

    sigma_fp8: the softmax weights are rounded to FP8, with a relative error of 2^-4 at most, about 2^-5 in
    root mean square, and by the format's smallest step, in units of the row's largest weight, which is 1
    where a kernel does not scale weights up. Where the rounded weights are summed their errors count about
    the mean as above, else in full: the larger of the two, element by element. Below the smallest normal
    number their errors do not cancel (below half of the smallest step all vanish): the square of the shift of
    the output is added. Scores and output may be summed in 14 bits. even: as in MLA decode.
    """
    q, k, v = operands.q, operands.k, operands.v
    rows = sampled_rows(operands.sequences, q.shape[1], max_flops, offset)
    every = torch.arange(len(q)) if rows is None else torch.tensor(rows)
    fmt = None if operands.q_descale is None else fp8_format(str(q.dtype).removeprefix("torch.float8_"))
    value = torch.empty(len(every), q.shape[1], VALUE, device=q.device)
    sigma = torch.empty_like(value)
    sigma_fp8 = torch.empty_like(value) if fmt else None
    even = torch.empty(value.shape[:2], dtype=torch.bool, device=q.device) if fmt else None
    for sequence in operands.sequences:
        place = torch.nonzero((every >= sequence.queries.start) & (every < sequence.queries.stop)).flatten()
        if not len(place):
            continue
        for first in range(0, q.shape[1], HEADS):
            heads = slice(first, first + HEADS)
            keys = k[sequence.keys, heads].float().permute(1, 2, 0)
            values = v[sequence.keys, heads].float().mul_(operands.value_scale).transpose(0, 1).contiguous()
            values = torch.cat([values, values.square()], -1)
            for part in place.split(max(1, SCORES // (keys.shape[0] * sequence.length))):
                position = (every[part] - sequence.queries.start + sequence.prefix).to(q.device)
                seen = int(position[-1]) + 1
                results = _attend(
                    q[every[part].to(q.device), heads].float().transpose(0, 1),
                    keys[..., :seen],
                    values[:, :seen],
                    position,
                    operands.score_scale,
                    fmt,
                )
                for target, result in zip((value, sigma, sigma_fp8, even), results, strict=True):
                    if target is not None and result is not None:
                        target[part.to(q.device), heads] = result.transpose(0, 1)
    return Reference(value, sigma, rows, sigma_fp8, even)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    fmt: Fp8Format | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Value, sigma and, for FP8 operands, sigma_fp8, [heads, n, 128] each, and even [heads, n].

    q: [heads, n, 192], at `position` in its sequence, int64 [n]; k: [heads, 192, keys]; v: with its squares
    beside it, [heads, keys, 256]
    """
    scores = (q @ k).mul_(scale)
    # fp32 sums of 192 products of the scores' size err by about sqrt(192) 2^-24 |s|.
    size = scores.abs()
    hidden = torch.arange(k.shape[-1], device=k.device) > position[:, None]
    p = scores.masked_fill_(hidden, -math.inf).softmax(-1)
    value = p @ v[..., :VALUE]
    rounding = (UNIT * value).square() + (LEAST_SIGMA * v[..., :VALUE].abs().amax()).square()

    def of(deviation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The variance of the output for these deviations of the weights: about the mean, and in full."""
        weight = deviation.square_()
        first, full = (weight @ v).split(VALUE, -1)
        return (full - 2 * value * first + value.square() * weight.sum(-1, keepdim=True)).clamp_(min=0), full

    if fmt is None:
        in_bf16 = torch.maximum(*of(size.mul_(14 * 2.0**-24).add_(UNIT).mul_(p)))
        return value, (in_bf16 + rounding).sqrt(), None, None
    rounding += UNIT**2 * (p.square() @ v[..., VALUE:])
    in_bf16 = torch.maximum(*of(size.mul(14 * 2.0**-24).add_(UNIT).mul_(p)))
    step = p.amax(-1, keepdim=True) * fmt.smallest_subnormal
    below = p < step * (fmt.smallest_normal / fmt.smallest_subnormal)
    lost = torch.where(below, (p / step).round_().mul_(step).sub_(p), 0.0)
    shift = lost @ v[..., :VALUE]
    change = lost.sum(-1, keepdim=True)
    shift_about_mean = (shift - value * change) / (1.0 + change)
    together = torch.maximum(shift.square_(), shift_about_mean.square_())
    relative = size.add_(1.0).mul_(UNIT_SUM).add_(UNIT_FP8)
    in_fp8 = torch.maximum(*of(torch.maximum(relative.mul_(p), step / 12**0.5).masked_fill_(hidden, 0.0)))
    even = (together.mean(-1) < 0.01 * in_fp8.mean(-1)) & (p.amax(-1) < EVEN)
    return value, (in_bf16 + rounding).sqrt(), (in_fp8 + together + rounding).sqrt(), even


def sampled_rows(
    sequences: list[Sequence], heads: int, max_flops: float, offset: float = 0.0
) -> list[int] | None:
    """Rows of the output to compute for at most `max_flops`, ascending; None for all."""
    per_pair = OVERHEAD * 2 * heads * (WIDTH + 3 * VALUE)
    keys = [n for s in sequences for n in range(s.prefix + 1, s.length + 1)]
    ends = [row for s in sequences for row in (s.queries.start, s.queries.stop - 1)]
    edges = [s.queries.start + row for s in sequences for row in _edges(s.new)]
    order = [*ends, *edges, *spread(len(keys), offset)]
    return affordable(order, lambda row: keys[row] * per_pair, max_flops, heads * VALUE)


def _edges(new: int) -> list[int]:
    """Rows of a sequence on both sides of the beginnings of its second and its last tile."""
    begins = [start for tile in TILES for start in (tile, (new - 1) // tile * tile)]
    return [row for start in begins for row in (start - 1, start) if 0 <= row < new]
