"""FlashInfer's fused MoE of TensorRT-LLM's generated kernels, with the layouts of weights that these read.

From FlashInfer 0.6.18: flashinfer/fused_moe/core.py, flashinfer/utils.py and fp4_quantization.py (order of
rows), csrc/trtllm_fused_moe_kernel_launcher.cu (Fp8BlockScaleLauncher), csrc/fused_moe/trtllm_backend
(routing), tests/moe/. Up rows of w13 stand before gate rows.
"""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import silu

from tests.doubles.arithmetic import BLOCK, activations, need, read, rounded, weights

FP8 = torch.float8_e4m3fn
TILE = 64  # rows of an epilogue's tile that the kernels are built for
MAJOR_K, BLOCK_MAJOR_K = 0, 2  # WeightLayout
DEEPSEEK_V3, TOP_K = 2, 5  # RoutingMethodType


class FlashInfer:
    def __init__(self, arch: str) -> None:
        self.major = arch[:5]

    def functions(self) -> dict[str, Callable[..., Any]]:
        """By library and name."""
        return {
            "flashinfer.autotune": lambda tune_mode: contextlib.nullcontext(),
            "flashinfer.shuffle_matrix_a": shuffle_matrix_a,
            "flashinfer.convert_to_block_layout": convert_to_block_layout,
            "flashinfer.trtllm_fp8_block_scale_moe": self.routing_moe,
            "flashinfer.trtllm_fp8_block_scale_routed_moe": self.routed_moe,
        }

    def routing_moe(self, **given: Any) -> torch.Tensor:
        g = SimpleNamespace(**given)
        shape = (len(g.hidden_states), g.num_experts)
        need(tuple(g.routing_logits.shape) == shape, "routing_logits is [tokens, num_experts]")
        need(g.routing_logits.dtype in (torch.float32, torch.bfloat16), "routing_logits is float or bfloat16")
        need(g.routing_logits.is_contiguous(), "routing_logits is read as contiguous")
        need(g.routing_method_type == DEEPSEEK_V3, f"another routing, {g.routing_method_type}")
        need(0 < g.topk_group <= min(4, g.n_group) and g.top_k <= 8, "topk_group<=4, top_k<=8")
        return self.experts(g, *route(g))

    def routed_moe(self, **given: Any) -> torch.Tensor:
        g = SimpleNamespace(**given)
        ids, shares = g.topk_ids
        shape = (len(g.hidden_states), g.top_k)
        need(ids.dtype == torch.int32 and tuple(ids.shape) == shape, "topk_ids is int32 [tokens, top_k]")
        need(shares.dtype in (torch.float32, torch.bfloat16), "topk_weights is bfloat16 or float")
        need(ids.is_contiguous() and shares.is_contiguous(), "picks are read as contiguous")
        need(g.routing_method_type == TOP_K and g.routed_scaling_factor == 1, "picks that are given")
        return self.experts(g, ids.long(), shares.bfloat16().float())

    def experts(self, g: SimpleNamespace, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Experts of other ranks are skipped. A scale of x lies at [K/128, token], by pointer."""
        (tokens, hidden), inter, local = g.hidden_states.shape, g.intermediate_size, g.local_num_experts
        need(self.major == "sm_10" and g.num_experts % 4 == 0, "runs on SM100, for a multiple of 4 experts")
        need(0 < local + g.local_expert_offset <= g.num_experts, "local experts are within num_experts")
        need(tuple(g.hidden_states_scale.shape) == (hidden // BLOCK, tokens), "[hidden / 128, tokens]")
        need(g.hidden_states.dtype == FP8 and g.hidden_states.is_contiguous(), "hidden_states must be fp8")
        x = activations(g.hidden_states, read(g.hidden_states_scale, hidden // BLOCK, tokens).T)
        w13 = self.weight(g, g.gemm1_weights, g.gemm1_weights_scale, 2 * inter, hidden)
        w2 = self.weight(g, g.gemm2_weights, g.gemm2_weights_scale, hidden, inter)
        out = torch.zeros(tokens, hidden)
        for expert in range(local):
            token, pick = torch.where(chosen == g.local_expert_offset + expert)
            up, gate = rounded(x[token] @ w13[expert].T, FP8).chunk(2, -1)
            h = rounded(silu(gate) * up, FP8)
            out.index_add_(0, token, (h @ w2[expert].T).bfloat16() * shares[token, pick, None])
        given = getattr(g, "output", None)
        need(given is None or given.is_contiguous(), "output is written as contiguous")
        return out.bfloat16() if given is None else given.copy_(out)

    def weight(
        self, g: SimpleNamespace, given: torch.Tensor, scale: torch.Tensor, rows: int, k: int
    ) -> torch.Tensor:
        """fp32 [local, rows, K] of either layout."""
        blocked = g.weight_layout == BLOCK_MAJOR_K
        need(blocked or g.weight_layout == MAJOR_K, f"Unsupported weight_layout {g.weight_layout}")
        need(
            blocked == g.use_shuffled_weight, "kernels are for rows as they are, or for shuffled blocks of K"
        )
        shape = (g.local_num_experts, k // BLOCK, rows, BLOCK) if blocked else (g.local_num_experts, rows, k)
        need(tuple(given.shape) == shape and given.is_contiguous(), f"weights are {shape}")
        need(given.dtype == FP8 and scale.dtype == torch.float32, "FP8 with fp32 scales")
        need(tuple(scale.shape) == (shape[0], rows // BLOCK, k // BLOCK), "scales per 128x128")
        values = given.view(torch.uint8)
        if blocked:
            in_rows = values.permute(0, 2, 1, 3).reshape(shape[0], rows, k)
            values = torch.empty_like(in_rows)
            values[:, order_of_rows(rows, TILE)] = in_rows
        return weights(values.view(FP8), read(scale, *scale.shape))


def route(g: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3: [tokens, top_k] of experts and weights. Sigmoid; the groups whose two best (with bias) add
    up to most; of these the top k with bias, weighted without."""
    scores = g.routing_logits.float().sigmoid()
    biased = scores + (0 if g.routing_bias is None else g.routing_bias.float())
    groups = biased.unflatten(1, (g.n_group, -1))
    best = groups.topk(2, -1).values.sum(-1).topk(g.topk_group, -1).indices
    left = torch.full_like(groups, -torch.inf).scatter_(1, best[..., None].expand(-1, -1, groups.shape[2]), 0)
    chosen = (groups + left).flatten(1).topk(g.top_k, -1).indices
    shares = scores.gather(1, chosen)
    shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) * g.routed_scaling_factor
    return chosen, shares.bfloat16().float()


def order_of_rows(rows: int, tile: int) -> torch.Tensor:
    """[new row] -> old row: of 16 rows 0, 2, 4, ..., then 1, 3, ...; of tiles of 128 every fourth of 32
    (srcToDstBlk16RowMap, srcToDstBlk32RowMap)."""
    block = 32 if tile % 128 == 0 else 16
    need(rows % block == 0, f"rows are multiples of {block}")
    return torch.arange(rows).view(-1, 8, block // 8).transpose(1, 2).flatten()


def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    return input_tensor[order_of_rows(len(input_tensor), epilogue_tile_m)]


def convert_to_block_layout(input_tensor: torch.Tensor, blockK: int) -> torch.Tensor:
    """[M, K] -> [K / block, M, block]."""
    return input_tensor.unflatten(1, (-1, blockK)).transpose(0, 1).contiguous()
