"""Block-scale GEMM in plain torch: right in the ways of its libraries, wrong in many.

A right kernel's `source` is the file whose arithmetic it follows; "assumed" where that is closed or unread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from harness.prove.arithmetic import (
    Round,
    away,
    bf16,
    exact,
    flushed,
    fourteen_bits,
    fp8_truncated,
    fp16,
    kept,
    truncated,
)
from harness.prove.planted import Compute, Planted
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.formats import BLOCK, Fp8Format, block_scale, fp8_format, quantise_activations

SIZES = {
    "small": "m=9 n=600 k=640",
    "small fnuz": "m=9 n=300 k=600 fp8=e4m3fnuz",
    "small ue8m0": "m=9 n=300 k=640 scales=ue8m0",
    "qkv_a, 1 token": "m=1 n=576 k=7168",
    "qkv_a": "m=64 n=2112 k=7168",
    "o_proj": "m=5 n=1792 k=2048",
}


# The steps

Quantised = tuple[torch.Tensor, torch.Tensor]
"""Codes as fp32 [M, K], and their scales [M, blocks]."""


def format_of(o: BlockScaleGemmOperands) -> Fp8Format:
    return fp8_format(str(o.b_q.dtype).removeprefix("torch.float8_"))


def suites_own(o: BlockScaleGemmOperands) -> Quantised:
    """As the suite quantises."""
    assert o.a is not None
    q, scale = quantise_activations(o.a, format_of(o), o.scales)
    return q.float(), scale


def unquantised(o: BlockScaleGemmOperands) -> Quantised:
    """bf16 values with scales of 1."""
    assert o.a is not None
    return o.a.float(), torch.ones(o.m, o.b_scale.shape[1])


@dataclass(frozen=True)
class Way:
    """How a kernel multiplies, block of K by block.

    step:      products that are summed before `inner` rounds their sum
    inner:     how a sum within a block is rounded after each step
    one_by_one: a block's sum is multiplied by each scale, not by the product of both
    total:     how the sum over blocks is rounded after each
    parts:     of K, of whole blocks, each summed by itself
    partial:   how a part's sum is rounded
    summed:    how the sum of parts is rounded after each
    wide:      operands are dequantised first, and how they are rounded then: a's and b's
    backwards: the last block comes first
    """

    step: int = BLOCK
    inner: Round = exact
    one_by_one: bool = False
    total: Round = exact
    parts: int = 1
    partial: Round = exact
    summed: Round = exact
    wide: tuple[Round, Round] | None = None
    backwards: bool = False


W = Way
PLAIN = Way()


@dataclass(frozen=True)
class OutputTile:
    """Some rows of the output over some columns; a, a_scale: what products read of all rows, fp32."""

    o: BlockScaleGemmOperands
    a: torch.Tensor
    a_scale: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    @property
    def blocks(self) -> int:
        return self.o.b_scale.shape[1]

    @property
    def middle(self) -> int:
        """Of K, where bugs strike that strike one block."""
        return self.blocks // 2

    @property
    def fmt(self) -> Fp8Format:
        return format_of(self.o)

    @cached_property
    def b(self) -> torch.Tensor:
        """Codes [columns, K], fp32."""
        return self.codes(self.columns)

    def codes(self, columns: torch.Tensor) -> torch.Tensor:
        return self.o.b_q.view(torch.uint8)[columns % len(self.o.b_q)].view(self.o.b_q.dtype).float()

    @property
    def mine(self) -> Quantised:
        """a and its scales in these rows, copies."""
        return self.a[self.rows], self.a_scale[self.rows]

    @property
    def n_blocks(self) -> torch.Tensor:
        return self.columns // BLOCK

    @property
    def b_scale(self) -> torch.Tensor:
        """[columns, blocks], a copy."""
        return self.o.b_scale[self.n_blocks]

    def multiply(self, way: Way = PLAIN, **other: torch.Tensor | None) -> torch.Tensor:
        """Right, unless it is given other operands (see `terms`)."""
        return summed(self.terms(way, **other), way)

    def terms(
        self,
        way: Way = PLAIN,
        *,
        a: torch.Tensor | None = None,
        a_scale: torch.Tensor | None = None,
        b: torch.Tensor | None = None,
        b_scale: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """What each block of K gives."""
        a = self.a[self.rows] if a is None else a
        a_scale = self.a_scale[self.rows] if a_scale is None else a_scale
        b = self.b if b is None else b
        b_scale = self.b_scale if b_scale is None else b_scale
        products = []
        for k, (x, w) in enumerate(zip(a.split(BLOCK, 1), b.split(BLOCK, 1), strict=True)):
            of_a, of_b = a_scale[:, k, None], b_scale[None, :, k]
            if way.wide:
                products.append(way.wide[0](x * of_a) @ way.wide[1](w * of_b.T).T)
                continue
            dot = torch.zeros(len(x), len(w))
            for some, others in zip(x.split(way.step, 1), w.split(way.step, 1), strict=True):
                dot = way.inner(dot + some @ others.T)
            products.append(dot * of_a * of_b if way.one_by_one else dot * (of_a * of_b))
        return products


def summed(terms: list[torch.Tensor], way: Way = PLAIN) -> torch.Tensor:
    each = math.ceil(len(terms) / way.parts)
    result = torch.zeros_like(terms[0])
    for first in range(0, len(terms), each):
        total = torch.zeros_like(result)
        some = terms[first : first + each]
        for term in reversed(some) if way.backwards else some:
            total = way.total(total + term)
        result = way.summed(result + way.partial(total))
    return result


Quantiser = Callable[[BlockScaleGemmOperands], Quantised]
Variant = Callable[[OutputTile], torch.Tensor]


def read(o: BlockScaleGemmOperands, quantiser: Quantiser | None = None) -> Quantised:
    if o.a is None:
        return o.a_q.float(), o.a_scale
    return quantiser(o) if quantiser else unquantised(o)


def every(variant: Variant, quantiser: Quantiser | None = None, output: Round = bf16) -> Compute:
    def compute(o: BlockScaleGemmOperands, right: torch.Tensor) -> torch.Tensor:
        m, n = right.shape
        part = OutputTile(o, *read(o, quantiser), torch.arange(m), torch.arange(n))
        return output(variant(part)).to(right.dtype)

    return compute


def victim(o: BlockScaleGemmOperands) -> int:
    """A flat row, which hears the landmarks if operands are adversarial."""
    return 4 if o.m > 4 else 0


def in_one_place(
    variant: Variant, quantiser: Quantiser | None = None, last: bool = False, row: int | None = None
) -> Compute:
    """An output that is wrong in one row of one block of N, the second or the last."""

    def compute(o: BlockScaleGemmOperands, right: torch.Tensor) -> torch.Tensor:
        out, at = right.clone(), victim(o) if row is None else row
        n = len(o.b_q)
        block = (n - 1) // BLOCK if last else min(1, (n - 1) // BLOCK)
        columns = torch.arange(block * BLOCK, min(n, (block + 1) * BLOCK))
        part = OutputTile(o, *read(o, quantiser), torch.tensor([at]), columns)
        out[at, columns] = variant(part)[0].to(out.dtype)
        return out

    return compute


# Right


def by(**way: Any) -> Variant:
    return lambda part: part.multiply(Way(**way))


def atomically(part: OutputTile, parts: int) -> torch.Tensor:
    """Each part's sum is bf16, and is added to an output in bf16."""
    return part.multiply(Way(parts=parts, partial=bf16, summed=bf16))


def whole_k(part: OutputTile) -> torch.Tensor:
    """One product of operands that were dequantised."""
    a, a_scale = part.mine
    k = a.shape[1]
    a = bf16(a * a_scale.repeat_interleave(BLOCK, 1)[:, :k])
    return a @ bf16(part.b * part.b_scale.repeat_interleave(BLOCK, 1)[:, :k]).T


AITER = "AITER e404860"

RIGHT: tuple[tuple[str, Variant, str], ...] = (
    ("fp32", by(), "torch.naive: kernels/block_scale_gemm/providers/torch_eager.py"),
    ("scales one by one", by(one_by_one=True), "vllm.triton: _w8a8_triton_block_scaled_mm, fp8_utils.py"),
    (
        "sums of 14 bits, promoted each block",
        by(step=32, inner=fourteen_bits),
        "deepgemm: deep_gemm/include/deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh, DeepGEMM 2.1 (excerpt read)",
    ),
    (
        "sums of 14 bits, scales one by one",
        by(step=32, inner=fourteen_bits, one_by_one=True),
        "deepgemm: deep_gemm/include/deep_gemm/impls/sm90_fp8_gemm_1d1d.cuh, DeepGEMM 2.1 (excerpt read)",
    ),
    (
        "sums of 13 bits",
        by(step=32, inner=partial(kept, 13)),
        "assumed: a Hopper bit fewer than DeepSeek-V3's technical report says",
    ),
    (
        "sums of 14 bits, 3 parts",
        by(step=32, inner=fourteen_bits, parts=3),
        "vllm.cutlass on sm_90: sm90_mma_tma_gmma_ss_warpspecialized_fp8_blockwise_scaling.hpp, CUTLASS "
        "(excerpt read), with stream K assumed",
    ),
    (
        "sums of 14 bits, steps of 64",
        by(step=64, inner=fourteen_bits),
        "assumed: FBGEMM's f8f8bf16_blockwise, fbgemm_gpu/experimental/gen_ai",
    ),
    (
        "steps of 32 in fp32, one scale by the other",
        by(step=32),
        "deepgemm on sm_100: sm100_fp8_gemm_1d1d.cuh (assumed)",
    ),
    ("steps of 16", by(step=16), f"aiter.ck: 16x16x32 MFMA of gfx942, csrc/ck_gemm_a8w8_blockscale, {AITER}"),
    (
        "steps of 64, scales one by one",
        by(step=64, one_by_one=True),
        f"aiter.triton: aiter/ops/triton/_triton_kernels/gemm/basic/gemm_a8w8_blockscale.py, {AITER}",
    ),
    (
        "4 parts in fp32",
        by(parts=4),
        "aiter.triton: _gemm_a8w8_blockscale_reduce_kernel (read), y_pp in fp32",
    ),
    (
        "8 parts in bf16",
        by(parts=8, partial=bf16, one_by_one=True),
        "aiter.triton with _USE_GEMM_SPLITK_BF16: y_pp in bf16 (read), summed in fp32",
    ),
    ("16 parts in fp32", by(parts=16), "triton.split_k: kernels/block_scale_gemm/triton/split_k_jit.py"),
    ("a part per block", by(parts=1 << 10), "triton.split_k: kernels/block_scale_gemm/triton/split_k_jit.py"),
    (
        "2 parts added in bf16",
        partial(atomically, parts=2),
        f"aiter.ck with split K: csrc/ck_gemm_a8w8_blockscale (KBatch, assumed), {AITER}",
    ),
    ("the last block first", by(backwards=True), "assumed: an order of its own"),
    ("2 parts, the last block first", by(parts=2, backwards=True), f"aiter.asm (compiled, assumed), {AITER}"),
    (
        "subnormal sums flushed",
        by(step=16, inner=flushed, total=flushed),
        f"-fgpu-flush-denormals-to-zero in aiter/jit/core.py, {AITER}",
    ),
    (
        "weights in bf16, activations exact",
        by(wide=(exact, bf16)),
        "assumed: activations in fp32, weights dequantised",
    ),
    (
        "both in bf16",
        whole_k,
        "torch.bf16, hipblaslt.dequantised: kernels/block_scale_gemm/providers/torch_eager.py",
    ),
    (
        "both in bf16, 4 parts in bf16",
        by(wide=(bf16, bf16), parts=4, partial=bf16),
        "cuBLAS with allow_bf16_reduced_precision_reduction, torch's default (assumed)",
    ),
    (
        "both in bf16, 2 parts added in bf16",
        by(wide=(bf16, bf16), parts=2, partial=bf16, summed=bf16),
        "assumed: a split K of hipBLASLt",
    ),
    ("both in bf16, ties away", by(wide=(away, away)), "assumed: v_cvt by hand on gfx942"),
    (
        "torch._scaled_mm: fp32, steps of 32",
        by(step=32, one_by_one=True),
        "cublaslt: aten/src/ATen/native/cuda/ScaledBlas.cpp; cuBLASLt is closed (assumed)",
    ),
    (
        "steps of 32, 2 parts",
        by(step=32, parts=2, one_by_one=True),
        "flashinfer.cutlass: csrc/gemm_groupwise_sm100.cu, flashinfer 0.6.18 (arithmetic assumed)",
    ),
    (
        "steps of 32, 7 parts",
        by(step=32, parts=7),
        "flashinfer.trtllm: csrc/trtllm_gemm_runner.cu, flashinfer 0.6.18 (compiled, assumed)",
    ),
    (
        "steps of 128 in tiles, backwards",
        by(step=128, backwards=True, one_by_one=True),
        "flashinfer.cutile: gemm_fp8_nt_groupwise_cutile.py, flashinfer 0.7.2.post1 (assumed)",
    ),
    (
        "14 bits, swapped operands",
        by(step=32, inner=fourteen_bits, parts=2),
        "flashinfer.sm90: csrc/nv_internal/tensorrt_llm/deep_gemm/fp8_gemm.cuh, flashinfer 0.6.18 (assumed)",
    ),
)

RIGHT_W8A16: tuple[tuple[str, Variant, str], ...] = (
    ("weights in bf16", whole_k, "torch.bf16: kernels/block_scale_gemm/providers/torch_eager.py"),
    ("weights in bf16, by blocks", by(wide=(bf16, bf16)), "vllm.amx: csrc/cpu/sgl-kernels/gemm_fp8.cpp"),
    (
        "weights scaled after the product",
        by(),
        f"gemm_a16w8_blockscale: aiter/ops/triton/gemm/basic/gemm_a16w8_blockscale.py, {AITER} (excerpt)",
    ),
    ("weights in bf16, 4 parts in bf16", by(wide=(bf16, bf16), parts=4, partial=bf16), "cuBLAS (assumed)"),
    ("weights in bf16, 8 parts in fp32", by(wide=(bf16, bf16), parts=8), "assumed: Marlin's split K"),
)


# Quantisers


def blocks_of(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """[M, blocks, 128], zeros past the end of K."""
    return torch.nn.functional.pad(x.float(), (0, -x.shape[1] % block)).unflatten(1, (-1, block))


def quantised(
    o: BlockScaleGemmOperands,
    *,
    floor: float = 0.0,
    scales: str = "",
    largest: float = 0.0,
    inverse: bool = False,
    of_scale: Round = exact,
    rounding: Round | None = None,
    amax: Callable[[torch.Tensor], torch.Tensor] | None = None,
    factor: float = 1.0,
    stored: Callable[[torch.Tensor], torch.Tensor] | None = None,
    clamps: bool = True,
) -> Quantised:
    """A quantiser of its own.

    floor:    of a block's largest magnitude
    largest:  what that becomes: the format's largest value but for libraries that take another
    inverse:  x times 1/scale
    of_scale: how a scale is rounded
    rounding: to codes
    amax:     of [M, blocks, 128], where it is another than the largest magnitude
    factor:   on the scale, as divided by and stored; stored: how the stored one differs from that
    """
    assert o.a is not None
    fmt = format_of(o)
    x = blocks_of(o.a)
    top = largest or fmt.max
    most = (amax(x) if amax else x.abs().amax(-1)).clamp(min=floor)
    scale = (most / top).clamp(min=2.0**-126)
    if (scales or o.scales) == "ue8m0":
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scale = of_scale(scale) * factor
    q = x * (1.0 / scale)[..., None] if inverse else x / scale[..., None]
    if clamps:
        q = q.clamp(-top, top)
    q = rounding(q) if rounding else q.to(fmt.dtype).float()
    k = o.a.shape[1]
    return q.flatten(1)[:, :k], stored(scale) if stored else scale


def up_to_224(o: BlockScaleGemmOperands) -> Quantised:
    return quantised(o, largest=224.0 if format_of(o).max == 240.0 else 0.0)


RIGHT_QUANTISERS: tuple[tuple[str, Quantiser, Variant, str], ...] = (
    ("the suite's", suites_own, by(), "kernels/formats.py"),
    (
        "no amax below 1e-10",
        partial(quantised, floor=1e-10),
        by(one_by_one=True),
        "per_token_group_quant_fp8: vllm/model_executor/layers/quantization/utils/fp8_utils.py, vLLM 0.32",
    ),
    (
        "no amax below 1e-4, sums of 14 bits",
        partial(quantised, floor=1e-4),
        by(step=32, inner=fourteen_bits),
        "per_token_cast_to_fp8: deep_gemm/utils/math.py, DeepGEMM 2.1",
    ),
    (
        "times 1/scale",
        partial(quantised, inverse=True, floor=1e-10),
        by(),
        "scale_1x128_kernel: tensorrt_llm/deep_gemm in FlashInfer 0.6.18 (assumed)",
    ),
    (
        "powers of two, no amax below 1e-4",
        partial(quantised, scales="ue8m0", floor=1e-4),
        by(step=32),
        "ceil_to_ue8m0: deep_gemm/utils/math.py, DeepGEMM 2.6.1",
    ),
    (
        "powers of two, times 1/scale, 4 parts",
        partial(quantised, scales="ue8m0", inverse=True),
        by(parts=4),
        "sglang_per_token_group_quant_fp8, SGLang 0.5.23 (assumed)",
    ),
    (
        "up to 224 in e4m3fnuz",
        up_to_224,
        by(parts=2),
        "quantization/input_quant_fp8.py, vLLM 0.33",
    ),
    (
        "scales in fp32, bf16 parts",
        partial(quantised, scales="fp32"),
        by(parts=4, partial=bf16),
        f"get_hip_quant(QuantType.per_1x128): aiter/ops/quant.py, {AITER} (assumed)",
    ),
    (
        "codes dequantised to bf16",
        suites_own,
        whole_k,
        "assumed: a product in bf16 behind a quantiser in FP8",
    ),
    (
        "few tokens: one kernel",
        partial(quantised, inverse=True),
        by(step=32, one_by_one=True, parts=8),
        "sglang.small_m: kernels/ops/gemm/smallm_fp8_blockscale_gfx950, SGLang 0.5.23 (arithmetic assumed)",
    ),
)


def right() -> list[Planted]:
    planted = [Planted(f"right: {name}", every(f), right=True, source=src) for name, f, src in RIGHT]
    planted += [
        Planted(
            f"right: output truncated, {name}",
            every(f, output=truncated),
            right=True,
            truncates=True,
            source="as a build of CK with CK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=2, or OPUS for gfx942 (assumed)",
        )
        for name, f, _ in (RIGHT[8], RIGHT[10])
    ]
    planted.append(
        Planted(
            "right in W8A16: subnormal weights as normal ones",
            every(with_b(without_subnormals)),
            right=True,
            boundary="with_quant",
            source="vllm.amx: csrc/cpu/sgl-kernels/vec.h, vLLM 0.33 (its outputs seen here)",
        )
    )
    planted += [
        Planted(f"right in W8A16: {name}", every(f), right=True, boundary="with_quant", source=src)
        for name, f, src in RIGHT_W8A16
    ]
    planted += [
        Planted(
            f"right in FP8: {name}",
            every(f, quantiser),
            right=True,
            boundary="with_quant",
            activations="fp8",
            source=src,
        )
        for name, quantiser, f, src in RIGHT_QUANTISERS
    ]
    return planted


# Wrong scales

Change = Callable[[OutputTile], torch.Tensor]


def with_b_scale(change: Change) -> Variant:
    return lambda p: p.multiply(b_scale=change(p))


def with_a_scale(change: Change) -> Variant:
    return lambda p: p.multiply(a_scale=change(p))


def put(x: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    x[at] = value
    return x


def b_table(p: OutputTile, n: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Of b's scales those at these blocks of N and K, [columns, blocks]; past the ends from the start."""
    table = p.o.b_scale
    return table[(n % table.shape[0])[:, None], (k % table.shape[1])[None]]


def ks(p: OutputTile) -> torch.Tensor:
    return torch.arange(p.blocks)


def flat_b(p: OutputTile, index: torch.Tensor) -> torch.Tensor:
    flat = p.o.b_scale.flatten()
    return flat[index % len(flat)]


def several_k(sizes: Any) -> bool:
    return sizes.k_blocks > 3


def several_rows(sizes: Any) -> bool:
    return sizes.m > 4


def anything(sizes: Any) -> bool:
    return True


def of_fp32(sizes: Any) -> bool:
    return sizes.scales == "fp32"


Fits = Callable[[Any], bool]

WRONG_B_SCALES: tuple[tuple[str, Change, Fits], ...] = (
    ("of the next block of K", lambda p: b_table(p, p.n_blocks, ks(p) + 1), anything),
    ("of the block of K before", lambda p: b_table(p, p.n_blocks, ks(p) - 1), anything),
    ("of three blocks of K on", lambda p: b_table(p, p.n_blocks, ks(p) + 3), several_k),
    ("of the next block of N", lambda p: b_table(p, p.n_blocks + 1, ks(p)), anything),
    ("of the block of N before", lambda p: b_table(p, p.n_blocks - 1, ks(p)), anything),
    ("of the first block of N for all", lambda p: b_table(p, p.n_blocks * 0, ks(p)), anything),
    ("of the first block of K for all", lambda p: b_table(p, p.n_blocks, ks(p) * 0), anything),
    ("of the last block of K for all", lambda p: b_table(p, p.n_blocks, ks(p) * 0 - 1), anything),
    (
        "by pairs of blocks of K",
        lambda p: b_table(p, p.n_blocks, ks(p) // 2 * 2),
        anything,
    ),
    (
        "swapped within pairs",
        lambda p: b_table(p, p.n_blocks, (ks(p) ^ 1).clamp(max=p.blocks - 1)),
        anything,
    ),
    ("in reverse along K", lambda p: b_table(p, p.n_blocks, -1 - ks(p)), anything),
    (
        "transposed",
        lambda p: flat_b(p, ks(p)[None] * len(p.o.b_scale) + p.n_blocks[:, None]),
        anything,
    ),
    (
        "with a stride one too short",
        lambda p: flat_b(p, p.n_blocks[:, None] * (p.blocks - 1) + ks(p)),
        anything,
    ),
    (
        "with a stride one too long",
        lambda p: flat_b(p, p.n_blocks[:, None] * (p.blocks + 1) + ks(p)),
        anything,
    ),
    (
        "by blocks of 64 columns",
        lambda p: b_table(p, p.columns // 64, ks(p)),
        anything,
    ),
    ("by blocks of 256 columns", lambda p: b_table(p, p.columns // 256, ks(p)), anything),
    (
        "of 64 columns before",
        lambda p: b_table(p, (p.columns - 64).clamp(min=0) // BLOCK, ks(p)),
        anything,
    ),
    ("one column late", lambda p: b_table(p, (p.columns - 1).clamp(min=0) // BLOCK, ks(p)), anything),
    ("forgotten", lambda p: torch.ones_like(p.b_scale), anything),
    ("inverted", lambda p: 1 / p.b_scale, anything),
    ("squared", lambda p: p.b_scale.square(), anything),
    ("the tensor's mean", lambda p: p.o.b_scale.mean().expand_as(p.b_scale), anything),
    ("the tensor's largest", lambda p: p.o.b_scale.amax().expand_as(p.b_scale), anything),
    ("the row's mean", lambda p: p.b_scale.mean(1, keepdim=True).expand_as(p.b_scale), anything),
    ("rounded up to powers of two", lambda p: p.b_scale.log2().ceil().exp2(), of_fp32),
    ("rounded down to powers of two", lambda p: p.b_scale.log2().floor().exp2(), of_fp32),
    ("in FP8", lambda p: (p.b_scale * 128).to(torch.float8_e4m3fn).float() / 128, of_fp32),
    ("of the next block in one block", lambda p: one_k(p.b_scale, p.middle, p.middle - 1), anything),
    ("forgotten in one block", lambda p: put(p.b_scale, (slice(None), p.middle), 1.0), anything),
    (
        "twice as large in one block",
        lambda p: put(p.b_scale, (slice(None), p.middle), 2 * p.b_scale[:, p.middle]),
        anything,
    ),
    ("zero in one block", lambda p: put(p.b_scale, (slice(None), p.middle), 0.0), anything),
    ("never loaded in the last block", lambda p: put(p.b_scale, (slice(None), -1), math.nan), anything),
    (
        "of the block before in the last block",
        lambda p: one_k(p.b_scale, p.blocks - 1, p.blocks - 2),
        anything,
    ),
    ("of the second block in the first", lambda p: one_k(p.b_scale, 0, 1), anything),
)


def one_k(scale: torch.Tensor, at: int, source: int) -> torch.Tensor:
    return put(scale, (slice(None), at), scale[:, source].clone())


def a_table(p: OutputTile, rows: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return p.a_scale[(rows % p.o.m)[:, None], (k % p.blocks)[None]]


def flat_a(p: OutputTile, index: torch.Tensor) -> torch.Tensor:
    flat = p.a_scale.flatten()
    return flat[index % len(flat)]


WRONG_A_SCALES: tuple[tuple[str, Change, Fits], ...] = (
    ("of the next block of K", lambda p: a_table(p, p.rows, ks(p) + 1), anything),
    ("of the block of K before", lambda p: a_table(p, p.rows, ks(p) - 1), anything),
    ("of the next row", lambda p: a_table(p, p.rows + 1, ks(p)), several_rows),
    ("of the row before", lambda p: a_table(p, p.rows - 1, ks(p)), several_rows),
    ("of row 0 for all", lambda p: a_table(p, p.rows * 0, ks(p)), several_rows),
    ("of the first block for all", lambda p: a_table(p, p.rows, ks(p) * 0), anything),
    ("by pairs of blocks", lambda p: a_table(p, p.rows, ks(p) // 2 * 2), anything),
    ("in reverse along K", lambda p: a_table(p, p.rows, -1 - ks(p)), lambda s: s.k_blocks % 2 == 0),
    (
        "row by row, read column by column",
        lambda p: p.a_scale.t().flatten()[(p.rows[:, None] * p.blocks + ks(p)) % p.a_scale.numel()],
        several_rows,
    ),
    (
        "with columns padded to four, read unpadded",
        lambda p: padded_scales(p)[(ks(p)[None] * p.o.m + p.rows[:, None])],
        lambda s: s.m > 4 and s.m % 4 != 0,
    ),
    ("the row's largest", lambda p: p.mine[1].amax(1, keepdim=True).expand(-1, p.blocks), anything),
    ("the tensor's largest", lambda p: p.a_scale.amax().expand(len(p.rows), p.blocks), anything),
    ("forgotten", lambda p: torch.ones_like(p.mine[1]), anything),
    ("inverted", lambda p: 1 / p.mine[1], anything),
    ("squared", lambda p: p.mine[1].square(), anything),
    ("rounded up to powers of two", lambda p: p.mine[1].log2().ceil().exp2(), of_fp32),
    ("exponents alone", lambda p: p.mine[1].log2().floor().exp2(), of_fp32),
    ("in fp16", lambda p: fp16(p.mine[1]), anything),
    ("of the block before in one block", lambda p: one_k(p.mine[1], p.middle, p.middle - 1), anything),
    ("forgotten in one block", lambda p: put(p.mine[1], (slice(None), p.middle), 1.0), anything),
    ("zero in one block", lambda p: put(p.mine[1], (slice(None), p.middle), 0.0), anything),
    (
        "of the block before in the last block",
        lambda p: one_k(p.mine[1], p.blocks - 1, p.blocks - 2),
        anything,
    ),
    ("of another row in one block", lambda p: other_atin_a_block(p), several_rows),
    ("never loaded in the last block", lambda p: put(p.mine[1], (slice(None), -1), math.nan), anything),
)


def padded_scales(p: OutputTile) -> torch.Tensor:
    missing = -p.o.m % 4
    return torch.nn.functional.pad(p.a_scale.t(), (0, missing)).flatten()


def other_atin_a_block(p: OutputTile) -> torch.Tensor:
    scale = p.mine[1]
    return put(scale, (slice(None), p.middle), p.a_scale[p.rows - 1, p.middle])


# Wrong sums


def with_terms(change: Callable[[list[torch.Tensor]], list[torch.Tensor]], way: Way = PLAIN) -> Variant:
    return lambda p: summed(change(p.terms()), way)


def without(terms: list[torch.Tensor], *lost: int) -> list[torch.Tensor]:
    gone = {k % len(terms) for k in lost}
    return [term for k, term in enumerate(terms) if k not in gone] or [terms[0] * 0]


def quarter(terms: list[torch.Tensor]) -> int:
    return max(1, len(terms) // 4)


def middle(terms: list[torch.Tensor]) -> int:
    return len(terms) // 2


WRONG_TERMS: tuple[tuple[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]], ...] = (
    ("the first block of K lost", lambda t: t[1:]),
    ("the last block of K lost", lambda t: t[:-1]),
    ("a block of K in the middle lost", lambda t: without(t, middle(t))),
    ("the block of K before the middle lost", lambda t: without(t, middle(t) - 1)),
    ("the first and the last block of K lost", lambda t: without(t, 0, -1)),
    ("a block of K counted twice", lambda t: [*t, t[middle(t)]]),
    ("the first block of K counted twice", lambda t: [*t, t[0]]),
    ("the last block of K counted twice", lambda t: [*t, t[-1]]),
    ("a block of K taken for the one before it", lambda t: put_term(t, middle(t), t[middle(t) - 1])),
    ("the last block of K taken for the one before it", lambda t: put_term(t, -1, t[-2])),
    ("a block of K subtracted", lambda t: put_term(t, middle(t), -t[middle(t)])),
    ("the first part lost", lambda t: t[quarter(t) :]),
    ("the last part lost", lambda t: t[: -quarter(t)]),
    ("a part counted twice", lambda t: [*t, *t[: quarter(t)]]),
    (
        "a part taken for the one before it",
        lambda t: [*t[: quarter(t)], *t[: quarter(t)], *t[2 * quarter(t) :]],
    ),
    ("only the first part", lambda t: t[: quarter(t)]),
    ("only the last part", lambda t: t[-quarter(t) :]),
    ("parts that overlap by a block", lambda t: [*t, t[quarter(t)]]),
    ("parts with a gap of a block", lambda t: without(t, quarter(t))),
    ("blocks beyond equal parts lost", lambda t: t[: (len(t) - 1) // 4 * 4 or 1]),
    ("every other block lost", lambda t: t[::2]),
    ("sums not cleared before they begin", lambda t: [*t, t[0] * 0.5]),
    ("the last sum not promoted", lambda t: put_term(t, -1, t[-1] * 0)),
    ("accumulators not cleared between blocks", lambda t: [*t, *t[:1]]),
    ("a partial sum never written", lambda t: put_term(t, -1, t[-1] * math.nan)),
    ("a partial sum of the tile before", lambda t: put_term(t, -1, t[-1].roll(1, 1))),
)


def put_term(terms: list[torch.Tensor], at: int, value: torch.Tensor) -> list[torch.Tensor]:
    changed = list(terms)
    changed[at] = value
    return changed


# Wrong codes


def with_b(change: Callable[[OutputTile, torch.Tensor], torch.Tensor]) -> Variant:
    return lambda p: p.multiply(b=change(p, p.b.clone()))


def with_a(change: Callable[[OutputTile, torch.Tensor], torch.Tensor]) -> Variant:
    return lambda p: p.multiply(a=change(p, p.mine[0]))


def span(p: OutputTile, k: int) -> slice:
    return slice(k * BLOCK, (k + 1) * BLOCK)


def other_format(p: OutputTile) -> torch.dtype:
    return torch.float8_e4m3fnuz if p.o.b_q.dtype == torch.float8_e4m3fn else torch.float8_e4m3fn


def recoded(codes: torch.Tensor, written: torch.dtype, read: torch.dtype) -> torch.Tensor:
    return codes.to(written).view(read).float()


def without_subnormals(p: OutputTile, x: torch.Tensor) -> torch.Tensor:
    """Codes below the smallest normal number, zeros too, as if their exponent were that of normal ones."""
    unit = p.fmt.smallest_subnormal
    step = p.fmt.smallest_normal / 2 * (1 + x.abs() / (8 * unit))
    return torch.where(x.abs() < p.fmt.smallest_normal, step.copysign(x), x)


def unsigned_subnormals(p: OutputTile, x: torch.Tensor) -> torch.Tensor:
    """Codes below the smallest normal number as zeros."""
    return torch.where(x.abs() < p.fmt.smallest_normal, 0.0, x)


def reversed_within(x: torch.Tensor, group: int) -> torch.Tensor:
    whole = x.shape[1] // group * group
    x[:, :whole] = x[:, :whole].unflatten(1, (-1, group)).flip(-1).flatten(1)
    return x


def half_of_last(p: OutputTile, x: torch.Tensor) -> torch.Tensor:
    width = x.shape[1] - (p.blocks - 1) * BLOCK
    return put(x, (slice(None), slice(-max(1, width // 2), None)), 0.0)


def has_rest(sizes: Any) -> bool:
    return sizes.k % BLOCK != 0


def rest_from_next_row(p: OutputTile) -> torch.Tensor:
    """Loads past the end of K are not masked: they read the row below."""
    rest = -p.a.shape[1] % BLOCK
    below = p.a[(p.rows + 1) % p.o.m, :rest] @ p.codes(p.columns + 1)[:, :rest].T
    return p.multiply() + below * p.mine[1][:, -1:] * p.b_scale[None, :, -1]


def by_products(p: OutputTile, rounding: Round, group: int) -> torch.Tensor:
    """Sums of `group` products are rounded, and the running sum over all of K after each."""
    a, a_scale = p.mine
    total = torch.zeros(len(a), len(p.columns))
    for first in range(0, a.shape[1], group):
        k, some = first // BLOCK, slice(first, first + group)
        dot = rounding(a[:, some] @ p.b[:, some].T)
        total = rounding(total + dot * (a_scale[:, k, None] * p.b_scale[None, :, k]))
    return total


def fp16_codes(p: OutputTile) -> torch.Tensor:
    """Sums of codes in fp16, which 65504 ends."""
    return p.multiply(Way(step=16, inner=fp16))


def unscaled_until_the_end(p: OutputTile) -> torch.Tensor:
    """Codes summed over all of K; the first block's scales for the sum."""
    a, a_scale = p.mine
    return a @ p.b.T * a_scale[:, :1] * p.b_scale[None, :, 0]


def promoted_every_two(p: OutputTile) -> torch.Tensor:
    """Scales come in after two blocks of K: those of the second."""
    return p.multiply(
        a_scale=p.mine[1][:, (ks(p) | 1).clamp(max=p.blocks - 1)],
        b_scale=b_table(p, p.n_blocks, (ks(p) | 1).clamp(max=p.blocks - 1)),
    )


def fp16_operands(p: OutputTile) -> torch.Tensor:
    return p.multiply(Way(wide=(fp16, fp16)))


def to_fp8(dtype: torch.dtype) -> Round:
    return lambda x: x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).float()


WRONG_B: tuple[tuple[str, Callable[[OutputTile, torch.Tensor], torch.Tensor], Fits], ...] = (
    ("read in the other format", lambda p, b: recoded(b, p.o.b_q.dtype, other_format(p)), anything),
    ("read as e5m2", lambda p, b: recoded(b, p.o.b_q.dtype, torch.float8_e5m2), anything),
    ("subnormal codes as zeros", unsigned_subnormals, anything),
    ("the largest code as NaN", lambda p, b: torch.where(b.abs() == p.fmt.max, math.nan, b), anything),
    (
        "the largest code as the next",
        lambda p, b: b.clamp(-p.fmt.max * 13 / 14, p.fmt.max * 13 / 14),
        anything,
    ),
    ("the sign lost", lambda p, b: b.abs(), anything),
    ("the lowest bit lost", lambda p, b: kept(3, b), anything),
    ("of the next column", lambda p, b: p.codes(p.columns + 1), anything),
    ("of the next block of N", lambda p, b: p.codes(p.columns + BLOCK), anything),
    ("columns in pairs swapped", lambda p, b: p.codes(p.columns ^ 1), anything),
    ("column 1 given column 0", lambda p, b: put(b, 1, b[0].clone()), anything),
    ("columns beyond 16 of a tile repeated", lambda p, b: b[torch.arange(len(b)) % 16], anything),
    ("one element along K late", lambda p, b: b.roll(1, 1), anything),
    ("16 elements along K late", lambda p, b: b.roll(16, 1), anything),
    ("a block of K late", lambda p, b: b.roll(BLOCK, 1), anything),
    ("pairs along K swapped", lambda p, b: reversed_within(b, 2), anything),
    ("16 along K in reverse", lambda p, b: reversed_within(b, 16), anything),
    ("a block stale", lambda p, b: stale(p, b, p.middle), anything),
    ("the last block stale", lambda p, b: stale(p, b, p.blocks - 1), lambda s: s.k % BLOCK == 0),
    (
        "16 of a block not arrived",
        lambda p, b: put(b, (slice(None), slice(BLOCK, BLOCK + 16)), 0.0),
        several_k,
    ),
    ("half of the last block masked", half_of_last, anything),
    ("the last element of K masked", lambda p, b: put(b, (slice(None), -1), 0.0), anything),
    ("shuffled for MFMA, read unshuffled", lambda p, b: shuffled(b), anything),
)


def stale(p: OutputTile, x: torch.Tensor, k: int) -> torch.Tensor:
    return put(x, (slice(None), span(p, k)), x[:, span(p, k - 1)].clone())


def shuffled(b: torch.Tensor) -> torch.Tensor:
    """Tiles of 16 columns by 32 of K as they lie for the matrix instruction."""
    n, k = len(b) // 16 * 16, b.shape[1] // 32 * 32
    tile = b[:n, :k].reshape(n // 16, 16, k // 32, 2, 16).permute(0, 2, 3, 1, 4)
    b[:n, :k] = tile.reshape(n, k)
    return b


WRONG_A: tuple[tuple[str, Callable[[OutputTile, torch.Tensor], torch.Tensor], Fits], ...] = (
    ("read in the other format", lambda p, a: recoded(a, p.o.b_q.dtype, other_format(p)), anything),
    ("of the next row", lambda p, a: p.a[(p.rows + 1) % p.o.m], several_rows),
    ("of the row before", lambda p, a: p.a[p.rows - 1], several_rows),
    ("of row 0", lambda p, a: p.a[p.rows * 0], several_rows),
    ("one element along K late", lambda p, a: a.roll(1, 1), anything),
    ("a block of K late", lambda p, a: a.roll(BLOCK, 1), anything),
    ("a block stale", lambda p, a: stale(p, a, p.middle), anything),
    ("of another row in one block", lambda p, a: torn_row(p, a), several_rows),
    ("the sign lost", lambda p, a: a.abs(), anything),
    ("pairs along K swapped", lambda p, a: reversed_within(a, 2), anything),
    (
        "16 of a block not arrived",
        lambda p, a: put(a, (slice(None), slice(BLOCK, BLOCK + 16)), 0.0),
        several_k,
    ),
    ("the lowest bit lost", lambda p, a: kept(3, a), anything),
)


def torn_row(p: OutputTile, a: torch.Tensor) -> torch.Tensor:
    return put(a, (slice(None), span(p, p.middle)), p.a[p.rows - 1, span(p, p.middle)])


WRONG_ARITHMETIC: tuple[tuple[str, Variant, Fits], ...] = (
    ("sums of codes in fp16", fp16_codes, anything),
    ("sums of codes in bf16", by(step=16, inner=bf16), anything),
    ("sums of codes of 8 bits", by(step=32, inner=partial(kept, 8)), anything),
    ("a sum in bf16 after 16 products", partial(by_products, rounding=bf16, group=16), lambda s: s.k >= 2048),
    ("a sum in fp16", partial(by_products, rounding=fp16, group=32), anything),
    ("partial sums in fp16", by(parts=4, partial=fp16), anything),
    ("partial sums in FP8", by(parts=4, partial=to_fp8(torch.float8_e4m3fn)), anything),
    ("partial sums of 6 bits", by(parts=4, partial=partial(kept, 6)), anything),
    ("both in fp16", fp16_operands, anything),
    ("activations in FP8 once more", by(wide=(to_fp8(torch.float8_e4m3fn), exact)), anything),
    ("weights in FP8 once more", by(wide=(exact, to_fp8(torch.float8_e4m3fn))), anything),
    ("weights of 6 bits", by(wide=(exact, partial(kept, 6))), of_fp32),
    ("scales when all of K is summed", unscaled_until_the_end, anything),
    ("scales after every two blocks", promoted_every_two, several_k),
    ("the rest of K from the next row", rest_from_next_row, has_rest),
)


# Wrong places


def given(change: Callable[[BlockScaleGemmOperands, torch.Tensor], torch.Tensor]) -> Compute:
    return lambda o, right: change(o, right.clone())


def at_row(change: Callable[[torch.Tensor], torch.Tensor]) -> Compute:
    def compute(o: BlockScaleGemmOperands, right: torch.Tensor) -> torch.Tensor:
        out = right.clone()
        out[victim(o)] = change(right[victim(o)].clone())
        return out

    return compute


def swapped_tiles(row: torch.Tensor, width: int) -> torch.Tensor:
    row[:width], row[width : 2 * width] = row[width : 2 * width].clone(), row[:width].clone()
    return row


def through_fp8(row: torch.Tensor) -> torch.Tensor:
    unit = row.float().abs().amax() / 400
    return (to_fp8(torch.float8_e4m3fn)(row.float() / unit) * unit).bfloat16()


def transposed(o: BlockScaleGemmOperands, out: torch.Tensor) -> torch.Tensor:
    return out.t().reshape(out.shape)


WRONG_PLACES: tuple[tuple[str, Compute, Fits], ...] = (
    ("all zero", given(lambda o, out: out * 0), anything),
    ("the last row never written", given(lambda o, out: put(out, -1, math.nan)), anything),
    ("the last column never written", given(lambda o, out: put(out, (slice(None), -1), math.nan)), anything),
    ("the last column zero", at_row(lambda row: put(row, -1, 0.0)), anything),
    ("a column infinite", at_row(lambda row: put(row, 9, math.inf)), anything),
    ("the last 16 columns zero", at_row(lambda row: put(row, slice(-16, None), 0.0)), anything),
    ("16 columns zero", at_row(lambda row: put(row, slice(16, 32), 0.0)), anything),
    ("a tile of 128 columns zero", at_row(lambda row: put(row, slice(BLOCK, 2 * BLOCK), 0.0)), anything),
    ("a tile never written", at_row(lambda row: put(row, slice(BLOCK, 2 * BLOCK), math.nan)), anything),
    ("tiles of 128 columns swapped", at_row(lambda row: swapped_tiles(row, BLOCK)), anything),
    ("tiles of 8 columns swapped", at_row(lambda row: swapped_tiles(row, 8)), anything),
    ("columns in pairs swapped", at_row(lambda row: row.view(-1, 2).flip(-1).flatten()), anything),
    ("columns shifted by one", at_row(lambda row: row.roll(1)), anything),
    ("columns in reverse", at_row(lambda row: row.flip(0)), anything),
    ("one element of its neighbour", at_row(lambda row: put(row, 20, row[21])), anything),
    ("the next row's output", given(lambda o, out: put(out, victim(o), out[victim(o) - 1])), several_rows),
    ("rows in reverse", given(lambda o, out: out.flip(0)), several_rows),
    ("rows shifted by one", given(lambda o, out: out.roll(1, 0)), several_rows),
    ("rows beyond the fourth repeated", given(lambda o, out: out[torch.arange(len(out)) % 4]), several_rows),
    ("rows and columns transposed", given(transposed), several_rows),
    ("added to what was there", at_row(lambda row: row * 2), anything),
    ("the wrong sign", at_row(lambda row: -row), anything),
    ("an element doubled", at_row(lambda row: put(row, 20, row[20] * 2)), anything),
    ("2 percent too large", at_row(lambda row: (row.float() * 1.02).bfloat16()), anything),
    ("1 percent too small", at_row(lambda row: (row.float() * 0.99).bfloat16()), anything),
    ("through fp16", at_row(lambda row: row.half().bfloat16()), anything),
    ("through FP8", at_row(through_fp8), anything),
    ("of 6 bits", at_row(lambda row: kept(6, row.float()).bfloat16()), anything),
)


# Wrong quantisers


def wrong_block(o: BlockScaleGemmOperands, block: int) -> Quantised:
    """Scales of other blocks, read as those of 128."""
    assert o.a is not None
    fmt = format_of(o)
    x = blocks_of(o.a, block)
    scale = block_scale(x.abs().amax(-1), fmt, o.scales)
    q = (x / scale[..., None]).clamp(-fmt.max, fmt.max).to(fmt.dtype).float().flatten(1)[:, : o.a.shape[1]]
    read_at = torch.arange(o.b_scale.shape[1]).clamp(max=scale.shape[1] - 1)
    return q, scale[:, read_at]


def without_edge(side: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x[..., side].abs().amax(-1)


def read_in_other_format(o: BlockScaleGemmOperands) -> Quantised:
    q, scale = suites_own(o)
    other = torch.float8_e4m3fnuz if o.b_q.dtype == torch.float8_e4m3fn else torch.float8_e4m3fn
    return q.to(o.b_q.dtype).view(other).float(), scale


def wrapped(o: BlockScaleGemmOperands) -> Quantised:
    """Too small a scale, and what exceeds the format is NaN or begins anew."""
    fmt = format_of(o)
    return quantised(o, factor=0.5, clamps=False, rounding=lambda q: q.to(fmt.dtype).float())


def zeros_divided(o: BlockScaleGemmOperands) -> Quantised:
    """No floor: 0 / 0 in a block of zeros."""
    q, scale = suites_own(o)
    assert o.a is not None
    empty = blocks_of(o.a).abs().amax(-1) == 0
    nan = empty.repeat_interleave(BLOCK, 1)[:, : q.shape[1]]
    return torch.where(nan, math.nan, q), scale


def from_integers(o: BlockScaleGemmOperands) -> Quantised:
    fmt = format_of(o)
    return quantised(o, rounding=lambda q: q.round().to(fmt.dtype).float())


def truncating(o: BlockScaleGemmOperands) -> Quantised:
    return quantised(o, rounding=partial(fp8_truncated, format_of(o).dtype))


def coarser(o: BlockScaleGemmOperands) -> Quantised:
    return quantised(o, rounding=lambda q: q.to(torch.float8_e5m2).float())


def shifted_scales(o: BlockScaleGemmOperands, by: int, axis: int) -> Quantised:
    q, scale = suites_own(o)
    return q, scale.roll(by, axis)


def per_tensor(o: BlockScaleGemmOperands) -> Quantised:
    assert o.a is not None
    most = o.a.float().abs().amax()
    return quantised(o, amax=lambda x: most.expand(x.shape[:2]))


def of_the_tile(o: BlockScaleGemmOperands) -> Quantised:
    """One scale for 64 rows."""

    def amax(x: torch.Tensor) -> torch.Tensor:
        most = torch.cat(
            [part.abs().amax((0, 2), keepdim=True).expand(len(part), -1, -1) for part in x.split(64)]
        )
        return most[..., 0]

    return quantised(o, amax=amax)


def last_lost(o: BlockScaleGemmOperands) -> Quantised:
    q, scale = suites_own(o)
    return put(q, (slice(None), slice(-max(1, q.shape[1] % BLOCK or BLOCK), None)), 0.0), scale


def signed_amax(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1)


WRONG_QUANTISERS: tuple[tuple[str, Quantiser, Fits], ...] = (
    ("scales of half their size, saturated", partial(quantised, factor=0.5), of_fp32),
    ("scales of a quarter of their size, saturated", partial(quantised, factor=0.25), anything),
    ("scales of 64 times their size", partial(quantised, factor=64.0), anything),
    ("scales of 2^16 times their size", partial(quantised, factor=2.0**16), anything),
    ("what is too large not clamped", wrapped, of_fp32),
    ("the inverse of scales stored", partial(quantised, stored=lambda s: 1 / s), anything),
    ("scales not stored", partial(quantised, stored=torch.ones_like), anything),
    ("stored scales twice as large", partial(quantised, stored=lambda s: 2 * s), anything),
    ("stored scales 2 percent too large", partial(quantised, stored=lambda s: 1.02 * s), lambda s: s.m > 32),
    ("stored scales 5 percent too large", partial(quantised, stored=lambda s: 1.05 * s), lambda s: s.m > 8),
    ("stored scales 5 percent too small", partial(quantised, stored=lambda s: 0.95 * s), lambda s: s.m > 8),
    (
        "stored scales rounded up to powers of two",
        partial(quantised, stored=lambda s: s.log2().ceil().exp2()),
        of_fp32,
    ),
    ("stored scales' exponents alone", partial(quantised, stored=lambda s: s.log2().floor().exp2()), of_fp32),
    ("stored scales in fp16", partial(quantised, stored=fp16), anything),
    ("blocks of 64", partial(wrong_block, block=64), anything),
    ("blocks of 256", partial(wrong_block, block=256), anything),
    (
        "the first value of a block overlooked",
        partial(quantised, amax=without_edge(slice(1, None))),
        anything,
    ),
    (
        "the last value of a block overlooked",
        partial(quantised, amax=without_edge(slice(None, -1))),
        anything,
    ),
    ("the first half of a block alone", partial(quantised, amax=without_edge(slice(None, 64))), anything),
    ("the largest without the smallest", partial(quantised, amax=signed_amax), anything),
    ("the mean magnitude", partial(quantised, amax=lambda x: x.abs().mean(-1)), anything),
    ("one scale for the tensor", per_tensor, several_rows),
    ("one scale for 64 rows", of_the_tile, several_rows),
    ("no floor of scales: NaN", zeros_divided, lambda s: s.m > 7),
    ("a floor of 1", partial(quantised, floor=1.0), several_rows),
    ("codes read in the other format", read_in_other_format, anything),
    ("up to 448 in e4m3fnuz", lambda o: quantised(o, largest=448.0), lambda s: s.fp8 == "e4m3fnuz"),
    ("rounded to integers", from_integers, anything),
    ("truncated", truncating, lambda s: s.m > 8),
    ("rounded as e5m2", coarser, lambda s: s.m > 8),
    ("scales of the block before", partial(shifted_scales, by=1, axis=1), anything),
    ("scales of the row before", partial(shifted_scales, by=1, axis=0), several_rows),
    ("the last block lost", last_lost, anything),
)

WITHIN_FP8 = "the rounding to FP8 of all other blocks exceeds what this one gives"


def bugs() -> list[Planted]:
    planted = [
        Planted(f"b's scales {name}", in_one_place(with_b_scale(c)), fits=f) for name, c, f in WRONG_B_SCALES
    ]
    planted += [
        Planted(
            f"b's scales {name}, in the last block of N", in_one_place(with_b_scale(c), last=True), fits=f
        )
        for name, c, f in WRONG_B_SCALES[:6]
    ]
    planted += [
        Planted(f"a's scales {name}", in_one_place(with_a_scale(c)), fits=f) for name, c, f in WRONG_A_SCALES
    ]
    planted += [Planted(name, in_one_place(with_terms(c)), fits=several_k) for name, c in WRONG_TERMS]
    planted += [Planted(f"b {name}", in_one_place(with_b(c)), fits=f) for name, c, f in WRONG_B]
    planted += [Planted(f"a {name}", in_one_place(with_a(c)), fits=f) for name, c, f in WRONG_A]
    planted += [Planted(name, in_one_place(v), fits=f) for name, v, f in WRONG_ARITHMETIC]
    planted += [Planted(f"everywhere: {name}", every(v), fits=f) for name, v, f in WRONG_ARITHMETIC]
    planted += [Planted(name, c, fits=f) for name, c, f in WRONG_PLACES]
    planted += [
        Planted(f"in W8A16: b's scales {name}", in_one_place(with_b_scale(c)), fits=f, boundary="with_quant")
        for name, c, f in WRONG_B_SCALES
    ]
    planted += [
        Planted(f"in W8A16: {name}", in_one_place(with_terms(c)), fits=several_k, boundary="with_quant")
        for name, c in WRONG_TERMS
    ]
    planted.append(
        Planted(
            "in W8A16: activations in FP8, untold", in_one_place(by(), suites_own), boundary="with_quant"
        ),
    )
    fp8 = partial(Planted, boundary="with_quant", activations="fp8")
    planted += [
        fp8(f"in FP8: b's scales {name}", in_one_place(with_b_scale(c), suites_own), fits=f)
        for name, c, f in WRONG_B_SCALES
    ]
    planted += [
        fp8(f"in FP8: {name}", in_one_place(with_terms(c), suites_own), fits=several_k)
        for name, c in WRONG_TERMS
    ]
    planted += [fp8(f"quantiser: {name}", every(by(), q), fits=f) for name, q, f in WRONG_QUANTISERS]
    planted += [
        fp8(
            f"quantiser, in one row: {name}",
            in_one_place(by(), q, row=ROWS.get(name)),
            fits=f if name not in ROWS else partial(more_rows, f, ROWS[name]),
        )
        for name, q, f in WRONG_QUANTISERS
    ]
    planted += [
        fp8(
            f"quantiser, few rows: stored scales {round(100 * abs(factor - 1))} percent too {how}",
            every(by(), partial(quantised, stored=partial(torch.mul, other=factor))),
            fits=partial(no_more_rows, most),
            fine=FEW_ROWS,
        )
        for factor, how, most in ((1.02, "large", 32), (1.05, "large", 8), (0.95, "small", 8))
    ]
    return [replace(p, fine=FINE[p.name]) if p.name in FINE else p for p in planted]


def no_more_rows(most: int, sizes: Any) -> bool:
    return sizes.m <= most


FEW_ROWS = "few rows do not tell a factor on all of the output from the error that a row's codes share"

ROWS = {
    "the first value of a block overlooked": 2,
    "the last value of a block overlooked": 2,
    "the first half of a block alone": 2,
    "the largest without the smallest": 2,
    "no floor of scales: NaN": 7,
}
"""Where such a mistake shows in one row of adversarial operands: see generate.py."""


def more_rows(fits: Fits, row: int, sizes: Any) -> bool:
    return sizes.m > row and fits(sizes)


RANGE = "FP8 keeps its relative precision over 15 octaves: nothing is lost but what is too small to be seen"
ONE_ROW = "in one row this is no more than what rounding to FP8 explains; of the whole output it is caught"
AS_BF16 = "eight roundings to bf16 within a block err no more than operands rounded to bf16 may"
FINE: dict[str, str] = {
    "b subnormal codes as zeros": "2^-15 of the largest code at most; vLLM's CPU kernels misread them",
    "sums of codes in bf16": AS_BF16,
    "everywhere: sums of codes in bf16": AS_BF16,
    "in FP8: b's scales in FP8": "a block's error of up to 2^-4 is that of rounding its activations to FP8",
    "quantiser: scales of 64 times their size": RANGE,
    "quantiser, in one row: scales of 64 times their size": RANGE,
    "quantiser: rounded to integers": "of up to 448 these are finer than FP8, but for what is too small",
    "quantiser, in one row: rounded to integers": "of up to 448 these are finer than FP8",
    "quantiser, in one row: stored scales 2 percent too large": ONE_ROW,
    "quantiser, in one row: stored scales 5 percent too large": ONE_ROW,
    "quantiser, in one row: stored scales 5 percent too small": ONE_ROW,
    "quantiser, in one row: truncated": ONE_ROW,
    "quantiser, in one row: rounded as e5m2": ONE_ROW,
}
"""Why a bug lies within what rounding explains."""

PLANTED: tuple[Planted, ...] = (*right(), *bugs())
