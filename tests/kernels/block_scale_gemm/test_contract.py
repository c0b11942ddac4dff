"""Adapters of block-scale GEMM against strict doubles of their libraries, judged as the harness judges.

What the doubles cannot show: that the libraries build, and what their kernels round (untested on hardware).
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import kernels
from kernels.block_scale_gemm.layouts import column_major
from kernels.block_scale_gemm.providers import aiter, cublaslt, deep_gemm, flashinfer
from kernels.compose import bind
from kernels.op import Unsupported
from kernels.operands import Seeds
from kernels.platform import Platform, named
from shapes.case import parse
from tests.doubles import lent
from tests.doubles.torch_scaled_mm import double as scaled_mm
from tests.support.judging import judged

OP = kernels.OPS["block_scale_gemm"]
IMPLEMENTATIONS = {i.name: i for i in kernels.implementations("block_scale_gemm")}

ROWS = "m=33 n=384 k=640"  # rows that fill neither tiles nor 16 bytes of scales; K not in fours of blocks
AITER = [name for name in IMPLEMENTATIONS if name.startswith("aiter.")]


class Place(NamedTuple):
    """Where an implementation is tried: its double (None: none is needed) and what it doubles."""

    name: str
    kind: str
    arch: str
    double: str | None


PLACES = [
    Place("cublaslt", "cuda", "sm_90", None),
    Place("deepgemm", "cuda", "sm_90", "deep_gemm"),
    Place("deepgemm", "cuda", "sm_100", "deep_gemm"),
    Place("flashinfer.sm90", "cuda", "sm_90", "flashinfer_gemm_moe"),
    Place("flashinfer.groupwise", "cuda", "sm_100", "flashinfer_gemm_moe"),
    Place("hipblaslt.dequantised", "rocm", "gfx942", None),
    *(Place(name, "rocm", arch, "aiter_gemm_moe") for name in AITER for arch in ("gfx942", "gfx950")),
    *(Place("sglang.triton", kind, arch, "sglang") for kind, arch in (("cuda", "sm_90"), ("rocm", "gfx942"))),
]


@contextlib.contextmanager
def at(place: Place) -> Iterator[Platform]:
    names = [place.double] if place.double else []
    with lent(place.kind, place.arch, *names) as platform, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_mm", scaled_mm.scaled_mm)
        yield platform


def sizes_of(text: str, arch: str) -> Any:
    return OP.sizes(OP.defaults(arch) | parse(text)[0])


def called(prepared: Any, implementation: Any, sizes: Any, operands: Any) -> str:
    """Why the output of a call is wrong; empty if it is right."""
    if prepared.out is not None:
        prepared.out.fill_(float("nan"))
    before = operands.digest()
    prepared.call()
    if operands.digest() != before:
        return "the call changed its operands"
    return judged(OP, implementation, sizes, operands, prepared.result())["reason"]


def contract(place: Place, text: str = ROWS, boundary: str = "core", platform: Platform | None = None) -> str:
    """What is wrong with calls on two sets of live operands, as bench.py makes them; empty if nothing is."""
    implementation, sizes = IMPLEMENTATIONS[place.name], sizes_of(text, place.arch)
    if platform is not None:
        assert implementation.available(platform).ok, implementation.available(platform).reason
        assert implementation.fits(sizes).ok, implementation.fits(sizes).reason
    operands = OP.operands(sizes, Seeds(), "cpu", boundary)
    out = None if implementation.allocates else OP.empty_output(sizes, "cpu")
    prepared = bind(OP, implementation, operands, out)
    first = called(prepared, implementation, sizes, operands)
    live = OP.operands(sizes, Seeds(live=1), "cpu", boundary).live_tensors()
    before = pointers(prepared)
    prepared.load(live)
    if pointers(prepared) != before:
        return "a recorded graph would not see what was loaded"
    for name, tensor in live.items():
        getattr(operands, name).copy_(tensor)
    return first or called(prepared, implementation, sizes, operands)


def pointers(prepared: Any) -> list[int]:
    """Where the library reads and writes."""
    prepared = getattr(prepared, "inner", prepared)
    given = getattr(prepared, "arguments", {}).values()
    flat = itertools.chain(*(argument if isinstance(argument, tuple) else [argument] for argument in given))
    return [argument.data_ptr() for argument in flat if isinstance(argument, torch.Tensor)]


def case(place: Place) -> str:
    return f"{place.name}, {place.arch}"


@pytest.mark.parametrize("boundary", OP.boundaries)
@pytest.mark.parametrize("text", ["m=1 n=128 k=128", "m=16 n=384 k=512", ROWS])
@pytest.mark.parametrize("place", PLACES, ids=case)
def test_contract(place, text, boundary):
    with at(place) as platform:
        assert contract(place, text, boundary, platform) == ""


@pytest.mark.parametrize("name", ["aiter.dispatch", "aiter.ck", "aiter.triton", "aiter.dispatch_preshuffled"])
def test_aiter_takes_a_partial_block_of_n(name):
    place = Place(name, "rocm", "gfx942", "aiter_gemm_moe")
    with at(place) as platform:
        assert contract(place, "m=5 n=192 k=640", "core", platform) == ""


@pytest.mark.parametrize("place", PLACES[:5], ids=case)
def test_others_do_too(place):
    with at(place) as platform:
        assert contract(place, "m=5 n=192 k=640", "core", platform) == ""


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
    with at(Place(name, "rocm", "gfx942", "aiter_gemm_moe")):
        operands = OP.operands(sizes_of(text, "gfx942"), Seeds(), "cpu", boundary)
        out = OP.empty_output(sizes_of(text, "gfx942"), "cpu")
        picked = bind(OP, IMPLEMENTATIONS[name], operands, out).picked()
    assert picked.startswith(told) and bool(picked) == bool(told)
    assert "tuned: " not in told or "splitK=" in picked


def test_deepgemm_1_has_other_names():
    """Of the function and its arguments: deep_gemm/jit_kernels/gemm.py of 1.0.0."""
    with at(place("deepgemm", "sm_90")) as platform, pytest.MonkeyPatch.context() as patch:
        import deep_gemm as library

        second = library.fp8_gemm_nt

        def gemm_fp8_fp8_bf16_nt(lhs: tuple, rhs: tuple, out: torch.Tensor) -> None:
            second(lhs, rhs, out)

        patch.delattr(library, "fp8_gemm_nt")
        patch.setattr(library, "gemm_fp8_fp8_bf16_nt", gemm_fp8_fp8_bf16_nt, raising=False)
        assert contract(place("deepgemm", "sm_90"), ROWS, "core", platform) == ""


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_deepgemm_transforms_no_scales_inside_a_core_call(arch):
    place = next(p for p in PLACES if p.name == "deepgemm" and p.arch == arch)
    with at(place):
        assert scales_handed_on(place)


def scales_handed_on(place: Place) -> bool:
    """Whether the library takes the scales as they are, after `load` too."""
    from kernels.binding import find

    sizes = sizes_of(ROWS, place.arch)
    operands = OP.operands(sizes, Seeds(), "cpu")
    prepared = IMPLEMENTATIONS[place.name].prepare(operands, OP.empty_output(sizes, "cpu"))
    transform = find("deep_gemm.transform_sf_into_required_layout")
    recipe = (1, 128, 128) if place.arch == "sm_90" else (1, 1, 128)

    def untouched(scale: torch.Tensor, rows: int, is_a: bool) -> bool:
        taken = transform(scale, rows, sizes.k, recipe, is_sfa=is_a)
        return taken.data_ptr() == scale.data_ptr()

    for seed in (0, 1):
        prepared.load(OP.operands(sizes, Seeds(live=seed), "cpu").live_tensors())
        given_a, given_b = (argument[1] for argument in list(prepared.arguments.values())[:2])
        if not (untouched(given_a, sizes.m, True) and untouched(given_b, sizes.n, False)):
            return False
    return True


def place(name: str, arch: str) -> Place:
    return next(p for p in PLACES if (p.name, p.arch) == (name, arch))


def row_major(a_scale: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    return a_scale.clone()


def unaligned(a_scale: torch.Tensor) -> torch.Tensor:
    return column_major(a_scale)


def in_other_tiles(b_q: torch.Tensor) -> torch.Tensor:
    from kernels.binding import find

    return find("aiter.ops.shuffle.shuffle_weight")(b_q, layout=(32, 16))


def only_stepwise(scale: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return scale


class Mutation(NamedTuple):
    """A layout step of an adapter, and what takes its place."""

    what: str
    place: Place
    module: Any
    step: str
    instead: Callable | Any


ASM = place("aiter.asm", "gfx942")
MUTATIONS = [
    Mutation("shuffle dropped", ASM, aiter, "in_tiles", torch.clone),
    Mutation("shuffle dropped", place("aiter.ck_preshuffled", "gfx950"), aiter, "in_tiles", torch.clone),
    Mutation("shuffled into other tiles", ASM, aiter, "in_tiles", in_other_tiles),
    Mutation("scales of a by rows", ASM, aiter, "by_columns", torch.clone),
    Mutation(
        "scales of a by rows", place("aiter.dispatch_preshuffled", "gfx942"), aiter, "by_columns", torch.clone
    ),
    Mutation(
        "scales of a as a strided view",
        place("aiter.cktile_preshuffled", "gfx942"),
        aiter,
        "by_columns",
        column_major,
    ),
    Mutation("live scales written by rows", ASM, aiter, "in_rows", lambda given: given),
    Mutation("both in the other layout", place("aiter.ck", "gfx942"), aiter.CkGemm, "shuffles", True),
    Mutation("neither in its layout", ASM, aiter.AsmGemm, "shuffles", False),
    Mutation("scales of a by rows", place("cublaslt", "sm_90"), cublaslt, "column_major", row_major),
    Mutation("rows not padded", place("cublaslt", "sm_90"), cublaslt, "padded_rows", lambda t, _: t.clone()),
    Mutation(
        "scales of b not padded", place("cublaslt", "sm_90"), cublaslt, "b_scale_by_blocks_of_k", torch.t
    ),
    Mutation("scales not aligned", place("flashinfer.sm90", "sm_90"), flashinfer, "aligned", unaligned),
    Mutation("scales of a by rows", place("flashinfer.sm90", "sm_90"), flashinfer, "aligned", row_major),
    Mutation(
        "scales of b along K", place("flashinfer.groupwise", "sm_100"), flashinfer, "along_n", torch.clone
    ),
    Mutation(
        "rows not padded",
        place("flashinfer.groupwise", "sm_100"),
        flashinfer,
        "padded_rows",
        lambda t, _: t.clone(),
    ),
    Mutation(
        "scales of a by rows", place("flashinfer.groupwise", "sm_100"), flashinfer, "column_major", row_major
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{case(m.place)}: {m.what}")
def test_a_broken_layout_step_breaks_the_contract(mutation, monkeypatch):
    with at(mutation.place):
        assert contract(mutation.place) == ""
        monkeypatch.setattr(mutation.module, mutation.step, mutation.instead)
        assert fails(mutation.place)


def fails(place: Place, text: str = ROWS) -> bool:
    try:
        return contract(place, text) != ""
    except (RuntimeError, ValueError, AssertionError, Unsupported):
        return True


@pytest.mark.parametrize(
    ("arch", "step", "instead"),
    [
        ("sm_90", "aligned", unaligned),  # the library would copy them in every call
        ("sm_90", "aligned", row_major),
        ("sm_100", "packed", only_stepwise),
    ],
)
def test_scales_that_deepgemm_would_transform_in_every_call_are_seen(arch, step, instead, monkeypatch):
    with at(place("deepgemm", arch)) as _:
        monkeypatch.setattr(deep_gemm, step, instead)
        seen = False
        with contextlib.suppress(RuntimeError):
            seen = scales_handed_on(place("deepgemm", arch))
        assert not seen


def test_scales_that_are_no_powers_of_two_are_refused_on_sm_100():
    reason = "sm_100 takes power-of-two scales (scales=ue8m0), not fp32"
    assert refused("deepgemm", "cuda", "sm_100", f"{ROWS} scales=fp32") == reason
    assert not refused("deepgemm", "cuda", "sm_90", f"{ROWS} scales=fp32")


def refused(name: str, kind: str, arch: str, text: str) -> str:
    """Why a case is; empty if it is not."""
    case = OP.case(OP.defaults(arch) | parse(text)[0])
    return IMPLEMENTATIONS[name].supports(case, named(kind, arch)).reason


def test_scales_that_were_not_rounded_break_the_contract():
    """The double traps as DeepGEMM's packing kernel does."""
    with at(place("deepgemm", "sm_100")):
        assert fails(place("deepgemm", "sm_100"), f"{ROWS} scales=fp32")


@pytest.mark.parametrize(
    ("arch", "fp8", "taken"), [("gfx942", "e4m3fn", "e4m3fnuz"), ("gfx950", "e4m3fnuz", "e4m3fn")]
)
def test_the_other_fp8_format_is_refused_and_would_be_misread(arch, fp8, taken):
    assert refused("aiter.ck", "rocm", arch, f"{ROWS} fp8={fp8}") == f"{arch} takes {taken}, not {fp8}"
    with at(place("aiter.ck", arch)):
        assert fails(place("aiter.ck", arch), f"{ROWS} fp8={fp8}")


def packed_once(self: Any, live: Any) -> None:
    self.operands.a_q.copy_(live["a_q"])


def packed_elsewhere(self: Any, live: Any) -> None:
    self.operands.a_q.copy_(live["a_q"])
    self.take(deep_gemm.packed(live["a_scale"], live["a_q"], is_a=True))


@pytest.mark.parametrize("load", [packed_once, packed_elsewhere])
def test_live_scales_that_are_not_packed_in_place_break_the_contract(load, monkeypatch):
    with at(place("deepgemm", "sm_100")):
        assert contract(place("deepgemm", "sm_100")) == ""
        monkeypatch.setattr(deep_gemm._Packed, "load", load)
        assert fails(place("deepgemm", "sm_100"))


def test_what_ck_does_not_take_is_unsupported():
    sizes = sizes_of("m=4 n=384 k=512", "gfx942")
    with at(place("aiter.ck", "gfx942")), pytest.MonkeyPatch.context() as patch:
        prepared = IMPLEMENTATIONS["aiter.ck"].prepare(
            OP.operands(sizes, Seeds(), "cpu"), OP.empty_output(sizes, "cpu")
        )

        def refuse(**_: Any) -> None:
            raise RuntimeError("This GEMM is not supported!")

        patch.setattr(prepared, "function", refuse)
        with pytest.raises(Unsupported, match=r"^gemm_a8w8_blockscale_ck: This GEMM is not supported!$"):
            prepared.call()


def test_what_they_need_is_said():
    sm_90, sm_100, gfx942 = named("cuda", "sm_90"), named("cuda", "sm_100"), named("rocm", "gfx942")
    reasons = {
        "cublaslt": (sm_100, "needs sm_90"),
        "flashinfer.sm90": (sm_100, "needs sm_90"),
        "flashinfer.groupwise": (sm_90, "needs sm_100"),
        "deepgemm": (gfx942, "needs cuda"),
        "aiter.dispatch": (sm_90, "needs rocm"),
        "hipblaslt.dequantised": (sm_90, "needs rocm"),
        "sglang.triton": (named("cpu"), "needs cuda or rocm"),
    }
    for name, (platform, reason) in reasons.items():
        assert reason in IMPLEMENTATIONS[name].available(platform).reason
    for name, text in itertools.product(
        ("cublaslt", "deepgemm", "flashinfer.sm90", "flashinfer.groupwise", *AITER), ("m=1 n=100 k=200",)
    ):
        assert not IMPLEMENTATIONS[name].fits(sizes_of(text, "sm_90")).ok


@pytest.mark.parametrize(
    ("kind", "arch", "runs"),
    [
        ("rocm", "gfx942", {*AITER, "hipblaslt.dequantised", "vllm.triton", "sglang.triton"}),
        ("cuda", "sm_90", {"cublaslt", "deepgemm", "flashinfer.sm90", "vllm.triton", "sglang.triton"}),
    ],
)
def test_list_names_them_with_what_they_need(here, kind, arch, runs):
    listed = ("list", "impls", "--op", OP.name, "--platform", kind, "--arch", arch, "--json", "-")
    rows = {row["implementation"]: row for row in json.loads(here(*listed).stdout)}
    for name in runs:
        assert rows[name]["runs"], rows[name]
        assert rows[name]["boundary"] == ", ".join(IMPLEMENTATIONS[name].boundaries)
        assert rows[name]["requires"] == IMPLEMENTATIONS[name].requires
    others = {p.name for p in PLACES if p.kind != kind} - runs
    assert others and not any(rows[name]["runs"] for name in others)
