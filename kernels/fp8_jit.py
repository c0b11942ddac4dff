"""Triton sources for operands in FP8."""

import triton
import triton.language as tl


@triton.jit
def widen(x, PRODUCT: tl.constexpr, FNUZ_BITS: tl.constexpr):
    """FP8 values in the dtype that tl.dot takes, exactly: bf16, fp16 or fp32, or x's own.

    x: any shape, in FP8 as loaded; if FNUZ_BITS, uint8 holding the bits of e4m3fnuz, PRODUCT being wider.
    GPUs convert by themselves. Triton's interpreter takes no e4m3fnuz tensor: it gets view(torch.uint8).
    Of e4m3fn it reads all values exactly, but NaN as +-480.
    """
    if FNUZ_BITS:
        magnitude = (x & 0x7F).to(tl.int32)
        # Exponent bias 8 to fp32's 127, 3 mantissa bits to 23; an exponent of 0 counts steps of 2^-10.
        normal = ((magnitude << 20) + ((127 - 8) << 23)).to(tl.float32, bitcast=True)
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.0009765625, normal)
        value = tl.where(x > 0x80, -value, value)
        return tl.where(x == 0x80, float("nan"), value).to(PRODUCT)
    else:
        return x.to(PRODUCT)
