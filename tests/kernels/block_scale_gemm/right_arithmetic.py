"""Right block-scale GEMMs in the arithmetic of libraries, written in plain torch, in order of their error,
the largest first.

A kernel's source is the file whose arithmetic it follows; "assumed" where that is closed or unread.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.block_scale_gemm.mistakes import (
    Quantised,
    Quantiser,
    Terms,
    Tile,
    Variant,
    everywhere,
    gemm,
    largest,
    multiply,
    quantised,
    reading,
)
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands as Operands
from kernels.formats import BLOCK, fp8_format
from kernels.mistakes import E4M3FNUZ, Mistake, bf16, exact, truncated_to
from tests.support.library_roundings import away, flushed, fourteen_bits, truncated


def whole_k(t: Tile) -> torch.Tensor:
    """One product of operands that were dequantised to bf16."""

    def dequantised(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return bf16(values * scale.repeat_interleave(BLOCK, 1)[:, : values.shape[1]])

    return dequantised(t.a, t.a_scale) @ dequantised(t.b, t.b_scale).T


def scales_one_by_one(t: Tile) -> torch.Tensor:
    """Multiplies the sum of a block by the scale of a, and the result by the scale of b."""

    def scaled(terms: Terms) -> Terms:
        return [term * t.a_scale[:, block, None] * t.b_scale[:, block] for block, term in enumerate(terms)]

    ones = replace(t, a_scale=torch.ones_like(t.a_scale), b_scale=torch.ones_like(t.b_scale))
    return multiply(ones, scaled)


def subnormal_as_normal(t: Tile) -> torch.Tensor:
    """Reads the codes of b below the smallest normal number, including zeros, as 1.mantissa times half of
    that number."""
    b, fmt = t.b, fp8_format(t.operands.sizes.fp8)
    mantissa = b.abs() / (8 * fmt.smallest_subnormal)  # 0 to 7/8
    as_normal = fmt.smallest_normal / 2 * (1 + mantissa)
    return torch.where(b.abs() < fmt.smallest_normal, as_normal.copysign(b), b)


def no_less_than(floor: float) -> Quantiser:
    """Quantises with a least value for the largest magnitude of a block."""
    return partial(quantised, amax=lambda x: largest(x).clamp(min=floor))


def in_powers_of_two(o: Operands) -> Quantised:
    return no_less_than(1e-4)(o.replaced(sizes=replace(o.sizes, scales="ue8m0")))


def up_to_224(o: Operands) -> Quantised:
    """vLLM's largest value in e4m3fnuz, although the format holds 240."""
    return quantised(o, top=224.0 if o.b_q.dtype == E4M3FNUZ else 0.0)


def times_inverse(o: Operands) -> Quantised:
    """Quantises by multiplying with 1/scale."""
    _, scale = quantised(o)
    inverse = (1 / scale).repeat_interleave(BLOCK, 1)[:, : o.a.shape[1]]
    return (o.a.float() * inverse).to(o.b_q.dtype).float(), scale


AITER = "AITER e404860"
EAGER = "kernels/block_scale_gemm/providers/torch_eager.py"
FOURTEEN_BITS = partial(gemm, step=32, round_step=fourteen_bits)
IN_BF16 = partial(gemm, round_operands=(bf16, bf16))
TWO_PARTS_IN_BF16: dict[str, Any] = {"parts": 2, "round_part": bf16, "round_total": bf16}
MANY_PARTS = 1 << 10  # more than K has blocks

# (name, kernel, source) of each right call
CORE: tuple[tuple[str, Variant, str], ...] = (
    ("both in bf16, 4 parts in bf16", IN_BF16(parts=4, round_part=bf16),
     "cuBLAS as torch calls it (assumed)"),
    ("both in bf16, 2 parts added in bf16", IN_BF16(**TWO_PARTS_IN_BF16), "assumed: a split K of hipBLASLt"),
    ("both in bf16", whole_k, f"torch.bf16, hipblaslt.dequantised: {EAGER}"),
    ("both in bf16, ties away from zero", gemm(round_operands=(away, away)),
     "assumed: v_cvt by hand on gfx942"),
    ("weights in bf16", gemm(round_operands=(exact, bf16)), "assumed: activations in fp32"),
    ("8 parts in bf16", gemm(parts=8, round_part=bf16), f"aiter.triton: gemm_a8w8_blockscale.py, {AITER}"),
    ("2 parts added in bf16", gemm(**TWO_PARTS_IN_BF16),
     f"aiter.ck: csrc/ck_gemm_a8w8_blockscale (KBatch, assumed), {AITER}"),
    ("sums of 14 bits", FOURTEEN_BITS(), "deepgemm, flashinfer.sm90: sm90_fp8_gemm_1d2d.cuh, DeepGEMM 2.1"),
    ("sums of 14 bits, 3 parts", FOURTEEN_BITS(parts=3), "vllm.cutlass on sm_90, with stream K (assumed)"),
    ("sums of 13 bits", gemm(step=32, round_step=partial(truncated_to, 13)), "assumed: the report says 14"),
    ("fp32", gemm(), f"torch.naive: {EAGER}"),
    ("scales one by one", scales_one_by_one, "vllm.triton: fp8_utils.py; cublaslt: ScaledBlas.cpp of torch"),
    ("a part for each block", gemm(parts=MANY_PARTS), "kernels/block_scale_gemm/triton/split_k_jit.py"),
    ("7 parts in fp32", gemm(step=32, parts=7), "flashinfer.trtllm (compiled, assumed), flashinfer 0.6.18"),
    ("last block first", gemm(lambda terms: terms[::-1]), f"aiter.asm (compiled, assumed), {AITER}"),
    (
        "subnormal sums flushed",
        gemm(step=16, round_step=flushed, parts=MANY_PARTS, round_part=flushed, round_total=flushed),
        f"-fgpu-flush-denormals-to-zero in aiter/jit/core.py, {AITER}",
    ),
)  # fmt: skip
W8A16: tuple[tuple[str, Variant, str], ...] = (
    ("weights in bf16, 4 parts in bf16", IN_BF16(parts=4, round_part=bf16), "cuBLAS (assumed)"),
    ("weights in bf16", whole_k, f"torch.bf16: {EAGER}"),
    ("weights in bf16, 8 parts in fp32", IN_BF16(parts=8), "assumed: Marlin's split K"),
    ("subnormal weights as normal ones", reading(b=subnormal_as_normal),
     "vllm.amx: csrc/cpu/sgl-kernels/vec.h, vLLM 0.33 (its outputs seen here)"),
    ("weights scaled after the product", gemm(), f"gemm_a16w8_blockscale.py, {AITER} (excerpt)"),
)  # fmt: skip
FP8: tuple[tuple[str, Variant, Quantiser, str], ...] = (
    ("the suite's", gemm(), quantised, "kernels/formats.py"),
    ("dequantised to bf16", whole_k, quantised, "assumed: a product in bf16 behind a quantiser"),
    ("no magnitude below 1e-10", gemm(), no_less_than(1e-10), "fp8_utils.py, vLLM 0.32"),
    ("none below 1e-4, 14 bits", FOURTEEN_BITS(), no_less_than(1e-4),
     "deep_gemm/utils/math.py, DeepGEMM 2.1"),
    ("powers of two", gemm(step=32), in_powers_of_two, "deep_gemm/utils/math.py, DeepGEMM 2.6.1"),
    ("times 1/scale", gemm(), times_inverse,
     "scale_1x128_kernel, FlashInfer 0.6.18; SGLang 0.5.23 (assumed)"),
    ("up to 224 in e4m3fnuz", gemm(parts=2), up_to_224, "quantization/input_quant_fp8.py, vLLM 0.33"),
    ("4 parts in bf16", gemm(parts=4, round_part=bf16), quantised, f"aiter/ops/quant.py, {AITER} (assumed)"),
)  # fmt: skip

RIGHT: tuple[Mistake, ...] = (
    *(Mistake(f"{name} ({source})", everywhere(kernel)) for name, kernel, source in CORE),
    Mistake(
        f"output truncated (OPUS for gfx942 (assumed), {AITER})",
        everywhere(lambda t: truncated(multiply(t, step=16))),
        truncates=True,
    ),
    *(
        Mistake(f"W8A16: {name} ({source})", everywhere(kernel), "with_quant")
        for name, kernel, source in W8A16
    ),
    *(
        Mistake(f"FP8: {name} ({source})", everywhere(kernel, quantiser), "with_quant", "fp8")
        for name, kernel, quantiser, source in FP8
    ),
)
"""Right calls in the form of mistakes, so that the check judges them in the same way."""
