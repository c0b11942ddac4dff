"""Rows of the layouts that are easily got wrong compute the reference's answer: their libraries are stood in
for by functions that read these layouts as documented (tests/doubles/), and judged as the harness judges.

Some rows stand between the suite's own Triton kernels, which a CPU interprets: those cases run in a process
of their own, this file as a script.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from harness.errors import one_line
from tests.doubles.aiter_fp8 import Aiter
from tests.doubles.attention import COMPUTED
from tests.doubles.deep_gemm import DeepGemm
from tests.doubles.flashinfer_moe import FlashInfer
from tests.doubles.scaled_mm import ScaledMm
from tests.support.answers import ANSWERS
from tests.support.gemm_moe_rows import DEEP, EP, MANY, PART, RAGGED, ROUTED, SMALL
from tests.support.interpreting import found_interpreted
from tests.support.judging import keep
from tests.support.recorded import Case, rows
from tests.support.stand_ins import Answer

SEQUENCES = "batch=3 ctx=1..130"
CACHED = "batch=3 new=1..40 prefix=0..30 heads=4"
LONG = "batch=3 new=1..40 prefix=100..300 heads=4"

ATTENTION = [
    *rows("mla_decode", "flashmla", "sm_90", "flash_mla 1.0.0+20250428", f"{SEQUENCES} page=64"),
    *rows("mla_decode", "flashmla", "sm_90", "flash_mla 1.0.0+sgl", f"{SEQUENCES} page=128 kv=fp8"),
    *rows("mla_decode", "aiter.asm", "gfx942", "aiter", f"{SEQUENCES} page=1",
     f"{SEQUENCES} heads=128 page=64"),
    *rows("mla_decode", "aiter.asm_persistent", "gfx942", "aiter", f"{SEQUENCES} heads=12 page=16",
     f"{SEQUENCES} page=16 kv=fp8 fp8={{fp8}}", *(
     f"batch=3 ctx=4..130 page=16 q=4 heads={heads}" for heads in (16, 20, 32))),
    *(case for name, arch, library, *dtypes in (("flash_attn.fa2", "sm_90", "flash_attn", "bf16"), (
     "flash_attn.fa3", "sm_90", "flash_attn_interface", "bf16", "fp8"), ("aiter.triton", "gfx942", "aiter",
     "bf16"), ("aiter.fp8", "gfx942", "aiter", "fp8"), ("cudnn", "sm_100", "cudnn", "bf16",
     "fp8")) for dtype in dtypes for text in (CACHED, LONG) for case in rows("mha_prefill", name, arch,
     library, f"{text} dtype={dtype}")),
]  # fmt: skip

GEMM, MOE = "block_scale_gemm", "fused_moe"
ONE = "m=1 n=128 k=128"

PRODUCTS = [
    *rows(GEMM, "cublaslt", "sm_90", "", ONE, RAGGED, PART),
    *rows(GEMM, "deepgemm", "sm_90 sm_100 sm_103", "deep_gemm", ONE, RAGGED, PART),
    *rows(GEMM, "deepgemm", "sm_90 sm_100", "deep_gemm", RAGGED, boundary="with_quant"),
    *rows(GEMM, "deepgemm@vllm", "sm_90 sm_100", "vllm", RAGGED, PART),
    *rows(GEMM, "deepgemm@sglang", "sm_90 sm_100", "deep_gemm, sglang", RAGGED),
    *rows(GEMM, "aiter.asm", "gfx942 gfx950", "aiter", ONE, RAGGED),
    *rows(GEMM, "aiter.asm", "gfx942", "aiter", RAGGED, boundary="with_quant"),
    *(case for name, boundary in (("asm", "core"), ("ck", "core"), ("dispatch",
     "with_quant")) for case in rows(MOE, f"aiter.{name}", "gfx942 gfx950", "aiter", SMALL, MANY, EP,
     boundary=boundary)),
    *rows(MOE, "aiter.asm", "gfx942", "aiter", EP, boundary="with_routing"),
    *(case for kind, boundary in (("", "with_routing"), ("@sglang", "with_routing"), ("_routed@sglang",
     "with_quant")) for case in rows(MOE, f"flashinfer.trtllm{kind}", "sm_100", "flashinfer", ROUTED,
     f"{ROUTED} ep=2 routing=uniform", boundary=boundary)),
]  # fmt: skip
# Each expert fills its tiles to the last row.
FULL = "tokens=128 experts=2 topk=2 hidden=256 inter=128"
INTERPRETED = [
    *rows(MOE, "deepgemm.contiguous", "sm_90 sm_100", "deep_gemm", DEEP),
    *rows(MOE, "deepgemm.contiguous", "sm_90", "deep_gemm", FULL),
    *rows(MOE, "deepgemm.contiguous", "sm_90", "deep_gemm", EP, boundary="with_routing"),
    *rows(MOE, "deepgemm.masked", "sm_90", "deep_gemm", SMALL),
    *rows(MOE, "deepgemm.masked", "sm_100", "deep_gemm", DEEP),
    *rows(MOE, "deepgemm.masked", "sm_100", "deep_gemm", EP, boundary="with_routing"),
]
OF_TORCH = [*rows(GEMM, "hipblaslt.dequantised", "gfx942", "", RAGGED)]
"""Its product is torch's own."""
DOUBLES: dict[str, Any] = {
    "cublaslt": ScaledMm,
    "deepgemm": DeepGemm,
    "aiter": Aiter,
    "flashinfer": FlashInfer,
}


def computed(case: Case) -> Any:
    """The double by which it computed the reference's answer. Raises what `keep` does."""
    double = DOUBLES[case.name.replace("@", ".").partition(".")[0]](case.arch)
    keep(case, {**ANSWERS, **{name: by_name(f) for name, f in double.functions().items()}})
    return double


def by_name(function: Callable[..., Any]) -> Answer:
    return lambda arguments: function(**arguments)


def name(case: Case) -> str:
    return f"{case.name} {case}"


@pytest.mark.parametrize("case", [*ATTENTION, *OF_TORCH], ids=name)
def test_a_row_computes_the_references_answer(case: Case) -> None:
    keep(case, {**ANSWERS, **COMPUTED})


@pytest.mark.parametrize("case", PRODUCTS, ids=name)
def test_a_row_of_products_does(case: Case) -> None:
    double = computed(case)
    if isinstance(double, DeepGemm) and case.boundary == "core":
        assert not double.transformed, "DeepGEMM brings scales into its layout in the call"


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, str]:
    """Why an interpreted case is wrong, by name; empty: it is not."""
    return dict(found_interpreted("all", __file__))


@pytest.mark.slow
@pytest.mark.parametrize("case", INTERPRETED, ids=name)
def test_a_row_between_interpreted_kernels_does(case: Case, elsewhere: dict[str, str]) -> None:
    assert elsewhere[name(case)] == ""


def main() -> None:
    for case in INTERPRETED:
        wrong = ""
        try:
            assert not computed(case).transformed, "DeepGEMM brings scales into its layout in the call"
        except Exception as error:
            wrong = one_line(error)
        print(json.dumps((name(case), wrong)))


if __name__ == "__main__":
    main()
