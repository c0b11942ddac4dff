"""FlashInfer's MLA decode: its own kernels for Ampere and Hopper, CUTLASS's and TensorRT-LLM's for Blackwell.

Sources: flashinfer/mla/_core.py and csrc/cutlass_mla.cu of flashinfer 0.6.18, mla.cuh, mla_hopper.cuh (which
fill rows past the end with zeros) and cutlass_mla.cuh in its include/flashinfer/attention; the Python of its
tags v0.2.2 to v0.6.17. Untested on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kernels.binding import find, keywords
from kernels.mla_decode.layouts import (
    FiniteCache,
    cache_bytes,
    full_pages,
    one_token,
    page_list,
    page_starts,
    pages_of,
    parts,
    query_buffer,
    query_starts,
)
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, ROPE, MlaDecodeSizes
from kernels.op import Prepared
from kernels.platform import Platform
from kernels.support import Support, need
from kernels.vendor import BLACKWELL, SINCE_AMPERE, FlashInfer
from shapes.case import Case

if TYPE_CHECKING:
    import torch

WORKSPACE = 128 << 20
"""Bytes that the wrappers ask for."""

TILE = 128
"""Tokens that the Blackwell kernels take at a time: their tables are padded to whole tiles."""

NOPE = 128
"""Width of a head's query before absorption, without the rope part."""


class Fa2MlaDecode(FlashInfer):
    """`BatchMLAPagedAttentionWrapper`, planned before timing. An FP8 cache is dequantised on the way, on
    Hopper only: products are of bf16."""

    name = "flashinfer.fa2"
    requires = "flashinfer 0.2.2 or later, sm_80 or later (FP8 cache: 0.6.14 or later, sm_90)"
    archs: ClassVar[tuple[str, ...]] = SINCE_AMPERE
    backend: ClassVar = "fa2"

    def supports(self, case: Case, platform: Platform) -> Support:
        return Support.all_of(
            super().supports(case, platform),
            need(
                case.sizes.get("kv") != "fp8" or platform.arch == "sm_90",
                f"takes an FP8 cache on sm_90, not on {platform.arch}",
            ),
        )

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return WORKSPACE + (8 << 20)

    def layout(self, sizes: MlaDecodeSizes) -> int:
        return sizes.used_pages * 4

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _Planned(operands, out, self.backend)


class FlashInferFa3MlaDecode(Fa2MlaDecode):
    name = "flashinfer.fa3"
    requires = "flashinfer 0.2.3 or later, sm_90 (FP8 cache: 0.6.14 or later)"
    archs = ("sm_90",)
    backend: ClassVar = "fa3"


class _Planned(Prepared):
    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor, backend: str) -> None:
        super().__init__(operands, out)
        wrapper = find("flashinfer.mla.BatchMLAPagedAttentionWrapper")
        self.wrapper = wrapper(workspace(operands), backend=backend)
        self.wrapper.plan(**keywords(self.wrapper.plan, plan(operands)))
        q_nope, q_pe = parts(operands.q)
        ckv, kpe = parts(operands.kv)
        needed = {
            "q_nope": q_nope,
            "q_pe": q_pe,
            "ckv_cache": ckv,
            "kpe_cache": kpe,
            "out": out,
            **scales(operands),
        }
        self.arguments = keywords(self.wrapper.run, needed)

    def call(self) -> None:
        self.wrapper.run(**self.arguments)


class CutlassMlaDecode(FlashInfer):
    """CUTLASS's kernel through the same wrapper, whose call first joins the two parts of q and of the whole
    cache in new memory: that is in its time. The softmax scale is built in."""

    name = "flashinfer.cutlass"
    requires = "flashinfer 0.2.6 or later, sm_100, 128 heads"
    archs = BLACKWELL

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return Support.all_of(
            need(sizes.heads == 128, f"takes 128 heads, not {sizes.heads}"),
            need(sizes.kv == "bf16", f"takes a bf16 cache, not {sizes.kv}"),
            need(TILE % sizes.page == 0, f"needs a page that divides {TILE}"),
        )

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return WORKSPACE + 2 * cache_bytes(sizes)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor) -> Prepared:
        return _CutlassMlaDecode(operands, out)


class _CutlassMlaDecode(FiniteCache):
    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor) -> None:
        super().__init__(operands, out)
        wrapper = find("flashinfer.mla.BatchMLAPagedAttentionWrapper")
        self.wrapper = wrapper(workspace(operands), backend="cutlass")
        q_nope, q_pe = parts(operands.q)
        ckv, kpe = parts(self.kv)
        needed = {
            "q_nope": q_nope,
            "q_pe": q_pe,
            "ckv_cache": ckv,
            "kpe_cache": kpe,
            "out": out,
            "kv_len": operands.lengths,
            "page_table": full_pages(operands, operands.page, TILE // operands.page),
        }
        self.arguments = keywords(self.wrapper.run, needed)

    def call(self) -> None:
        self.wrapper.run(**self.arguments)


class TrtLlmMlaDecode(FlashInfer):
    """TensorRT-LLM's kernels, which come compiled. They are not known to mask values, so that they get a
    cache without NaN. On an FP8 cache the call rounds q to FP8 first, which engines fuse into the kernel
    before."""

    name = "flashinfer.trtllm"
    requires = "flashinfer 0.6.0 or later, sm_100"
    archs = BLACKWELL
    activations = "fp8"
    allocates = True  # versions differ in the shape of the output that they take

    def fits(self, sizes: MlaDecodeSizes) -> Support:
        return Support.all_of(
            need(sizes.heads <= 64 or sizes.heads == 128, f"takes up to 64 heads, or 128, not {sizes.heads}"),
            need(sizes.page % 32 == 0, "needs a page that is a multiple of 32"),
        )

    def workspace(self, sizes: MlaDecodeSizes) -> int:
        return WORKSPACE + cache_bytes(sizes) + sizes.batch * sizes.heads * (LATENT + ROPE)

    def prepare(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> Prepared:
        return _TrtLlmMlaDecode(operands)


class _TrtLlmMlaDecode(FiniteCache):
    def __init__(self, operands: MlaDecodeOperands) -> None:
        super().__init__(operands, None)
        self.decode = find("flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla")
        page = 64 if operands.page % 64 == 0 else 32
        self.query = query_buffer(operands)
        of_scores, of_values = product_scales(operands)
        needed = {
            "query": one_token(self.query),
            "kv_cache": pages_of(self.kv, page),
            "workspace_buffer": workspace(operands),
            "qk_nope_head_dim": NOPE,
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": ROPE,
            "block_tables": full_pages(operands, page, TILE // page),
            "seq_lens": operands.lengths,
            "max_seq_len": max(operands.host_lengths),
            "bmm1_scale": of_scores,
            "bmm2_scale": of_values,
            "backend": "trtllm-gen",
        }
        self.arguments = keywords(self.decode, needed)
        self.answer: torch.Tensor | None = None

    def call(self) -> None:
        if self.query is not self.operands.q:
            self.query.copy_(self.operands.q)
        self.answer = self.decode(**self.arguments)

    def result(self) -> torch.Tensor:
        assert self.answer is not None, "nothing was called"
        return self.answer.view(*self.operands.q.shape[:2], LATENT)


def workspace(operands: MlaDecodeOperands) -> torch.Tensor:
    """Zeros, because semaphores lie in it."""
    import torch

    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=operands.q.device)


def plan(operands: MlaDecodeOperands) -> dict[str, object]:
    return {
        "qo_indptr": query_starts(operands),
        "kv_indptr": page_starts(operands, operands.page),
        "kv_indices": page_list(operands, operands.page),
        "kv_len_arr": operands.lengths,
        "num_heads": operands.q.shape[1],
        "head_dim_ckv": LATENT,
        "head_dim_kpe": ROPE,
        "page_size": operands.page,
        "causal": False,
        "sm_scale": operands.scale,
        "q_data_type": operands.q.dtype,
        "kv_data_type": operands.kv.dtype,
    }


def scales(operands: MlaDecodeOperands) -> dict[str, float]:
    """Of both parts of an FP8 cache."""
    if operands.kv.element_size() > 1:
        return {}
    return {"ckv_scale": operands.kv_scale, "kpe_scale": operands.kv_scale}


def product_scales(operands: MlaDecodeOperands) -> tuple[float, float]:
    """Of q . kv before softmax, and of weights . kv after it; q in FP8 has the scale 1, as in engines."""
    return operands.scale * operands.kv_scale, operands.kv_scale
