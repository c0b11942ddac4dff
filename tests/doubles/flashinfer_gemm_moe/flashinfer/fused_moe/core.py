"""Signatures of flashinfer/fused_moe/core.py of 0.6.18; what they do is in _cutlass.py and _trtllm.py."""

from __future__ import annotations

import torch

from .._kernel import not_doubled
from ..tllm_enums import ActivationType, Fp8QuantizationType
from . import _cutlass, _trtllm


def convert_to_block_layout(input_tensor: torch.Tensor, blockK: int) -> torch.Tensor:
    """[M, K] -> [K / blockK, M, blockK]."""
    rows, k = input_tensor.shape
    assert k % blockK == 0, "K must be divisible by blockK"
    return input_tensor.view(rows, k // blockK, blockK).permute(1, 0, 2).contiguous()


def cutlass_fused_moe(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor],
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    input_sf: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: torch.Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: ActivationType = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: list[int] | None = None,
    workspace_buffer: torch.Tensor | None = None,
    *,
    situ_beta: torch.Tensor | None = None,
    situ_linear_beta: torch.Tensor | None = None,
) -> torch.Tensor:
    if min_latency_mode:
        raise NotImplementedError("min latency mode not yet implemented for Blackwell.")
    not_doubled(use_deepseek_fp8_block_scale, "anything but use_deepseek_fp8_block_scale=True")
    others = (use_w4_group_scaling, use_mxfp8_act_scaling, use_packed_weights, use_wfp4afp8_humming)
    not_doubled(not any(others), "other quantisations beside the block scale")
    not_doubled(fc1_expert_biases is None and fc2_expert_biases is None, "biases")
    parameters = (swiglu_alpha, swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta)
    not_doubled(all(p is None for p in parameters), "parameters of the activation")
    not_doubled(activation_type == ActivationType.Swiglu, "an activation but Swiglu")
    not_doubled(not enable_alltoall and workspace_buffer is None, "enable_alltoall and workspace_buffer")
    return _cutlass.run(
        input,
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights,
        fc2_expert_weights,
        output_dtype,
        quant_scales,
        input_sf,
        (tp_size, tp_rank, ep_size, ep_rank, cluster_size, cluster_rank),
        output,
    )


def trtllm_fp8_block_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: Fp8QuantizationType = Fp8QuantizationType.DeepSeekFp8,
    num_fused_shared_experts: int | None = None,
    activation_type: int = ActivationType.Swiglu.value,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> list[torch.Tensor] | torch.Tensor:
    not_doubled(do_finalize, "do_finalize=False")
    not_doubled(fp8_quantization_type == Fp8QuantizationType.DeepSeekFp8, "MXFP8")
    not_doubled(
        not num_fused_shared_experts and routing_replay_out is None, "fused shared experts, routing replay"
    )
    not_doubled(
        gemm1_alpha is None and gemm1_beta is None and gemm1_clamp_limit is None, "parameters of SwiGLU"
    )
    if activation_type != ActivationType.Swiglu:  # csrc/trtllm_fused_moe_kernel_launcher.cu
        raise NotImplementedError("DeepSeekFp8 only supports ActivationType::Swiglu in this runner path.")
    routing = _trtllm.Routing(
        num_experts,
        top_k,
        n_group or 0,
        topk_group or 0,
        1.0 if routed_scaling_factor is None else routed_scaling_factor,
        routing_method_type,
    )
    weights = _trtllm.Weights(
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        use_shuffled_weight,
        weight_layout,
    )
    return _trtllm.run(
        routing_logits,
        routing_bias,
        hidden_states,
        hidden_states_scale,
        weights,
        routing,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        output,
    )


def trtllm_fp8_block_scale_routed_moe(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    use_shuffled_weight: bool = False,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    gemm1_lora_delta: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    fp8_quantization_type: Fp8QuantizationType = Fp8QuantizationType.DeepSeekFp8,
    activation_type: int = ActivationType.Swiglu.value,
    gemm1_alpha: torch.Tensor | None = None,
    gemm1_beta: torch.Tensor | None = None,
    gemm1_clamp_limit: torch.Tensor | None = None,
) -> list[torch.Tensor] | torch.Tensor:
    not_doubled(isinstance(topk_ids, tuple), "ids and weights packed into one number")
    not_doubled(routing_bias is None and gemm1_lora_delta is None, "a bias of the routing, a LoRA")
    not_doubled(do_finalize and not local_expert_offset, "do_finalize=False, experts of a later rank")
    return trtllm_fp8_block_scale_moe(
        topk_ids,
        routing_bias,
        hidden_states,
        hidden_states_scale,
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        num_experts,
        top_k,
        n_group,
        topk_group,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        routed_scaling_factor,
        routing_method_type,
        use_shuffled_weight,
        weight_layout,
        fp8_quantization_type=fp8_quantization_type,
        activation_type=activation_type,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
        output=output,
    )
