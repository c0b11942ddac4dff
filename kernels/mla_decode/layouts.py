"""Layouts of the paged cache (index pointers, page lists, padded tables, finite caches) and of the query.

Those of the cache are stationary: they depend on the page table and on lengths alone, and are made before
timing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kernels.mla_decode.operands import MlaDecodeOperands
from kernels.mla_decode.sizes import LATENT, WIDTH, MlaDecodeSizes
from kernels.op import Prepared

if TYPE_CHECKING:
    import torch

SLACK = 256
"""Entries that stand behind the last one of a list: kernels fetch whole blocks of it."""


def page_counts(operands: MlaDecodeOperands, page: int) -> list[int]:
    return [math.ceil(length / page) for length in operands.host_lengths]


def starts(counts: Iterable[int], device: torch.device) -> torch.Tensor:
    """Where each sequence begins in a list of all: int32 [batch + 1], from 0 to their number."""
    import torch

    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)


def query_starts(operands: MlaDecodeOperands) -> torch.Tensor:
    """One query token for each sequence: int32 [batch + 1]."""
    return starts([1] * len(operands.host_lengths), operands.q.device)


def page_starts(operands: MlaDecodeOperands, page: int) -> torch.Tensor:
    """int32 [batch + 1], of pages of that many tokens."""
    return starts(page_counts(operands, page), operands.q.device)


def page_list(operands: MlaDecodeOperands, page: int, least: int = 0) -> torch.Tensor:
    """The pages of all sequences one after the other, int32 [pages]: the numbers that they have where the
    cache is seen as pages of that many tokens. A list of at least so many entries goes on with the first
    one, which also stands SLACK times behind it in memory."""
    import torch

    table = operands.split_pages(page)
    pages = [row[:count] for row, count in zip(table, page_counts(operands, page), strict=True)]
    missing = max(0, least - sum(map(len, pages)))
    listed = torch.cat([*pages, table[0, :1].expand(missing + SLACK)])
    return listed[:-SLACK]


def pages_of(kv: torch.Tensor, page: int) -> torch.Tensor:
    """The cache [pages, page, 576] with pages of that many tokens, which divide its own."""
    return kv.view(-1, page, WIDTH)


def one_head(kv: torch.Tensor) -> torch.Tensor:
    """[pages, page, 1, 576]: one head that all query heads share."""
    return kv[:, :, None]


def full_pages(operands: MlaDecodeOperands, page: int, multiple: int = 1, *, tokens: int = 0) -> torch.Tensor:
    """A page table without the page of NaN: int32 [batch, width], width the most pages of a sequence, or
    those of so many tokens, rounded up to a multiple; places that no token needs repeat the sequence's first
    page."""
    import torch

    table, counts = operands.split_pages(page), page_counts(operands, page)
    width = math.ceil(max(*counts, math.ceil(tokens / page)) / multiple) * multiple
    table = torch.nn.functional.pad(table, (0, max(0, width - table.shape[1])))[:, :width]
    needed = torch.arange(width, device=table.device) < starts(counts, table.device).diff()[:, None]
    return torch.where(needed, table, table[:, :1]).contiguous()


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and the rope part of q or of the cache [..., 576]: views [..., 512] and [..., 64]."""
    return tensor[..., :LATENT], tensor[..., LATENT:]


def cache_bytes(sizes: MlaDecodeSizes) -> int:
    """Of a copy of the cache, about: a page more or less."""
    element = 1 if sizes.kv == "fp8" else 2
    return (sizes.used_pages + 4) * sizes.page * WIDTH * element


class FiniteCache(Prepared):
    """Keeps a copy of the cache, `kv`, whose unused slots are zeros, not NaN: for kernels that multiply whole
    pages by weights that a mask made 0. Engines give them pools whose every page is finite."""

    operands: MlaDecodeOperands

    def __init__(self, operands: MlaDecodeOperands, out: torch.Tensor | None) -> None:
        import torch

        super().__init__(operands, out)
        self.kv = torch.empty_like(operands.kv)
        used = [operands.token_slots(i) for i in range(len(operands.host_lengths))]
        unused = torch.ones(self.kv.numel() // WIDTH, dtype=torch.bool, device=self.kv.device)
        unused[torch.cat(used)] = False
        self.unused = unused.nonzero().flatten()
        self.load(operands.live_tensors())

    def inputs(self) -> Mapping[str, torch.Tensor]:
        return {"q": self.operands.q, "kv": self.kv}

    def load(self, live: Mapping[str, torch.Tensor]) -> None:
        import torch

        super().load(live)
        # As bytes, because indexing knows no FP8: zero is all bits 0.
        slots = self.kv.view(torch.uint8).flatten(0, 1)
        slots.index_fill_(0, self.unused, 0)


def one_token(q: torch.Tensor) -> torch.Tensor:
    """[batch, 1, heads, 576]: one query token per sequence."""
    return q[:, None]


def query_buffer(operands: MlaDecodeOperands) -> torch.Tensor:
    """What a kernel reads whose q has the cache's dtype: q itself, or on an FP8 cache room for it in the
    cache's format."""
    import torch

    if operands.kv.element_size() > 1:
        return operands.q
    return torch.empty_like(operands.q, dtype=operands.kv.dtype)


class OneToken(Prepared):
    """Of a library that allocates its answer, [batch, 1, heads, 512]; `call` keeps that."""

    answer: torch.Tensor | None = None

    def result(self) -> torch.Tensor:
        assert self.answer is not None, "nothing was called"
        return self.answer[:, 0]
