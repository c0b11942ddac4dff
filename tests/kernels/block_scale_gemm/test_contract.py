"""What rows of libraries do beyond what is recorded of their calls (tests/kernels/test_recorded_calls.py)."""

from __future__ import annotations

import json
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
from kernels.platform import named
from shapes.case import parse
from tests.support.answers import ANSWERS
from tests.support.recorded import Case
from tests.support.stand_ins import Answer

OP = kernels.OPS["block_scale_gemm"]
IMPLEMENTATIONS = {i.name: i for i in kernels.implementations("block_scale_gemm")}

ROWS = "m=33 n=384 k=640"
AITER = [name for name in IMPLEMENTATIONS if name.startswith("aiter.")]


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


# What they need


def refused(name: str, kind: str, arch: str, text: str) -> str:
    """Why a case is; empty if it is not."""
    case = OP.case(OP.defaults(arch) | parse(text)[0])
    return IMPLEMENTATIONS[name].supports(case, named(kind, arch)).reason


@pytest.mark.parametrize(
    ("name", "kind", "arch", "changed", "reason"),
    [
        ("aiter.ck", "rocm", "gfx942", "fp8=e4m3fn", "gfx942 takes e4m3fnuz, not e4m3fn"),
        ("aiter.ck", "rocm", "gfx950", "fp8=e4m3fnuz", "gfx950 takes e4m3fn, not e4m3fnuz"),
        *(
            (name, "cuda", arch, "scales=fp32", "" if arch == "sm_90" else
             f"{arch} takes power-of-two scales (scales=ue8m0), not fp32")
            for name, archs in (
                ("deepgemm", "sm_90 sm_100 sm_103"),
                ("deepgemm@vllm", "sm_90 sm_100 sm_103 sm_120"),
                ("deepgemm@sglang", "sm_90 sm_100 sm_103"),
            )
            for arch in archs.split()
        ),
    ],
)  # fmt: skip
def test_formats_that_an_architecture_does_not_take(name, kind, arch, changed, reason):
    assert refused(name, kind, arch, f"{ROWS} {changed}") == reason


@pytest.mark.parametrize(
    ("name", "kind", "arch", "reason"),
    [
        ("cublaslt", "cuda", "sm_100", "needs sm_90"),
        ("flashinfer.sm90", "cuda", "sm_100", "needs sm_90"),
        ("flashinfer.groupwise", "cuda", "sm_90", "needs sm_100 or sm_103"),
        ("flashinfer.trtllm", "cuda", "sm_90", "needs sm_100 or sm_103"),
        ("flashinfer.cutile", "cuda", "sm_90", "needs sm_100, sm_103 or sm_120"),
        ("deepgemm", "rocm", "gfx942", "needs cuda"),
        ("deepgemm@vllm", "rocm", "gfx942", "needs cuda"),
        ("aiter.dispatch", "cuda", "sm_90", "needs rocm"),
        ("hipblaslt.dequantised", "cuda", "sm_90", "needs rocm"),
        ("sglang.triton", "cpu", "x86_64", "needs cuda or rocm"),
        ("sglang.small_m", "rocm", "gfx942", "needs gfx950"),
    ],
)
def test_what_they_need_is_said(name, kind, arch, reason):
    assert reason in IMPLEMENTATIONS[name].available(named(kind, arch)).reason


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("flashinfer.trtllm", "m=1 n=128 k=128", "needs k to be 256 at least"),
        ("sglang.small_m", "m=33 n=4096 k=1024", "takes 32 tokens at most"),
        ("sglang.small_m", "m=1 n=2112 k=7168", "takes these n and k alone"),
        ("cublaslt", "m=1 n=100 k=200", "needs n and k to be multiples of 16"),
        ("deepgemm", "m=1 n=100 k=128", "needs n to be a multiple of 64"),
        ("deepgemm", "m=1 n=128 k=200", "needs k to be a multiple of 128"),
        ("flashinfer.sm90", "m=1 n=100 k=128", "needs n to be a multiple of 64"),
        ("vllm.cutlass", "m=1 n=100 k=128", "needs n to be a multiple of 16"),
        ("sglang.cutlass", "m=1 n=192 k=128", "needs n to be a multiple of 128"),
        ("aiter.asm", "m=1 n=192 k=128", "needs n to be a multiple of 128"),
        *((name, "m=1 n=100 k=200", "multiple of") for name in AITER),
    ],
)
def test_sizes_that_one_does_not_take(name, text, reason):
    assert reason in IMPLEMENTATIONS[name].fits(sizes_of(text, "sm_90")).reason


@pytest.mark.parametrize(
    ("kind", "arch", "runs", "others"),
    [
        ("rocm", "gfx942", {*AITER, "hipblaslt.dequantised", "vllm.triton", "sglang.triton"}, {"cublaslt"}),
        ("cuda", "sm_90", {"cublaslt", "deepgemm", "deepgemm@vllm", "flashinfer.sm90"}, set(AITER)),
        ("cuda", "sm_103", {"deepgemm@sglang", "flashinfer.trtllm", "vllm.cutlass"}, {"sglang.small_m"}),
    ],
)
def test_list_names_them_with_what_they_need(here, kind, arch, runs, others):
    listed = ("list", "impls", "--op", OP.name, "--platform", kind, "--arch", arch, "--json", "-")
    rows = {row["implementation"]: row for row in json.loads(here(*listed).stdout)}
    for name in runs:
        assert rows[name]["runs"], rows[name]
        assert rows[name]["boundary"] == ", ".join(IMPLEMENTATIONS[name].boundaries)
        assert rows[name]["requires"] == IMPLEMENTATIONS[name].requires
    assert not any(rows[name]["runs"] for name in others)
