"""The engine's MLA decode over its paged latent cache, by an implementation of `mla_decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from . import report
from .suite import Swapped, swapped

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonDecodeMetadata

LEFT = "_kernel_bench_prepared"  # on a step's metadata, by its first layer for the others


def apply(swap: str) -> None:
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    implementation = swapped(swap)

    def forward_mqa(self, q, cache, attn_metadata, layer):
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q.contiguous()
        return decode(implementation, q, cache, attn_metadata.decode, self.scale), None

    for owner in (CPUMLAImpl, AMXMLAImpl):
        owner.forward_mqa = forward_mqa
    report.note("replaced", swap=swap, layers="all")


def decode(
    implementation: Swapped,
    q: torch.Tensor,
    cache: torch.Tensor,
    step: MLACommonDecodeMetadata,
    scale: float,
) -> torch.Tensor:
    """bf16 [batch, heads, 512] of q bf16 [batch, heads, 576] and cache bf16 [pages, page, 576]. Tables are
    made for a step's first layer; the others have the same requests."""
    from kernels.mla_decode.operands import MlaDecodeOperands
    from kernels.mla_decode.sizes import MlaDecodeSizes

    first = getattr(step, LEFT, None)
    if first is None:
        lengths = step.seq_lens.tolist()
        sizes = MlaDecodeSizes(len(q), f"{min(lengths)}..{max(lengths)}", q.shape[1], cache.shape[1])
        operands = MlaDecodeOperands(
            q, cache, step.block_table.int(), step.seq_lens.int(), lengths, 1.0, sizes, scale
        )
        first = implementation.prepare(operands)
        setattr(step, LEFT, first)
    of_first = cast("MlaDecodeOperands", first.operands)
    return implementation.run(first, of_first.replaced(q=q, kv=cache))
