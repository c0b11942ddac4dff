"""MLA decode, absorbed: the last q tokens of each sequence attend to a paged latent KV cache.

    out[b, t, h] = softmax_j(scale * q[b, t, h] . kv[j]) . kv[j, :512]     j = 0 .. length - q + t

q is 1 where a step makes one token a sequence, and 1 + draft tokens where it verifies drafts. The cache holds
these q tokens too. All heads of a rank share one cached row of 576 = 512 latent + 64 rope per token; the
value is the latent part. scale = 1/sqrt(192), of the 128 + 64 wide query-key product before absorption
(DeepSeek-V3 technical report, section 2.1.1).
"""

from __future__ import annotations

import math
from typing import ClassVar

from kernels import attention
from kernels.formats import fp8_format, rounding_deviation
from kernels.lazy import torch
from kernels.mla_decode.operands import (
    LATENT,
    SPARE_PAGES,
    WIDTH,
    MlaDecodeOperands,
    MlaDecodeSizes,
    empty,
    generate,
)
from kernels.op import Op, Reference, Tolerance, Work, affordable, spread


def reference(operands: MlaDecodeOperands, max_flops: float = float("inf"), offset: float = 0.0) -> Reference:
    """The reference in fp64, one sequence at a time. Above `max_flops` or MOST_ELEMENTS it takes the
    shortest, the longest, the first and the last sequence and then others at even distances, as many as fit.

    sigma_fp8 is that of a call that rounds q and the softmax weights to FP8. The root mean square error of a
    weight is 2^-4 / sqrt(3) of itself. An error d of q (formats.rounding_deviation) changes score j of the
    head by d . kv_j, and so the output by d . C to first order, where C = sum_j p_j kv_j (v_j - out) is the
    covariance under the weights. d is doubled, because two tokens that share the weight give a row errors
    that are multiples of one normally distributed number, which reaches 5 standard deviations in millions of
    rows. First order holds for scores that deviate by up to 8, not by 60.
    """
    o = operands
    rows = _sampled_rows(o, max_flops, offset)
    sequences = range(len(o.host_lengths)) if rows is None else rows
    shape = len(sequences), *o.q.shape[1:3], LATENT
    results = attention.empty_results(shape, torch.float64, o.q.device, o.is_fp8)
    for i, sequence in enumerate(sequences):
        for target, result in zip(results, _attend(o, sequence), strict=True):
            target[i] = result.view_as(target[i])
    value, sigma, *of_fp8 = results
    return Reference(value, sigma, rows, *of_fp8)


def _attend(o: MlaDecodeOperands, sequence: int) -> tuple[torch.Tensor, ...]:
    """Value, sigma and, on an FP8 cache, sigma_fp8 of a sequence, [q * heads, 512] each, and even [q *
    heads]."""
    q = o.q[sequence].flatten(0, 1)
    kv = o.kv.view(-1, WIDTH)[o.token_slots(sequence)].double() * o.kv_scale
    v = attention.with_squares(kv[:, :LATENT])
    scores = q.double() @ kv.T * o.scale
    hidden = o.hidden(len(kv))
    seen = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    p = seen.softmax(-1)
    value = p @ v[:, :LATENT]
    # fp32 sums of 576 products of the scores' size err by about sqrt(576) 2^-24 |s|.
    relative = attention.UNIT + 24 * 2.0**-24 * scores.abs()
    variance = attention.rounding_variance(p * relative, v, value) + attention.output_variance(v, value)
    if not o.is_fp8:
        return value, variance.sqrt()
    fmt = fp8_format(o.sizes.fp8)
    kv = kv.float()
    v = v.float()
    p = p.float()
    out = value.float()
    deviation = rounding_deviation(q.float() * o.scale, fmt).mul_(2).square_()
    of_weights, common = attention.fp8_variance(p, v, out, fmt, 2**-4 / 3**0.5, hidden)
    of_q = []
    for row in range(len(p)):
        moved = p[row, :, None] * (v[:, :LATENT] - out[row])
        of_q.append(through_scores(deviation[row], kv, moved))
    independent = of_weights + torch.stack(of_q)
    sigma_fp8 = (variance + independent + common).sqrt()
    return value, variance.sqrt(), sigma_fp8, attention.is_even(p, independent, common)


def _sampled_rows(o: MlaDecodeOperands, max_flops: float, offset: float) -> list[int] | None:
    lengths = o.host_lengths
    rows = o.q[0, ..., 0].numel()  # of a sequence: query tokens * heads

    def flops(sequence: int) -> float:
        """On an FP8 cache `through_scores` takes most of them."""
        squares = min(WIDTH * LATENT, lengths[sequence] * (WIDTH + LATENT)) if o.is_fp8 else 0
        return 2.0 * rows * lengths[sequence] * (WIDTH + LATENT + squares)

    first = [lengths.index(min(lengths)), lengths.index(max(lengths)), 0, len(lengths) - 1]
    return affordable([*first, *spread(len(lengths), offset)], flops, max_flops, rows * LATENT)


def through_scores(deviation: torch.Tensor, kv: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """sum_i deviation_i (sum_t kv_ti moved_tj)^2 of a query row, [512]. It sums over tokens or over kv's
    columns first, whichever is less work.

    deviation: [576]; kv: [tokens, 576]; moved: [tokens, 512], fp32
    """
    tokens, width = kv.shape
    if tokens * (width + moved.shape[1]) > width * moved.shape[1]:
        return deviation @ (kv.T @ moved).square_()
    return (moved * ((kv * deviation @ kv.T) @ moved)).sum(0).clamp_(min=0)


class MlaDecode(Op):
    name = "mla_decode"
    Sizes = MlaDecodeSizes
    lengths = True
    unsaid = ("model_len", "q")
    baseline: ClassVar = {"cpu": "torch.sdpa", "cuda": "torch.sdpa", "rocm": "torch.sdpa"}
    engine_like = "triton.split_kv"
    axes = ("sequence", "query token", "head", "column")
    fp8_where = "kv"
    operands = staticmethod(generate)
    reference = staticmethod(reference)

    def work(self, sizes: MlaDecodeSizes, boundary: str = "core") -> Work:
        """Each cached row, q and out are moved once. On an FP8 cache a kernel may round q and the softmax
        weights to FP8, so that FP8 products bound it."""
        flops = 2.0 * sizes.scored * sizes.heads * (WIDTH + LATENT)
        moved = sizes.tokens * WIDTH * attention.BYTES[sizes.kv] + sizes.rows * (WIDTH + LATENT) * 2.0
        return Work(flops, moved, sizes.kv)

    def operand_bytes(self, sizes: MlaDecodeSizes) -> int:
        slots = (sizes.used_pages + SPARE_PAGES) * sizes.page
        return slots * WIDTH * attention.BYTES[sizes.kv] + sizes.rows * WIDTH * 2

    def output_shape(self, sizes: MlaDecodeSizes) -> tuple[int, ...]:
        return sizes.batch, sizes.q, sizes.heads, LATENT

    def streamed_bytes(self, sizes: MlaDecodeSizes, turns: int = 1) -> int:
        return turns * sizes.tokens * WIDTH * attention.BYTES[sizes.kv]

    def reference_bytes(self, sizes: MlaDecodeSizes) -> int:
        """Three results in fp64; for the longest sequence the cache, values and their squares in fp64, and
        weights."""
        of_token = 8 * (WIDTH + 2 * LATENT + 8 * sizes.q * sizes.heads)
        return 3 * 4 * self.output_bytes(sizes) + max(sizes.lengths()) * of_token

    def empty_operands(self, sizes: MlaDecodeSizes, device: str) -> MlaDecodeOperands:
        return empty(sizes, sizes.lengths(), device)

    def tolerance(self, sizes: MlaDecodeSizes) -> Tolerance:
        """The worst rows of 200 random cases, in sigma: 1.2 for fp32 weights, 1.45 for bf16 ones, 1.6 with
        bf16 partial results too, 1.75 where weights are rounded after they were normalised
        (tests/kernels/mla_decode/right_arithmetic.py). 2 passes those and nothing coarser: weights in fp8
        reach 5 times the limit, scores in bf16 exceed it where softmax is peaked. Single elements of millions
        reach 4 to 5 times their row's error.

        Against sigma_fp8 right calls reach 1.3; a last page that is lost 4 times the limit. Over all even
        rows right calls err by 0.56 at most and are 0.6 percent off, e5m2 in place of e4m3 by 0.63 or more,
        and truncated weights make the output 3 percent low (mistakes.py).

        With 2 to 8 query tokens right calls reach 1.45 in bf16 and 1.65 in FP8. More cases then have only
        8 to 12 even rows, of one short sequence; over those right calls err by up to 0.655."""
        return Tolerance(row=2.0, element=10.0, bias=0.0115, noise=0.62 if sizes.q == 1 else 0.66)
