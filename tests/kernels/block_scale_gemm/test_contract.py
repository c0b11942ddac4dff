"""What rows of libraries do beyond what is recorded of their calls (tests/kernels/test_recorded_calls.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import kernels
from kernels.block_scale_gemm.providers import flashinfer
from kernels.compose import bind
from kernels.interfaces import signatures
from kernels.op import Prepared, Unsupported
from kernels.operands import Seeds
from shapes.case import parse
from tests.support.answers import ANSWERS
from tests.support.recorded import Case
from tests.support.stand_ins import Answer

OP = kernels.OPS["block_scale_gemm"]
ROWS = "m=33 n=384 k=640"


def sizes_of(text: str, arch: str) -> Any:
    return OP.sizes(OP.defaults(arch) | parse(text)[0])


@contextmanager
def prepared(case: Case, answers: Mapping[str, Answer] | None = None, **how: Any) -> Iterator[Prepared]:
    with case.lent(answers={**ANSWERS, **(answers or {})}, **how):
        operands = OP.operands(sizes_of(case.text, case.arch), Seeds(), "cpu", case.boundary)
        out = OP.empty_output(operands.sizes, "cpu")
        yield bind(OP, case.implementation, operands, None if case.implementation.allocates else out)


# AITER


CK = {"libtype": "ck", "kernelName": "a8w8_1x128x128", "splitK": 2}


@pytest.mark.parametrize("boundary", OP.boundaries)
@pytest.mark.parametrize(
    ("name", "row", "told"),
    [
        ("aiter.dispatch", CK, "tuned: ck a8w8_1x128x128 splitK=2"),
        ("aiter.dispatch_preshuffled", {"libtype": "asm"}, "tuned: asm splitK=0"),
        ("aiter.dispatch", None, "default: the tuned table has no row for these sizes"),
        ("aiter.ck", CK, ""),
    ],
)
def test_aiter_tells_what_its_table_picked(name, row, told, boundary):
    asked = {}
    tables = SimpleNamespace(
        AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_FILE="plain",
        AITER_CONFIG_GEMM_A8W8_BLOCKSCALE_BPRESHUFFLE_FILE="shuffled",
    )
    ops = "aiter.ops.gemm_op_a8w8"
    places = {f"{ops}.get_CKGEMM_config": "(M, N, K, tuned_file=None)", f"{ops}.AITER_CONFIGS": ""}
    how = {"also": {"aiter": places}, "values": {f"{ops}.AITER_CONFIGS": tables}}
    answers = {"aiter.get_CKGEMM_config": lambda a: asked.update(a) or row}
    with prepared(Case(OP.name, name, "gfx942", ("aiter",), ROWS, boundary), answers, **how) as call:
        assert call.picked() == told
    table = "shuffled" if "preshuffled" in name else "plain"
    assert asked == ({"M": 33, "N": 384, "K": 640, "tuned_file": table} if told else {})


def test_an_aiter_without_that_table_tells_nothing():
    with prepared(Case(OP.name, "aiter.dispatch", "gfx942", ("aiter 0.1.5",), ROWS)) as call:
        assert call.picked() == ""


@pytest.mark.parametrize(("said", "raised"), [("not supported", Unsupported), ("HIP error", RuntimeError)])
def test_what_ck_does_not_take_is_unsupported(said, raised):
    def refuse(a: Any) -> None:
        raise RuntimeError(f"This GEMM is\n{said}!")

    case = Case(OP.name, "aiter.ck", "gfx942", ("aiter",), ROWS)
    with prepared(case, {"aiter.gemm_a8w8_blockscale_ck": refuse}) as call, pytest.raises(raised) as error:
        call.call()
    assert type(error.value) is raised
    if raised is Unsupported:
        assert str(error.value) == "gemm_a8w8_blockscale_ck: This GEMM is not supported!"


# Other versions, other kernels


def test_deepgemm_1_has_other_names():
    """Of the function and its arguments: deep_gemm/jit_kernels/gemm.py of 1.0.0."""
    case = Case(OP.name, "deepgemm", "sm_90", ("deep_gemm",), ROWS)
    given = {}
    with (
        case.lent(
            also={"deep_gemm": {"deep_gemm.gemm_fp8_fp8_bf16_nt": "(lhs, rhs, out)"}},
            answers={"deep_gemm.gemm_fp8_fp8_bf16_nt": given.update},
        ),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.delattr(sys.modules["deep_gemm"], "fp8_gemm_nt")
        operands = OP.operands(sizes_of(ROWS, "sm_90"), Seeds(), "cpu")
        out = OP.empty_output(operands.sizes, "cpu")
        bind(OP, case.implementation, operands, out).call()
    assert given["lhs"][0] is operands.a_q and given["lhs"][1].stride() == (1, 36)
    assert given["rhs"] == (operands.b_q, operands.b_scale) and given["out"] is out


def test_before_0_2_9_flashinfer_has_no_backend_to_name():
    """There a row that names one would time CUTLASS; as its `since` says."""
    old = signatures.parse(
        "(a, b, a_scale, b_scale, scale_major_mode='MN', mma_sm=1, scale_granularity_mnk=(1, 128, 128), "
        "out=None, out_dtype=None)"
    )
    assert flashinfer.GROUPWISE.complaint(old) == "" and flashinfer.GROUPWISE.lacks(old) == {"backend"}
    assert "backend" in flashinfer.NAMED_BACKEND.complaint(old)


def test_where_sglangs_product_for_few_tokens_does_not_run_it_is_unsupported():
    """try_smallm_fp8_bs_linear then gives None, for SGLang to take another."""
    libraries, text = ("sglang", "aiter"), "m=5 n=4096 k=1024"
    case = Case(OP.name, "sglang.small_m", "gfx950", libraries, text, "with_quant")
    with (
        pytest.raises(Unsupported, match="few tokens does not run here"),
        prepared(case, {"sglang.try_smallm_fp8_bs_linear": lambda a: None}),
    ):
        pass
