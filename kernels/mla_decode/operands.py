"""Operands of an MLA decode: queries and a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.lazy import torch
from kernels.mla_decode.sizes import SCALE, MlaDecodeSizes
from kernels.operands import Operands

SPARE_PAGES = 3

KV_SCALE = {"e4m3fn": 2.0**-5, "e4m3fnuz": 2.0**-4}
"""Scales of an FP8 cache: with them either format ends near 15, three standard deviations above the widest
channel."""


@dataclass
class MlaDecodeOperands(Operands):
    q: torch.Tensor  # bf16 [batch, heads, 576]
    kv: torch.Tensor  # bf16, e4m3fn or e4m3fnuz [pages, page, 576]; slots without a token are NaN
    page_table: torch.Tensor  # int32 [batch, max_pages + 1], padded with the number of a page of NaN
    lengths: torch.Tensor  # int32 [batch] on the device
    host_lengths: list[int]  # the same on the host
    kv_scale: float  # a cached value means kv * kv_scale; 1.0 for bf16
    sizes: MlaDecodeSizes
    scale: float = SCALE
    boundary: str = "core"

    live: ClassVar = ("q", "kv")
    streamed: ClassVar = ("kv",)

    @property
    def without_effect(self) -> frozenset[str]:
        """The weight of a single token is 1, whatever its score."""
        return frozenset({"q"}) if max(self.host_lengths) == 1 else frozenset()

    @property
    def page(self) -> int:
        return self.kv.shape[1]

    @property
    def is_fp8(self) -> bool:
        return self.kv.element_size() == 1

    def far(self) -> MlaDecodeOperands:
        """On pages with numbers so large that places need more than 32 bits."""
        pages, page, width = self.kv.shape
        first = -(-(1 << 32) // (page * width))
        kv = self.kv.new_empty(first + pages, page, width)
        kv[: pages + 1].copy_(torch.tensor(torch.nan, device=kv.device))
        kv[first:] = self.kv
        return self.replaced(kv=kv, page_table=self.page_table + first)

    def token_slots(self, sequence: int) -> torch.Tensor:
        """Rows of kv.view(-1, 576) that hold the sequence's tokens, int64 [length]."""
        length, page = self.host_lengths[sequence], self.page
        pages = self.page_table[sequence, : -(-length // page)].long()
        return (pages[:, None] * page + torch.arange(page, device=pages.device)).flatten()[:length]

    def unused_slots(self) -> torch.Tensor:
        """Rows of kv.view(-1, 576) without a token, int64 [rows]."""
        unused = torch.ones(self.kv.shape[0] * self.page, dtype=torch.bool, device=self.kv.device)
        for sequence in range(len(self.host_lengths)):
            unused[self.token_slots(sequence)] = False
        return unused.nonzero().flatten()

    def split_pages(self, page: int) -> torch.Tensor:
        """The page table of the same cache seen as smaller pages, int32 [batch, max_pages * parts]: a kernel
        with a page that divides the case's takes `kv.view(-1, page, 576)` with this table."""
        parts = self.page // page
        part = torch.arange(parts, dtype=torch.int32, device=self.page_table.device)
        return (self.page_table[:, :, None] * parts + part).flatten(1).contiguous()
