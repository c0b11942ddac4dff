"""MLA decode, absorbed: one new token per sequence attends to a paged latent KV cache.

    out[b, h] = softmax_j(scale * q[b, h] . kv[j]) . kv[j, :512]     j over the sequence's tokens

All heads of a rank share one cached row of 576 = 512 latent + 64 rope per token; the value is the
latent part. scale = 1/sqrt(192), of the 128 + 64 wide query-key product before absorption
(DeepSeek-V3 technical report, section 2.1.1).
"""

from __future__ import annotations

from typing import ClassVar

from kernels.formats import fp8_format
from kernels.lazy import torch
from kernels.mla_decode.operands import (
    KV_BYTES,
    KV_SCALE,
    LATENT,
    SPARE_PAGES,
    WIDTH,
    MlaDecodeOperands,
    MlaDecodeSizes,
    generate,
)
from kernels.mla_decode.reference import reference
from kernels.op import Op, Tolerance, Work


class MlaDecode(Op):
    name = "mla_decode"
    Sizes = MlaDecodeSizes
    lengths = True
    unsaid = ("model_len",)
    baseline: ClassVar = {"cpu": "torch.sdpa", "cuda": "torch.sdpa", "rocm": "torch.sdpa"}
    engine_like = "triton.split_kv"
    axes = ("sequence", "head", "column")
    fp8_where = "kv"
    operands = staticmethod(generate)
    reference = staticmethod(reference)

    def work(self, sizes: MlaDecodeSizes, boundary: str = "core") -> Work:
        """2 * tokens * heads * (576 + 512) flops; each cached row, q and out moved once. On an FP8 cache a
        kernel may round q and the softmax weights to FP8 and multiply those: FP8 products bound it."""
        flops = 2.0 * sizes.tokens * sizes.heads * (WIDTH + LATENT)
        rows = sizes.batch * sizes.heads
        moved = sizes.tokens * WIDTH * KV_BYTES[sizes.kv] + rows * (WIDTH + LATENT) * 2.0
        return Work(flops, moved, sizes.kv)

    def operand_bytes(self, sizes: MlaDecodeSizes) -> int:
        slots = (sizes.used_pages + SPARE_PAGES) * sizes.page
        return slots * WIDTH * KV_BYTES[sizes.kv] + sizes.batch * sizes.heads * WIDTH * 2

    def output_shape(self, sizes: MlaDecodeSizes) -> tuple[int, ...]:
        return sizes.batch, sizes.heads, LATENT

    def streamed_bytes(self, sizes: MlaDecodeSizes, turns: int = 1) -> int:
        return turns * sizes.tokens * WIDTH * KV_BYTES[sizes.kv]

    def reference_bytes(self, sizes: MlaDecodeSizes) -> int:
        """Three results in fp64; for the longest sequence the cache, values and their squares in fp64, and
        weights."""
        longest = max(sizes.lengths())
        return 3 * 4 * self.output_bytes(sizes) + 8 * longest * (WIDTH + 2 * LATENT + 8 * sizes.heads)

    def empty_operands(self, sizes: MlaDecodeSizes, device: str) -> MlaDecodeOperands:
        lengths = sizes.lengths()
        counts = [-(-n // sizes.page) for n in lengths]
        fp8 = sizes.kv == "fp8"
        kv = fp8_format(sizes.fp8).dtype if fp8 else torch.bfloat16
        return MlaDecodeOperands(
            q=torch.empty(sizes.batch, sizes.heads, WIDTH, dtype=torch.bfloat16, device=device),
            kv=torch.empty(sum(counts) + SPARE_PAGES, sizes.page, WIDTH, dtype=kv, device=device),
            page_table=torch.empty(sizes.batch, max(counts) + 1, dtype=torch.int32, device=device),
            lengths=torch.empty(sizes.batch, dtype=torch.int32, device=device),
            host_lengths=lengths,
            kv_scale=KV_SCALE[sizes.fp8] if fp8 else 1.0,
            sizes=sizes,
        )

    def tolerance(self, sizes: MlaDecodeSizes) -> Tolerance:
        """A kernel with exactly the two roundings of `reference` has a row error of 1 sigma or less. The
        worst rows of 200 random cases: 1.2 for fp32 weights, 1.45 for bf16 ones, 1.6 with bf16 partial
        results too, 1.75 where weights are rounded after they were normalised
        (its right_arithmetic.py). 2 passes those and nothing coarser: weights in fp8 reach 5 times
        the limit, scores in bf16 exceed it where softmax is peaked. Single elements of millions reach 4
        to 5 times their row's error.

        Against sigma_fp8 right calls reach 1.3; a last page that is lost 4 times the limit, a scale of q five
        times too small 9 times, a scale of the cache twice too large 60 times. Over all even rows right calls
        err by 0.56 at most and are 0.6 percent off, e5m2 in place of e4m3 by 0.63 or more, and truncated
        weights make the output 3 percent low (mistakes.py)."""
        return Tolerance(row=2.0, element=10.0, bias=0.0115, noise=0.62)
