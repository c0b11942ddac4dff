"""MHA prefill, not absorbed: the new tokens of a batch of sequences attend to all tokens before them.

    out[t, h] = softmax_j(scale * q[t, h] . k[j, h]) . v[j, h]     j over keys 0 .. prefix + i

for the i-th new token of a sequence, of which `prefix` tokens are cached. Every query head has a key and a
value head of its own, as kv_b projects them from the latent: q and k are 192 = 128 + 64 (rope) wide, v is 128
wide. scale = 1/sqrt(192).

With dtype=fp8, q, k and v are FP8, each with one descale for the whole tensor, by which a stored value is to
be multiplied. The output is bf16 with both dtypes."""

from __future__ import annotations

import math
from typing import ClassVar

from kernels import attention
from kernels.formats import fp8_format
from kernels.lazy import torch
from kernels.mha_prefill.operands import (
    GUARD,
    VALUE,
    WIDTH,
    MhaPrefillOperands,
    MhaPrefillSizes,
    empty,
    generate,
)
from kernels.op import Op, Reference, RowGroups, Tolerance, Work, affordable, rows_kept, spread

UNIT_FP8 = 2.0**-5  # relative error of rounding to FP8 with 3 mantissa bits, about, in root mean square
UNIT_SUM = 2.0**-13  # the same for sums in the 14 bits that Hopper's FP8 products keep
HEADS = 16  # heads that the reference computes at once
SCORES = 1 << 22  # scores of these heads that it computes at once
OVERHEAD = 3  # the reference takes so many times as long as its products
TILES = (64, 128, 256)  # numbers of query rows that programs of kernels take


def reference(
    operands: MhaPrefillOperands, max_flops: float = float("inf"), offset: float = 0.0
) -> Reference:
    """The reference in fp32: its products err by about 1e-6 of a score, a thousandth of a sigma. Above
    `max_flops` or MOST_ELEMENTS it takes the first and the last row of every sequence, rows at the edges of
    tiles, and others at even distances, as many as fit.

    FP8 products are exact, too. A kernel that makes FP8 operands bf16 rounds v times its descale; sigma has
    this error, 2^-9 * sqrt(sum_j p_j^2 v_j^2). sigma_fp8 allows sums of 14 bits in the scores and output."""
    o = operands
    q, k, v = o.q, o.k, o.v
    sampled = sampled_rows(o, max_flops, offset)
    rows = torch.arange(len(q)) if sampled is None else torch.tensor(sampled)
    shape = len(rows), q.shape[1], VALUE
    targets = attention.empty_results(shape, torch.float32, q.device, o.is_fp8)
    for sequence in o.sequences:
        in_sequence = (rows >= sequence.queries.start) & (rows < sequence.queries.stop)
        of_sequence = torch.nonzero(in_sequence).flatten()  # indices of `rows` and `targets`
        if not len(of_sequence):
            continue
        for first in range(0, q.shape[1], HEADS):
            heads = slice(first, first + HEADS)
            keys = k[sequence.keys, heads].float().permute(1, 2, 0)
            values = v[sequence.keys, heads].float().mul_(o.value_scale).transpose(0, 1)
            values = attention.with_squares(values)
            for part in of_sequence.split(max(1, SCORES // (keys.shape[0] * sequence.length))):
                position = (rows[part] - sequence.queries.start + sequence.prefix).to(q.device)
                most_seen = int(position[-1]) + 1  # keys that the last of these rows sees
                queries = q[rows[part].to(q.device), heads].float().transpose(0, 1)
                results = _attend(o, queries, keys[..., :most_seen], values[:, :most_seen], position)
                for target, result in zip(targets, results, strict=True):
                    target[part.to(q.device), heads] = result.transpose(0, 1)
    value, sigma, *of_fp8 = targets  # `of_fp8` is empty, or sigma_fp8 and even
    return Reference(value, sigma, sampled, *of_fp8)


def _attend(
    o: MhaPrefillOperands, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Value and sigma of queries of a sequence [heads, n, 128]; with FP8 also sigma_fp8 and even [heads, n].

    q: [heads, n, 192]; k: [heads, 192, keys]; v: `with_squares`, [heads, keys, 256]
    position: the number of each query's own key, int64 [n]"""
    scores = (q @ k).mul_(o.score_scale)
    size = scores.abs()
    hidden = torch.arange(k.shape[-1], device=k.device) > position[:, None]
    p = scores.masked_fill_(hidden, -math.inf).softmax(-1)
    value = p @ v[..., :VALUE]
    rounding = attention.output_variance(v, value)
    # The fp32 sum of 192 products that makes a score s errs by about sqrt(192) 2^-24 |s|.
    in_bf16 = attention.rounding_variance((14 * 2.0**-24 * size + attention.UNIT).mul_(p), v, value)
    if not o.is_fp8:
        return value, (in_bf16 + rounding).sqrt()
    rounding += attention.UNIT**2 * (p.square() @ v[..., VALUE:])
    fmt = fp8_format(o.sizes.fp8)
    relative = size.add_(1.0).mul_(UNIT_SUM).add_(UNIT_FP8)  # in place: `size` is as large as the scores
    independent, common = attention.fp8_variance(p, v, value, fmt, relative, hidden)
    sigma_fp8 = (independent + common + rounding).sqrt()
    return value, (in_bf16 + rounding).sqrt(), sigma_fp8, attention.is_even(p, independent, common)


def sampled_rows(o: MhaPrefillOperands, max_flops: float, offset: float = 0.0) -> list[int] | None:
    """Rows of the output to compute for at most `max_flops`, ascending; None for all."""
    heads = o.q.shape[1]
    # The last product is with the values and their squares.
    flops_per_pair = OVERHEAD * 2 * heads * (WIDTH + VALUE + 2 * VALUE)
    keys_of_rows = [keys for s in o.sequences for keys in range(s.prefix + 1, s.length + 1)]
    ends = [row for s in o.sequences for row in (s.queries.start, s.queries.stop - 1)]
    at_edges = [s.queries.start + row for s in o.sequences for row in attention.edges(s.new, *TILES)]
    order = [*ends, *at_edges, *spread(len(keys_of_rows), offset)]
    return affordable(order, lambda row: keys_of_rows[row] * flops_per_pair, max_flops, heads * VALUE)


class MhaPrefill(Op):
    name = "mha_prefill"
    Sizes = MhaPrefillSizes
    lengths = True
    axes = ("token", "head", "column")
    baseline: ClassVar = {"cpu": "torch.sdpa", "cuda": "torch.sdpa", "rocm": "torch.sdpa"}
    fp8_where = "dtype"
    operands = staticmethod(generate)
    reference = staticmethod(reference)

    def work(self, sizes: MhaPrefillSizes, boundary: str = "core") -> Work:
        """q, k, v and the output are moved once. An FP8 kernel may round the softmax weights to FP8 too, so
        that the peak rate of FP8 products bounds it."""
        flops = 2.0 * sizes.heads * (WIDTH + VALUE) * sizes.pairs
        moved = self._bytes(sizes, sizes.queries, sizes.keys) + self.output_bytes(sizes)
        return Work(flops, float(moved), sizes.dtype)

    def _bytes(self, sizes: MhaPrefillSizes, queries: int, keys: int) -> int:
        return sizes.heads * (queries * WIDTH + keys * (WIDTH + VALUE)) * attention.BYTES[sizes.dtype]

    def operand_bytes(self, sizes: MhaPrefillSizes) -> int:
        return self._bytes(sizes, sizes.queries + 2 * GUARD, sizes.keys + 2 * GUARD)

    def output_shape(self, sizes: MhaPrefillSizes) -> tuple[int, ...]:
        return sizes.queries, sizes.heads, VALUE

    def streamed_bytes(self, sizes: MhaPrefillSizes, turns: int = 1) -> int:
        return 0

    def turn_bytes(self, sizes: MhaPrefillSizes) -> int:
        """The bytes of a further set in the cache mode `cold`. The mode `serving` has one set."""
        return self.operand_bytes(sizes)

    def reference_bytes(self, sizes: MhaPrefillSizes) -> int:
        """Results; keys, values and the squares of these, twice, for HEADS heads of the longest sequence;
        scores and up to nine tensors that are computed from them. All are fp32."""
        heads = min(HEADS, sizes.heads)
        keys_and_values = 2 * heads * sizes.most_keys * (WIDTH + 2 * VALUE)
        row_width = sizes.heads * VALUE
        results = (3 if sizes.dtype == "fp8" else 2) * rows_kept(sizes.queries, row_width) * row_width
        return 4 * (results + keys_and_values + 10 * max(SCORES, heads * sizes.most_keys))

    def empty_operands(self, sizes: MhaPrefillSizes, device: str) -> MhaPrefillOperands:
        return empty(sizes, sizes.lengths(), device)

    def row_groups(self, operands: MhaPrefillOperands) -> RowGroups:
        new = torch.tensor([s.new for s in operands.sequences])
        return RowGroups("sequence", torch.arange(len(new)).repeat_interleave(new)[:, None])

    def tolerance(self, sizes: MhaPrefillSizes) -> Tolerance:
        """The worst rows of random cases, in sigma: 1.3 for a kernel that rounds only twice, 1.9 where
        weights are rounded after they were normalised, 2.0 where cached and new keys' results are rounded to
        bf16 and then merged (tests/kernels/mha_prefill/right_arithmetic.py). A limit of 2.5 passes those; a
        row of zeros counted as a key reaches 4 times the limit, weights in fp8 reach 6 times.

        With FP8 operands the worst rows reach 1.2 in sigma if a call makes the operands bf16, and 1.2 in
        sigma_fp8 if it rounds weights to FP8. sigma_fp8 is about 15 times as large as sigma: a wrong descale
        reaches 8 times the limit, and one key lost or let in 5 times, but a row of zeros counted as a key, or
        a scale that is 5 percent wrong, stays below it. Over all even rows right calls err by 0.8 at most,
        and their outputs are up to 0.4 percent too large or too small; calls with e5m2 in place of e4m3 err
        by 1.5, and truncated weights make the output 3 percent too small (mistakes.py)."""
        return Tolerance(row=2.5, element=10.0, bias=0.01, noise=1.1)
