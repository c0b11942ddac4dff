"""Reference of an MLA decode, and the error that rounding alone explains."""

from __future__ import annotations

from kernels.formats import Fp8Format, fp8_format, rounding_deviation
from kernels.lazy import torch
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, WIDTH
from kernels.op import LEAST_SIGMA, Reference, affordable, spread

EVEN = 0.1
"""The largest weight of rows that are judged together: a heavier weight is 1 before it is normalised, and has
no error."""


def reference(operands: MlaDecodeOperands, max_flops: float = float("inf"), offset: float = 0.0) -> Reference:
    """The reference in fp64, one sequence at a time. Above `max_flops` and MOST_ELEMENTS it takes the
    shortest, the longest, the first and the last sequence and then others at even distances, as many as fit.

    sigma: a right kernel takes exact products of bf16, sums in fp32, and rounds to bf16 twice (relative error
    2^-8 at most, about 2^-9 in root mean square): the softmax weights before the second product, each
    independently, and the output. The first adds 2^-9 * sqrt(sum_j p_j^2 (v_j - out)^2) for each element
    where the rounded weights are summed. Where the exact weights are summed, v_j replaces v_j - out; that
    differs where one token has most of the weight and its own is not rounded to 1, as with a stale maximum.
    The larger counts. The second adds 2^-9 * |out|. The fp32 error of a score of size |s| acts like an error
    of its weight. kernels.op.LEAST_SIGMA is the least.

    sigma_fp8, where the cache is FP8: fp8_variance is added. even: rows in which no weight is more than EVEN,
    and in which the common error of the rounded weights is a tenth of their sigma at most.
    """
    rows = _sampled_rows(operands, max_flops, offset)
    sequences = range(len(operands.host_lengths)) if rows is None else rows
    heads = operands.q.shape[1]
    shape = (len(sequences), heads, LATENT)
    value = torch.empty(shape, dtype=torch.float64, device=operands.q.device)
    sigma = torch.empty_like(value)
    fmt = None if operands.kv.element_size() > 1 else format_of(operands.kv)
    sigma_fp8 = torch.empty_like(value) if fmt else None
    even = torch.empty(shape[:2], dtype=torch.bool, device=value.device) if fmt else None
    flat = operands.kv.view(-1, WIDTH)
    unit = 2.0**-9
    for i, sequence in enumerate(sequences):
        kv = flat[operands.token_slots(sequence)].double() * operands.kv_scale
        v = kv[:, :LATENT]
        scores = operands.q[sequence].double() @ kv.T * operands.scale
        p = scores.softmax(-1)
        value[i] = p @ v
        # fp32 sums of 576 products of the scores' size err by about sqrt(576) 2^-24 |s|.
        relative = unit + 24 * 2.0**-24 * scores.abs()
        weight = (p * relative) ** 2
        about_zero = weight @ v**2
        about_mean = about_zero - 2 * value[i] * (weight @ v) + value[i] ** 2 * weight.sum(-1, keepdim=True)
        variance = torch.maximum(about_zero, about_mean) + (unit * value[i]) ** 2
        variance += (LEAST_SIGMA * v.abs().amax()) ** 2
        sigma[i] = variance.sqrt()
        if fmt and sigma_fp8 is not None and even is not None:
            q = operands.q[sequence].float() * operands.scale
            apart, together = fp8_variance(q, kv, p, value[i], fmt)
            sigma_fp8[i] = (variance + apart + together).sqrt()
            even[i] = (together.mean(-1) < 0.01 * apart.mean(-1)) & (p.amax(-1) < EVEN)
    return Reference(value, sigma, rows, sigma_fp8, even)


def _sampled_rows(operands: MlaDecodeOperands, max_flops: float, offset: float) -> list[int] | None:
    lengths = operands.host_lengths
    is_fp8 = operands.kv.element_size() == 1

    def flops(length: int) -> float:
        """On an FP8 cache most of them are those of `through_scores`."""
        squares = min(WIDTH * LATENT, length * (WIDTH + LATENT)) if is_fp8 else 0
        return 2.0 * operands.q.shape[1] * length * (WIDTH + LATENT + squares)

    first = [lengths.index(min(lengths)), lengths.index(max(lengths)), 0, len(lengths) - 1]
    order = [*first, *spread(len(lengths), offset)]
    return affordable(order, lambda row: flops(lengths[row]), max_flops, operands.q.shape[1] * LATENT)


def format_of(tensor: torch.Tensor) -> Fp8Format:
    """Raises ValueError for a tensor that is not FP8."""
    return fp8_format(str(tensor.dtype).removeprefix("torch.float8_"))


def fp8_variance(
    q: torch.Tensor, kv: torch.Tensor, p: torch.Tensor, out: torch.Tensor, fmt: Fp8Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """The squared errors, [heads, 512] each, that a call adds which rounds q and the softmax weights to FP8:
    those of independent errors, and those that weights have in common.

    q: fp32 [heads, 576], times the softmax scale; kv: [tokens, 576]; p: [heads, tokens]; out: [heads, 512]

    An error d of q (formats.rounding_deviation) moves all of a head's scores together, by d . kv_j, and the
    output by d . C to first order, where C = sum_j p_j kv_j (v_j - out) is the covariance under the weights.
    It counts twice: where two tokens share the weight, a whole row errs by one normal number, which in
    millions of rows reaches 5. First order holds for scores that deviate by up to 8, not by 60.

    Before they are normalised, weights are in [0, 1]. The root mean square error of each is at most
    2^-4 / sqrt(3) of itself, or the format's subnormal step / sqrt(12). It moves the output by the error
    times v_j where unrounded weights are summed, by the error times v_j - out where rounded ones are; the
    larger counts. Below the smallest normal number, beside a largest weight of 1, there may be so many
    weights of one size that their errors do not cancel (below half of the smallest subnormal all vanish).
    This shift of the output is computed, and its square is returned apart.
    """
    kv, p, out = kv.float(), p.float(), out.float()
    v = kv[:, : out.shape[1]]
    deviation = rounding_deviation(q, fmt).mul_(2).square_()
    of_q = torch.stack(
        [through_scores(d, kv, w[:, None] * (v - mean)) for d, w, mean in zip(deviation, p, out, strict=True)]
    )
    step = p.amax(-1, keepdim=True) * fmt.smallest_subnormal
    error = torch.maximum(p * (2**-4 / 3**0.5), step / 12**0.5).square_()
    about_zero = error @ v.square()
    about_mean = about_zero - 2 * out * (error @ v) + out.square() * error.sum(-1, keepdim=True)
    weights = p / p.amax(-1, keepdim=True)
    rounded = (weights / fmt.smallest_subnormal).round_().mul_(fmt.smallest_subnormal)
    together = torch.where(weights < fmt.smallest_normal, rounded - weights, 0.0) * p.amax(-1, keepdim=True)
    shift = together @ v
    change = together.sum(-1, keepdim=True)
    shift_about_mean = (shift - out * change) / (1.0 + change)
    return (
        of_q + torch.maximum(about_zero, about_mean),
        torch.maximum(shift.square_(), shift_about_mean.square_()),
    )


def through_scores(deviation: torch.Tensor, kv: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """sum_i deviation_i (sum_t kv_ti moved_tj)^2 of a head, [512]. It sums over tokens or over kv's columns
    first, whichever is less work.

    deviation: [576]; kv: [tokens, 576]; moved: [tokens, 512], fp32
    """
    tokens, width = kv.shape
    if tokens * (width + moved.shape[1]) > width * moved.shape[1]:
        return deviation @ (kv.T @ moved).square_()
    return (moved * ((kv * deviation @ kv.T) @ moved)).sum(0).clamp_(min=0)
