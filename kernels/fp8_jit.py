"""Triton sources for operands in FP8."""

import triton
import triton.language as tl


@triton.jit
def widen(x, PRODUCT: tl.constexpr, FNUZ_BITS: tl.constexpr):
    """Converts FP8 values exactly to the dtype that tl.dot takes: bf16, fp16, fp32, or x's own.

    x:         FP8 of any shape; uint8 with the bits of e4m3fnuz if FNUZ_BITS
    PRODUCT:   the dtype of the result; not x's own if FNUZ_BITS
    FNUZ_BITS: set in Triton's interpreter, which takes no e4m3fnuz tensor, only its view(torch.uint8)

    GPUs convert by instructions. The interpreter reads all values of e4m3fn exactly except NaN, which it
    reads as +-480.
    """
    if FNUZ_BITS:
        magnitude = (x & 0x7F).to(tl.int32)
        # The exponent bias 8 becomes 127 and 3 mantissa bits become 23.
        normal = ((magnitude << 20) + ((127 - 8) << 23)).to(tl.float32, bitcast=True)
        # A magnitude below 8 is subnormal, in steps of 2^-10.
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.0009765625, normal)
        value = tl.where(x > 0x80, -value, value)
        return tl.where(x == 0x80, float("nan"), value).to(PRODUCT)
    else:
        return x.to(PRODUCT)
