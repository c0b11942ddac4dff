"""Contracts of all rows that doubles stand in for, with cases that fill neither tiles nor pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import kernels
from tests.support.contracts import Contract

AITER = ("gfx942", "gfx950")
FP8 = {arch: dict(kernels.OPS["mla_decode"].defaults(arch))["fp8"] for arch in AITER}


def rows(
    op: str, name: str, archs: str, double: str, *texts: str, boundary: str = "core"
) -> Iterator[Contract]:
    """Of a row on some architectures. `{fp8}` in a text: the architecture's format."""
    for arch in archs.split():
        fp8 = FP8.get(arch, "e4m3fn")
        cases = tuple(text.replace("{fp8}", fp8) for text in texts)
        yield Contract(op, name, arch, tuple(double.split()), cases, boundary)


def gemm() -> Iterator[Contract]:
    # Rows that fill neither tiles nor 16 bytes of scales; K not in fours of blocks; N not in blocks.
    texts = ("m=1 n=128 k=128", "m=16 n=384 k=512", "m=33 n=384 k=640")
    part = (*texts, "m=5 n=192 k=640")
    aiter = [i.name for i in kernels.implementations("block_scale_gemm") if i.name.startswith("aiter.")]
    for boundary in ("core", "with_quant"):
        for name, archs, double, cases in (
            ("cublaslt", "sm_90", "", part),
            ("deepgemm", "sm_90 sm_100 sm_103", "deep_gemm", part),
            ("deepgemm@vllm", "sm_90 sm_100 sm_103", "vllm_gemm_moe deep_gemm", part),
            ("deepgemm@sglang", "sm_90 sm_100 sm_103", "sglang_moe deep_gemm", part),
            ("vllm.cutlass", "sm_90 sm_100 sm_103 sm_120", "vllm_gemm_moe", part[1:]),
            ("sglang.cutlass", "sm_120", "sglang_gemm", texts),
            ("flashinfer.sm90", "sm_90", "flashinfer_gemm_moe", part),
            ("flashinfer.groupwise", "sm_100 sm_103", "flashinfer_gemm_moe", part),
            ("flashinfer.trtllm", "sm_100 sm_103", "flashinfer_gemm_moe", part[1:]),
            ("hipblaslt.dequantised", "gfx942", "", texts),
            ("sglang.triton", "sm_90 gfx942", "sglang", texts),
            *((name, "gfx942 gfx950", "aiter_gemm_moe", texts) for name in aiter),
            *((name, "gfx942", "aiter_gemm_moe", part[-1:]) for name in aiter if name != "aiter.asm"),
        ):
            yield from rows("block_scale_gemm", name, archs, double, *cases, boundary=boundary)
    few = ("m=5 n=4096 k=1024", "m=32 n=4096 k=1024")
    yield from rows(
        "block_scale_gemm", "sglang.small_m", "gfx950", "sglang aiter_gemm_moe", *few,
        boundary="with_quant",
    )  # fmt: skip


SMALL = "tokens=5 experts=8 topk=2 hidden=256 inter=128"
MANY = "tokens=40 experts=8 topk=3 hidden=256 inter=128 shared=1"
EP = "tokens=5 experts=16 topk=4 hidden=256 inter=128 ep=2 shared=1 routing=uniform"
DEEP = "tokens=3 experts=4 topk=2 hidden=640 inter=640"
DEEP_IN_FOURS = "tokens=40 experts=8 topk=3 hidden=512 inter=640 shared=1"
ROUTED = "tokens=7 experts=32 topk=4 hidden=256 inter=128"


def moe() -> Iterator[Contract]:
    for name, archs, boundary, *texts in (
        ("aiter.dispatch", "gfx942 gfx950", "with_quant", SMALL, MANY),
        ("aiter.dispatch", "gfx950", "with_routing", EP),
        ("aiter.dispatch@sglang", "gfx942 gfx950", "with_quant", SMALL, MANY),
        ("aiter.dispatch@sglang", "gfx950", "with_routing", EP),
        ("aiter.asm", "gfx942", "core", SMALL),
        ("aiter.asm", "gfx950", "with_quant", MANY),
        ("aiter.asm", "gfx942", "with_routing", EP),
        ("aiter.ck", "gfx942", "core", SMALL),
        ("aiter.ck", "gfx950", "with_quant", MANY),
        ("aiter.ck", "gfx942", "with_routing", EP),
        ("aiter.triton", "gfx942", "core", SMALL),
        ("aiter.triton", "gfx950", "with_routing", EP),
        ("flashinfer.cutlass", "sm_90", "with_quant", SMALL),
        ("flashinfer.cutlass", "sm_90", "with_routing", EP),
        ("flashinfer.trtllm", "sm_100 sm_103", "with_routing", ROUTED, f"{ROUTED} ep=2 routing=uniform"),
        (
            "flashinfer.trtllm@sglang",
            "sm_100 sm_103",
            "with_routing",
            ROUTED,
            f"{ROUTED} ep=2 routing=uniform",
        ),
        ("flashinfer.trtllm_routed@sglang", "sm_100 sm_103", "with_quant", ROUTED, f"{ROUTED} ep=2"),
        ("flashinfer.trtllm_routed@sglang", "sm_100", "with_routing", f"{ROUTED} ep=2 routing=uniform"),
        ("deepgemm.contiguous", "sm_90 sm_100", "core", DEEP),
        ("deepgemm.contiguous", "sm_90", "with_routing", EP),
        ("deepgemm.masked", "sm_100 sm_103", "core", DEEP),
        ("deepgemm.masked", "sm_90", "core", SMALL),
        ("deepgemm.masked", "sm_100", "with_routing", EP),
        ("deepgemm@vllm", "sm_100 sm_90 sm_103", "with_quant", SMALL, EP, MANY),
        ("deepgemm@vllm", "sm_100", "with_routing", EP),
        ("deepgemm@sglang", "sm_100 sm_103", "with_quant", DEEP_IN_FOURS),
        ("deepgemm@sglang", "sm_90", "with_quant", SMALL, MANY),
        ("deepgemm@sglang", "sm_90", "with_routing", EP),
        ("sglang.triton", "sm_90", "with_quant", MANY),
        ("sglang.triton", "gfx942", "with_routing", EP),
    ):
        double = MOE_DOUBLES[name] if name in MOE_DOUBLES else MOE_DOUBLES[name.partition(".")[0]]
        yield from rows("fused_moe", name, archs, double, *texts, boundary=boundary)


MOE_DOUBLES = {
    "aiter": "aiter_gemm_moe",
    "aiter.dispatch@sglang": "aiter_gemm_moe sglang",
    "deepgemm": "deep_gemm",
    "deepgemm@vllm": "vllm_gemm_moe deep_gemm",
    "deepgemm@sglang": "sglang_moe deep_gemm",
    "flashinfer": "flashinfer_gemm_moe",
    "sglang": "sglang",
}


def interpreted(contract: Contract) -> bool:
    """It stands between the suite's own Triton kernels, which a CPU interprets."""
    return contract.op == "fused_moe" and contract.name.startswith(("deepgemm.", "aiter.triton"))


def _made(parts: Iterable[Iterator[Contract]]) -> list[Contract]:
    return [contract for part in parts for contract in part]


CONTRACTS = _made((gemm(), moe()))
