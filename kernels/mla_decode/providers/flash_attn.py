"""FlashAttention with a second query part, which makes MLA of it: softmax(scale (q k^T + qv v^T)) v.

k is the rope part of the cache and v the latent one, views of the same rows. Sources:
hopper/flash_attn_interface.py, flash_api.cpp and paged_kv.h, and flash_attn/cute/interface.py, of
Dao-AILab/flash-attention at 0251105 (2026-08). Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import vendor
from kernels.binding import find, keywords
from kernels.mla_decode.compute_units import HOPPER_UNITS
from kernels.mla_decode.layouts import (
    FiniteCache,
    OneToken,
    cache_bytes,
    full_pages,
    one_head,
    one_token,
    parts,
)
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, ROPE, MlaDecodeSizes
from kernels.op import Prepared
from kernels.support import Support, need

if TYPE_CHECKING:
    import torch


class FlashAttentionMlaDecode(vendor.FlashAttention):
    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return need(sizes.kv == "bf16", f"takes a bf16 cache, not {sizes.kv}")


class FlashAttentionFa3MlaDecode(FlashAttentionMlaDecode, vendor.FlashAttention3):
    """`flash_attn_with_kvcache`, its schedule made before timing. With more than 64 heads it multiplies whole
    pages, so that it gets a cache without NaN."""

    name = "flash_attn.fa3"
    requires = "FlashAttention 3 with qv and get_scheduler_metadata (2025-03 or later, from source), sm_90"

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """Partial results, fp32, of splits that fill the device; the cache."""
        rows = (sizes.batch + HOPPER_UNITS) * sizes.heads
        return rows * (LATENT + 1) * 4 + cache_bytes(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _Fa3(operands)


class _Fa3(OneToken, FiniteCache):
    def __init__(self, operands: MlaDecodeOperands) -> None:
        super().__init__(operands, None)
        self.attend = find("flash_attn_interface.flash_attn_with_kvcache")
        table = full_pages(operands, operands.page)
        qv, q = parts(one_token(operands.q))
        v, k = parts(one_head(self.kv))
        needed = {
            "q": q,
            "k_cache": k,
            "v_cache": v,
            "qv": qv,
            "cache_seqlens": operands.lengths,
            "page_table": table,
            "softmax_scale": operands.scale,
            "causal": False,
            "scheduler_metadata": schedule(operands, table),
        }
        self.arguments = keywords(self.attend, needed)

    def call(self) -> None:
        self.answer = self.attend(**self.arguments)


class Fa4MlaDecode(FlashAttentionMlaDecode, vendor.FlashAttention4):
    """`flash_attn_varlen_func` of the CuTe DSL. It does not split a sequence, so that few of them leave most
    of the device idle. It is not known to mask values, so that it gets a cache without NaN."""

    name = "flash_attn.fa4"
    requires = "FlashAttention 4 (flash-attn-4) with qv, sm_100 or sm_103"
    archs = vendor.BLACKWELL  # those on which it takes qv

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        heads = need(128 % sizes.heads == 0, f"takes heads that divide 128, not {sizes.heads}")
        return Support.all_of(super().fits(sizes), heads)

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return cache_bytes(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _Fa4(operands)


class _Fa4(OneToken, FiniteCache):
    def __init__(self, operands: MlaDecodeOperands) -> None:
        super().__init__(operands, None)
        self.attend = find("flash_attn.cute.flash_attn_varlen_func")
        qv, q = parts(one_token(operands.q))
        v, k = parts(one_head(self.kv))
        needed = {
            "q": q,
            "k": k,
            "v": v,
            "qv": qv,
            "seqused_k": operands.lengths,
            "page_table": full_pages(operands, operands.page),
            "softmax_scale": operands.scale,
            "causal": False,
        }
        self.arguments = keywords(self.attend, needed)

    def call(self) -> None:
        self.answer, *_ = self.attend(**self.arguments)


def schedule(operands: MlaDecodeOperands, table: torch.Tensor) -> torch.Tensor:
    """FA3's, for the longest sequence that the table has room for: the call chooses its splits by that."""
    metadata = find("flash_attn_interface.get_scheduler_metadata")
    batch, heads = operands.q.shape[:2]
    needed = {
        "batch_size": batch,
        "max_seqlen_q": 1,
        "max_seqlen_k": table.shape[1] * operands.page,
        "num_heads_q": heads,
        "num_heads_kv": 1,
        "headdim": ROPE,
        "headdim_v": LATENT,
        "cache_seqlens": operands.lengths,
        "qkv_dtype": operands.q.dtype,
        "page_size": operands.page,
        "causal": False,
    }
    return metadata(**keywords(metadata, needed))
