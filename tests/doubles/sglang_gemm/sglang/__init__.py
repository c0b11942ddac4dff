"""A double of SGLang 0.5.23 (the wheel of PyPI): its block-scaled FP8 GEMM of CUTLASS, which is for sm_120
and sm_121 alone. Lines are those of the wheel's files. sgl_kernel (sglang-kernel 0.4.10) no longer has
this GEMM, and srt/layers/quantization/fp8_utils.py:362 imports the one doubled here."""

__version__ = "0.5.23"
