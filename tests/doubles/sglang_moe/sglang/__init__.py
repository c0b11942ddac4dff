"""A double of SGLang 0.5.23 (the wheel of PyPI): the functions that surround DeepGEMM in its fused MoE
(srt/layers/moe/moe_runner/deep_gemm.py), as far as they can be called without a server. Lines are those of
the wheel's files. DeepGEMM itself is the double called deep_gemm."""

__version__ = "0.5.23"
