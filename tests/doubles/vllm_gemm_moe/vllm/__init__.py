"""A double of vLLM 0.33.0 (the wheel of PyPI): its CUTLASS block-scaled GEMM, and the functions that
surround DeepGEMM in its fused MoE. Lines are those of the wheel's files; its compiled part is csrc at the
commits named."""

__version__ = "0.33.0"
