"""The forms in which libraries take a paged latent cache."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.mla_decode import layouts
from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.operands import Seeds
from shapes.case import parse

OP = kernels.OPS["mla_decode"]
RAGGED = "batch=3 ctx=1..130"


def operands_of(text: str, live: int = 0) -> MlaDecodeOperands:
    return OP.operands(OP.sizes(parse(text)[0]), Seeds(live=live), "cpu")


@pytest.mark.parametrize("kv", ["bf16", "fp8", "fp8 fp8=e4m3fnuz"])
def test_a_finite_cache_holds_the_same_tokens_and_zeros_elsewhere(kv: str) -> None:
    text = f"{RAGGED} page=16 kv={kv}"
    prepared_on = operands_of(text)

    class Kept(layouts.FiniteCache):
        def call(self) -> None: ...

    kept = Kept(prepared_on, None)
    for live in (0, 1):
        operands = operands_of(text, live)
        kept.load(operands.live_tensors())
        given, rows = operands.kv.view(-1, 576).float(), kept.kv.view(-1, 576).float()
        assert torch.equal(rows, given.nan_to_num(0.0))
        assert torch.equal(prepared_on.q, operands.q)
    assert not torch.isfinite(prepared_on.kv.float()).all()  # the op's own cache is not touched


@pytest.mark.parametrize("text", [f"{RAGGED} page=1", f"{RAGGED} page=48", "batch=2 ctx=64 page=64"])
def test_a_table_and_a_list_can_be_longer(text: str) -> None:
    operands = operands_of(text)
    page = operands.page
    table, wide = (layouts.full_pages(operands, page, tokens=n) for n in (0, 1000))
    assert wide.shape[1] == -(-1000 // page) > table.shape[1]
    assert torch.equal(wide[:, : table.shape[1]], table)
    assert torch.equal(wide[:, table.shape[1] :], table[:, :1].expand(-1, wide.shape[1] - table.shape[1]))
    listed, long = layouts.page_list(operands, page), layouts.page_list(operands, page, 999)
    assert long.shape == (999,) and torch.equal(long[: len(listed)], listed)
    assert set(long[len(listed) :].tolist()) == {int(listed[0])}
    assert layouts.page_list(operands, page, 1).shape == listed.shape


@pytest.mark.parametrize("text", [f"{RAGGED} page=1", f"{RAGGED} page=48", "batch=2 ctx=64 page=64"])
def test_the_forms_of_a_page_table_name_the_same_tokens(text: str) -> None:
    operands = operands_of(text)
    for page in {1, operands.page}:
        starts, listed = layouts.page_starts(operands, page).tolist(), layouts.page_list(operands, page)
        last, table = layouts.last_page_lengths(operands, page), layouts.full_pages(operands, page, 8)
        assert starts[-1] == len(listed) and table.shape[1] % 8 == 0
        for i in range(len(operands.host_lengths)):
            pages = listed[starts[i] : starts[i + 1]]
            slots = (pages.long()[:, None] * page + torch.arange(page)).flatten()
            length = (len(pages) - 1) * page + int(last[i])
            assert torch.equal(slots[:length], operands.token_slots(i))
            assert torch.equal(table[i, : len(pages)], pages)
            assert set(table[i, len(pages) :].tolist()) <= {int(pages[0])}
