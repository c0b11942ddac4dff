"""vLLM's FP8 kernels on a CPU with AVX-512 and without AMX tiles.

vLLM 0.32 offers `fp8_scaled_mm_cpu` and `fused_experts_cpu` only where there are AMX tiles, and refuses to
serve an FP8 block-scale model elsewhere. The kernels themselves stand on oneDNN's brgemm, which takes AVX-512
where there are no tiles; the suite's checks hold them to the reference there. So this lets vLLM choose them.
All arms of a comparison have it alike.
"""

from __future__ import annotations

import torch

from . import report


def allow() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or torch.cpu._is_amx_tile_supported():
        return
    if not torch.cpu._is_avx512_bf16_supported():
        return
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8

    CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)
    report.note("allowed", what="FP8 kernels without AMX tiles")
