"""One step of an adapter's layout is wrong at a time, and the contract notices.

Arguments of calls are broken one by one in tests/kernels/contracts/test_contracts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from kernels.mha_prefill import layouts
from kernels.mha_prefill.providers import (
    aiter,
    aiter_persistent,
    cudnn,
    flash_attn,
    flashinfer,
    sglang_triton,
)
from kernels.op import Unsupported
from tests.support.contract_rows import CACHED, CONTRACTS, LONG


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
    return layouts.padded(v).roll(64, -1)


MI300X, MI350X = "aiter.dispatch gfx942 bf16", "aiter.dispatch gfx950 bf16"
PS, CK_FP8 = "aiter.fp8_ps gfx950 fp8", "aiter.fp8 gfx942 fp8"
FA2, FA3, FA3_FP8 = "flash_attn.fa2 sm_90 bf16", "flash_attn.fa3 sm_90 bf16", "flash_attn.fa3 sm_90 fp8"


def heads_first(o: Any, name: str, shape: Callable = cudnn.shape) -> tuple[list[int], list[int]]:
    """Strides as if all tokens of a head lay together."""
    dims, _ = shape(o, name)
    _, heads, tokens, width = dims
    return dims, [heads * tokens * width, tokens * width, width, 1]


EXTEND = "sglang.triton_extend sm_90 bf16"
CUDNN, CUDNN_FP8 = "cudnn sm_100 bf16", "cudnn sm_100 fp8"
ASM, CK, OPUS = "aiter.asm gfx942 bf16", "aiter.ck gfx942 bf16", "aiter.opus gfx950 bf16"
INFER_CUDNN, TRTLLM = "flashinfer.cudnn sm_100 bf16", "flashinfer.trtllm sm_100 bf16"
TRTLLM_FP8, CUTE_FP8 = "flashinfer.trtllm sm_100 fp8", "flashinfer.cute_dsl sm_100 fp8"
RAGGED, CUTLASS_FP8 = "flashinfer.fa2 sm_90 bf16", "flashinfer.cutlass sm_100 fp8"


class Mutation(NamedTuple):
    """What is wrong, in which row, which module's step, and the step that stands in for it."""

    what: str
    row: str
    module: Any
    step: str
    instead: Any


def mutations() -> list[Mutation]:
    lengths, begins = layouts.lengths, flashinfer.begins
    shared = [
        (
            "cu_seqlens_q off by one",
            layouts,
            "lengths",
            changed(lengths, but(cu_seqlens_q=lambda d: one_less(d["cu_seqlens_q"]))),
        ),
        (
            "cu_seqlens_k off by one",
            layouts,
            "lengths",
            changed(lengths, but(cu_seqlens_k=lambda d: one_less(d["cu_seqlens_k"]))),
        ),
        (
            "q and k lengths swapped",
            layouts,
            "lengths",
            changed(lengths, swapped("cu_seqlens_q", "cu_seqlens_k")),
        ),
        (
            "longest q one short",
            layouts,
            "lengths",
            changed(lengths, but(max_seqlen_q=lambda d: d["max_seqlen_q"] - 1)),
        ),
        (
            "cu_seqlens in int64",
            layouts,
            "lengths",
            changed(lengths, but(cu_seqlens_q=lambda d: d["cu_seqlens_q"].long())),
        ),
        ("scale of the 128 alone", layouts, "scale", lambda o: 128**-0.5),
        ("scale missing", layouts, "scale", lambda o: 1.0),
        ("no causal mask", layouts, "mask", lambda: {"causal": False}),
    ]
    found = [Mutation(what, row, *rest) for row in (MI300X, MI350X, FA3) for what, *rest in shared]
    # OPUS converts those (aiter/ops/mha.py, fmha_fwd_bf16_opus_varlen_fwd): nothing is wrong there.
    found = [m for m in found if (m.row, m.what) != (MI350X, "cu_seqlens in int64")]
    found += [
        Mutation("v padded in front", FA2, layouts, "padded", at_the_end),
        Mutation(
            "new v in the unpadded place",
            FA2,
            layouts.VarlenLayout,
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
            aiter_persistent,
            "host_lengths",
            changed(aiter_persistent.host_lengths, lambda h, o: (h[0], h[1], h[0].diff())),
        ),
        Mutation(
            "planned for other lengths",
            PS,
            aiter_persistent,
            "host_lengths",
            changed(
                aiter_persistent.host_lengths,
                lambda h, o: (in_another_order(h[0]), in_another_order(h[1]), h[2].flip(0)),
            ),
        ),
        Mutation(
            "keys one page on",
            PS,
            aiter_persistent,
            "pages",
            changed(aiter_persistent.pages, lambda pages, o: pages.roll(1)),
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
            "cached rows begin too early",
            EXTEND,
            sglang_triton,
            "cached_rows",
            changed(sglang_triton.cached_rows, lambda found, o: (one_less(found[0]), found[1])),
        ),
        Mutation(
            "cached rows in int16",
            EXTEND,
            sglang_triton,
            "cached_rows",
            changed(sglang_triton.cached_rows, lambda found, o: (found[0], found[1].short())),
        ),
        Mutation(
            "new tokens one row on",
            EXTEND,
            layouts,
            "new_rows",
            changed(layouts.new_rows, lambda rows, o: rows.roll(1)),
        ),
        Mutation(
            "scales of q and v swapped",
            CUTLASS_FP8,
            flashinfer,
            "scales",
            changed(flashinfer.scales, swapped("q_scale", "v_scale")),
        ),
        *(
            Mutation(what, CUDNN, cudnn, *rest)
            for what, *rest in (
                (
                    "offsets in tokens",
                    "offsets",
                    changed(
                        cudnn.offsets,
                        but(q=lambda d: d["q"] // (4 * 192), out=lambda d: d["out"] // (4 * 128)),
                    ),
                ),
                ("v's offsets of k", "offsets", changed(cudnn.offsets, but(v=lambda d: d["k"]))),
                (
                    "q and k lengths swapped",
                    "sequence_lengths",
                    changed(cudnn.sequence_lengths, swapped("seq_len_q", "seq_len_kv")),
                ),
                ("causal from the first key", "mask", lambda: {"use_causal_mask": True}),
                ("no causal mask", "mask", dict),
                ("heads before tokens", "shape", heads_first),
            )
        ),
        Mutation(
            "v's descale missing",
            CUDNN_FP8,
            cudnn,
            "fp8_scales",
            changed(cudnn.fp8_scales, but(descale_v=lambda d: torch.ones_like(d["descale_v"]))),
        ),
        Mutation(
            "weights scaled up and not down",
            CUDNN_FP8,
            cudnn,
            "fp8_scales",
            changed(cudnn.fp8_scales, but(descale_s=lambda d: torch.ones_like(d["descale_s"]))),
        ),
    ]
    found += [
        Mutation(what, row, aiter, "forward_arguments", changed(aiter.forward_arguments, change))
        for row in (ASM, CK)
        for what, change in (
            ("scale of the 128 alone", but(softmax_scale=lambda d: 128**-0.5)),
            ("no causal mask", but(is_causal=lambda d: False)),
            ("q and k lengths swapped", swapped("cu_seqlens_q", "cu_seqlens_k")),
        )
    ]
    found += [
        Mutation("short sequences skipped", CK, aiter, "forward_arguments",
                 changed(aiter.forward_arguments, but(min_seqlen_q=lambda d: 40))),
        Mutation("a window of one token", ASM, aiter, "forward_arguments",
                 changed(aiter.forward_arguments, but(window_size_left=lambda d: 1))),
        Mutation("q and k lengths swapped", OPUS, aiter, "opus_lengths",
                 changed(aiter.opus_lengths, swapped("seqstart_q", "seqstart_k"))),
        Mutation("longest q one short", OPUS, aiter, "opus_lengths",
                 changed(aiter.opus_lengths, but(max_seqlen_q=lambda d: d["max_seqlen_q"] - 1))),
        Mutation("scale missing", OPUS, aiter, "opus_lengths",
                 changed(aiter.opus_lengths, but(softmax_scale=lambda d: 1.0))),
        Mutation("seqstart_k off by one", OPUS, aiter, "opus_lengths",
                 changed(aiter.opus_lengths, but(seqstart_k=lambda d: one_less(d["seqstart_k"])))),
    ]  # fmt: skip
    found += [
        Mutation(what, INFER_CUDNN, flashinfer, step, changed(getattr(flashinfer, step), change))
        for what, step, change in (
            ("offsets in tokens", "elements", but(qo_indptr=lambda d: d["qo_indptr"] // (4 * 192))),
            ("k's offsets in tokens", "elements", but(kv_indptr=lambda d: d["kv_indptr"] // (4 * 192))),
            ("v's offsets of k", "elements", but(v_indptr=lambda d: d["kv_indptr"])),
            ("the output's offsets of q", "elements", but(o_indptr=lambda d: d["qo_indptr"])),
            ("q and k lengths swapped", "sequence_lengths", swapped("seq_lens", "seq_lens_q")),
            ("lengths in int64", "sequence_lengths", but(seq_lens=lambda d: d["seq_lens"].long())),
        )
    ]
    found += [
        Mutation(what, row, flashinfer, step, changed(getattr(flashinfer, step), change))
        for row, what, step, change in (
            (TRTLLM, "lengths of q", "trtllm_lengths", but(seq_lens=lambda d: d["cum_seq_lens_q"].diff())),
            (TRTLLM, "lengths in int64", "trtllm_lengths", but(seq_lens=lambda d: d["seq_lens"].long())),
            (TRTLLM, "q and k swapped", "trtllm_lengths", swapped("cum_seq_lens_q", "cum_seq_lens_kv")),
            (TRTLLM, "longest q one short", "trtllm_lengths", but(max_q_len=lambda d: d["max_q_len"] - 1)),
            (TRTLLM, "a sequence too few", "trtllm_lengths", but(batch_size=lambda d: d["batch_size"] - 1)),
            (TRTLLM, "q and k known swapped", "known_lengths", swapped("q_seq_lens_cpu", "kv_seq_lens_cpu")),
            (TRTLLM, "no causal mask", "scoring", but(causal=lambda d: False)),
            (TRTLLM, "scale missing", "product_scales", but(bmm1_scale=lambda d: 1.0)),
            (TRTLLM_FP8, "scales swapped", "product_scales", swapped("bmm1_scale", "bmm2_scale")),
            (TRTLLM_FP8, "v's scale missing", "product_scales", but(bmm2_scale=lambda d: 1.0)),
            (CUTE_FP8, "v's scale missing", "product_scales", but(bmm2_scale=lambda d: 1.0)),
            (CUTE_FP8, "keys off by one", "trtllm_lengths",
             but(cum_seq_lens_kv=lambda d: one_less(d["cum_seq_lens_kv"]))),
        )
    ]  # fmt: skip
    return found


@pytest.mark.parametrize("mutation", mutations(), ids=lambda m: f"{m.row}: {m.what}")
def test_a_wrong_step_is_noticed(mutation, monkeypatch):
    monkeypatch.setattr(mutation.module, mutation.step, mutation.instead)
    name, arch, dtype = mutation.row.split()
    (contract, *_) = (
        c for c in CONTRACTS if (c.op, c.name, c.arch) == ("mha_prefill", name, arch) and dtype in c.texts[0]
    )
    with pytest.raises(Exception) as noticed:
        contract.keep(f"{LONG if mutation.row == PS else CACHED} dtype={dtype}")
    assert not isinstance(noticed.value, Unsupported), noticed.value
