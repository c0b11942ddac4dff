"""What the attention ops share: checks of sizes, arguments of libraries by name, and the error that rounding
explains.

sigma: a right kernel takes exact products of bf16, sums in fp32, and rounds to bf16 twice (relative error
2^-8 at most, about 2^-9 in root mean square): the softmax weights before the second product, each
independently (`rounding_variance`), and the output (`output_variance`). The fp32 error of a score of size |s|
acts like an error of its weight. sigma_fp8: weights are rounded to FP8 (`fp8_variance`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.binding import Function
from kernels.formats import Fp8Format, fp8_format
from kernels.lazy import torch

BYTES = {"bf16": 2, "fp8": 1}  # of a value of the cache, or of q, k and v

UNIT = 2.0**-9  # relative error of rounding to bf16, about, in root mean square

# The softmax scale, of the 128 + 64 wide query-key product (DeepSeek-V3 technical report, section 2.1.1).
SCALE = 192**-0.5

SHIFT = 120.0  # adversarial operands add it to the scores of some heads, and subtract it from those of others

LEAST_SIGMA = 2.0**-63
"""The least sigma, in units of the largest value: its square is fp32's smallest normal number. Where the key
that has all the weight has a value of 0, the output is the sum of weights that underflow, which some
implementations of the exponential keep at 2^-126 and others make 0."""

EVEN = 0.1
"""The largest softmax weight in rows that are judged together. A row's largest weight is exactly 1 before it
is normalised: rounding does not change it, so that a row in which it is heavier errs less."""


def check_sizes(op: str, sizes: Any, counts: tuple[str, ...], dtype: str) -> None:
    """Raises ValueError for a count below 1, a dtype that BYTES has not, and an unknown FP8 format. counts,
    dtype: the names of these sizes"""
    for name in counts:
        if getattr(sizes, name) < 1:
            raise ValueError(f"size {name}={getattr(sizes, name)} of {op} must be at least 1")
    if getattr(sizes, dtype) not in BYTES:
        raise ValueError(f"size {dtype}={getattr(sizes, dtype)!r} of {op} must be {' or '.join(BYTES)}")
    fp8_format(sizes.fp8)


def needed(function: Function, values: Mapping[str, object]) -> dict[str, Any]:
    """The arguments among `values` that a library's function needs or may take, by name. The key of a value
    holds all names that libraries have for it, separated by spaces."""
    named = {name: value for names, value in values.items() for name in names.split()}
    return {name: named[name] for name in (*function.needs, *function.wishes) if name in named}


def shift_scores(q: torch.Tensor, keys: torch.Tensor, channels: list[int], of_keys: float) -> None:
    """Adds about SHIFT to all scores of heads 0, 4, 8 ... and subtracts it from those of heads 3, 7, 11 ...
    (with three heads or fewer, of all but the first). Channels that are the same in all keys do it.

    q: [rows, heads, width]; keys: [..., width], which get the value `of_keys` in these channels
    """
    lowered = slice(3, None, 4) if q.shape[1] > 3 else slice(1, None)
    of_heads = SHIFT / SCALE / len(channels) / of_keys
    keys[..., channels] = of_keys
    q[..., channels] = 0.0
    q[:, ::4, channels] = of_heads
    q[:, lowered, channels] = -of_heads


def edges(length: int, *tiles: int) -> list[int]:
    """Indices below `length`, ascending: the last one before and the first one after each boundary, where the
    second tile of a size, its last tile or the second half of the length begins."""
    begins = {begin for tile in tiles for begin in (tile, (length - 1) // tile * tile)} | {-(-length // 2)}
    return sorted({place for begin in begins for place in (begin - 1, begin) if 0 <= place < length})


def empty_results(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fp8: bool
) -> list[torch.Tensor]:
    """Room for a reference's value and sigma and, for FP8 operands, sigma_fp8 and even. shape: of value"""
    results = [torch.empty(shape, dtype=dtype, device=device) for _ in range(3 if fp8 else 2)]
    return [*results, torch.empty(shape[:-1], dtype=torch.bool, device=device)] if fp8 else results


def with_squares(v: torch.Tensor) -> torch.Tensor:
    """Values and their squares side by side, [..., keys, 2 * width], as the functions below take them."""
    return torch.cat([v, v.square()], -1)


def rounding_variance(deviation: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The variance of the output where the softmax weights err independently, [..., rows, width].

    It is sum_j d_j^2 (v_j - out)^2 where the rounded weights are summed. Where the exact weights are summed,
    v_j replaces v_j - out; that differs where one key has most of the weight and its own is not rounded to 1,
    as with a stale maximum. The larger counts.

    deviation: d, the root mean square error of each weight, [..., rows, keys]; it is overwritten
    v: `with_squares`; out: the exact output [..., rows, width]
    """
    variance = deviation.square_()
    weighted_v, about_zero = (variance @ v).split(out.shape[-1], -1)
    about_mean = about_zero - 2 * out * weighted_v + out.square() * variance.sum(-1, keepdim=True)
    return torch.maximum(about_zero, about_mean)


def output_variance(v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The variance [..., rows, width] that comes of rounding the output to bf16; LEAST_SIGMA is in it. v:
    `with_squares`"""
    return (UNIT * out).square() + (LEAST_SIGMA * v[..., : out.shape[-1]].abs().amax()).square()


def fp8_variance(
    p: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    fmt: Fp8Format,
    relative: torch.Tensor | float,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared errors, [..., rows, width] each, of a call that rounds the softmax weights to FP8: those of
    independent errors, and those that weights have in common.

    Before they are normalised, weights are in [0, 1] where a kernel does not scale them up. The root mean
    square error of each is a share `relative` of itself, or the format's subnormal step / sqrt(12). Below the
    smallest normal number, many weights may have the same size and so the same error (all those below half of
    the smallest subnormal number become 0): the shift of the output that results is computed, and squared.

    p: weights [..., rows, keys]; v: `with_squares`; hidden: true where a mask hides a key; None: nowhere
    """
    step = p.amax(-1, keepdim=True) * fmt.smallest_subnormal
    deviation = torch.maximum(p * relative, step / 12**0.5)
    if hidden is not None:
        deviation.masked_fill_(hidden, 0.0)
    below = p < step * (fmt.smallest_normal / fmt.smallest_subnormal)
    lost = torch.where(below, (p / step).round_().mul_(step).sub_(p), 0.0)
    shift = lost @ v[..., : out.shape[-1]]
    change = lost.sum(-1, keepdim=True)
    about_mean = (shift - out * change) / (1.0 + change)
    return rounding_variance(deviation, v, out), torch.maximum(shift.square_(), about_mean.square_())


def is_even(p: torch.Tensor, independent: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    """Rows in which no weight is more than EVEN, and in which the common error of the rounded weights is a
    tenth of their sigma at most: bool [..., rows]. independent, common: what `fp8_variance` returned."""
    return (common.mean(-1) < 0.01 * independent.mean(-1)) & (p.amax(-1) < EVEN)
