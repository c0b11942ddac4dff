"""cutlass_fused_moe with DeepSeek's FP8 scales. Checks: csrc/fused_moe/cutlass_backend/
flashinfer_cutlass_fused_moe_binding.cu runMoe; the steps: cutlass_fused_moe_kernels.cuh BlockScaleFC1, 2."""

import torch

from .._kernel import FP8, ceil_div, dense, expand, icheck, packed, quantised, unseen
from ..utils import check_shape_dtype_device, get_compute_capability


def run(x, experts, weights, fc1, fc2, output_dtype, quant_scales, input_sf, ranks, output):
    if get_compute_capability(x.device)[0] != 9:
        raise NotImplementedError("FP8 block scaling not yet implemented for Blackwell.")
    tp_size, tp_rank, ep_size, ep_rank, cluster_size, cluster_rank = ranks
    tokens, hidden = x.shape[0], fc2.shape[1]
    if output is None:
        output = torch.empty((tokens, hidden), dtype=output_dtype, device=x.device)
    else:
        check_shape_dtype_device(output, (tokens, hidden), output_dtype, x.device, "output")
    # Activations in FP8 find no runner with this flag: they are quantised inside, 1x128.
    icheck(
        x.dtype == torch.bfloat16 and fc1.dtype == FP8, "Could not construct fused moe op with these dtypes"
    )
    unseen(output_dtype == torch.bfloat16, f"output is {output_dtype}, written as bfloat16")
    icheck(cluster_size == 1 and cluster_rank == 0, "smart_router is supported in min_latency mode")
    icheck(experts.dtype == torch.int32, "token_selected_experts is int32")
    icheck(fc2.dtype == FP8, "fc2_expert_weights is float8_e4m3fn")
    icheck(
        x.ndim == 2 and experts.ndim == 2 and fc1.ndim == 3 and fc2.ndim == 3,
        "input 2D, experts 2D, weights 3D",
    )
    icheck(experts.shape[0] == tokens, "input and token_selected_experts must have the same num tokens.")
    if weights is not None:
        icheck(weights.dtype == torch.float32, "token_final_scales is float32")
        icheck(
            weights.shape == experts.shape,
            "token_selected_experts and token_final_scales have the same shape",
        )
    icheck(fc1.shape[0] == fc2.shape[0], "fc1 and fc2 must have the same number of experts.")
    local, rows, inter = fc1.shape[0], fc1.shape[1], fc2.shape[2]
    icheck(rows == 2 * inter, "fc1_expert_weights inter size must be 2 times fc2_expert_weights inter size.")
    icheck(
        hidden % 16 == 0 and inter % 16 == 0, f"hidden_size {hidden} and inter_size {inter} divisible by 16"
    )
    unseen(
        x.shape[1] == hidden and fc1.shape[2] == hidden, "the hidden size is taken from fc2_expert_weights"
    )
    unseen(input_sf is None, "input_sf is ignored")
    unseen(0 <= tp_rank < tp_size and 0 <= ep_rank < ep_size, "a rank is within its size")
    dense(x, "input", torch.bfloat16)
    for name, t in (("fc1_expert_weights", fc1), ("fc2_expert_weights", fc2)):
        dense(t, name, FP8)
    for name, t in (("token_selected_experts", experts), ("token_final_scales", weights), ("output", output)):
        unseen(t is None or t.is_contiguous(), f"{name} is read as contiguous")
    icheck(len(quant_scales) >= 2, "quant_scales has the scales of fc1 and fc2")
    shape1 = (local, ceil_div(rows, 128), ceil_div(hidden, 128))
    shape2 = (local, ceil_div(hidden, 128), ceil_div(inter, 128))
    scale1, scale2 = (
        packed(quant_scales[0], shape1, "fc1 scales"),
        packed(quant_scales[1], shape2, "fc2 scales"),
    )
    chosen = experts.long()
    # An id outside the rank's own experts is skipped, -1 too (cutlass_fused_moe_kernels.cuh: `expert >=
    # start_expert && expert < end_expert` in the maps, `expert_id < 0` in finalizeMoeRoutingKernel).
    unseen(
        tokens == 0 or -1 <= int(chosen.min()) <= int(chosen.max()) < local * ep_size,
        "an expert that is not there",
    )
    gathered = torch.zeros(tokens, hidden, device=x.device)
    for expert in range(local):
        token, slot = torch.where(chosen == ep_rank * local + expert)
        if token.numel() == 0:
            continue
        w1 = fc1[expert].float() * expand(scale1[expert], rows, hidden, (128, 128))
        w2 = fc2[expert].float() * expand(scale2[expert], hidden, inter, (128, 128))
        first = (quantised(x[token], 1) @ w1.T).bfloat16().float()
        # cutlass_fused_moe_kernels.cuh doActivation: the linear half comes first, the gate after it.
        up, gate = first[:, :inter], first[:, inter:]
        acted = (torch.nn.functional.silu(gate) * up).bfloat16()
        second = (quantised(acted, 1) @ w2.T).bfloat16().float()
        share = 1.0 if weights is None else weights[token, slot, None]
        gathered.index_add_(0, token, second * share)
    return output.copy_(gathered)
