"""srt/layers/moe/moe_runner/triton_utils/fused_moe.py of SGLang 0.5.23: the experts in Triton.

SGLang calls it in srt/layers/moe/moe_runner/triton.py:226; multimodal_gen/runtime/layers/moe.py:166 calls it
without a server. What the kernels read: kernels/ops/moe/fused_moe_triton_kernels.py, line 807.
"""

import torch

from ......_kernel import cdiv, flat, fp8, not_doubled
from ......kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
from .....runtime_context import get_exec, get_parallel


def fused_experts(
    hidden_states,
    w1,
    w2,
    topk_output,
    moe_runner_config,
    b1=None,
    b2=None,
    use_fp8_w8a8=False,
    use_int8_w8a8=False,
    use_int8_w8a16=False,
    use_int4_w4a16=False,
    per_channel_quant=False,
    w1_scale=None,
    w2_scale=None,
    w1_zp=None,
    w2_zp=None,
    a1_scale=None,
    a2_scale=None,
    block_shape=None,
    a1_q=None,
    fuse_swiglu_interleaved=False,
):
    """Line 304. `inplace`, the configuration's default, writes into hidden_states and returns it."""
    topk_weights, topk_ids, _ = topk_output
    config = moe_runner_config
    other = (b1, b2, w1_zp, w2_zp, a1_q, config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit)
    not_doubled(all(value is None for value in other), "biases, zero points, clamps")
    not_doubled(not (use_int8_w8a8 or use_int8_w8a16 or use_int4_w4a16), "integers")
    not_doubled(not (per_channel_quant or fuse_swiglu_interleaved), "other quantisations")
    not_doubled(config.activation == "silu" and config.is_gated, "other activations")
    not_doubled(not (config.apply_router_weight_on_input or config.no_combine), "other combinations")
    not_doubled(not use_fp8_w8a8 or block_shape is not None, "FP8 per tensor")
    # Lines 1115 to 1127.
    assert hidden_states.shape[1] == w1.shape[2], "Hidden size mismatch"
    assert topk_weights.shape == topk_ids.shape, "topk shape mismatch"
    assert hidden_states.is_contiguous(), "Hidden_states must be contiguous"
    assert w1.is_contiguous(), "Expert weights1 must be contiguous"
    assert w2.is_contiguous(), "Expert weights2 must be contiguous"
    assert hidden_states.dtype in (torch.float32, torch.float16, torch.bfloat16)
    not_doubled(hidden_states.dtype != torch.float32, "fp32, which is computed in fp16")
    # Read for the launch configuration (fused_moe_triton_config.py:72), before any kernel.
    not_doubled(not get_exec().deterministic.enable_deterministic_inference, "deterministic inference")
    if not config.inplace:
        get_parallel().tp_group  # noqa: B018  line 630, whatever the group's size
    weights, ids = _routing(topk_weights, topk_ids, len(w1))
    dtype, count = hidden_states.dtype, topk_ids.shape[1]
    if w2.shape[0] != len(w1) or 2 * w2.shape[2] != w1.shape[1] or w2.shape[1] != w1.shape[2]:
        raise RuntimeError(f"w2 {tuple(w2.shape)} would be misread beside w1 {tuple(w1.shape)}")
    up = _weight(w1, w1_scale, use_fp8_w8a8, block_shape)
    down = _weight(w2, w2_scale, use_fp8_w8a8, block_shape)
    tokens = _activation(hidden_states, use_fp8_w8a8, block_shape).repeat_interleave(count, 0)
    gate, linear = _grouped(tokens, up, ids).to(dtype).float().chunk(2, -1)
    hidden = (torch.nn.functional.silu(gate) * linear).to(dtype)
    routed = _grouped(_activation(hidden, use_fp8_w8a8, block_shape), down, ids) * weights[:, None]
    summed = routed.to(dtype).float().view(-1, count, w2.shape[1]).sum(1)
    scaled = (summed * (config.routed_scaling_factor or 1.0)).to(dtype)
    return hidden_states.copy_(scaled) if config.inplace else scaled


def _routing(topk_weights, topk_ids, experts):
    """Weights and expert of each routed row, in memory's order: the kernels index both with token * k + i."""
    assert topk_weights.stride(1) == 1
    if not topk_weights.is_contiguous() or not topk_ids.is_contiguous():
        raise RuntimeError("topk_weights or topk_ids would be misread: not contiguous")
    if topk_weights.dtype != torch.float32:
        raise RuntimeError(f"topk_weights are {topk_weights.dtype}; SGLang's routing gives fp32")
    ids = torch.tensor(flat(topk_ids, "topk_ids", topk_ids.numel()), device=topk_ids.device)
    if int(ids.min()) < -1 or int(ids.max()) >= experts:
        raise RuntimeError(f"memory access fault: expert {int(ids.max())} of {experts}")
    return topk_weights.reshape(-1), ids


def _weight(w, scale, use_fp8, block_shape):
    """[experts, N, K] in fp32. The kernel takes the scales by their strides, fp32."""
    if not use_fp8:
        assert scale is None
        return w.float()
    assert scale is not None and len(block_shape) == 2
    n, k = w.shape[1:]
    assert cdiv(n, block_shape[0]) == scale.shape[-2]
    assert cdiv(k, block_shape[1]) == scale.shape[-1]
    if w.dtype != fp8():
        raise RuntimeError(f"weights are {w.dtype}: the dot product would not be of {fp8()}")
    if scale.dtype != torch.float32 or scale.ndim != 3 or len(scale) != len(w):
        raise RuntimeError(f"scales {scale.dtype} {tuple(scale.shape)} would be misread")
    full = scale.repeat_interleave(block_shape[0], 1)[:, :n].repeat_interleave(block_shape[1], 2)[..., :k]
    return w.float() * full


def _activation(x, use_fp8, block_shape):
    if not use_fp8:
        return x.float()
    values, scale = sglang_per_token_group_quant_fp8(x, block_shape[1])
    return values.float() * scale.repeat_interleave(block_shape[1], 1)


def _grouped(x, weights, ids):
    """Each row times its expert's weights; an expert of -1, which is not here, gives zeros."""
    out = x.new_zeros(len(x), weights.shape[1])
    for expert in ids[ids >= 0].unique().tolist():
        out[ids == expert] = x[ids == expert] @ weights[expert].T
    return out
