"""Which rows are recorded: with cases that fill neither tiles nor pages, and by releases of libraries."""

from collections.abc import Iterator

from tests.support.gemm_moe_rows import block_scale_gemm, fused_moe
from tests.support.recorded import Case, rows

RAGGED = "batch=3 ctx=1..130"
ZERO_SPARE = "batch=1 ctx=2112..2432 page=64"
"""Its page 0 is nobody's."""


def mla_decode() -> Iterator[Case]:
    page_1, page_16, page_64 = (f"{RAGGED} page={page}" for page in (1, 16, 64))
    many, fp8 = f"{RAGGED} heads=128 page=64", f"{RAGGED} page=64 kv=fp8 fp8={{fp8}}"
    short = "batch=2 ctx=1..130 page=64 model_len=1000"
    q_16, q_64 = (f"batch=3 ctx=4..130 page={page} q=4" for page in (16, 64))
    q_fp8 = f"{q_64} kv=fp8 fp8={{fp8}}"
    for name, archs, libraries, *texts in (
        ("aiter.asm", "gfx942 gfx950", "aiter", page_1, page_16, many, fp8, q_16, q_fp8),
        ("aiter.asm", "gfx942", "aiter 0.1.9.post1", short, fp8),
        ("aiter.asm_persistent", "gfx942 gfx950", "aiter", page_16, fp8, ZERO_SPARE,
         f"{RAGGED} heads=8 page=16", f"{RAGGED} heads=12 page=16 kv=fp8 fp8={{fp8}}", q_fp8,
         f"{q_16} heads=8", f"{q_16} heads=12"),
        ("aiter.asm_persistent", "gfx950", "aiter", f"{RAGGED} heads=64 page=64 kv=fp8"),
        ("aiter.asm_persistent", "gfx942", "aiter 0.1.9.post1", page_16, fp8),
        ("aiter.asm_persistent@sglang", "gfx942 gfx950", "aiter",
         *(f"batch=2 ctx=200..700 page=64 kv=fp8 fp8={{fp8}}{q}" for q in ("", " q=4"))),
        ("aiter.triton", "gfx942", "aiter", page_16, many, fp8, q_16),
        ("aiter.triton_split", "gfx942", "aiter", page_1, many, fp8),
        ("aiter.gluon", "gfx950", "aiter", page_1, f"{RAGGED} heads=8 page=16", q_16),
        ("flashmla", "sm_90", "flash_mla 1.0.0+20260429", page_64, f"{RAGGED} heads=128 page=128", q_64),
        ("flashmla", "sm_90", "flash_mla 1.0.0+20250428", page_64, q_64),
        ("flashmla", "sm_90", "flash_mla 1.0.0+sgl", page_64, fp8, q_fp8),
        ("flashmla@vllm", "sm_90", "vllm", page_64, fp8, f"{RAGGED} heads=128 page=128", q_64, q_fp8),
        ("flashinfer.fa2", "sm_90", "flashinfer", page_1, page_16, many, fp8, q_16),
        ("flashinfer.fa3", "sm_90", "flashinfer", page_16, fp8, q_16, q_fp8),
        ("flashinfer.cutlass", "sm_100", "flashinfer", many, f"{RAGGED} heads=128 page=16"),
        *((name, "sm_100 sm_103", "flashinfer", page_64, f"{RAGGED} heads=128 page=32", fp8, q_64, q_fp8)
          for name in ("flashinfer.trtllm", "flashinfer.cute_dsl", "flashinfer.auto")),
        ("flashinfer.trtllm", "sm_100", "flashinfer 0.6.14", short),
        ("flashinfer.auto", "sm_100", "flashinfer", f"{RAGGED} heads=24 page=32"),
        ("flash_attn.fa3", "sm_90", "flash_attn_interface", page_1, page_16, many, q_16),
        ("flash_attn.fa3@vllm", "sm_90", "vllm", page_16, many, q_16),
        ("flash_attn.fa3@sglang", "sm_90", "sgl_kernel", page_16, many, short, q_16),
        ("flash_attn.fa4", "sm_100 sm_103", "flash_attn.cute", page_16, many, q_16),
        ("flash_attn.fa4", "sm_100", "flash_attn.cute 4.0.0b35", page_16),
        ("vllm.cutlass_mla", "sm_100", "vllm", page_16, f"{RAGGED} heads=128 page=128", short),
        ("vllm.triton", "sm_90 gfx942", "vllm", page_16, fp8, short, q_16, q_fp8),
        ("tokenspeed_mla", "sm_100 sm_103", "tokenspeed_mla",
         f"{RAGGED} page=32 kv=fp8", f"{RAGGED} heads=128 page=64 kv=fp8", f"{short} kv=fp8", q_fp8),
        ("sglang.triton", "sm_90 sm_120 gfx942", "sglang", page_1, many, fp8, "batch=3 ctx=130 page=16"),
        ("sglang.triton", "sm_90 gfx942", "sglang", q_16, q_fp8),
        ("sglang.triton", "sm_90", "sglang 0.5.9", short, "batch=300 ctx=2 heads=1"),
    ):  # fmt: skip
        yield from rows("mla_decode", name, archs, libraries, *texts)


CACHED = "batch=3 new=1..40 prefix=0..30 heads=4"
FRESH = "batch=3 new=1..40 heads=4"


def mha_prefill() -> Iterator[Case]:
    for name, archs, libraries, *dtypes in (
        ("aiter.dispatch", "gfx942 gfx950", "aiter", "bf16"),
        ("aiter.asm", "gfx942 gfx950", "aiter", "bf16"),
        ("aiter.ck", "gfx942", "aiter", "bf16"),
        ("aiter.ck", "gfx942", "aiter 0.1.9.post1", "bf16"),
        ("aiter.opus", "gfx950", "aiter", "bf16"),
        ("aiter.triton", "gfx942", "aiter", "bf16"),
        ("aiter.fp8", "gfx942 gfx950", "aiter", "fp8"),
        ("aiter.fp8_ps", "gfx950", "aiter", "fp8"),
        ("flash_attn.fa2", "sm_90", "flash_attn", "bf16"),
        ("flash_attn.fa3", "sm_90", "flash_attn_interface", "bf16", "fp8"),
        ("flash_attn.fa3@vllm", "sm_90", "vllm", "bf16", "fp8"),
        ("flash_attn.fa3@sglang", "sm_90", "sgl_kernel", "bf16", "fp8"),
        ("flash_attn.fa4@vllm", "sm_90", "vllm", "bf16"),
        ("flash_attn.fa4@vllm", "sm_103", "vllm", "bf16", "fp8"),
        ("flash_attn.fa4", "sm_90 sm_100", "flash_attn.cute", "bf16"),
        ("flashinfer.fa2", "sm_90", "flashinfer", "bf16"),
        ("flashinfer.fa3", "sm_90", "flashinfer", "bf16"),
        ("flashinfer.cutlass", "sm_100", "flashinfer", "bf16", "fp8"),
        ("flashinfer.cudnn", "sm_100", "flashinfer, cudnn", "bf16"),
        ("flashinfer.cudnn", "sm_100", "flashinfer 0.6.18, cudnn", "bf16"),
        ("flashinfer.trtllm", "sm_100", "flashinfer", "bf16", "fp8"),
        ("flashinfer.trtllm", "sm_100", "flashinfer 0.6.18", "bf16"),
        ("flashinfer.cute_dsl", "sm_100", "flashinfer", "fp8"),
        ("cudnn", "sm_90 sm_100", "cudnn", "bf16"),
        ("cudnn", "sm_100", "cudnn", "fp8"),
        ("sglang.triton_extend", "sm_90 gfx942", "sglang", "bf16"),
        ("sglang.triton_extend", "sm_90", "sglang 0.5.9", "bf16"),
    ):
        texts = (CACHED, FRESH) if name == "sglang.triton_extend" else (CACHED,)
        given = (f"{text} dtype={dtype}" for dtype in dtypes for text in texts)
        yield from rows("mha_prefill", name, archs, libraries, *given)


def tilelang() -> Iterator[Case]:
    """On TileLang itself, for which tests/support/tilelang_on_cpu.py stands in for the devices: pages that
    are steps and others, few heads and many, sequences of one part and of several."""
    gemm = ("m=1 n=128 k=128", "m=33 n=384 k=640", "m=130 n=192 k=256")
    mla = (
        *(f"{RAGGED} {more}" for more in ("page=64", "page=16", "heads=128 page=64", "page=1")),
        ZERO_SPARE,
    )
    for archs in ("sm_90 sm_100", "gfx942 gfx950"):
        yield from rows("block_scale_gemm", "tilelang.tiled", archs, "", *gemm)
        yield from rows("mla_decode", "tilelang.split", archs, "", *mla)


TILELANG = [*tilelang()]
CASES = [*mla_decode(), *mha_prefill(), *block_scale_gemm(), *fused_moe()]
