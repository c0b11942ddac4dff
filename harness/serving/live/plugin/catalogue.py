"""The swaps: each replaces one op of vLLM by another kernel for the same function, and nothing around it.

Imports neither torch nor vLLM: the harness lists the catalogue too.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Swap:
    """One replaced op.

    name:     `site=kernel`, or `site.part=kernel` where only some layers' op is replaced
    op_class: of harness/serving/op_classes.py
    phase:    where the op runs: `decode`, `prefill` or `both`
    kernel:   what runs instead, as the trace names it
    glue:     what else changes with it; empty: nothing
    """

    name: str
    op_class: str
    phase: str
    kernel: str
    glue: str = ""

    @property
    def site(self) -> str:
        return self.name.partition("=")[0].partition(".")[0]

    @property
    def part(self) -> str:
        return self.name.partition("=")[0].partition(".")[2]

    @property
    def to(self) -> str:
        return self.name.partition("=")[2]


_TABLE = "a table of cache rows, built once a step"
_OWN_OUT = "output and scratch are made by the swap, as the engine's backend for that kernel does"

SWAPS = {
    swap.name: swap
    for swap in (
        Swap(
            "mla_decode=decode_attention_cpu",
            "mla_decode",
            "decode",
            "_C::decode_attention_cpu",
            f"{_TABLE}; {_OWN_OUT}",
        ),
        Swap("mla_decode=mla_decode_kvcache", "mla_decode", "decode", "_C::mla_decode_kvcache", _OWN_OUT),
        Swap("mla_decode=torch", "mla_decode", "decode", "aten::mm, aten::softmax", _TABLE),
        Swap("mla_decode=torch_padded", "mla_decode", "decode", "aten::bmm, aten::softmax", _TABLE),
        Swap("mla_decode=sdpa", "mla_decode", "decode", "aten::scaled_dot_product_attention", _TABLE),
        Swap("linears=bf16", "block_scale_gemm", "both", "_C::onednn_mm"),
        Swap("linears.attention=bf16", "block_scale_gemm", "both", "_C::onednn_mm"),
        Swap("linears.dense=bf16", "block_scale_gemm", "both", "_C::onednn_mm"),
        Swap("linears=bf16_brgemm", "block_scale_gemm", "both", "_C::weight_packed_linear"),
        Swap("linears=unpacked", "block_scale_gemm", "both", "_C::fp8_scaled_mm_cpu (packs at each call)"),
        Swap("linears.attention=unpacked", "block_scale_gemm", "both", "_C::fp8_scaled_mm_cpu (packs ...)"),
        Swap("experts=bf16_brgemm", "fused_moe", "both", "_C::fused_experts_cpu (bf16)"),
        Swap("experts=bf16_vec", "fused_moe", "both", "_C::cpu_fused_moe"),
        Swap("experts=torch_grouped", "fused_moe", "both", "aten::_grouped_mm"),
        Swap("experts=torch", "fused_moe", "both", "aten::mm for each expert that was picked"),
        Swap("prefill=sdpa", "mha_prefill", "prefill", "aten::scaled_dot_product_attention"),
        Swap("prefill=extend_attention_cpu", "mha_prefill", "prefill", "_C::extend_attention_cpu", _TABLE),
        Swap(
            "absorbed=contiguous",
            "absorbed_bmm",
            "decode",
            "aten::bmm of weights laid out for it",
            "the copies that strided weights need fall away",
        ),
    )
}

_MODULES = {
    "mla_decode": "mla_decode",
    "linears": "linears",
    "experts": "experts",
    "prefill": "prefill",
    "absorbed": "absorbed",
}


def apply(name: str) -> None:
    """Replaces the op, in this process, before the engine makes its model. Raises KeyError for no swap."""
    swap = SWAPS[name]
    importlib.import_module(f".{_MODULES[swap.site]}", __package__).apply(swap)
