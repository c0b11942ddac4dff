"""MLA decode, absorbed: the last q tokens of each sequence attend to a paged latent KV cache.

    out[b, t, h] = softmax_j(scale * q[b, t, h] . kv[j]) . kv[j, :512]     j = 0 .. length - q + t

q is 1 where a step makes one token of each sequence, and 1 + draft tokens where it verifies drafts. The cache
holds these q tokens too. All heads of a rank share one cached row of 576 = 512 latent + 64 rope values per
token; the latent part is also the value. scale = 1/sqrt(192), from the 128 + 64 columns before absorption."""

from __future__ import annotations

import math
from typing import ClassVar

from kernels import attention
from kernels.formats import fp8_format, rounding_deviation
from kernels.lazy import torch
from kernels.mla_decode.operands import LATENT, WIDTH, MlaDecodeOperands, MlaDecodeSizes, empty, generate
from kernels.op import Op, Reference, Tolerance, Work, affordable, spread


def reference(operands: MlaDecodeOperands, max_flops: float = float("inf"), offset: float = 0.0) -> Reference:
    """The reference in fp64, one sequence at a time. Above `max_flops` or MOST_ELEMENTS it takes the
    shortest, the longest, the first and the last sequence and then others at even distances, as many as fit.

    sigma_fp8 is the sigma of a call that rounds q and the softmax weights to FP8. The root mean square error
    of a weight is 2^-4 / sqrt(3) of the weight. An error d of q (formats.rounding_deviation) changes score j
    of the head by d . kv_j, and so the output, to first order, by d . sum_j p_j kv_j (v_j - out). That holds
    for scores whose standard deviation is up to 8, as those of `generate`, not for 60. d is doubled: where
    two tokens share all the weight, the errors of a row are multiples of one normally distributed number,
    which reaches 5 standard deviations in millions of rows."""
    o = operands
    sampled = _sampled_sequences(o, max_flops, offset)
    sequences = range(len(o.host_lengths)) if sampled is None else sampled
    shape = len(sequences), *o.q.shape[1:3], LATENT
    results = attention.empty_results(shape, torch.float64, o.q.device, o.is_fp8)
    for i, sequence in enumerate(sequences):
        for target, result in zip(results, _attend(o, sequence), strict=True):
            target[i] = result.view_as(target[i])
    value, sigma, *of_fp8 = results  # `of_fp8` is empty, or sigma_fp8 and even
    return Reference(value, sigma, sampled, *of_fp8)


def _attend(o: MlaDecodeOperands, sequence: int) -> tuple[torch.Tensor, ...]:
    """Value and sigma of a sequence [q * heads, 512]; on an FP8 cache also sigma_fp8 and even [q * heads]."""
    q = o.q[sequence].flatten(0, 1)
    kv = o.kv.view(-1, WIDTH)[o.token_slots(sequence)].double() * o.kv_scale
    v = attention.with_squares(kv[:, :LATENT])
    scores = q.double() @ kv.T * o.scale
    hidden = o.hidden(len(kv))
    masked = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    p = masked.softmax(-1)
    value = p @ v[:, :LATENT]
    # The fp32 sum of 576 products that makes a score s errs by about sqrt(576) 2^-24 |s|.
    relative = attention.UNIT + 24 * 2.0**-24 * scores.abs()
    variance = attention.rounding_variance(p * relative, v, value) + attention.output_variance(v, value)
    if not o.is_fp8:
        return value, variance.sqrt()
    fmt = fp8_format(o.sizes.fp8)
    kv, v, p, out = kv.float(), v.float(), p.float(), value.float()  # variances need no fp64
    q_variance = rounding_deviation(q.float() * o.scale, fmt).mul_(2).square_()
    of_weights, common = attention.fp8_variance(p, v, out, fmt, 2**-4 / 3**0.5, hidden)
    of_q = []
    for row in range(len(p)):
        weighted = p[row, :, None] * (v[:, :LATENT] - out[row])
        of_q.append(variance_from_q(q_variance[row], kv, weighted))
    independent = of_weights + torch.stack(of_q)
    sigma_fp8 = (variance + independent + common).sqrt()
    return value, variance.sqrt(), sigma_fp8, attention.is_even(p, independent, common)


def _sampled_sequences(o: MlaDecodeOperands, max_flops: float, offset: float) -> list[int] | None:
    """The sequences that the reference computes, ascending; None for all. They are `Reference.rows`."""
    lengths = o.host_lengths
    query_rows = o.q.shape[1] * o.heads  # of a sequence

    def flops(sequence: int) -> float:
        products = WIDTH + LATENT  # for a query row and a token
        if o.is_fp8:
            products += min(WIDTH * LATENT, lengths[sequence] * (WIDTH + LATENT))  # of `variance_from_q`
        return 2.0 * query_rows * lengths[sequence] * products

    first = [lengths.index(min(lengths)), lengths.index(max(lengths)), 0, len(lengths) - 1]
    return affordable([*first, *spread(len(lengths), offset)], flops, max_flops, query_rows * LATENT)


def variance_from_q(q_variance: torch.Tensor, kv: torch.Tensor, weighted: torch.Tensor) -> torch.Tensor:
    """The variance of a query row's output [512] that errors of q cause by way of the scores: in column j
    sum_i q_variance_i (sum_t kv_ti weighted_tj)^2. With few tokens it takes less work to multiply the square
    out and to sum over i first.

    q_variance: of scale * q, [576]; kv: [tokens, 576]; weighted: p_t (v_t - out), [tokens, 512]; all fp32"""
    tokens, width = kv.shape
    if tokens * (width + weighted.shape[1]) > width * weighted.shape[1]:
        return q_variance @ (kv.T @ weighted).square_()
    of_token_pairs = (kv * q_variance) @ kv.T
    return (weighted * (of_token_pairs @ weighted)).sum(0).clamp_(min=0)


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
        """The rows of the cache, q and the output are moved once. On an FP8 cache a kernel may round q and
        the softmax weights to FP8, so that the peak rate of FP8 products bounds it."""
        flops = 2.0 * sizes.pairs * sizes.heads * (WIDTH + LATENT)
        moved = sizes.tokens * WIDTH * attention.BYTES[sizes.kv] + sizes.rows * (WIDTH + LATENT) * 2.0
        return Work(flops, moved, sizes.kv)

    def operand_bytes(self, sizes: MlaDecodeSizes) -> int:
        slots = sizes.cache_pages * sizes.page
        return slots * WIDTH * attention.BYTES[sizes.kv] + sizes.rows * WIDTH * 2

    def output_shape(self, sizes: MlaDecodeSizes) -> tuple[int, ...]:
        return sizes.batch, sizes.q, sizes.heads, LATENT

    def streamed_bytes(self, sizes: MlaDecodeSizes, turns: int = 1) -> int:
        return turns * sizes.tokens * WIDTH * attention.BYTES[sizes.kv]

    def reference_bytes(self, sizes: MlaDecodeSizes) -> int:
        """In fp64, three results, and for each token of the longest sequence its row of the cache, its value
        and the squares of that, and 8 numbers for each query row."""
        bytes_per_token = 8 * (WIDTH + 2 * LATENT + 8 * sizes.q * sizes.heads)
        return 3 * 8 * math.prod(self.output_shape(sizes)) + max(sizes.lengths()) * bytes_per_token

    def empty_operands(self, sizes: MlaDecodeSizes, device: str) -> MlaDecodeOperands:
        return empty(sizes, sizes.lengths(), device)

    def tolerance(self, sizes: MlaDecodeSizes) -> Tolerance:
        """The worst rows of 200 random cases, in sigma: 1.2 for fp32 weights, 1.45 for bf16 ones, 1.6 with
        bf16 partial results too, 1.75 where weights are rounded after they were normalised
        (tests/kernels/mla_decode/right_arithmetic.py). The limit `row` passes those and nothing coarser:
        weights in fp8 reach 5 times the limit, scores in bf16 exceed it where softmax is peaked. Single
        elements among millions reach 4 to 5 times their row's error (`element`).

        In sigma_fp8, the worst rows of right calls reach 1.3, and those of a call that loses the last page 4
        times the limit. Over all even rows right calls err by 0.56 at most, and calls with e5m2 in place of
        e4m3 by 0.63 or more (`noise`). Outputs of right calls are up to 0.6 percent too large or too small,
        and truncated weights make them 3 percent too small (`bias`; mistakes.py).

        With 2 to 8 query tokens right calls reach 1.45 in bf16 and 1.65 in FP8. Over all even rows they err
        by up to 0.655, because in more cases only the 8 to 12 rows of one short sequence are even."""
        return Tolerance(row=2.0, element=10.0, bias=0.0115, noise=0.62 if sizes.q == 1 else 0.66)
