"""What rows of libraries do not take is refused in words, before anything is prepared."""

import pytest

import kernels
from kernels.mla_decode.providers import aiter
from kernels.op import Unsupported
from kernels.platform import named
from shapes.case import parse, text_of
from tests.support.gemm_moe_rows import DEEP, ROUTED
from tests.support.recorded import RECORDS, Case, record

GEMM, MOE, MHA, MLA = kernels.OPS
DEFAULTS: dict[str, dict[str, object]] = {
    GEMM: {"m": 33, "n": 384, "k": 640},
    MOE: {"tokens": 7, "experts": 16, "topk": 2, "hidden": 256, "inter": 128},
    MHA: {"batch": 1, "new": "64"},
    MLA: {"batch": 2, "ctx": "100"},
}
SGLANGS = "aiter.asm_persistent@sglang"
UE8M0 = "takes power-of-two scales (scales=ue8m0), not fp32"
REFUSED = [
    # Scales of architectures
    *(
        (GEMM, name, arch, "scales=fp32", f"{arch} {UE8M0}" if arch != "sm_90" else "")
        for name in ("deepgemm", "deepgemm@vllm", "deepgemm@sglang")
        for arch in ("sm_90", "sm_100", "sm_103", "sm_120")
        if arch != "sm_120" or name == "deepgemm@vllm"
    ),
    (MOE, "deepgemm@vllm", "sm_100", f"{DEEP} scales=fp32", UE8M0),
    (MOE, "deepgemm@vllm", "sm_90", f"{DEEP} scales=fp32", ""),
    # FP8 formats, which some convert to bf16 before they multiply
    (GEMM, "aiter.ck", "gfx942", "fp8=e4m3fn", "gfx942 takes e4m3fnuz, not e4m3fn"),
    (MOE, "aiter.ck", "gfx950", "fp8=e4m3fnuz", "gfx950 takes e4m3fn, not e4m3fnuz"),
    (MLA, "vllm.triton", "gfx942", "kv=fp8 fp8=e4m3fn", ""),
    (MOE, "flashinfer.trtllm", "sm_100", "experts=16 topk=8", "fewer than the 8 in reach, not 8"),
    # Architectures
    (GEMM, "flashinfer.cutile", "sm_90", "", "needs sm_100, sm_103 or sm_120; this is sm_90"),
    (MLA, "vllm.triton", "x86-avx512", "", "needs cuda or rocm; this is cpu x86-avx512"),
    # Sizes on some architectures
    (MOE, "deepgemm@sglang", "sm_100", DEEP, "on sm_100 needs hidden to be a multiple of 512"),
    (MOE, "deepgemm@sglang", "sm_90", DEEP, ""),
    (MHA, "flash_attn.fa4@vllm", "sm_90", "dtype=fp8", "takes dtype=bf16 on sm_90"),
    (MHA, "aiter.asm", "gfx942", "new=43690 prefix=43691 heads=128", ""),
    (MHA, "aiter.asm", "gfx942", "new=43691 prefix=43691 heads=128", "within a sequence's keys end at 4 GiB"),
    (MLA, SGLANGS, "gfx950", "ctx=100..400 kv=fp8", "where a sequence has fewer than 196 tokens, as 100"),
    (MLA, SGLANGS, "gfx950", "ctx=196 kv=fp8", ""),
    (MLA, SGLANGS, "gfx942", "kv=fp8 fp8=e4m3fnuz", ""),
    (MLA, "aiter.gluon", "gfx950", "batch=256 ctx=8192", "up to 2 GiB, beyond which it masks no loads"),
    (MLA, "flashinfer.fa2", "sm_100", "kv=fp8", "takes an FP8 cache on sm_90, not on sm_100"),
    (MLA, "aiter.asm", "gfx942", "heads=64", "no kernel of 64 heads for one query token"),
    (MLA, "aiter.asm", "gfx942", "heads=64 q=2", ""),
    (MLA, "aiter.asm", "gfx950", "heads=64", ""),
]


@pytest.mark.parametrize(("op", "name", "arch", "sizes", "reason"), REFUSED)
def test_what_a_row_does_not_take(op: str, name: str, arch: str, sizes: str, reason: str) -> None:
    (row,) = (i for i in kernels.implementations(op) if i.name == name)
    given = kernels.OPS[op].defaults(arch) | DEFAULTS[op] | (parse(sizes)[0] if sizes else {})
    kind = {"g": "rocm", "s": "cuda", "x": "cpu"}[arch[0]]
    support = row.supports(kernels.OPS[op].case(given, boundary=row.boundaries[0]), named(kind, arch))
    assert support.ok == (not reason) and reason in support.reason, support.reason


SWEPT = {
    GEMM: ("m=16 n=4096 k=1024", "m=1,32,33 n=64,100,128,192,2112,2560 k=128,200,256,384,7168 fp8=e4m3fnuz"),
    MOE: ("tokens=7 experts=64 topk=8 hidden=7168 inter=2048",
     "tokens=1,4096 experts=30,62,512 topk=1,6,9 hidden=128,1152 inter=128,384 ep=8 shared=1 scales=ue8m0 "
     "fp8=e4m3fnuz"),
    MHA: ("batch=2 new=64 heads=16", "new=1,4096 prefix=1,64 heads=1,3,128 dtype=fp8"),
    MLA: ("batch=2 ctx=100",
     "ctx=1,65536 q=2,8 heads=4,8,20,64,96,127,128,129,256 page=1,7,16,32,48,96,128,256"),
}  # fmt: skip


def test_which_sizes_rows_take(snapshot) -> None:
    """One size after the other in place of the usual one; what stands beside an FP8 cache too."""
    lines = []
    for op, (usual, swept) in SWEPT.items():
        words = [word.partition("=") for word in swept.split()]
        others = [{name: value} for name, _, values in words for value in values.split(",")]
        for base in (usual, *([f"{usual} kv=fp8"] if op == MLA else [])):
            for row in kernels.implementations(op):
                said = [row.fits(kernels.OPS[op].sizes(parse(base)[0] | one)).reason for one in ({}, *others)]
                lines += [f"{op} {row.name}, {base}: {said[0]}\n"] if said[0] else []
                for one, reason in zip(others, said[1:], strict=True):
                    if reason != said[0]:
                        lines.append(f"{op} {row.name}, {text_of(one)}: {reason or 'fits'}\n")
    snapshot(RECORDS / "sizes.txt", "".join(lines))


@pytest.mark.parametrize(("name", "arch", "heads", "kv", "most"), [
    ("aiter.asm", "gfx942", 8, "bf16", 1),
    ("aiter.asm", "gfx950", 8, "bf16", 1),
    ("aiter.asm", "gfx942", 16, "bf16", 8),
    ("aiter.asm", "gfx950", 16, "fp8", 4),
    ("aiter.asm", "gfx942", 128, "fp8", 4),
    ("aiter.asm_persistent", "gfx942", 16, "bf16", 4),
    ("aiter.asm_persistent", "gfx942", 128, "bf16", 4),
    ("aiter.asm_persistent", "gfx942", 128, "fp8", 8),
    ("aiter.asm_persistent", "gfx950", 48, "bf16", 8),
    ("aiter.asm_persistent", "gfx950", 16, "fp8", 8),
    (SGLANGS, "gfx942", 16, "fp8", 4),
    (SGLANGS, "gfx950", 16, "fp8", 8),
])  # fmt: skip
def test_the_most_query_tokens_for_which_aiter_has_kernels(name, arch, heads, kv, most):
    """By its tables of kernels, hsa/*/mla/mla_asm.csv at e404860."""
    (row,) = (i for i in kernels.implementations(MLA) if i.name == name)
    op, platform = kernels.OPS[MLA], named("rocm", arch)
    given = op.defaults(arch) | {"batch": 2, "ctx": "200", "heads": heads, "kv": kv}
    reasons = {q: row.supports(op.case(given | {"q": q}), platform).reason for q in range(1, 9)}
    assert {q for q, reason in reasons.items() if not reason} == set(range(1, most + 1))
    assert all(reason.endswith(f"the most are {most}") for q, reason in reasons.items() if q > most)


@pytest.mark.parametrize(("name", "arch", "sizes", "first"), [
    ("aiter.gluon", "gfx950", "q=2", "0.1.19"), ("aiter.gluon", "gfx950", "q=1", "0.1.16"),
    ("aiter.asm", "gfx942", "q=2", "0.1.18"), ("aiter.asm", "gfx942", "q=1", ""),
    ("aiter.asm", "gfx942", "heads=32", "0.1.13"), ("aiter.asm", "gfx950", "heads=64", "0.1.13"),
    ("aiter.asm", "gfx950", "heads=8 kv=fp8", "0.1.15"),
    ("aiter.asm_persistent", "gfx942", "q=2 heads=32", "0.1.18"),
    ("aiter.asm_persistent", "gfx950", "q=1 heads=32", ""),
    (SGLANGS, "gfx950", "q=4 ctx=200 kv=fp8", "0.1.18"), (SGLANGS, "gfx950", "q=1 ctx=200 kv=fp8", ""),
])  # fmt: skip
def test_the_first_release_that_is_right_with_so_many_query_tokens(monkeypatch, name, arch, sizes, first):
    """supports asks whether the installed one is older, and refuses it by name."""
    asked: list[str] = []
    monkeypatch.setattr(aiter, "is_before", lambda platform, release: asked.append(release) or True)
    (row,) = (i for i in kernels.implementations(MLA) if i.name == name)
    case = kernels.OPS[MLA].case({"batch": 2, "ctx": "100", **parse(sizes)[0]})
    support = row.supports(case, named("rocm", arch))
    assert asked == ([first] if first else [])
    assert support.ok is not bool(first) and (f"needs aiter {first} or later" in support.reason) is bool(
        first
    )


@pytest.mark.parametrize(("op", "name", "arch", "library", "text", "reason"), [
    (MLA, "flashinfer.fa3", "sm_90", "flashinfer 0.6.11", "page=64", "takes no FP8 cache"),
    (MLA, "sglang.triton", "sm_90", "sglang 0.5.9", "page=64", "has no scales for an FP8 cache"),
    (MLA, "flashmla", "sm_90", "flash_mla 1.0.0+20260429", "page=64", "no dense decode on an FP8 cache"),
    (MOE, "flashinfer.trtllm", "sm_100", "flashinfer 0.6.3", f"{ROUTED} shared=1", "no shared expert"),
])  # fmt: skip
def test_what_a_release_does_not_take(op, name, arch, library, text, reason) -> None:
    """Which is no error of the row: it takes other cases."""
    whole, boundary = (f"batch=2 ctx=100 {text} kv=fp8", "core") if op == MLA else (text, "with_routing")
    with pytest.raises(Unsupported, match=f"{library.partition(' ')[0]}.*{reason}"):
        record(Case(op, name, arch, (library,), whole, boundary))
