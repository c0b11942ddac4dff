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
        yield Contract(
            op, name, arch, tuple(double.split()), cases, boundary, 2 if op == "mha_prefill" else 1
        )


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

RAGGED = "batch=3 ctx=1..130"
ZERO_SPARE = "batch=1 ctx=2112..2432 page=64"
"""Its page 0 is nobody's."""


AITERS = (("gfx942 gfx950", "aiter_attention"), ("gfx942", "aiter_attention aiter_attention_019"))
"""Architectures and doubles: a recent AITER, and 0.1.9, whose planner and decode take other arguments."""


def mla() -> Iterator[Contract]:
    every, fp8 = (f"{RAGGED} page=1", f"{RAGGED} page=16", f"{RAGGED} heads=128 page=64"), "fp8={fp8}"
    for name, archs, double, *texts in (
        *(("aiter.asm", archs, double, *every, f"{RAGGED} page=64 kv=fp8 {fp8}", ZERO_SPARE)
          for archs, double in AITERS),
        *(("aiter.asm_persistent", archs, double, *every[:2], f"{RAGGED} page=64 kv=fp8 {fp8}",
           f"batch=2 ctx=1..130 heads=128 page=16 kv=fp8 {fp8}", ZERO_SPARE)
          for archs, double in AITERS),
        ("aiter.asm_persistent", "gfx942 gfx950", "aiter_attention",
         f"{RAGGED} heads=8 page=16", f"{RAGGED} heads=12 page=16 kv=fp8 {fp8}"),
        # On gfx942 that is refused (ROCm/aiter#4957).
        ("aiter.asm_persistent", "gfx950", "aiter_attention",
         f"batch=2 ctx=1..130 heads=64 page=64 kv=fp8 {fp8}"),
        ("aiter.asm_persistent@sglang", "gfx942", "aiter_attention", f"{RAGGED} page=16 kv=fp8 {fp8}"),
        ("aiter.asm_persistent@sglang", "gfx942 gfx950", "aiter_attention",
         f"batch=2 ctx=200..700 page=64 kv=fp8 {fp8}", f"{ZERO_SPARE} kv=fp8 {fp8}"),
        ("aiter.triton", "gfx942", "aiter_attention",
         f"{RAGGED} page=16", f"{RAGGED} heads=128 page=64", f"{RAGGED} page=64 kv=fp8 {fp8}"),
        ("aiter.triton_split", "gfx942", "aiter_attention",
         f"{RAGGED} page=1", f"{RAGGED} heads=128 page=64", f"{RAGGED} page=16 kv=fp8 {fp8}"),
        ("aiter.gluon", "gfx950", "aiter_attention", f"{RAGGED} page=1", f"{RAGGED} heads=8 page=16",
         f"{RAGGED} heads=4 page=64", ZERO_SPARE),
        *(("flashmla", "sm_90", double, f"{RAGGED} page=64", "batch=2 ctx=1..130 heads=128 page=128",
           "batch=3 ctx=1..300 page=64") for double in ("flash_mla", "flash_mla_2025")),
        *((name, "sm_90", double, f"{RAGGED} page=64", f"{RAGGED} page=64 kv=fp8",
           "batch=2 ctx=1..130 heads=128 page=128", "batch=3 ctx=1..300 page=128 kv=fp8")
          for name, double in (("flashmla", "sgl_flash_mla"), ("flashmla@vllm", "vllm_attention"))),
        *((name, "sm_90", "flashinfer_attention", *every, f"{RAGGED} page=64 kv=fp8")
          for name in ("flashinfer.fa2", "flashinfer.fa3")),
        ("flashinfer.cutlass", "sm_100", "flashinfer_attention",
         "batch=3 ctx=1..130 heads=128 page=64", "batch=2 ctx=100..300 heads=128 page=16"),
        *((name, "sm_100 sm_103", "flashinfer_attention",
           f"{RAGGED} page=64", f"{RAGGED} heads=128 page=32", f"{RAGGED} page=64 kv=fp8")
          for name in ("flashinfer.trtllm", "flashinfer.cute_dsl", "flashinfer.auto")),
        *((name, "sm_100", "flashinfer_attention", f"{RAGGED} heads=24 page=32")
          for name in ("flashinfer.cute_dsl", "flashinfer.auto")),
        ("flash_attn.fa3", "sm_90", "flash_attn_3", *every),
        ("flash_attn.fa3@vllm", "sm_90", "vllm_attention", *every),
        ("flash_attn.fa3@sglang", "sm_90", "sglang_kernel_attention", *every),
        ("flash_attn.fa4", "sm_100 sm_103", "flash_attn_4", *every[1:], "batch=1 ctx=700 page=64"),
        ("vllm.cutlass_mla", "sm_100", "vllm_mla", f"{RAGGED} page=16", f"{RAGGED} heads=128 page=128"),
        ("tokenspeed_mla", "sm_100 sm_103", "tokenspeed_mla",
         f"{RAGGED} page=32 kv=fp8", f"{RAGGED} heads=128 page=64 kv=fp8"),
        ("sglang.triton", "sm_90 gfx942", "sglang", every[0], every[2],
         f"batch=2 ctx=100..700 page=16 kv=fp8 {fp8}"),
    ):  # fmt: skip
        yield from rows("mla_decode", name, archs, double, *texts)


FRESH = "batch=3 new=1..40 heads=4"
CACHED = "batch=3 new=1..40 prefix=0..30 heads=4"
LONG = "batch=3 new=1..40 prefix=100..300 heads=4"
PLANNED = "batch=2 new=1..257 prefix=128..1100 heads=16"
"""Of two tiles of query rows, and one key more than full steps of 128; on 256 compute units every one has
work, and each tile is split."""


def prefill() -> Iterator[Contract]:
    cases = (FRESH, CACHED, "batch=2 new=33 prefix=1 heads=2", "batch=2 new=1 prefix=5 heads=16", LONG)
    for name, archs, double, *dtypes in (
        ("aiter.dispatch", "gfx942 gfx950", "aiter_attention", "bf16"),
        ("aiter.asm", "gfx942 gfx950", "aiter_attention", "bf16"),
        ("aiter.ck", "gfx942", "aiter_attention", "bf16"),
        ("aiter.opus", "gfx950", "aiter_attention", "bf16"),
        ("aiter.triton", "gfx942", "aiter_attention", "bf16"),
        ("aiter.fp8", "gfx942 gfx950", "aiter_attention", "fp8"),
        ("aiter.fp8_ps", "gfx950", "aiter_attention", "fp8"),
        ("flash_attn.fa2", "sm_90", "flash_attn", "bf16"),
        ("flash_attn.fa3", "sm_90", "flash_attn_3", "bf16", "fp8"),
        ("flash_attn.fa3@vllm", "sm_90", "vllm_attention", "bf16", "fp8"),
        ("flash_attn.fa3@sglang", "sm_90", "sglang_kernel_attention", "bf16", "fp8"),
        ("flash_attn.fa4@vllm", "sm_90", "vllm_attention", "bf16"),
        ("flash_attn.fa4@vllm", "sm_103", "vllm_attention", "bf16", "fp8"),
        ("flash_attn.fa4", "sm_90", "flash_attn_4", "bf16"),
        ("flash_attn.fa4", "sm_100", "flash_attn flash_attn_4", "bf16"),
        ("flashinfer.fa2", "sm_90", "flashinfer_attention", "bf16"),
        ("flashinfer.fa3", "sm_90", "flashinfer_attention", "bf16"),
        ("flashinfer.cutlass", "sm_100", "flashinfer_attention", "bf16", "fp8"),
        ("flashinfer.cudnn", "sm_100", "flashinfer_attention cudnn_frontend", "bf16"),
        ("flashinfer.trtllm", "sm_100", "flashinfer_attention", "bf16", "fp8"),
        ("flashinfer.cute_dsl", "sm_100", "flashinfer_attention", "fp8"),
        ("cudnn", "sm_90 sm_100", "cudnn_frontend", "bf16"),
        ("cudnn", "sm_100", "cudnn_frontend", "fp8"),
        ("sglang.triton_extend", "sm_90 gfx942", "sglang", "bf16"),
    ):
        texts = (FRESH, PLANNED, *cases[1:]) if name == "aiter.fp8_ps" else cases
        for dtype in dtypes:
            yield from rows("mha_prefill", name, archs, double, *(f"{text} dtype={dtype}" for text in texts))


def tilelang() -> Iterator[Contract]:
    """On TileLang itself, for which tests/support/tilelang_on_cpu.py stands in for the devices: pages that
    are steps and others, few heads and many, sequences of one part and of several."""
    for name, archs in (("tilelang.tiled", "sm_90 sm_100 gfx942 gfx950"),):
        texts = ("m=1 n=128 k=128", "m=33 n=384 k=640", "m=130 n=192 k=256")
        yield from rows("block_scale_gemm", name, archs, "", *texts)
    for archs in ("sm_90 sm_100", "gfx942 gfx950"):
        texts = (f"{RAGGED} page=64", f"{RAGGED} page=16", f"{RAGGED} heads=128 page=64", f"{RAGGED} page=1",
                 ZERO_SPARE)  # fmt: skip
        yield from rows("mla_decode", "tilelang.split", archs, "", *texts)


def interpreted(contract: Contract) -> bool:
    """It stands between the suite's own Triton kernels, which a CPU interprets."""
    return contract.op == "fused_moe" and contract.name.startswith(("deepgemm.", "aiter.triton"))


def _made(parts: Iterable[Iterator[Contract]]) -> list[Contract]:
    return [contract for part in parts for contract in part]


CONTRACTS = _made((gemm(), moe(), mla(), prefill()))
TILELANG = _made((tilelang(),))
