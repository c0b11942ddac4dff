"""Reference of an MLA decode, and the error that rounding alone explains (see kernels/attention.py)."""

from __future__ import annotations

from kernels.attention import UNIT, fp8_variance, is_even, rounding_variance, with_squares
from kernels.formats import fp8_format, rounding_deviation
from kernels.lazy import torch
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands
from kernels.op import LEAST_SIGMA, Reference, affordable, spread


def reference(operands: MlaDecodeOperands, max_flops: float = float("inf"), offset: float = 0.0) -> Reference:
    """The reference in fp64, one sequence at a time. Above `max_flops` and MOST_ELEMENTS it takes the
    shortest, the longest, the first and the last sequence and then others at even distances, as many as fit.

    sigma_fp8, where the cache is FP8, is the sigma of a call that rounds q and the softmax weights to FP8.
    The root mean square error of a weight is 2^-4 / sqrt(3) of itself. An error d of q
    (formats.rounding_deviation) moves all of a head's scores together, by d . kv_j, and the output by d . C
    to first order, where C = sum_j p_j kv_j (v_j - out) is the covariance under the weights. It counts twice:
    where two tokens share the weight, a whole row errs by one normal number, which in millions of rows
    reaches 5. First order holds for scores that deviate by up to 8, not by 60.
    """
    o = operands
    rows = _sampled_rows(o, max_flops, offset)
    sequences = range(len(o.host_lengths)) if rows is None else rows
    shape = (len(sequences), o.q.shape[1], LATENT)
    value = torch.empty(shape, dtype=torch.float64, device=o.q.device)
    sigma = torch.empty_like(value)
    if not o.is_fp8:
        sigma_fp8 = even = None
    else:
        sigma_fp8, even = (
            torch.empty_like(value),
            torch.empty(shape[:2], dtype=torch.bool, device=value.device),
        )
    flat = o.kv.view(-1, WIDTH)
    for i, sequence in enumerate(sequences):
        kv = flat[o.token_slots(sequence)].double() * o.kv_scale
        v = with_squares(kv[:, :LATENT])
        scores = o.q[sequence].double() @ kv.T * o.scale
        p = scores.softmax(-1)
        value[i] = p @ v[:, :LATENT]
        # fp32 sums of 576 products of the scores' size err by about sqrt(576) 2^-24 |s|.
        relative = UNIT + 24 * 2.0**-24 * scores.abs()
        variance = rounding_variance(p * relative, v, value[i]) + (UNIT * value[i]) ** 2
        variance += (LEAST_SIGMA * v[:, :LATENT].abs().amax()) ** 2
        sigma[i] = variance.sqrt()
        if sigma_fp8 is not None and even is not None:
            fmt, kv, v, p, out = fp8_format(o.sizes.fp8), kv.float(), v.float(), p.float(), value[i].float()
            deviation = rounding_deviation(o.q[sequence].float() * o.scale, fmt).mul_(2).square_()
            of_weights, together = fp8_variance(p, v, out, fmt, 2**-4 / 3**0.5)
            of_heads = zip(deviation, p, out, strict=True)
            of_q = [through_scores(d, kv, w[:, None] * (v[:, :LATENT] - mean)) for d, w, mean in of_heads]
            apart = of_weights + torch.stack(of_q)
            sigma_fp8[i] = (variance + apart + together).sqrt()
            even[i] = is_even(p, apart, together)
    return Reference(value, sigma, rows, sigma_fp8, even)


def _sampled_rows(o: MlaDecodeOperands, max_flops: float, offset: float) -> list[int] | None:
    lengths, heads = o.host_lengths, o.q.shape[1]

    def flops(row: int) -> float:
        """On an FP8 cache most of them are those of `through_scores`."""
        squares = min(WIDTH * LATENT, lengths[row] * (WIDTH + LATENT)) if o.is_fp8 else 0
        return 2.0 * heads * lengths[row] * (WIDTH + LATENT + squares)

    first = [lengths.index(min(lengths)), lengths.index(max(lengths)), 0, len(lengths) - 1]
    return affordable([*first, *spread(len(lengths), offset)], flops, max_flops, heads * LATENT)


def through_scores(deviation: torch.Tensor, kv: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """sum_i deviation_i (sum_t kv_ti moved_tj)^2 of a head, [512]. It sums over tokens or over kv's columns
    first, whichever is less work.

    deviation: [576]; kv: [tokens, 576]; moved: [tokens, 512], fp32
    """
    tokens, width = kv.shape
    if tokens * (width + moved.shape[1]) > width * moved.shape[1]:
        return deviation @ (kv.T @ moved).square_()
    return (moved * ((kv * deviation @ kv.T) @ moved)).sum(0).clamp_(min=0)
