"""What rows of libraries do not take is refused in words, before anything is prepared."""

import pytest

import kernels
from kernels.op import Unsupported
from kernels.platform import named
from shapes.case import parse
from tests.support.gemm_moe_rows import DEEP, ROUTED
from tests.support.recorded import Case, record

GEMM, MOE, MHA, MLA = kernels.OPS
DEFAULTS: dict[str, dict[str, object]] = {
    GEMM: {"m": 33, "n": 384, "k": 640},
    MOE: {"tokens": 7, "experts": 16, "topk": 2, "hidden": 256, "inter": 128},
    MHA: {"batch": 1, "new": "64"},
    MLA: {"batch": 2, "ctx": "100"},
}
ASM, SGLANGS = "aiter.asm", "aiter.asm_persistent@sglang"
UE8M0 = "takes power-of-two scales (scales=ue8m0), not fp32"
REFUSED = [
    # FP8 formats and scales of architectures
    (GEMM, "aiter.ck", "gfx942", "fp8=e4m3fn", "gfx942 takes e4m3fnuz, not e4m3fn"),
    (GEMM, "aiter.ck", "gfx950", "fp8=e4m3fnuz", "gfx950 takes e4m3fn, not e4m3fnuz"),
    (MOE, ASM, "gfx942", f"{DEEP} fp8=e4m3fn", "gfx942 takes e4m3fnuz, not e4m3fn"),
    (MLA, ASM, "gfx942", "kv=fp8 fp8=e4m3fn", "gfx942 takes e4m3fnuz, not e4m3fn"),
    (MLA, ASM, "gfx950", "kv=fp8 fp8=e4m3fnuz", "gfx950 takes e4m3fn, not e4m3fnuz"),
    *(
        (GEMM, name, arch, "scales=fp32", f"{arch} {UE8M0}" if arch != "sm_90" else "")
        for name in ("deepgemm", "deepgemm@vllm", "deepgemm@sglang")
        for arch in ("sm_90", "sm_100", "sm_103", "sm_120")
        if arch != "sm_120" or name == "deepgemm@vllm"
    ),
    (MOE, "deepgemm@vllm", "sm_100", f"{DEEP} scales=fp32", UE8M0),
    (MOE, "deepgemm@vllm", "sm_90", f"{DEEP} scales=fp32", ""),
    # Architectures
    (GEMM, "cublaslt", "sm_100", "", "needs sm_90; this is sm_100"),
    (GEMM, "flashinfer.cutile", "sm_90", "", "needs sm_100, sm_103 or sm_120; this is sm_90"),
    (GEMM, "deepgemm", "gfx942", "", "needs cuda; this is rocm gfx942"),
    (GEMM, "hipblaslt.dequantised", "sm_90", "", "needs rocm; this is cuda sm_90"),
    (MLA, "flashinfer.auto", "sm_90", "", "needs sm_100 or sm_103; this is sm_90"),
    (MLA, "vllm.triton", "x86-avx512", "", "needs cuda or rocm; this is cpu x86-avx512"),
    # Sizes
    (GEMM, "flashinfer.trtllm", "sm_100", "m=1 n=128 k=128", "needs k to be 256 at least"),
    (GEMM, "sglang.small_m", "gfx950", "m=33 n=4096 k=1024", "takes 32 tokens at most"),
    (GEMM, "sglang.small_m", "gfx950", "m=1 n=2112 k=7168", "takes these n and k alone"),
    (GEMM, "cublaslt", "sm_90", "m=1 n=100 k=200", "needs n and k to be multiples of 16"),
    (GEMM, "deepgemm", "sm_90", "m=1 n=100 k=128", "needs n to be a multiple of 64"),
    (GEMM, "deepgemm", "sm_90", "m=1 n=128 k=200", "needs k to be a multiple of 128"),
    (GEMM, "flashinfer.sm90", "sm_90", "m=1 n=100 k=128", "needs n to be a multiple of 64"),
    (GEMM, "vllm.cutlass", "sm_90", "m=1 n=100 k=128", "needs n to be a multiple of 16"),
    (GEMM, "sglang.cutlass", "sm_120", "m=1 n=192 k=128", "needs n to be a multiple of 128"),
    (GEMM, ASM, "gfx942", "m=1 n=192 k=128", "needs n to be a multiple of 128"),
    *(
        (GEMM, row.name, "gfx942", "m=1 n=100 k=200", "multiple of")
        for row in kernels.implementations(GEMM)
        if row.name.startswith("aiter.")
    ),
    (MOE, "flashinfer.trtllm", "sm_100", "ep=2 shared=1", "fuses a shared expert only where ep=1"),
    (MOE, "flashinfer.trtllm", "sm_100", "experts=30", "routes to a multiple of 4 experts, not 30"),
    (MOE, "flashinfer.trtllm", "sm_100", "experts=8", "takes groups of 2 to 32 experts, not of 1"),
    (MOE, "flashinfer.trtllm", "sm_100", "experts=512 topk=8", "takes groups of 2 to 32 experts, not of 64"),
    (MOE, "flashinfer.trtllm", "sm_100", "topk=8", "fewer than the 8 in reach, not 8"),
    (MOE, "flashinfer.trtllm@sglang", "sm_100", "shared=1", "takes no shared expert"),
    (MOE, "flashinfer.trtllm_routed@sglang", "sm_100", "shared=1", "takes no shared expert"),
    (MOE, "deepgemm@sglang", "sm_100", DEEP, "on sm_100 needs hidden to be a multiple of 512"),
    (MOE, "deepgemm@sglang", "sm_90", DEEP, ""),
    (MHA, "torch.sdpa_cudnn", "sm_90", "prefix=1..9", "needs prefix=0"),
    (MHA, "vllm.dense", "x86-amx", "prefix=1..9", "takes no cached prefix"),
    (MHA, "flash_attn.fa2", "sm_90", "dtype=fp8", "takes dtype=bf16"),
    (MHA, "flash_attn.fa4@vllm", "sm_90", "dtype=fp8", "takes dtype=bf16 on sm_90"),
    (MLA, ASM, "gfx950", "heads=64 kv=fp8", "takes 8, 16, 128 heads with kv=fp8"),
    (MLA, "aiter.asm_persistent", "gfx950", "heads=8", ""),
    (MLA, "aiter.asm_persistent", "gfx950", "heads=256", "takes up to 128 heads, not 256"),
    (MLA, SGLANGS, "gfx942", "", "SGLang calls it on an FP8 cache, not on bf16"),
    (MLA, SGLANGS, "gfx950", "heads=128 kv=fp8", "SGLang calls it at 16 heads, not at 128"),
    (MLA, SGLANGS, "gfx950", "kv=fp8", "by 0 on gfx950 where a sequence has fewer than 196 tokens, as 100"),
    (MLA, SGLANGS, "gfx950", "ctx=196 kv=fp8", ""),
    (MLA, SGLANGS, "gfx942", "kv=fp8 fp8=e4m3fnuz", ""),
    (MLA, "aiter.gluon", "gfx950", "heads=32", "takes up to 16 heads, not 32"),
    (MLA, "aiter.gluon", "gfx950", "kv=fp8", "takes a bf16 cache in batches of any size, not fp8"),
    (MLA, "aiter.gluon", "gfx950", "batch=256 ctx=8192", "up to 2 GiB, beyond which it masks no loads"),
    (MLA, "aiter.triton", "gfx942", "page=8", "needs pages of a multiple of 16 tokens, not 8"),
    (MLA, "flashmla", "sm_90", "page=96", "needs a page that is a multiple of 64"),
    (MLA, "flashinfer.fa2", "sm_100", "kv=fp8", "takes an FP8 cache on sm_90, not on sm_100"),
    (MLA, "flashinfer.cutlass", "sm_103", "heads=16", "takes 128 heads, not 16"),
    (MLA, "flashinfer.trtllm", "sm_103", "heads=96", "takes up to 64 heads, or 128, not 96"),
    (MLA, "flashinfer.cute_dsl", "sm_103", "heads=96", ""),
    (MLA, "flash_attn.fa3", "sm_90", "kv=fp8", "takes a bf16 cache, not fp8"),
]


@pytest.mark.parametrize(("op", "name", "arch", "sizes", "reason"), REFUSED)
def test_what_a_row_does_not_take(op: str, name: str, arch: str, sizes: str, reason: str) -> None:
    (row,) = (i for i in kernels.implementations(op) if i.name == name)
    given = kernels.OPS[op].defaults(arch) | DEFAULTS[op] | (parse(sizes)[0] if sizes else {})
    kind = {"g": "rocm", "s": "cuda", "x": "cpu"}[arch[0]]
    support = row.supports(kernels.OPS[op].case(given, boundary=row.boundaries[0]), named(kind, arch))
    assert support.ok == (not reason) and reason in support.reason, support.reason


@pytest.mark.parametrize(
    ("op", "name", "arch", "library", "text", "reason"),
    [
        (MLA, "flashinfer.fa3", "sm_90", "flashinfer 0.6.11", "page=64", "takes no FP8 cache"),
        (MLA, "sglang.triton", "sm_90", "sglang 0.5.9", "page=64", "has no scales for an FP8 cache"),
        (MLA, "flashmla", "sm_90", "flash_mla 1.0.0+20260429", "page=64", "no dense decode on an FP8 cache"),
        (
            MOE,
            "flashinfer.trtllm",
            "sm_100",
            "flashinfer 0.6.3",
            f"{ROUTED} shared=1",
            "fuses no shared expert",
        ),
    ],
)
def test_what_a_release_does_not_take(op, name, arch, library, text, reason) -> None:
    """Which is no error of the row: it takes other cases."""
    whole, boundary = (f"batch=2 ctx=100 {text} kv=fp8", "core") if op == MLA else (text, "with_routing")
    with pytest.raises(Unsupported, match=f"{library.partition(' ')[0]}.*{reason}"):
        record(Case(op, name, arch, (library,), whole, boundary))
