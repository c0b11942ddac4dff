"""MHA prefill, not absorbed: the new tokens of a batch of sequences attend to all tokens before them.

    out[t, h] = softmax_j(scale * q[t, h] . k[j, h]) . v[j, h]     j over keys 0 .. prefix + i

for the i-th new token of a sequence, which may find `prefix` tokens of it cached. Every query head has a key
and a value head of its own, as kv_b projects them from the latent: q and k are 192 = 128 + 64 (rope) wide, v
is 128. scale = 1/sqrt(192) (DeepSeek-V3 technical report, arXiv:2412.19437, section 2.1.1).

With dtype=fp8, q, k and v are FP8, each with one descale for the whole tensor, by which a stored value is
multiplied. The output is bf16 in both.
"""

from __future__ import annotations

from typing import ClassVar

from kernels.lazy import torch
from kernels.mha_prefill.operands import (
    BYTES,
    GUARD,
    VALUE,
    WIDTH,
    MhaPrefillOperands,
    MhaPrefillSizes,
    empty,
    generate,
)
from kernels.mha_prefill.reference import HEADS, SCORES, reference
from kernels.op import Op, RowGroups, Tolerance, Work, rows_kept


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
        """2 * heads * (192 + 128) flops for each pair of a query and a key that it attends to; q, k, v and
        out moved once. An FP8 kernel may round the softmax weights to FP8: FP8 products bound it."""
        flops = 2.0 * sizes.heads * (WIDTH + VALUE) * sizes.pairs
        moved = self._bytes(sizes, sizes.queries, sizes.keys) + self.output_bytes(sizes)
        return Work(flops, float(moved), sizes.dtype)

    def _bytes(self, sizes: MhaPrefillSizes, queries: int, keys: int) -> int:
        return sizes.heads * (queries * WIDTH + keys * (WIDTH + VALUE)) * BYTES[sizes.dtype]

    def operand_bytes(self, sizes: MhaPrefillSizes) -> int:
        return self._bytes(sizes, sizes.queries + 2 * GUARD, sizes.keys + 2 * GUARD)

    def output_shape(self, sizes: MhaPrefillSizes) -> tuple[int, ...]:
        return sizes.queries, sizes.heads, VALUE

    def streamed_bytes(self, sizes: MhaPrefillSizes, turns: int = 1) -> int:
        return 0

    def turn_bytes(self, sizes: MhaPrefillSizes) -> int:
        """The bytes of a further set in the mode `cold`. The mode `serving` has one set."""
        return self.operand_bytes(sizes)

    def reference_bytes(self, sizes: MhaPrefillSizes) -> int:
        """Two results in fp32, with FP8 operands three; also in fp32, for the longest sequence and some
        heads, keys, values and their squares, twice; scores and what is computed of them."""
        _, longest = sizes.longest
        heads = min(HEADS, sizes.heads)
        keys = 2 * heads * longest * (WIDTH + 2 * VALUE)
        row = sizes.heads * VALUE
        results = (3 if sizes.dtype == "fp8" else 2) * rows_kept(sizes.queries, row) * row
        return 4 * (results + keys + 10 * max(SCORES, heads * longest))

    def empty_operands(self, sizes: MhaPrefillSizes, device: str) -> MhaPrefillOperands:
        return empty(sizes, sizes.lengths(), device)

    def row_groups(self, operands: MhaPrefillOperands) -> RowGroups:
        """The sequence of each token."""
        lengths = torch.tensor([s.new for s in operands.sequences])
        return RowGroups("sequence", torch.arange(len(lengths)).repeat_interleave(lengths)[:, None])

    def tolerance(self, sizes: MhaPrefillSizes) -> Tolerance:
        """The worst rows of random cases, in sigma: 1.3 for a kernel with exactly the two roundings of
        `reference`, 1.9 where weights are rounded after they were normalised, 2.0 where cached and new keys'
        results are rounded to bf16 and then merged (its right_arithmetic.py). 2.5 passes those; a
        row of zeros counted as a key reaches 4 times that, weights in fp8 6 times.

        FP8 operands: 1.2 for operands made bf16, in sigma; 1.2 for weights in FP8, scaled up or not, summed
        before or after rounding, in sigma_fp8. That is about 15 times as large: a wrong descale reaches 8
        times the limit, one key lost or let in 5 times, the scale of the 128 alone 3 times; a row of zeros
        counted as a key, or a scale 5 percent off, does not reach it (mistakes.py). Over all even rows
        right calls err by 0.8 at most and are 0.4 percent off, e5m2 in place of e4m3 by 1.5, and truncated
        weights make the output 3 percent low (mistakes.py)."""
        return Tolerance(row=2.5, element=10.0, bias=0.01, noise=1.1)
