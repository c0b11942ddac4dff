"""AITER's Triton kernels for MLA decode on AMD GPUs.

Sources: mla.py and mla_decode.py in aiter/ops/triton/attention of ROCm/aiter at e404860 and its tags
v0.1.15 to v0.1.20.post1. Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import find, keywords
from kernels.mla_decode.layouts import FiniteCache, cache_bytes, full_pages, one_head, pages_of, query_starts
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.providers import vllm_triton
from kernels.mla_decode.providers.aiter import one_value
from kernels.mla_decode.sizes import LATENT, ROPE, MlaDecodeSizes
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import TRITON, Aiter

if TYPE_CHECKING:
    import torch


class AiterTritonMlaDecode(Aiter):
    """The segmented kernel, which multiplies whole pages, so that it gets a cache without NaN. q stays bf16,
    to which an FP8 cache is converted on the way."""

    name = "aiter.triton"
    requires = "AITER 0.1.15 or later, gfx942 or gfx950"
    also = TRITON

    SEGMENTS = 128

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        page = tile_page(sizes.page)
        return need(page >= 16, f"needs pages of a multiple of 16 tokens, not {sizes.page}")

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        partial = sizes.batch * sizes.heads * self.SEGMENTS * (LATENT + 2) * 4
        return partial + cache_bytes(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _AiterTritonMlaDecode(operands, out)


class _AiterTritonMlaDecode(FiniteCache):
    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        self.decode = find("aiter.ops.triton.attention.mla.mla_decode_fwd")
        page = tile_page(operands.page)
        needed = {
            "q": operands.q,
            "kv_buffer": one_head(pages_of(self.kv, page)),
            "out": out,
            "cu_seqlens_q": query_starts(operands),
            "seqused_k": operands.lengths,
            "max_seqlen_kv": max(operands.host_lengths),
            "block_tables": full_pages(operands, page),
            "softmax_scale": operands.scale,
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": ROPE,
            "causal": True,
            "q_descale": None,
            "kv_descale": kv_scale(operands),
        }
        # Both without a default at 0.1.15.
        self.arguments = keywords(self.decode, needed, {"out_scale": None, "shuffled_kv_cache": False})

    def call(self) -> None:
        self.decode(**self.arguments)


class TritonSplit(Aiter):
    """The split-KV kernel that AITER took over from vLLM."""

    name = "aiter.triton_split"
    requires = "AITER 0.1.15 or later, gfx942 or gfx950"
    also = TRITON

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return vllm_triton.workspace(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return vllm_triton.VllmSplitKv(
            operands, out, find("aiter.ops.triton.attention.mla_decode.decode_attention_fwd")
        )


def tile_page(page: int) -> int:
    """The page as its tile, as vLLM chooses it: the largest power of two that divides it, up to 128."""
    return min(128, page & -page)


def kv_scale(operands: MlaDecodeOperands) -> torch.Tensor | None:
    """fp32 [1] on an FP8 cache."""
    return None if operands.kv.element_size() > 1 else one_value(operands.kv_scale, operands.kv.device)
