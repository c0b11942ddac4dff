"""Rows of the layouts that are easily got wrong compute the reference's answer: their libraries are stood in
for by functions that read these layouts as documented (tests/doubles/), and judged as the harness judges."""

from __future__ import annotations

import pytest

from tests.doubles.attention import COMPUTED
from tests.support.answers import ANSWERS
from tests.support.judging import keep
from tests.support.recorded import Case
from tests.support.recorded_rows import rows

RAGGED = "batch=3 ctx=1..130"
CACHED = "batch=3 new=1..40 prefix=0..30 heads=4"
LONG = "batch=3 new=1..40 prefix=100..300 heads=4"

CASES = [
    *rows("mla_decode", "flashmla", "sm_90", "flash_mla 1.0.0+20250428", f"{RAGGED} page=64"),
    *rows("mla_decode", "flashmla", "sm_90", "flash_mla 1.0.0+sgl", f"{RAGGED} page=128 kv=fp8"),
    *rows("mla_decode", "aiter.asm", "gfx942", "aiter", f"{RAGGED} page=1", f"{RAGGED} heads=128 page=64"),
    *rows("mla_decode", "aiter.asm_persistent", "gfx942", "aiter", f"{RAGGED} heads=12 page=16",
          f"{RAGGED} page=16 kv=fp8 fp8={{fp8}}"),
    *(case for name, arch, library, *dtypes in (
        ("flash_attn.fa2", "sm_90", "flash_attn", "bf16"),
        ("flash_attn.fa3", "sm_90", "flash_attn_interface", "bf16", "fp8"),
        ("aiter.triton", "gfx942", "aiter", "bf16"),
        ("aiter.fp8", "gfx942", "aiter", "fp8"),
        ("cudnn", "sm_100", "cudnn", "bf16", "fp8"),
    ) for dtype in dtypes for text in (CACHED, LONG)
      for case in rows("mha_prefill", name, arch, library, f"{text} dtype={dtype}")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case}")
def test_a_row_computes_the_references_answer(case: Case) -> None:
    keep(case, {**ANSWERS, **COMPUTED})
