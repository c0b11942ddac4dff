"""The FP8 block-scale products of linear layers: other kernels for the same weights.

In bf16 the weights are the FP8 ones dequantised, so that both arms multiply by the same numbers up to bf16's
rounding. `kv_b_proj` keeps its own way in both arms: decode reads it absorbed, and prefill alone calls it.
"""

from __future__ import annotations

import torch

from . import report
from .catalogue import Swap
from .dequantise import dequantised

PARTS = {
    "": (".fused_qkv_a_proj", ".q_b_proj", ".o_proj", ".gate_up_proj", ".down_proj"),
    "attention": (".fused_qkv_a_proj", ".q_b_proj", ".o_proj"),
    "dense": (".mlp.gate_up_proj", ".mlp.down_proj"),
}


def apply(swap: Swap) -> None:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel as Kernel

    ends = PARTS[swap.part]
    prepare = {"bf16": _bf16, "bf16_brgemm": _bf16_brgemm, "unpacked": _unpacked}[swap.to]
    packed_process, packed_apply = Kernel.process_weights_after_loading, Kernel.apply_weights

    def process_weights_after_loading(self, layer):  # type: ignore[no-untyped-def]
        if getattr(layer, "_cpu_skip_gemm_dispatch", False) or not layer.prefix.endswith(ends):
            packed_process(self, layer)
            return
        params = self._get_layer_params(layer)
        scale = params.weight_scale_inv if params.weight_scale_inv is not None else params.weight_scale
        layer._kernel_bench_linear = prepare(self, layer, params.weight.data, scale.data.float())
        report.note("replaced", swap=swap.name, layer=layer.prefix)

    def apply_weights(self, layer, x, bias=None, **kwargs):  # type: ignore[no-untyped-def]
        linear = getattr(layer, "_kernel_bench_linear", None)
        if linear is None:
            return packed_apply(self, layer, x, bias, **kwargs)
        report.called(swap.name)
        return linear(x, bias)

    Kernel.process_weights_after_loading = process_weights_after_loading
    Kernel.apply_weights = apply_weights


def _bf16(kernel, layer, weight: torch.Tensor, scale: torch.Tensor):  # type: ignore[no-untyped-def]
    """As vLLM serves bf16 linears on CPUs: oneDNN's matmul with weights packed beforehand."""
    from vllm import _custom_ops as ops

    handler = ops.create_onednn_mm(dequantised(weight, scale).t(), 32)
    return lambda x, bias: ops.onednn_mm(handler, x, bias)


def _bf16_brgemm(kernel, layer, weight: torch.Tensor, scale: torch.Tensor):  # type: ignore[no-untyped-def]
    """SGLang's product of bf16 weights, which vLLM takes for small ones where there are AMX tiles."""
    from vllm import _custom_ops as ops

    packed = torch.ops._C.convert_weight_packed(dequantised(weight, scale))
    return lambda x, bias: ops.weight_packed_linear_cpu(x, packed, len(weight), bias)


def _unpacked(kernel, layer, weight: torch.Tensor, scale: torch.Tensor):  # type: ignore[no-untyped-def]
    """The same kernel on weights as in the checkpoint, which it packs anew at each call."""
    block = list(kernel.weight_group_shape)
    return lambda x, bias: torch.ops._C.fp8_scaled_mm_cpu(x, weight, scale, block, bias, x.dtype, False)
