"""The contract that an adapter of MHA prefill keeps with the double of its library: right by the op's own
check on the op's own operands."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import kernels
from kernels.operands import Seeds
from shapes.case import parse
from tests.doubles import lent
from tests.support.judging import judged

OP = kernels.OPS["mha_prefill"]
IMPLEMENTATIONS = {i.name: i for i in kernels.implementations("mha_prefill")}

FRESH = "batch=3 new=1..40 heads=4"
CACHED = "batch=3 new=1..40 prefix=0..30 heads=4"
LONG = "batch=3 new=1..40 prefix=100..300 heads=4"
CASES = (FRESH, CACHED, "batch=2 new=33 prefix=1 heads=2", "batch=2 new=1 prefix=5 heads=16", LONG)


class Row(NamedTuple):
    """An adapter on an architecture, its doubles, and a dtype."""

    name: str
    kind: str
    arch: str
    doubles: tuple[str, ...]
    dtype: str = "bf16"

    @property
    def text(self) -> str:
        return f"{self.name} {self.arch} {self.dtype}"


AITER = ("aiter_attention",)
INFER = ("flashinfer_attention",)
SGLANG = ("sglang",)
INFER_CUDNN = ("flashinfer_attention", "cudnn_frontend")
ROWS = {
    row.text: row
    for row in (
        Row("aiter.dispatch", "rocm", "gfx942", AITER),
        Row("aiter.dispatch", "rocm", "gfx950", AITER),
        Row("aiter.asm", "rocm", "gfx942", AITER),
        Row("aiter.asm", "rocm", "gfx950", AITER),
        Row("aiter.ck", "rocm", "gfx942", AITER),
        Row("aiter.opus", "rocm", "gfx950", AITER),
        Row("aiter.triton", "rocm", "gfx942", AITER),
        Row("aiter.fp8", "rocm", "gfx942", AITER, "fp8"),
        Row("aiter.fp8", "rocm", "gfx950", AITER, "fp8"),
        Row("aiter.fp8_ps", "rocm", "gfx950", AITER, "fp8"),
        Row("flash_attn.fa2", "cuda", "sm_90", ("flash_attn",)),
        Row("flash_attn.fa3", "cuda", "sm_90", ("flash_attn_3",)),
        Row("flash_attn.fa3", "cuda", "sm_90", ("flash_attn_3",), "fp8"),
        Row("flash_attn.fa4", "cuda", "sm_90", ("flash_attn_4",)),
        Row("flash_attn.fa4", "cuda", "sm_100", ("flash_attn", "flash_attn_4")),
        Row("flashinfer.fa2", "cuda", "sm_90", INFER),
        Row("flashinfer.fa3", "cuda", "sm_90", INFER),
        Row("flashinfer.cutlass", "cuda", "sm_100", INFER),
        Row("flashinfer.cutlass", "cuda", "sm_100", INFER, "fp8"),
        Row("flashinfer.cudnn", "cuda", "sm_100", INFER_CUDNN),
        Row("flashinfer.trtllm", "cuda", "sm_100", INFER),
        Row("flashinfer.trtllm", "cuda", "sm_100", INFER, "fp8"),
        Row("flashinfer.cute_dsl", "cuda", "sm_100", INFER, "fp8"),
        Row("cudnn", "cuda", "sm_90", ("cudnn_frontend",)),
        Row("cudnn", "cuda", "sm_100", ("cudnn_frontend",)),
        Row("cudnn", "cuda", "sm_100", ("cudnn_frontend",), "fp8"),
        Row("sglang.triton_extend", "cuda", "sm_90", SGLANG),
        Row("sglang.triton_extend", "rocm", "gfx942", SGLANG),
    )
}


class Wrong(Exception):
    """What the adapter computed is not what the op is; the judge's reason."""


def keep(row: Row, text: str, **sizes: Any) -> None:
    """Holds the adapter to the contract: what it supports it computes right, for two sets of stationary
    operands and two of live ones each, changing none. Raises Wrong, or what the double raised."""
    implementation = IMPLEMENTATIONS[row.name]
    with lent(row.kind, row.arch, *row.doubles) as here:
        given = {**OP.defaults(row.arch), **parse(text)[0], "dtype": row.dtype, **sizes}
        case = OP.case(given)
        support = implementation.supports(case, here)
        assert support.ok, support.reason
        read = OP.sizes(case.sizes)
        for stationary in (0, 1):
            operands = OP.operands(read, Seeds(stationary, 0), "cpu")
            out = None if implementation.allocates else OP.empty_output(read, "cpu").fill_(math.nan)
            prepared = implementation.prepare(operands, out)
            for live in (0, 1):
                fresh = OP.operands(read, Seeds(stationary, live), "cpu")
                if live:
                    prepared.load(fresh.live_tensors())
                before = operands.digest()
                prepared.call()
                assert operands.digest() == before
                report = judged(OP, implementation, read, fresh, prepared.result())
                if not report["ok"]:
                    raise Wrong(report["reason"])
