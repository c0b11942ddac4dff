"""Each layout step of an adapter of MLA decode, broken: the contract test of that adapter then fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.binding import keywords
from kernels.mla_decode import layouts
from kernels.mla_decode.providers import (
    aiter,
    aiter_triton,
    flash_attn,
    flash_mla,
    flashinfer,
    sglang_triton,
    vllm_triton,
)
from tests.doubles import lent
from tests.support.contract_mla import CONTRACTS, RAGGED, Contract, reports


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
        return schedule(operands, dtype, layout | {"kv_indptr": layouts.starts(lengths, operands.q.device)})

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

            q, k = before.q[:, None], layouts.pages_of(before.kv, flash_mla.PAGE)[:, :, None]
            table = layouts.full_pages(before, flash_mla.PAGE)
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


def kv_scales_dropped(right: Callable) -> Callable:
    def broken(function: Callable, needed: dict, wished: dict | None = None) -> dict:
        return keywords(function, needed | dict.fromkeys(("k_scale", "v_scale"), 1.0), wished)

    return broken


def more_splits_than_room(splits: Callable) -> Callable:
    return lambda operands, most, cores: splits(operands, most, cores).fill_(2 * most)


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
    mutation(nothing_loaded, layouts.FiniteCache, "load", "aiter.triton", f"{RAGGED} page=16"),
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
        layouts.FiniteCache,
        "load",
        "flashinfer.cutlass",
        "batch=3 ctx=1..130 heads=128 page=64",
    ),
    mutation(kv_scale_one, flashinfer, "product_scales", "flashinfer.trtllm", f"{RAGGED} page=64 kv=fp8"),
    mutation(
        scale_of_values_one, flashinfer, "product_scales", "flashinfer.trtllm", f"{RAGGED} page=64 kv=fp8"
    ),
    mutation(table_not_split, flashinfer, "full_pages", "flashinfer.trtllm", "batch=3 ctx=1..300 page=128"),
    mutation(rope_first, flash_attn, "parts", "flash_attn.fa3", f"{RAGGED} page=16"),
    mutation(without_scale, flash_attn, "keywords", "flash_attn.fa3", f"{RAGGED} page=16"),
    mutation(last_sequence_for_all, flash_attn, "full_pages", "flash_attn.fa3", f"{RAGGED} page=16"),
    mutation(rope_first, flash_attn, "parts", "flash_attn.fa4", f"{RAGGED} page=16"),
    mutation(without_scale, flash_attn, "keywords", "flash_attn.fa4", f"{RAGGED} page=16"),
    mutation(one_less, sglang_triton, "page_starts", "sglang.triton", f"{RAGGED} page=16"),
    mutation(pages_not_split, sglang_triton, "page_list", "sglang.triton", f"{RAGGED} page=16"),
    mutation(rope_read_as_values, sglang_triton, "tokens", "sglang.triton", f"{RAGGED} page=16"),
    mutation(scale_of_576, sglang_triton, "keywords", "sglang.triton", f"{RAGGED} page=16"),
    mutation(kv_scales_dropped, sglang_triton, "keywords", "sglang.triton", f"{RAGGED} page=16 kv=fp8"),
    mutation(more_splits_than_room, sglang_triton, "splits", "sglang.triton", "batch=1 ctx=700"),
)


@pytest.mark.parametrize("mutated", MUTATIONS, ids=lambda m: m.id)
def test_a_broken_step_shows(mutated: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the library, or an output that the judge finds wrong."""
    for module in (vllm_triton, sglang_triton):
        monkeypatch.setattr(module, "compute_units", lambda device: 4)
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
