"""Sizes of the ops: what cannot be, and what the architecture decides."""

import pytest

import kernels
from shapes.case import parse

GEMM, MOE, MHA, MLA = kernels.OPS
MLA_TEXT, MODEL_LEN = "batch=2 ctx=100", 163_840


@pytest.mark.parametrize(("op", "text", "reason"), [
    (GEMM, "m=0 n=1 k=1", "size m=0 of block_scale_gemm must be at least 1"),
    (GEMM, "m=1 n=1", "block_scale_gemm needs k; sizes: m, n, k, fp8, scales"),
    (GEMM, "m=1 n=1 k=1 fp8=e5m2", "unknown FP8 format 'e5m2'; formats: e4m3fn, e4m3fnuz"),
    (GEMM, "m=1 n=1 k=1 scales=bf16", "size scales='bf16' of block_scale_gemm must be fp32 or ue8m0"),
    (MOE, "tokens=8 experts=128 topk=8 hidden=512 inter=192", "size inter=192 of fused_moe must be a "
     "multiple of 128; give inter=256, to which SGLang pads it with AITER and vLLM with a named --moe-back"),
    *(
        (MOE, f"tokens=4 {text}", f"{text.split('=')[0]}=")
        for text in ("inter=0", "hidden=100", "topk=300", "ep=7", "scales=fp16")
    ),
    (MOE, "tokens=4 fp8=e5m2", "unknown FP8 format 'e5m2'"),
    (MOE, "tokens=4 routing=best", "unknown routing 'best'"),
    (MHA, "batch=0 new=1", "size batch=0 of mha_prefill must be at least 1"),
    (MHA, "batch=1 new=1 heads=0", "size heads=0 of mha_prefill must be at least 1"),
    (MHA, "batch=1 new=0", "length '0' must be at least 1 and rise from low to high"),
    (MHA, "batch=1 new=1 prefix=9..3", "length '9..3' must be at least 0 and rise from low to high"),
    (MHA, "batch=1 new=1 dtype=fp16", "size dtype='fp16' of mha_prefill must be bf16 or fp8"),
    (MHA, "batch=1 new=1 dtype=fp8 fp8=e5m2", "unknown FP8 format 'e5m2'; formats: e4m3fn, e4m3fnuz"),
    (MHA, "batch=1", "mha_prefill needs new; sizes: batch, new, prefix, heads, dtype, fp8"),
    (MLA, "batch=1 ctx=1..200000", "of 163840 tokens; give model_len=200000 or more"),
])  # fmt: skip
def test_sizes_that_cannot_be(op, text, reason):
    with pytest.raises(ValueError) as error:
        kernels.OPS[op].sizes(parse(text)[0])
    assert reason in str(error.value)


def test_a_case_says_its_context_length_where_it_is_not_the_models_own():
    """Else cases have the keys of records from before there was the size."""
    of, given = kernels.OPS[MLA], parse(MLA_TEXT)[0]
    assert of.sizes(given | {"model_len": "200000"}).model_len == 200_000
    assert of.case(given).text == of.case(given | {"model_len": MODEL_LEN}).text
    assert of.case(given).text == f"{MLA_TEXT} heads=16 page=64 kv=bf16"
    assert of.case(given | {"model_len": 9216}).text.endswith(" kv=bf16 model_len=9216")
