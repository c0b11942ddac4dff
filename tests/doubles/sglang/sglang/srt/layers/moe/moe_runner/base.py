"""srt/layers/moe/moe_runner/base.py of SGLang 0.5.23, line 38. `inplace` is its default."""

from dataclasses import dataclass
from typing import Any


@dataclass
class MoeRunnerConfig:
    num_experts: int | None = None
    num_local_experts: int | None = None
    hidden_size: int | None = None
    intermediate_size_per_partition: int | None = None
    layer_id: int | None = None
    top_k: int | None = None
    num_fused_shared_experts: int | None = None
    params_dtype: Any = None
    routing_method_type: Any = None
    runner_backend: Any = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    no_combine_keep_router_weight: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
    layer: Any = None
    use_tp_all_gather_activation: bool = False
    silu_mul_keep_fp32: bool = False
