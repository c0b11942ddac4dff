"""AITER's Triton and Gluon kernels for MLA decode on AMD GPUs.

Sources: attention/mla.py, attention/mla_decode.py and gluon/mla_gluon.py in aiter/ops/triton of ROCm/aiter at
e404860 and its tags v0.1.15 to v0.1.20.post1; for how an engine calls the last
v1/attention/backends/mla/rocm_aiter_mla.py of vLLM 0.33. Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.binding import Function
from kernels.mla_decode.layouts import (
    FiniteCache,
    cache_bytes,
    full_pages,
    one_head,
    page_list,
    page_starts,
    pages_of,
    parts,
    query_starts,
)
from kernels.mla_decode.operands import SPARE_PAGES, MlaDecodeOperands
from kernels.mla_decode.providers import vllm_triton
from kernels.mla_decode.providers.aiter import one_value
from kernels.mla_decode.sizes import LATENT, ROPE, WIDTH, MlaDecodeSizes
from kernels.op import Prepared
from kernels.support import Support, need
from kernels.vendor import TRITON, Aiter

if TYPE_CHECKING:
    import torch


DECODE = Function(
    "aiter.ops.triton.attention.mla.mla_decode_fwd",
    needs="q kv_buffer out cu_seqlens_q seqused_k max_seqlen_kv block_tables softmax_scale kv_lora_rank "
    "qk_rope_head_dim causal q_descale kv_descale",
    wishes="out_scale shuffled_kv_cache",  # both without a default at 0.1.15
)
SPLIT_KV = Function(
    "aiter.ops.triton.attention.mla_decode.decode_attention_fwd",
    needs=f"{vllm_triton.ARGUMENTS} {vllm_triton.SCALES}",
    wishes="lse is_mla",
)
GLUON = Function(
    "aiter.ops.triton.gluon.mla_gluon.mla_gluon",
    "aiter.ops.triton.gluon.mla_decode_gluon.mla_decode_gluon",
    needs="q_nope q_pe kv_c o page_table seq_info sm_scale k_pe kv_pe_offset use_2d_view min_kv_seq_len",
    wishes="kv_scale",
)


class AiterTritonMlaDecode(Aiter):
    """The segmented kernel, which multiplies whole pages, so that it gets a cache without NaN. q stays bf16,
    to which an FP8 cache is converted on the way."""

    name = "aiter.triton"
    requires = "AITER 0.1.15 or later, gfx942 or gfx950"
    since = "0.1.15"
    also = TRITON
    symbols = (DECODE,)

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
        page = tile_page(operands.page)
        self.decode = DECODE.bind(
            q=operands.q,
            kv_buffer=one_head(pages_of(self.kv, page)),
            out=out,
            cu_seqlens_q=query_starts(operands),
            seqused_k=operands.lengths,
            max_seqlen_kv=max(operands.host_lengths),
            block_tables=full_pages(operands, page),
            softmax_scale=operands.scale,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            causal=True,
            q_descale=None,
            kv_descale=kv_scale(operands),
            out_scale=None,
            shuffled_kv_cache=False,
        )

    def call(self) -> None:
        self.decode()


class TritonSplit(Aiter):
    """The split-KV kernel that AITER took over from vLLM, split by the longest sequence, as vLLM does without
    graphs. No engine runs it."""

    name = "aiter.triton_split"
    requires = "AITER 0.1.15 or later, gfx942 or gfx950"
    since = "0.1.15"
    also = TRITON
    symbols = (SPLIT_KV,)

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return vllm_triton.workspace(sizes, max(sizes.lengths()))

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return vllm_triton.VllmSplitKv(operands, out, SPLIT_KV, max(operands.host_lengths))


class GluonMlaDecode(Aiter):
    """`mla_gluon`: what vLLM runs for 1, 2, 4 or 8 heads where the cache of a layer, that of all requests,
    takes up to 2 GiB. Of a larger one it masks no loads, and vLLM runs `aiter.asm_persistent`."""

    name = "aiter.gluon"
    requires = "AITER 0.1.15 or later with Triton 3.7 or later, gfx950"
    since = "0.1.15"  # before, it took 64 and 128 heads alone
    archs = ("gfx950",)
    also = TRITON
    symbols = (GLUON,)

    MOST_HEADS = 16  # of all versions, in batches of any size
    MOST_BYTES = 2 << 30
    WORKGROUPS = 256  # over which it splits sequences

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        cache = (sizes.used_pages + SPARE_PAGES) * sizes.page * WIDTH * 2
        return Support.all_of(
            need(sizes.kv == "bf16", f"takes a bf16 cache in batches of any size, not {sizes.kv}"),
            need(sizes.heads <= self.MOST_HEADS, f"takes up to {self.MOST_HEADS} heads, not {sizes.heads}"),
            need(cache <= self.MOST_BYTES, "takes a cache of up to 2 GiB, beyond which it masks no loads"),
        )

    def layout(self, sizes: MlaDecodeSizes) -> int:
        return sizes.tokens * 4

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        """Partial results in bf16, and in fp32 the logarithms of their sums."""
        parts_of_all = max(sizes.batch, self.WORKGROUPS)
        return parts_of_all * sizes.heads * (LATENT * 2 + 4)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _GluonMlaDecode(operands, out)


class _GluonMlaDecode(Prepared):
    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        q_nope, q_pe = parts(operands.q)
        self.decode = GLUON.bind(
            q_nope=q_nope,
            q_pe=q_pe,
            kv_c=operands.kv.view(-1, WIDTH),
            o=out,
            page_table=page_list(operands, 1),
            seq_info=page_starts(operands, 1),
            sm_scale=operands.scale,
            k_pe=None,
            kv_pe_offset=LATENT,
            use_2d_view=False,
            min_kv_seq_len=1,
            kv_scale=1.0,
        )

    def call(self) -> None:
        self.decode()


def tile_page(page: int) -> int:
    """The page as its tile, as vLLM chooses it: the largest power of two that divides it, up to 128."""
    return min(128, page & -page)


def kv_scale(operands: MlaDecodeOperands) -> torch.Tensor | None:
    """fp32 [1] on an FP8 cache."""
    return None if operands.kv.element_size() > 1 else one_value(operands.kv_scale, operands.kv.device)
