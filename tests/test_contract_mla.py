"""Adapters of MLA decode against doubles of their libraries, and that each broken step of a layout shows.

Every adapter runs on the op's own operands and is judged by the op's own check, and again after other live
operands were loaded.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from doubles import lent

import kernels
from harness.check import judge
from kernels.binding import keywords
from kernels.mla_decode import aiter, aiter_triton, flash_attn, flash_mla, flashinfer, paging, vllm_triton
from kernels.op import Implementation, Reference
from kernels.operands import Seeds
from kernels.platform import Platform, named
from shapes.case import parse

OP = kernels.OPS["mla_decode"]
RAGGED = "batch=3 ctx=1..130"


@dataclass(frozen=True)
class Contract:
    """An adapter on an architecture, with the double of its library."""

    name: str
    kind: str
    arch: str
    double: str
    texts: tuple[str, ...]

    @property
    def implementation(self) -> Implementation:
        return next(i for i in kernels.implementations("mla_decode") if i.name == self.name)


CONTRACTS = (
    *(
        Contract("aiter.asm", "rocm", arch, "aiter_attention", texts)
        for arch, fp8 in (("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn"))
        for texts in [
            (
                f"{RAGGED} page=1",
                f"{RAGGED} page=16",
                "batch=2 ctx=1..130 heads=128 page=64",
                f"{RAGGED} page=64 kv=fp8 fp8={fp8}",
                f"batch=2 ctx=1..130 heads=128 page=16 kv=fp8 fp8={fp8}",
            )
        ]
    ),
    *(
        Contract("aiter.asm_persistent", "rocm", arch, "aiter_attention", texts)
        for arch, fp8 in (("gfx942", "e4m3fnuz"), ("gfx950", "e4m3fn"))
        for texts in [
            (
                f"{RAGGED} page=16",
                "batch=2 ctx=1..130 heads=128 page=64",
                f"{RAGGED} page=1 kv=fp8 fp8={fp8}",
                f"batch=1 ctx=130 heads=64 page=64 kv=fp8 fp8={fp8}",
                f"batch=2 ctx=1..130 heads=128 page=16 kv=fp8 fp8={fp8}",
            )
        ]
    ),
    Contract(
        "aiter.triton",
        "rocm",
        "gfx942",
        "aiter_attention",
        (f"{RAGGED} page=16", f"{RAGGED} heads=128 page=64", f"{RAGGED} page=64 kv=fp8 fp8=e4m3fnuz"),
    ),
    Contract(
        "aiter.triton_split",
        "rocm",
        "gfx942",
        "aiter_attention",
        (f"{RAGGED} page=1", f"{RAGGED} heads=128 page=64", f"{RAGGED} page=16 kv=fp8 fp8=e4m3fnuz"),
    ),
    *(
        Contract(
            "flashmla",
            "cuda",
            "sm_90",
            double,
            (f"{RAGGED} page=64", "batch=2 ctx=1..130 heads=128 page=128"),
        )
        for double in ("flash_mla", "flash_mla_2025")
    ),
    *(
        Contract(
            name,
            "cuda",
            "sm_90",
            "flashinfer_attention",
            (
                f"{RAGGED} page=1",
                f"{RAGGED} page=16",
                f"{RAGGED} heads=128 page=64",
                f"{RAGGED} page=64 kv=fp8",
            ),
        )
        for name in ("flashinfer.fa2", "flashinfer.fa3")
    ),
    Contract(
        "flashinfer.cutlass",
        "cuda",
        "sm_100",
        "flashinfer_attention",
        ("batch=3 ctx=1..130 heads=128 page=64", "batch=2 ctx=100..300 heads=128 page=16"),
    ),
    Contract(
        "flashinfer.trtllm",
        "cuda",
        "sm_100",
        "flashinfer_attention",
        (f"{RAGGED} page=64", f"{RAGGED} heads=128 page=32", f"{RAGGED} page=64 kv=fp8"),
    ),
    Contract(
        "fa3.mla",
        "cuda",
        "sm_90",
        "flash_attn_3",
        (f"{RAGGED} page=1", f"{RAGGED} page=16", f"{RAGGED} heads=128 page=64"),
    ),
    Contract(
        "fa4.mla", "cuda", "sm_100", "flash_attn_4", (f"{RAGGED} page=16", f"{RAGGED} heads=128 page=64")
    ),
)


@pytest.fixture(autouse=True)
def a_device_of_few_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_triton, "units", lambda device: 4)


CASES = [(contract, text) for contract in CONTRACTS for text in contract.texts]


@functools.cache
def reference(text: str, live: int) -> Reference:
    return OP.reference(OP.operands(sizes_of(text), Seeds(live=live), "cpu"))


def sizes_of(text: str) -> Any:
    return OP.sizes(parse(text)[0])


def reports(contract: Contract, text: str, here: Platform) -> Iterator[dict]:
    """The judge's, of a first call and of one after other live operands were loaded."""
    implementation, sizes = contract.implementation, sizes_of(text)
    support = implementation.supports(OP.case(parse(text)[0]), here)
    assert support.ok, support.reason
    operands = OP.operands(sizes, Seeds(), "cpu")
    out = None if implementation.allocates else OP.empty_output(sizes, "cpu").fill_(torch.nan)
    prepared = implementation.prepare(operands, out)
    for live in (0, 1):
        prepared.load(OP.operands(sizes, Seeds(live=live), "cpu").live_tensors())
        if out is not None:
            out.fill_(torch.nan)
        before = operands.digest()
        prepared.call()
        assert operands.digest() == before
        shape = tuple(OP.empty_output(sizes, "meta").shape)
        fp8 = implementation.activations == "fp8"
        yield judge(prepared.result(), reference(text, live), OP.tolerance(sizes), shape, fp8)


@pytest.mark.parametrize(
    ("contract", "text"), CASES, ids=lambda p: p if isinstance(p, str) else f"{p.name} {p.double} {p.arch}"
)
def test_right_on_the_double(contract: Contract, text: str) -> None:
    with lent(contract.kind, contract.arch, contract.double) as here:
        for report in reports(contract, text, here):
            assert report["ok"], report["reason"]


# Broken steps


def shortened(lengths: torch.Tensor) -> torch.Tensor:
    """Lengths of other requests: none longer, the longest much shorter."""
    return (lengths // 2).clamp(min=1)


def one_less(starts: Callable) -> Callable:
    def broken(*given: Any) -> torch.Tensor:
        right = starts(*given)
        return torch.cat([right[:1], right[1:] - 1])

    return broken


def one_short_on_the_last_page(lengths: Callable) -> Callable:
    return lambda *given: lengths(*given) - 1


def pages_not_split(listed: Callable) -> Callable:
    """The numbers that the op's own pages have."""
    return lambda operands, page, *more: listed(operands, operands.page, *more)


def table_not_split(table: Callable) -> Callable:
    return lambda operands, page, *more: operands.page_table.repeat_interleave(operands.page // page, 1)


def table_not_padded(table: Callable) -> Callable:
    return lambda operands, page, multiple: table(operands, page)


def without_scale(right: Callable) -> Callable:
    def broken(function: Callable, needed: dict, wished: dict | None = None) -> dict:
        dropped = ("sm_scale", "softmax_scale")
        return keywords(function, {n: v for n, v in needed.items() if n not in dropped}, wished)

    return broken


def scale_of_576(right: Callable) -> Callable:
    """Where the library has no default."""

    def broken(function: Callable, needed: dict, wished: dict | None = None) -> dict:
        (name,) = needed.keys() & {"sm_scale", "softmax_scale"}
        return keywords(function, needed | {name: 576**-0.5}, wished)

    return broken


def rope_read_as_values(right: Callable) -> Callable:
    """The cache's rows begin 64 columns later."""
    return lambda kv: right(kv.roll(-64, -1))


def stale_schedule(schedule: Callable) -> Callable:
    """AITER's, made when the requests were shorter."""

    def broken(operands: Any, dtype: torch.dtype, layout: dict) -> dict:
        lengths = shortened(operands.lengths).tolist()
        return schedule(operands, dtype, layout | {"kv_indptr": paging.starts(lengths, operands.q.device)})

    return broken


def stale_metadata(schedule: Callable) -> Callable:
    """FlashMLA's, made when the requests were shorter: by its own call, or by a first decode."""

    def broken(operands: Any) -> Any:
        before = operands.replaced(
            lengths=shortened(operands.lengths), host_lengths=shortened(operands.lengths).tolist()
        )
        tiles, splits = schedule(before)
        if splits is None:
            from flash_mla import flash_mla_with_kvcache

            q, k = flash_mla.one_token(before.q), flash_mla.one_head(before.kv)
            table = paging.full_pages(before, flash_mla.PAGE)
            flash_mla_with_kvcache(q, k, table, before.lengths, 512, tiles, softmax_scale=before.scale)
        return tiles, splits

    return broken


def kv_scale_one(right: Callable) -> Callable:
    return lambda operands: right(operands.replaced(kv_scale=1.0))


def scale_of_values_one(right: Callable) -> Callable:
    return lambda operands: (right(operands)[0], 1.0)


def rope_first(right: Callable) -> Callable:
    """The rope part is taken for the first 64 columns."""
    return lambda tensor: (tensor[..., 64:], tensor[..., :64])


def other_fp8(right: Callable) -> Callable:
    other = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}

    def broken(operands: Any) -> torch.Tensor:
        return torch.empty_like(operands.q, dtype=other[right(operands).dtype])

    return broken


def nothing_loaded(right: Callable) -> Callable:
    def broken(self: Any, live: dict) -> None:
        if not hasattr(self, "arguments"):
            right(self, live)

    return broken


def last_sequence_for_all(right: Callable) -> Callable:
    def broken(*given: Any) -> torch.Tensor:
        table = right(*given)
        return table[-1:].expand_as(table).contiguous()

    return broken


@dataclass(frozen=True)
class Mutation:
    """A step of a provider, and how it is broken, for the contract on which it shows."""

    broken: Callable[[Callable], Callable]
    where: ModuleType | type
    step: str
    contract: Contract
    text: str

    @property
    def id(self) -> str:
        return f"{self.contract.name} {self.contract.double}: {self.step} {self.broken.__name__}"


def mutation(broken: Callable, where: Any, step: str, name: str, text: str, double: str = "") -> Mutation:
    chosen = next(c for c in CONTRACTS if c.name == name and double in ("", c.double))
    return Mutation(broken, where, step, chosen, text)


FNUZ = "kv=fp8 fp8=e4m3fnuz"
MUTATIONS = (
    mutation(one_less, aiter, "page_starts", "aiter.asm", f"{RAGGED} page=16"),
    mutation(one_less, aiter, "query_starts", "aiter.asm", f"{RAGGED} page=16"),
    mutation(pages_not_split, aiter, "page_list", "aiter.asm", f"{RAGGED} page=16"),
    mutation(one_short_on_the_last_page, aiter, "last_page_lengths", "aiter.asm", f"{RAGGED} page=16"),
    mutation(without_scale, aiter, "keywords", "aiter.asm", f"{RAGGED} page=16"),
    mutation(kv_scale_one, aiter, "scales", "aiter.asm", f"{RAGGED} page=64 {FNUZ}"),
    mutation(other_fp8, aiter, "query_buffer", "aiter.asm", f"{RAGGED} page=64 {FNUZ}"),
    mutation(one_less, aiter, "page_starts", "aiter.asm_persistent", f"{RAGGED} page=16"),
    mutation(stale_schedule, aiter, "schedule", "aiter.asm_persistent", f"{RAGGED} page=16"),
    mutation(kv_scale_one, aiter, "scales", "aiter.asm_persistent", f"{RAGGED} page=1 {FNUZ}"),
    mutation(scale_of_576, aiter_triton, "keywords", "aiter.triton", f"{RAGGED} page=16"),
    mutation(table_not_split, aiter_triton, "full_pages", "aiter.triton", f"{RAGGED} page=48"),
    mutation(kv_scale_one, aiter_triton, "kv_scale", "aiter.triton", f"{RAGGED} page=64 {FNUZ}"),
    mutation(nothing_loaded, paging.FiniteCache, "load", "aiter.triton", f"{RAGGED} page=16"),
    mutation(scale_of_576, vllm_triton, "keywords", "aiter.triton_split", f"{RAGGED} page=16"),
    mutation(kv_scale_one, vllm_triton, "scales", "aiter.triton_split", f"{RAGGED} page=16 {FNUZ}"),
    mutation(rope_read_as_values, vllm_triton, "one_head", "aiter.triton_split", f"{RAGGED} page=16"),
    mutation(table_not_split, flash_mla, "full_pages", "flashmla", "batch=3 ctx=1..130 page=128"),
    *(
        mutation(broken, flash_mla, step, "flashmla", "batch=3 ctx=1..300 page=64", double)
        for double in ("flash_mla", "flash_mla_2025")
        for broken, step in ((stale_metadata, "schedule"), (without_scale, "keywords"))
    ),
    *(
        mutation(broken, flashinfer, step, name, text)
        for name in ("flashinfer.fa2", "flashinfer.fa3")
        for broken, step, text in (
            (one_less, "page_starts", f"{RAGGED} page=16"),
            (rope_first, "parts", f"{RAGGED} page=16"),
            (kv_scale_one, "scales", f"{RAGGED} page=64 kv=fp8"),
        )
    ),
    mutation(
        table_not_padded,
        flashinfer,
        "full_pages",
        "flashinfer.cutlass",
        "batch=3 ctx=1..130 heads=128 page=64",
    ),
    mutation(
        nothing_loaded,
        paging.FiniteCache,
        "load",
        "flashinfer.cutlass",
        "batch=3 ctx=1..130 heads=128 page=64",
    ),
    mutation(kv_scale_one, flashinfer, "product_scales", "flashinfer.trtllm", f"{RAGGED} page=64 kv=fp8"),
    mutation(
        scale_of_values_one, flashinfer, "product_scales", "flashinfer.trtllm", f"{RAGGED} page=64 kv=fp8"
    ),
    mutation(table_not_split, flashinfer, "full_pages", "flashinfer.trtllm", "batch=3 ctx=1..300 page=128"),
    mutation(rope_first, flash_attn, "parts", "fa3.mla", f"{RAGGED} page=16"),
    mutation(without_scale, flash_attn, "keywords", "fa3.mla", f"{RAGGED} page=16"),
    mutation(last_sequence_for_all, flash_attn, "full_pages", "fa3.mla", f"{RAGGED} page=16"),
    mutation(rope_first, flash_attn, "parts", "fa4.mla", f"{RAGGED} page=16"),
    mutation(without_scale, flash_attn, "keywords", "fa4.mla", f"{RAGGED} page=16"),
)


@pytest.mark.parametrize("mutated", MUTATIONS, ids=lambda m: m.id)
def test_a_broken_step_shows(mutated: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the library, or an output that the judge finds wrong."""
    monkeypatch.setattr(mutated.where, mutated.step, mutated.broken(getattr(mutated.where, mutated.step)))
    contract = mutated.contract
    with lent(contract.kind, contract.arch, contract.double) as here:
        try:
            right = all(report["ok"] for report in reports(contract, mutated.text, here))
        except Exception as error:
            assert contract.double in noticed_by(error), f"not the library's: {error!r}"
        else:
            assert not right


def noticed_by(error: BaseException) -> set[str]:
    """The folders that an error came through."""
    return {
        part
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for part in Path(frame.f_code.co_filename).parts
    }


@pytest.mark.parametrize(
    ("name", "kind", "arch", "sizes", "reason"),
    [
        ("aiter.asm", "rocm", "gfx942", "kv=fp8 fp8=e4m3fn", "takes e4m3fnuz on gfx942, not e4m3fn"),
        ("aiter.asm", "rocm", "gfx950", "kv=fp8 fp8=e4m3fnuz", "takes e4m3fn on gfx950, not e4m3fnuz"),
        ("aiter.asm", "rocm", "gfx950", "heads=64 kv=fp8", "takes 8, 16, 128 heads with kv=fp8"),
        ("aiter.asm_persistent", "rocm", "gfx950", "heads=8", "takes multiples of 16 heads, 128 at the most"),
        ("aiter.triton", "rocm", "gfx942", "page=8", "needs pages of a multiple of 16 tokens, not 8"),
        ("flashmla", "cuda", "sm_90", "page=16", "needs a page that is a multiple of 64"),
        ("flashmla", "cuda", "sm_100", "", "has a dense kernel for sm_90, not sm_100"),
        ("flashinfer.fa2", "cuda", "sm_100", "kv=fp8", "takes an FP8 cache on sm_90, not on sm_100"),
        ("flashinfer.cutlass", "cuda", "sm_100", "heads=16", "takes 128 heads, not 16"),
        ("fa3.mla", "cuda", "sm_90", "kv=fp8", "takes a bf16 cache, not fp8"),
        ("vllm.triton", "cpu", "x86-avx512", "", "needs cuda or rocm; this is cpu x86-avx512"),
    ],
)
def test_what_a_library_does_not_take_is_refused_in_words(name, kind, arch, sizes, reason) -> None:
    (implementation,) = [i for i in kernels.implementations("mla_decode") if i.name == name]
    case = OP.case(parse(f"batch=2 ctx=100 {sizes}")[0])
    assert implementation.supports(case, named(kind, arch)).reason == reason
