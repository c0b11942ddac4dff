"""Arguments that an engine gives and that no answer shows: flags, index types, what is made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import kernels
from kernels.binding import Function
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


@pytest.mark.parametrize(("sizes", "granularity"), [("heads=16", 16), ("heads=64 kv=fp8", 32)])
def test_aiters_persistent_kernel_as_vllm_calls_it(sizes: str, granularity: int) -> None:
    """rocm_aiter_mla.py, but for what AITER's own test gives one kernel."""
    with prepared("aiter.asm_persistent", "gfx950", f"batch=2 ctx=1..130 {sizes}") as (_, calls):
        plan = calls["get_mla_metadata_v1"].keywords
        assert plan["fast_mode"] and plan["is_causal"] and plan["kv_granularity"] == granularity
        assert not calls["mla_decode_fwd"].keywords.get("intra_batch_mode")
