"""Arguments that an engine gives and that no answer shows: flags, index types, what is made once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import kernels
from kernels.binding import Function
from kernels.mla_decode.layouts import cache_bytes
from kernels.mla_decode.providers import aiter, aiter_triton, sglang_triton, vllm_triton
from kernels.op import Prepared
from kernels.operands import Seeds
from shapes.case import parse
from tests.support.contract_rows import CONTRACTS

OP = kernels.OPS["mla_decode"]


@contextmanager
def prepared(name: str, arch: str, text: str) -> Iterator[tuple[Prepared, dict[str, functools.partial]]]:
    """A row on its double, and the calls that it bound by the names of their functions."""
    contract = next(c for c in CONTRACTS if (c.op, c.name, c.arch) == ("mla_decode", name, arch))
    calls: dict[str, functools.partial] = {}
    right = Function.bind

    def bind(self: Function, *by_position: object, of: object = None, **given: object) -> Callable[[], Any]:
        call = right(self, *by_position, of=of, **given)
        assert isinstance(call, functools.partial)
        calls[self.places[0].rpartition(".")[2]] = call
        return call

    with contract.lent(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Function, "bind", bind)
        sizes = OP.sizes(OP.defaults(arch) | parse(text)[0])
        operands = OP.operands(sizes, Seeds(), "cpu")
        out = None if contract.implementation.allocates else OP.empty_output(sizes, "cpu")
        yield contract.implementation.prepare(operands, out), calls


@pytest.mark.parametrize(("arch", "has_pdl"), [("sm_90", True), ("gfx942", False)])
@pytest.mark.parametrize(("ctx", "uneven"), [("1..130", 1), ("130", 0)])
def test_sglangs_triton_as_sglang_calls_it(arch: str, has_pdl: bool, ctx: str, uneven: int) -> None:
    """Its triton_backend.py: forward_decode and get_num_kv_splits."""
    with prepared("sglang.triton", arch, f"batch=4 ctx={ctx} page=16") as (row, calls):
        given = calls["decode_attention_fwd"].keywords
        scheduled = calls["get_num_kv_splits_triton"]
        lengths = row.operands.lengths
    assert given["use_pdl"] is has_pdl and given["has_mla"] is True
    assert given["kv_indices"].dtype == torch.int64
    assert given["kv_indptr"].dtype == given["num_kv_splits"].dtype == torch.int32
    counts, read, *numbers = scheduled.args
    assert counts is given["num_kv_splits"] and read is lengths
    assert numbers == [4, 1, 16, 1, given["max_kv_splits"], 4] and scheduled.keywords["MAX_NUM_SEQ"] == 256
    assert given["uneven_batch"] is scheduled.keywords["uneven_batch_ptr"]
    assert given["uneven_batch"].dtype == torch.int32 and given["uneven_batch"].tolist() == [uneven]


@pytest.mark.parametrize("name", ["flashinfer.trtllm", "flashinfer.auto"])
def test_counters_are_made_once_and_fit(name: str) -> None:
    with prepared(name, "sm_100", "batch=3 ctx=1..130 heads=16 page=64") as (row, calls):
        counters = calls["trtllm_batch_decode_with_kv_cache_mla"].keywords["multi_ctas_kv_counter_buffer"]
        assert calls["get_trtllm_gen_multi_ctas_kv_counter_bytes"].args == (3, 16, 4)
        row.call()
        assert counters is row.decode.keywords["multi_ctas_kv_counter_buffer"]
    assert counters.numel() == 3 * 16 * 4 and not counters.any()


@pytest.mark.parametrize(("heads", "backend"), [(16, "auto"), (24, "cute-dsl"), (128, "auto")])
def test_flashinfer_tunes_before_anything_is_timed(heads: int, backend: str) -> None:
    with prepared("flashinfer.auto", "sm_100", f"batch=2 ctx=100 heads={heads} page=64") as (row, calls):
        assert calls["autotune"].keywords == {"tune_mode": True}
        given = calls["trtllm_batch_decode_with_kv_cache_mla"].keywords
        assert given["backend"] == backend
        assert row.answer is not None, "the call within was not made"


@pytest.mark.parametrize(("arch", "q_dtype"), [("gfx942", torch.bfloat16), ("gfx950", torch.float8_e4m3fn)])
def test_aiters_persistent_kernel_as_sglang_calls_it(arch: str, q_dtype: torch.dtype) -> None:
    """Its aiter_backend.py: make_mla_decode_meta_data_buffer, make_mla_meta_data, _forward_mla_decode."""
    with prepared("aiter.asm_persistent@sglang", arch, "batch=2 ctx=200..700 kv=fp8") as (_, calls):
        shapes = calls["get_mla_metadata_info_v1"].keywords
        plan = calls["get_mla_metadata_v1"].keywords
        decode = calls["mla_decode_fwd"].keywords
    assert decode["q"].dtype == q_dtype
    assert shapes["q_dtype"] == shapes["kv_dtype"] == plan["dtype_q"] == plan["dtype_kv"]
    assert (shapes["num_kv_splits"], plan["max_split_per_batch"], decode["num_kv_splits"]) == (64, 64, 64)
    assert not shapes["fast_mode"] and not plan["fast_mode"] and plan["is_causal"] is False
    assert shapes["intra_batch_mode"] and plan["intra_batch_mode"] and decode["intra_batch_mode"]
    assert plan["kv_granularity"] == 16


@pytest.mark.parametrize("sizes", ["heads=16", "heads=64 kv=fp8", "heads=8"])
def test_aiters_persistent_kernel_as_vllm_calls_it(sizes: str) -> None:
    """Its rocm_aiter_mla.py."""
    with prepared("aiter.asm_persistent", "gfx950", f"batch=2 ctx=1..130 {sizes}") as (_, calls):
        plan = calls["get_mla_metadata_v1"].keywords
        assert plan["fast_mode"] and plan["is_causal"] and plan["kv_granularity"] == 16
        assert not calls["mla_decode_fwd"].keywords.get("intra_batch_mode")
        heads = calls["mla_decode_fwd"].keywords["q"].shape[1]
        assert (
            plan["num_heads_per_head_k"] == calls["get_mla_metadata_info_v1"].keywords["num_head_qo"] == heads
        )


@pytest.mark.parametrize(
    ("heads", "order"),
    [(8, [i // 2 for i in range(16)]), (12, [*range(12), 0, 1, 2, 3]), (5, [i % 5 for i in range(16)])],
)
def test_vllm_repeats_heads_up_to_16(heads: int, order: list[int]) -> None:
    """get_mla_padded_q and get_mla_unpadded_o."""
    with prepared("aiter.asm_persistent", "gfx942", f"batch=2 ctx=1..130 heads={heads}") as (row, calls):
        row.call()
        given = calls["mla_decode_fwd"].keywords
        assert torch.equal(given["q"], row.operands.q[:, order])
        first = [order.index(head) for head in range(heads)]
        assert torch.equal(row.result(), given["o"][:, first])


# What engines record into graphs: how sequences are split follows from the server's context length.

SHORT = "batch=2 ctx=1..130 page=64"


@pytest.mark.parametrize(
    ("units", "sizes", "splits"),
    [(304, "", 512), (132, "", 264), (304, "model_len=32768", 64), (304, "model_len=2112", 4)],
)
def test_vllms_triton_splits_for_the_context_length(
    units: int, sizes: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """_compute_num_kv_splits of its triton_mla.py; AITER's copy of the kernel is split by what is there."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(Function, "bind", lambda self, **arguments: given.update(arguments))
    monkeypatch.setattr(vllm_triton, "compute_units", lambda device: units)
    operands = OP.operands(OP.sizes(parse(f"{SHORT} {sizes}")[0]), Seeds(), "cpu")
    for row, wanted in ((vllm_triton.VllmTritonMlaDecode(), splits), (aiter_triton.TritonSplit(), 1)):
        row.prepare(operands, OP.empty_output(operands.sizes, "cpu"))
        assert given["num_kv_splits"] == wanted
        assert given["attn_logits"].shape == (2, 16, wanted, 513)
        assert given["attn_logits"].nbytes <= row.workspace(operands.sizes)


@pytest.mark.parametrize(
    ("arch", "units", "sizes", "splits"),
    [
        ("sm_90", 132, "", 256),
        ("gfx942", 304, "", 256),
        ("sm_90", 132, "model_len=2112", 128),
        ("sm_90", 132, "model_len=130", 8),
    ],
)
def test_sglangs_triton_splits_for_the_context_length(
    arch: str, units: int, sizes: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """_mla_decode_kv_splits_cap of its triton_backend.py."""
    monkeypatch.setattr(sglang_triton, "compute_units", lambda device: units)
    with prepared("sglang.triton", arch, f"{SHORT} {sizes}") as (row, calls):
        given = calls["decode_attention_fwd"].keywords
        assert given["max_kv_splits"] == calls["get_num_kv_splits_triton"].args[6] == splits
        assert given["attn_logits"].shape == (2, 16, splits, 512)
        workspace = sglang_triton.SglangTritonMlaDecode().workspace(row.operands.sizes)
        assert given["attn_logits"].nbytes + given["attn_lse"].nbytes <= workspace


@pytest.mark.parametrize(
    ("name", "sizes", "entries"),
    [
        ("aiter.asm", "", 2 * 163_840),
        ("aiter.asm", "model_len=512", 512 * 512),
        ("aiter.asm_persistent", "model_len=130", 1024 * 130),
    ],
)
def test_aiter_is_given_a_list_as_long_as_the_engines(name: str, sizes: str, entries: int) -> None:
    with prepared(name, "gfx942", f"{SHORT} {sizes}") as (row, calls):
        given = calls["mla_decode_fwd"].keywords
        assert given["kv_indices"].shape == (entries,)
        assert given["kv_indptr"][-1] == row.operands.lengths.sum()


@pytest.mark.parametrize("model_len", [9216, 32_768, 163_840])
def test_entries_left_away_change_no_number_of_splits(model_len: int) -> None:
    """By the formula of AITER's get_meta_param, as its double has it."""
    with prepared("aiter.asm", "gfx950", SHORT):
        from aiter._double.splits import busiest
    for units, requests, batch in itertools.product((256, 304), aiter.REQUESTS.values(), range(1, 513)):
        sizes = OP.sizes({"batch": batch, "ctx": "100", "model_len": model_len})
        ours, engines = aiter.listed(sizes, requests), requests * model_len
        assert busiest(batch, ours / batch, units) == busiest(batch, engines / batch, units), batch


def test_flash_attention_3_as_vllm_records_it() -> None:
    """flashattn_mla.py: the schedule is made in each step, the call once."""
    with prepared("flash_attn.fa3@vllm", "sm_90", SHORT) as (_, calls):
        schedule = calls["get_scheduler_metadata"].keywords
        call = calls["flash_attn_varlen_func"].keywords
    assert (schedule["num_splits"], schedule["max_seqlen_k"]) == (32, 130)
    assert (call["num_splits"], call["max_seqlen_k"]) == (32, 163_840)


@pytest.mark.parametrize(
    ("name", "sizes", "splits"),
    [
        ("flash_attn.fa3", "ctx=1..64", 1),
        ("flash_attn.fa3", "ctx=2112", 33),
        ("flash_attn.fa3@vllm", "ctx=2112", 32),
        ("flash_attn.fa3@sglang", "ctx=2112", 128),
        ("flash_attn.fa3@sglang", "ctx=2112 heads=128", 66),
        ("flash_attn.fa3@sglang", "ctx=2112 model_len=2112", 33),
    ],
)
def test_room_for_the_splits_of_flash_attention_3(name: str, sizes: str, splits: int) -> None:
    """num_splits_heuristic on 132 units: a call allocates as many partial results for each sequence."""
    (row,) = (i for i in kernels.implementations("mla_decode") if i.name == name)
    of_case = OP.sizes(parse(f"batch=4 {sizes}")[0])
    partial = 4 * of_case.heads * splits * 513 * 4
    assert row.workspace(of_case) == partial + cache_bytes(of_case)


@pytest.mark.parametrize(("sizes", "tokens"), [("", 163_840), ("model_len=1000", 1024)])
@pytest.mark.parametrize(
    ("name", "arch", "more", "table", "longest"),
    [
        ("flash_attn.fa3@sglang", "sm_90", "", "page_table", None),
        ("flashinfer.trtllm", "sm_100", "", "block_tables", "max_seq_len"),
        ("flashinfer.cute_dsl", "sm_100", "", "block_tables", "max_seq_len"),
        ("flashinfer.auto", "sm_100", "", "block_tables", "max_seq_len"),
        ("tokenspeed_mla", "sm_100", "kv=fp8", "block_tables", "max_seq_len"),
        ("vllm.cutlass_mla", "sm_100", "", 6, None),
    ],
)
def test_tables_have_room_for_the_context_length(
    name: str, arch: str, more: str, table: str | int, longest: str | None, sizes: str, tokens: int
) -> None:
    with prepared(name, arch, f"{SHORT} {more} {sizes}") as (row, calls):
        arguments = [{**call.keywords, **dict(enumerate(call.args))} for call in calls.values()]
        (given,) = (of_call for of_call in arguments if table in of_call)
        assert given[table].shape == (2, tokens // 64)
        if longest:
            assert given[longest] == row.operands.sizes.model_len


def test_a_case_says_the_context_length_only_where_it_is_not_the_models_own():
    """Records and stored configurations from before there was that size are found by such texts."""
    op = kernels.OPS["mla_decode"]
    given = {"batch": 8, "ctx": "3201..3999", "kv": "fp8"}
    assert "model_len" not in op.case(given).text
    assert "model_len" not in op.said(op.sizes(given))
    assert "model_len=32768" in op.case({**given, "model_len": 32768}).text
