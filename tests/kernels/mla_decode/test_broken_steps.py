"""Steps of adapters that no argument shows by itself, broken: the contract of the adapter is broken, too.

Arguments of calls are broken one by one in tests/kernels/contracts/test_contracts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from kernels.mla_decode import layouts
from kernels.mla_decode.providers import aiter, flash_mla, flashinfer, sglang_triton, tokenspeed_mla
from tests.support.contract_rows import CONTRACTS, RAGGED, ZERO_SPARE
from tests.support.contracts import Contract


def contract(name: str, arch: str, *doubles: str) -> Contract:
    return next(
        c
        for c in CONTRACTS
        if (c.op, c.name, c.arch) == ("mla_decode", name, arch) and c.doubles == (doubles or c.doubles)
    )


def is_kept(of: Contract, text: str) -> bool:
    try:
        of.keep(text)
    except Exception:
        return False
    return True


def shortened(lengths: torch.Tensor) -> torch.Tensor:
    """Lengths of other requests: none longer, the longest much shorter."""
    return (lengths // 2).clamp(min=1)


@pytest.mark.parametrize(
    ("name", "arch", "sizes"),
    [
        ("aiter.asm_persistent", "gfx942", ""),
        ("aiter.asm_persistent", "gfx950", ""),
        ("aiter.asm_persistent@sglang", "gfx942", "kv=fp8 fp8=e4m3fnuz"),
    ],
)
def test_persistent_kernels_of_aiter_need_row_0_finite(
    name: str, arch: str, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands for tokens that are masked, whoever's it is."""
    right = layouts.FiniteCache.__init__

    def as_it_is(self: Any, operands: Any, out: Any) -> None:
        right(self, operands, out)
        self.kv = operands.kv

    monkeypatch.setattr(layouts.FiniteCache, "__init__", as_it_is)
    assert not is_kept(contract(name, arch), f"{ZERO_SPARE} {sizes}")


@pytest.mark.parametrize(
    ("name", "arch", "text"),
    [
        ("aiter.asm", "gfx942", f"{RAGGED} page=16"),
        ("aiter.triton", "gfx942", f"{RAGGED} page=16"),
        ("flashinfer.trtllm", "sm_100", f"{RAGGED} page=64"),
        ("flash_attn.fa3", "sm_90", f"{RAGGED} page=16"),
    ],
)
def test_a_cache_that_is_not_loaded_anew_shows(
    name: str, arch: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = layouts.FiniteCache.load

    def once(self: Any, live: Mapping[str, torch.Tensor]) -> None:
        if not vars(self).get("loaded"):
            self.loaded = True
            right(self, live)

    monkeypatch.setattr(layouts.FiniteCache, "load", once)
    assert not is_kept(contract(name, arch), text)


OTHER = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("name", "arch", "module"),
    [
        ("aiter.asm", "gfx942", aiter),
        ("aiter.asm_persistent", "gfx950", aiter),
        ("flashmla@vllm", "sm_90", flash_mla),
        ("flashinfer.trtllm", "sm_100", flashinfer),
        ("tokenspeed_mla", "sm_100", tokenspeed_mla),
    ],
)
def test_a_query_in_the_other_fp8_shows(
    name: str, arch: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(operands: Any) -> torch.Tensor:
        return torch.empty_like(operands.q, dtype=OTHER[operands.kv.dtype])

    monkeypatch.setattr(module, "query_buffer", other)
    chosen = contract(name, arch)
    assert not is_kept(chosen, next(text for text in chosen.texts if "kv=fp8" in text))


@pytest.mark.parametrize("doubles", [("aiter_attention",), ("aiter_attention", "aiter_attention_019")])
def test_a_schedule_of_other_requests_of_aiter_shows(
    doubles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = aiter.plan

    def stale(operands: Any, *more: Any) -> dict[str, object]:
        lengths = shortened(operands.lengths).tolist()
        return right(operands, *more) | {"seqlens_kv_indptr": layouts.starts(lengths, operands.q.device)}

    monkeypatch.setattr(aiter, "plan", stale)
    assert not is_kept(contract("aiter.asm_persistent", "gfx942", *doubles), f"{RAGGED} page=16")


@pytest.mark.parametrize(
    ("name", "double", "sizes"),
    [
        ("flashmla", "flash_mla_2025", ""),
        ("flashmla", "sgl_flash_mla", "kv=fp8"),
        ("flashmla@vllm", "vllm_attention", "kv=fp8"),
    ],
)
def test_a_schedule_of_other_requests_of_flashmla_shows(
    name: str, double: str, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is made before the first call."""

    def stale(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, lengths, heads: right(self, shortened(lengths), heads)

    for made in (flash_mla._FlashMla, flash_mla._FlashMlaOfVllm):
        monkeypatch.setattr(made, "schedule", stale(made.schedule))
    assert not is_kept(contract(name, "sm_90", double), f"batch=3 ctx=1..300 page=64 {sizes}")


def test_more_splits_than_there_is_room_for_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(operands: Any, most: int, cores: int, uneven: torch.Tensor) -> torch.Tensor:
        return torch.full_like(operands.lengths, 2 * most)

    monkeypatch.setattr(sglang_triton, "splits", too_many)
    assert not is_kept(contract("sglang.triton", "sm_90"), "batch=1 ctx=700")
