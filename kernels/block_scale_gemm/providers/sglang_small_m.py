"""SGLang's product for few tokens on gfx950, which quantises its activations itself.

Read in SGLang 0.5.23: kernels/ops/gemm/smallm_fp8_blockscale_gfx950/, and its callers fp8_utils.py and fp8.py
in srt/layers/quantization. Untested on hardware.
"""

from __future__ import annotations

from kernels import vendor
from kernels.binding import Function
from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
from kernels.block_scale_gemm.providers.aiter import SHUFFLE, in_tiles
from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes
from kernels.op import Call, Unsupported, implementation
from kernels.support import Support, need

MULTIPLY = Function(
    "sglang.kernels.ops.gemm.smallm_fp8_blockscale_gfx950.try_smallm_fp8_bs_linear", needs="x WQ w_scale"
)
TAKES = ((5120, 4096), (4608, 4096), (4096, 2048), (2560, 4096), (4096, 1024))
"""The n and k that it takes (its SHAPES). None is DeepSeek-R1's."""

MOST_M = 32


def takes(sizes: BlockScaleGemmSizes) -> Support:
    known = " ".join(f"{n}x{k}" for n, k in TAKES)
    return Support.all_of(
        need((sizes.n, sizes.k) in TAKES, f"takes these n and k alone: {known}"),
        need(sizes.m <= MOST_M, f"takes {MOST_M} tokens at most"),
    )


@implementation(
    "sglang.small_m",
    vendor.Sglang,
    requires="SGLang 0.5.23 for ROCm with AITER and hipcc, gfx950",
    since="0.5.23",
    boundaries=("with_quant",),
    activations="fp8",
    allocates=True,
    kinds=("rocm",),
    archs=("gfx950",),
    also={"aiter": vendor.Aiter.install},
    symbols=(MULTIPLY, SHUFFLE),
    fits=takes,
    layout=lambda sizes: sizes.n * sizes.k,
)
def small_m(operands: BlockScaleGemmOperands, out: None) -> Call:
    """From ROCm 7.2 on SGLang tries it before `aiter.triton` and `aiter.dispatch_preshuffled`. hipcc compiles
    it at the first call. The weights lie as AITER shuffles them."""
    weights = in_tiles(operands.b_q)
    weights.is_shuffled = True  # type: ignore[attr-defined]  # SGLang marks them so
    multiply = MULTIPLY.bind(x=operands.a, WQ=weights, w_scale=operands.b_scale)
    if multiply() is None:
        raise Unsupported("SGLang's kernel for few tokens does not run here: see what it printed")
    return multiply
