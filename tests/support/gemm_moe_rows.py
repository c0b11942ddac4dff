"""Which rows of products with block scales and of fused MoE are recorded (see recorded_rows.py)."""

from collections.abc import Iterator

import kernels
from tests.support.recorded import Case, rows

RAGGED = "m=33 n=384 k=640"
"""Rows that fill neither tiles nor 16 bytes of scales; K not in fours of blocks."""

PART = "m=5 n=192 k=640"
"""N not in blocks either."""


def block_scale_gemm() -> Iterator[Case]:
    aiter = [i.name for i in kernels.implementations("block_scale_gemm") if i.name.startswith("aiter.")]
    for name, archs, libraries, *further in (
        ("cublaslt", "sm_90", "", PART),
        ("deepgemm", "sm_90 sm_100 sm_103", "deep_gemm", PART),
        ("deepgemm", "sm_90 sm_100", "deep_gemm 2.6.1"),
        ("deepgemm@vllm", "sm_90 sm_100 sm_103 sm_120", "vllm"),
        ("deepgemm@sglang", "sm_90 sm_100 sm_103", "deep_gemm, sglang"),
        ("deepgemm@sglang", "sm_90", "deep_gemm, sglang 0.5.9"),
        ("vllm.cutlass", "sm_90 sm_100 sm_103 sm_120", "vllm", PART),
        ("sglang.cutlass", "sm_120", "sglang"),
        ("flashinfer.sm90", "sm_90", "flashinfer", PART),
        ("flashinfer.groupwise", "sm_100 sm_103", "flashinfer", PART, "m=253 n=384 k=640"),
        ("flashinfer.trtllm", "sm_100 sm_103", "flashinfer", PART),
        ("flashinfer.cutile", "sm_100 sm_103 sm_120", "flashinfer", PART),
        ("vllm.triton", "sm_90 gfx942", "vllm"),
        ("sglang.triton", "sm_90 gfx942", "sglang"),
        ("sglang.triton", "sm_90", "sglang 0.5.9"),
        *((name, "gfx942 gfx950", "aiter") for name in aiter),
        ("aiter.triton", "gfx942", "aiter 0.1.5"),
        ("aiter.triton_preshuffled", "gfx942", "aiter 0.1.10.post3"),
    ):
        yield from rows("block_scale_gemm", name, archs, libraries, RAGGED, *further)
        yield from rows("block_scale_gemm", name, archs, libraries, RAGGED, boundary="with_quant")
    few = "m=5 n=4096 k=1024"
    yield from rows(
        "block_scale_gemm", "sglang.small_m", "gfx950", "sglang, aiter", few, boundary="with_quant"
    )


SMALL = "tokens=5 experts=8 topk=2 hidden=256 inter=128"
MANY = "tokens=40 experts=8 topk=3 hidden=256 inter=128 shared=1"
EP = "tokens=5 experts=16 topk=4 hidden=256 inter=128 ep=2 shared=1 routing=uniform"
DEEP = "tokens=3 experts=4 topk=2 hidden=640 inter=640"
DEEP_IN_FOURS = "tokens=40 experts=8 topk=3 hidden=512 inter=640 shared=1"
ROUTED = "tokens=7 experts=16 topk=2 hidden=256 inter=128"


def fused_moe() -> Iterator[Case]:
    for name, libraries, archs, boundary, *texts in (
        ("aiter.dispatch", "aiter", "gfx942 gfx950", "with_quant", SMALL, MANY),
        ("aiter.dispatch", "aiter", "gfx950", "with_routing", EP),
        ("aiter.dispatch@sglang", "aiter, sglang", "gfx942 gfx950", "with_quant", SMALL),
        ("aiter.dispatch@sglang", "aiter, sglang", "gfx950", "with_routing", EP),
        ("aiter.dispatch@sglang", "aiter, sglang 0.5.20", "gfx950", "with_quant", SMALL),
        ("aiter.asm", "aiter", "gfx942", "core", SMALL),
        ("aiter.asm", "aiter", "gfx950", "with_quant", MANY),
        ("aiter.asm", "aiter", "gfx942", "with_routing", EP),
        ("aiter.asm", "aiter 0.1.5", "gfx942", "core", SMALL),
        ("aiter.ck", "aiter", "gfx942", "core", SMALL),
        ("aiter.ck", "aiter", "gfx950", "with_quant", MANY),
        ("aiter.ck", "aiter", "gfx942", "with_routing", EP),
        ("aiter.ck", "aiter 0.1.5", "gfx942", "core", SMALL),
        ("aiter.triton", "aiter", "gfx942", "core", SMALL),
        ("aiter.triton", "aiter", "gfx950", "with_routing", EP),
        ("flashinfer.cutlass", "flashinfer", "sm_90", "with_quant", SMALL),
        ("flashinfer.cutlass", "flashinfer", "sm_90", "with_routing", EP),
        ("flashinfer.trtllm", "flashinfer", "sm_100 sm_103", "with_routing",
         ROUTED, f"{ROUTED} ep=2 routing=uniform"),
        ("flashinfer.trtllm", "flashinfer", "sm_100", "with_routing", f"{ROUTED} shared=1"),
        ("flashinfer.trtllm", "flashinfer 0.6.3", "sm_100", "with_routing", ROUTED),
        ("flashinfer.trtllm@sglang", "flashinfer", "sm_100 sm_103", "with_routing",
         ROUTED, f"{ROUTED} ep=2 routing=uniform"),
        ("flashinfer.trtllm_routed@sglang", "flashinfer", "sm_100 sm_103", "with_quant",
         ROUTED, f"{ROUTED} ep=2"),
        ("flashinfer.trtllm_routed@sglang", "flashinfer", "sm_100", "with_routing",
         f"{ROUTED} ep=2 routing=uniform"),
        ("deepgemm.contiguous", "deep_gemm", "sm_90 sm_100", "core", DEEP),
        ("deepgemm.contiguous", "deep_gemm", "sm_90", "with_routing", EP),
        ("deepgemm.contiguous", "deep_gemm 2.1.0", "sm_100", "core", DEEP),
        ("deepgemm.masked", "deep_gemm", "sm_100 sm_103", "core", DEEP),
        ("deepgemm.masked", "deep_gemm", "sm_90", "core", SMALL),
        ("deepgemm.masked", "deep_gemm", "sm_100", "with_routing", EP),
        ("deepgemm@vllm", "vllm", "sm_100 sm_90 sm_103 sm_120", "with_quant", SMALL),
        ("deepgemm@vllm", "vllm", "sm_100", "with_quant", EP),
        ("deepgemm@vllm", "vllm", "sm_100", "with_routing", EP),
        ("deepgemm@vllm", "vllm 0.31.0", "sm_100", "with_quant", SMALL),
        ("deepgemm@sglang", "deep_gemm, sglang", "sm_100 sm_103", "with_quant", DEEP_IN_FOURS),
        ("deepgemm@sglang", "deep_gemm, sglang", "sm_90", "with_quant", SMALL, MANY),
        ("deepgemm@sglang", "deep_gemm, sglang", "sm_90", "with_routing", EP),
        ("vllm.triton", "vllm", "sm_90 gfx942", "with_quant", MANY, EP),
        ("sglang.triton", "sglang", "sm_90", "with_quant", MANY),
        ("sglang.triton", "sglang", "gfx942", "with_routing", EP),
        ("sglang.triton", "sglang 0.5.12", "sm_90", "with_quant", MANY),
    ):  # fmt: skip
        yield from rows("fused_moe", name, archs, libraries, *texts, boundary=boundary)
