"""What rows of libraries do beyond the contract that all keep (tests/kernels/contracts/test_contracts.py)."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import kernels
from kernels.binding import Function
from kernels.block_scale_gemm.layouts import column_major
from kernels.block_scale_gemm.providers import deep_gemm, flashinfer
from kernels.compose import bind
from kernels.interfaces import signatures
from kernels.op import Unsupported
from kernels.operands import Seeds
from kernels.platform import named
from shapes.case import parse
from tests.doubles import lent
from tests.support.broken_calls import listed, noticed, survivors
from tests.support.contract_rows import CONTRACTS
from tests.support.contracts import Contract, Wrong
from tests.support.judging import judged

OP = kernels.OPS["block_scale_gemm"]
IMPLEMENTATIONS = {i.name: i for i in kernels.implementations("block_scale_gemm")}

ROWS = "m=33 n=384 k=640"  # rows that fill neither tiles nor 16 bytes of scales; K not in fours of blocks
AITER = [name for name in IMPLEMENTATIONS if name.startswith("aiter.")]


def contract(name: str, arch: str, boundary: str = "core") -> Contract:
    return next(c for c in CONTRACTS if (c.op, c.name, c.arch, c.boundary) == (OP.name, name, arch, boundary))


def sizes_of(text: str, arch: str) -> Any:
    return OP.sizes(OP.defaults(arch) | parse(text)[0])


def prepared(name: str, text: str, arch: str, boundary: str = "core") -> Any:
    sizes = sizes_of(text, arch)
    operands = OP.operands(sizes, Seeds(), "cpu", boundary)
    return bind(OP, IMPLEMENTATIONS[name], operands, OP.empty_output(sizes, "cpu"))


# AITER


@pytest.mark.parametrize("boundary", OP.boundaries)
@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("aiter.dispatch", "m=16 n=384 k=512", "tuned: ck a8w8_blockscale_1x128x128_256x16x128x128"),
        ("aiter.dispatch", "m=32 n=384 k=512", "tuned: cktile a8w8_blockscale_cktile_128x128x128"),
        ("aiter.dispatch", "m=16 n=256 k=512", "default: the tuned table has no row for these sizes"),
        ("aiter.dispatch_preshuffled", "m=16 n=384 k=512", "tuned: asm _ZN5aiter42fp8gemm"),
        ("aiter.ck", "m=16 n=384 k=512", ""),
    ],
)
def test_aiter_tells_what_its_table_picked(name, text, told, boundary):
    with lent("rocm", "gfx942", "aiter_gemm_moe"):
        picked = prepared(name, text, "gfx942", boundary).picked()
    assert picked.startswith(told) and bool(picked) == bool(told)
    assert "tuned: " not in told or "splitK=" in picked


def test_an_aiter_without_that_table_tells_nothing():
    with lent("rocm", "gfx942", "aiter_gemm_moe"), pytest.MonkeyPatch.context() as patch:
        import aiter.ops.gemm_op_a8w8 as library

        patch.delattr(library, "AITER_CONFIGS")
        assert prepared("aiter.dispatch", "m=16 n=384 k=512", "gfx942").picked() == ""


@pytest.mark.parametrize(("said", "raised"), [("not supported", Unsupported), ("HIP error", RuntimeError)])
def test_what_ck_does_not_take_is_unsupported(said, raised):
    def refuse(XQ: Any, WQ: Any, x_scale: Any, w_scale: Any, Out: Any) -> None:
        raise RuntimeError(f"This GEMM is\n{said}!")

    with lent("rocm", "gfx942", "aiter_gemm_moe"), pytest.MonkeyPatch.context() as patch:
        import aiter.ops.gemm_op_a8w8 as library

        patch.setattr(library, "gemm_a8w8_blockscale_ck", refuse)
        call = prepared("aiter.ck", "m=4 n=384 k=512", "gfx942").call
        with pytest.raises(raised) as error:
            call()
    assert type(error.value) is raised
    if raised is Unsupported:
        assert str(error.value) == "gemm_a8w8_blockscale_ck: This GEMM is not supported!"


@pytest.mark.parametrize(
    ("arch", "fp8", "taken"), [("gfx942", "e4m3fn", "e4m3fnuz"), ("gfx950", "e4m3fnuz", "e4m3fn")]
)
def test_the_other_fp8_format_is_refused(arch, fp8, taken):
    assert refused("aiter.ck", "rocm", arch, f"{ROWS} fp8={fp8}") == f"{arch} takes {taken}, not {fp8}"


# DeepGEMM


def test_deepgemm_1_has_other_names():
    """Of the function and its arguments: deep_gemm/jit_kernels/gemm.py of 1.0.0."""
    with lent("cuda", "sm_90", "deep_gemm"), pytest.MonkeyPatch.context() as patch:
        import deep_gemm as library

        second = library.fp8_gemm_nt

        def gemm_fp8_fp8_bf16_nt(lhs: tuple, rhs: tuple, out: torch.Tensor) -> None:
            second(lhs, rhs, out)

        patch.delattr(library, "fp8_gemm_nt")
        patch.setattr(library, "gemm_fp8_fp8_bf16_nt", gemm_fp8_fp8_bf16_nt, raising=False)
        call = prepared("deepgemm", ROWS, "sm_90")
        call.call()
        sizes = sizes_of(ROWS, "sm_90")
        assert judged(OP, IMPLEMENTATIONS["deepgemm"], sizes, call.operands, call.result())["ok"]


DEEP_GEMM = [
    *(("deepgemm", arch, "deep_gemm") for arch in ("sm_90", "sm_100", "sm_103")),
    *(("deepgemm@vllm", arch, "vllm_gemm_moe deep_gemm") for arch in ("sm_90", "sm_100")),
    ("deepgemm@sglang", "sm_100", "sglang_moe deep_gemm"),
]


@pytest.mark.parametrize(("name", "arch", "doubles"), DEEP_GEMM)
def test_deepgemm_transforms_no_scales_inside_a_core_call(name, arch, doubles):
    with lent("cuda", arch, *doubles.split()):
        assert scales_handed_on(name, arch)


def scales_handed_on(name: str, arch: str) -> bool:
    """Whether the library takes the scales as they are, after `load` too."""
    from deep_gemm import transform_sf_into_required_layout as transform

    sizes = sizes_of(ROWS, arch)
    call = prepared(name, ROWS, arch)
    recipe = (1, 128, 128) if arch == "sm_90" else (1, 1, 128)

    def untouched(scale: torch.Tensor, rows: int, is_a: bool) -> bool:
        taken = transform(scale, rows, sizes.k, recipe, is_sfa=is_a)
        return taken.data_ptr() == scale.data_ptr()

    for seed in (0, 1):
        call.load(OP.operands(sizes, Seeds(live=seed), "cpu").live_tensors())
        (_, given_a), (_, given_b) = (call.multiply.keywords[side] for side in "ab")
        if not (untouched(given_a, sizes.m, True) and untouched(given_b, sizes.n, False)):
            return False
    return True


def row_major(a_scale: torch.Tensor) -> torch.Tensor:
    return a_scale.clone()


def only_stepwise(self: Any, scale: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return scale


@pytest.mark.parametrize(
    ("arch", "owner", "step", "instead"),
    [
        ("sm_90", deep_gemm, "aligned", column_major),  # the library would copy them in every call
        ("sm_90", deep_gemm, "aligned", row_major),
        ("sm_100", deep_gemm.DeepGemmBlockScale, "packed", only_stepwise),
    ],
)
def test_scales_that_deepgemm_would_transform_in_every_call_are_seen(arch, owner, step, instead, monkeypatch):
    with lent("cuda", arch, "deep_gemm"):
        monkeypatch.setattr(owner, step, instead)
        try:
            seen = scales_handed_on("deepgemm", arch)
        except RuntimeError:
            seen = False
        assert not seen


@pytest.mark.parametrize("name", ["deepgemm", "deepgemm@vllm", "deepgemm@sglang"])
@pytest.mark.parametrize("arch", ["sm_100", "sm_103"])
def test_scales_that_are_no_powers_of_two_are_refused_on_blackwell(name, arch):
    reason = f"{arch} takes power-of-two scales (scales=ue8m0), not fp32"
    assert refused(name, "cuda", arch, f"{ROWS} scales=fp32") == reason
    assert not refused(name, "cuda", "sm_90", f"{ROWS} scales=fp32")


def test_on_sm_120_they_are_refused_too():
    reason = "sm_120 takes power-of-two scales (scales=ue8m0), not fp32"
    assert refused("deepgemm@vllm", "cuda", "sm_120", f"{ROWS} scales=fp32") == reason


def test_scales_that_were_not_rounded_break_the_contract():
    """The double traps as DeepGEMM's packing kernel does."""
    with pytest.raises((AssertionError, RuntimeError, Wrong)):
        contract("deepgemm", "sm_100").keep(ROWS, scales="fp32")


def packed_once(self: Any, live: Any) -> None:
    self.operands.a_q.copy_(live["a_q"])


def packed_elsewhere(self: Any, live: Any) -> None:
    self.operands.a_q.copy_(live["a_q"])
    self.take(self.implementation.packed(live["a_scale"], live["a_q"], is_a=True))


@pytest.mark.parametrize("load", [packed_once, packed_elsewhere])
def test_live_scales_that_are_not_packed_in_place_break_the_contract(load, monkeypatch):
    monkeypatch.setattr(deep_gemm._Packed, "load", load)
    with pytest.raises(Wrong):
        contract("deepgemm", "sm_100").keep(ROWS)


def test_asking_where_packed_scales_are_read_lets_them_be_packed(monkeypatch):
    """A producer's asking does not: in every call of the next turns DeepGEMM would pack what that wrote."""
    monkeypatch.setattr(deep_gemm._Packed, "reads", deep_gemm._Packed.inputs)
    with pytest.raises(Wrong, match="asking"):
        contract("deepgemm", "sm_100").keep(ROWS)


ANY_STRIDES = {
    "transform_sf_into_required_layout(sf): other strides",
    "fp8_gemm_nt(b[0]): other strides",
}
"""On sm_100 DeepGEMM packs scales of any strides, and takes b by rows or by columns (csrc/apis/layout.hpp and
fp8_requires_k_major of 2.6.1)."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepgemm", "deepgemm@vllm", "deepgemm@sglang"])
def test_a_broken_argument_is_noticed_where_scales_are_packed(name):
    assert set(survivors(contract(name, "sm_100"), ROWS)) <= ANY_STRIDES


QUANTISERS = [
    ("deepgemm@vllm", "sm_90", deep_gemm.VLLM_QUANTISE),
    ("deepgemm@vllm", "sm_100", deep_gemm.VLLM_QUANTISE_PACKED),
    ("deepgemm@sglang", "sm_90", deep_gemm.SGLANG_QUANTISE),
    ("deepgemm@sglang", "sm_100", deep_gemm.SGLANG_QUANTISE),
]

UNSEEN = {
    ("deepgemm@vllm", "sm_90"): {"column_major_scales", "use_ue8m0"},
    ("deepgemm@sglang", "sm_90"): {"column_major_scales", "scale_tma_aligned"},
    ("deepgemm@sglang", "sm_100"): {"column_major_scales"},
}
"""Flags on which the answer does not depend: DeepGEMM brings scales of fp32 into its layout itself where that
was not done, and coarser scales are within what rounding to FP8 explains. The next test holds them."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "quantise"), QUANTISERS)
def test_a_broken_argument_of_an_engines_quantiser_is_noticed(name, arch, quantise):
    kept = contract(name, arch, "with_quant")
    with listed() as breaks:
        kept.keep(ROWS)
    of_it = [way for way in breaks if way.place == quantise.places[0]]
    assert of_it
    unnoticed = {way.argument for way in of_it if not noticed(kept, ROWS, way)}
    assert unnoticed == UNSEEN.get((name, arch), set())


@pytest.mark.parametrize(
    ("name", "arch", "quantise", "flags"),
    [
        (*QUANTISERS[0], {"column_major_scales": True, "use_ue8m0": True}),
        (*QUANTISERS[1], {"use_ue8m0": True}),
        (
            *QUANTISERS[2],
            {"column_major_scales": True, "scale_tma_aligned": True, "scale_ue8m0": False},
        ),
        (*QUANTISERS[3], {"column_major_scales": True, "scale_tma_aligned": True, "scale_ue8m0": True}),
    ],
)
def test_an_engines_quantiser_gets_its_flags(name, arch, quantise, flags, monkeypatch):
    given: dict[str, Any] = {}
    right = Function.bind

    def seen(self: Function, *by_position: Any, of: Any = None, **arguments: Any) -> Callable[[], Any]:
        if self is quantise:
            given.update(arguments)
        return right(self, *by_position, of=of, **arguments)

    monkeypatch.setattr(Function, "bind", seen)
    contract(name, arch, "with_quant").keep(ROWS)
    assert {flag: value for flag, value in given.items() if isinstance(value, bool)} == flags
    assert given["group_size"] == 128


# vLLM


def test_a_double_stands_in_for_a_vllm_that_was_imported_before(monkeypatch):
    """Its CPU build, which has no CUTLASS."""
    real = {name: ModuleType(name) for name in ("vllm", "vllm._custom_ops")}
    for name, module in real.items():
        monkeypatch.setitem(sys.modules, name, module)
    contract("vllm.cutlass", "sm_90").keep(ROWS)
    assert {name: sys.modules[name] for name in real} == real


# FlashInfer


class Given(NamedTuple):
    out: torch.Tensor
    others: dict[str, Any]


def cutile(given: list[Given]) -> Callable[..., torch.Tensor]:
    """gemm_fp8_nt_groupwise as far as cuTile goes: what its Python checks in 0.6.18
    (gemm_base.py:7552, kernels/cutile/gemm_fp8_nt_groupwise_cutile.py), and the product by the shapes."""

    def gemm_fp8_nt_groupwise(
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor,
        b_scale: torch.Tensor,
        scale_major_mode: str | None = None,
        mma_sm: int = 1,
        scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        backend: str = "cutlass",
    ) -> torch.Tensor:
        assert backend == "cutile" and scale_major_mode in (None, "K")
        assert scale_granularity_mnk == (1, 128, 128)
        (m, k), (n, _) = a.shape, b.shape
        assert a.is_contiguous() and b.is_contiguous() and out is not None and out.is_contiguous()
        assert a_scale.shape == (m, -(-k // 128)) and b_scale.shape == (-(-n // 128), -(-k // 128))
        wide_a = a.float() * a_scale.repeat_interleave(128, 1)[:, :k]
        wide_b = b.float() * b_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        given.append(Given(out, {"mma_sm": mma_sm, "out_dtype": out_dtype}))
        return out.copy_(wide_a @ wide_b.T)

    return gemm_fp8_nt_groupwise


@pytest.mark.parametrize("boundary", OP.boundaries)
@pytest.mark.parametrize("text", ["m=1 n=128 k=128", ROWS, "m=5 n=192 k=640"])
def test_cutile_takes_every_layout_as_it_is(text, boundary, monkeypatch):
    """The double of FlashInfer does not cover it."""
    given: list[Given] = []
    with lent("cuda", "sm_100", "flashinfer_gemm_moe"):
        import flashinfer.gemm as library

        monkeypatch.setattr(library, "gemm_fp8_nt_groupwise", cutile(given))
        sizes, row = sizes_of(text, "sm_100"), IMPLEMENTATIONS["flashinfer.cutile"]
        call = prepared("flashinfer.cutile", text, "sm_100", boundary)
        for seed in (0, 1):
            live = OP.operands(sizes, Seeds(live=seed), "cpu", boundary).live_tensors()
            call.load(live)
            for name, tensor in live.items():
                getattr(call.operands, name).copy_(tensor)
            call.call()
            assert judged(OP, row, sizes, call.operands, call.result())["ok"]
    assert given and given[-1].out.data_ptr() == call.result().data_ptr()


def test_before_0_2_9_flashinfer_has_no_backend_to_name():
    """There a row that names one would time CUTLASS; as its `since` says."""
    old = signatures.parse(
        "(a, b, a_scale, b_scale, scale_major_mode='MN', mma_sm=1, scale_granularity_mnk=(1, 128, 128), "
        "out=None, out_dtype=None)"
    )
    assert flashinfer.GROUPWISE.complaint(old) == "" and flashinfer.GROUPWISE.lacks(old) == {"backend"}
    assert "backend" in flashinfer.NAMED_BACKEND.complaint(old)


# What they need


def refused(name: str, kind: str, arch: str, text: str) -> str:
    """Why a case is; empty if it is not."""
    case = OP.case(OP.defaults(arch) | parse(text)[0])
    return IMPLEMENTATIONS[name].supports(case, named(kind, arch)).reason


def test_what_they_need_is_said():
    sm_90, sm_100, gfx942 = named("cuda", "sm_90"), named("cuda", "sm_100"), named("rocm", "gfx942")
    reasons = {
        "cublaslt": (sm_100, "needs sm_90"),
        "flashinfer.sm90": (sm_100, "needs sm_90"),
        "flashinfer.groupwise": (sm_90, "needs sm_100 or sm_103"),
        "flashinfer.trtllm": (sm_90, "needs sm_100 or sm_103"),
        "flashinfer.cutile": (sm_90, "needs sm_100, sm_103 or sm_120"),
        "deepgemm": (gfx942, "needs cuda"),
        "deepgemm@vllm": (gfx942, "needs cuda"),
        "aiter.dispatch": (sm_90, "needs rocm"),
        "hipblaslt.dequantised": (sm_90, "needs rocm"),
        "sglang.triton": (named("cpu"), "needs cuda or rocm"),
        "sglang.small_m": (gfx942, "needs gfx950"),
    }
    for name, (platform, reason) in reasons.items():
        assert reason in IMPLEMENTATIONS[name].available(platform).reason
    rows = ("cublaslt", "deepgemm", "flashinfer.sm90", "flashinfer.groupwise", "flashinfer.trtllm", *AITER)
    for name, text in itertools.product(rows, ("m=1 n=100 k=200",)):
        assert not IMPLEMENTATIONS[name].fits(sizes_of(text, "sm_90")).ok


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("flashinfer.trtllm", "m=1 n=128 k=128", "needs k to be 256 at least"),
        ("sglang.small_m", "m=33 n=4096 k=1024", "takes 32 tokens at most"),
        ("sglang.small_m", "m=1 n=2112 k=7168", "takes these n and k alone"),
    ],
)
def test_sizes_that_one_does_not_take(name, text, reason):
    assert reason in IMPLEMENTATIONS[name].fits(sizes_of(text, "sm_90")).reason


def test_where_sglangs_product_for_few_tokens_does_not_run_it_is_unsupported():
    """try_smallm_fp8_bs_linear then gives None, for SGLang to take another."""

    def try_smallm_fp8_bs_linear(x: Any, WQ: Any, w_scale: Any) -> None:
        return None

    with lent("rocm", "gfx950", "sglang", "aiter_gemm_moe"), pytest.MonkeyPatch.context() as patch:
        import sglang.kernels.ops.gemm.smallm_fp8_blockscale_gfx950 as library

        patch.setattr(library, "try_smallm_fp8_bs_linear", try_smallm_fp8_bs_linear)
        with pytest.raises(Unsupported, match="few tokens does not run here"):
            prepared("sglang.small_m", "m=5 n=4096 k=1024", "gfx950", "with_quant")


@pytest.mark.parametrize(
    ("kind", "arch", "runs"),
    [
        ("rocm", "gfx942", {*AITER, "hipblaslt.dequantised", "vllm.triton", "sglang.triton"}),
        (
            "cuda",
            "sm_90",
            {"cublaslt", "deepgemm", "deepgemm@vllm", "flashinfer.sm90", "vllm.triton", "sglang.triton"},
        ),
        ("cuda", "sm_103", {"deepgemm@sglang", "flashinfer.trtllm", "flashinfer.groupwise", "vllm.cutlass"}),
    ],
)
def test_list_names_them_with_what_they_need(here, kind, arch, runs):
    listed = ("list", "impls", "--op", OP.name, "--platform", kind, "--arch", arch, "--json", "-")
    rows = {row["implementation"]: row for row in json.loads(here(*listed).stdout)}
    for name in runs:
        assert rows[name]["runs"], rows[name]
        assert rows[name]["boundary"] == ", ".join(IMPLEMENTATIONS[name].boundaries)
        assert rows[name]["requires"] == IMPLEMENTATIONS[name].requires
    others = {c.name for c in CONTRACTS if c.op == OP.name and c.kind != kind} - runs
    others -= {"sglang.triton", "vllm.triton"}
    assert others and not any(rows[name]["runs"] for name in others)
