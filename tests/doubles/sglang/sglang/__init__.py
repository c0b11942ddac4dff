"""A double of SGLang 0.5.23 (the wheel of PyPI): its Triton kernels for block-scaled FP8 GEMM, MLA decode,
prefill and fused MoE. Lines are those of the wheel's files."""

__version__ = "0.5.23"
