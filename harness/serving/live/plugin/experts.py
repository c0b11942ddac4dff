"""The experts' grouped products in FP8: other kernels for the same weights and the same routing."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import report
from .catalogue import Swap
from .dequantise import dequantised


def apply(swap: Swap) -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kernel = {"bf16_brgemm": _Brgemm, "bf16_vec": _Vec, "torch_grouped": _Grouped, "torch": _Torch}[swap.to]
    # Weights are left as loaded, so that they can be dequantised at the first call, when scales are known.
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)

    def run(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *rest, **named):  # type: ignore[no-untyped-def]
        if not hasattr(self, "_kernel_bench_experts"):
            self._kernel_bench_experts = kernel(
                dequantised(w1.data, self.w1_scale), dequantised(w2.data, self.w2_scale)
            )
            report.note("replaced", swap=swap.name, layer=str(id(self)))
        report.called(swap.name)
        self._kernel_bench_experts(output, hidden_states, topk_weights, topk_ids)

    cpu_moe.CPUExpertsFp8.apply = run


class _Brgemm:
    """SGLang's fused kernel on bf16 weights."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        from vllm._custom_ops import CPUQuantMethod

        self.method = CPUQuantMethod.UNQUANT
        self.w13, self.w2 = (torch.ops._C.convert_weight_packed(w) for w in (w13, w2))

    def __call__(self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        from vllm._custom_ops import fused_experts_cpu

        none = (None,) * 5
        fused_experts_cpu(out, x, self.w13, self.w2, weights, ids, self.method, *none)


class _Vec:
    """vLLM's own grouped product for bf16 experts, with AVX-512."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        from vllm._custom_ops import cpu_prepack_moe_weight

        self.w13, self.w2 = (cpu_prepack_moe_weight(w, "vec") for w in (w13, w2))

    def __call__(self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        from vllm._custom_ops import cpu_fused_moe

        weights = weights.float().contiguous()
        cpu_fused_moe(out, x, self.w13, self.w2, None, None, weights, ids.int(), "silu", "vec", False)


class _Grouped:
    """torch's grouped products in bf16: pass by pass what the suite's torch.bf16 does, so that this is the
    kernel that a replay of it has."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self.w13, self.w2 = w13, w2
        self.experts = torch.arange(len(w13), dtype=torch.int32)

    def __call__(self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        key, order = torch.where(ids < 0, len(self.experts), ids).flatten().sort(stable=True)
        ends = torch.searchsorted(key, self.experts.to(key.dtype), right=True, out_int32=True)
        rows = x[order // ids.shape[1]]
        gate, up = torch._grouped_mm(rows, self.w13.mT, offs=ends).chunk(2, -1)
        given = torch._grouped_mm(F.silu(gate) * up, self.w2.mT, offs=ends)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        given = given[place].view(*ids.shape, -1)
        given = torch.where((ids < 0).unsqueeze(-1), 0, given)
        out.copy_(torch.bmm(weights.float().unsqueeze(1), given.float())[:, 0])


class _Torch:
    """An expert after the other, in bf16, with fp32 sums."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self.w13, self.w2 = w13, w2

    def __call__(self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            token, pick = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.w13[expert]).chunk(2, dim=-1)
            given = F.linear(F.silu(gate) * up, self.w2[expert])
            total.index_add_(0, token, given.float() * weights[token, pick].float()[:, None])
        out.copy_(total)
