"""A double of flashinfer-python 0.6.18 (sources of 2026-08): FP8 block-scale GEMM and MoE, sm_90 and sm_100."""

from . import fused_moe as fused_moe
from . import gemm as gemm
from .autotuner import autotune as autotune
from .fused_moe import cutlass_fused_moe as cutlass_fused_moe
from .fused_moe import trtllm_fp8_block_scale_moe as trtllm_fp8_block_scale_moe
from .quantization import shuffle_matrix_a as shuffle_matrix_a
from .tllm_enums import ActivationType as ActivationType
from .tllm_enums import RoutingMethodType as RoutingMethodType

__version__ = "0.6.18"
