"""FP8 block-scale products of the engine's linear layers, by an implementation of `block_scale_gemm`.

`kv_b_proj` keeps its own way: decode reads it absorbed, and prefill alone calls it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from . import report
from .places import LINEARS
from .suite import Swapped, swapped

if TYPE_CHECKING:
    from kernels.block_scale_gemm.operands import BlockScaleGemmOperands
    from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes


def apply(swap: str) -> None:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel as Kernel

    implementation = swapped(swap)
    place = swap.partition("=")[0].partition(":")[2]
    endings = (LINEARS[place],) if place else tuple(LINEARS.values())
    process, apply_weights = Kernel.process_weights_after_loading, Kernel.apply_weights

    def process_weights_after_loading(self, layer):
        if getattr(layer, "_cpu_skip_gemm_dispatch", False) or not layer.prefix.endswith(endings):
            process(self, layer)
            return
        params = self._get_layer_params(layer)
        scale = params.weight_scale_inv if params.weight_scale_inv is not None else params.weight_scale
        layer._kernel_bench_linear = SwappedLinear(implementation, params.weight.data, scale.data.float())
        report.note("replaced", swap=swap, layer=layer.prefix)

    def apply_linear(self, layer, x, bias=None, **kwargs):
        linear = getattr(layer, "_kernel_bench_linear", None)
        if linear is None:
            return apply_weights(self, layer, x, bias, **kwargs)
        product = linear(x)
        return product if bias is None else product + bias

    Kernel.process_weights_after_loading = process_weights_after_loading
    Kernel.apply_weights = apply_linear


class SwappedLinear:
    """One layer's product. weight: FP8 [N, K]; scale: fp32 [N/128, K/128]"""

    def __init__(self, implementation: Swapped, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self.implementation = implementation
        self.weight, self.scale = weight, scale.contiguous()
        self.first = implementation.prepare(self._operands(weight.new_zeros(1, weight.shape[1]).bfloat16()))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """bf16 [..., N] of bf16 [..., K]."""
        product = self.implementation.run(self.first, self._operands(x.reshape(-1, x.shape[-1])))
        return product.view(*x.shape[:-1], -1)

    def _operands(self, a: torch.Tensor) -> BlockScaleGemmOperands:
        from kernels.block_scale_gemm.operands import BlockScaleGemmOperands

        sizes = _sizes(len(a), *self.weight.shape)
        return BlockScaleGemmOperands(self.weight, self.scale, "fp32", sizes, a=a, boundary="with_quant")


@functools.cache
def _sizes(m: int, n: int, k: int) -> BlockScaleGemmSizes:
    from kernels.block_scale_gemm.sizes import BlockScaleGemmSizes

    return BlockScaleGemmSizes(m, n, k)
