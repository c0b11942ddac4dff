"""What a library does not take is refused in words, before anything is prepared."""

from __future__ import annotations

import pytest

import kernels
from kernels.op import Unsupported
from kernels.platform import named
from shapes.case import parse
from tests.support.recorded import Case, record

OP = kernels.OPS["mla_decode"]


@pytest.mark.parametrize(
    ("name", "arch", "sizes", "reason"),
    [
        ("aiter.asm", "gfx942", "kv=fp8 fp8=e4m3fn", "gfx942 takes e4m3fnuz, not e4m3fn"),
        ("aiter.asm", "gfx950", "kv=fp8 fp8=e4m3fnuz", "gfx950 takes e4m3fn, not e4m3fnuz"),
        ("aiter.asm", "gfx950", "heads=64 kv=fp8", "takes 8, 16, 128 heads with kv=fp8"),
        ("aiter.asm_persistent", "gfx950", "heads=8", ""),
        ("aiter.asm_persistent", "gfx950", "heads=256", "takes up to 128 heads, not 256"),
        ("aiter.asm_persistent@sglang", "gfx942", "", "SGLang calls it on an FP8 cache, not on bf16"),
        (
            "aiter.asm_persistent@sglang",
            "gfx950",
            "heads=128 kv=fp8",
            "SGLang calls it at 16 heads, not at 128",
        ),
        (
            "aiter.asm_persistent@sglang",
            "gfx950",
            "kv=fp8",
            "divides by 0 on gfx950 where a sequence has fewer than 196 tokens, as 100",
        ),
        ("aiter.asm_persistent@sglang", "gfx950", "ctx=196 kv=fp8", ""),
        ("aiter.asm_persistent@sglang", "gfx942", "kv=fp8 fp8=e4m3fnuz", ""),
        ("aiter.gluon", "gfx942", "heads=8", "needs gfx950; this is gfx942"),
        ("aiter.gluon", "gfx950", "heads=32", "takes up to 16 heads, not 32"),
        ("aiter.gluon", "gfx950", "kv=fp8", "takes a bf16 cache in batches of any size, not fp8"),
        (
            "aiter.gluon",
            "gfx950",
            "batch=256 ctx=8192",
            "takes a cache of up to 2 GiB, beyond which it masks no loads",
        ),
        ("aiter.triton", "gfx942", "page=8", "needs pages of a multiple of 16 tokens, not 8"),
        ("flashmla", "sm_90", "page=16", "needs a page that is a multiple of 64"),
        ("flashmla", "sm_100", "", "needs sm_90; this is sm_100"),
        ("flashinfer.fa2", "sm_100", "kv=fp8", "takes an FP8 cache on sm_90, not on sm_100"),
        ("flashinfer.cutlass", "sm_103", "heads=16", "takes 128 heads, not 16"),
        ("flashinfer.trtllm", "sm_103", "heads=96", "takes up to 64 heads, or 128, not 96"),
        ("flashinfer.cute_dsl", "sm_103", "heads=96", ""),
        ("flashinfer.auto", "sm_90", "", "needs sm_100 or sm_103; this is sm_90"),
        ("flash_attn.fa3", "sm_90", "kv=fp8", "takes a bf16 cache, not fp8"),
        ("vllm.triton", "x86-avx512", "", "needs cuda or rocm; this is cpu x86-avx512"),
    ],
)
def test_what_a_library_does_not_take_is_refused_in_words(
    name: str, arch: str, sizes: str, reason: str
) -> None:
    (implementation,) = (i for i in kernels.implementations("mla_decode") if i.name == name)
    kind = {"g": "rocm", "s": "cuda", "x": "cpu"}[arch[0]]
    case = OP.case({"batch": 2, "ctx": "100"} | (parse(sizes)[0] if sizes else {}))
    support = implementation.supports(case, named(kind, arch))
    assert (support.ok, support.reason) == (not reason, reason)


@pytest.mark.parametrize(
    ("name", "library", "reason"),
    [
        ("flashinfer.fa3", "flashinfer 0.6.11", "flashinfer 0.6.11 takes no FP8 cache"),
        ("sglang.triton", "sglang 0.5.9", "sglang 0.5.9 has no scales for an FP8 cache"),
        ("flashmla", "flash_mla 1.0.0+20260429", "this flash_mla has no dense decode on an FP8 cache"),
    ],
)
def test_a_release_without_scales_takes_no_fp8_cache(name: str, library: str, reason: str) -> None:
    """Which is no error of the row: it takes the cache in bf16."""
    with pytest.raises(Unsupported, match=reason):
        record(Case("mla_decode", name, "sm_90", (library,), "batch=2 ctx=100 page=64 kv=fp8"))


def test_no_sequence_is_longer_than_the_context_length() -> None:
    with pytest.raises(ValueError, match=r"exceeds .* of 163840 tokens; give model_len=200000 or more"):
        OP.sizes({"batch": 1, "ctx": "1..200000"})
    assert OP.sizes({"batch": 1, "ctx": "200000", "model_len": "200000"}).model_len == 200_000


def test_a_case_says_its_context_length_where_it_is_not_the_models_own() -> None:
    """Else cases have the keys of records from before there was the size."""
    given = {"batch": 2, "ctx": "100"}
    assert OP.case(given).text == OP.case(given | {"model_len": 163_840}).text
    assert OP.case(given).text == "batch=2 ctx=100 heads=16 page=64 kv=bf16"
    assert OP.case(given | {"model_len": 9216}).text.endswith(" kv=bf16 model_len=9216")
