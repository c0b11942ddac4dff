"""MHA prefill's adapters against the doubles of their libraries, on the op's operands and by its own check;
and that the contract notices when one step of an adapter's layout is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from doubles import lent
from judging import judged

import kernels
from kernels.mha_prefill import aiter, flash_attn, flashinfer, varlen
from kernels.op import Unsupported
from kernels.operands import Seeds
from shapes.case import parse

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

# Not doubled, and so not held to any contract: aiter.asm, aiter.ck and aiter.opus called by themselves,
# flashinfer.cudnn, .trtllm and .cute_dsl, cudnn, and sglang.triton_extend.
ROWS = {
    row.text: row
    for row in (
        Row("aiter.dispatch", "rocm", "gfx942", AITER),
        Row("aiter.dispatch", "rocm", "gfx950", AITER),
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


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_the_adapter_keeps_the_contract(row, text):
    keep(row, text)


@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.dtype == "fp8"], ids=lambda r: r.text)
def test_another_fp8_format_is_refused_in_one_line(row):
    other = {"e4m3fn": "e4m3fnuz", "e4m3fnuz": "e4m3fn"}[OP.defaults(row.arch)["fp8"]]
    with pytest.raises(Unsupported, match=rf"{row.arch} multiplies FP8 in \w+, not in {other}"):
        keep(row, FRESH, fp8=other)


@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.dtype == "fp8"], ids=lambda r: r.text)
def test_another_fp8_format_would_be_noticed(row, monkeypatch):
    for module in (aiter, flash_attn, flashinfer):
        monkeypatch.setattr(module, "require_native", lambda operands: None)
    other = {"e4m3fn": "e4m3fnuz", "e4m3fnuz": "e4m3fn"}[OP.defaults(row.arch)["fp8"]]
    with pytest.raises(Exception):  # noqa: B017, what the library or the judge says
        keep(row, FRESH, fp8=other)


# Mutations: one step of the layout at a time


def changed(step: Callable, change: Callable) -> Callable:
    """The step with its result changed, by a function of the result and the operands."""
    return lambda o, *rest: change(step(o, *rest), o)


def but(**values: Any) -> Callable:
    """A dict with other values, each a function of the dict."""
    return lambda named, o: named | {name: make(named) for name, make in values.items()}


def one_less(tensor: torch.Tensor) -> torch.Tensor:
    """All ends but the first begin a row too early."""
    return torch.cat([tensor[:1], tensor[1:] - 1])


def swapped(first: str, second: str) -> Callable:
    return but(**{first: lambda d: d[second], second: lambda d: d[first]})


def in_another_order(cumulative: torch.Tensor) -> torch.Tensor:
    """As many sequences and tokens, but lengths the other way round."""
    return torch.cat([cumulative[:1], cumulative.diff().flip(0).cumsum(0).int()])


def at_the_end(v: torch.Tensor) -> torch.Tensor:
    """Zeros before v, not behind it."""
    return varlen.padded(v).roll(64, -1)


MI300X, MI350X = "aiter.dispatch gfx942 bf16", "aiter.dispatch gfx950 bf16"
PS, CK_FP8 = "aiter.fp8_ps gfx950 fp8", "aiter.fp8 gfx942 fp8"
FA2, FA3, FA3_FP8 = "flash_attn.fa2 sm_90 bf16", "flash_attn.fa3 sm_90 bf16", "flash_attn.fa3 sm_90 fp8"
RAGGED, CUTLASS_FP8 = "flashinfer.fa2 sm_90 bf16", "flashinfer.cutlass sm_100 fp8"


class Mutation(NamedTuple):
    """What is wrong, in which row, which module's step, and the step that stands in for it."""

    what: str
    row: str
    module: Any
    step: str
    instead: Any


def mutations() -> list[Mutation]:
    lengths, begins = varlen.lengths, flashinfer.begins
    shared = [
        (
            "cu_seqlens_q off by one",
            varlen,
            "lengths",
            changed(lengths, but(cu_seqlens_q=lambda d: one_less(d["cu_seqlens_q"]))),
        ),
        (
            "cu_seqlens_k off by one",
            varlen,
            "lengths",
            changed(lengths, but(cu_seqlens_k=lambda d: one_less(d["cu_seqlens_k"]))),
        ),
        (
            "q and k lengths swapped",
            varlen,
            "lengths",
            changed(lengths, swapped("cu_seqlens_q", "cu_seqlens_k")),
        ),
        (
            "longest q one short",
            varlen,
            "lengths",
            changed(lengths, but(max_seqlen_q=lambda d: d["max_seqlen_q"] - 1)),
        ),
        (
            "cu_seqlens in int64",
            varlen,
            "lengths",
            changed(lengths, but(cu_seqlens_q=lambda d: d["cu_seqlens_q"].long())),
        ),
        ("scale of the 128 alone", varlen, "scale", lambda o: 128**-0.5),
        ("scale missing", varlen, "scale", lambda o: 1.0),
        ("no causal mask", varlen, "mask", lambda: {"causal": False}),
    ]
    found = [Mutation(what, row, *rest) for row in (MI300X, MI350X, FA3) for what, *rest in shared]
    # OPUS converts those (aiter/ops/mha.py, fmha_fwd_bf16_opus_varlen_fwd): nothing is wrong there.
    found = [m for m in found if (m.row, m.what) != (MI350X, "cu_seqlens in int64")]
    found += [
        Mutation("v padded in front", FA2, varlen, "padded", at_the_end),
        Mutation(
            "new v in the unpadded place",
            FA2,
            varlen.Varlen,
            "inputs",
            lambda self: self.operands.live_tensors(),
        ),
        Mutation(
            "v's descale missing",
            FA3_FP8,
            flash_attn,
            "descales",
            changed(flash_attn.descales, but(v_descale=lambda d: torch.ones_like(d["v_descale"]))),
        ),
        Mutation(
            "descales of q and v swapped",
            FA3_FP8,
            flash_attn,
            "descales",
            changed(flash_attn.descales, swapped("q_descale", "v_descale")),
        ),
        Mutation("one descale for all", FA3_FP8, flash_attn, "descales", aiter.descales),
        Mutation(
            "descales inverted",
            CK_FP8,
            aiter,
            "descales",
            changed(aiter.descales, lambda d, o: {n: 1 / t for n, t in d.items()}),
        ),
        Mutation(
            "k's descale missing",
            CK_FP8,
            aiter,
            "descales",
            changed(aiter.descales, but(k_descale=lambda d: torch.ones_like(d["k_descale"]))),
        ),
        Mutation(
            "planned for new tokens only",
            PS,
            aiter,
            "host_lengths",
            changed(aiter.host_lengths, lambda h, o: (h[0], h[1], h[0].diff())),
        ),
        Mutation(
            "planned for other lengths",
            PS,
            aiter,
            "host_lengths",
            changed(
                aiter.host_lengths,
                lambda h, o: (in_another_order(h[0]), in_another_order(h[1]), h[2].flip(0)),
            ),
        ),
        Mutation(
            "keys one page on", PS, aiter, "pages", changed(aiter.pages, lambda pages, o: pages.roll(1))
        ),
        Mutation(
            "planned for other lengths",
            RAGGED,
            flashinfer,
            "begins",
            changed(begins, but(qo_indptr=lambda d: in_another_order(d["qo_indptr"]))),
        ),
        Mutation(
            "q and k lengths swapped",
            RAGGED,
            flashinfer,
            "begins",
            changed(begins, swapped("qo_indptr", "kv_indptr")),
        ),
        Mutation(
            "scale of the 128 alone",
            RAGGED,
            flashinfer,
            "scoring",
            changed(flashinfer.scoring, but(sm_scale=lambda d: 128**-0.5)),
        ),
        Mutation(
            "no causal mask",
            RAGGED,
            flashinfer,
            "scoring",
            changed(flashinfer.scoring, but(causal=lambda d: False)),
        ),
        Mutation(
            "planned as if v were as wide as k",
            RAGGED,
            flashinfer,
            "sizes_of",
            changed(flashinfer.sizes_of, but(head_dim_vo=lambda d: 192)),
        ),
        Mutation("scales missing", CUTLASS_FP8, flashinfer, "scales", lambda o: {}),
        Mutation(
            "scales of q and v swapped",
            CUTLASS_FP8,
            flashinfer,
            "scales",
            changed(flashinfer.scales, swapped("q_scale", "v_scale")),
        ),
    ]
    return found


@pytest.mark.parametrize("mutation", mutations(), ids=lambda m: f"{m.row}: {m.what}")
def test_a_wrong_step_is_noticed(mutation, monkeypatch):
    monkeypatch.setattr(mutation.module, mutation.step, mutation.instead)
    with pytest.raises(Exception) as noticed:
        keep(ROWS[mutation.row], LONG if mutation.row == PS else CACHED)
    assert not isinstance(noticed.value, Unsupported), noticed.value
