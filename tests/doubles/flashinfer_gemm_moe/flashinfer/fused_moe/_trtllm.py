"""trtllm_fp8_block_scale_moe with DeepSeek's FP8. Checks: csrc/trtllm_fused_moe_kernel_launcher.cu
(Fp8BlockScaleLauncher check_routing, check_moe, check_weights_shape); the routing:
csrc/fused_moe/trtllm_backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._kernel import FP8, dense, expand, icheck, not_doubled, packed, quantised, unseen
from ..quantization import row_indices
from ..tllm_enums import RoutingMethodType, WeightLayout
from ..utils import check_shape_dtype_device, get_compute_capability


class Routing(NamedTuple):
    num_experts: int
    top_k: int
    n_group: int
    topk_group: int
    scale: float
    method: int


class Weights(NamedTuple):
    w1: torch.Tensor
    scale1: torch.Tensor
    w2: torch.Tensor
    scale2: torch.Tensor
    shuffled: bool
    layout: int


def run(logits, bias, x, x_scale, weights: Weights, routing: Routing, inter, offset, local, output):
    icheck(
        get_compute_capability(x.device)[0] == 10, "the trtllm-gen MoE runs on SM100 (SM12x is not doubled)"
    )
    tokens, hidden = x.shape
    if output is None:
        output = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=x.device)
    else:
        check_shape_dtype_device(output, (tokens, hidden), torch.bfloat16, x.device, "output")
        unseen(output.is_contiguous(), "output is written as contiguous")
    if isinstance(logits, tuple):
        _check_picks(*logits, tokens, routing, offset, local)
    else:
        _check_routing(logits, bias, tokens, routing, offset, local)
    icheck(x.ndim == 2 and x.dtype == FP8, "hidden_states must be fp8.")
    icheck(x_scale.dtype == torch.float32 and x_scale.ndim == 2, "hidden_states_scale must be float and 2D.")
    icheck(x_scale.shape[0] == hidden // 128, "hidden_states_scale dim0 must match hidden_states dim1 / 128.")
    icheck(x_scale.shape[1] == tokens, "hidden_states_scale dim1 must match num_tokens.")
    unseen(hidden % 128 == 0, f"hidden_size {hidden} is not a multiple of 128")
    icheck(inter % 128 == 0, "intermediate_size must be a multiple of 128.")
    for scale, shape, name in (
        (weights.scale1, (local, 2 * inter // 128, hidden // 128), "gemm1_weights_scale"),
        (weights.scale2, (local, hidden // 128, inter // 128), "gemm2_weights_scale"),
    ):
        icheck(scale.dtype == torch.float32 and tuple(scale.shape) == shape, f"{name} has incorrect shape.")
    w1 = _weight(weights.w1, (2 * inter, hidden), local, weights, "gemm1_weights")
    w2 = _weight(weights.w2, (hidden, inter), local, weights, "gemm2_weights")
    dense(x, "hidden_states", FP8)
    # hidden_states_scale is [hidden / 128, tokens] by pointer: x_scale.t() of a row-major one is misread.
    scale = packed(x_scale, (hidden // 128, tokens), "hidden_states_scale").T
    values = x.float() * expand(scale, tokens, hidden, (1, 128))
    scale1 = packed(weights.scale1, (local, 2 * inter // 128, hidden // 128), "gemm1_weights_scale")
    scale2 = packed(weights.scale2, (local, hidden // 128, inter // 128), "gemm2_weights_scale")
    chosen, shares = logits if isinstance(logits, tuple) else route(logits, bias, routing)
    gathered = torch.zeros(tokens, hidden, device=x.device)
    for expert in range(local):
        token, slot = torch.where(chosen == offset + expert)
        if token.numel() == 0:
            continue
        first = values[token] @ (w1[expert].float() * expand(scale1[expert], 2 * inter, hidden, (128, 128))).T
        # prepare_moe: GEMM 1 gives FP8 with a scale per 128 (gemm1_output_scale), and so does the activation.
        first = quantised(first, 1)
        # trtllm_fused_moe_dev_kernel.cu: silu(x2) * x1, x1 the first half (up), x2 the second (gate).
        acted = quantised(torch.nn.functional.silu(first[:, inter:]) * first[:, :inter], 1)
        second = acted @ (w2[expert].float() * expand(scale2[expert], hidden, inter, (128, 128))).T
        gathered.index_add_(0, token, second.bfloat16().float() * shares[token, slot, None])
    return output.copy_(gathered)


def _weight(w, shape, local, weights: Weights, name: str) -> torch.Tensor:
    """[local, Mn, K] in logical order. The combinations that have kernels: tests/moe/
    test_trtllm_gen_fused_moe.py; shuffled in tiles of 64 (trtllm_gen_fused_moe_utils.py FP8BlockScaleMoe)."""
    icheck(w.dtype == FP8, f"{name} must be fp8.")
    icheck(weights.layout in (WeightLayout.MajorK, WeightLayout.BlockMajorK), "Unsupported weight_layout")
    icheck(
        weights.shuffled or weights.layout == WeightLayout.MajorK,
        "no kernel for BlockMajorK without a shuffle",
    )
    rows, k = shape
    if weights.layout == WeightLayout.BlockMajorK:
        icheck(tuple(w.shape[1:]) == (k // 128, rows, 128), f"{name} is [experts, K / 128, Mn, 128]")
    else:
        icheck(tuple(w.shape[1:]) == (rows, k), f"{name} is [experts, Mn, K] = [., {rows}, {k}]")
    unseen(w.shape[0] == local, f"{name} has {w.shape[0]} experts, not {local}")
    dense(w, name, FP8)
    if weights.layout == WeightLayout.BlockMajorK:
        w = w.view(torch.uint8).permute(0, 2, 1, 3).reshape(local, rows, k).view(FP8)
    if not weights.shuffled:
        return w
    plain = torch.empty_like(w)
    plain.view(torch.uint8)[:, row_indices(rows, 64)] = w.view(torch.uint8)
    return plain


def _check_routing(logits, bias, tokens, routing: Routing, offset, local) -> None:
    experts, top_k, n_group, topk_group, scale, method = routing
    icheck(
        logits.ndim == 2 and tuple(logits.shape) == (tokens, experts),
        "routing_logits is [tokens, num_experts]",
    )
    icheck(logits.dtype in (torch.float32, torch.bfloat16), "routing_logits must be float or bfloat16.")
    unseen(logits.is_contiguous(), "routing_logits is read as contiguous")
    if bias is not None:
        icheck(bias.dtype in (torch.bfloat16, torch.float32), "routing_bias must be bfloat16 or float.")
        icheck(tuple(bias.shape) == (experts,), "routing_bias has incorrect shape.")
    icheck(0 < top_k <= experts, "top_k is within num_experts")
    if method == RoutingMethodType.DeepSeekV3:
        icheck(n_group != 0, "n_group should not be zero for DeepSeekV3 routing")
        icheck(topk_group != 0, "if n_group is given, topk_group must be given")
        icheck(experts % n_group == 0, "num_experts must be divisible by n_group")
        icheck(top_k <= (8 if experts <= 384 else 22), "top_k<=8 (22 for more than 384 experts)")
        icheck(0 < topk_group <= min(4, n_group), "topk_group<=4 && topk_group > 0, and not above n_group")
        icheck(
            top_k < topk_group * experts // n_group, "top_k must be less than the experts in selected groups"
        )
        # trtllm_fused_moe_routing_deepseek.cu, with groups only
        icheck(n_group <= 8 and (n_group == 1 or experts // n_group <= 32), "at most 8 groups, of 32 experts")
    else:
        # trtllm_fused_moe_routing_runner.cu sets mRouteScale for DeepSeekV3 and MiniMax2 alone.
        unseen(scale == 1, f"routed_scaling_factor {scale} is ignored by this routing method")
        icheck(
            n_group <= 1 and topk_group <= 1, "Current routing kernel (no groups) only supports n_group <= 1"
        )
        icheck(top_k <= 32, "Current routing kernel (no groups) only supports top_k<=32 && top_k>0.")
    _check_experts(experts, top_k, offset, local)


def _check_picks(ids, weights, tokens, routing: Routing, offset, local) -> None:
    """Picks that are given; trtllm_fused_moe_routing_custom.cuh takes ids within 0 .. num_experts - 1."""
    shape = (tokens, routing.top_k)
    icheck(ids.dtype == torch.int32 and tuple(ids.shape) == shape, "topk_ids is int32 [tokens, top_k]")
    icheck(weights.dtype in (torch.bfloat16, torch.float32), "topk_weights must be bfloat16 or float.")
    icheck(tuple(weights.shape) == shape, "topk_weights is [tokens, top_k]")
    unseen(ids.is_contiguous() and weights.is_contiguous(), "picks are read as contiguous")
    not_doubled(routing.method == RoutingMethodType.TopK, f"given picks by routing method {routing.method}")
    unseen(routing.scale == 1, f"routed_scaling_factor {routing.scale} is ignored by this routing method")
    icheck(0 < routing.top_k <= 32, "Current routing kernel (no groups) only supports top_k<=32 && top_k>0.")
    _check_experts(routing.num_experts, routing.top_k, offset, local)


def _check_experts(experts, top_k, offset, local) -> None:
    icheck(
        0 < local <= experts and offset >= 0 and local + offset <= experts,
        "local experts are within num_experts",
    )
    icheck(experts % 4 == 0, "Routing kernel expects that num_experts must be divisible by 4")
    icheck(experts > top_k, "num_experts must be greater than top_k")


def route(logits, bias, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, top_k] of experts and of weights, which are bfloat16 (prepare_routing)."""
    experts, top_k, n_group, topk_group, scale, method = routing
    logits = logits.float()
    if method == RoutingMethodType.DeepSeekV3:
        scores = torch.sigmoid(logits)
        biased = scores if bias is None else scores + bias.float()
        if n_group > 1:
            best = biased.view(-1, n_group, experts // n_group).topk(2, -1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(
                1, best.topk(topk_group, -1).indices, True
            )
            biased = biased.masked_fill(~kept.repeat_interleave(experts // n_group, 1), float("-inf"))
        chosen = biased.topk(top_k, -1).indices
        shares = scores.gather(1, chosen)
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) * scale
    elif method == RoutingMethodType.Renormalize:
        unseen(bias is None, "routing_bias is not used by Renormalize")
        top = logits.topk(top_k, -1)
        chosen, shares = top.indices, top.values.softmax(-1)
    else:
        not_doubled(method == RoutingMethodType.Default, f"routing method {method}")
        unseen(bias is None, "routing_bias is not used by Default")
        shares, chosen = logits.softmax(-1).topk(top_k, -1)
    return chosen, shares.bfloat16().float()
