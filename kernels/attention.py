"""What the attention ops share: checks of sizes, arguments by name, and the error that rounding explains.

`Reference.sigma` follows from what a right kernel does. It takes exact products of bf16, sums them in fp32,
and rounds to bf16 twice, with a relative error of at most 2^-8, in root mean square about 2^-9: it rounds the
softmax weights before the second product, each independently (`rounding_variance`), and the output
(`output_variance`). The fp32 error of a score makes a relative error of its weight, which is added to that of
rounding. For `Reference.sigma_fp8` the weights are rounded to FP8 instead (`fp8_variance`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.binding import Function
from kernels.formats import Fp8Format, fp8_format
from kernels.lazy import torch

BYTES = {"bf16": 2, "fp8": 1}
"""Bytes of a value of the cache, or of q, k and v, by dtype."""

UNIT = 2.0**-9
"""About the root mean square of the relative error of rounding to bf16."""

# The softmax scale, of the 128 + 64 wide query-key product (DeepSeek-V3 technical report, section 2.1.1).
SCALE = 192**-0.5

SHIFT = 120.0
"""Adversarial operands add it to the scores of some heads, and subtract it from those of others."""

LEAST_SIGMA = 2.0**-63
"""The least sigma, in units of the largest value. Its square is fp32's smallest normal number, 2^-126. It is
for rows in which one key has all the weight and a value of 0. Then only the other keys make the output, and
their weights underflow: some implementations of the exponential return 2^-126 for them, others 0."""

EVEN = 0.1
"""The most that a softmax weight may be in rows of `Reference.even`. Kernels round weights before they
normalise them. The largest is exactly 1 then and gets no error, so a row made mostly of it errs less."""


def check_sizes(op: str, sizes: Any, counts: tuple[str, ...], dtype: str) -> None:
    """Raises ValueError for a count below 1, a dtype other than those of BYTES, and an unknown FP8 format.
    counts, dtype: the names of the sizes that are counts, and of the one that is a dtype"""
    for name in counts:
        if getattr(sizes, name) < 1:
            raise ValueError(f"size {name}={getattr(sizes, name)} of {op} must be at least 1")
    if getattr(sizes, dtype) not in BYTES:
        raise ValueError(f"size {dtype}={getattr(sizes, dtype)!r} of {op} must be {' or '.join(BYTES)}")
    fp8_format(sizes.fp8)


def arguments_of(function: Function, values: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of a library's function that it needs or may take, by name. Libraries name the same
    argument differently: a key of `values` holds all names of it, separated by spaces."""
    by_name = {name: value for names, value in values.items() for name in names.split()}
    return {name: by_name[name] for name in (*function.needs, *function.wishes) if name in by_name}


def shift_scores(q: torch.Tensor, keys: torch.Tensor, channels: list[int], of_keys: float) -> None:
    """Adds about SHIFT to all scores of heads 0, 4, 8 ... and subtracts it from those of heads 3, 7, 11 ...
    (with three heads or fewer, of all but the first). It sets these channels of all keys [..., width] to the
    value `of_keys`, and those of q [rows, heads, width] to values whose products with it make SHIFT."""
    lowered_heads = slice(3, None, 4) if q.shape[1] > 3 else slice(1, None)
    of_raised_heads = SHIFT / SCALE / len(channels) / of_keys
    keys[..., channels] = of_keys
    q[..., channels] = 0.0
    q[:, ::4, channels] = of_raised_heads
    q[:, lowered_heads, channels] = -of_raised_heads


def edges(length: int, *tiles: int) -> list[int]:
    """Indices below `length`, ascending, at which kernels that tile the length go wrong: for each size of
    `tiles` where the second and the last tile begin, where the second half begins, and one before each."""
    begins = {-(-length // 2)}
    for tile in tiles:
        begins |= {tile, (length - 1) // tile * tile}
    around = begins | {begin - 1 for begin in begins}
    return sorted(index for index in around if 0 <= index < length)


def empty_results(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fp8: bool
) -> list[torch.Tensor]:
    """Room for a reference's value and sigma, and where operands are FP8, for its sigma_fp8 and even."""
    results = [torch.empty(shape, dtype=dtype, device=device) for _ in range(3 if fp8 else 2)]
    return [*results, torch.empty(shape[:-1], dtype=torch.bool, device=device)] if fp8 else results


def with_squares(v: torch.Tensor) -> torch.Tensor:
    """v [..., keys, width] and its squares side by side, [..., keys, 2 * width], for the functions below."""
    return torch.cat([v, v.square()], -1)


def rounding_variance(deviation: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The variance of the output where the softmax weights have independent errors, [..., rows, width].

    A kernel divides by the sum of its weights. If it sums the rounded weights, the variance is
    sum_j d_j^2 (v_j - out)^2; if it sums the exact ones, it is sum_j d_j^2 v_j^2. The two differ where one
    key has most of the weight and it is not rounded to 1, as with a stale maximum. The larger is returned.

    deviation: d, the root mean square error of each weight, [..., rows, keys]; it is overwritten
    v:         what `with_squares` returned
    out:       the exact output [..., rows, width]
    """
    variance = deviation.square_()
    weighted_v, about_zero = (variance @ v).split(out.shape[-1], -1)
    about_mean = about_zero - 2 * out * weighted_v + out.square() * variance.sum(-1, keepdim=True)
    return torch.maximum(about_zero, about_mean)


def output_variance(v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The variance [..., rows, width] of rounding to bf16, plus LEAST_SIGMA^2. v: from `with_squares`"""
    return (UNIT * out).square() + (LEAST_SIGMA * v[..., : out.shape[-1]].abs().amax()).square()


def fp8_variance(
    p: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    fmt: Fp8Format,
    relative: torch.Tensor | float,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two squared errors of the output, [..., rows, width] each, of a call that rounds the softmax weights to
    FP8: that of independent errors of the weights, and that of the errors which many weights have in common.

    Before they are normalised, weights are in [0, 1] where a kernel does not scale them up. The root mean
    square error of each is a share `relative` of itself, but at least the format's subnormal step / sqrt(12).
    Below the smallest normal number, many weights may have the same size and so the same error: all those
    below half of the smallest subnormal number become 0. The resulting shift of the output is computed.

    p:      exact weights [..., rows, keys], normalised
    v:      what `with_squares` returned
    out:    the exact output [..., rows, width]
    hidden: bool [..., rows, keys], true where a mask hides a key; None: nowhere
    """
    step = p.amax(-1, keepdim=True) * fmt.smallest_subnormal
    deviation = torch.maximum(p * relative, step / 12**0.5)
    if hidden is not None:
        deviation.masked_fill_(hidden, 0.0)
    is_subnormal = p < step * (fmt.smallest_normal / fmt.smallest_subnormal)
    error = torch.where(is_subnormal, (p / step).round_().mul_(step).sub_(p), 0.0)
    # As in `rounding_variance`: the shift where the exact weights are summed, and where the rounded ones are.
    shift = error @ v[..., : out.shape[-1]]
    sum_of_errors = error.sum(-1, keepdim=True)
    about_mean = (shift - out * sum_of_errors) / (1.0 + sum_of_errors)
    return rounding_variance(deviation, v, out), torch.maximum(shift.square_(), about_mean.square_())


def is_even(p: torch.Tensor, independent: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    """`Reference.even`, bool [..., rows]: each weight of p [..., rows, keys] is less than EVEN, and the
    common error is less than a tenth of the independent one. Both are squares, from `fp8_variance`."""
    return (common.mean(-1) < 0.01 * independent.mean(-1)) & (p.amax(-1) < EVEN)
