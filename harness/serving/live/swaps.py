"""Swaps: which implementations of the suite a live engine can be made to call, and by what names.

A swap is `OP[:PLACE]=IMPLEMENTATION`, as `serving replay --swap` has it: `mla_decode=vllm.vec`,
`block_scale_gemm:o_proj=vllm.onednn`. The engine's process runs the implementation's own code (live/plugin).
"""

from __future__ import annotations

from collections.abc import Sequence

import kernels
from harness.serving.live.plugin.places import LINEARS
from harness.serving.replay.child import BOUNDARY
from harness.serving.replay.step import called_ops
from kernels.op import Implementation
from kernels.platform import Platform

ABSORBED = "absorbed=contiguous"
"""No implementation of the suite: the batched products that kv_b becomes, on weights laid out for them."""

LEFT_ALONE = "block_scale_gemm:kv_b"
"""What a swap of all linears does not reach: decode reads its weights absorbed."""

_ATTENTION = tuple(f"block_scale_gemm:{place}" for place in ("qkv_a", "q_b", "o_proj"))
_DENSE = tuple(f"block_scale_gemm:{place}" for place in ("dense gate_up", "dense down"))

RENAMED = {
    "mla_decode=mla_decode_kvcache": ("mla_decode=vllm.vec",),
    "mla_decode=decode_attention_cpu": ("mla_decode=vllm.amx",),
    "mla_decode=torch_padded": ("mla_decode=torch.naive",),
    "linears=bf16": ("block_scale_gemm=vllm.onednn",),
    "linears=bf16_brgemm": ("block_scale_gemm=vllm.brgemm_bf16",),
    "linears=unpacked": ("block_scale_gemm=vllm.amx_unpacked",),
    "linears.attention=bf16": tuple(f"{place}=vllm.onednn" for place in _ATTENTION),
    "linears.attention=unpacked": tuple(f"{place}=vllm.amx_unpacked" for place in _ATTENTION),
    "linears.dense=bf16": tuple(f"{place}=vllm.onednn" for place in _DENSE),
    "experts=bf16_vec": ("fused_moe=vllm.vec",),
    "experts=bf16_brgemm": ("fused_moe=vllm.brgemm_bf16",),
    "experts=torch_grouped": ("fused_moe=torch.bf16",),
    "prefill=extend_attention_cpu": ("mha_prefill=vllm.extend",),
}
"""Names in records and experiments from before swaps had the suite's -> the same kernels' names."""


def current_names(names: Sequence[str]) -> tuple[str, ...]:
    """The same swaps; those with names of old by the suite's."""
    return tuple(new for name in names for new in RENAMED.get(name, (name,)))


def known_swaps() -> list[str]:
    """Those of whole ops, which an engine on a CPU can be made to call."""
    return [*(f"{op}={i.name}" for op in called_ops() for i in _callable(op)), ABSORBED]


def is_swap(name: str) -> bool:
    """Whether there is one of this name, of an op or of one of its places."""
    key, _, implementation = name.partition("=")
    op, colon, place = key.partition(":")
    if colon and (op != "block_scale_gemm" or place not in LINEARS):
        return False
    return f"{op}={implementation}" in known_swaps()


def implementations(names: Sequence[str]) -> dict[str, str]:
    """`op` or `op:place` -> implementation, as a replay takes them, of what those swaps replace."""
    parts = (name.partition("=") for name in names)
    return {key: name for key, _, name in parts if key.partition(":")[0] in kernels.OPS}


def _callable(op: str) -> list[Implementation]:
    """An engine calls its op in the boundary that a replay does, on operands that change with each call."""
    boundary = BOUNDARY.get(op, "core")
    anywhere = Platform("cpu", "x86-avx512", here=False)
    return [
        i
        for i in kernels.implementations(op)
        if i.rebinds and i.native(boundary) == boundary and i.available(anywhere).ok
    ]
